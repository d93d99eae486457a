"""How fast this machine's engine samples: the worker's own parts, busy in every slot.

    start --> install --> `sample` so many groups, or on and on --> install ... --> stop

A slot that has finished a group begins the next one at once, as long as there is one to begin, so
the engine is as full as it can be. Groups come from `task_of`, in turn. No coordinator and no
network.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from echo2.config import Config
from echo2.config_vllm import precision_of
from echo2.core.worker_events import Event, GroupDone
from echo2.errors import EngineError
from echo2.messages import GroupResult, LeaseGranted, VersionAnnounced
from echo2.types import GroupId, LeaseId, Task
from echo2_workers.canary import tolerance_of
from echo2_workers.engine_process import EngineHandle, InstallOrder
from echo2_workers.groups import Environments, Groups
from echo2_workers.installing import Installed
from echo2_workers.parts import make_engine, make_environments


@dataclass(frozen=True, slots=True)
class Finished:
    """A group, and seconds since the clock's beginning at which it was done."""

    at_s: float
    task: Task
    result: GroupResult

    @property
    def tokens(self) -> int:
        """Sampled ones, of all trajectories."""
        return sum(header.num_sampled for header in self.result.trajectories)


@dataclass(slots=True)
class BusyWorker:
    """One engine with its environments. `finished` grows while it samples."""

    config: Config
    folder: Path
    versions: Path
    task_of: Callable[[int], Task]
    import_paths: Sequence[Path]
    number: int = 0
    finished: list[Finished] = field(default_factory=list)
    trouble: str = ""
    _announced: VersionAnnounced | None = None
    _count: int = 0
    _left: int | None = 0
    _tasks: dict[LeaseId, Task] = field(default_factory=dict)
    _player: Groups | None = None
    _engine: EngineHandle | None = None
    _environments: Environments | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _stopping: bool = False

    async def start(self, model: Path) -> None:
        """EngineError, ConfigError or EnvironmentError_ when a part does not come up."""
        config = self.config
        self.folder.mkdir(parents=True, exist_ok=True)
        environments = self._environments = make_environments(
            config, folder=self.folder, import_paths=self.import_paths, on_fatal=self._failed
        )
        engine = self._engine = make_engine(config, on_died=self._failed)
        await environments.start(json.dumps(config.environment.settings), model)
        await engine.start(model)
        self._player = Groups(
            environments,
            engine=lambda: engine,
            rollout_timeout_s=config.environment.rollout_timeout_s,
            post=self._post,
        )

    async def install(self, announced: VersionAnnounced) -> Installed:
        """Groups in flight go on as `worker.on_update` says."""
        worker = self.config.worker
        assert self._engine is not None
        installed = await self._engine.install(
            InstallOrder(
                announced=announced,
                previous=self._announced,
                folder=self.versions,
                mode=worker.on_update,
                tolerance=tolerance_of(precision_of(self.config), worker.canary_max_diff),
            )
        )
        self._announced = announced
        return installed

    def sample(self, count: int | None = None) -> None:
        """Begin `count` groups, a slot's next one when its last is done; None: on and on until
        `rest`. All that was begun before must have ended."""
        slots = self.config.worker.slots
        first = slots if count is None else min(slots, count)
        self._left = None if count is None else count - first
        for _ in range(first):
            self._begin()

    @property
    def is_idle(self) -> bool:
        """Nothing is left to sample."""
        return not self._tasks

    async def until(self, enough: Callable[[], bool], *, deadline_s: float) -> None:
        """Returns when `enough`, or at that moment of the clock. EngineError when the engine or
        the environments failed."""
        while not enough() and not self.trouble:
            left_s = deadline_s - time.perf_counter()
            if left_s <= 0:
                return
            self._changed.clear()
            try:
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            except TimeoutError:
                return
        if self.trouble:
            raise EngineError(f"nothing could be measured: {self.trouble}")

    async def rest(self) -> None:
        """End the groups in flight; the engine stays."""
        self._stopping = True
        if self._player is not None:
            await self._player.stop()

    async def stop(self) -> None:
        await self.rest()
        if self._engine is not None:
            await self._engine.stop()
        if self._environments is not None:
            await self._environments.stop()

    def _begin(self) -> None:
        assert self._player is not None
        assert self._announced is not None  # a version is installed first
        config, count = self.config, self._count
        self._count += 1
        lease = LeaseId(f"w{self.number}-l{count}")
        task = self.task_of(count)
        self._tasks[lease] = task
        self._player.start(
            LeaseGranted(
                lease=lease,
                group=GroupId(f"w{self.number}-g{count}"),
                attempt=1,
                kind="train",
                version=self._announced.version,
                task=task,
                group_size=config.dispatch.group_size,
                sampling=config.sampling.sampling(),
                seed=1000 * count + self.number,
                revoke_after_s=config.environment.rollout_timeout_s,
            )
        )

    def _post(self, event: Event) -> None:
        if self._stopping:
            return
        if not isinstance(event, GroupDone):
            self._failed(f"a group did not end well: {event}")
            return
        result = event.result
        task = self._tasks.pop(LeaseId(result.lease))
        self.finished.append(Finished(time.perf_counter(), task, result))
        if self._left is None:
            self._begin()
        elif self._left > 0:
            self._left -= 1
            self._begin()
        self._changed.set()

    def _failed(self, text: str) -> None:
        if not self._stopping:
            self.trouble = self.trouble or text
            self._changed.set()
