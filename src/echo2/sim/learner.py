"""A simulated learner: asks for batches, trains for a while, completes, publishes.

One object is one process. Every request is sent again until it is answered, so that a lost
message costs time and nothing else. Checkpoints outlive the process on a `Disk`. A process
that is stopped hears and does nothing; woken up, it goes on as if nothing had happened,
and must find itself fenced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from echo2.core.effects import DeliverGroup
from echo2.messages import (
    PROTOCOL,
    BatchGranted,
    BatchRequest,
    BatchWaiting,
    CheckpointSaved,
    EvalRequest,
    EvalResult,
    Fenced,
    Goodbye,
    HeartbeatEcho,
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
from echo2.sim.scenario import LearnerModel
from echo2.sim.timeline import Timeline
from echo2.sim.worker import Wire
from echo2.types import GroupId, GroupMismatch, PeerId, Sampling, Task, Version

ORIGIN = "tcp://origin:1"
TOKENS_COMPARED = 64


@dataclass(slots=True)
class Disk:
    """What survives a learner process: the steps of its complete checkpoints."""

    kept: list[int] = field(default_factory=list)


def digest_of(version: Version) -> str:
    """A stand-in for the digest of a version's bytes."""
    return f"{version.incarnation:032x}{version.step:032x}"


class SimLearner:
    """`on_end(reason)`: the process is over, by itself. `fabricators`: workers whose logprobs are
    not those of the version that they name."""

    def __init__(
        self,
        peer: PeerId,
        model: LearnerModel,
        timeline: Timeline,
        wire: Wire,
        rng: Random,
        *,
        name: str,
        disk: Disk,
        steps: int,
        period: int,
        on_end: Callable[[str], None],
        fabricators: frozenset[PeerId] = frozenset(),
    ) -> None:
        self.peer = peer
        self.model = model
        self.timeline = timeline
        self.wire = wire
        self.rng = rng
        self.name = name
        self.disk = disk
        self.steps = steps
        self.period = period
        self.on_end = on_end
        self.fabricators = fabricators
        self.alive = True
        self.stopped = False
        self.incarnation = 0
        self.step = 0
        self.wait_s = 0.0
        self.train_s = 0.0
        self._mismatch_rng = Random(f"mismatch {peer} {name}")
        self._inbox: list[object] = []
        self._request: Message | None = None
        self._granted: BatchGranted | None = None
        self._groups: dict[GroupId, PeerId] = {}
        self._published: int | None = None
        self._newest: VersionPublished | None = None
        self._asked_at = 0.0
        self._heard_at = 0.0
        self._sequence = 0
        self._joining = False
        self._evals: dict[str, EvalRequest] = {}
        self._announce_again = False
        self._beat_s = 1.0
        self._silence_max_s = 15.0
        self._resume_step = 0

    # ------------------------------------------------------------------- life-cycle

    def start(self, resume_step: int) -> None:
        self._resume_step = resume_step
        self.disk.kept = [step for step in self.disk.kept if step <= resume_step]
        self._heard_at = self.timeline.now
        self._ask(self._hello())
        self._beat()
        self._retry()

    def die(self) -> None:
        self.alive = False

    def stop(self) -> None:
        self.stopped = True

    def wake(self) -> None:
        """Go on, beginning with what came while it slept."""
        self.stopped = False
        inbox, self._inbox = self._inbox, []
        for message in inbox:
            self.receive(message)
        if self.alive:
            self._beat()
            self._retry()

    def receive(self, message: object) -> None:
        if not self.alive:
            return
        if self.stopped:
            self._inbox.append(message)
            return
        self._heard_at = self.timeline.now
        match message:
            case HeartbeatEcho() | BatchWaiting():
                pass
            case TasksWanted() if message.incarnation == self.incarnation:
                self._submit(message)
            case DeliverGroup() if message.incarnation == self.incarnation:
                self._group(message)
            case BatchGranted() if message.incarnation == self.incarnation:
                self._batch(message)
            case StepAcknowledged() if message.incarnation == self.incarnation:
                self._step_durable(message.step)
            case PublishAcknowledged():
                self._version_durable(message.version)
            case EvalResult():
                self._eval_done(message)
            case LearnerWelcome():
                self._welcome(message)
            case Fenced() if message.incarnation == self.incarnation:
                self._end("fenced")
            case Refused():
                self._refused(message)
            case Shutdown():
                self._end("shutdown")
            case _:
                pass  # meant for an earlier process of this name, or answered already

    # ------------------------------------------------------------------ the session

    def _hello(self) -> LearnerHello:
        return LearnerHello(
            protocol=PROTOCOL,
            echo2_version="simulated",
            name="learner",
            incarnation=self.incarnation,
            resume_step=self.step if self.incarnation else self._resume_step,
            checkpoint_steps=tuple(self.disk.kept),
            hello_id=self.name,
        )

    def _welcome(self, welcome: LearnerWelcome) -> None:
        self._joining = False
        if self.incarnation:  # the coordinator may have been started again
            self._announce_again = self._newest is not None
            self._retry_announcement()
            return
        self.incarnation, self.step = welcome.incarnation, welcome.step
        self._beat_s = welcome.heartbeat_interval_s
        self._silence_max_s = welcome.silence_max_s
        self._publish()

    def _refused(self, refused: Refused) -> None:
        if refused.fatal:
            self._end(f"refused: {refused.reason}: {refused.text}")
        elif refused.reason == "unknown_peer" and self.incarnation and not self._joining:
            self._joining = True
            self._send(self._hello())

    def _beat(self) -> None:
        if not self.alive or self.stopped:
            return
        now = self.timeline.now
        if self.incarnation:
            self._joining |= now - self._heard_at > self._silence_max_s
            if self._joining:
                self._send(self._hello())
            self._sequence += 1
            self._send(
                LearnerHeartbeat(
                    incarnation=self.incarnation, sequence=self._sequence, state="simulated"
                )
            )
        self.timeline.after(self._beat_s, self._beat)

    def _retry(self) -> None:
        if not self.alive or self.stopped:
            return
        if self._request is not None:
            self._send(self._request)
        for request in self._evals.values():
            self._send(request)
        self._retry_announcement()
        self.timeline.after(self.model.retry_s, self._retry)

    def _retry_announcement(self) -> None:
        if self._announce_again and self._newest is not None:
            self._send(self._newest)

    def _ask(self, request: Message) -> None:
        self._request = request
        self._send(request)

    def _submit(self, wanted: TasksWanted) -> None:
        end, num_tasks = wanted.start + wanted.count, self.model.num_tasks
        exhausted = num_tasks is not None and end >= num_tasks
        if num_tasks is not None:
            end = max(wanted.start, min(end, num_tasks))
        self._send(
            TasksSubmitted(
                incarnation=self.incarnation,
                start=wanted.start,
                tasks=tuple(Task(index, "{}") for index in range(wanted.start, end)),
                exhausted=exhausted,
            )
        )

    # ------------------------------------------------------------------------ steps

    def _publish(self) -> None:
        """Publish v if it is due, then go on with an eval or the next batch."""
        final = self.step >= self.steps
        last = self._published
        due = last is None or self.step - last >= self.period or (final and last < self.step)
        if due:
            self.timeline.after(self.model.publish_s, self._act, self._publish_now)
        else:
            self._next()

    def _publish_now(self) -> None:
        version = Version(self.incarnation, self.step)
        self._ask(
            VersionPublished(
                version=version,
                manifest_digest=digest_of(version),
                assets_digest="",
                num_bytes=1,
                origin=ORIGIN,
                origin_key="",
                final=self.step >= self.steps,
            )
        )

    def _version_durable(self, version: Version) -> None:
        self._announce_again &= self._newest is not None and self._newest.version != version
        if not isinstance(self._request, VersionPublished) or self._request.version != version:
            return
        self._newest, self._request, self._published = self._request, None, version.step
        every = self.model.eval_every
        if every and (version.step % every == 0 or version.step >= self.steps):
            request = EvalRequest(
                incarnation=self.incarnation,
                eval_id=f"e{version}",
                version=version,
                tasks=tuple(Task(10**6 + i, "{}") for i in range(self.model.eval_tasks)),
                sampling=Sampling(),
            )
            if version.step >= self.steps:
                self._ask(request)
                return
            self._evals[request.eval_id] = request
            self._send(request)
        self._next()

    def _eval_done(self, result: EvalResult) -> None:
        self._evals.pop(result.eval_id, None)
        asked = self._request
        if isinstance(asked, EvalRequest) and asked.eval_id == result.eval_id:
            self._next()

    def _next(self) -> None:
        if self.step >= self.steps:
            self._say_goodbye(f"{self.steps} steps are done")
            return
        self._granted, self._groups = None, {}
        self._asked_at = self.timeline.now
        self._ask(BatchRequest(incarnation=self.incarnation, step=self.step))

    def _batch(self, granted: BatchGranted) -> None:
        if isinstance(self._request, BatchRequest) and granted.step == self._request.step:
            self._granted = granted
            self._batch_if_whole()

    def _group(self, delivered: DeliverGroup) -> None:
        if isinstance(self._request, BatchRequest) and delivered.step == self._request.step:
            self._groups[delivered.group] = delivered.result.worker
            self._batch_if_whole()

    def _batch_if_whole(self) -> None:
        granted = self._granted
        if granted is None or not self._groups.keys() >= set(granted.groups):
            return
        self._request = None
        self.wait_s += self.timeline.now - self._asked_at
        if not granted.groups:
            self._say_goodbye("the data is used up")
            return
        seconds = self.model.train_s
        if self.model.train_cv > 0:
            shape = 1.0 / self.model.train_cv**2
            seconds = self.rng.gammavariate(shape, self.model.train_s / shape)
        self.train_s += seconds
        self.timeline.after(seconds, self._act, self._complete)

    def _complete(self) -> None:
        assert self._granted is not None
        self._ask(
            StepCompleted(
                incarnation=self.incarnation,
                step=self.step,
                groups=self._granted.groups,
                train_s=self.train_s,
                wait_s=self.wait_s,
                mismatch=tuple(map(self._compared, self._granted.groups)),
            )
        )

    def _compared(self, group: GroupId) -> GroupMismatch:
        model = self.model
        median = model.mismatch
        rng = self._mismatch_rng
        if self._groups[group] in self.fabricators or rng.random() < model.outlier_share:
            median = model.lied_mismatch
        diff = median * rng.lognormvariate(0.0, model.mismatch_sigma)
        return GroupMismatch(group, TOKENS_COMPARED, diff)

    def _step_durable(self, step: int) -> None:
        completed = self._request
        if not isinstance(completed, StepCompleted) or step != completed.step + 1:
            return
        self._request = None
        self.step = step
        if step % self.model.checkpoint_every == 0 or step >= self.steps:
            self.disk.kept = [*self.disk.kept, step][-self.model.checkpoints_kept :]
            self._send(
                CheckpointSaved(incarnation=self.incarnation, step=step, kept=tuple(self.disk.kept))
            )
        self._publish()

    # ---------------------------------------------------------------------- helpers

    def _say_goodbye(self, reason: str) -> None:
        self._ask(Goodbye(reason=reason, finished=True, incarnation=self.incarnation))

    def _act(self, action: Callable[[], None]) -> None:
        """What was begun before the process was stopped goes on when it wakes up."""
        if self.alive and self.stopped:
            self.timeline.after(1.0, self._act, action)
        elif self.alive:
            action()

    def _end(self, reason: str) -> None:
        self.alive = False
        self.on_end(reason)

    def _send(self, message: Message) -> None:
        self.wire.send(self, self.peer, message)
