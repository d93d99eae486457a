"""A peer with a key that sends anything, and crowds without one: nobody else notices.

In small, without a figure; the figures are those of `benchmarks/hostile_peers.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import zmq

from echo2 import wire
from echo2.messages import (
    Chunk,
    ChunksRequest,
    Heartbeat,
    HeartbeatEcho,
    Lane,
    ManifestReply,
    ManifestRequest,
    Role,
    WorkerWelcome,
)
from echo2.net.auth import KeyPair
from echo2.net.dealer import Dealer
from echo2.net.relay import Relay
from echo2.net.router import FLOOD
from echo2.net.sockets import close_context, make_context
from echo2.types import RelayPeer
from echo2.weights.store import ChunkStore, open_version

from .ground import DEADLINE_S, LANES, Ground, a_ground, a_version, answer_of, until
from .hostile import Crowd, Flood, a_long_hello, address_of

NUM_MESSAGES = 2000
NUM_CONNECTIONS = 300
PER_S = 4000.0
ECHOES = 20


@contextlib.asynccontextmanager
async def flooding(*floods: Flood) -> AsyncIterator[None]:
    """They send from threads of their own; at the end all was sent."""
    sending = [
        asyncio.create_task(
            asyncio.to_thread(flood.send_at, PER_S, NUM_MESSAGES, deadline_s=DEADLINE_S)
        )
        for flood in floods
    ]
    try:
        yield
        await asyncio.gather(*sending)
        assert [flood.num_sent for flood in floods] == [NUM_MESSAGES] * len(floods)
    finally:
        await asyncio.gather(*sending, return_exceptions=True)
        for flood in floods:
            flood.close()


async def echoes(worker: Dealer, count: int = ECHOES) -> None:
    """Heartbeats are answered, one after the other."""
    for sequence in range(count):
        assert worker.send(Heartbeat(sequence=sequence, state="ready", lease_tokens={}))
        while not isinstance(answer := await answer_of(worker), HeartbeatEcho):
            pass
        assert answer.sequence == sequence


async def a_worker(ground: Ground, name: str) -> Dealer:
    control, _ = await ground.says_hello(ground.a_peer(name), name)
    assert isinstance(await answer_of(control), WorkerWelcome)
    return control


async def test_whatever_an_authenticated_peer_sends_the_others_are_served(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        worker = await a_worker(ground, "w-1")
        keys = ground.a_peer("w-evil")
        floods = [
            Flood(
                random.Random(number),
                lane,
                endpoint=ground.endpoints[lane],
                server_key=ground.server_key,
                keys=keys,
            )
            for number, lane in enumerate((Lane.CONTROL, Lane.ROLLOUTS))
        ]
        async with flooding(*floods):
            await echoes(worker)
        await ground.counts(FLOOD)
        await echoes(worker)
        assert ground.refused["malformed"] > 0
        told = ground.events("message_refused")
        assert {line["peer"] for line in told} == {"w-evil"}
        assert FLOOD in {line["reason"] for line in told}
        assert len(told) < NUM_MESSAGES // 20, "a flood does not fill the records"
        assert len(ground.events("install_failed")) < NUM_MESSAGES
        assert "w-1" in ground.state()["workers"]
        await a_worker(ground, "w-2")


async def test_whatever_an_authenticated_peer_sends_a_relay_serves_the_others(
    tmp_path: Path,
) -> None:
    own, friend, evil = (KeyPair.generate() for _ in range(3))
    store = ChunkStore(tmp_path / "store", 1 << 20)
    digest = a_version(store.folder)
    stored = open_version(store.folder, digest)
    assert stored is not None
    context = make_context()
    try:
        async with Relay(context, store, keys=own, name="w-1", bind="tcp://127.0.0.1:*") as relay:
            relay.set_peers(
                [RelayPeer("w-2", "", friend.public), RelayPeer("w-evil", "", evil.public)]
            )
            flood = Flood(
                random.Random(2),
                Lane.CHUNKS,
                endpoint=relay.endpoint,
                server_key=own.public,
                keys=evil,
                digest=digest,
            )
            dealer = Dealer(
                context,
                lane=Lane.CHUNKS,
                role=Role.WORKER,
                endpoint=relay.endpoint,
                server_key=own.public,
                server_role=Role.WORKER,
                keys=friend,
                name="w-2",
            )
            await dealer.start()
            try:
                async with flooding(flood):
                    for _ in range(ECHOES):
                        await _fetches_all(dealer, digest, stored.manifest.num_chunks)
                await _fetches_all(dealer, digest, stored.manifest.num_chunks)
            finally:
                await dealer.stop(flush_s=0.0)
            router = relay._links._router
            assert router is not None
            assert router.refused[FLOOD] > 0
            assert router.refused["malformed"] > 0
    finally:
        stored.close()
        await close_context(context)


async def _fetches_all(dealer: Dealer, digest: str, num_chunks: int) -> None:
    assert dealer.send(ManifestRequest(manifest_digest=digest))
    while not isinstance(await answer_of(dealer), ManifestReply):
        pass
    wanted = set(range(num_chunks))
    assert dealer.send(ChunksRequest(manifest_digest=digest, indexes=tuple(wanted)))
    while wanted:
        message = await answer_of(dealer)
        if isinstance(message, Chunk):
            wanted.discard(message.index)


async def test_raw_bytes_on_every_port_change_nothing(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        worker = await a_worker(ground, "w-1")
        endpoints = [ground.endpoints[lane] for lane in LANES]
        crowd = Crowd(random.Random(4), endpoints, how="garbage", num=20)
        with ground.unchanged():
            async with crowd.here():
                await until(lambda: crowd.counters["visits"] > NUM_CONNECTIONS)
                await echoes(worker)
        await ground.counts("handshake_failed")
        await a_worker(ground, "w-2")


@pytest.mark.parametrize("how", ["slow", "silent"])
async def test_half_open_connections_keep_no_worker_out(tmp_path: Path, how: str) -> None:
    """On all ports at once, and again as soon as one is closed."""
    async with a_ground(tmp_path) as ground:
        endpoints = [ground.endpoints[lane] for lane in LANES]
        crowd = Crowd(random.Random(5), endpoints, how=how, num=NUM_CONNECTIONS, drip_s=0.2)
        descriptors = len(os.listdir("/proc/self/fd"))
        async with crowd.here():
            async with asyncio.timeout(DEADLINE_S):
                await crowd.all_open()
            worker = await a_worker(ground, "w-1")
            await echoes(worker)
            assert crowd.num_open > NUM_CONNECTIONS // 2
        await until(lambda: len(os.listdir("/proc/self/fd")) < descriptors + 60)


async def test_what_a_stranger_sends_in_its_handshake_is_let_go_with_it(tmp_path: Path) -> None:
    """A command as long as the largest frame of the lane: it is never complete, and goes when
    its connection does."""
    async with a_ground(tmp_path) as ground:
        reader, writer = await asyncio.open_connection(*address_of(ground.endpoints[Lane.ROLLOUTS]))
        with contextlib.suppress(ConnectionError):
            for piece in a_long_hello(8 << 20):
                writer.write(piece)
                await writer.drain()
        await a_worker(ground, "w-1")
        async with asyncio.timeout(DEADLINE_S):
            with contextlib.suppress(ConnectionError):
                while await reader.read(4096):
                    pass
        writer.close()
        await a_worker(ground, "w-2")


async def test_a_peer_that_closes_while_it_is_not_read_ends_no_process() -> None:
    """Its connection waits, with the input stopped, for a reader that comes later; a ping of the
    server's on it would fail an assertion of libzmq, and end the process."""
    server = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "busy_server.py"),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert server.stdout is not None
        endpoint = (await server.stdout.readline()).decode().strip()
        context = zmq.Context[zmq.Socket[bytes]]()
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.ROUTING_ID, b"w-evil")
        peer.setsockopt(zmq.LINGER, 0)
        peer.connect(endpoint)
        frames = wire.encode(Heartbeat(sequence=1, state="ready", lease_tokens={}))
        poller = zmq.Poller()
        poller.register(peer, zmq.POLLOUT)
        while await asyncio.to_thread(poller.poll, 500):  # until the server takes no more
            for _ in range(1000):
                try:
                    peer.send_multipart(frames, zmq.NOBLOCK)
                except zmq.Again:
                    break
        peer.close()
        context.destroy(linger=0)
        async with asyncio.timeout(DEADLINE_S):
            said = (await server.stdout.readline()).decode().strip()
            assert said == "served", "it died"
            assert await server.wait() == 0
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()
