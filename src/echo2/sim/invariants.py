"""The promises, checked after every event against books of our own.

`Invariants.observe([(event, effects), ...])` reads what went into the core and what came out, and
raises `Violation` at the first thing that breaks a promise. Of the core's own state it looks
only at the sizes of what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from echo2.core.effects import (
    DeliverGroup,
    Effect,
    Emit,
    Finish,
    OrderAudit,
    Persist,
    ProbeRelay,
    Send,
)
from echo2.core.events import Event, Persisted, Received
from echo2.core.records import (
    GroupStored,
    LearnerRecorded,
    Record,
    StepRecorded,
    VersionRecorded,
)
from echo2.core.run_state import RunState
from echo2.core.settings import CoordinatorSettings
from echo2.messages import (
    Draining,
    EvalRequest,
    InstallFailed,
    VersionInstalled,
    VersionPublished,
)
from echo2.sim.books import Books, EvalBook, Place
from echo2.sim.checks_audits import AuditChecks
from echo2.sim.checks_evals import EvalChecks
from echo2.sim.checks_groups import GroupChecks
from echo2.sim.checks_learner import LearnerChecks
from echo2.sim.moment import Moment, Violation, require
from echo2.types import PeerId

__all__ = ["Invariants", "Violation"]


class Invariants:
    """`liars`: workers that are not honest."""

    def __init__(
        self, settings: CoordinatorSettings, liars: frozenset[PeerId] = frozenset()
    ) -> None:
        self.settings = settings
        self.books = Books(settings)
        self.num_checked = 0
        self.moment = Moment(settings, self.books)
        evals = EvalChecks(self.moment)
        self._audits = audits = AuditChecks(self.moment, liars)
        groups, learner = GroupChecks(self.moment, evals), LearnerChecks(self.moment, audits)
        self._groups, self._learner = groups, learner
        self._effects: dict[type, Callable[[Any], None]] = {
            Emit: self._emit,
            Persist: self._persist,
            DeliverGroup: learner.delivered,
            Finish: self._finish,
            OrderAudit: self._order,
            ProbeRelay: lambda _: None,
        }
        self._sends: dict[type, Callable[[PeerId, Any], None]] = {
            **groups.sends,
            **learner.sends,
            **evals.sends,
        }
        self._emits: dict[str, Callable[[dict[str, Any]], None]] = {
            **groups.emits,
            **learner.emits,
            **audits.emits,
            "run_finished": self._run_finished,
        }

    def observe(self, turn: Sequence[tuple[Event | None, list[Effect]]], state: RunState) -> None:
        """Events were taken, each with its own effects, and settled (None, with the effects of
        that); `state` is the core's, for its sizes alone."""
        for event, effects in turn:
            self.num_checked += event is not None
            self.moment.event, self.moment.record = event, None
            if event is not None:
                self._before(event)
            for effect in effects:
                self._follow(effect)
        self._after(state)

    def _follow(self, effect: Effect) -> None:
        if isinstance(effect, Send):
            check = self._sends.get(type(effect.message))
            if check is not None:
                check(effect.peer, effect.message)
        else:
            self._effects[type(effect)](effect)

    def coordinator_restarted(self, state: RunState, committed: int) -> None:
        """Its memory is gone, but for what the ledger says: every group that it acknowledged
        and that may still be trained. `committed`: the last record that is in the ledger; the old
        one may not have heard so."""
        books = self.books
        for record_id, record in self.moment.pending.items():
            if record_id <= committed:
                self._is_durable(record)
        trains = self._learner.untold_groups
        restored = {
            group.id: group.result
            for group in state.book.groups.values()
            if group.result is not None
        }
        for group, track in books.tracks.items():
            with_result = (Place.BUFFERED, Place.AUDITING, Place.TRAINING)
            acknowledged = track.place in with_result and group not in trains
            if acknowledged and books.are_alive(track.versions):
                require(group in restored, f"{group} was acknowledged, and a restart lost it")
        resumed = state.book.leases
        for lease, group in books.by_lease.items():
            version = books.tracks[group].version
            assert version is not None
            require(
                lease in resumed or not books.is_alive(version),
                f"{lease} of {group} was in work, and a restart lost it",
            )
        for group in (*restored, *(lease.group for lease in resumed.values())):
            require(
                books.track(group).place is not Place.ENDED,
                f"{group} ended, and a restart brought it back",
            )
        stored = {result.lease for result in restored.values()}
        back = sorted(stored & books.withdrawn)
        require(not back, f"results of {back[:5]} were withdrawn, and a restart brought them back")
        self.moment.durable_results |= stored
        self.moment.settled |= stored
        books.forget_all_open(restored, resumed.values(), trains)
        for worker in books.quarantined:
            require(worker in state.audits.quarantined, f"{worker} was quarantined, till a restart")
        self.moment.pending.clear()
        self.moment.last, self.moment.was_restarted = False, True

    def _before(self, event: Event) -> None:
        books = self.books
        if isinstance(event, Persisted):
            self.moment.record = self.moment.pending.pop(event.record_id, None)
            self._is_durable(self.moment.record)
        elif isinstance(event, Received):
            worker = books.workers.get(event.peer)
            match event.message:
                case VersionInstalled(version=version) if worker is not None:
                    worker.installed = version
                case InstallFailed(serving=serving) if worker is not None:
                    worker.installed = serving if serving in books.published else None
                case Draining() if worker is not None:
                    worker.draining = True
                case VersionPublished(version=version, final=True):
                    self.moment.final.add(version)
                case EvalRequest() as request if request.incarnation == books.incarnation:
                    books.evals.setdefault(
                        request.eval_id, EvalBook(request.version, len(request.tasks))
                    )
                case _:
                    pass

    def _is_durable(self, record: Record | None) -> None:
        moment = self.moment
        match record:
            case GroupStored(_, lease):
                moment.durable_results.add(lease)
            case LearnerRecorded(incarnation):
                moment.durable_incarnations.add(incarnation)
            case StepRecorded() | VersionRecorded():
                moment.durable.append(record)
            case _:
                pass

    def _after(self, state: RunState) -> None:
        books, settings = self.books, self.settings
        step, held = books.next_step, books.held
        if settings.late == "wait" and held and not self.moment.finished:
            total, last = 0, max(held)
            require(min(held) >= step, lambda: f"held for {min(held)}, next batch {step}")
            for expiry in range(step, last + 1):
                total += held.get(expiry, 0)
                room = settings.groups_per_step * (expiry - step + 1)
                require(
                    total <= room,
                    lambda e=expiry, n=total, r=room: (
                        f"pacing: {n} groups expire by {e}, "  # type: ignore[misc]
                        f"batches from {step} on have room for {r}"
                    ),
                )
        require(
            not self.moment.owed or self.moment.finished,
            lambda: f"not returned by a rewind: {self.moment.owed}",
        )
        self._audits.after()
        self._check_sizes(state)

    def _order(self, order: OrderAudit) -> None:
        track = self.books.track(order.group)
        require(
            track.place is Place.AUDITING and track.lease == order.result.lease,
            f"{order.peer} is to audit {order.group}, which is {track.place.value}",
        )
        require(
            order.peer in self.books.workers and order.peer != track.worker,
            f"{order.peer} is to audit {order.group} of {track.worker}",
        )

    def _check_sizes(self, state: RunState) -> None:
        """Memory does not grow with the run."""
        books, settings = self.books, self.settings
        require(
            books.num_held <= settings.buffer_max,
            lambda: f"{books.num_held} groups are held, R(S + 1) is {settings.buffer_max}",
        )
        trained = settings.groups_per_step * (books.step - min(books.kept))
        require(
            len(state.history.trained) <= max(0, trained),
            lambda: (
                f"{len(state.history.trained)} trained groups are remembered, "
                f"{trained} were trained since the oldest checkpoint {min(books.kept)}"
            ),
        )
        in_work = settings.groups_per_step * (settings.staleness_max + 2 + settings.tasks_ahead)
        in_work += len(self.moment.returned) + 256
        require(
            len(state.book.groups) <= in_work,
            lambda: f"the book holds {len(state.book.groups)} groups, at most {in_work}",
        )

    def _persist(self, effect: Persist) -> None:
        self.moment.pending[effect.record_id] = effect.record
        match effect.record:
            case GroupStored() as stored:
                self._groups.stored(effect.record_id, stored)
            case StepRecorded() as step:
                self._learner.recorded(step)
            case _:
                pass

    def _emit(self, effect: Emit) -> None:
        check = self._emits.get(effect.event)
        if check is not None:
            check(effect.fields)

    def _run_finished(self, fields: dict[str, Any]) -> None:
        self.moment.finished = True
        if not fields["finished"]:
            return
        still_open = [
            group
            for group, track in self.books.tracks.items()
            if track.begun and track.place is not Place.ENDED
        ]
        require(not still_open, f"the run finished, and these never ended: {still_open[:20]}")

    def _finish(self, effect: Finish) -> None:
        require(self.moment.finished, "the coordinator ended without run_finished")
