"""The tasks of a taskset of verifiers, as numbered tasks of two splits.

The library's tasksets know one stream of tasks and no splits. Held out for evals is either
another taskset, or a share of the same one by a hash of each task's content (all of its data
but position, id and name). What is held out is never trained on, also where it stands in the
data twice. A finite taskset is read once and whole; of an endless one only the last tasks are
kept, and going back further reads it again from its beginning.
"""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from echo2.errors import ConfigError
from echo2_workers.environment import Split
from echo2_workers.environments.splits import split_of

KEPT: Final = 1024
"""Tasks of an endless taskset, of each split, that can be asked for again at no cost."""
SKIPPED_MAX: Final = 100_000
"""Tasks in a row of an endless taskset that may be of the other split."""
Data = dict[str, Any]


class SplitTasks:
    """`evals` None: `eval_share` of the tasks of `train` are held out."""

    def __init__(
        self, train: Any, evals: Any, *, seed: int, eval_share: float, epochs: int | None
    ) -> None:
        self._train, self._evals = train, evals
        self._seed = seed
        self._eval_share = eval_share
        self._epochs = epochs
        self._lists: dict[Split, list[Data]] = {}
        self._streams: dict[Split, _Stream] = {}
        self._order: tuple[int, list[int]] = (-1, [])

    def count(self, split: Split) -> int | None:
        if not self._taskset(split).bounded:
            return None
        number = len(self._list(split))
        if split == "eval":
            return number
        return None if self._epochs is None else self._epochs * number

    def data(self, split: Split, index: int) -> Data:
        """The task's data as JSON holds it."""
        if not self._taskset(split).bounded:
            stream = self._streams.get(split)
            if stream is None:
                stream = self._streams[split] = _Stream(self, split)
            return stream.at(index)
        tasks = self._list(split)
        epoch, position = divmod(index, len(tasks))
        if split == "train":
            position = self._epoch_order(epoch, len(tasks))[position]
        return tasks[position]

    def iterate(self, split: Split) -> Iterator[Data]:
        """All of a split, in the taskset's own order. Raises ConfigError when the environment's
        code cannot give them."""
        held_out = self._held_out() if split == "train" else frozenset()
        skipped = 0
        try:
            for task in self._taskset(split):
                data: Data = task.data.model_dump(mode="json")
                if self._evals is None and self._split_of(data) != split:
                    skipped += 1
                elif _content(data) not in held_out:
                    skipped = 0
                    yield data
                if skipped > SKIPPED_MAX:
                    raise ValueError(f"of {skipped} in a row each is of the other split")
        except Exception as error:  # the environment's own code, and data that is no JSON
            raise ConfigError(
                f"environment.settings: the taskset cannot give its tasks for {split} "
                f"({type(error).__name__}: {error})"
            ) from error

    def _taskset(self, split: Split) -> Any:
        return self._evals if split == "eval" and self._evals is not None else self._train

    def _split_of(self, data: Data) -> Split:
        return split_of(_content(data), seed=self._seed, eval_share=self._eval_share)

    def _held_out(self) -> frozenset[str]:
        """Contents of a taskset of their own for evals, where it ends."""
        if self._evals is None or not self._evals.bounded:
            return frozenset()
        return frozenset(_content(data) for data in self._list("eval"))

    def _list(self, split: Split) -> list[Data]:
        tasks = self._lists.get(split)
        if tasks is None:
            tasks = self._lists[split] = list(self.iterate(split))
            if not tasks:
                raise ConfigError(
                    f"environment.settings: the taskset has no task for {split} (eval_share = "
                    f"{self._eval_share}); change it, or set eval_taskset"
                )
        return tasks

    def _epoch_order(self, epoch: int, count: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(count))
            random.Random(f"{self._seed}:{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]


class _Stream:
    """One split of an endless taskset."""

    def __init__(self, tasks: SplitTasks, split: Split) -> None:
        self._tasks, self._split = tasks, split
        self._restart()

    def at(self, index: int) -> Data:
        if index < self._read - len(self._kept):
            self._restart()
        while self._read <= index:
            data = next(self._source, None)
            if data is None:
                raise ConfigError(
                    f"environment.settings: the taskset says that it is INFINITE, and has only "
                    f"{self._read} tasks for {self._split}"
                )
            self._kept.append(data)
            self._read += 1
        return self._kept[index - self._read]

    def _restart(self) -> None:
        self._source = self._tasks.iterate(self._split)
        self._kept: deque[Data] = deque(maxlen=KEPT)
        self._read = 0


def _content(data: Data) -> str:
    kept = {name: value for name, value in data.items() if name not in ("idx", "id", "name")}
    return json.dumps(kept, sort_keys=True)
