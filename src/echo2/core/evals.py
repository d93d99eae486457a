"""Evaluations of published versions on held-out tasks, run by workers as pinned leases.

An eval's leases go only to workers that serve the very version, before their training
leases. When no worker can serve it any more, what is left is cancelled and the result
says n of N.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from echo2.messages import EvalRequest, EvalResult
from echo2.types import LeaseId, PeerId, Task, TrajectoryHeader, Version

EVALS_MAX = 16
EVAL_ATTEMPTS_MAX = 3


@dataclass(slots=True)
class EvalLease:
    id: LeaseId
    eval_id: str
    task: Task
    worker: PeerId
    granted_at: float
    progressed_at: float
    tokens: int = 0


@dataclass(slots=True)
class Eval:
    request: EvalRequest
    learner: PeerId
    pending: deque[Task]
    begun_at: float = 0.0
    attempts: dict[int, int] = field(default_factory=dict)
    leases: dict[LeaseId, EvalLease] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    num_failed: int = 0
    last_reason: str = ""

    @property
    def version(self) -> Version:
        return self.request.version

    @property
    def is_done(self) -> bool:
        return not self.pending and not self.leases

    def give_back(self, lease: LeaseId, reason: str) -> None:
        """The lease is lost; its task waits again, a bounded number of times."""
        lost = self.leases.pop(lease)
        attempts = self.attempts.get(lost.task.index, 0) + 1
        self.attempts[lost.task.index] = attempts
        self.last_reason = reason
        if attempts < EVAL_ATTEMPTS_MAX:
            self.pending.append(lost.task)
        else:
            self.num_failed += 1

    def result(self) -> EvalResult:
        asked = len(self.request.tasks)
        missing = asked - len(self.rewards)
        return EvalResult(
            incarnation=self.request.incarnation,
            eval_id=self.request.eval_id,
            version=self.version,
            num_asked=asked,
            num_done=len(self.rewards),
            reward_mean=sum(self.rewards) / len(self.rewards) if self.rewards else None,
            tokens_mean=sum(self.tokens) / len(self.tokens) if self.tokens else None,
            reason=f"{missing} of {asked} not done: {self.last_reason}"[:2048] if missing else "",
        )


class Evals:
    """Evals under way, oldest first, and the results of the last that `ended`: a request
    that is repeated because its answer was lost gets the same answer."""

    def __init__(self) -> None:
        self.evals: dict[str, Eval] = {}
        self.ended: dict[str, EvalResult] = {}
        self.lease_eval: dict[LeaseId, str] = {}
        self.by_worker: Counter[PeerId] = Counter()

    def remember(self, result: EvalResult) -> None:
        self.ended[result.eval_id] = result
        while len(self.ended) > EVALS_MAX:
            del self.ended[next(iter(self.ended))]

    def begin(self, request: EvalRequest, learner: PeerId, now: float) -> Eval:
        made = Eval(request, learner, deque(request.tasks), begun_at=now)
        self.evals[request.eval_id] = made
        return made

    def next_for(self, version: Version) -> Eval | None:
        """The oldest eval with a task waiting for a worker that serves `version`."""
        for found in self.evals.values():
            if found.version == version and found.pending:
                return found
        return None

    def grant(self, found: Eval, lease: EvalLease) -> None:
        found.leases[lease.id] = lease
        self.lease_eval[lease.id] = found.request.eval_id
        self.by_worker[lease.worker] += 1

    def pending_versions(self) -> set[Version]:
        """Versions of evals with a task that waits for a worker."""
        return {found.version for found in self.evals.values() if found.pending}

    def num_leases(self, worker: PeerId) -> int:
        return self.by_worker.get(worker, 0)

    def _left(self, lease: EvalLease) -> None:
        del self.lease_eval[lease.id]
        self.by_worker[lease.worker] -= 1
        if not self.by_worker[lease.worker]:
            del self.by_worker[lease.worker]

    def of_lease(self, lease: LeaseId) -> Eval | None:
        eval_id = self.lease_eval.get(lease)
        return self.evals.get(eval_id) if eval_id is not None else None

    def score(self, lease: LeaseId, trajectories: tuple[TrajectoryHeader, ...]) -> Eval:
        found = self.evals[self.lease_eval[lease]]
        self._left(found.leases.pop(lease))
        found.rewards.append(sum(t.reward for t in trajectories) / len(trajectories))
        found.tokens.append(sum(t.num_sampled for t in trajectories) // len(trajectories))
        return found

    def give_back(self, lease: LeaseId, reason: str) -> None:
        found = self.of_lease(lease)
        if found is not None:
            self._left(found.leases[lease])
            found.give_back(lease, reason)

    def leases_of(self, worker: PeerId) -> list[EvalLease]:
        if worker not in self.by_worker:
            return []
        return [
            lease
            for found in self.evals.values()
            for lease in found.leases.values()
            if lease.worker == worker
        ]

    def cancel(self, eval_id: str, reason: str) -> Eval:
        """Stop waiting: what is not done stays undone."""
        found = self.evals[eval_id]
        for lease in found.leases.values():
            self._left(lease)
        found.leases.clear()
        found.pending.clear()
        found.last_reason = reason
        return found

    def done(self) -> Iterable[Eval]:
        """Take out every eval that has ended."""
        for eval_id in [e for e, found in self.evals.items() if found.is_done]:
            yield self.evals.pop(eval_id)
