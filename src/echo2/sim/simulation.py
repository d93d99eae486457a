"""A whole run on a virtual clock: the production core between simulated peers.

Promise: what `run` does follows from the scenario alone; after every event the promises are
checked (`Invariants`), and a run that does not end in bounded virtual time is a violation.
The shell here does what the coordinator's shell does: it hands events in, alone or several in one
turn, carries effects out, refuses what the protocol forbids, and decides nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from random import Random

from echo2.core.coordinator import CoordinatorState
from echo2.core.effects import DeliverGroup, Effect, Emit, Finish, OrderAudit, Persist, Send
from echo2.core.events import Event, Persisted, Received, Tick
from echo2.core.waits import waits
from echo2.errors import RemoteProtocolError
from echo2.messages import AuditOrdered, GroupResult, Heartbeat, LearnerHeartbeat, Message, Refused
from echo2.sim.faults import FaultInjector
from echo2.sim.invariants import Invariants, Violation
from echo2.sim.learner import Disk, SimLearner
from echo2.sim.ledger import SimLedger
from echo2.sim.network import Network
from echo2.sim.scenario import Scenario
from echo2.sim.timeline import Timeline
from echo2.sim.worker import SimWorker
from echo2.types import PeerId

TRACE_LENGTH = 60
RECENT_RESULTS_MAX = 50


@dataclass(slots=True)
class Outcome:
    """What a run came to. Times in virtual seconds; `staleness` counts trained groups."""

    reason: str = ""
    finished: bool = False
    step: int = 0
    virtual_s: float = 0.0
    num_events: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    returned: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    bubble: float = 0.0
    cost_usd: float = 0.0


class Simulation:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.timeline = Timeline()
        self.network = Network(self.timeline, Random(f"network {scenario.seed}"), scenario.network)
        self.core = CoordinatorState(scenario.settings)
        self.invariants = Invariants(scenario.settings, frozenset(scenario.liars))
        self.steps = scenario.steps
        self.outcome = Outcome()
        self.trace: deque[tuple[float, Event | Emit | str]] = deque(maxlen=TRACE_LENGTH)
        self.disk = Disk()
        self.learner: SimLearner | None = None
        self.processes: dict[PeerId, SimWorker | SimLearner] = {}
        self.recent: deque[tuple[PeerId, GroupResult]] = deque(maxlen=RECENT_RESULTS_MAX)
        self.clock_offset_s = 0.0
        self.calm = scenario.faults.until_s <= 0
        self.finish: Finish | None = None
        self._rng = Random(f"world {scenario.seed}")
        self._turn: list[tuple[Event | None, list[Effect]]] = []
        """Events that were taken and are not settled yet, each with its effects."""
        self._turns = Random(f"turns {scenario.seed}")
        self._spawned = 0
        self._epoch = 0
        self._persisting: list[int] = []
        self._committed = 0
        """The newest record of this coordinator that is safe, and with it all before."""
        self._crash: str = ""
        self._disk_full = False
        self.ledger = SimLedger(is_read=scenario.faults.restarts_coordinator)
        self._waited = [0.0, 0.0]

    # ------------------------------------------------------------------------- running

    def run(self) -> Outcome:
        """Play the scenario to its end. Raises Violation when a promise breaks."""
        scenario, timeline = self.scenario, self.timeline
        self._tick()
        for index, _ in enumerate(scenario.workers):
            timeline.at(0.01 * self._rng.random(), self.start_worker, index)
        timeline.at(0.0, self.start_learner)
        if not self.calm:
            FaultInjector(self).start()
            timeline.at(scenario.faults.until_s, self._calm_down)
        until_s = scenario.faults.until_s + scenario.patience_s
        if not timeline.run(until_s=until_s, stop=lambda: self.finish is not None):
            found = waits(self.core.state, self.core.dispatcher.reason)
            causes = "; ".join(wait.text for wait in found)
            raise Violation(
                f"no end {scenario.patience_s:g} s after the last fault: step "
                f"{self.core.state.step} of {self.steps}; {causes}"
            )
        return self._concluded()

    def _concluded(self) -> Outcome:
        outcome, finish, state = self.outcome, self.finish, self.core.state
        assert finish is not None
        self._count_times()
        outcome.reason, outcome.finished = finish.reason, finish.finished
        outcome.step, outcome.virtual_s = state.step, self.timeline.now
        outcome.cost_usd = state.cost_usd
        total = sum(self._waited)
        outcome.bubble = self._waited[0] / total if total > 0 else 0.0
        outcome.faults |= self.network.faults
        return outcome

    def _calm_down(self) -> None:
        """The last fault is over: from here on the run must get to its end."""
        self.calm = True
        self.network.heal()
        if self.scenario.steps_after is not None:
            self.steps = min(self.steps, self.core.state.step + self.scenario.steps_after)
            for process in self.processes.values():
                if isinstance(process, SimLearner):  # whichever of them has the seat
                    process.steps = self.steps
        for process in self.processes.values():
            if isinstance(process, SimWorker):
                process.install_failure = 0.0

    def _tick(self) -> None:
        self.feed(Tick())
        self.timeline.after(self.scenario.tick_s, self._tick)

    # --------------------------------------------------------------------- the processes

    def start_worker(self, index: int) -> None:
        """A process of worker `index` begins; an older one of that name must be dead."""
        peer = PeerId(f"w{index}")
        known = self.processes.get(peer)
        if (known is not None and known.alive) or self.finish is not None:
            return
        self._spawned += 1
        faults = self.scenario.faults
        worker = SimWorker(
            peer,
            self.scenario.workers[index],
            self.timeline,
            self,
            Random(f"worker {self.scenario.seed} {index} {self._spawned}"),
            install_failure=0.0 if self.calm else faults.install_failure,
        )
        self.processes[peer] = worker
        worker.start()

    def start_learner(self) -> None:
        """A learner process begins from a checkpoint; the one before is dead or stopped."""
        if self.finish is not None:
            return
        if self.learner is not None and self.learner.alive and not self.learner.stopped:
            return
        self._count_times()
        self._spawned += 1
        model = self.scenario.learner
        learner = SimLearner(
            self._free_name(),
            model,
            self.timeline,
            self,
            Random(f"learner {self.scenario.seed} {self._spawned}"),
            name=f"hello{self._spawned}",
            disk=self.disk,
            steps=self.steps,
            period=self.scenario.settings.period,
            on_end=self._learner_ended,
            fabricators=frozenset(p for p, lie in self.scenario.liars.items() if lie == "logprobs"),
        )
        self.learner = learner
        self.processes[learner.peer] = learner
        kept = self.disk.kept or [0]
        any_of = model.resumes_any_checkpoint and not self.calm
        self.disk = learner.disk = Disk(list(self.disk.kept))
        learner.start(self._rng.choice(kept) if any_of else max(kept))

    def _free_name(self) -> PeerId:
        """A living process, even a stopped one, keeps its name."""
        peer, number = PeerId("learner"), 1
        while peer in self.processes and self.processes[peer].alive:
            number += 1
            peer = PeerId(f"learner-{number}")
        return peer

    def _learner_ended(self, reason: str) -> None:
        """A supervisor starts a learner again that ended although the run goes on."""
        self.note(f"learner ended: {reason}")
        if self.learner is not None and not self.learner.alive:
            self.timeline.after(self.scenario.learner.rest_s, self.start_learner)

    def _count_times(self) -> None:
        if self.learner is not None:
            self._waited[0] += self.learner.wait_s
            self._waited[1] += self.learner.train_s

    def restart_coordinator(self) -> None:
        """Kill -9 and start again: a new core, with what the old one's records say."""
        self.note("coordinator restarts")
        restored = self.ledger.restored()
        self._epoch += 1
        settings = replace(self.scenario.settings, life=str(self._epoch))
        self.core = CoordinatorState(settings, restored)
        self.invariants.coordinator_restarted(self.core.state, self._committed)
        self._persisting.clear()
        self._turn = []
        self._committed = 0
        self._crash = ""

    def crash_at_next_event(self) -> None:
        """Kill -9 while the effects of an event are carried out: before the first, or between
        two of them."""
        self._crash = self._rng.choice(("before", "between"))

    def fill_disk(self) -> None:
        """The next commit fails, which ends the coordinator; it is started again."""
        self._disk_full = True

    # ----------------------------------------------------------------------- the network

    def send(self, process: object, peer: PeerId, message: Message) -> None:
        """From a peer to the coordinator."""
        if isinstance(message, GroupResult):
            self.recent.append((peer, message))
        self.network.carry((peer, "in", message.LANE), self._arrive, self._epoch, peer, message)

    def _arrive(self, epoch: int, peer: PeerId, message: Message) -> None:
        if epoch == self._epoch:
            self.feed(Received(peer, message))

    def _send_out(self, peer: PeerId, lane: str, message: object) -> None:
        process = self.processes.get(peer)
        if process is not None:
            self.network.carry((peer, "out", lane), self._hand_over, process, message)

    def _hand_over(self, process: SimWorker | SimLearner, message: object) -> None:
        """Only the process that was connected when it was sent gets it."""
        if process.alive and self.processes.get(process.peer) is process:
            process.receive(message)

    # ------------------------------------------------------------------------- the shell

    def feed(self, event: Event) -> None:
        if self.finish is not None:
            return
        self.outcome.num_events += 1
        now = self.timeline.now + self.clock_offset_s
        if not _is_routine(event):
            self.trace.append((self.timeline.now, event))
        try:
            self._turn.append((event, self.core.take(event, now)))
        except RemoteProtocolError as error:
            assert isinstance(event, Received)
            self.outcome.refused[error.reason] += 1
            refusal = Refused(reason=error.reason, text=str(error)[:2048], fatal=False)
            self._turn.append((None, [Send(event.peer, refusal)]))
        if not self._turn_goes_on(event):
            self._end_turn()

    def _turn_goes_on(self, event: Event) -> bool:
        """Messages that wait together are taken in one turn, and so are records of one commit."""
        turn_s = self.scenario.turn_s
        if not turn_s or not isinstance(event, Received | Persisted) or self._turns.random() < 0.2:
            return False
        if len(self._turn) == 1:
            self.timeline.after(turn_s * self._turns.random(), self._end_this_turn, self._turn)
        return True

    def _end_this_turn(self, turn: list[tuple[Event | None, list[Effect]]]) -> None:
        if turn is self._turn:  # no other event has ended it, and no crash
            self._end_turn()

    def _end_turn(self) -> None:
        turn, self._turn = self._turn, []
        if not turn or self.finish is not None:
            return
        turn.append((None, self.core.settle()))
        while not self.core.is_settled:
            turn.append((None, self.core.settle()))
        effects = [effect for _, those in turn for effect in those]
        finishes = any(isinstance(effect, Finish) for effect in effects)
        crash = self._crash if effects and not finishes else ""
        if crash == "before":
            self.restart_coordinator()
            return
        if crash == "between":
            rest = [effect for effect in effects if not isinstance(effect, Emit)]
            done = {id(effect) for effect in rest[: self._rng.randint(0, len(rest))]}
            turn = [
                (event, [e for e in those if isinstance(e, Emit) or id(e) in done])
                for event, those in turn
            ]
        # As the service does: what happened is written first, then come what follows from it.
        for _, those in turn:
            for effect in sorted(those, key=lambda effect: not isinstance(effect, Emit)):
                self._carry_out(effect)
        self.invariants.observe(turn, self.core.state)
        if crash:
            self.restart_coordinator()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(peer, message):
                self._send_out(peer, message.LANE, message)
            case DeliverGroup(peer):
                self._payload(effect)
                self._send_out(peer, "rollouts", effect)
            case OrderAudit(peer):
                self._send_out(peer, AuditOrdered.LANE, effect.message(self._payload(effect)))
            case Persist(record_id, record):
                self.ledger.append(record_id, record)
                self._persist(record_id)
            case Emit():
                self._emit(effect)
            case Finish():
                self.finish = effect

    def _payload(self, effect: DeliverGroup | OrderAudit) -> object:
        result = effect.result
        if result.payload is not None:
            return result.payload
        return self.ledger.read(effect.group, result.lease)

    def _persist(self, record_id: int) -> None:
        """Durable after a while: in order, or in any order."""
        delay_s = self.scenario.persist_s * self._rng.random()
        self._persisting.append(record_id)
        self.timeline.after(delay_s, self._persisted, self._epoch)

    def _persisted(self, epoch: int) -> None:
        if epoch != self._epoch:
            return
        waiting = self._persisting
        reorder = self.scenario.faults.records_reordered and not self.calm
        index = self._rng.randrange(len(waiting)) if reorder else 0
        record_id = waiting.pop(index)
        if self._disk_full:
            self._disk_full = False
            self.note("the disk takes no record")
            self.restart_coordinator()
            return
        self.ledger.commit(record_id)
        self._committed = max(self._committed, record_id)
        self.timeline.after(
            self.scenario.persist_s * self._rng.random(), self._tell, epoch, record_id
        )

    def _tell(self, epoch: int, record_id: int) -> None:
        if epoch == self._epoch:
            self.feed(Persisted(record_id))

    def _emit(self, effect: Emit) -> None:
        outcome, fields = self.outcome, effect.fields
        outcome.events[effect.event] += 1
        self.ledger.observe(effect.event, effect.fields)
        if effect.event == "group_ended":
            outcome.ends[fields["end"]] += 1
            if fields["end"] == "trained":
                outcome.staleness[fields["trained_at"] - fields["min_version"]] += 1
        elif effect.event == "group_returned":
            outcome.returned += 1
            outcome.ends["trained"] -= 1
        else:
            self.trace.append((self.timeline.now, effect))

    def last_events(self) -> str:
        """What happened just before, one line each."""
        return "\n".join(_line(now, what) for now, what in self.trace)

    def note(self, text: str) -> None:
        """A line in the trace that a violation prints."""
        self.trace.append((self.timeline.now, text))


def _line(now: float, what: Event | Emit | str) -> str:
    if isinstance(what, str):
        return f"{now:9.3f} ** {what}"
    if isinstance(what, Emit):
        return f"{now:9.3f}    -> {what.event} {what.fields}"
    return f"{now:9.3f} {_short(what)}"


def _is_routine(event: Event) -> bool:
    if isinstance(event, Received):
        return isinstance(event.message, Heartbeat | LearnerHeartbeat)
    return isinstance(event, Tick)


def _short(event: Event) -> str:
    if not isinstance(event, Received):
        return repr(event)
    message = event.message
    shown = {
        name: getattr(message, name)
        for name in ("lease", "group", "incarnation", "step", "version", "start", "installed")
        if hasattr(message, name)
    }
    return f"{event.peer}: {type(message).__name__} {shown}"


def command_of(scenario_name: str, seed: int) -> str:
    """The one command that plays a scenario again."""
    return f"python -m echo2.sim {scenario_name} --seed {seed}"
