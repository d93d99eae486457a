"""Promises 1 to 3 over the coordinator's state machine, for any order of events.

Hypothesis plays workers, learners and the ledger one message at a time: joins, deaths,
duplicates, results in any order and of revoked leases, records that become durable late and
out of order, rewinds to any kept checkpoint, fenced learners that go on talking, clock jumps.
After each event the checker of the simulator looks at what came out (`echo2.sim.invariants`).
"""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, event, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from echo2.core.coordinator import CoordinatorState
from echo2.core.effects import Effect, Emit, Persist, Send
from echo2.core.events import Event, Persisted, Received, Tick
from echo2.core.settings import CoordinatorSettings
from echo2.errors import RemoteProtocolError
from echo2.messages import (
    PROTOCOL,
    BatchGranted,
    BatchRequest,
    CheckpointSaved,
    EvalRequest,
    Goodbye,
    GroupResult,
    Heartbeat,
    InstallFailed,
    LearnerHello,
    LearnerWelcome,
    LeaseFailed,
    LeaseGranted,
    Message,
    StepCompleted,
    TasksSubmitted,
    TasksWanted,
    VersionAnnounced,
    VersionInstalled,
    VersionPublished,
    WorkerHello,
)
from echo2.sim.invariants import Invariants
from echo2.types import PeerId, Sampling, Span, Task, TrajectoryHeader, Version

WORKERS = ("w0", "w1", "w2")
LEARNERS = ("learner", "learner-2")
G = 2


def digest_of(version: Version) -> str:
    return f"{version.incarnation:032x}{version.step:032x}"


class CoordinatorMachine(RuleBasedStateMachine):
    """What the peers know, and one rule for each thing that they may do next."""

    leases = Bundle("leases")
    results = Bundle("results")

    @initialize(
        staleness_max=st.integers(0, 4),
        late=st.sampled_from(("wait", "drop", "mask")),
        groups_per_step=st.integers(1, 3),
        period=st.integers(1, 3),
        attempts_max=st.integers(1, 3),
        filter_zero_variance=st.booleans(),
        lead_steps=st.sampled_from((None, 0.0, 0.5, 4.0)),
        partial_batch=st.sampled_from(("train", "drop")),
        num_tasks=st.sampled_from((None, None, 7)),
    )
    def begin(
        self,
        staleness_max: int,
        late: Any,
        groups_per_step: int,
        period: int,
        attempts_max: int,
        filter_zero_variance: bool,
        lead_steps: float | None,
        partial_batch: Any,
        num_tasks: int | None,
    ) -> None:
        self.run_settings = CoordinatorSettings(
            run_id="r",
            staleness_max=staleness_max,
            late=late,
            period=min(period, staleness_max + 1),
            groups_per_step=groups_per_step,
            group_size=G,
            attempts_max=attempts_max,
            filter_zero_variance=filter_zero_variance,
            lead_steps=lead_steps,
            partial_batch=partial_batch,
            stall_s=20.0,
            lease_max_s=60.0,
            no_worker_timeout_s=1e8,
            learner_timeout_s=1e8,
        )
        self.num_tasks = num_tasks
        self.core = CoordinatorState(self.run_settings)
        self.checker = Invariants(self.run_settings)
        self.now = 0.0
        self.persisting: list[int] = []
        self.announced: dict[str, VersionAnnounced] = {}
        self.installed: dict[str, Version] = {}
        self.granted: list[LeaseGranted] = []
        self.owner: dict[str, str] = {}
        self.incarnations: dict[str, int] = {}
        self.batches: dict[int, int] = {}
        self.wanted: list[tuple[str, TasksWanted]] = []
        self.kept: tuple[int, ...] = (0,)
        self.hellos = 0

    # ---------------------------------------------------------------------- machinery

    def feed(self, what: Event) -> None:
        if self.core.state.finished is not None:
            return
        try:
            effects = self.core.handle(what, self.now)
        except RemoteProtocolError:
            assert isinstance(what, Received), "only a peer can break the protocol"
            return
        for effect in effects:
            self.carry_out(effect)
        self.checker.observe(what, effects, self.core.state)

    def receive(self, peer: str, message: Message) -> None:
        self.feed(Received(PeerId(peer), message))

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist(record_id):
                self.persisting.append(record_id)
            case Send(peer, VersionAnnounced() as announced):
                self.announced[peer] = announced
            case Send(peer, LeaseGranted() as granted):
                self.granted.append(granted)
                self.owner[granted.lease] = peer
            case Send(peer, LearnerWelcome() as welcome):
                self.incarnations[peer] = welcome.incarnation
            case Send(_, BatchGranted() as batch):
                self.batches[batch.incarnation] = batch.step
            case Send(peer, TasksWanted() as wanted):
                self.wanted.append((peer, wanted))
            case Emit(name, fields) if name == "checkpoint_saved":
                self.kept = tuple(fields["kept"])
            case _:
                pass

    # -------------------------------------------------------------------------- time

    @rule(seconds=st.sampled_from((0.0, 0.1, 1.0, 6.0, 25.0, -50.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @precondition(lambda self: self.persisting)
    @rule(data=st.data(), in_order=st.booleans())
    def a_record_is_durable(self, data: st.DataObject, in_order: bool) -> None:
        index = 0 if in_order else data.draw(st.integers(0, len(self.persisting) - 1))
        self.feed(Persisted(self.persisting.pop(index)))

    @rule()
    def all_records_are_durable(self) -> None:
        for record_id in [*self.persisting]:
            self.persisting.remove(record_id)
            self.feed(Persisted(record_id))

    # ----------------------------------------------------------------------- workers

    @rule(
        peer=st.sampled_from(WORKERS),
        slots=st.integers(1, 4),
        keeps=st.booleans(),
        protocol=st.sampled_from((PROTOCOL, PROTOCOL, PROTOCOL, PROTOCOL + 1)),
    )
    def a_worker_says_hello(self, peer: str, slots: int, keeps: bool, protocol: int) -> None:
        held = tuple(g.lease for g in self.granted if self.owner[g.lease] == peer)
        self.receive(
            peer,
            WorkerHello(
                protocol=protocol,
                echo2_version="0",
                name=peer,
                engine="null",
                precision="none",
                on_update="continue",
                environment="null",
                slots=slots,
                held=held if keeps else (),
                installed=self.installed.get(peer) if keeps else None,
            ),
        )

    @rule(peer=st.sampled_from(WORKERS))
    def a_worker_installs(self, peer: str) -> None:
        announced = self.announced.get(peer)
        if announced is None:
            return
        self.installed[peer] = announced.version
        self.receive(
            peer,
            VersionInstalled(
                version=announced.version,
                manifest_digest=announced.manifest_digest,
                fetch_s=0.0,
                install_s=0.1,
                pause_s=0.0,
            ),
        )

    # ------------------------------------------------- a stretch in which all goes well

    @rule(peer=st.sampled_from(WORKERS))
    def a_worker_gets_ready(self, peer: str) -> None:
        self.a_worker_says_hello(peer, 3, False, PROTOCOL)
        self.a_worker_installs(peer)

    @rule(equal=st.booleans())
    def all_leases_are_delivered(self, equal: bool) -> None:
        for lease in [*self.core.state.book.leases.values()]:
            granted = next(g for g in self.granted if g.lease == lease.id)
            self.deliver(granted, tail=0, equal=equal, count=G)
        self.all_records_are_durable()

    @rule(peer=st.sampled_from(LEARNERS))
    def a_learner_gets_going(self, peer: str) -> None:
        """Seated if it was not, version published, tasks there, batch asked for."""
        if self.core.state.seat.peer is None:
            self.say_hello(peer, 0 if not self.hellos else max(self.kept))
        peer = self.core.state.seat.peer or peer
        self.all_records_are_durable()
        self.a_version_is_published(peer, False)
        self.all_records_are_durable()
        self.tasks_arrive()
        self.a_batch_is_asked_for(peer, 0)

    @rule(steps=st.integers(1, 3), equal=st.sampled_from((False, False, False, True)))
    def steps_go_well(self, steps: int, equal: bool) -> None:
        """From wherever things stand to so many trained steps, if they can be."""
        for _ in range(steps):
            if not self.core.state.members.ready():
                self.a_worker_gets_ready("w0")
            self.a_learner_gets_going("learner")
            for _ in range(4):
                for peer in WORKERS:
                    self.a_worker_installs(peer)
                self.all_leases_are_delivered(equal)
                self.tasks_arrive()
            self.a_step_is_trained()

    @rule()
    def a_step_is_trained(self) -> None:
        peer = self.core.state.seat.peer
        if peer is not None:
            self.a_step_is_completed(peer, False)
            self.all_records_are_durable()

    @rule(peer=st.sampled_from(WORKERS), rolls_back=st.booleans())
    def an_install_fails(self, peer: str, rolls_back: bool) -> None:
        announced = self.announced.get(peer)
        if announced is None:
            return
        serving = self.installed.get(peer) if rolls_back else None
        if serving is None:
            self.installed.pop(peer, None)
        self.receive(
            peer,
            InstallFailed(version=announced.version, stage="canary", text="x", serving=serving),
        )

    @rule(peer=st.sampled_from(WORKERS), tokens=st.integers(0, 3))
    def a_heartbeat(self, peer: str, tokens: int) -> None:
        mine = {g.lease: tokens for g in self.granted if self.owner[g.lease] == peer}
        self.receive(peer, Heartbeat(sequence=1, state="ready", lease_tokens=mine))

    @rule(peer=st.sampled_from(WORKERS))
    def a_worker_leaves(self, peer: str) -> None:
        self.installed.pop(peer, None)
        self.receive(peer, Goodbye(reason="spot"))

    @precondition(lambda self: self.granted)
    @rule(
        target=results,
        data=st.data(),
        tail=st.integers(0, 2),
        equal=st.booleans(),
        count=st.sampled_from((G, G, G, G, 1)),
    )
    def a_result(self, data: st.DataObject, tail: int, equal: bool, count: int) -> Any:
        """Of any lease ever granted."""
        granted = data.draw(st.sampled_from(self.granted))
        return multiple(self.deliver(granted, tail=tail, equal=equal, count=count))

    def deliver(
        self, granted: LeaseGranted, *, tail: int, equal: bool, count: int
    ) -> tuple[str, GroupResult]:
        """With `tail` more tokens of the version that is installed now."""
        peer = self.owner[granted.lease]
        spans = [Span(granted.version, 1, 3)]
        newer = self.installed.get(peer)
        if tail and newer is not None and newer > granted.version:
            spans.append(Span(newer, 3, 3 + tail))
        end = spans[-1].end
        size = granted.group_size if granted.kind == "eval" else count
        headers = tuple(
            TrajectoryHeader(end, 1, end - 1, 0.0 if equal else float(i), "stop", 1, tuple(spans))
            for i in range(size)
        )
        message = GroupResult(
            lease=granted.lease,
            group=granted.group,
            attempt=granted.attempt,
            trajectories=headers,
            generate_s=0.1,
            environment_s=0.0,
            token_ids=bytes(4 * end * size),
            logprobs=bytes(4 * end * size),
            loss_mask=bytes(end * size),
        )
        self.receive(peer, message)
        return peer, message

    @rule(result=results)
    def a_result_comes_again(self, result: tuple[str, GroupResult]) -> None:
        self.receive(*result)

    @rule(result=results, peer=st.sampled_from(WORKERS))
    def somebody_else_claims_a_result(self, result: tuple[str, GroupResult], peer: str) -> None:
        self.receive(peer, result[1])

    @precondition(lambda self: self.granted)
    @rule(
        data=st.data(),
        stage=st.sampled_from(("environment", "engine", "draining", "lost")),
    )
    def a_lease_fails(self, data: st.DataObject, stage: Any) -> None:
        granted = data.draw(st.sampled_from(self.granted))
        self.receive(
            self.owner[granted.lease],
            LeaseFailed(lease=granted.lease, group=granted.group, stage=stage, text="x"),
        )

    # ----------------------------------------------------------------------- learners

    @rule(peer=st.sampled_from(LEARNERS), data=st.data())
    def a_learner_takes_over(self, peer: str, data: st.DataObject) -> None:
        if self.hellos > 5:
            return
        self.say_hello(peer, data.draw(st.sampled_from(self.kept)) if self.hellos else 0)

    def say_hello(self, peer: str, resume: int) -> None:
        self.hellos += 1
        self.receive(
            peer,
            LearnerHello(
                protocol=PROTOCOL,
                echo2_version="0",
                name=peer,
                resume_step=resume,
                checkpoint_steps=tuple(k for k in self.kept if k <= resume),
                hello_id=f"h{self.hellos}",
            ),
        )

    @rule()
    def tasks_arrive(self) -> None:
        for wanted_by, wanted in self.wanted:
            end = wanted.start + wanted.count
            if self.num_tasks is not None:
                end = max(wanted.start, min(end, self.num_tasks))
            self.receive(
                wanted_by,
                TasksSubmitted(
                    incarnation=wanted.incarnation,
                    start=wanted.start,
                    tasks=tuple(Task(i, "{}") for i in range(wanted.start, end)),
                    exhausted=self.num_tasks is not None and end >= self.num_tasks,
                ),
            )
        self.wanted.clear()

    @rule(peer=st.sampled_from(LEARNERS), final=st.sampled_from((False, False, True)))
    def a_version_is_published(self, peer: str, final: bool) -> None:
        incarnation = self.incarnations.get(peer)
        if incarnation is None:
            return
        version = Version(incarnation, self.core.state.step)
        self.receive(
            peer,
            VersionPublished(
                version=version,
                manifest_digest=digest_of(version),
                assets_digest="",
                num_bytes=1,
                origin="",
                origin_key="",
                final=final,
            ),
        )

    @rule(peer=st.sampled_from(LEARNERS), ahead=st.sampled_from((0, 0, 0, 1)))
    def a_batch_is_asked_for(self, peer: str, ahead: int) -> None:
        incarnation = self.incarnations.get(peer)
        if incarnation is not None:
            step = self.core.state.step + ahead
            self.receive(peer, BatchRequest(incarnation=incarnation, step=step))

    @rule(peer=st.sampled_from(LEARNERS), again=st.booleans())
    def a_step_is_completed(self, peer: str, again: bool) -> None:
        incarnation = self.incarnations.get(peer)
        if incarnation is None or incarnation not in self.batches:
            return
        message = StepCompleted(
            incarnation=incarnation,
            step=self.batches[incarnation],
            train_s=1.0,
            wait_s=0.0,
            mismatch={},
        )
        for _ in range(2 if again else 1):
            self.receive(peer, message)

    @rule(peer=st.sampled_from(LEARNERS), keep_before=st.booleans())
    def a_checkpoint_is_saved(self, peer: str, keep_before: bool) -> None:
        incarnation = self.incarnations.get(peer)
        if incarnation is None:
            return
        step = self.core.state.step
        before = (max(self.kept),) if keep_before and max(self.kept) < step else ()
        self.receive(
            peer, CheckpointSaved(incarnation=incarnation, step=step, kept=(*before, step))
        )

    @rule(peer=st.sampled_from(LEARNERS), count=st.integers(1, 3))
    def an_eval_is_asked_for(self, peer: str, count: int) -> None:
        incarnation = self.incarnations.get(peer)
        if incarnation is None:
            return
        version = Version(incarnation, self.core.state.step)
        self.receive(
            peer,
            EvalRequest(
                incarnation=incarnation,
                eval_id=f"e{version}",
                version=version,
                tasks=tuple(Task(i, "{}") for i in range(count)),
                sampling=Sampling(temperature=0.0),
            ),
        )

    def teardown(self) -> None:
        if hasattr(self, "core"):
            event(f"v {min(self.core.state.step, 4)}")
            event(f"incarnations {min(self.hellos, 3)}")

    @invariant()
    def nothing_grows(self) -> None:
        if not hasattr(self, "core"):
            return
        state = self.core.state
        assert (
            state.book.num_held <= self.run_settings.buffer_max + self.run_settings.groups_per_step
        )
        assert sum(len(leases) for leases in state.book.leases_by_worker.values()) == len(
            state.book.leases
        )


TestCoordinatorState = CoordinatorMachine.TestCase
TestCoordinatorState.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
