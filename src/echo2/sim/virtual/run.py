"""A whole run on a virtual clock: the coordinator's shell, and the fleet around it.

As `echo2.service` does: an event is handed to the core, its lines are written, its messages are
sent; nothing is decided here. Messages take half a round trip, signs of life no time, a record
LEDGER_S until it is durable.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from echo2.config_simulation import SimulatedWorkersTable
from echo2.core import worker_events
from echo2.core.broadcast import METRIC_QUANTILE
from echo2.core.coordinator import CoordinatorState
from echo2.core.dissemination import DEFAULT_DOWN_MBIT, DEFAULT_UP_MBIT, Host
from echo2.core.effects import (
    DeliverGroup,
    Effect,
    Emit,
    Finish,
    Persist,
    ProbeRelay,
    Send,
)
from echo2.core.events import Event, Persisted, Received, RelayProbed, Tick
from echo2.core.group import StoredResult
from echo2.core.relay_rates import ORIGIN
from echo2.core.run_state import RunState
from echo2.errors import Echo2Error, RemoteProtocolError
from echo2.messages import BatchGroup, Heartbeat, HeartbeatEcho, LaneOpened, Message, Refused
from echo2.sim.timeline import Timeline
from echo2.sim.virtual.figures import Figures
from echo2.sim.virtual.learner import VirtualLearner
from echo2.sim.virtual.plan import RunPlan
from echo2.sim.virtual.records import Records
from echo2.sim.virtual.transfers import Transfers
from echo2.sim.virtual.unframed import unframed
from echo2.sim.virtual.worker import VirtualWorker
from echo2.types import PeerId, Version

LEARNER: Final = PeerId("learner")
LEDGER_S: Final = 0.01
TICKS_PER_STEP: Final = 50
TICK_MIN_S: Final = 0.1
"""Of the coordinator, as in production, where steps are short."""
PATIENCE_STEPS: Final = 50.0
PATIENCE_S: Final = 36_000.0

Watch = Callable[[Event | None, list[Effect], RunState], None]


class VirtualRun:
    """`watch` sees every event with what came of it, None for one that was refused. `core` may be
    read."""

    def __init__(self, plan: RunPlan, *, watch: Watch | None = None) -> None:
        self.plan = plan
        self.timeline = Timeline()
        self.core = CoordinatorState(plan.settings)
        self.figures = Figures()
        self.finish: Finish | None = None
        table = plan.config.simulation
        origin_mbit = plan.config.net.origin_uplink_mbit or DEFAULT_UP_MBIT
        self.transfers = Transfers(
            self.timeline,
            Host(ORIGIN, up_mbit=origin_mbit, down_mbit=DEFAULT_DOWN_MBIT, rtt_s=0.0, accepts=True),
        )
        self.learner = VirtualLearner(
            plan,
            self.timeline,
            Random(f"learner {plan.seed}"),
            send=lambda message: self.send(LEARNER, message),
            result_of=self._results_pop,
            on_line=self._line,
        )
        self._watch = watch
        self._records: Records | None = None
        self._delay_s = table.rtt_s / 2
        self._workers: dict[PeerId, VirtualWorker] = {}
        self._lives = 0
        self._results: dict[str, StoredResult] = {}
        """Of the batch that the learner has."""
        step_s = table.learner_step_s
        self._tick_s = min(plan.tick_max_s, max(TICK_MIN_S, step_s / TICKS_PER_STEP))

    # ------------------------------------------------------------------------- running

    def run(self, records: Records | None = None) -> Figures:
        """Play it to its end. Echo2Error when it does not come to one."""
        plan, timeline = self.plan, self.timeline
        self._records = records
        self._tick()
        timeline.at(0.0, self.learner.start)
        number = 0
        for kind in plan.config.simulation.workers:
            for place in range(1, kind.count + 1):
                number += 1
                peer = PeerId(f"{kind.name}-{place}")
                self.transfers.hosts[peer] = Host(
                    peer,
                    up_mbit=kind.uplink_mbit,
                    down_mbit=kind.downlink_mbit,
                    rtt_s=plan.config.simulation.rtt_s,
                    accepts=kind.reachable,
                )
                timeline.at(kind.start_s, self._start_worker, peer, kind, number)
        timeline.at(plan.seconds, self.learner.time_is_up)
        patience_s = PATIENCE_STEPS * plan.config.simulation.learner_step_s + PATIENCE_S
        if not timeline.run(
            until_s=plan.seconds + patience_s, stop=lambda: self.finish is not None
        ):
            raise Echo2Error(
                f"the simulated run did not end {patience_s:g} s after its "
                f"{plan.hours:g} hours; v is {self.core.state.step}"
            )
        return self._concluded()

    def _concluded(self) -> Figures:
        figures, finish, state = self.figures, self.finish, self.core.state
        assert finish is not None
        figures.reason, figures.finished, figures.ok = finish.reason, finish.finished, finish.ok
        figures.steps, figures.cost_usd = state.step, state.cost_usd
        figures.wait_s, figures.train_s = self.learner.waited_s, self.learner.train_s
        kinds = self.plan.config.simulation.workers
        figures.end(self.timeline.now, {kind.name: kind.price_usd_per_h for kind in kinds})
        if self._records is not None:
            self._records.conclude({"seed": self.plan.seed, **figures.to_json()})
        return figures

    def _tick(self) -> None:
        self.feed(Tick())
        self.timeline.after(self._tick_s, self._tick)

    def _line(self, fields: dict[str, object]) -> None:
        if self._records is not None:
            self._records.line(fields)

    def _results_pop(self, group: str) -> StoredResult:
        return self._results.pop(group)

    # --------------------------------------------------------------------- the machines

    def _start_worker(self, peer: PeerId, kind: SimulatedWorkersTable, number: int) -> None:
        if self.finish is not None:
            return
        self._lives += 1
        rng = Random(f"worker {self.plan.seed} {peer} {self._lives}")

        def again() -> None:
            self.timeline.after(kind.back_after_s, self._start_worker, peer, kind, number)

        def exited() -> None:
            if self.finish is None:
                again()

        worker = VirtualWorker(
            peer, kind, number, self.plan, self.timeline, self, rng, on_exit=exited
        )
        self._workers[peer] = worker
        worker.start()

        def die() -> None:
            if worker.alive:
                worker.die()
                again()

        def reclaim() -> None:
            worker.drain()
            self.timeline.after(kind.notice_s, die)

        if kind.failures_per_h > 0:
            self.timeline.after(3600.0 * rng.expovariate(kind.failures_per_h), die)
        if kind.reclaims_per_h > 0:
            self.timeline.after(3600.0 * rng.expovariate(kind.reclaims_per_h), reclaim)

    def version_bytes(self, fetch: worker_events.Fetch) -> int:
        """Of the deltas that lead to it, or of the version itself."""
        if not self.plan.version_bytes:
            return 0
        return len(fetch.path) * self.plan.delta_bytes or self.plan.version_bytes

    # ------------------------------------------------------------------------ messages

    def send(self, peer: PeerId, message: Message) -> None:
        """From a peer to the coordinator. What opens a lane is for sockets alone."""
        if not isinstance(message, LaneOpened):
            self.timeline.after(self._delay_s, self._received, peer, message)

    def _received(self, peer: PeerId, message: Message) -> None:
        self.feed(Received(peer, message))

    def sign_of_life(self, peer: PeerId, heartbeat: Heartbeat) -> Message | None:
        found: list[Message] = []
        self.feed(Received(peer, heartbeat), echoes=found)
        return found[0] if found else None

    def _send_out(self, peer: PeerId, message: Message) -> None:
        self.timeline.after(self._delay_s, self._hand_over, peer, message)

    def _hand_over(self, peer: PeerId, message: Message) -> None:
        if peer == LEARNER:
            self.learner.receive(message)
        elif (worker := self._workers.get(peer)) is not None:
            worker.receive(message)

    # ------------------------------------------------------------------------- the shell

    def feed(self, event: Event, *, echoes: list[Message] | None = None) -> None:
        """Hand an event to the core and carry out what follows. `echoes` takes the echo of a
        heartbeat, instead of the network."""
        if self.finish is not None:
            return
        self.figures.num_events += 1
        taken: Event | None = event
        try:
            effects = self.core.handle(event, self.timeline.now)
        except RemoteProtocolError as error:
            assert isinstance(event, Received)
            refusal = Refused(reason=error.reason, text=str(error)[:2048], fatal=False)
            taken, effects = None, [Send(event.peer, refusal)]
        told = False
        for effect in effects:
            if isinstance(effect, Emit):
                told = True
                self.figures.observe(effect.event, effect.fields, self.timeline.now)
                if effect.event == "version_installed":
                    self._measure_broadcast(effect.fields)
                if self._records is not None:
                    self._records.event(effect.event, effect.fields)
        if told and self._records is not None:
            self._records.flush()
        for effect in effects:
            self._carry_out(effect, echoes)
        if self._watch is not None:
            self._watch(taken, effects, self.core.state)

    def _measure_broadcast(self, fields: dict[str, Any]) -> None:
        """T_bcast is the core's own measurement; one that a newer version overtakes has it too."""
        version = Version(fields["incarnation"], fields["step"])
        known = self.figures.t_bcast_s
        found = self.core.state.broadcasts.broadcasts.get(version)
        if found is not None and version not in known:
            seconds = found.t_bcast_s(METRIC_QUANTILE)
            if seconds is not None:
                known[version] = seconds

    def _carry_out(self, effect: Effect, echoes: list[Message] | None) -> None:
        match effect:
            case Send(message=HeartbeatEcho() as echo) if echoes is not None:
                echoes.append(echo)
            case Send(peer, message):
                self._send_out(peer, message)
            case DeliverGroup():
                self._results[effect.group] = effect.result
                self._send_out(effect.peer, _batch_group(effect))
            case Persist(record_id):
                self.timeline.after(LEDGER_S, self.feed, Persisted(record_id))
            case ProbeRelay(peer, endpoint):
                rtt_s = self.plan.config.simulation.rtt_s
                self.timeline.after(rtt_s, self._probed, peer, endpoint, rtt_s)
            case Finish():
                self.finish = effect
            case _:
                pass  # lines are written above, and audits are not simulated

    def _probed(self, peer: PeerId, endpoint: str, rtt_s: float) -> None:
        worker = self._workers.get(peer)
        ok = worker is not None and worker.alive
        reason = "" if ok else "the machine is gone"
        self.feed(RelayProbed(peer, endpoint, ok, rtt_s if ok else None, reason))


def _batch_group(effect: DeliverGroup) -> BatchGroup:
    return unframed(
        BatchGroup,
        incarnation=effect.incarnation,
        step=effect.step,
        group=effect.group,
        worker=effect.result.worker,
        task=effect.task,
        trajectories=effect.result.trajectories,
        token_ids=b"",
        logprobs=b"",
        loss_mask=b"",
    )
