"""A simulated worker process: the production state machine, an engine and a line around it.

As `echo2_workers.daemon` does: every message, outcome and tick goes to `core.worker.WorkerState`,
and its effects are carried out in order. It decides nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Protocol

from echo2.config_simulation import SimulatedWorkersTable
from echo2.core import worker_events as events
from echo2.core.worker import WorkerState
from echo2.messages import (
    GroupResult,
    Heartbeat,
    Message,
    VersionAnnounced,
    WorkerWelcome,
)
from echo2.sim.timeline import Timeline
from echo2.sim.virtual.engine import VirtualEngine
from echo2.sim.virtual.plan import RunPlan
from echo2.sim.virtual.transfers import Transfers
from echo2.types import PeerId, Version

PROGRESS_CHUNKS = 1000


class Hub(Protocol):
    """What a worker reaches: the coordinator, versions, and whoever starts machines."""

    transfers: Transfers

    def send(self, peer: PeerId, message: Message) -> None: ...

    def sign_of_life(self, peer: PeerId, heartbeat: Heartbeat) -> Message | None:
        """A heartbeat and its echo, which take no time."""

    def version_bytes(self, fetch: events.Fetch) -> int: ...


class VirtualWorker:
    """`on_exit`: the process ended by itself."""

    def __init__(
        self,
        peer: PeerId,
        kind: SimulatedWorkersTable,
        number: int,
        plan: RunPlan,
        timeline: Timeline,
        hub: Hub,
        rng: Random,
        *,
        on_exit: Callable[[], None],
    ) -> None:
        self.peer = peer
        self.kind = kind
        self.alive = True
        self._plan = plan
        self._timeline = timeline
        self._hub = hub
        self._on_exit = on_exit
        self._core = WorkerState(plan.worker_settings(peer, kind, number))
        null = plan.config.worker.null
        self._engine = VirtualEngine(
            timeline,
            rng,
            tokens_per_s=kind.tokens_per_s,
            tokens_mean=null.tokens_mean,
            tokens_cv=null.tokens_cv,
            install_s=kind.install_s,
            mode=plan.config.worker.on_update,
            on_done=self._group_done,
            on_installed=self._installed,
        )
        self._epoch = 0
        self._installing: events.Install | None = None
        self._events: deque[events.Event] = deque()
        self._handling = False
        self._session = 0
        """Counts welcomes; heartbeats of an earlier one stop."""

    # ------------------------------------------------------------------- life-cycle

    def start(self) -> None:
        self.post(events.Started())

    def drain(self) -> None:
        """A notice came."""
        if self.alive:
            self.post(events.DrainRequested("SIGTERM"))
            self._timeline.after(self._plan.config.worker.drain_timeout_s, self._tick)

    def die(self) -> None:
        """The machine is gone, without a word."""
        self.alive = False
        self._engine.stop()
        self._hub.transfers.lose(self.peer)

    def receive(self, message: Message) -> None:
        if not self.alive:
            return
        if isinstance(message, VersionAnnounced):
            self._tell_progress()
        self.post(message)
        if isinstance(message, WorkerWelcome):
            self._session += 1
            self._beat(self._session, message.heartbeat_interval_s)

    # ------------------------------------------------------------------------ events

    def post(self, event: events.Event) -> None:
        """Hand an event to the state machine; its effects go before the next event."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        while self._events and self.alive:
            for effect in self._core.handle(self._events.popleft(), self._timeline.now):
                self._carry_out(effect)
        self._events.clear()
        self._handling = False

    def _beat(self, session: int, interval_s: float) -> None:
        if self.alive and session == self._session:
            self._tick()
            self._timeline.after(interval_s, self._beat, session, interval_s)

    def _tick(self) -> None:
        if self.alive:
            tokens = self._engine.lease_tokens()
            self.post(events.Tick(lease_tokens=tokens, tokens_per_s=self._engine.tokens_per_s))

    def _tell_progress(self) -> None:
        """What the relay would have told by now: a newer version supersedes a young fetch."""
        found = self._hub.transfers.share(self.peer)
        if found is not None:
            digest, share = found
            missing = round(PROGRESS_CHUNKS * (1.0 - share))
            self.post(events.FetchProgress(digest, PROGRESS_CHUNKS, missing))

    def _group_done(self, result: GroupResult) -> None:
        self.post(events.GroupDone(result))

    def _installed(self, version: Version, install_s: float, pause_s: float) -> None:
        installing, self._installing = self._installing, None
        assert installing is not None
        self.post(
            events.InstallDone(
                epoch=installing.epoch,
                version=version,
                install_s=install_s,
                pause_s=pause_s,
                canary_diff=None,
            )
        )

    # ----------------------------------------------------------------------- effects

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Send(Heartbeat() as heartbeat):
                echo = self._hub.sign_of_life(self.peer, heartbeat)
                if echo is not None:
                    self.post(echo)
            case events.Send(message):
                self._hub.send(self.peer, message)
            case events.StartGroup(granted):
                self._engine.start(granted)
            case events.AbortGroup(lease):
                self._engine.abort(lease)
            case events.Fetch():
                self._fetch(effect)
            case events.CancelFetch():
                self._hub.transfers.cancel(self.peer)
            case events.Install(announced=announced):
                self._installing = effect
                self._engine.install(announced.version)
            case events.StartEngine(epoch):
                self.post(events.EngineReady(epoch))
            case events.Reconnect():
                self._timeline.after(self._plan.config.simulation.rtt_s, self._connected)
            case events.Exit():
                self.die()
                self._on_exit()
            case _:
                pass  # logs, lists of relays and stores have nothing to do here

    def _connected(self) -> None:
        if self.alive:
            self.post(events.ConnectionRestored())

    def _fetch(self, fetch: events.Fetch) -> None:
        num_bytes = self._hub.version_bytes(fetch)

        def done(fetch_s: float) -> None:
            self.post(events.FetchDone(fetch.manifest_digest, fetch_s))

        if num_bytes:
            self._hub.transfers.begin(self.peer, fetch, num_bytes, done)
        else:
            done(0.0)
