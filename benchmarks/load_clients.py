"""Null workers and a null learner at the level of frames, for load: as cheap as peers can be.

They speak the protocol as daemons do, over sockets of their own (`net.sockets`), with leases as
they are granted: hello, heartbeats, versions, results until acknowledged; batches, steps,
checkpoints. They do not check what the coordinator says, since on one machine the load must not
cost what is measured; whatever it refuses ends them. One process holds many workers:

    parent --Pipe--> pace | begin | end | join | leave | stop      (`FleetProcess`, `run_fleet`)
"""

from __future__ import annotations

import select
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final

import msgpack
import numpy as np
import zmq
import zmq.asyncio

from echo2 import wire
from echo2.messages import (
    PROTOCOL,
    BatchRequest,
    CheckpointSaved,
    Goodbye,
    GroupResult,
    Heartbeat,
    Lane,
    LaneOpened,
    LearnerHeartbeat,
    LearnerHello,
    Message,
    Role,
    StepCompleted,
    TasksSubmitted,
    VersionInstalled,
    VersionPublished,
    WorkerHello,
)
from echo2.net.keys import KeyPair
from echo2.net.sockets import dealer_socket, make_context
from echo2.net.wakeups import POLLOUT, is_ready
from echo2.types import GroupId, LeaseId, Span, Task, TrajectoryHeader, Version

LEARNER_BEAT_S: Final = 0.5
BEATS_EACH_S: Final = 0.02
"""So often it is looked whose heartbeat is due."""
PAYLOADS: Final = 8
"""Different groups of which each worker sends one after the other."""
_NOWAIT: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)


@dataclass(frozen=True, slots=True)
class Address:
    """Where the coordinator is; `key` "" without CURVE."""

    control: str
    rollouts: str
    key: str


@dataclass(frozen=True, slots=True)
class Shape:
    """A group: `group_size` trajectories of `tokens`, of which the first `prompt` were given."""

    group_size: int = 16
    tokens: int = 512
    prompt: int = 32


@dataclass(frozen=True, slots=True)
class FleetSpec:
    address: Address
    shape: Shape
    slots: int
    seed: int


@dataclass(frozen=True, slots=True)
class LearnerSpec:
    address: Address
    keys: KeyPair | None
    publish_every: int
    checkpoint_every: int


@dataclass(slots=True)
class Measured:
    """What a fleet saw between `begin` and `end`: `latencies_s` from the sending of a result to
    its acknowledgement, `starved_s`: how long it had no lease to answer."""

    seconds: float = 0.0
    num_bytes: int = 0
    starved_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)


# ----------------------------------------------------------------------------- sockets


class Peer:
    """Two DEALERs; `take` gets each message as its frames."""

    def __init__(
        self,
        reactor: Reactor,
        address: Address,
        *,
        name: str,
        role: Role,
        keys: KeyPair | None,
    ) -> None:
        self.name = name
        self.reactor = reactor
        self.is_open = False
        self.control = _dealer(reactor.context, Lane.CONTROL, address, name, role, keys)
        self.rollouts = _dealer(reactor.context, Lane.ROLLOUTS, address, name, role, keys)
        reactor.add(self)

    def send(self, socket: zmq.Socket[bytes], frames: list[Any]) -> None:
        """zmq.Again when the socket takes no more: then the load is not what it says."""
        for frame in frames[:-1]:
            socket.send(frame, _MORE, copy=isinstance(frame, bytes))
        socket.send(frames[-1], _NOWAIT, copy=isinstance(frames[-1], bytes))
        self.reactor.touched[socket] = self

    def opened(self) -> None:
        """Both lanes are connected."""

    def take(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def close(self, *, linger_ms: int = 0) -> None:
        self.reactor.remove(self)
        self.control.close(linger=linger_ms)
        self.rollouts.close(linger=linger_ms)


class Reactor:
    """All sockets of this process on one epoll. A ZeroMQ descriptor tells only of news, and any
    call may swallow them: each socket is read until it is empty, also after it was sent to."""

    def __init__(self) -> None:
        self.context: zmq.asyncio.Context = make_context()
        self.context.set(zmq.MAX_SOCKETS, 16384)
        self.touched: dict[zmq.Socket[bytes], Peer] = {}
        self._epoll = select.epoll()
        self._sockets: dict[int, tuple[Peer, zmq.Socket[bytes]]] = {}
        self._pipe: Pipe | None = None

    def watch(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._epoll.register(pipe.fileno(), select.EPOLLIN)

    def add(self, peer: Peer) -> None:
        for socket in (peer.control, peer.rollouts):
            descriptor = int(socket.getsockopt(zmq.FD))
            self._sockets[descriptor] = peer, socket
            self._epoll.register(descriptor, select.EPOLLIN)
            self.touched[socket] = peer

    def remove(self, peer: Peer) -> None:
        for socket in (peer.control, peer.rollouts):
            descriptor = int(socket.getsockopt(zmq.FD))
            del self._sockets[descriptor]
            self._epoll.unregister(descriptor)
            self.touched.pop(socket, None)

    def turn(self, timeout_s: float) -> bool:
        """Wait for news and hand them out; whether the parent said something."""
        told = False
        for descriptor, _ in self._epoll.poll(0 if self.touched else max(0.0, timeout_s), 1024):
            found = self._sockets.get(descriptor)
            if found is None:
                told = True
            else:
                self._read(*found)
        while self.touched:
            socket, peer = self.touched.popitem()
            self._read(peer, socket)
        return told

    def _read(self, peer: Peer, socket: zmq.Socket[bytes]) -> None:
        if not peer.is_open:
            if not (is_ready(peer.control, POLLOUT) and is_ready(peer.rollouts, POLLOUT)):
                return
            peer.is_open = True
            peer.opened()
        while not socket.closed and is_ready(socket):
            peer.take(socket.recv_multipart(_NOWAIT))


def _dealer(
    context: zmq.asyncio.Context,
    lane: Lane,
    address: Address,
    name: str,
    role: Role,
    keys: KeyPair | None,
) -> zmq.Socket[bytes]:
    endpoint = address.control if lane is Lane.CONTROL else address.rollouts
    socket = dealer_socket(
        context,
        lane=lane,
        role=role,
        keys=keys,
        server_key=address.key,
        endpoint=endpoint,
        name=name,
    )
    socket.connect(endpoint)
    return socket


# ----------------------------------------------------------------------------- workers


class Groups:
    """Results, ready but for the names that a lease gives them."""

    def __init__(self, shape: Shape, seed: int) -> None:
        rng = np.random.default_rng(seed)
        size = (shape.group_size, shape.tokens)
        mask = np.ones(size, np.uint8)
        mask[:, : shape.prompt] = 0
        self._shape = shape
        self._frames: list[list[zmq.Frame]] = []
        self._plain: list[list[bytes]] = []
        for _ in range(PAYLOADS):
            tokens = rng.integers(0, 32_000, size, dtype=np.int32)
            logprobs = (-rng.exponential(1.0, size)).astype(np.float32)
            logprobs[mask == 0] = 0.0
            plain = [tokens.tobytes(), logprobs.tobytes(), mask.tobytes()]
            self._plain.append(plain)
            # As zmq Frames they are shared with ZeroMQ's thread instead of copied each time.
            self._frames.append([zmq.Frame(frame) for frame in plain])
        self._rewards = rng.random(shape.group_size).tolist()
        self._pieces: dict[tuple[int, int], list[bytes | str]] = {}
        self._next = 0
        self.num_bytes = sum(map(len, self._plain[0]))

    def result(self, granted: dict[str, Any]) -> list[Any]:
        """The frames of the result of a lease."""
        version = granted["version"]
        key = version["incarnation"], version["step"]
        pieces = self._pieces.get(key)
        if pieces is None:
            self._pieces.clear()
            pieces = self._pieces[key] = self._header_pieces(Version(*key))
        pack = msgpack.packb
        header = b"".join(
            pack(granted[piece]) if isinstance(piece, str) else piece for piece in pieces
        )
        self._next = (self._next + 1) % PAYLOADS
        return [header, *self._frames[self._next]]

    def _header_pieces(self, version: Version) -> list[bytes | str]:
        """The header as the product's own encoder writes it, with the names of those fields that
        are the lease's own."""
        shape = self._shape
        headers = tuple(
            TrajectoryHeader(
                length=shape.tokens,
                prompt_length=shape.prompt,
                num_sampled=shape.tokens - shape.prompt,
                reward=reward,
                finish="length",
                num_turns=1,
                spans=(Span(version, shape.prompt, shape.tokens),),
            )
            for reward in self._rewards
        )
        tokens, logprobs, mask = self._plain[0]
        result = GroupResult(
            lease=LeaseId("l"),
            group=GroupId("g"),
            attempt=1,
            trajectories=headers,
            generate_s=1.5,
            environment_s=0.01,
            token_ids=tokens,
            logprobs=logprobs,
            loss_mask=mask,
        )
        name, fields = msgpack.unpackb(wire.encode(result)[0])
        packer = msgpack.Packer()
        start = (
            packer.pack_array_header(2) + packer.pack(name) + packer.pack_map_header(len(fields))
        )
        pieces: list[bytes | str] = [start]
        for field_name, value in fields.items():
            is_own = field_name in ("lease", "group", "attempt")
            pieces += packer.pack(field_name), field_name if is_own else packer.pack(value)
        return pieces


class NullWorker(Peer):
    def __init__(self, fleet: Fleet, name: str, keys: KeyPair | None) -> None:
        super().__init__(fleet.reactor, fleet.spec.address, name=name, role=Role.WORKER, keys=keys)
        self.fleet = fleet
        self.leases: dict[str, None] = {}
        self.is_welcome = False
        self.sequence = 0
        self.beat_s = self.beat_at = 0.0

    def opened(self) -> None:
        self.send(self.rollouts, wire.encode(LaneOpened()))
        hello = WorkerHello(
            protocol=PROTOCOL,
            echo2_version="load",
            name=self.name,
            engine="null",
            precision="none",
            on_update="continue",
            environment="null",
            slots=self.fleet.spec.slots,
        )
        self.send(self.control, wire.encode(hello))

    def take(self, frames: list[bytes]) -> None:
        name, fields = msgpack.unpackb(frames[0])
        match name:
            case "LeaseGranted":
                self.leases[fields["lease"]] = None
                self.fleet.pending.append((self, fields))
            case "GroupAcknowledged":
                self.fleet.acknowledged(fields)
            case "LeaseRevoked":
                self.leases.pop(fields["lease"], None)
            case "WorkerWelcome":
                self.is_welcome = True
                self.beat_s = fields["heartbeat_interval_s"]
                self.beat_at = time.monotonic() + self.beat_s * (hash(self.name) % 997) / 997
            case "VersionAnnounced":
                self.install(fields)
            case "Refused":
                raise RuntimeError(f"{self.name} was refused: {fields}")
            case "Shutdown":
                self.fleet.is_over = True

    def install(self, announced: dict[str, Any]) -> None:
        version = announced["version"]
        installed = VersionInstalled(
            version=Version(version["incarnation"], version["step"]),
            manifest_digest=announced["manifest_digest"],
            fetch_s=0.0,
            install_s=0.0,
            pause_s=0.0,
        )
        self.send(self.control, wire.encode(installed))

    def beat(self, now: float) -> None:
        if now < self.beat_at or not self.is_welcome:
            return
        self.beat_at = now + self.beat_s
        self.sequence += 1
        tokens = {LeaseId(lease): self.sequence for lease in self.leases}
        heartbeat = Heartbeat(sequence=self.sequence, state="ready", lease_tokens=tokens)
        self.send(self.control, wire.encode(heartbeat))

    def goodbye(self) -> None:
        self.send(self.control, wire.encode(Goodbye(reason="the load lets it leave")))


class Fleet:
    """The workers of this process. `rate`: results a second in all; None: each as soon as its
    lease came; 0: none."""

    def __init__(self, spec: FleetSpec) -> None:
        self.spec = spec
        self.reactor = Reactor()
        self.groups = Groups(spec.shape, spec.seed)
        self.workers: dict[str, NullWorker] = {}
        self.pending: deque[tuple[NullWorker, dict[str, Any]]] = deque()
        self.rate: float | None = 0.0
        self.is_over = False
        self.sent_at: dict[str, float] = {}
        self.num_acknowledged = 0
        self.measured: Measured | None = None
        self._began = 0.0
        self._due = 0.0
        self._beat_due = 0.0

    def acknowledged(self, fields: dict[str, Any]) -> None:
        sent_at = self.sent_at.pop(fields["lease"], None)
        if sent_at is None:
            return  # of a worker that left and whose name came back
        self.num_acknowledged += 1
        if self.measured is not None:
            self.measured.latencies_s.append(time.monotonic() - sent_at)
            self.measured.outcomes[fields["outcome"]] += 1
            self.measured.num_bytes += self.groups.num_bytes

    def serve(self) -> None:
        """Send what is due, and heartbeats."""
        now = time.monotonic()
        if now >= self._beat_due:
            self._beat_due = now + BEATS_EACH_S
            for worker in self.workers.values():
                worker.beat(now)
        if self.rate is None:
            while self.pending:
                self._send_next()
            return
        if self.rate <= 0:
            return
        if not self.pending and self._due < now and self.measured is not None:
            self.measured.starved_s += now - max(self._due, self._began)
        if now - self._due > 0.02 or not self.pending:
            self._due = max(self._due, now)  # what was not sent in time is not made up for
        while self.pending and self._due <= now:
            self._send_next()
            self._due += 1.0 / self.rate

    def _send_next(self) -> None:
        worker, granted = self.pending.popleft()
        lease = granted["lease"]
        if lease not in worker.leases:
            return  # revoked, or its worker left
        del worker.leases[lease]
        frames = self.groups.result(granted)
        self.sent_at[lease] = time.monotonic()
        worker.send(worker.rollouts, frames)

    @property
    def patience_s(self) -> float:
        now = time.monotonic()
        until = self._beat_due
        if self.rate and self.pending:
            until = min(until, self._due)
        return max(0.0, until - now)

    def begin(self) -> None:
        self.measured, self._began = Measured(), time.monotonic()

    def end(self) -> Measured:
        measured, self.measured = self.measured, None
        assert measured is not None
        measured.seconds = time.monotonic() - self._began
        return measured

    def join(self, workers: list[tuple[str, KeyPair | None]]) -> None:
        for name, keys in workers:
            self.workers[name] = NullWorker(self, name, keys)

    def leave(self, names: list[str], *, goodbye: bool) -> None:
        """With a word, or as machines do that are taken away."""
        for name in names:
            worker = self.workers.pop(name)
            for lease in worker.leases:
                self.sent_at.pop(lease, None)
            worker.leases.clear()
            if goodbye and worker.is_open:
                worker.goodbye()
            worker.close(linger_ms=1000 if goodbye else 0)


def run_fleet(pipe: Pipe, spec: FleetSpec) -> None:
    """The main function of a process of workers."""
    fleet = Fleet(spec)
    fleet.reactor.watch(pipe)
    while not fleet.is_over:
        if fleet.reactor.turn(fleet.patience_s):
            command, *arguments = pipe.recv()
            match command:
                case "pace":
                    fleet.rate, fleet._due = arguments[0], time.monotonic()
                case "begin":
                    fleet.begin()
                case "end":
                    pipe.send(fleet.end())
                case "count":
                    num_welcome = sum(worker.is_welcome for worker in fleet.workers.values())
                    pipe.send((num_welcome, fleet.num_acknowledged))
                case "join":
                    fleet.join(arguments[0])
                case "leave":
                    fleet.leave(arguments[0], goodbye=arguments[1])
                case "stop":
                    break
        fleet.serve()
    fleet.reactor.context.destroy(linger=0)


# ----------------------------------------------------------------------------- learner


class NullLearner(Peer):
    """Takes every batch and completes it at once; publishes and keeps checkpoints as set."""

    def __init__(self, reactor: Reactor, spec: LearnerSpec) -> None:
        super().__init__(reactor, spec.address, name="learner", role=Role.LEARNER, keys=spec.keys)
        self.spec = spec
        self.incarnation = self.step = self.sequence = 0
        self.num_groups = 0
        self.published = -1
        self.granted: list[str] | None = None
        self.arrived = 0
        self.is_over = False
        self._beat_due = 0.0

    def opened(self) -> None:
        self.send(self.rollouts, wire.encode(LaneOpened()))
        hello = LearnerHello(
            protocol=PROTOCOL,
            echo2_version="load",
            name="learner",
            resume_step=0,
            hello_id="load",
        )
        self.send(self.control, wire.encode(hello))

    def take(self, frames: list[bytes]) -> None:
        if frames[0].startswith(b"\x92\xaaBatchGroup"):
            self.arrived += 1
            self.complete_if_whole()
            return
        name, fields = msgpack.unpackb(frames[0])
        match name:
            case "LearnerWelcome":
                self.incarnation, self.step = fields["incarnation"], fields["step"]
                self.go_on()
            case "BatchGranted":
                self.granted = list(fields["groups"])
                self.complete_if_whole()
            case "StepAcknowledged":
                if fields["step"] > self.step:
                    self.step = fields["step"]
                    self.go_on()
            case "TasksWanted":
                self.submit(fields["start"], fields["count"])
            case "Refused":
                raise RuntimeError(f"the learner was refused: {fields}")
            case "Shutdown":
                self.is_over = True

    def go_on(self) -> None:
        every = self.spec.checkpoint_every
        if self.step and self.step % every == 0:
            saved = CheckpointSaved(incarnation=self.incarnation, step=self.step, kept=(self.step,))
            self.tell(saved)
        if self.published < 0 or self.step - self.published >= self.spec.publish_every:
            self.published = self.step
            published = VersionPublished(
                version=Version(self.incarnation, self.step),
                manifest_digest=f"{self.step:064x}",
                assets_digest="",
                num_bytes=1,
                origin="",
                origin_key="",
            )
            self.tell(published)
        self.granted, self.arrived = None, 0
        self.tell(BatchRequest(incarnation=self.incarnation, step=self.step))

    def complete_if_whole(self) -> None:
        if self.granted is not None and self.arrived >= len(self.granted):
            self.num_groups += len(self.granted)
            groups, self.granted = tuple(map(GroupId, self.granted)), None
            self.tell(
                StepCompleted(
                    incarnation=self.incarnation,
                    step=self.step,
                    groups=groups,
                    train_s=0.0,
                    wait_s=0.0,
                )
            )

    def submit(self, start: int, count: int) -> None:
        tasks = tuple(Task(start + place, "{}") for place in range(count))
        self.tell(TasksSubmitted(incarnation=self.incarnation, start=start, tasks=tasks))

    def beat(self) -> None:
        now = time.monotonic()
        if now >= self._beat_due and self.incarnation:
            self._beat_due = now + LEARNER_BEAT_S
            self.sequence += 1
            self.tell(
                LearnerHeartbeat(
                    incarnation=self.incarnation, sequence=self.sequence, state="training"
                )
            )

    def tell(self, message: Message) -> None:
        self.send(self.control, wire.encode(message))


def run_learner(pipe: Pipe, spec: LearnerSpec) -> None:
    """The main function of the learner's process."""
    reactor = Reactor()
    reactor.watch(pipe)
    learner = NullLearner(reactor, spec)
    while not learner.is_over:
        if reactor.turn(0.1):
            if pipe.recv()[0] == "stop":
                break
            pipe.send((learner.step, learner.num_groups))
        learner.beat()
    reactor.context.destroy(linger=0)
