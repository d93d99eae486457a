"""What a coordinator that is started again gets of the run: made by the ledger, read once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from echo2.core.audits import Quarantine
from echo2.core.group import StoredResult
from echo2.core.task_queue import group_of
from echo2.types import GroupId, LeaseId, PeerId, Task, Version


@dataclass(frozen=True, slots=True)
class RestoredGroup:
    """A group that was acknowledged, and has not ended or was trained at `trained_at`; without
    `told` no event says so yet."""

    id: GroupId
    task: Task
    result: StoredResult
    attempt: int
    trained_at: int | None = None
    told: bool = True


@dataclass(frozen=True, slots=True)
class RestoredLease:
    """A group that a worker had in work: its attempt number `attempt`, under `version`."""

    id: LeaseId
    group: GroupId
    worker: PeerId
    version: Version
    attempt: int
    revoke_after_s: float


@dataclass(frozen=True, slots=True)
class Restored:
    """What an earlier coordinator of this run left in its records.

    `trained`: groups trained at or after the oldest kept checkpoint, and v then;
    `open_indexes`: tasks below `next_index` that never ended. Neither names those of `groups`,
    which are here with task and result. `told_step`: v as the events have it, and `untold`:
    versions that none of them names; the coordinator was killed before it could tell.
    """

    incarnation: int
    step: int
    told_step: int
    starts: tuple[tuple[int, int], ...]
    next_index: int
    open_indexes: tuple[int, ...]
    trained: tuple[tuple[GroupId, int], ...]
    kept: tuple[int, ...]
    published: tuple[tuple[Version, str], ...] = ()
    untold: tuple[Version, ...] = ()
    ends: dict[str, int] = field(default_factory=dict)
    groups: tuple[RestoredGroup, ...] = ()
    leases: tuple[RestoredLease, ...] = ()
    cost_usd: float = 0.0
    quarantined: tuple[tuple[PeerId, Quarantine], ...] = ()

    def with_groups(self, groups: Iterable[RestoredGroup]) -> Restored:
        found = tuple(groups)
        here = {group.id for group in found}
        return replace(
            self,
            groups=found,
            open_indexes=tuple(i for i in self.open_indexes if group_of(i) not in here),
            trained=tuple(entry for entry in self.trained if entry[0] not in here),
        )
