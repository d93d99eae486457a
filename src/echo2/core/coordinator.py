"""CoordinatorState: `handle(event, now) -> effects`, the whole coordinator without I/O.

Promise: every decision about versions, groups, leases and money is made here or in the
modules that this one calls, at an explicit `now`, and leaves as effects. An event that the
protocol forbids raises RemoteProtocolError before anything changes.

Events that come together may be taken one after the other, and settled once:

    take(event, now) -> its own effects    take(event, now) -> ...    settle() -> what follows

Many leases are granted a part at a time: until it `is_settled`, `settle` is called again, after
others had their turn. `handle` is all that for one event alone. Effects are carried out in the
order in which they came out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echo2.core.activation_desk import ActivationDesk
from echo2.core.audit_desk import AuditDesk
from echo2.core.dispatch import Dispatcher
from echo2.core.effects import Effect
from echo2.core.events import (
    Event,
    KeyRevoked,
    MachineChanged,
    MachinesFound,
    PardonRequested,
    Persisted,
    Received,
    RelayProbed,
    StopRequested,
    Tick,
)
from echo2.core.group import Group
from echo2.core.learner_desk import LearnerDesk
from echo2.core.money import count_cost
from echo2.core.records import (
    GroupStored,
    LearnerRecorded,
    StepRecorded,
    VersionRecorded,
)
from echo2.core.restored import Restored
from echo2.core.run_state import RunState
from echo2.core.settings import CoordinatorSettings
from echo2.core.waits import waiting_text, waits
from echo2.core.watchdog import Watchdog
from echo2.core.worker_desk import WorkerDesk
from echo2.errors import RemoteProtocolError
from echo2.messages import (
    AuditDone,
    AuditFailed,
    BatchRequest,
    BatchWaiting,
    BroadcastRequest,
    CheckpointSaved,
    Draining,
    EvalRequest,
    Goodbye,
    GroupResult,
    Heartbeat,
    InstallFailed,
    LearnerHeartbeat,
    LearnerHello,
    LeaseFailed,
    Message,
    RelayReport,
    StepCompleted,
    TasksSubmitted,
    VersionInstalled,
    VersionPublished,
    WorkerHello,
)
from echo2.types import PeerId

REVOKED = "its key was revoked"
WAITING_INTERVAL_S = 1.0
WATCH_EACH_S = 1.0
FAILED_IN_ROW_BATCHES = 4
FAILED_IN_ROW_MIN = 32


class CoordinatorState:
    """`state` may be read by anyone, and is changed only by `handle`."""

    def __init__(self, settings: CoordinatorSettings, restored: Restored | None = None) -> None:
        self.state = RunState(settings, restored)
        self.workers = WorkerDesk(self.state)
        self.learner = LearnerDesk(self.state)
        self.audits = AuditDesk(self.state)
        self.dispatcher = Dispatcher(self.state)
        self.activation = ActivationDesk(self.state)
        self._handlers: dict[type[Message], Callable[[PeerId, Any], None]] = {
            WorkerHello: self.workers.hello,
            Heartbeat: self.workers.heartbeat,
            VersionInstalled: self.workers.installed,
            InstallFailed: self.workers.install_failed,
            GroupResult: self.workers.result,
            LeaseFailed: self.workers.failed,
            AuditDone: self.audits.done,
            AuditFailed: self.audits.failed,
            RelayReport: self.workers.relays.report,
            Draining: self._draining,
            Goodbye: self._goodbye,
            LearnerHello: self.learner.hello,
            LearnerHeartbeat: self.learner.heartbeat,
            TasksSubmitted: self.learner.batches.tasks,
            BatchRequest: self.learner.batches.batch_request,
            StepCompleted: self.learner.batches.step_completed,
            VersionPublished: self.learner.published,
            BroadcastRequest: self.learner.broadcast,
            CheckpointSaved: self.learner.checkpoint,
            EvalRequest: self.learner.eval_request,
        }
        self.started_at: float | None = None
        self._unsettled = self._may_lease = self._only_buffered = False
        self._watchdog = Watchdog()
        self._watched_at = 0.0

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event, and settle all of it."""
        effects = [*self.take(event, now), *self.settle()]
        while not self.is_settled:
            effects += self.settle()
        return effects

    def take(self, event: Event, now: float) -> list[Effect]:
        """Take one event at `now` (seconds, monotonic; a step back is read as no step). Returns
        its own effects; `settle` follows, now or after the events that came with it."""
        state = self.state
        state.now = max(state.now, now)
        if self.started_at is None:
            self._start()
        if state.finished is None:
            self._take(event)
            if not _only_informs(event):
                self._unsettled = True
                self._may_lease |= not self._only_buffered
        return self._effects()

    def settle(self, *, grants: bool = True) -> list[Effect]:
        """What became possible by the events since the last time? Not asked after heartbeats and
        news of relays: those change nothing that the next tick would not see. No lease is granted
        together with a batch, nor without `grants`: both are work enough."""
        is_batch = self._unsettled and self.state.finished is None and self._try_batch()
        if grants and not is_batch and not self.is_settled:
            self._grant()
        self._unsettled = False
        return self._effects()

    @property
    def is_settled(self) -> bool:
        """Nothing is left that `settle` put off."""
        return not self._may_lease or self.state.finished is not None

    def _effects(self) -> list[Effect]:
        effects, self.state.effects = self.state.effects, []
        return effects

    # ---------------------------------------------------------------------- events

    def _start(self) -> None:
        state, settings = self.state, self.state.settings
        self.started_at = state.costed_at = state.now
        state.seat.vacant_since = state.audits.auditor_seen_at = state.now
        state.emit(
            "run_started",
            run_id=settings.run_id,
            staleness_max=settings.staleness_max,
            groups_per_step=settings.groups_per_step,
            group_size=settings.group_size,
            late=settings.late,
            period=settings.period,
        )
        state.begin()
        self.workers.judge_restored()
        state.expire_late()

    def _take(self, event: Event) -> None:
        self._only_buffered = False
        match event:
            case Received(peer, message, key):
                self.state.verified_key = key
                self._received(peer, message)
            case Persisted(record_id):
                self._persisted(record_id)
            case Tick():
                self._tick()
            case RelayProbed():
                self.workers.relays.probed(event)
            case KeyRevoked(peer):
                self._revoked(peer)
            case PardonRequested(peer):
                self.audits.pardon(peer)
            case MachinesFound():
                self.activation.found(event)
            case MachineChanged():
                self.activation.changed(event)
            case StopRequested(reason):
                self.state.finish(ok=True, finished=False, reason=reason)

    def _received(self, peer: PeerId, message: Message) -> None:
        handler = self._handlers.get(type(message))
        if handler is None:
            raise RemoteProtocolError(
                f"a coordinator does not take {type(message).__name__}", reason="wrong_receiver"
            )
        handler(peer, message)

    def _draining(self, peer: PeerId, message: Draining) -> None:
        if peer != self.state.seat.peer:
            self.workers.draining(peer, message)

    def _goodbye(self, peer: PeerId, message: Goodbye) -> None:
        if self.state.members.get(peer) is not None:
            self.workers.goodbye(peer, message)
        else:
            self.learner.goodbye(peer, message)

    def _revoked(self, peer: PeerId) -> None:
        """Whatever it holds is given to others at once; no silence is waited for."""
        state, seat = self.state, self.state.seat
        if state.members.get(peer) is not None:
            self.workers.leave(peer, REVOKED)
        elif peer == seat.peer and not seat.silent:
            seat.vacant_since = state.now
            self._learner_left(REVOKED)
        for lease in state.book.leases_of(peer):  # of before a restart; it did not come back yet
            state.lose_lease(lease, REVOKED, counted=True, tell=False)

    def _persisted(self, record_id: int) -> None:
        found = self.state.pending.pop(record_id, None)
        self.state.recorded_at.pop(record_id, None)
        if found is None:
            return
        record, context = found
        match record:
            case GroupStored():
                assert isinstance(context, Group)
                self._only_buffered = self.workers.stored(record_id, record, context)
            case StepRecorded():
                self.learner.batches.step_durable(record_id)
            case LearnerRecorded():
                self.learner.seated(record, context)
            case VersionRecorded():
                self.learner.version_durable(context)
            case _:
                pass  # nothing waits for a checkpoint's record

    def _try_batch(self) -> bool:
        """Whether one was granted. Groups that were only buffered make no lease possible, but by
        it."""
        step = self.state.next_step
        self.audits.dispatch()
        self.learner.batches.try_batch()
        if self.state.next_step == step:
            return False
        self._may_lease = True
        return True

    def _grant(self) -> None:
        self._may_lease = False
        if not self.learner.batches.is_over_budget:
            self.dispatcher.request_tasks()
            self._may_lease = self.dispatcher.dispatch()
        for found in self.state.evals.done():
            self.state.end_eval(found)

    # ----------------------------------------------------------------------- ticks

    def _tick(self) -> None:
        count_cost(self.state)
        self._look_at_learner()
        self._look_at_workers()
        self.activation.tick()
        self.workers.relays.tick()
        self._look_at_leases()
        self._look_at_evals()
        self._look_at_the_run()
        self._tell_waiting()
        self._tell_waits()

    def _look_at_learner(self) -> None:
        state, seat = self.state, self.state.seat
        if seat.peer is None:
            return
        silent_s = state.now - seat.heard_at
        if silent_s > state.settings.gone_s and not seat.silent:
            seat.vacant_since = seat.heard_at
            self._learner_left(f"silent for {silent_s:.1f} s")

    def _learner_left(self, reason: str) -> None:
        """Its seat stays as it is, for itself or another learner to take."""
        state = self.state
        state.seat.silent = True
        state.stream.forget_request()
        state.emit("learner_left", incarnation=state.lineage.incarnation, reason=reason)

    def _look_at_workers(self) -> None:
        state, settings = self.state, self.state.settings
        for worker in state.members.silent(state.now, longer_than_s=settings.suspect_s):
            if not worker.suspect:
                worker.suspect = True
                state.emit("worker_suspect", worker=worker.peer)
        for worker in state.members.silent(state.now, longer_than_s=settings.gone_s):
            silent_s = state.now - worker.heard_at
            self.workers.leave(worker.peer, f"silent for {silent_s:.1f} s")
        state.announce_again()

    def _look_at_leases(self) -> None:
        state, settings = self.state, self.state.settings
        for lease in list(state.book.leases.values()):
            if state.book.groups[lease.group].early is not None:
                continue  # it is done, and only its task is not here again
            age_s, idle_s = state.now - lease.granted_at, state.now - lease.progressed_at
            if lease.worker not in state.members.workers and age_s > settings.gone_s:
                reason = f"{lease.worker} did not come back within {settings.gone_s:g} s"
            elif age_s > lease.revoke_after_s:
                reason = f"not done after {age_s:.1f} s, its cap is {lease.revoke_after_s:.1f} s"
            elif idle_s > settings.stall_s:
                reason = f"no new token for {idle_s:.1f} s, dispatch.stall_s is {settings.stall_s}"
            else:
                continue
            state.lose_lease(lease, reason, counted=True, tell=True)

    def _look_at_evals(self) -> None:
        state, settings = self.state, self.state.settings
        newest = state.lineage.newest
        for eval_id, found in list(state.evals.evals.items()):
            if self.learner.batches.is_over_budget:
                state.cancel_eval(eval_id, "the budget is spent")
                continue
            for lease in list(found.leases.values()):
                idle_s = state.now - lease.progressed_at
                age_s = state.now - lease.granted_at
                if idle_s > settings.stall_s or age_s > settings.lease_max_s:
                    reason = f"stalled on {lease.worker}: no new token for {idle_s:.1f} s"
                    state.lose_eval_lease(lease, reason, tell=True)
            serving = any(
                worker.installed == found.version for worker in state.members.workers.values()
            )
            if not serving and found.version != newest:
                state.cancel_eval(eval_id, f"no worker serves {found.version} any more")

    def _look_at_the_run(self) -> None:
        """What cannot make progress ends, with its cause."""
        state, settings = self.state, self.state.settings
        seat = state.seat
        since = state.recording_since
        recording_s = 0.0 if since is None else state.now - since
        if recording_s > settings.disk_timeout_s:
            state.finish(
                ok=False,
                finished=False,
                reason=f"the disk of the run folder took no record for {recording_s:.0f} s, and "
                f"{len(state.pending)} wait for it; mend it, then start the coordinator again: "
                "what was acknowledged is on it",
            )
            return
        if seat.peer is None or seat.silent:
            absent_s = state.now - seat.vacant_since
            if absent_s > settings.learner_timeout_s:
                state.finish(
                    ok=False,
                    finished=False,
                    reason=f"no learner for {absent_s:.0f} s (run.learner_timeout_s = "
                    f"{settings.learner_timeout_s:g}); start it with: echo2 learner --resume",
                )
            return
        failed_max = max(FAILED_IN_ROW_MIN, FAILED_IN_ROW_BATCHES * settings.groups_per_step)
        if state.failed_in_row >= failed_max:
            state.finish(
                ok=False,
                finished=False,
                reason=f"{state.failed_in_row} groups failed one after the other; see reason in "
                "events.jsonl",
            )
            return
        is_waited_for = seat.wanted_step is not None or bool(state.evals.evals)
        if not is_waited_for or self.dispatcher.can_progress:
            state.no_worker_since = None
        elif state.no_worker_since is None:
            state.no_worker_since = state.now
        elif state.now - state.no_worker_since > settings.no_worker_timeout_s:
            state.finish(
                ok=False,
                finished=False,
                reason=f"no worker could sample for {settings.no_worker_timeout_s:g} s "
                f"(run.no_worker_timeout_s) while {waiting_text(state, self.dispatcher.reason)}",
            )

    def _tell_waits(self) -> None:
        state = self.state
        if state.finished is None and state.now - self._watched_at >= WATCH_EACH_S:
            self._watched_at = state.now
            found = waits(state, self.dispatcher.reason)
            for fields in self._watchdog.look(found, state.now):
                state.emit("wait_changed", **fields)

    def _tell_waiting(self) -> None:
        """Say why there is no batch: on change, at most once a second."""
        state, seat = self.state, self.state.seat
        if seat.wanted_step is None or seat.peer is None:
            return
        text = waiting_text(state, self.dispatcher.reason)
        if text != seat.told_text and state.now - seat.told_at >= WAITING_INTERVAL_S:
            seat.told_text, seat.told_at = text, state.now
            state.send(
                seat.peer,
                BatchWaiting(
                    incarnation=state.lineage.incarnation,
                    step=seat.wanted_step,
                    text=text[:2048],
                ),
            )


def _only_informs(event: Event) -> bool:
    return isinstance(event, RelayProbed) or (
        isinstance(event, Received)
        and isinstance(event.message, Heartbeat | LearnerHeartbeat | RelayReport)
    )
