"""The worker daemon as a state machine: what a worker may do, and when.

Promises: the hello comes first; no lease is taken before a version is installed; every
lease ends exactly once, as a result, a failure or a revocation; a result is kept until it
is acknowledged; a drain, a silence and every retry has a bound and a printed cause.

    joining --welcome--> syncing --version installed--> ready
                            ^------- engine died ---------'
    any of them --SIGTERM--> draining --> stopped          (TRANSITIONS below)

A lost connection changes no state: groups go on, and the next hello names them. Leaves
sockets, bytes, engines, processes and time to a shell that carries out the effects in order.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Final

from echo2 import messages
from echo2.core import worker_events as events
from echo2.core.worker_audits import Audits
from echo2.core.worker_engine import EngineCare, EngineLife
from echo2.core.worker_events import Effect, Event, Exit, Log, Send
from echo2.core.worker_leases import Leases
from echo2.core.worker_session import Session, refusal_text
from echo2.core.worker_settings import WorkerSettings
from echo2.core.worker_versions import Versions, clipped
from echo2.errors import LocalProtocolError
from echo2.messages import PROTOCOL

REPORT_S = 2.0
"""While a fetch is under way, what came from whom is told so often."""


class WorkerPhase(enum.StrEnum):
    JOINING = "joining"
    SYNCING = "syncing"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


TRANSITIONS: Final[dict[WorkerPhase, frozenset[WorkerPhase]]] = {
    WorkerPhase.JOINING: frozenset(
        {WorkerPhase.SYNCING, WorkerPhase.DRAINING, WorkerPhase.STOPPED}
    ),
    WorkerPhase.SYNCING: frozenset({WorkerPhase.READY, WorkerPhase.DRAINING, WorkerPhase.STOPPED}),
    WorkerPhase.READY: frozenset({WorkerPhase.SYNCING, WorkerPhase.DRAINING, WorkerPhase.STOPPED}),
    WorkerPhase.DRAINING: frozenset({WorkerPhase.STOPPED}),
    WorkerPhase.STOPPED: frozenset(),
}


class WorkerState:
    """`handle(event, now)` returns effects and performs none; `now` never falls."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.phase = WorkerPhase.JOINING
        self.session = Session(settings)
        self.engine = EngineCare(settings)
        self.versions = Versions(
            needs_weights=settings.needs_weights, attempts_max=settings.attempts_max
        )
        self.leases = Leases(settings, self.session, self.versions)
        self.audits = Audits()
        self._drain_until = 0.0
        self._report_at = 0.0
        self._handlers: dict[type, Callable[[Any, float], list[Effect]]] = {
            events.Started: self._started,
            events.Tick: self._tick,
            events.ConnectionRestored: self._connection_restored,
            events.ConnectionLost: self._connection_lost,
            events.ConnectFailed: self._connect_failed,
            events.FetchProgress: self._fetch_progress,
            events.FetchDone: self._fetch_done,
            events.FetchFailed: self._fetch_failed,
            events.EngineReady: self._engine_ready,
            events.EngineDied: self._engine_died,
            events.StartFailed: self._start_failed,
            events.InstallDone: self._install_done,
            events.InstallFailed: self._install_failed,
            events.GroupDone: self._group_done,
            events.GroupFailed: self._group_failed,
            events.AuditEnded: self._audit_ended,
            events.DrainRequested: self._drain_requested,
            messages.WorkerWelcome: self._welcome,
            messages.Refused: self._refused,
            messages.HeartbeatEcho: self._heartbeat_echo,
            messages.VersionAnnounced: self._version_announced,
            messages.RelayPeers: self._relay_peers,
            messages.LeaseGranted: self._lease_granted,
            messages.LeaseRevoked: self._lease_revoked,
            messages.GroupAcknowledged: self._group_acknowledged,
            messages.AuditOrdered: self._audit_ordered,
            messages.Shutdown: self._shutdown,
        }

    @property
    def stopped(self) -> bool:
        return self.phase is WorkerPhase.STOPPED

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Effects in order. After `Exit` every event is ignored. Raises ProtocolError for
        an event that may not come, before anything changes."""
        if self.stopped:
            return []
        handler = self._handlers.get(type(event))
        if handler is None:
            raise LocalProtocolError(f"a worker has no use for {type(event).__name__}")
        effects = handler(event, now)
        return effects + self._advance(now)

    # ------------------------------------------------------------------ the session

    def _started(self, _: events.Started, now: float) -> list[Effect]:
        return self.session.start(now)

    def _connection_restored(self, _: events.ConnectionRestored, now: float) -> list[Effect]:
        self.session.restored()
        return self._hello(now)

    def _connection_lost(self, event: events.ConnectionLost, now: float) -> list[Effect]:
        return self.session.lost(event.reason, now)

    def _connect_failed(self, event: events.ConnectFailed, now: float) -> list[Effect]:
        self.session.not_connected(event.reason)
        return []

    def _hello(self, now: float) -> list[Effect]:
        self.session.hello_sent(now)
        settings = self.settings
        hello = messages.WorkerHello(
            protocol=PROTOCOL,
            echo2_version=settings.echo2_version,
            name=settings.name,
            run_id=self.session.run_id,
            engine=settings.engine,
            precision=settings.precision,
            on_update=settings.on_update,
            environment=settings.environment,
            environment_version=settings.environment_version,
            relay_endpoint=settings.relay_endpoint,
            relay_key=settings.relay_key,
            uplink_mbit=settings.uplink_mbit,
            downlink_mbit=settings.downlink_mbit,
            slots=settings.slots,
            price_usd_per_h=settings.price_usd_per_h,
            standby_usd_per_h=settings.standby_usd_per_h,
            held=self.leases.held,
            installed=self.versions.serving,
            stored=settings.stored if self.versions.serving is None else (),
            replays=settings.replays,
        )
        return [Send(hello)]

    def _welcome(self, welcome: messages.WorkerWelcome, now: float) -> list[Effect]:
        problem = self.session.problem(welcome)
        if problem:
            return self._exit(1, problem)
        self.session.welcome(welcome, now)
        if self.phase is WorkerPhase.JOINING:
            self._move(WorkerPhase.SYNCING)
        effects: list[Effect] = [
            Send(report) for report in self.versions.tell_again(self.session.next_sequence)
        ]
        effects += self.leases.welcome(welcome.alive)
        if self.phase is WorkerPhase.DRAINING:
            effects.append(Send(messages.Draining(reason=clipped(self.leases.leaving))))
        fields = {"run_id": welcome.run_id, "held": len(self.leases.live), "state": str(self.phase)}
        effects.append(Log("info", "worker_welcomed", fields))
        return effects + self._learn_assets(welcome)

    def _refused(self, refused: messages.Refused, now: float) -> list[Effect]:
        if refused.fatal:
            return self._exit(1, refusal_text(refused))
        fields = {"reason": refused.reason, "text": refused.text}
        log = Log("warning", "message_refused", fields)
        return [log, *self._hello(now)] if self.session.refused(refused, now) else [log]

    def _heartbeat_echo(self, echo: messages.HeartbeatEcho, now: float) -> list[Effect]:
        self.session.echoed(now)
        self.versions.heard(echo.sequence)
        return []

    def _tick(self, tick: events.Tick, now: float) -> list[Effect]:
        effects: list[Effect] = []
        sequence = self.session.next_heartbeat(now)
        if sequence is not None:
            heartbeat = messages.Heartbeat(
                sequence=sequence,
                state=str(self.phase),
                lease_tokens={lease: tick.lease_tokens.get(lease, 0) for lease in self.leases.live},
                tokens_per_s=tick.tokens_per_s,
                loop_lag_s=tick.loop_lag_s,
            )
            effects.append(Send(heartbeat))
        effects += self.leases.abort_expired(now)
        given_up = self.session.given_up(now)
        if given_up:
            return effects + self._exit(1, given_up)
        return effects + self.session.watch(now)

    # ------------------------------------------------------- assets, engine, versions

    def _learn_assets(
        self, told: messages.WorkerWelcome | messages.VersionAnnounced
    ) -> list[Effect]:
        problem = self.engine.learn_assets(told.assets_digest, told.origin, told.origin_key)
        return self._exit(1, problem) if problem else []

    def _version_announced(self, announced: messages.VersionAnnounced, now: float) -> list[Effect]:
        if not self.session.welcomed:
            return [_stale(announced)]
        first = self.session.announcements == 0
        conflict = self.versions.conflict(announced, first=first)
        if conflict:
            return self._exit(
                1,
                f"the coordinator follows another line of versions ({conflict}); start this "
                "worker again to join it",
            )
        self.session.announcements += 1
        return self.versions.announce(announced, now) + self._learn_assets(announced)

    def _fetch_progress(self, event: events.FetchProgress, now: float) -> list[Effect]:
        share = 1.0 - event.num_missing / event.num_chunks if event.num_chunks else 0.0
        self.versions.fetch_progress(event.manifest_digest, share)
        if now < self._report_at:
            return []
        self._report_at = now + REPORT_S
        return self._report(event)

    def _relay_peers(self, told: messages.RelayPeers, now: float) -> list[Effect]:
        return [events.SetPeers(told.peers)] if self.session.welcomed else [_stale(told)]

    def _report(self, event: events.FetchProgress | events.FetchDone) -> list[Effect]:
        """What came from whom; only with a relay, and not of assets."""
        settings = self.settings
        has_relay = settings.relay_endpoint or settings.relay_key
        if not (has_relay and event.links and self.session.welcomed):
            return []
        if isinstance(event, events.FetchProgress):
            artifact, missing = event.manifest_digest, event.num_missing
        else:
            artifact, missing = event.artifact or event.manifest_digest, 0
        report = messages.RelayReport(
            manifest_digest=artifact,
            num_chunks=event.num_chunks,
            num_missing=missing,
            links=event.links,
        )
        return [Send(report)]

    def _fetch_done(self, event: events.FetchDone, now: float) -> list[Effect]:
        if self.engine.is_assets(event.manifest_digest):
            self.engine.assets_fetched()
            return []
        self.versions.fetch_done(event.manifest_digest, event.fetch_s)
        return self._report(event)

    def _fetch_failed(self, event: events.FetchFailed, now: float) -> list[Effect]:
        if not self.engine.is_assets(event.manifest_digest):
            return self._failed_version(
                self.versions.fetch_failed(event.manifest_digest, event.text, now), event.text
            )
        problem = self.engine.assets_failed(event.text, now)
        if problem:
            return self._exit(1, problem)
        fields = {"manifest_digest": event.manifest_digest, "text": event.text}
        return [Log("error", "assets_failed", fields)]

    def _engine_ready(self, event: events.EngineReady, now: float) -> list[Effect]:
        return self.engine.ready(event.epoch)

    def _engine_died(self, event: events.EngineDied, now: float) -> list[Effect]:
        if not self.engine.lives(event.epoch):
            return []
        served = self.versions.serving is not None
        self.versions.engine_lost()
        problem = self.engine.died(event.text, now)
        fields = {"epoch": event.epoch, "text": event.text}
        effects: list[Effect] = [Log("error", "engine_died", fields)]
        effects += self.leases.abort_all(f"the engine died: {event.text}", "engine")
        if problem:
            return effects + self._exit(1, problem)
        if self.phase is WorkerPhase.READY:
            self._move(WorkerPhase.SYNCING)
        if served and self.session.welcomed:
            effects += self._hello(now)  # it tells that nothing is installed, so no leases come
        return effects

    def _start_failed(self, event: events.StartFailed, now: float) -> list[Effect]:
        return self._exit(1, event.text)

    def _install_done(self, event: events.InstallDone, now: float) -> list[Effect]:
        if event.epoch != self.engine.epoch:
            return []
        self._check_installing(event)
        effects = self.versions.install_done(
            install_s=event.install_s, pause_s=event.pause_s, canary_diff=event.canary_diff
        )
        if self.phase is WorkerPhase.SYNCING:
            self._move(WorkerPhase.READY)
        digests = self.versions.needed() | self.versions.assets()
        if self.engine.assets_digest:
            digests |= {self.engine.assets_digest}
        return [*effects, events.Keep(digests)]

    def _install_failed(self, event: events.InstallFailed, now: float) -> list[Effect]:
        if event.epoch != self.engine.epoch:
            return []
        self._check_installing(event)
        served = self.versions.serving is not None
        effects = self.versions.install_failed(
            event.stage, event.text, now, restored=event.restored
        )
        effects = self._failed_version(effects, event.text)
        if served and not event.restored and not self.stopped:
            died = f"it lost its version in an install: {event.text}"
            effects += self._engine_died(events.EngineDied(event.epoch, died), now)
        return effects

    def _check_installing(self, event: events.InstallDone | events.InstallFailed) -> None:
        installing = self.versions.installing
        if installing is None or installing.version != event.version:
            raise LocalProtocolError(f"no install of {event.version} is under way")

    def _failed_version(self, effects: list[Effect], text: str) -> list[Effect]:
        """Without a session nothing is told: the next hello says what serves."""
        if not self.session.welcomed:
            effects = [effect for effect in effects if not isinstance(effect, Send)]
        if effects and self.versions.exhausted:
            failures = self.versions.failures
            return effects + self._exit(
                1, f"no version could be installed in {failures} tries; the last one: {text}"
            )
        return effects

    # ------------------------------------------------------------------------ leases

    def _lease_granted(self, granted: messages.LeaseGranted, now: float) -> list[Effect]:
        return self.leases.granted(granted, now) if self.session.welcomed else [_stale(granted)]

    def _lease_revoked(self, revoked: messages.LeaseRevoked, now: float) -> list[Effect]:
        return self.leases.abort(revoked.lease, revoked.reason)

    def _group_done(self, event: events.GroupDone, now: float) -> list[Effect]:
        effects = self.leases.done(event.result)
        self.engine.finished_group()
        return effects

    def _group_failed(self, event: events.GroupFailed, now: float) -> list[Effect]:
        return self.leases.failed(event.lease, event.stage, event.text)

    def _group_acknowledged(self, told: messages.GroupAcknowledged, now: float) -> list[Effect]:
        return self.leases.acknowledged(told)

    # ------------------------------------------------------------------------ audits

    def _audit_ordered(self, order: messages.AuditOrdered, now: float) -> list[Effect]:
        if not self.session.welcomed:
            return [_stale(order)]
        problem = ""
        if self.leases.leaving:
            problem = f"this worker leaves: {self.leases.leaving}"
        elif not self.settings.replays:
            problem = f"environment {self.settings.environment!r} cannot be played again"
        elif self.versions.serving is None:
            problem = "no version is installed, so that the environment may not be up"
        return self.audits.ordered(order, problem=problem)

    def _audit_ended(self, event: events.AuditEnded, now: float) -> list[Effect]:
        return self.audits.ended(event.answer, welcomed=self.session.welcomed)

    # ------------------------------------------------------------------------ the end

    def _drain_requested(self, event: events.DrainRequested, now: float) -> list[Effect]:
        if self.phase is WorkerPhase.DRAINING:
            return self._end_now(f"{event.reason} again")
        self.leases.leaving = event.reason
        self._drain_until = now + self.settings.drain_timeout_s
        self._move(WorkerPhase.DRAINING)
        fields = {"reason": event.reason, "held": len(self.leases.live)}
        effects: list[Effect] = [Log("info", "worker_draining", fields)]
        if self.session.welcomed:
            effects.append(Send(messages.Draining(reason=clipped(event.reason))))
        return effects + self.versions.stop()

    def _shutdown(self, shutdown: messages.Shutdown, now: float) -> list[Effect]:
        return self._exit(0, f"the coordinator ended: {shutdown.reason}")

    def _end_now(self, reason: str) -> list[Effect]:
        text = f"this worker leaves: {reason}"
        return self.leases.abort_all(text, "draining") + self._exit(0, reason)

    def _exit(self, code: int, reason: str) -> list[Effect]:
        effects = self.leases.abort_all(reason) + self.versions.stop()
        for lease in self.leases.outbox.leases:
            effects.append(Log("warning", "result_unacknowledged", {"lease": lease}))
        if self.engine.assets_fetching:
            effects.append(events.CancelFetch(self.engine.assets_digest))
        if self.session.welcomed:
            effects.append(Send(messages.Goodbye(reason=clipped(reason))))
        self._move(WorkerPhase.STOPPED)
        return [*effects, Exit(code, reason)]

    # ----------------------------------------------------------- what follows by itself

    def _advance(self, now: float) -> list[Effect]:
        if self.stopped:
            return []
        effects: list[Effect] = []
        if self.session.welcomed:
            report = self.versions.sent(self.session.next_sequence)
            if report is not None:
                effects.append(Send(report))
            resend_s = max(10.0, 2 * self.session.silence_max_s)
            effects += self.leases.outbox.flush(now, resend_s=resend_s)
        if self.phase is WorkerPhase.DRAINING:
            return effects + self._advance_drain(now)
        if self.phase is WorkerPhase.JOINING:
            return effects
        effects += self.engine.advance(now, self.session.environment_settings)
        has_assets = bool(self.engine.assets_digest)
        effects += self._failed_version(
            self.versions.advance(now, has_assets=has_assets), "it lacks an origin or assets"
        )
        if not self.stopped and self.engine.life is EngineLife.UP:
            effects += self._advance_install(now)
        return effects

    def _advance_drain(self, now: float) -> list[Effect]:
        if not self.leases.held:
            return self._exit(0, self.leases.leaving)
        if now < self._drain_until:
            return []
        return self._end_now(
            f"{self.leases.leaving}; not done in {self.settings.drain_timeout_s:g} s "
            "(worker.drain_timeout_s)"
        )

    def _advance_install(self, now: float) -> list[Effect]:
        """Evals that the flip does not wait for any longer end first: they are pinned."""
        if not self.versions.may_install(now, hold_s=self.leases.hold_s):
            return []
        return [*self.leases.abort_evals(), self.versions.begin_install(self.engine.epoch)]

    def _move(self, phase: WorkerPhase) -> None:
        assert phase in TRANSITIONS[self.phase], f"{self.phase} -> {phase}"
        self.phase = phase


def _stale(message: messages.Message) -> Effect:
    return Log("debug", "message_before_welcome", {"message": type(message).__name__})
