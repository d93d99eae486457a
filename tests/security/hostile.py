"""Who means harm: an authenticated peer that sends anything, and crowds without a key.

    Flood    a raw ZeroMQ peer with a key on the allow-list: mutated, random, and valid messages
             that are wrong, as fast as it is told, and reads no answer
    Crowd    TCP connections that never become peers: silent, a byte now and then, or garbage

Used by the tests beside it in small, and by `benchmarks/hostile_peers.py` in large.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Final

import zmq

from echo2 import wire
from echo2.messages import (
    HEADER_MAX_BYTES,
    LEASES_PER_PEER_MAX,
    PROTOCOL,
    ChunksCancelled,
    ChunksRequest,
    Draining,
    Goodbye,
    GroupResult,
    Heartbeat,
    InstallFailed,
    Lane,
    LeaseFailed,
    ManifestRequest,
    Message,
    RelayReport,
    Role,
    WorkerHello,
)
from echo2.net.keys import KeyPair
from echo2.types import LinkReport, Span, TrajectoryHeader, Version

from .mutator import Mutator

SIGNATURE: Final = b"\xff" + bytes(8) + b"\x7f"
TURN_S: Final = 0.005
"""A flood sends a few messages each turn."""
_OVERSIZED: Final = bytes(HEADER_MAX_BYTES + 1)

# ------------------------------------------------------------------- with a key: any message


class Flood:
    """Messages of one peer on one lane of a server. `digest`: a version that it serves."""

    def __init__(
        self,
        rng: random.Random,
        lane: Lane,
        *,
        endpoint: str,
        server_key: str,
        keys: KeyPair,
        digest: str = "f" * 64,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.sent: Counter[str] = Counter()
        """mutated, noise, wrong, oversized; blocked: what the server did not take at once."""
        self._rng = rng
        self._mutator = Mutator(rng, lane=lane, sender=Role.WORKER)
        self._wrong = [wire.encode(message) for message in wrong_messages(rng, lane, digest)]
        self._context = context or zmq.Context()
        self._owns_context = context is None
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, 64)
        self._socket.connect(endpoint)

    def close(self) -> None:
        self._socket.close()
        if self._owns_context:
            self._context.destroy(linger=0)

    @property
    def num_sent(self) -> int:
        return sum(self.sent.values()) - self.sent["blocked"]

    def send(self) -> bool:
        """The next message; False when the server takes none now."""
        kind, frames = self._next()
        try:
            self._socket.send_multipart(frames or [b""], zmq.NOBLOCK, copy=True)
        except zmq.Again:
            self.sent["blocked"] += 1
            return False
        self.sent[kind] += 1
        return True

    def send_at(self, per_s: float, count: int, *, deadline_s: float) -> None:
        """`count` messages at this rate, or as many as the server takes; blocks."""
        began = time.monotonic()
        while self.num_sent < count and time.monotonic() < began + deadline_s:
            due = min(count, int((time.monotonic() - began) * per_s))
            while self.num_sent < due and self.send():
                pass
            time.sleep(TURN_S)

    def _next(self) -> tuple[str, list[bytes]]:
        drawn = self._rng.random()
        if drawn < 0.0005:
            return "oversized", [_OVERSIZED]
        if drawn < 0.45:
            return "mutated", self._mutator.mutated()[0]
        if drawn < 0.55:
            return "noise", self._mutator.noise()
        return "wrong", self._rng.choice(self._wrong)


def wrong_messages(rng: random.Random, lane: Lane, digest: str) -> list[Message]:
    """Valid messages of a worker that are lies, or costly. None of them earns a lease."""
    match lane:
        case Lane.CONTROL:
            return _wrong_on_control(rng)
        case Lane.ROLLOUTS:
            return _wrong_on_rollouts()
        case Lane.CHUNKS:
            return _wrong_on_chunks(rng, digest)
        case Lane.ENROLMENT:
            return []


def _wrong_on_control(rng: random.Random) -> list[Message]:
    hello = WorkerHello(
        protocol=PROTOCOL,
        echo2_version="0",
        name="w-1",
        engine="null",
        precision="none",
        on_update="continue",
        environment="null",
        slots=LEASES_PER_PEER_MAX,
    )
    many = tuple(f"lease.{number}" for number in range(LEASES_PER_PEER_MAX))
    version = Version(1, 0)
    return [
        hello,
        replace(hello, held=many),  # type: ignore[arg-type]
        replace(hello, protocol=1),
        replace(hello, environment="another"),
        replace(hello, relay_endpoint=f"tcp://127.0.0.1:{rng.randint(1024, 65535)}"),
        replace(hello, relay_endpoint="tcp://255.255.255.255:1", relay_key="x" * 40),
        Heartbeat(sequence=1, state="ready", lease_tokens={}),
        Heartbeat(sequence=2, state="ready", lease_tokens=dict.fromkeys(many, 1)),  # type: ignore[arg-type]
        InstallFailed(version=version, stage="fetch", text="x" * 2048),
        InstallFailed(version=Version(7, 7), stage="canary", text="x" * 2048),
        RelayReport(
            manifest_digest="f" * 64,
            num_chunks=4096,
            num_missing=1,
            links=tuple(LinkReport(f"w-{number}", 1, 1.0) for number in range(4096)),
        ),
        RelayReport(manifest_digest="f" * 64, num_chunks=1, num_missing=2, links=()),
        Draining(reason="x" * 2048),
        Goodbye(reason="x" * 2048),
    ]


def _wrong_on_rollouts() -> list[Message]:
    def result(headers: tuple[TrajectoryHeader, ...], lease: str, group: str) -> GroupResult:
        total = sum(header.length for header in headers)
        return GroupResult(
            lease=lease,  # type: ignore[arg-type]
            group=group,  # type: ignore[arg-type]
            attempt=1,
            trajectories=headers,
            generate_s=1.0,
            environment_s=0.0,
            token_ids=b"\xff" * (4 * total),
            logprobs=b"\xff" * (4 * total),
            loss_mask=b"\xff" * total,
        )

    def header(spans: int) -> TrajectoryHeader:
        named = tuple(Span(Version(9, 9), place, place + 1) for place in range(spans))
        return TrajectoryHeader(spans, 1, spans, 1e30, "stop", 1, named)

    return [
        result((header(4),), "l.1", "g.1"),
        result((header(256),) * 4, "l.99999", "g.0"),
        result((header(16),) * 64, "nobody's", "g.0"),
        LeaseFailed(lease="l.1", group="g.1", stage="engine", text="x" * 2048),  # type: ignore[arg-type]
        LeaseFailed(lease="l.2", group="g.0", stage="lost", text=""),  # type: ignore[arg-type]
    ]


def _wrong_on_chunks(rng: random.Random, digest: str) -> list[Message]:
    unknown = [f"{rng.getrandbits(256):064x}" for _ in range(200)]
    return [
        ManifestRequest(manifest_digest=digest),
        ChunksRequest(manifest_digest=digest, indexes=tuple(range(256))),
        ChunksRequest(manifest_digest=digest, indexes=(2**53,)),
        ChunksCancelled(manifest_digest=digest),
        ChunksCancelled(manifest_digest=unknown[0], indexes=tuple(range(256))),
        *(ManifestRequest(manifest_digest=name) for name in unknown),
        *(ChunksRequest(manifest_digest=name, indexes=tuple(range(256))) for name in unknown),
    ]


# ------------------------------------------------------------------ without: bytes on TCP


def a_greeting(mechanism: bytes = b"CURVE", version: bytes = b"\x03\x01") -> bytes:
    """ZMTP's first 64 bytes (RFC 23) of a client."""
    return SIGNATURE + version + mechanism.ljust(20, b"\0") + bytes(32)


def garbage(rng: random.Random) -> bytes:
    """What no handshake begins with, or goes on with."""
    hello = b"\x05HELLO\x01\x00" + bytes(72) + rng.randbytes(32 + 8 + 80)
    noise = rng.randbytes(rng.randint(1, 500))
    long = rng.choice((2**63 - 1, 2**64 - 1, 2**40, 256 << 20, 5 << 20))
    return rng.choice(
        (
            noise,
            SIGNATURE + noise,
            a_greeting() + noise,
            a_greeting()[: rng.randint(1, 63)],
            a_greeting(b"NULL") + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER",
            a_greeting(b"PLAIN") + b"\x04\x08\x05HELLO\x00\x00",
            a_greeting(b"CURVE", b"\x02\x00") + noise,
            a_greeting() + b"\x04" + bytes([len(hello)]) + hello,
            a_greeting() + b"\x04" + bytes([len(hello)]) + hello * 2,
            a_greeting() + b"\x04\x09\x05HELLO\x01\x00\x00",
            a_greeting() + b"\x06" + long.to_bytes(8, "big") + rng.randbytes(1 << 16),
            a_greeting() + b"\x02" + long.to_bytes(8, "big") + rng.randbytes(1 << 16),
            b"\x01\x00" + noise,
            b"GET /api/status HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + noise,
        )
    )


class Crowd:
    """`num` connections at a time to one of `endpoints` each, again as soon as one is closed.

    `how`: "silent" says nothing, "slow" a byte of a right greeting each `drip_s`, "garbage" sends
    what is none and leaves.
    """

    def __init__(
        self,
        rng: random.Random,
        endpoints: list[str],
        *,
        how: str,
        num: int,
        drip_s: float = 1.0,
    ) -> None:
        self.counters: Counter[str] = Counter()
        """visits, closed (by the server), broken (by it, in the middle; or never made)."""
        self.num_open = 0
        self._rng = rng
        self._addresses = [address_of(endpoint) for endpoint in endpoints]
        self._how = how
        self._num = num
        self._drip_s = drip_s
        self._tasks: list[asyncio.Task[None]] = []

    @contextlib.asynccontextmanager
    async def here(self) -> AsyncIterator[Crowd]:
        """They come, and are gone afterwards."""
        self._tasks = [asyncio.create_task(self._visit_again()) for _ in range(self._num)]
        try:
            yield self
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def all_open(self) -> None:
        """Until all are connected at once."""
        while self.num_open < self._num:
            for task in self._tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)

    async def _visit_again(self) -> None:
        while True:
            try:
                await self._visit()
            except OSError:
                self.counters["broken"] += 1
                await asyncio.sleep(self._rng.uniform(0.05, 0.2))

    async def _visit(self) -> None:
        loop = asyncio.get_running_loop()
        self.counters["visits"] += 1
        with socket.socket() as found:
            found.setblocking(False)
            await loop.sock_connect(found, self._rng.choice(self._addresses))
            self.num_open += 1
            try:
                if self._how == "garbage":
                    await loop.sock_sendall(found, garbage(self._rng))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.1):
                            await self._read_to_end(found)
                elif self._how == "slow":
                    await self._drip(found)
                else:
                    await self._read_to_end(found)
            finally:
                self.num_open -= 1

    async def _drip(self, found: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for byte in a_greeting():
            await loop.sock_sendall(found, bytes([byte]))
            await asyncio.sleep(self._drip_s * self._rng.uniform(0.5, 1.5))
        await self._read_to_end(found)

    async def _read_to_end(self, found: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while await loop.sock_recv(found, 4096):
            pass
        self.counters["closed"] += 1


def address_of(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def a_long_hello(size: int) -> Iterator[bytes]:
    """A greeting and `size` bytes of a command that lacks its last one: as much as a server
    holds for somebody it does not know yet."""
    yield a_greeting() + b"\x06" + (size + 1).to_bytes(8, "big")
    piece = bytes(1 << 16)
    for _ in range(size >> 16):
        yield piece
