"""Plays workers and a learner against `CoordinatorState`, with every promise checked.

The state machine of `test_coordinator_state.py` decides what happens; this carries it out.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine

from echo2.core.coordinator import CoordinatorState
from echo2.core.effects import Effect, OrderAudit, Persist, Send
from echo2.core.events import Event, Persisted, Received, Tick
from echo2.core.group import WITH_RESULT, GroupState
from echo2.core.records import GroupStored
from echo2.core.settings import CoordinatorSettings
from echo2.errors import RemoteProtocolError
from echo2.messages import (
    PROTOCOL,
    AuditDone,
    BatchGranted,
    BatchRequest,
    CheckpointSaved,
    GroupResult,
    LearnerHello,
    LearnerWelcome,
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
from echo2.sim.books import truth_of
from echo2.sim.invariants import Invariants
from echo2.sim.learner import digest_of
from echo2.types import GroupId, LeaseId, PeerId, Span, Task, TrajectoryHeader, Version

WORKERS = [PeerId("w0"), PeerId("w1"), PeerId("w2")]
LEARNERS = [PeerId("learner"), PeerId("learner-2")]
NUM_TOKENS = 4
PARTS = (
    *("durable", "tasks", "publish", "install", "results", "audits", "batch"),
    *("complete", "checkpoint"),
)


def a_result(
    granted: LeaseGranted,
    versions: tuple[Version, ...],
    *,
    rewards: tuple[float, ...] = (0.0, 1.0),
    extra: int = 0,
    lies: bool = False,
) -> GroupResult:
    """A group sampled by `versions`, one after the other, in equal parts. The last token of each
    trajectory is what it is worth, which is not what is claimed if it `lies`."""
    size = granted.group_size + extra
    cuts = [1 + NUM_TOKENS * i // len(versions) for i in range(len(versions) + 1)]
    spans = tuple(Span(v, cuts[i], cuts[i + 1]) for i, v in enumerate(versions))
    trajectories = tuple(
        TrajectoryHeader(1 + NUM_TOKENS, 1, NUM_TOKENS, rewards[i % len(rewards)], "stop", 1, spans)
        for i in range(size)
    )
    total = size * (1 + NUM_TOKENS)
    return GroupResult(
        lease=granted.lease,
        group=granted.group,
        attempt=granted.attempt,
        trajectories=trajectories,
        generate_s=1.0,
        environment_s=0.0,
        token_ids=b"".join(
            bytes(4 * NUM_TOKENS) + int(t.reward != float(lies)).to_bytes(4, "little")
            for t in trajectories
        ),
        logprobs=bytes(4 * total),
        loss_mask=bytes(total),
    )


def recount(core: CoordinatorState) -> None:
    """The book's counts are those of its groups."""
    book, evals = core.state.book, core.state.evals
    held: Counter[int] = Counter()
    out: Counter[int] = Counter()
    buffered: dict[int, set[str]] = {}
    for group in book.groups.values():
        if group.state in (GroupState.LEASED, *WITH_RESULT):
            expiry = book.expiry(group)
            held[expiry] += 1
            if group.state is GroupState.BUFFERED:
                buffered.setdefault(expiry, set()).add(group.id)
            else:
                out[expiry] += 1
        assert (group.lease is not None) == (group.state is GroupState.LEASED)
    assert held == book.held_by_expiry
    assert out == book.leased_by_expiry
    assert buffered == {expiry: set(groups) for expiry, groups in book.buffered.items()}
    queued = {g.id for g in book.groups.values() if g.state is GroupState.QUEUED}
    assert len(book.queue) == len(queued)
    assert set(book.queue) == queued
    assert book.queue_bytes == sum(len(book.groups[g].task.payload) for g in book.queue)
    leased = {g.lease.id for g in book.groups.values() if g.lease is not None}
    assert leased == set(book.leases)
    by_worker: dict[str, set[str]] = {}
    for lease in book.leases.values():
        by_worker.setdefault(lease.worker, set()).add(lease.id)
    assert by_worker == book.leases_by_worker
    assert Counter(lease.worker for e in evals.evals.values() for lease in e.leases.values()) == (
        evals.by_worker
    )


class Driver(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0.0
        self.offset = 0.0
        self.granted: list[tuple[PeerId, LeaseGranted]] = []
        self.sent: list[tuple[PeerId, GroupResult]] = []
        self.announced: dict[PeerId, VersionAnnounced] = {}
        self.installed: dict[PeerId, Version] = {}
        self.pending: list[int] = []
        self.wanted: list[TasksWanted] = []
        self.welcome: LearnerWelcome | None = None
        self.learner = LEARNERS[0]
        self.batch: BatchGranted | None = None
        self.checkpoints: list[int] = []
        self.num_hellos = 0
        self.ending = False
        self.last_hello: tuple[PeerId, LearnerHello] | None = None
        self.orders: list[OrderAudit] = []
        self.payloads: dict[LeaseId, object] = {}
        self.turn: list[tuple[Event | None, list[Effect]]] = []
        self.turn_left = 0
        """So many events more are taken before the turn is settled."""

    def start(self, run_settings: CoordinatorSettings) -> None:
        self.run_settings = run_settings
        self.core = CoordinatorState(run_settings)
        self.checker = Invariants(run_settings, frozenset(WORKERS))
        self.feed(Tick())

    def feed(self, event: Event) -> None:
        before = self.frozen()
        try:
            self.turn.append((event, self.core.take(event, self.now + self.offset)))
        except RemoteProtocolError as error:
            if not self.ending:
                note(f"refused: {error}")
            assert self.frozen() == before, "a refused message changed something"
        if self.turn_left > 0 and not self.ending:
            self.turn_left -= 1
        else:
            self.end_turn()

    def end_turn(self) -> None:
        turn, self.turn, self.turn_left = self.turn, [], 0
        if not turn:
            return
        turn.append((None, self.core.settle()))
        while not self.core.is_settled:
            turn.append((None, self.core.settle()))
        self.checker.observe(turn, self.core.state)
        for _, effects in turn:
            for effect in effects:
                self.carry_out(effect)

    def frozen(self) -> Any:
        state = self.core.state
        return (
            state.step,
            list(state.lineage.starts),
            dict(state.lineage.published),
            [(g.id, g.state, g.attempts) for g in state.book.groups.values()],
            list(state.pending),
            state.stream.next_index,
            state.stream.outstanding,
            sorted(state.members.workers),
            [(e, len(found.leases)) for e, found in state.evals.evals.items()],
            state.seat.wanted_step,
        )

    def receive(self, peer: PeerId, message: Message) -> None:
        self.feed(Received(peer, message))

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist(record_id, record):
                self.pending.append(record_id)
                if isinstance(record, GroupStored):
                    self.payloads[record.lease] = record.payload
            case OrderAudit():
                self.orders.append(effect)
            case Send(peer, LeaseGranted() as granted):
                self.granted.append((peer, granted))
            case Send(peer, VersionAnnounced() as announced):
                self.announced[peer] = announced
            case Send(_, TasksWanted() as wanted):
                self.wanted.append(wanted)
            case Send(_, LearnerWelcome() as welcome):
                self.welcome = welcome
            case Send(_, BatchGranted() as batch):
                self.batch = batch
            case _:
                pass

    @property
    def incarnation(self) -> int:
        return self.core.state.lineage.incarnation

    @property
    def step(self) -> int:
        return self.core.state.step

    def running(self) -> bool:
        return self.core.state.finished is None

    def persist_all(self) -> None:
        while self.pending:
            self.feed(Persisted(self.pending.pop(0)))

    def work(self, parts: set[str], *, slow: PeerId | None = None) -> None:
        """Each part of what the peers should do, if it is among `parts`; no result yet of
        `slow`."""
        if "durable" in parts:
            self.persist_all()
        if "tasks" in parts and self.wanted:
            self.submit(self.wanted.pop())
        if "publish" in parts:
            self.publish_v()
        if "durable" in parts:
            self.persist_all()
        for peer in WORKERS if "install" in parts else []:
            self.install_announced(peer)
        live = [
            (peer, granted)
            for peer, granted in self.granted[-12:]
            if self.core.state.is_live(granted.lease) and peer != slow
        ]
        for peer, granted in live if "results" in parts else []:
            result = a_result(granted, (granted.version,))
            self.sent.append((peer, result))
            self.receive(peer, result)
        if "durable" in parts:
            self.persist_all()
        while self.orders and "audits" in parts:
            self.answer(self.orders.pop())
        if "batch" in parts:
            self.ask_batch()
        if "complete" in parts and self.batch is not None:
            self.complete(self.batch.incarnation, self.batch.step)
        if "durable" in parts:
            self.persist_all()
        if "checkpoint" in parts:
            self.save_checkpoint(keep=3)

    def answer(self, order: OrderAudit) -> None:
        """The truth, as the tokens have it."""
        rewards = truth_of(self.payloads[order.result.lease])
        message = AuditDone(lease=order.result.lease, group=order.group, rewards=rewards)
        self.receive(order.peer, message)

    # ------------------------------------------------------------------------- workers

    def say_hello(self, peer: PeerId, *, slots: int = 2, held: tuple[LeaseId, ...] = ()) -> None:
        self.receive(
            peer,
            WorkerHello(
                protocol=PROTOCOL,
                echo2_version="0",
                name=peer,
                engine="null",
                precision="none",
                on_update="continue",
                environment="null",
                slots=slots,
                held=held,
                installed=self.installed.get(peer),
                replays=True,
            ),
        )

    def install_announced(self, peer: PeerId) -> None:
        announced = self.announced.get(peer)
        if announced is not None:
            self.installed[peer] = announced.version
            self.install(peer, announced.version)

    def install(self, peer: PeerId, version: Version) -> None:
        self.receive(
            peer,
            VersionInstalled(
                version=version,
                manifest_digest=digest_of(version),
                fetch_s=0.0,
                install_s=0.1,
                pause_s=0.0,
            ),
        )

    # ----------------------------------------------------------------------- the learner

    def take_over(self, peer: PeerId, place: int) -> None:
        """A new learner, from one of the checkpoints."""
        kept = self.checkpoints or [0]
        resume_step = kept[place % len(kept)]
        self.checkpoints = [step for step in self.checkpoints if step <= resume_step]
        self.num_hellos += 1
        self.learner, self.batch, self.welcome = peer, None, None
        hello = LearnerHello(
            protocol=PROTOCOL,
            echo2_version="0",
            name="learner",
            resume_step=resume_step,
            checkpoint_steps=tuple(self.checkpoints),
            hello_id=f"hello{self.num_hellos}",
        )
        self.last_hello = (peer, hello)
        self.receive(peer, hello)

    def ask_batch(self) -> None:
        self.receive(self.learner, BatchRequest(incarnation=self.incarnation, step=self.step))

    def complete(self, incarnation: int, step: int) -> None:
        self.receive(
            self.learner,
            StepCompleted(
                incarnation=incarnation,
                step=step,
                groups=(self.batch and self.batch.groups) or (GroupId("g0"),),
                train_s=1.0,
                wait_s=0.0,
                mismatch=(),
            ),
        )

    def publish_v(self) -> None:
        self.publish(Version(self.incarnation, self.step), final=False)

    def publish(self, version: Version, final: bool) -> None:
        self.receive(
            self.learner,
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

    def save_checkpoint(self, *, keep: int) -> None:
        if self.welcome is None or self.welcome.incarnation != self.incarnation:
            return
        if self.step not in self.checkpoints:
            self.checkpoints = [*self.checkpoints, self.step][-keep:]
        self.receive(
            self.learner,
            CheckpointSaved(
                incarnation=self.incarnation, step=self.step, kept=tuple(self.checkpoints)
            ),
        )

    def submit(self, wanted: TasksWanted, *, exhausted: bool = False) -> None:
        self.receive(
            self.learner,
            TasksSubmitted(
                incarnation=wanted.incarnation,
                start=wanted.start,
                tasks=tuple(
                    Task(index, "{}") for index in range(wanted.start, wanted.start + wanted.count)
                ),
                exhausted=exhausted,
            ),
        )
