"""Which groups are audited, which audits are open, and who is quarantined: the books.

    group durable -> chosen? -- no --> buffered
                        | yes
                     auditing -> confirmed, unaudited -> buffered
                         '-----> refuted -------------> withdrawn (queued again)

The choice is a keyed hash of run and group: the same for every attempt and every coordinator of
the run, and unknown to whoever lacks the coordinator's key. Leaves orders, verdicts and what
follows from them to `AuditDesk`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

from echo2.core.group import Group
from echo2.core.settings import AuditSettings
from echo2.core.suspicion import EvidenceSum, MismatchWatch
from echo2.types import GroupId, LeaseId, PeerId

TRIES_MAX: Final = 3
"""Auditors that may fail on a group before it counts as unaudited."""
EVIDENCE_MAX: Final = 16
WORKERS_MAX: Final = 10_000


def is_chosen(group: GroupId, *, run_id: str, audit: AuditSettings) -> bool:
    """Must the reward of `group` be recomputed? True for `audit.share` of all groups."""
    if audit.share <= 0.0:
        return False
    digest = blake2b(f"{run_id}:{group}".encode(), key=audit.key, digest_size=8).digest()
    return int.from_bytes(digest, "big") < audit.share * 2.0**64


@dataclass(slots=True)
class OpenAudit:
    """A group that waits for its verdict. `auditor`: who was asked, at `ordered_at`; `tried`:
    who could not say, with the last `reason`. `restored`: an earlier coordinator had it, and the
    learner may have it; nobody is asked before the learner has spoken."""

    group: Group
    lease: LeaseId
    worker: PeerId
    since: float
    auditor: PeerId | None = None
    ordered_at: float = 0.0
    tried: set[PeerId] = field(default_factory=set)
    reason: str = ""
    restored: bool = False


@dataclass(frozen=True, slots=True)
class Quarantine:
    """`cause`: "rewards" or "mismatch"; `in_training`: its groups in the batch that the learner
    had when it was quarantined."""

    cause: str
    reason: str
    step: int
    in_training: tuple[GroupId, ...] = ()


@dataclass(slots=True)
class RefutedRewards:
    """What audits say of one worker: `refuted` holds the newest, as events tell them."""

    sum: EvidenceSum = field(default_factory=EvidenceSum)
    refuted: list[dict[str, Any]] = field(default_factory=list)

    def note(self, evidence: dict[str, Any] | None) -> float:
        """A verdict: evidence of a refuted group, or None for one that was confirmed."""
        if evidence is not None:
            self.refuted = [*self.refuted, evidence][-EVIDENCE_MAX:]
        return self.sum.note(odd=evidence is not None)


class Audits:
    """`verdicts` counts them; `auditor_seen_at`: when an auditor was here last; `learner_spoke`:
    it is known which groups the learner had before a restart."""

    def __init__(self, settings: AuditSettings) -> None:
        self.settings = settings
        self.open: dict[GroupId, OpenAudit] = {}
        self.quarantined: dict[PeerId, Quarantine] = {}
        self.verdicts: Counter[str] = Counter()
        self.rewards: dict[PeerId, RefutedRewards] = {}
        self.mismatch = MismatchWatch(settings.rule)
        self.num_trained: Counter[PeerId] = Counter()
        self.suspected: set[PeerId] = set()
        self.fleet_is_off = False
        self.auditor_seen_at = 0.0
        self.learner_spoke = True

    def begin(self, group: Group, now: float) -> None:
        assert group.result is not None
        self.open[group.id] = OpenAudit(group, group.result.lease, group.result.worker, now)

    def close(self, group: GroupId) -> None:
        """Its verdict is there, or it needs none any more."""
        self.open.pop(group, None)

    def num_in_flight(self, auditor: PeerId) -> int:
        return sum(1 for audit in self.open.values() if audit.auditor == auditor)

    def auditor_left(self, auditor: PeerId) -> None:
        """What it was asked is asked somebody else."""
        for audit in self.open.values():
            if audit.auditor == auditor:
                audit.auditor = None

    def note_rewards(self, worker: PeerId, evidence: dict[str, Any] | None) -> RefutedRewards:
        record = self.rewards.get(worker)
        if record is None:
            if len(self.rewards) >= WORKERS_MAX:
                del self.rewards[next(iter(self.rewards))]
            record = self.rewards[worker] = RefutedRewards()
        record.note(evidence)
        return record

    def count_trained(self, worker: PeerId) -> None:
        if worker in self.num_trained or len(self.num_trained) < WORKERS_MAX:
            self.num_trained[worker] += 1

    def forget(self, worker: PeerId) -> None:
        """Nothing is held against it any more."""
        self.quarantined.pop(worker, None)
        self.rewards.pop(worker, None)
        self.suspected.discard(worker)
        self.mismatch.forget(worker)

    def restore(self, quarantined: Mapping[PeerId, Quarantine]) -> None:
        self.quarantined.update(quarantined)
        self.learner_spoke = False

    @property
    def hold_restored(self) -> bool:
        """Do groups of an earlier coordinator wait for a verdict again? The learner may have them,
        and a batch of others would let them expire. Each waits for a bounded time."""
        return any(audit.restored for audit in self.open.values())

    def ask_later(self) -> None:
        """What is open was taken over from an earlier coordinator."""
        for audit in self.open.values():
            audit.restored = True
