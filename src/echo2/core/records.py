"""What the coordinator must remember: the records that `Persist` makes durable.

A ledger that replays them in order rebuilds v, the lineage, every group's end and the
data position.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.types import GroupId, LeaseId, PeerId, Task, Version


@dataclass(frozen=True, slots=True)
class GroupStored:
    """A finished group arrived; after this is durable its worker is acknowledged."""

    group: GroupId
    lease: LeaseId
    worker: PeerId
    task: Task
    payload: object


@dataclass(frozen=True, slots=True)
class StepRecorded:
    """The batch trained at version `step` was applied; its groups end as trained. `cost_usd`: of
    the run until then."""

    incarnation: int
    step: int
    groups: tuple[GroupId, ...]
    cost_usd: float = 0.0


@dataclass(frozen=True, slots=True)
class LearnerRecorded:
    """A learner took over as `incarnation`, from `resume_step`."""

    incarnation: int
    resume_step: int


@dataclass(frozen=True, slots=True)
class VersionRecorded:
    """A version was published under this manifest."""

    version: Version
    manifest_digest: str


@dataclass(frozen=True, slots=True)
class CheckpointRecorded:
    """The learner can resume from any of `kept`."""

    incarnation: int
    kept: tuple[int, ...]


Record = GroupStored | StepRecorded | LearnerRecorded | VersionRecorded | CheckpointRecorded
