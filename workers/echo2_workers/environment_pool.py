"""The environment processes of a worker: groups are spread over them.

Promise: a group whose code raises fails alone; code that blocks for `hang_timeout_s`, or
ends its process, costs its own group and nothing else: the others of that process are
played again in a fresh one. Every process has an owner here that notices its end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path

from echo2.errors import ConfigError
from echo2.net.pipe import spawn
from echo2.net.tasks import OwnedTasks
from echo2_workers.environment import About
from echo2_workers.environment_process import (
    HOST,
    START_TIMEOUT_S,
    EnvironmentSlot,
    HostedGroup,
    no_engine,
)
from echo2_workers.playing import GenerateCall, GroupJob, GroupPlayed
from echo2_workers.replaying import GroupReplayed, ReplayJob


async def describe_environment(name: str, *, folder: Path, import_paths: Sequence[Path]) -> About:
    """What an environment's class says, imported in a process of its own. ConfigError."""
    marker = folder / "environment-describe.marker"
    child = await spawn(HOST, [str(marker), *map(str, import_paths)])
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await child.pipe.send({"op": "describe", "name": name})
            received = await child.pipe.receive()
    except TimeoutError:
        raise ConfigError(
            f"environment.name = {name!r}: its import took more than {START_TIMEOUT_S:g} s"
        ) from None
    finally:
        child.kill()
        await child.stop(1.0)
        marker.unlink(missing_ok=True)
    if received is None:
        raise ConfigError(f"environment.name = {name!r}: its import ended the process")
    header, _ = received
    if header["op"] == "failed":
        raise ConfigError(header["text"])
    return About(str(header["version"]), bool(header["replays"]))


class EnvironmentPool:
    """`on_fatal(text)` is called when no process can be made to work."""

    def __init__(
        self,
        *,
        name: str,
        processes: int,
        hang_timeout_s: float,
        folder: Path,
        import_paths: Sequence[Path],
        on_fatal: Callable[[str], None],
    ) -> None:
        self._tasks = OwnedTasks("environment")
        self._numbers = itertools.count(1)
        self._slots = [
            EnvironmentSlot(
                name=name,
                hang_timeout_s=hang_timeout_s,
                marker_path=folder / f"environment-{index}.marker",
                import_paths=import_paths,
                on_fatal=on_fatal,
            )
            for index in range(processes)
        ]

    async def start(self, settings: str, assets: Path | None) -> None:
        """Load the environment everywhere. Raises ConfigError when it cannot be."""
        for slot in self._slots:
            self._tasks.start(slot.keep(settings, assets), name="process")
        for slot in self._slots:
            await slot.wait_ready()

    async def run_group(self, job: GroupJob, generate: GenerateCall) -> GroupPlayed:
        """Play a group. Raises EnvironmentError_, or EngineError when `generate` did."""
        group = HostedGroup(next(self._numbers), job, generate)
        played = await self._least_busy().run(group)
        assert isinstance(played, GroupPlayed)
        return played

    async def replay_group(self, job: ReplayJob) -> GroupReplayed:
        """Play a group again from its tokens. Raises EnvironmentError_."""
        replayed = await self._least_busy().run(HostedGroup(next(self._numbers), job, no_engine))
        assert isinstance(replayed, GroupReplayed)
        return replayed

    def _least_busy(self) -> EnvironmentSlot:
        return min(self._slots, key=lambda slot: len(slot.groups))

    async def stop(self) -> None:
        await self._tasks.stop()
