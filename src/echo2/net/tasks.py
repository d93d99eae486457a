"""Every long-running task has an owner that notices its crash; waits grow with jitter; the
event loop's lag is measured.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

import structlog

log = structlog.get_logger()

_EWMA_WEIGHT: Final = 0.1


class OwnedTasks:
    """Tasks that run until they are stopped, and calls. None may end with an error unnoticed.

    `start` them, `wait` for the first crash, `stop` them. A crash is logged with its
    traceback when it happens and raised once: by `wait`, or else by `stop`.
    """

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[None]] = set()
        self._crash: BaseException | None = None
        self._raised = False
        self._over = asyncio.Event()

    @property
    def crash(self) -> BaseException | None:
        """The first error that ended a task."""
        return self._crash

    def start(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(coroutine, name=f"{self._owner}.{name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def call_soon(self, function: Callable[[], None], *, name: str) -> None:
        """Call it in the loop's next turn, unless stopped before; its crash is one as a task's."""

        def call() -> None:
            if self._over.is_set():
                return
            try:
                function()
            except Exception as error:  # whatever it is, its owner learns of it
                self._note_crash(f"{self._owner}.{name}", error)

        asyncio.get_running_loop().call_soon(call)

    async def wait(self) -> None:
        """Return when `stop` was called; raise the first crash."""
        await self._over.wait()
        self._raise_crash()

    async def stop(self) -> None:
        """Cancel what still runs and wait for its end."""
        self._over.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._raise_crash()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note_crash(task.get_name(), error)

    def _note_crash(self, name: str, error: BaseException) -> None:
        log.error("task_crashed", task=name, exc_info=error)
        if self._crash is None:
            self._crash = error
        self._over.set()

    def _raise_crash(self) -> None:
        if self._crash is not None and not self._raised:
            self._raised = True
            raise self._crash


class Backoff:
    """Growing waits before one tries again: `base_s`, doubled each time up to `max_s`, of
    which a random half is taken off, so that a fleet does not return in step."""

    def __init__(self, rng: random.Random, *, base_s: float, max_s: float) -> None:
        self._rng = rng
        self._base_s = base_s
        self._max_s = max_s
        self._next_s = base_s

    def next_s(self) -> float:
        wait_s = self._next_s * self._rng.uniform(0.5, 1.0)
        self._next_s = min(self._next_s * 2, self._max_s)
        return wait_s

    def reset(self) -> None:
        """It worked: begin with `base_s` again."""
        self._next_s = self._base_s


class LoopLag:
    """How late the event loop is: a task of `run` asks to be woken every `interval_s`, and
    the delay beyond that is what every other callback suffered too. `on_sample` gets each."""

    def __init__(
        self, *, interval_s: float = 0.1, on_sample: Callable[[float], None] | None = None
    ) -> None:
        self._interval_s = interval_s
        self._on_sample = on_sample
        self.ewma_s = 0.0
        """Smoothed over about ten intervals."""
        self._max_s = 0.0

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + self._interval_s
            await asyncio.sleep(self._interval_s)
            self.record(max(0.0, loop.time() - due))

    def record(self, lag_s: float) -> None:
        self.ewma_s += _EWMA_WEIGHT * (lag_s - self.ewma_s)
        self._max_s = max(self._max_s, lag_s)
        if self._on_sample is not None:
            self._on_sample(lag_s)

    def take_max_s(self) -> float:
        """The largest lag since the last call."""
        max_s, self._max_s = self._max_s, 0.0
        return max_s
