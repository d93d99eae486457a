"""A simulated worker: what the daemon does in the eyes of the coordinator, on a virtual clock.

It says hello until it is welcomed, installs the newest announced version, works on as many
groups as it has slots, and sends each result until it is acknowledged. One object is one
process: a worker that died comes back as another object under the same name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Literal, Protocol

from echo2.messages import (
    PROTOCOL,
    AuditDone,
    AuditOrdered,
    Draining,
    Goodbye,
    GroupAcknowledged,
    GroupResult,
    Heartbeat,
    HeartbeatEcho,
    InstallFailed,
    LeaseFailed,
    LeaseGranted,
    LeaseRevoked,
    Message,
    Refused,
    Shutdown,
    VersionAnnounced,
    VersionInstalled,
    WorkerHello,
    WorkerWelcome,
)
from echo2.sim.scenario import WorkerModel
from echo2.sim.timeline import Timeline
from echo2.types import LeaseId, PeerId, Span, TrajectoryHeader, Version

Stage = Literal["engine", "draining", "lost"]
HELLO_RETRY_S = 1.0
RESEND_S = 10.0
PROMPT_LENGTH = 1


class Wire(Protocol):
    """How a process sends to the coordinator."""

    def send(self, process: object, peer: PeerId, message: Message) -> None: ...


@dataclass(slots=True)
class Running:
    """A group in a slot. `marks`: (version, token from which on it samples)."""

    granted: LeaseGranted
    began_s: float
    duration_s: float
    marks: list[tuple[Version, int]] = field(default_factory=list)

    def tokens_at(self, now: float, num_tokens: int) -> int:
        share = (now - self.began_s) / self.duration_s if self.duration_s > 0 else 1.0
        return min(num_tokens, max(0, int(share * num_tokens)))


class SimWorker:
    def __init__(
        self,
        peer: PeerId,
        model: WorkerModel,
        timeline: Timeline,
        wire: Wire,
        rng: Random,
        *,
        install_failure: float = 0.0,
    ) -> None:
        self.peer = peer
        self.model = model
        self.timeline = timeline
        self.wire = wire
        self.rng = rng
        self.install_failure = install_failure
        self.alive = True
        self.leaving = False
        self.welcomed = False
        self.installed: Version | None = None
        self.announced: VersionAnnounced | None = None
        self.installing: VersionAnnounced | None = None
        self.running: dict[LeaseId, Running] = {}
        self.outbox: dict[LeaseId, GroupResult] = {}
        self._ended: set[LeaseId] = set()
        self._digest = ""
        self._install_s = 0.0
        self._failures = 0
        self._sequence = 0
        self._echo_at = 0.0
        self._hello_at = -HELLO_RETRY_S
        self._beat_s = 1.0
        self._silence_max_s = 15.0
        self._hold_until: float | None = None

    # ------------------------------------------------------------------- life-cycle

    def start(self) -> None:
        self._say_hello()
        self._beat()

    def die(self) -> None:
        """The process is killed."""
        self.alive = False

    def drain(self) -> None:
        """A notice came: finish what is in work, then say goodbye."""
        self.leaving = True
        if self.welcomed:
            self._send(Draining(reason="the machine is taken back"))
        self._leave_if_done()

    def lose_engine(self) -> None:
        for lease in list(self.running):
            self._fail(lease, "engine", "the engine died")
        self.installed = self.installing = None
        if self.welcomed:
            self._say_hello()
        self._advance_install()

    def receive(self, message: object) -> None:
        match message:
            case HeartbeatEcho():
                self._echo_at = self.timeline.now
            case LeaseGranted():
                self._granted(message)
            case GroupAcknowledged():
                if self.outbox.pop(message.lease, None) is None:
                    self._abort(message.lease)
                self._leave_if_done()
            case LeaseRevoked():
                self._abort(message.lease)
                self._leave_if_done()
            case AuditOrdered():
                seconds = self.model.audit_s * self.rng.random()
                self.timeline.after(seconds, self._audit, message)
            case VersionAnnounced():
                self._announced(message)
            case WorkerWelcome():
                self._welcome(message)
            case Refused():
                self._refused(message)
            case Shutdown():
                self.alive = False
            case _:
                raise AssertionError(f"a worker got {type(message).__name__}")

    # ------------------------------------------------------------------ the session

    def _say_hello(self) -> None:
        self._hello_at = self.timeline.now
        self._send(
            WorkerHello(
                protocol=PROTOCOL,
                echo2_version="simulated",
                name=self.peer,
                engine="null",
                precision="none",
                on_update=self.model.on_update,
                environment="null",
                slots=self.model.slots,
                price_usd_per_h=self.model.price_usd_per_h,
                standby_usd_per_h=self.model.standby_usd_per_h,
                held=(*self.running, *self.outbox),
                installed=self.installed,
                replays=True,
            )
        )

    def _welcome(self, welcome: WorkerWelcome) -> None:
        self.welcomed = True
        self._echo_at = self.timeline.now
        self._beat_s = welcome.heartbeat_interval_s
        self._silence_max_s = welcome.silence_max_s
        for lease in [lease for lease in self.running if lease not in welcome.alive]:
            self._abort(lease)
        if self.leaving:
            self._send(Draining(reason="the machine is taken back"))
        for result in self.outbox.values():
            self._send(result)

    def _refused(self, refused: Refused) -> None:
        if refused.reason == "quarantined" and self.model.lies:
            self.alive = False
        elif refused.fatal:
            raise AssertionError(f"{self.peer} was refused: {refused.reason}: {refused.text}")
        again = self.timeline.now >= self._hello_at + HELLO_RETRY_S
        if refused.reason == "unknown_peer" and again:
            self._say_hello()

    def _beat(self) -> None:
        """Heartbeat; hello again after a silence or without a welcome."""
        if not self.alive:
            return
        now = self.timeline.now
        if self.welcomed and now - self._echo_at > self._silence_max_s:
            self.welcomed = False
        if not self.welcomed:
            if now >= self._hello_at + HELLO_RETRY_S:
                self._say_hello()
        else:
            self._sequence += 1
            num_tokens = self.model.num_tokens
            self._send(
                Heartbeat(
                    sequence=self._sequence,
                    state="ready",
                    lease_tokens={
                        lease: running.tokens_at(now, num_tokens)
                        for lease, running in self.running.items()
                    },
                )
            )
        self.timeline.after(self._beat_s, self._beat)

    # --------------------------------------------------------------------- versions

    def _announced(self, announced: VersionAnnounced) -> None:
        if not self.welcomed:
            return
        if announced.version == self.installed:
            self._report()
        if self.announced is not None and announced.version < self.announced.version:
            return
        self.announced = announced
        self._advance_install()

    def _advance_install(self) -> None:
        wanted = self.announced
        if wanted is None or self.installing is not None or self.leaving or not self.alive:
            return
        if self.installed is not None and wanted.version <= self.installed:
            return
        self.installing = wanted
        seconds = self.model.install_s * self.rng.uniform(0.8, 1.2)
        self.timeline.after(seconds, self._install_done, wanted, seconds)

    def _install_done(self, announced: VersionAnnounced, seconds: float) -> None:
        if not self.alive or self.installing is not announced:
            return
        evals = [r.granted for r in self.running.values() if r.granted.kind == "eval"]
        if evals:
            hold_s = max(granted.hold_s for granted in evals)
            self._hold_until = self._hold_until or self.timeline.now + hold_s
            if self.timeline.now < self._hold_until:
                self.timeline.after(0.5, self._install_done, announced, seconds)
                return
        self._hold_until = None
        self.installing = None
        if self.rng.random() < self.install_failure:
            self._install_failed(announced)
            return
        for granted in evals:
            self._fail(granted.lease, "lost", "the eval was not done before a flip")
        self.installed, self._digest = announced.version, announced.manifest_digest
        self._install_s, self._failures = seconds, 0
        if self.model.on_update == "continue":
            for running in self.running.values():
                position = running.tokens_at(self.timeline.now, self.model.num_tokens)
                if running.marks[-1][1] == position:
                    running.marks.pop()
                running.marks.append((announced.version, position))
        self._report()
        self._advance_install()

    def _install_failed(self, announced: VersionAnnounced) -> None:
        self._failures += 1
        self._send(
            InstallFailed(
                version=announced.version,
                stage="install",
                text="simulated failure",
                serving=self.installed,
            )
        )
        backoff_s = float(min(30.0, 2.0 ** (self._failures - 1)))
        self.timeline.after(backoff_s, self._advance_install)

    def _report(self) -> None:
        assert self.installed is not None
        if self.welcomed:
            self._send(
                VersionInstalled(
                    version=self.installed,
                    manifest_digest=self._digest,
                    fetch_s=0.0,
                    install_s=self._install_s,
                    pause_s=0.0,
                )
            )

    # ----------------------------------------------------------------------- groups

    def _granted(self, granted: LeaseGranted) -> None:
        lease = granted.lease
        if not self.welcomed or lease in self.running or lease in self._ended:
            return
        problem = self._problem(granted)
        if problem is not None:
            self._ended.add(lease)
            self._send_failed(granted, *problem)
            return
        assert self.installed is not None
        model = self.model
        duration_s = model.latency_s
        if model.latency_cv > 0:
            shape = 1.0 / model.latency_cv**2
            duration_s = self.rng.gammavariate(shape, model.latency_s / shape)
        self.running[lease] = Running(granted, self.timeline.now, duration_s, [(self.installed, 0)])
        self.timeline.after(duration_s, self._done, lease)

    def _problem(self, granted: LeaseGranted) -> tuple[Stage, str] | None:
        if self.leaving:
            return "draining", "this worker leaves"
        if self.installed is None:
            return "engine", "no version is installed"
        if len(self.running) >= self.model.slots:
            return "lost", f"{len(self.running)} slots are in use"
        if granted.kind == "eval" and granted.version != self.installed:
            return "lost", f"{self.installed} is installed"
        return None

    def _done(self, lease: LeaseId) -> None:
        running = self.running.pop(lease, None) if self.alive else None
        if running is None:
            return
        self._ended.add(lease)
        self.outbox[lease] = self.result_of(running)
        self._send_result(lease, RESEND_S)

    def result_of(self, running: Running) -> GroupResult:
        """The group as it is when its generation ends."""
        num_tokens, marks = self.model.num_tokens, running.marks
        ends = [position for _, position in marks[1:]] + [num_tokens]
        spans = tuple(
            Span(version, PROMPT_LENGTH + start, PROMPT_LENGTH + end)
            for (version, start), end in zip(marks, ends, strict=True)
            if end > start
        )
        granted, length = running.granted, PROMPT_LENGTH + num_tokens
        truth = [int(self.rng.random() < 0.5) for _ in range(granted.group_size)]
        if self.model.lies == "rewards":
            truth[-1] = 0  # there is something to lie about
        trajectories = tuple(
            TrajectoryHeader(
                length,
                PROMPT_LENGTH,
                num_tokens,
                1.0 if self.model.lies == "rewards" and index else float(reward),
                "stop",
                1,
                spans,
            )
            for index, reward in enumerate(truth)
        )
        total = length * granted.group_size
        return GroupResult(
            lease=granted.lease,
            group=granted.group,
            attempt=granted.attempt,
            trajectories=trajectories,
            generate_s=running.duration_s,
            environment_s=0.0,
            token_ids=b"".join(
                bytes(4 * (length - 1)) + reward.to_bytes(4, "little") for reward in truth
            ),
            logprobs=bytes(4 * total),
            loss_mask=bytes(total),
        )

    def _audit(self, order: AuditOrdered) -> None:
        """The reward of a simulated trajectory is its last token."""
        if self.alive and self.welcomed:
            self._send(AuditDone(lease=order.lease, group=order.group, rewards=_rewards_of(order)))

    def _send_result(self, lease: LeaseId, resend_s: float) -> None:
        result = self.outbox.get(lease)
        if not self.alive or result is None:
            return
        if self.welcomed:
            self._send(result)
        self.timeline.after(resend_s, self._send_result, lease, min(2 * resend_s, 160.0))

    def _fail(self, lease: LeaseId, stage: Stage, text: str) -> None:
        running = self.running.pop(lease, None)
        if running is not None:
            self._ended.add(lease)
            self._send_failed(running.granted, stage, text)

    def _send_failed(self, granted: LeaseGranted, stage: Stage, text: str) -> None:
        if self.welcomed:
            self._send(
                LeaseFailed(lease=granted.lease, group=granted.group, stage=stage, text=text)
            )

    def _abort(self, lease: LeaseId) -> None:
        if self.running.pop(lease, None) is not None:
            self._ended.add(lease)

    # ---------------------------------------------------------------------- the end

    def _leave_if_done(self) -> None:
        if self.leaving and self.alive and not self.running and not self.outbox:
            if self.welcomed:
                self._send(Goodbye(reason="drained"))
            self.alive = False

    def _send(self, message: Message) -> None:
        if self.alive:
            self.wire.send(self, self.peer, message)


def _rewards_of(order: AuditOrdered) -> tuple[float, ...]:
    found, end = [], 0
    for header in order.trajectories:
        end += 4 * header.length
        found.append(float(int.from_bytes(order.token_ids[end - 4 : end], "little")))
    return tuple(found)
