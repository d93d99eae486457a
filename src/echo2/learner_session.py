"""The learner's session: a blocking facade over `LearnerClient` for a process that computes.

It runs the client on an event loop in a thread of its own, so that heartbeats and tasks go on
while the learner trains.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from echo2.config import Config
from echo2.learner_client import Batch, LearnerClient, T, TaskSource
from echo2.learner_transport import SocketTransport
from echo2.messages import (
    EvalResult,
    LearnerWelcome,
    VersionPublished,
)
from echo2.types import GroupMismatch, Sampling, Task, Version


class LearnerSession:
    """The blocking facade of a learner process. Calls come from one thread.

    Each call may raise FencedError (a newer learner took over), RefusedError,
    RunEndedError (the coordinator ended) or WaitTimeoutError.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        tasks: TaskSource,
        environment_version: str = "",
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="learner-session", daemon=True)
        self._thread.start()
        self._timeout_s = config.net.connect_timeout_s
        self._client = self._call(self._make(config, Path(run_dir), tasks, environment_version))

    async def _make(
        self, config: Config, run_dir: Path, tasks: TaskSource, environment_version: str
    ) -> LearnerClient:
        transport = SocketTransport(config, run_dir)
        return LearnerClient(
            transport,
            tasks=tasks,
            environment_version=environment_version,
            connect_timeout_s=config.net.connect_timeout_s,
            tasks_timeout_s=config.environment.rollout_timeout_s,
        )

    def start(
        self, *, resume_step: int, digest: str = "", checkpoint_steps: Sequence[int] = ()
    ) -> LearnerWelcome:
        return self._call(
            self._client.start(
                resume_step=resume_step,
                digest=digest,
                checkpoint_steps=checkpoint_steps,
                timeout_s=self._timeout_s,
            )
        )

    def next_batch(self, step: int) -> Batch | None:
        """None when the data is exhausted."""
        return self._call(self._client.next_batch(step))

    def complete(
        self, step: int, *, train_s: float, wait_s: float, mismatch: Sequence[GroupMismatch]
    ) -> None:
        self._call(self._client.complete(step, train_s=train_s, wait_s=wait_s, mismatch=mismatch))

    def publish(self, message: VersionPublished) -> int:
        return self._call(self._client.publish(message))

    def checkpoint_saved(self, step: int, kept: Sequence[int]) -> None:
        self._call(self._client.checkpoint_saved(step, kept))

    def evaluate(
        self, version: Version, tasks: Sequence[Task], sampling: Sampling, group_size: int
    ) -> str:
        return self._call(self._client.evaluate(version, tasks, sampling, group_size))

    def poll_evals(self) -> list[EvalResult]:
        return self._call(self._client.poll_evals())

    def wait_eval(self, eval_id: str, timeout_s: float) -> EvalResult:
        return self._call(self._client.wait_eval(eval_id, timeout_s))

    def say(self, text: str) -> None:
        """What the learner does now, for `echo2 status`."""
        self._loop.call_soon_threadsafe(self._client.say, text)

    @property
    def tasks_ended(self) -> bool:
        """Whether the last of the tasks was handed over."""
        return self._client.tasks_ended

    def close(self, reason: str, *, finished: bool, missing_steps: int = 0) -> None:
        """Say goodbye; the session cannot be used afterwards."""
        self._call(self._client.close(reason, finished=finished, missing_steps=missing_steps))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10.0)
        self._loop.close()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the session's loop and wait; an interrupt cancels what was waited for."""
        future: Future[T] = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise
