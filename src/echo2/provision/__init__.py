"""Machines that are started and stopped for a run: what a provisioner is, and those that ship.

A provisioner knows how to start a machine of an offer, and how to stop it. Which, when and how many
is decided by `core.activation_desk`; what is written down, tried again, and stopped when the
coordinator is gone, by `provision.keeper`, in whose process a provisioner lives.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from echo2.config import Config
from echo2.config_offers import OfferTable
from echo2.errors import ConfigError, Echo2Error


class ProvisionError(Echo2Error):
    """A machine could not be started or stopped; the text says why."""


@dataclass(frozen=True, slots=True)
class MachineOrder:
    """Start a machine of `offer` that runs `echo2 worker --join TOKEN`. `worker` is the name that
    its worker will have, and by which it is found again; `token` lets one worker in, once."""

    worker: str
    offer: OfferTable
    token: str = field(repr=False)
    run_dir: Path


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine that may be there. `id`: what its start returned, "" if that never came."""

    worker: str
    offer: str
    id: str
    run_dir: Path


class Provisioner(Protocol):
    """May raise ProvisionError; whatever else it raises counts as one, with its traceback in the
    log. A call that takes longer than its time-out is cancelled."""

    async def start(self, order: MachineOrder) -> str:
        """Returns the machine's id, or "". After an error `stop` is called."""

    async def stop(self, machine: Machine) -> None:
        """Return when the machine is off, also if it never was on. It may be called for a start
        that was cut short."""

    async def list(self) -> Collection[str] | None:
        """The workers whose machines are there; None if that cannot be told."""


def load_provisioner(config: Config) -> Provisioner:
    """The one that [provisioner] names. A class of the user's is called with the Config. Raises
    ConfigError."""
    from echo2.provision.command import CommandProvisioner
    from echo2.provision.skypilot import SkyPilotProvisioner

    kind = config.provisioner.kind
    if kind == "command":
        return CommandProvisioner(config)
    if kind == "skypilot":
        return SkyPilotProvisioner(config)
    module, _, name = kind.partition(":")
    try:
        made = getattr(importlib.import_module(module), name)(config)
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f'provisioner.kind = "{kind}" cannot be made ({type(error).__name__}: {error}); it is '
            '"package.module:Class", importable where the coordinator runs, and takes the Config'
        ) from error
    for method in ("start", "stop", "list"):
        if not callable(getattr(made, method, None)):
            raise ConfigError(f'provisioner.kind = "{kind}" has no method {method}')
    provisioner: Provisioner = made
    return provisioner
