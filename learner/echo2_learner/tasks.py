"""The data of a run: the environment's tasks, in order, for training and for evals."""

from __future__ import annotations

import threading
from typing import Final

from echo2.errors import ConfigError, EnvironmentError_
from echo2.types import TASK_PAYLOAD_MAX_BYTES, Task
from echo2_workers.environment import Environment, Split

REPLY_BYTES_MAX: Final = 2 << 20
"""Most bytes of payloads in one answer; the rest is asked for again."""


EVAL_BYTES_MAX: Final = 3 << 20
"""Most bytes of all tasks of an eval: they travel in one message."""
_TASK_OVERHEAD_BYTES: Final = 32


class Tasks:
    """Reads tasks for two threads: the session's (training) and the learner's (evals)."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        environment.num_tasks("train")  # a data file with a mistake is told now, not at step 1
        # An environment need not be safe to use from several threads.
        self._lock = threading.Lock()

    def train(self, start: int, count: int) -> tuple[list[Task], bool]:
        """Training tasks from `start` on, at most `count`, and whether there are none after.

        EnvironmentError_ when the environment fails or gives what no task can hold.
        """
        num_tasks = self._num_tasks("train")
        end = start + count if num_tasks is None else min(start + count, num_tasks)
        tasks: list[Task] = []
        num_bytes = 0
        for index in range(start, end):
            task = self._task("train", index)
            num_bytes += len(task.payload.encode())
            if tasks and num_bytes > REPLY_BYTES_MAX:
                return tasks, False
            tasks.append(task)
        return tasks, num_tasks is not None and end >= num_tasks

    def evals(self, count: int) -> list[Task]:
        """The first `count` held-out tasks, or all if there are fewer. ConfigError when one
        message cannot hold them."""
        num_tasks = self._num_tasks("eval")
        tasks: list[Task] = []
        num_bytes = 0
        for index in range(count if num_tasks is None else min(count, num_tasks)):
            task = self._task("eval", index)
            num_bytes += len(task.payload.encode()) + _TASK_OVERHEAD_BYTES
            if num_bytes > EVAL_BYTES_MAX:
                raise ConfigError(
                    f"eval.num_tasks = {count}: the first {index + 1} held-out tasks of "
                    f"{self._environment.name} hold {num_bytes} bytes, and one eval may hold "
                    f"{EVAL_BYTES_MAX}; set it to {index} or less"
                )
            tasks.append(task)
        return tasks

    def _num_tasks(self, split: Split) -> int | None:
        with self._lock:
            return self._environment.num_tasks(split)

    def _task(self, split: Split, index: int) -> Task:
        try:
            with self._lock:
                payload = self._environment.task(split, index)
        except Exception as error:  # of the user's own code, whatever it is
            raise EnvironmentError_(
                f"environment {self._environment.name} failed at task({split!r}, {index}): "
                f"{type(error).__name__}: {error}"
            ) from error
        size = len(payload.encode()) if isinstance(payload, str) else -1
        if not 0 <= size <= TASK_PAYLOAD_MAX_BYTES:
            raise EnvironmentError_(
                f"environment {self._environment.name}: task({split!r}, {index}) is "
                f"{type(payload).__name__}{f' of {size} bytes' if size >= 0 else ''}; a task is "
                f"text (JSON) of at most {TASK_PAYLOAD_MAX_BYTES} bytes"
            )
        return Task(index, payload)
