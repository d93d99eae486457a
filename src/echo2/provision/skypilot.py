"""Machines by SkyPilot (extra "skypilot"): a cluster per worker, named after it.

`provisioner.task` is the YAML of a task whose `run` is `echo2 worker --join $ECHO2_TOKEN`; where
the offer's machine is had, is written there or in a file TASK.OFFER.yaml beside it. Its calls block
and go to threads; they are made as SkyPilot's Python API documents them (sky.launch, sky.down and
sky.status return a request id, sky.get its result).
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from echo2.config import Config
from echo2.errors import ConfigError
from echo2.provision import Machine, MachineOrder, ProvisionError


class SkyPilotProvisioner:
    """Raises ConfigError when made without SkyPilot, or without the task's file."""

    def __init__(self, config: Config) -> None:
        self._task = Path(config.provisioner.task)
        if not self._task.is_file():
            raise ConfigError(f"provisioner.task = {self._task}: there is no such file")
        try:
            self._sky: Any = importlib.import_module("sky")
        except ImportError as error:
            raise ConfigError(
                'provisioner.kind = "skypilot" needs SkyPilot where the coordinator runs: '
                "pip install 'echo2[skypilot]'"
            ) from error

    async def start(self, order: MachineOrder) -> str:
        await asyncio.to_thread(self._launch, order)
        return order.worker

    def _launch(self, order: MachineOrder) -> None:
        own = self._task.with_name(f"{self._task.stem}.{order.offer.name}.yaml")
        task = self._sky.Task.from_yaml(str(own if own.is_file() else self._task))
        task.update_envs({"ECHO2_TOKEN": order.token, "ECHO2_WORKER": order.worker})
        self._sky.get(self._sky.launch(task, cluster_name=order.worker))

    async def stop(self, machine: Machine) -> None:
        await asyncio.to_thread(self._down, machine.worker)

    def _down(self, worker: str) -> None:
        if worker not in self._clusters([worker]):
            return
        self._sky.get(self._sky.down(worker))
        if worker in self._clusters([worker]):
            raise ProvisionError(f"SkyPilot shows cluster {worker} still after sky.down")

    async def list(self) -> Collection[str] | None:
        return await asyncio.to_thread(self._clusters, None)

    def _clusters(self, names: Sequence[str] | None) -> set[str]:
        found = self._sky.get(self._sky.status(cluster_names=None if names is None else [*names]))
        return {str(_field(cluster, "name")) for cluster in found}


def _field(record: Any, name: str) -> Any:
    """A record is a dict or an object, by release."""
    return record[name] if isinstance(record, dict) else getattr(record, name)
