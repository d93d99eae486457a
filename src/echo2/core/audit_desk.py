"""Workers are not trusted: who recomputes which rewards, what came of it, who is quarantined.

A chosen group waits for its verdict, at most `audit.wait_s`, and not at all while no auditor can
be asked: then it is `unaudited`, and trained as if it had not been chosen. So an audit delays a
batch by a bounded time, and never stops a run. A group is audited by a worker that the operator
named (`audit.workers`) and that did not sample it.

    verdict      rewards agree within audit.reward_tolerance   confirmed   may be trained
                 they do not, or no such transcript is made    refuted     withdrawn
                 nobody could say in time                      unaudited   may be trained

An offender is quarantined: its leases and its results that no batch holds go back to the queue,
it is refused until the operator pardons it, and the event tells the evidence and what was trained
of it already. With audit.action = "report" only the event `worker_suspected` is told.
"""

from __future__ import annotations

from typing import Any

from echo2.core.admission import admit
from echo2.core.audits import EVIDENCE_MAX, TRIES_MAX, OpenAudit, Quarantine
from echo2.core.effects import OrderAudit
from echo2.core.group import WITH_RESULT, StoredResult
from echo2.core.membership import WorkerState
from echo2.core.run_state import RunState
from echo2.core.suspicion import Observation, Suspicion
from echo2.core.worker_desk import WorkerDesk, quarantined_text
from echo2.errors import RemoteProtocolError
from echo2.messages import AuditDone, AuditFailed
from echo2.types import GroupId, GroupMismatch, PeerId

NO_AUDITOR = "no auditor was here that could be asked"


class AuditDesk:
    def __init__(self, state: RunState) -> None:
        self.state = state

    # ----------------------------------------------------------------------- orders

    def dispatch(self) -> None:
        """Ask auditors about the groups that wait, the oldest first; give up what took too long."""
        state, audits = self.state, self.state.audits
        auditors = self._auditors()
        if auditors:
            audits.auditor_seen_at = state.now
        free = dict.fromkeys(auditors, state.settings.audit.in_flight_max)
        for audit in audits.open.values():
            if audit.auditor in free:
                free[audit.auditor] -= 1
        for audit in list(audits.open.values()):
            if audit.restored and not audits.learner_spoke:
                continue
            if audit.auditor is None:
                self._ask(audit, auditors, free)
            elif state.now - audit.ordered_at > state.settings.gone_s:
                audit.auditor = None  # the order or its answer may be lost
                self._ask(audit, auditors, free)
            self._give_up(audit, auditors)

    def _auditors(self) -> list[PeerId]:
        """Named by the operator, here, and able to play a transcript again."""
        found = []
        for peer in self.state.settings.audit.workers:
            worker = self.state.members.get(peer)
            if worker is None or worker.suspect or not worker.replays:
                continue
            if worker.state is WorkerState.READY:
                found.append(peer)
        return found

    def _ask(self, audit: OpenAudit, auditors: list[PeerId], free: dict[PeerId, int]) -> None:
        state = self.state
        able = [p for p in auditors if p != audit.worker and p not in audit.tried and free[p] > 0]
        if not able:
            return
        auditor = max(able, key=lambda peer: free[peer])
        free[auditor] -= 1
        audit.auditor, audit.ordered_at = auditor, state.now
        result = audit.group.result
        assert result is not None
        state.effects.append(
            OrderAudit(auditor, audit.group.id, audit.group.task, result, state.settings.sampling)
        )

    def _give_up(self, audit: OpenAudit, auditors: list[PeerId]) -> None:
        """The rule that bounds the wait: `audit.wait_s` in all; `heartbeat.gone_s` while nobody
        is here to be asked; not at all when everybody who could be asked has tried."""
        state, settings = self.state, self.state.settings
        others = [peer for peer in auditors if peer != audit.worker]
        waited_s = state.now - audit.since
        if waited_s > settings.audit.wait_s:
            at = f" at {audit.auditor}" if audit.auditor is not None else ""
            reason = f"no verdict{at} after {waited_s:.1f} s, audit.wait_s is "
            reason += f"{settings.audit.wait_s:g}"
        elif len(audit.tried) >= TRIES_MAX or (others and audit.tried.issuperset(others)):
            reason = audit.reason
        elif auditors and not others:
            reason = f"{audit.worker} is the only auditor here, and sampled it"
        elif not auditors and state.now - state.audits.auditor_seen_at > settings.gone_s:
            reason = NO_AUDITOR
        else:
            return
        self._close(audit, "unaudited", reason)

    # ---------------------------------------------------------------------- answers

    def done(self, peer: PeerId, message: AuditDone) -> None:
        audit = self._asked(peer, message.group, message.lease)
        if audit is None:
            return
        assert audit.group.result is not None
        claimed = [header.reward for header in audit.group.result.trajectories]
        recomputed = list(message.rewards)
        if not message.problem and len(recomputed) != len(claimed):
            raise RemoteProtocolError(
                f"{peer} recomputed {len(recomputed)} rewards of {message.group}, which has "
                f"{len(claimed)} trajectories",
                reason="wrong_audit",
            )
        audit.auditor = peer  # it may have been given up for another one meanwhile
        if message.problem:
            self._refuted(audit, claimed, [], message.problem)
            return
        diffs = [abs(a - b) for a, b in zip(claimed, recomputed, strict=True)]
        tolerance = self.state.settings.audit.reward_tolerance
        num_wrong = sum(diff > tolerance for diff in diffs)
        if num_wrong:
            index = diffs.index(max(diffs))
            text = (
                f"{num_wrong} of {len(claimed)} rewards are wrong: trajectory {index} claims "
                f"{claimed[index]:g}, recomputed {recomputed[index]:g}"
            )
            self._refuted(audit, claimed, recomputed, text)
            return
        self._close(audit, "confirmed", "", diff=max(diffs))
        self.state.audits.note_rewards(audit.worker, None)

    def failed(self, peer: PeerId, message: AuditFailed) -> None:
        """Another auditor is asked, a bounded number of times."""
        audit = self._asked(peer, message.group, message.lease)
        if audit is not None:
            audit.tried.add(peer)
            if audit.auditor == peer:
                audit.auditor = None
            audit.reason = f"{peer} could not say: {message.text}"

    def _asked(self, peer: PeerId, group: GroupId, lease: str) -> OpenAudit | None:
        """The open audit that an answer is about; None for one that is repeated or late, or comes
        before it is known what the learner had. RemoteProtocolError when the peer is no auditor."""
        if self.state.members.heard(peer, self.state.now) is None:
            raise RemoteProtocolError(
                f"{peer} is not known here: say hello first", reason="unknown_peer"
            )
        if peer not in self.state.settings.audit.workers:
            raise RemoteProtocolError(
                f"{peer} is no auditor: it is not named in audit.workers", reason="not_an_auditor"
            )
        audit = self.state.audits.open.get(group)
        if audit is None or audit.lease != lease or audit.worker == peer:
            return None
        if audit.restored and not self.state.audits.learner_spoke:
            return None
        return audit

    def _refuted(
        self, audit: OpenAudit, claimed: list[float], recomputed: list[float], text: str
    ) -> None:
        state, auditor = self.state, audit.auditor
        evidence = {
            "group_id": audit.group.id,
            "lease": audit.lease,
            "auditor": auditor,
            "reason": text,
            "claimed": claimed,
            "recomputed": recomputed,
        }
        record = state.audits.note_rewards(audit.worker, evidence)
        self._close(audit, "refuted", text, claimed=claimed, recomputed=recomputed)
        if record.sum.value >= state.settings.audit.refuted_needed:
            self._accuse(
                audit.worker,
                "rewards",
                f"{len(record.refuted)} of its groups were refuted, the last ({audit.group.id}): "
                f"{text}",
                evidence=record.refuted,
            )

    def _close(
        self,
        audit: OpenAudit,
        verdict: str,
        reason: str,
        *,
        diff: float | None = None,
        claimed: list[float] | None = None,
        recomputed: list[float] | None = None,
    ) -> None:
        state, group = self.state, audit.group
        state.audits.close(group.id)
        state.audits.verdicts[verdict] += 1
        state.emit(
            "group_audited",
            group_id=group.id,
            lease=audit.lease,
            worker=audit.worker,
            auditor=audit.auditor,
            verdict=verdict,
            reason=reason,
            reward_diff_max=diff,
            claimed=claimed or [],
            recomputed=recomputed or [],
        )
        if verdict == "refuted":
            state.withdraw(group, f"its audit refuted it: {reason}")
        else:
            admit(state, group)

    # --------------------------------------------------------------------- logprobs

    def compared(self, mismatch: list[tuple[PeerId, GroupMismatch]]) -> None:
        """What the learner measured of each worker's groups at a step that is over."""
        audits = self.state.audits
        known = [each for each in mismatch if each[0] not in audits.quarantined]
        for suspicion in audits.mismatch.note(known, self._precision_of):
            evidence = [_told(observation) for observation in suspicion.odd][-EVIDENCE_MAX:]
            if suspicion.confirmed:
                self._accuse(
                    suspicion.worker,
                    "mismatch",
                    suspicion.reason,
                    evidence=evidence,
                    suspicion=suspicion,
                )
            else:
                self._report(suspicion.worker, "mismatch", suspicion.reason, evidence)
        self._look_at_fleet()

    def _precision_of(self, peer: PeerId) -> str:
        worker = self.state.members.get(peer)
        return worker.precision if worker is not None else ""

    def _look_at_fleet(self) -> None:
        """If workers differ from the learner as a whole, it is told, once: then no comparison with
        the fleet says much."""
        audits = self.state.audits
        found = audits.mismatch.fleet()
        is_off = found is not None and found[0] > found[1]
        if is_off and found is not None and not audits.fleet_is_off:
            self.state.emit(
                "fleet_suspected",
                centre=found[0],
                bound=found[1],
                reason="half of the workers differ from the learner by more than their precision "
                "explains; look at the learner, or at who owns them",
            )
        audits.fleet_is_off = is_off

    # ------------------------------------------------------------------- quarantine

    def _accuse(
        self,
        peer: PeerId,
        cause: str,
        reason: str,
        *,
        evidence: list[dict[str, Any]],
        suspicion: Suspicion | None = None,
    ) -> None:
        if self.state.settings.audit.action == "report":
            self._report(peer, cause, reason, evidence)
        elif peer not in self.state.audits.quarantined:
            self._quarantine(peer, cause, reason, evidence, suspicion)

    def _report(
        self, peer: PeerId, cause: str, reason: str, evidence: list[dict[str, Any]]
    ) -> None:
        """Told once, until it is pardoned or the coordinator is started again."""
        if peer in self.state.audits.suspected:
            return
        self.state.audits.suspected.add(peer)
        self.state.emit(
            "worker_suspected", worker=peer, cause=cause, reason=reason, evidence=evidence
        )

    def _quarantine(
        self,
        peer: PeerId,
        cause: str,
        reason: str,
        evidence: list[dict[str, Any]],
        suspicion: Suspicion | None,
    ) -> None:
        state, seat = self.state, self.state.seat
        last = suspicion.odd[-1] if suspicion is not None else None
        in_training = tuple(
            group.id
            for group in (seat.batch.groups if seat.batch is not None else ())
            if _is_of(group.result, peer)
        )
        here = [g for g in state.book.in_state(*WITH_RESULT) if _is_of(g.result, peer)]
        trained = state.history.of_worker(peer)
        quarantine = Quarantine(cause, reason, state.step, in_training)
        state.audits.quarantined[peer] = quarantine
        state.emit(
            "worker_quarantined",
            worker=peer,
            cause=cause,
            reason=reason,
            step=state.step,
            evidence=evidence,
            precision=self._precision_of(peer),
            centre=last.centre if last is not None else None,
            spread=last.spread if last is not None else None,
            bound=last.threshold if last is not None else None,
            in_training=list(in_training),
            num_trained=state.audits.num_trained[peer],
            trained_since=trained[0].step if trained else None,
            trained=[entry.group.id for entry in trained],
            withdrawn=[group.id for group in here],
        )
        for group in here:
            state.withdraw(group, f"{peer} is quarantined: {reason}")
        text = quarantined_text(peer, quarantine)
        if state.members.get(peer) is not None:
            state.refuse(peer, "quarantined", text)
            WorkerDesk(state).leave(peer, text, counted=False)
        for lease in state.book.leases_of(peer):  # of before a restart; it did not come back yet
            state.lose_lease(lease, text, counted=False, tell=False)

    def withdraw_quarantined(self) -> None:
        """What an earlier coordinator left of a quarantined worker, because the learner had it:
        the learner asks for a batch, so it has not."""
        for peer in self.state.audits.quarantined:
            for group in self.state.book.in_state(*WITH_RESULT):
                if _is_of(group.result, peer):
                    self.state.withdraw(group, f"{peer} is quarantined")

    def pardon(self, peer: PeerId) -> None:
        """The operator lets it in again; what was held against it is forgotten."""
        if peer in self.state.audits.quarantined:
            self.state.audits.forget(peer)
            self.state.emit("worker_pardoned", worker=peer)


def _is_of(result: StoredResult | None, peer: PeerId) -> bool:
    return result is not None and result.worker == peer


def _told(observation: Observation) -> dict[str, Any]:
    return {
        "groups": list(observation.groups[:EVIDENCE_MAX]),
        "num_tokens": observation.num_tokens,
        "diff_mean": observation.diff_mean,
        "bound": observation.threshold,
        "centre": observation.centre,
        "spread": observation.spread,
    }
