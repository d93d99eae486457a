"""A run over several hosts: coordinator, learner and origin at one place, each worker at another.

The hosts are network namespaces of benchmarks/wan.py. Processes that end are started again with
their own command, as a supervisor would.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .fleet import Fleet, processes_below

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
try:
    wan_module: Any = importlib.import_module("wan")
finally:
    sys.path.remove(str(BENCHMARKS))

HEAD = "head"
"""The host of coordinator, learner and origin."""
ENGINE = "echo2_workers.engine_host"
NET = """
[net]
host = "{address}"

[environment]
name = "steady:Steady"
"""
STEADY = """
import asyncio
from echo2_workers.environments.addition import Addition

class Steady(Addition):
    name, version = "steady", "1"

    async def rollout(self, task, generate):
        await asyncio.sleep(1.0)
        return await super().rollout(task, generate)
"""
"""A rollout takes a second at least: how many steps a run does in a minute is known."""


def missing() -> str:
    """Why there can be no hosts here; "" if there can."""
    absent: dict[str, str] = wan_module.absent()
    return "; ".join(f"{part}: {why}" for part, why in absent.items() if part != "tun")


class WanFleet(Fleet):
    """As a context manager: the hosts are there from entering to leaving."""

    def __init__(self, folder: Path, *, steps: int, workers: int) -> None:
        super().__init__(folder, steps=steps)
        self.workers = [f"w-{number}" for number in range(1, workers + 1)]
        links = [wan_module.HostLink(name, 200, 200) for name in (HEAD, *self.workers)]
        self.wan = wan_module.Wan(links)
        self.commands: dict[str, tuple[str, ...]] = {}
        self.ended: list[tuple[str, int]] = []
        """Every process that ended before its time, and its exit code."""

    def __enter__(self) -> WanFleet:
        self.wan.__enter__()
        (self.folder / "steady.py").write_text(STEADY)
        with self.config.open("a") as config:
            config.write(NET.format(address=self.wan.address(HEAD)))
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            self.wan.close()

    def popen(self, name: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        found: subprocess.Popen[bytes] = self.wan.popen(self.host_of(name), argv, **options)
        return found

    def host_of(self, name: str) -> str:
        return name if name in self.workers else HEAD

    def start(self, command: str, *options: str, name: str = "") -> subprocess.Popen[bytes]:
        self.commands[name or command] = (command, *options)
        return super().start(command, *options, name=name)

    def supervise(self) -> None:
        """Start again what has ended, the learner to resume. Not what came to its end."""
        for name, process in list(self.processes.items()):
            code = process.poll()
            if code is None or code == 0:
                continue
            self.ended.append((name, code))
            command, *options = self.commands[name]
            if name == "learner" and "--resume" not in options:
                options.append("--resume")
            self.start(command, *options, name=name)

    @property
    def over(self) -> bool:
        return self.processes["coordinator"].poll() == 0

    def send(self, name: str, number: signal.Signals) -> bool:
        """To a process, or with `engine:WORKER` to the engine of a worker; False when there is
        none at the moment."""
        part, _, worker = name.partition(":")
        process = self.processes[worker or part]
        if process.poll() is not None:
            return False
        pids = processes_below(process.pid, ENGINE) if worker else [process.pid]
        with contextlib.suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, number)
            return bool(pids)
        return False

    def stop(self) -> None:
        """All of them, the stopped too; what runs on the hosts is killed with them after."""
        for name in self.workers:
            if name in self.processes:
                self.send(f"engine:{name}", signal.SIGCONT)
        super().stop()
