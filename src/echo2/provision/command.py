"""Machines by commands of the user's: programs with arguments, without a shell between."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Final

from echo2.config import Config
from echo2.provision import Machine, MachineOrder, ProvisionError

OUTPUT_MAX_BYTES: Final = 1 << 20
LINES_TOLD: Final = 5
LINE_CHARACTERS: Final = 300


class CommandProvisioner:
    """Each command has {offer}, {worker}, {token}, {id} and {run_dir} filled in where they are
    known, and the same as ECHO2_OFFER and so on in its environment: other users of this machine see
    arguments, and not these."""

    def __init__(self, config: Config) -> None:
        self._table = config.provisioner
        self._offers = {offer.name: offer for offer in config.offers}

    async def start(self, order: MachineOrder) -> str:
        values = {
            "worker": order.worker,
            "offer": order.offer.name,
            "token": order.token,
            "id": "",
            "run_dir": str(order.run_dir),
        }
        lines = (await _says(self._table.start_command, values)).split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[:256]

    async def stop(self, machine: Machine) -> None:
        values = {
            "worker": machine.worker,
            "offer": machine.offer,
            "token": "",
            "id": machine.id,
            "run_dir": str(machine.run_dir),
        }
        await _says(self._table.stop_command, values)

    async def list(self) -> Collection[str] | None:
        if not self._table.list_command:
            return None
        values = dict.fromkeys(("worker", "offer", "token", "id", "run_dir"), "")
        return set((await _says(self._table.list_command, values)).split())


def filled(command: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """The command with each {name} of `values` in its arguments."""
    found = []
    for argument in command:
        for name, value in values.items():
            argument = argument.replace(f"{{{name}}}", value)
        found.append(argument)
    return found


async def _says(command: Sequence[str], values: Mapping[str, str]) -> str:
    """What a command prints that ends with code 0. Its output goes to files: what it leaves running
    may hold them open, and nothing waits for that."""
    arguments = filled(command, values)
    environment = {f"ECHO2_{name.upper()}": value for name, value in values.items() if value}
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        except OSError as error:
            raise ProvisionError(
                f"{arguments[0]} cannot be started ({error.strerror}, in {Path.cwd()})"
            ) from error
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            raise
        if code:
            how = f"code {code}" if code > 0 else f"signal {-code}"
            raise ProvisionError(f"{arguments[0]} ended with {how}: {_last_lines(err)}")
        return _text(out)


def _text(file: IO[bytes]) -> str:
    """Its end, if it is too long."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - OUTPUT_MAX_BYTES))
    return file.read().decode("utf-8", "replace")


def _last_lines(file: IO[bytes]) -> str:
    lines = [line.strip()[:LINE_CHARACTERS] for line in _text(file).splitlines() if line.strip()]
    return " | ".join(lines[-LINES_TOLD:]) or "it said nothing on stderr"
