"""Evals of published versions: asked for now and then, answered whenever workers are done."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import structlog

from echo2.config import EvalTable
from echo2.errors import WaitTimeoutError
from echo2.messages import EvalResult
from echo2.types import Sampling, Task, Version
from echo2_learner.session import Session

log = structlog.get_logger(__name__)


class Evals:
    """Of one learner process, over the same held-out tasks each time."""

    def __init__(
        self,
        session: Session,
        tasks: list[Task],
        table: EvalTable,
        *,
        sampling: Sampling,
        resume_step: int,
    ) -> None:
        """`sampling` is that of training; evals have a temperature of their own."""
        self._session = session
        self._tasks = tasks
        self._table = table
        self._sampling = replace(sampling, temperature=table.temperature)
        self._results: deque[EvalResult] = deque()
        self._last_step = resume_step if resume_step > 0 else None

    def is_due(self, step: int) -> bool:
        """At step 0, and at the first publication at or after every `every_steps` steps."""
        every = self._table.every_steps
        if every == 0 or not self._tasks:
            return False
        return self._last_step is None or step // every > self._last_step // every

    def start(self, version: Version) -> str:
        """Ask for an eval of a published version; its result comes with a later line."""
        self._last_step = version.step
        return self._session.evaluate(version, self._tasks, self._sampling, self._table.group_size)

    def run(self, version: Version) -> None:
        """The same, and wait for it: the learner is idle meanwhile. Without evals in the
        configuration, nothing happens."""
        if self._table.every_steps == 0 or not self._tasks:
            return
        self._session.say(f"waits for the eval of version {version}")
        try:
            result = self._session.wait_eval(self.start(version), self._table.timeout_s)
        except WaitTimeoutError as error:
            log.warning("eval_missed", version=str(version), reason=str(error))
            return
        self._results.append(result)

    def next_result(self, *, newest: bool) -> EvalResult | None:
        """The oldest result that no line has told yet; or the newest, for the last line."""
        self._results.extend(self._session.poll_evals())
        if not self._results:
            return None
        if not newest:
            return self._results.popleft()
        result = max(self._results, key=lambda found: found.version.step)
        self._results.clear()
        return result
