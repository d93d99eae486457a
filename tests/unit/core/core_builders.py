"""A coordinator to play with, in words: who joins, what is published, who delivers what.

`Scene` drives `CoordinatorState.handle` with real messages at a clock that moves only when
it is told to. What it must make durable is durable at once, unless `durable=False`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

import pytest

from echo2.core.coordinator import CoordinatorState
from echo2.core.effects import DeliverGroup, Effect, Emit, Finish, Persist, Send
from echo2.core.events import Event, Persisted, Received, StopRequested, Tick
from echo2.core.group import Group, GroupState, Lease, StoredResult
from echo2.core.records import Record
from echo2.core.restored import Restored
from echo2.core.settings import CoordinatorSettings
from echo2.core.status import status
from echo2.errors import RemoteProtocolError
from echo2.messages import (
    PROTOCOL,
    BatchRequest,
    CheckpointSaved,
    EvalRequest,
    Goodbye,
    GroupResult,
    Heartbeat,
    InstallFailed,
    LearnerHeartbeat,
    LearnerHello,
    LeaseFailed,
    LeaseGranted,
    Message,
    StepCompleted,
    TasksSubmitted,
    TasksWanted,
    VersionInstalled,
    VersionPublished,
    WorkerHello,
)
from echo2.types import (
    GroupId,
    GroupMismatch,
    LeaseId,
    PeerId,
    Sampling,
    Span,
    Task,
    TrajectoryHeader,
    Version,
)

M = TypeVar("M", bound=Message)
LEARNER = PeerId("learner")


# ----------------------------------------------------------------------------- values


def a_digest(version: Version) -> str:
    return f"{version.incarnation:032x}{version.step:032x}"


def a_version(step: int, *, incarnation: int = 1) -> Version:
    return Version(incarnation, step)


def a_task(index: int = 0, *, payload: str = "{}") -> Task:
    return Task(index, payload)


def a_header(
    *versions: Version, reward: float = 1.0, tokens: int = 2, turns: int = 1
) -> TrajectoryHeader:
    """One trajectory whose spans, of `tokens` tokens each, were sampled by `versions`."""
    spans = tuple(
        Span(version, 1 + i * tokens, 1 + (i + 1) * tokens) for i, version in enumerate(versions)
    )
    return TrajectoryHeader(
        length=1 + tokens * len(versions),
        prompt_length=1,
        num_sampled=tokens * len(versions),
        reward=reward,
        finish="stop",
        num_turns=turns,
        spans=spans,
    )


def a_stored_result(
    *versions: Version, lease: str = "l.1", worker: str = "w-1", reward: float = 1.0
) -> StoredResult:
    header = a_header(*(versions or (a_version(0),)), reward=reward)
    return StoredResult(LeaseId(lease), PeerId(worker), (header,), None)


def a_lease(
    group: str = "g0", *, name: str = "l.1", worker: str = "w-1", version: Version | None = None
) -> Lease:
    return Lease(
        id=LeaseId(name),
        group=GroupId(group),
        worker=PeerId(worker),
        version=version or a_version(0),
        granted_at=0.0,
        progressed_at=0.0,
        revoke_after_s=10.0,
    )


def a_group(index: int = 0, *, payload: str = "{}") -> Group:
    return Group(id=GroupId(f"g{index}"), task=Task(index, payload))


def a_worker_hello(**changes: Any) -> WorkerHello:
    values: dict[str, Any] = {
        "protocol": PROTOCOL,
        "echo2_version": "0.1",
        "name": "w-1",
        "engine": "null",
        "precision": "f32",
        "on_update": "finish",
        "environment": "null",
        "slots": 2,
    }
    return WorkerHello(**{**values, **changes})


def a_learner_hello(**changes: Any) -> LearnerHello:
    values: dict[str, Any] = {
        "protocol": PROTOCOL,
        "echo2_version": "0.1",
        "name": "learner",
        "resume_step": 0,
    }
    return LearnerHello(**{**values, **changes})


def a_publication(version: Version, **changes: Any) -> VersionPublished:
    values: dict[str, Any] = {
        "version": version,
        "manifest_digest": a_digest(version),
        "assets_digest": "",
        "num_bytes": 10,
        "origin": "tcp://127.0.0.1:5000",
        "origin_key": "",
    }
    return VersionPublished(**{**values, **changes})


def settings(**changes: Any) -> CoordinatorSettings:
    values: dict[str, Any] = {
        "run_id": "run",
        "staleness_max": 1,
        "groups_per_step": 2,
        "lead_steps": 100.0,
    }
    return CoordinatorSettings(**{**values, **changes})


def a_restored_run(**changes: Any) -> Restored:
    """Three steps of two groups each were trained by incarnation 1."""
    values: dict[str, Any] = {
        "incarnation": 1,
        "step": 3,
        "told_step": 3,
        "starts": ((1, 0),),
        "next_index": 8,
        "open_indexes": (6, 7),
        "trained": tuple((GroupId(f"g{index}"), index // 2) for index in range(2, 6)),
        "kept": (1,),
        "published": tuple((a_version(step), a_digest(a_version(step))) for step in range(4)),
        "ends": {"trained": 6},
    }
    return Restored(**{**values, **changes})


# ---------------------------------------------------------------------------- effects


def sent(effects: Iterable[Effect], kind: type[M], *, to: str | None = None) -> list[M]:
    """Messages of a kind among the effects, in order."""
    return [
        effect.message
        for effect in effects
        if isinstance(effect, Send)
        and isinstance(effect.message, kind)
        and (to is None or effect.peer == to)
    ]


def emitted(effects: Iterable[Effect], event: str) -> list[dict[str, Any]]:
    """Fields of the events of that name, in order."""
    return [e.fields for e in effects if isinstance(e, Emit) and e.event == event]


def delivered(effects: Iterable[Effect]) -> list[str]:
    """Names of the groups delivered to the learner."""
    return [e.group for e in effects if isinstance(e, DeliverGroup)]


def records(effects: Iterable[Effect]) -> list[Record]:
    """What is to be made durable, in order."""
    return [effect.record for effect in effects if isinstance(effect, Persist)]


def finish(effects: Iterable[Effect]) -> Finish | None:
    return next((e for e in effects if isinstance(e, Finish)), None)


# ------------------------------------------------------------------------------ scene


class Scene:
    """A coordinator, its clock, and the last leases that it granted by name."""

    def __init__(self, restored: Restored | None = None, **changes: Any) -> None:
        self.coordinator = CoordinatorState(settings(**changes), restored)
        self.now = 0.0
        self.grants: dict[str, LeaseGranted] = {}
        self.grantee: dict[str, PeerId] = {}
        self.undurable: list[int] = []
        self.wanted: TasksWanted | None = None

    @property
    def state(self) -> Any:
        return self.coordinator.state

    # ------------------------------------------------------------------ the machinery

    def handle(self, event: Event, *, durable: bool = True) -> list[Effect]:
        effects = self._note(self.coordinator.handle(event, self.now))
        if durable:
            effects += self.becomes_durable()
        return effects

    def becomes_durable(self) -> list[Effect]:
        """Everything that was to be made durable is."""
        effects: list[Effect] = []
        while self.undurable:
            record_id = self.undurable.pop(0)
            effects += self._note(self.coordinator.handle(Persisted(record_id), self.now))
        return effects

    def _note(self, effects: list[Effect]) -> list[Effect]:
        self.undurable += [e.record_id for e in effects if isinstance(e, Persist)]
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, LeaseGranted):
                self.grants[effect.message.lease] = effect.message
                self.grantee[effect.message.lease] = effect.peer
            if isinstance(effect, Send) and isinstance(effect.message, TasksWanted):
                self.wanted = effect.message
        return effects

    def receive(self, peer: str, message: Message, *, durable: bool = True) -> list[Effect]:
        return self.handle(Received(PeerId(peer), message), durable=durable)

    def tick(self, after: float = 0.0) -> list[Effect]:
        self.now += after
        return self.handle(Tick())

    def passes(self, seconds: float, *, alive: Iterable[str] = (), learner: bool = True) -> None:
        """Time passes in steps of a second, in which the named peers send heartbeats."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            for name in alive:
                self.beats(name)
            if learner and self.state.seat.peer is not None:
                self.learner_beats()
            self.handle(Tick())

    def operator_stops(self, reason: str = "interrupt") -> list[Effect]:
        return self.handle(StopRequested(reason))

    def snapshot(self) -> dict[str, Any]:
        """Everything that an illegal event must leave alone."""
        state = self.state
        return copy.deepcopy(
            {
                "status": status(state, ""),
                "groups": {
                    group.id: (group.state, group.attempts, group.lease, group.result)
                    for group in state.book.groups.values()
                },
                "queue": list(state.book.queue),
                "held": dict(state.book.held_by_expiry),
                "leased": dict(state.book.leased_by_expiry),
                "published": dict(state.lineage.published),
                "starts": list(state.lineage.starts),
                "kept": state.history.kept,
                "pending": sorted(state.pending),
                "stream": (state.stream.next_index, tuple(state.stream.again)),
                "outstanding": state.stream.outstanding,
                "evals": {
                    name: asdict(found.result()) for name, found in state.evals.evals.items()
                },
                "eval_leases": dict(state.evals.lease_eval),
                "wanted": state.seat.wanted_step,
                "silent": state.seat.silent,
                "ends": dict(state.ends),
                "effects": len(state.effects),
            }
        )

    @contextmanager
    def refuses(self, reason: str, text: str) -> Iterator[None]:
        """What happens inside raises with that reason, and changes nothing."""
        before = self.snapshot()
        with pytest.raises(RemoteProtocolError, match=text) as caught:
            yield
        assert caught.value.reason == reason
        assert self.snapshot() == before

    # -------------------------------------------------------------------- the learner

    def learner_joins(
        self, resume_step: int = 0, *, peer: str = LEARNER, durable: bool = True, **changes: Any
    ) -> list[Effect]:
        hello = a_learner_hello(resume_step=resume_step, **changes)
        return self.receive(peer, hello, durable=durable)

    @property
    def incarnation(self) -> int:
        return int(self.state.lineage.incarnation)

    def publishes(self, step: int, *, durable: bool = True, **changes: Any) -> list[Effect]:
        version = Version(self.incarnation, step)
        return self.receive(LEARNER, a_publication(version, **changes), durable=durable)

    def submits(
        self, count: int | None = None, *, exhausted: bool = False, payload: str = "{}"
    ) -> list[Effect]:
        """The learner answers the last request with `count` tasks (None: all asked for)."""
        assert self.wanted is not None
        wanted, self.wanted = self.wanted, None
        count = wanted.count if count is None else count
        tasks = tuple(Task(wanted.start + i, payload) for i in range(count))
        return self.receive(
            LEARNER,
            TasksSubmitted(
                incarnation=self.incarnation, start=wanted.start, tasks=tasks, exhausted=exhausted
            ),
        )

    def wants_batch(self, step: int | None = None) -> list[Effect]:
        step = self.state.step if step is None else step
        return self.receive(LEARNER, BatchRequest(incarnation=self.incarnation, step=step))

    def completes(
        self,
        step: int | None = None,
        *,
        groups: tuple[str, ...] = (),
        durable: bool = True,
        mismatch: Sequence[GroupMismatch] = (),
    ) -> list[Effect]:
        """The step of the batch that was granted, or of `groups`."""
        batch = self.state.seat.batch
        granted = () if batch is None else tuple(group.id for group in batch.groups)
        return self.receive(
            LEARNER,
            StepCompleted(
                incarnation=self.incarnation,
                step=self.state.step if step is None else step,
                groups=groups or granted or ("g0",),
                train_s=1.0,
                wait_s=0.0,
                mismatch=tuple(mismatch),
            ),
            durable=durable,
        )

    def trains(self) -> list[Effect]:
        """The learner asks for a batch, gets it and completes the step."""
        effects = self.wants_batch()
        return effects + self.completes()

    def saves(self, step: int, *kept: int) -> list[Effect]:
        return self.receive(
            LEARNER,
            CheckpointSaved(incarnation=self.incarnation, step=step, kept=kept or (step,)),
        )

    def evaluates(
        self, version: Version, *, tasks: int = 1, eval_id: str = "e", group_size: int = 1
    ) -> list[Effect]:
        return self.receive(
            LEARNER,
            EvalRequest(
                incarnation=self.incarnation,
                eval_id=eval_id,
                version=version,
                tasks=tuple(a_task(index) for index in range(tasks)),
                sampling=Sampling(temperature=0.0),
                group_size=group_size,
            ),
        )

    def learner_beats(self, text: str = "training") -> list[Effect]:
        return self.receive(
            str(self.state.seat.peer),
            LearnerHeartbeat(incarnation=self.incarnation, sequence=1, state=text),
        )

    def learner_leaves(self, *, finished: bool = False, durable: bool = True) -> list[Effect]:
        return self.receive(LEARNER, Goodbye(reason="bye", finished=finished), durable=durable)

    # -------------------------------------------------------------------- the workers

    def worker_joins(self, name: str = "w-1", **changes: Any) -> list[Effect]:
        return self.receive(name, a_worker_hello(name=name, **changes))

    def installs(
        self, name: str, version: Version, *, install_s: float = 0.5, **changes: Any
    ) -> list[Effect]:
        values: dict[str, Any] = {
            "version": version,
            "manifest_digest": a_digest(version),
            "fetch_s": 0.1,
            "install_s": install_s,
            "pause_s": 0.0,
        }
        return self.receive(name, VersionInstalled(**{**values, **changes}))

    def install_fails(
        self, name: str, version: Version, *, serving: Version | None = None
    ) -> list[Effect]:
        return self.receive(
            name, InstallFailed(version=version, stage="canary", text="nan", serving=serving)
        )

    def beats(self, name: str = "w-1", **tokens: int) -> list[Effect]:
        """A heartbeat; `tokens` of the leases as `l_1=4` for lease "l.1"."""
        return self.receive(
            name,
            Heartbeat(
                sequence=7,
                state="ready",
                lease_tokens={LeaseId(lease.replace("_", ".")): n for lease, n in tokens.items()},
                tokens_per_s=10.0,
            ),
        )

    def result(
        self, lease: str, *versions: Version, reward: float = 1.0, **changes: Any
    ) -> GroupResult:
        granted = self.grants[lease]
        headers = changes.pop(
            "trajectories",
            tuple(
                a_header(*(versions or (granted.version,)), reward=reward)
                for _ in range(granted.group_size)
            ),
        )
        length = sum(header.length for header in headers)
        values: dict[str, Any] = {
            "lease": granted.lease,
            "group": granted.group,
            "attempt": granted.attempt,
            "trajectories": headers,
            "generate_s": 0.1,
            "environment_s": 0.0,
            "token_ids": bytes(4 * length),
            "logprobs": bytes(4 * length),
            "loss_mask": bytes(length),
        }
        return GroupResult(**{**values, **changes})

    def delivers(
        self,
        lease: str,
        *versions: Version,
        by: str | None = None,
        durable: bool = True,
        **changes: Any,
    ) -> list[Effect]:
        """The lease's worker (or `by`) sends its result, sampled by `versions` in turn."""
        peer = by or self.grantee[lease]
        return self.receive(peer, self.result(lease, *versions, **changes), durable=durable)

    def fails(
        self, lease: str, *, stage: str = "environment", by: str | None = None
    ) -> list[Effect]:
        granted = self.grants[lease]
        return self.receive(
            by or self.grantee[lease],
            LeaseFailed(lease=granted.lease, group=granted.group, stage=stage, text="boom"),
        )

    # ------------------------------------------------------------------------ reading

    def group(self, name: str) -> Group:
        found: Group = self.state.book.groups[GroupId(name)]
        return found

    def state_of(self, name: str) -> GroupState | None:
        found = self.state.book.groups.get(GroupId(name))
        return found.state if found is not None else None

    def leases(self, worker: str | None = None) -> list[str]:
        """Live leases in order of their grant (of one worker)."""
        return [
            lease.id
            for lease in self.state.book.leases.values()
            if worker is None or lease.worker == worker
        ]

    def lease_of(self, group: str) -> str:
        lease = self.group(group).lease
        assert lease is not None
        return lease.id

    def reason(self) -> str:
        return self.coordinator.dispatcher.reason


def a_running_scene(
    *, slots: int = 2, workers: Iterable[str] = ("w-1",), tasks: int | None = None, **changes: Any
) -> Scene:
    """A learner, version 1.0, workers that serve it, and tasks: the first leases are out."""
    scene = Scene(**changes)
    scene.learner_joins()
    scene.publishes(0)
    for name in workers:
        scene.worker_joins(name, slots=slots)
        scene.installs(name, a_version(0))
    scene.submits(tasks)
    return scene


def a_granted_batch(**changes: Any) -> Scene:
    """The running scene, whose learner has its first batch."""
    scene = a_running_scene(slots=4, **changes)
    for lease in scene.leases()[: scene.state.settings.groups_per_step]:
        scene.delivers(lease)
    scene.wants_batch()
    return scene
