"""What a worker has promised: the leases that it works on.

Promise: a lease is taken only while a version is installed and there is room, and ends
exactly once: as a result, a failure or a revocation. Without a session nothing can be told;
what failed meanwhile is told at the welcome, if the coordinator still counts on it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Final, Literal

from echo2 import messages
from echo2.core.worker_events import AbortGroup, Effect, Log, Send, StartGroup
from echo2.core.worker_outbox import Outbox
from echo2.core.worker_session import Session
from echo2.core.worker_settings import WorkerSettings
from echo2.core.worker_versions import Versions, clipped
from echo2.errors import LocalProtocolError
from echo2.messages import LEASES_PER_PEER_MAX, LeaseGranted
from echo2.types import LeaseId

Stage = Literal["environment", "engine", "draining", "lost"]
ENDED_REMEMBERED_MAX: Final = LEASES_PER_PEER_MAX


@dataclass(slots=True)
class Lease:
    granted: LeaseGranted
    dead_at: float


class Leases:
    """`leaving`: why no lease is taken any more; "" while they are."""

    def __init__(self, settings: WorkerSettings, session: Session, versions: Versions) -> None:
        self.settings = settings
        self.session = session
        self.versions = versions
        self.outbox = Outbox(bytes_in_flight_max=settings.bytes_in_flight_max)
        self.live: dict[LeaseId, Lease] = {}
        self.leaving = ""
        self._untold: dict[LeaseId, messages.LeaseFailed] = {}
        self._ended: set[LeaseId] = set()
        self._ended_order: deque[LeaseId] = deque()

    @property
    def held(self) -> tuple[LeaseId, ...]:
        """For the hello: in work, and finished without an acknowledgement."""
        return (*self.live, *self.outbox.leases)

    @property
    def hold_s(self) -> float | None:
        """Longest time that a live eval may put off a flip; None without evals."""
        return max((granted.hold_s for granted in self._evals()), default=None)

    def welcome(self, alive: tuple[LeaseId, ...]) -> list[Effect]:
        """A session began; `alive`: those of the hello's leases that go on."""
        effects: list[Effect] = []
        for lease in [lease for lease in self.live if lease not in alive]:
            effects += self.abort(lease, "the coordinator gave it up meanwhile")
        effects += [Send(self._untold[lease]) for lease in alive if lease in self._untold]
        self._untold.clear()
        self.outbox.session_began()
        return effects

    def granted(self, granted: LeaseGranted, now: float) -> list[Effect]:
        if granted.lease in self.live or granted.lease in self._ended:
            return [Log("debug", "lease_repeated", {"lease": granted.lease})]
        stage, text = self._problem(granted)
        if stage is not None:
            self._remember(granted.lease)
            return self._fail(granted, stage, text)
        self.live[granted.lease] = Lease(granted, now + granted.revoke_after_s)
        return [StartGroup(granted)]

    def done(self, result: messages.GroupResult) -> list[Effect]:
        held = self.live.get(result.lease)
        if held is None:
            return [Log("debug", "result_dropped", {"lease": result.lease})]
        if (held.granted.group, held.granted.attempt) != (result.group, result.attempt):
            raise LocalProtocolError(
                f"result of lease {result.lease} names group {result.group} attempt "
                f"{result.attempt}; granted was group {held.granted.group} attempt "
                f"{held.granted.attempt}"
            )
        self._end(result.lease)
        self.outbox.add(result)
        return []

    def failed(self, lease: LeaseId, stage: Stage, text: str) -> list[Effect]:
        granted = self._end(lease)
        return [] if granted is None else self._fail(granted, stage, text)

    def acknowledged(self, told: messages.GroupAcknowledged) -> list[Effect]:
        if not self.outbox.acknowledge(told.lease):
            return self.abort(told.lease, f"settled: {told.outcome}")
        if told.outcome == "accepted":
            return []
        fields = {"lease": told.lease, "outcome": told.outcome, "reason": told.reason}
        return [Log("info", "result_not_wanted", fields)]

    def abort(self, lease: LeaseId, reason: str, stage: Stage | None = None) -> list[Effect]:
        """End a live lease; with `stage` the coordinator is told, else it knows."""
        granted = self._end(lease)
        if granted is None:
            return []
        effects: list[Effect] = [AbortGroup(lease, reason)]
        return effects if stage is None else effects + self._fail(granted, stage, reason)

    def abort_all(self, reason: str, stage: Stage | None = None) -> list[Effect]:
        return [effect for lease in list(self.live) for effect in self.abort(lease, reason, stage)]

    def abort_evals(self) -> list[Effect]:
        """They are pinned to the version that is about to go."""
        effects: list[Effect] = []
        for granted in self._evals():
            text = f"the eval was not done in {granted.hold_s:g} s (eval.hold_s) before a flip"
            effects += self.abort(granted.lease, text, "lost")
        return effects

    def abort_expired(self, now: float) -> list[Effect]:
        effects: list[Effect] = []
        for held in list(self.live.values()):
            if now >= held.dead_at:
                text = f"not done {held.granted.revoke_after_s:g} s after it was granted"
                effects += self.abort(held.granted.lease, text, "lost")
        return effects

    def _problem(self, granted: LeaseGranted) -> tuple[Stage | None, str]:
        """Why a lease is not taken: whose fault, and the reason; None when it is."""
        installed, live, kept = self.versions.serving, len(self.live), len(self.outbox)
        if not self.settings.takes_leases:
            return "lost", f"engine {self.settings.engine!r} generates nothing; lease to others"
        if self.leaving:
            return "draining", f"this worker leaves: {self.leaving}"
        if installed is None:
            return "engine", "no version is installed"
        if live >= self.settings.slots:
            return "lost", f"{live} of {self.settings.slots} slots are in use"
        if live + kept >= LEASES_PER_PEER_MAX:
            return "lost", f"{live + kept} leases are not settled; {LEASES_PER_PEER_MAX} may be"
        if self.outbox.full:
            return "lost", self.outbox.full
        if granted.kind == "eval":
            if granted.version != installed:
                return "lost", f"an eval of {granted.version}, and {installed} is installed"
            if self.versions.installing is not None:
                return "lost", f"{self.versions.installing.version} is being installed"
        return None, ""

    def _fail(self, granted: LeaseGranted, stage: Stage, text: str) -> list[Effect]:
        log = Log("warning", "lease_failed", {"lease": granted.lease, "stage": stage, "text": text})
        failed = messages.LeaseFailed(
            lease=granted.lease, group=granted.group, stage=stage, text=clipped(text)
        )
        if self.session.welcomed:
            return [Send(failed), log]
        self._untold[granted.lease] = failed
        return [log]

    def _end(self, lease: LeaseId) -> LeaseGranted | None:
        ended = self.live.pop(lease, None)
        if ended is None:
            return None
        self._remember(lease)
        return ended.granted

    def _remember(self, lease: LeaseId) -> None:
        """It was answered: a grant of it that comes again is not taken."""
        self._ended.add(lease)
        self._ended_order.append(lease)
        if len(self._ended_order) > ENDED_REMEMBERED_MAX:
            self._ended.discard(self._ended_order.popleft())

    def _evals(self) -> list[LeaseGranted]:
        return [held.granted for held in self.live.values() if held.granted.kind == "eval"]
