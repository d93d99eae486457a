"""What a resumed learner would get back: groups trained since the oldest kept checkpoint.

A result is kept only while some kept checkpoint could still admit it, and without its payload,
which is in the ledger; of the others the task alone is remembered, to be queued again. Bounded by
the checkpoint period.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.core.group import Group
from echo2.core.staleness import expiry_step
from echo2.types import PeerId


@dataclass(slots=True)
class TrainedGroup:
    """`group` still holds its result when `has_result`; `worker` sampled it."""

    step: int
    group: Group
    has_result: bool
    worker: PeerId | None


class TrainedHistory:
    """`kept`: steps of the checkpoints that the learner may resume from. What was trained
    before `complete_from` is forgotten, so that no learner can resume before it."""

    def __init__(self, *, staleness_max: int) -> None:
        self.staleness_max = staleness_max
        self.kept: tuple[int, ...] = (0,)
        self.complete_from = 0
        self.trained: list[TrainedGroup] = []

    @property
    def oldest_kept(self) -> int:
        return min(self.kept, default=0)

    def add(self, step: int, groups: list[Group]) -> None:
        for group in groups:
            worker = group.result.worker if group.result is not None else None
            self.trained.append(TrainedGroup(step, group, self._keep_result(step, group), worker))

    def of_worker(self, worker: PeerId) -> list[TrainedGroup]:
        """What is known here of it, oldest first."""
        return [entry for entry in self.trained if entry.worker == worker]

    def keep(self, kept: tuple[int, ...]) -> None:
        """The learner's checkpoints are these now."""
        self.kept = kept
        self.complete_from = max(self.complete_from, self.oldest_kept)
        self.trained = [entry for entry in self.trained if entry.step >= self.oldest_kept]
        for entry in self.trained:
            if entry.has_result:
                entry.has_result = self._keep_result(entry.step, entry.group)

    def rewind(self, resume_step: int) -> list[TrainedGroup]:
        """Take out what was trained at or after `resume_step`."""
        returned = [entry for entry in self.trained if entry.step >= resume_step]
        self.trained = [entry for entry in self.trained if entry.step < resume_step]
        return returned

    def _keep_result(self, step: int, group: Group) -> bool:
        result = group.result
        if result is None:
            return False
        newest = result.max_version.step
        last = min(step, expiry_step(newest, staleness_max=self.staleness_max))
        useful = any(newest <= kept <= last for kept in self.kept)
        group.result = result.without_payload() if useful else None
        return useful
