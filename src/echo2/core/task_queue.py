"""The data position: which tasks of the stream were asked for, and which come again.

The coordinator alone owns it. Tasks are named by their index; the learner (or an embedding
program) delivers the payload of an index when it is asked to, any number of times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from echo2.types import GroupId, Task

REQUEST_MAX = 256


def group_of(index: int) -> GroupId:
    """One group per task of the stream."""
    return GroupId(f"g{index}")


def index_of(group: GroupId) -> int:
    return int(group[1:])


@dataclass(frozen=True, slots=True)
class TaskRequest:
    start: int
    count: int


class TaskStream:
    """`again` are indexes below `next_index` whose payload is needed once more."""

    def __init__(self, *, next_index: int = 0, again: Iterable[int] = ()) -> None:
        self.next_index = next_index
        self.again: list[int] = sorted(again)
        self.exhausted_at: int | None = None
        self.outstanding: TaskRequest | None = None
        self.asked_at = 0.0
        self.waits_since: float | None = None
        """When tasks were asked for that have not come, first and however often since."""

    @property
    def exhausted(self) -> bool:
        """No task will come that is not in the book already."""
        return not self.again and (
            self.exhausted_at is not None and self.next_index >= self.exhausted_at
        )

    def request(self, room: int, awaiting: Collection[int] = ()) -> TaskRequest | None:
        """What to ask for now, given room for so many tasks. One request at a time. Those of
        `awaiting`, indexes that come again, need no room: their groups are in work, and results
        may be here."""
        first = min(awaiting, default=None)
        if self.outstanding is not None or self.exhausted:
            return None
        if first is not None:
            count = 1
            while count < REQUEST_MAX and first + count in awaiting:
                count += 1
            self.outstanding = TaskRequest(first, count)
            return self.outstanding
        if room < 1:
            return None
        room = min(room, REQUEST_MAX)
        if self.again:
            start = self.again[0]
            count = 1
            while count < min(room, len(self.again)) and self.again[count] == start + count:
                count += 1
        else:
            start, count = self.next_index, room
        self.outstanding = TaskRequest(start, count)
        return self.outstanding

    def forget_request(self) -> None:
        """Whoever was asked is gone; the next request asks again."""
        self.outstanding = None

    def accept(self, start: int, tasks: tuple[Task, ...], *, exhausted: bool) -> list[Task]:
        """Take the answer to the outstanding request: those of its tasks that are still needed.
        Another one is ignored ([])."""
        asked = self.outstanding
        if asked is None or start != asked.start or len(tasks) > asked.count:
            return []
        if any(task.index != start + i for i, task in enumerate(tasks)):
            raise ValueError(
                f"tasks must be numbered from {start} on without a gap, got "
                f"{[task.index for task in tasks[:8]]}"
            )
        self.outstanding = self.waits_since = None
        end = start + len(tasks)
        wanted = {*self.again, *range(self.next_index, end)}
        if exhausted:
            self.exhausted_at = end
            self.again = [index for index in self.again if index < end]
        self.again = [index for index in self.again if not start <= index < end]
        self.next_index = max(self.next_index, end)
        return [task for task in tasks if task.index in wanted]

    def forget(self, index: int) -> None:
        """The payload of `index` is not needed any more: its group has ended."""
        self.again = [known for known in self.again if known != index]

    def put_back(self, index: int) -> None:
        """The payload of `index` will be needed again (its group came back without one)."""
        self.again = sorted({*self.again, index})
