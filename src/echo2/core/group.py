"""A rollout group: the G trajectories of one task, the unit of everything.

Life-cycle (printed into docs/architecture.md from TRANSITIONS):

    queued -> leased -> storing -> auditing -> buffered -> training -> ended
       ^        |          |  '--------|---------^           |
       '--------'----------'-----------'---------'-----------'

back to queued: lost, refused, withdrawn, rewound. Only groups that are chosen are audited.
A group ends exactly once; a rewind of the learner may revive an ended one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace
from typing import Literal

from echo2.messages import GroupResult
from echo2.types import GroupId, LeaseId, PeerId, Task, TrajectoryHeader, Version

End = Literal["trained", "expired", "failed", "filtered", "cancelled"]


class GroupState(enum.Enum):
    __hash__ = object.__hash__  # there is one of each; an enum's own hash is Python, and slow

    QUEUED = "queued"
    LEASED = "leased"
    STORING = "storing"
    AUDITING = "auditing"
    BUFFERED = "buffered"
    TRAINING = "training"
    ENDED = "ended"


WITH_RESULT = (GroupState.STORING, GroupState.AUDITING, GroupState.BUFFERED)
"""A result is here, and the learner has not got it."""

TRANSITIONS: dict[GroupState, frozenset[GroupState]] = {
    GroupState.QUEUED: frozenset({GroupState.LEASED, GroupState.STORING, GroupState.ENDED}),
    GroupState.LEASED: frozenset({GroupState.QUEUED, GroupState.STORING, GroupState.ENDED}),
    GroupState.STORING: frozenset(
        {GroupState.QUEUED, GroupState.AUDITING, GroupState.BUFFERED, GroupState.ENDED}
    ),
    GroupState.AUDITING: frozenset(
        {GroupState.QUEUED, GroupState.BUFFERED, GroupState.TRAINING, GroupState.ENDED}
    ),
    GroupState.BUFFERED: frozenset(
        {GroupState.QUEUED, GroupState.AUDITING, GroupState.TRAINING, GroupState.ENDED}
    ),
    GroupState.TRAINING: frozenset({GroupState.QUEUED, GroupState.BUFFERED, GroupState.ENDED}),
    GroupState.ENDED: frozenset({GroupState.QUEUED, GroupState.BUFFERED}),
}


def transition_table() -> str:
    """TRANSITIONS as the Markdown table that docs/architecture.md shows."""
    order = list(GroupState)
    rows = [
        f"| {state.value} | {', '.join(n.value for n in sorted(following, key=order.index))} |"
        for state, following in TRANSITIONS.items()
    ]
    return "\n".join(["| state | may become |", "|---|---|", *rows])


@dataclass(slots=True)
class Lease:
    """A group given to a worker. `version` is what the worker served when it was granted.
    `resumed`: granted by an earlier coordinator; `granted_at` is when this one began."""

    id: LeaseId
    group: GroupId
    worker: PeerId
    version: Version
    granted_at: float
    progressed_at: float
    revoke_after_s: float
    tokens: int = 0
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class StoredResult:
    """What arrived for a group; `payload` is opaque here (the frames), and None when only the
    ledger has it. `versions`: all that sampled a token of it."""

    lease: LeaseId
    worker: PeerId
    trajectories: tuple[TrajectoryHeader, ...]
    payload: object | None
    versions: frozenset[Version] = field(init=False, compare=False)
    min_version: Version = field(init=False, compare=False)
    max_version: Version = field(init=False, compare=False)

    def __post_init__(self) -> None:
        spans = [span.version for t in self.trajectories for span in t.spans]
        # By numbers: to hash and compare a Version for each span would take longer.
        versions = {(version.incarnation, version.step): version for version in spans}.values()
        object.__setattr__(self, "versions", frozenset(versions))
        object.__setattr__(self, "min_version", min(versions))
        object.__setattr__(self, "max_version", max(versions))

    @property
    def tokens(self) -> int:
        return sum(t.num_sampled for t in self.trajectories)

    @property
    def reward_mean(self) -> float:
        return sum(t.reward for t in self.trajectories) / len(self.trajectories)

    @property
    def has_reward_variance(self) -> bool:
        return len({t.reward for t in self.trajectories}) > 1

    def without_payload(self) -> StoredResult:
        """The same, its payload left to the ledger."""
        return self if self.payload is None else replace(self, payload=None)

    def min_version_from(self, step: int) -> Version | None:
        """The oldest version at or above `step`: the oldest token that stays in the loss."""
        return min((v for v in self.versions if v.step >= step), default=None)

    def tokens_from(self, step: int) -> int:
        """Tokens whose version is at or above `step`."""
        return sum(
            s.end - s.start for t in self.trajectories for s in t.spans if s.version.step >= step
        )


@dataclass(slots=True)
class Group:
    """`known_leases`: every lease granted so far, the revoked ones too, since a late result
    of one may still come first. `avoid`: the worker that lost it last. `begun`: something is
    recorded of it, so it must end before the run does. `audited`: its result has its verdict, or
    needs none. `awaits_task`: it is leased from before
    a restart, and its task is not here again yet; `early`: its result, if that came first.
    `ended_step`: step of the version of the live lease that its result ended, while that is not
    durable: a restart would bring the lease back, so the group keeps the lease's place."""

    id: GroupId
    task: Task
    state: GroupState = GroupState.QUEUED
    attempts: int = 0
    lease: Lease | None = None
    result: StoredResult | None = None
    record_id: int | None = None
    known_leases: dict[LeaseId, Lease] = field(default_factory=dict)
    avoid: PeerId | None = None
    last_reason: str = ""
    begun: bool = False
    audited: bool = False
    awaits_task: bool = False
    early: tuple[PeerId, GroupResult] | None = None
    ended_step: int | None = None

    def move(self, state: GroupState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"group {self.id} cannot go from {self.state} to {state}")
        self.state = state
