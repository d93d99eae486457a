"""The learner's side of the protocol: one request at a time of each kind, asked until answered.

    joining -> seated -> (silent -> joining)* -> closed
                  '-> fenced | refused | ended

Promise: every request of the learner (a batch, a completed step, a version, an eval) is
answered exactly once, whatever is lost on the way: requests are idempotent and are sent
again after each welcome. A fenced client sends nothing any more. The coordinator's silence
is noticed and leads to a new hello under the same incarnation.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2.errors import LocalProtocolError
from echo2.messages import (
    MISMATCHES_MAX,
    PROTOCOL,
    BatchGranted,
    BatchGroup,
    BatchRequest,
    BatchWaiting,
    BroadcastRequest,
    BroadcastStatus,
    CheckpointSaved,
    EvalRequest,
    EvalResult,
    Fenced,
    Goodbye,
    HeartbeatEcho,
    LaneOpened,
    LearnerHeartbeat,
    LearnerHello,
    LearnerWelcome,
    Message,
    PublishAcknowledged,
    Refused,
    Shutdown,
    StepAcknowledged,
    StepCompleted,
    TasksSubmitted,
    TasksWanted,
    VersionPublished,
)
from echo2.types import GroupId, GroupMismatch, Version

HELLO_RETRY_S = 0.5
BATCH_INCOMPLETE_S = 5.0
"""A granted batch whose groups did not all come by then is asked for again."""
SILENCE_DEFAULT_S = 15.0


class ClientState(enum.Enum):
    NEW = "new"
    JOINING = "joining"
    SEATED = "seated"
    CLOSED = "closed"


# ------------------------------------------------------------------ what the shell is told


@dataclass(frozen=True, slots=True)
class Transmit:
    message: Message


@dataclass(frozen=True, slots=True)
class Seated:
    """The hello was answered, for the first time or after a lost connection."""

    welcome: LearnerWelcome
    first: bool


@dataclass(frozen=True, slots=True)
class BatchReady:
    """A whole batch: its groups in the order of `granted.groups`."""

    granted: BatchGranted
    groups: tuple[BatchGroup, ...]


@dataclass(frozen=True, slots=True)
class StepDurable:
    step: int


@dataclass(frozen=True, slots=True)
class VersionDurable:
    version: Version
    keep_from: int


@dataclass(frozen=True, slots=True)
class BroadcastKnown:
    status: BroadcastStatus


@dataclass(frozen=True, slots=True)
class EvalDone:
    result: EvalResult


@dataclass(frozen=True, slots=True)
class TasksNeeded:
    """Answer with `submit_tasks` of this very range."""

    start: int
    count: int


@dataclass(frozen=True, slots=True)
class WaitingFor:
    text: str


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The coordinator refused what was asked; whatever was pending is given up."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing more will come. `kind`: fenced, refused, lost, shutdown."""

    kind: str
    text: str
    finished: bool = False


Outcome = (
    Transmit
    | Seated
    | BatchReady
    | StepDurable
    | VersionDurable
    | BroadcastKnown
    | EvalDone
    | TasksNeeded
    | WaitingFor
    | RequestRefused
    | Ended
)


@dataclass(slots=True)
class LearnerClientState:
    """All times in seconds of the caller's monotonic clock."""

    hello: LearnerHello
    state: ClientState = ClientState.NEW
    incarnation: int = 0
    step: int = 0
    heartbeat_interval_s: float = 1.0
    silence_max_s: float = SILENCE_DEFAULT_S
    text: str = "starting"
    sequence: int = 0
    heard_at: float = 0.0
    beat_at: float = 0.0
    hello_at: float = 0.0
    batch_request: BatchRequest | None = None
    granted: BatchGranted | None = None
    granted_at: float = 0.0
    groups: dict[GroupId, BatchGroup] = field(default_factory=dict)
    trained: tuple[GroupId, ...] = ()
    """Groups of the newest batch that came whole."""
    completing: StepCompleted | None = None
    publishing: dict[Version, VersionPublished] = field(default_factory=dict)
    newest_published: VersionPublished | None = None
    checkpoint: CheckpointSaved | None = None
    evals: dict[str, EvalRequest] = field(default_factory=dict)
    connect_timeout_s: float | None = None
    """A learner that was seated ends after so long without a welcome; None: it never does."""
    alone_since: float = 0.0

    # -------------------------------------------------------------------- requests

    def start(self, now: float) -> list[Outcome]:
        self.state = ClientState.JOINING
        self.heard_at = now
        return self._say_hello(now)

    def request_batch(self, step: int) -> list[Outcome]:
        self._must_be_free(self.batch_request, "a batch is being waited for")
        self.batch_request = BatchRequest(incarnation=self.incarnation, step=step)
        self.granted, self.groups = None, {}
        return self._transmit(self.batch_request)

    def complete(
        self, step: int, *, train_s: float, wait_s: float, mismatch: Sequence[GroupMismatch]
    ) -> list[Outcome]:
        self._must_be_free(self.completing, "a step is being completed")
        if not self.trained:
            raise LocalProtocolError("no batch was delivered that this step could have trained")
        self.completing = StepCompleted(
            incarnation=self.incarnation,
            step=step,
            groups=self.trained,
            train_s=train_s,
            wait_s=wait_s,
            mismatch=tuple(mismatch)[:MISMATCHES_MAX],
        )
        return self._transmit(self.completing)

    def publish(self, message: VersionPublished) -> list[Outcome]:
        self.publishing[message.version] = message
        return self._transmit(message)

    def ask_broadcast(self) -> list[Outcome]:
        """Not repeated by itself: who waits for the answer asks again."""
        return self._transmit(BroadcastRequest(incarnation=self.incarnation))

    def checkpoint_saved(self, step: int, kept: tuple[int, ...]) -> list[Outcome]:
        self.checkpoint = CheckpointSaved(incarnation=self.incarnation, step=step, kept=kept)
        return self._transmit(self.checkpoint)

    def evaluate(self, request: EvalRequest) -> list[Outcome]:
        self.evals[request.eval_id] = request
        return self._transmit(request)

    def submit_tasks(self, message: TasksSubmitted) -> list[Outcome]:
        return self._transmit(message)

    def say(self, text: str) -> None:
        """What the learner does now: told with the next heartbeat."""
        self.text = text[:2048]

    def close(self, reason: str, *, finished: bool, missing_steps: int = 0) -> list[Outcome]:
        outcomes = self._transmit(
            Goodbye(
                reason=reason[:2048],
                finished=finished,
                incarnation=self.incarnation,
                missing_steps=missing_steps,
            )
        )
        self.state = ClientState.CLOSED
        return outcomes

    # ---------------------------------------------------------------------- events

    def tick(self, now: float) -> list[Outcome]:
        """Heartbeats, and asking again what was not answered."""
        if self.state is ClientState.JOINING:
            limit_s = self.connect_timeout_s
            if self.incarnation and limit_s is not None and now - self.alone_since > limit_s:
                self.state = ClientState.CLOSED
                return [
                    Ended(
                        "lost",
                        f"the coordinator could not be reached for {limit_s:g} s "
                        "(net.connect_timeout_s); start it again, then the learner with --resume",
                    )
                ]
            return self._say_hello(now) if now - self.hello_at >= HELLO_RETRY_S else []
        if self.state is not ClientState.SEATED:
            return []
        if now - self.heard_at > self.silence_max_s:
            self.state, self.alone_since = ClientState.JOINING, now
            return self._say_hello(now)
        outcomes: list[Outcome] = []
        if now - self.beat_at >= self.heartbeat_interval_s:
            self.beat_at = now
            self.sequence += 1
            outcomes += self._transmit(
                LearnerHeartbeat(
                    incarnation=self.incarnation, sequence=self.sequence, state=self.text
                )
            )
        request = self.batch_request
        incomplete = self.granted is not None and now - self.granted_at > BATCH_INCOMPLETE_S
        if incomplete and request is not None:
            self.granted_at = now
            outcomes.append(Transmit(LaneOpened()))
            outcomes += self._transmit(request)
        return outcomes

    def received(self, message: Message, now: float) -> list[Outcome]:
        """Take a message of the coordinator; one that answers nothing is ignored."""
        if self.state is ClientState.CLOSED:
            return []
        self.heard_at = max(self.heard_at, now)
        match message:
            case LearnerWelcome():
                return self._welcomed(message)
            case Refused():
                return self._refused(message, now)
            case Fenced():
                if message.incarnation != self.incarnation:
                    return []
                self.state = ClientState.CLOSED
                return [
                    Ended(
                        "fenced",
                        f"this learner is incarnation {message.incarnation}; incarnation "
                        f"{message.by} has taken over",
                    )
                ]
            case Shutdown():
                # The coordinator stays until it knows that the cause was heard.
                farewell = self.close("the coordinator ended", finished=False)
                return [*farewell, Ended("shutdown", message.reason, message.finished)]
            case EvalResult():
                known = self.evals.pop(message.eval_id, None)
                return [EvalDone(message)] if known is not None else []
            case TasksWanted() if message.incarnation == self.incarnation:
                # A guest has none, and does not say that there are none: a learner may have.
                guest = self.hello.guest
                return [] if guest else [TasksNeeded(message.start, message.count)]
            case BroadcastStatus() if message.incarnation == self.incarnation:
                return [BroadcastKnown(message)]
            case BatchWaiting() if message.incarnation == self.incarnation:
                return [WaitingFor(message.text)]
            case BatchGranted() if message.incarnation == self.incarnation:
                return self._batch_granted(message, now)
            case BatchGroup() if message.incarnation == self.incarnation:
                return self._batch_group(message, now)
            case StepAcknowledged() if message.incarnation == self.incarnation:
                return self._step_acknowledged(message)
            case PublishAcknowledged():
                published = self.publishing.pop(message.version, None)
                if published is None:
                    return []
                self.newest_published = published
                return [VersionDurable(message.version, message.keep_from)]
            case HeartbeatEcho():
                return []
            case _:
                return []

    # --------------------------------------------------------------------- helpers

    def _say_hello(self, now: float) -> list[Outcome]:
        self.hello_at = now
        hello = self.hello
        if self.incarnation:
            hello = LearnerHello(
                protocol=PROTOCOL,
                echo2_version=hello.echo2_version,
                name=hello.name,
                run_id=hello.run_id,
                incarnation=self.incarnation,
                resume_step=self.step,
                hello_id=hello.hello_id,
            )
        return [Transmit(LaneOpened()), Transmit(hello)]

    def _welcomed(self, message: LearnerWelcome) -> list[Outcome]:
        first = self.incarnation == 0
        if not first and message.incarnation != self.incarnation:
            return []
        if self.state is not ClientState.JOINING:
            return []
        self.state = ClientState.SEATED
        self.incarnation = message.incarnation
        self.step = message.step
        self.heartbeat_interval_s = message.heartbeat_interval_s
        self.silence_max_s = message.silence_max_s
        outcomes: list[Outcome] = [Seated(message, first), Transmit(LaneOpened())]
        if first:
            return outcomes
        if self.newest_published is not None and not self.publishing:
            outcomes += self._transmit(self.newest_published)
        for pending in (
            self.completing,
            *self.publishing.values(),
            self.checkpoint,
            *self.evals.values(),
        ):
            if pending is not None:
                outcomes += self._transmit(pending)
        if self.batch_request is not None and self.completing is None:
            outcomes += self._transmit(self.batch_request)
        return outcomes

    def _refused(self, message: Refused, now: float) -> list[Outcome]:
        if message.fatal:
            self.state = ClientState.CLOSED
            return [Ended("refused", f"{message.reason}: {message.text}")]
        if message.reason == "unknown_peer":
            if self.state is ClientState.JOINING:
                return []  # sent before the hello that is under way
            self.state, self.alone_since = ClientState.JOINING, now
            return self._say_hello(now)
        self.batch_request, self.granted, self.completing = None, None, None
        self.publishing.clear()
        self.evals.clear()
        return [RequestRefused(f"{message.reason}: {message.text}")]

    def _batch_granted(self, message: BatchGranted, now: float) -> list[Outcome]:
        if self.batch_request is None or message.step != self.batch_request.step:
            return []
        self.granted, self.granted_at = message, now
        return self._batch_if_whole()

    def _batch_group(self, message: BatchGroup, now: float) -> list[Outcome]:
        if self.batch_request is None or message.step != self.batch_request.step:
            return []
        self.groups[message.group] = message
        self.granted_at = now
        return self._batch_if_whole()

    def _batch_if_whole(self) -> list[Outcome]:
        granted = self.granted
        if granted is None or any(group not in self.groups for group in granted.groups):
            return []
        groups = tuple(self.groups[group] for group in granted.groups)
        self.trained = granted.groups
        self.batch_request, self.granted, self.groups = None, None, {}
        return [BatchReady(granted, groups)]

    def _step_acknowledged(self, message: StepAcknowledged) -> list[Outcome]:
        completing = self.completing
        if completing is None or message.step <= completing.step:
            return []
        self.completing = None
        self.step = message.step
        return [StepDurable(message.step)]

    def _transmit(self, message: Message) -> list[Outcome]:
        """Now if seated; what waits for an answer is sent again after the next welcome."""
        return [Transmit(message)] if self.state is ClientState.SEATED else []

    def _must_be_free(self, pending: Message | None, text: str) -> None:
        if pending is not None:
            raise LocalProtocolError(f"{text} already: {pending}")
