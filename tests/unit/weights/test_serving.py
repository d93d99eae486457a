"""A server of chunks is fair, bounded, and lets go of what was removed. No sockets here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from echo2.errors import WeightsError
from echo2.messages import (
    Chunk,
    ChunksCancelled,
    ChunksRefused,
    ChunksRequest,
    ManifestReply,
    ManifestRequest,
    Message,
    RelayAlive,
)
from echo2.types import PeerId
from echo2.weights.assembly import Assembly
from echo2.weights.open_versions import OpenVersions
from echo2.weights.serving import UNKNOWN_PER_PEER_MAX, VERSIONS_UNKNOWN_MAX, ChunkServer
from echo2.weights.snapshot import Manifest
from echo2.weights.store import ChunkStore, prune
from echo2.weights.versions import open_version

WriteSmall = Callable[..., Manifest]
DEADLINE_S = 30.0
CREDIT_BYTES = 1 << 20
W1, W2 = PeerId("w-1"), PeerId("w-2")


class Peers:
    """Stands for a Router: what was sent to whom, and how much credit each has."""

    def __init__(self) -> None:
        self.sent: list[tuple[PeerId, Message]] = []
        self.credits: dict[PeerId, int] = {}
        self.gone: set[PeerId] = set()
        self._changed = asyncio.Event()

    def send(self, peer: PeerId, message: Message) -> bool:
        if peer in self.gone:
            return False
        self.sent.append((peer, message))
        self._changed.set()
        return True

    def credit(self, peer: PeerId) -> int:
        return self.credits.get(peer, CREDIT_BYTES)

    def indexes(self, peer: PeerId) -> list[int]:
        return [m.index for p, m in self.sent if p == peer and isinstance(m, Chunk)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


async def eventually(condition: Callable[[], object]) -> None:
    """What a thread does, before the deadline."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + DEADLINE_S
    while not condition():
        assert loop.time() < deadline, "waited too long"
        await asyncio.sleep(0.01)


def serve(
    folder: Path,
    scenario: Callable[[ChunkServer, Peers], Coroutine[Any, Any, None]],
    **settings: float,
) -> None:
    async def run() -> None:
        peers = Peers()
        server = ChunkServer(
            folder,
            send=peers.send,
            credit=peers.credit,
            credit_bytes=CREDIT_BYTES,
            **settings,
        )
        server.start()
        try:
            await scenario(server, peers)
        finally:
            await server.stop()

    asyncio.run(run())


def test_manifest_and_chunks_are_those_of_the_version(
    tmp_path: Path, write_small: WriteSmall, chunks_of: Callable[[Path, Manifest], list[bytes]]
) -> None:
    manifest = write_small(tmp_path)
    name = manifest.manifest_digest

    async def scenario(server: ChunkServer, peers: Peers) -> None:
        server.handle(W1, ManifestRequest(manifest_digest=name))
        server.handle(W1, ChunksRequest(manifest_digest=name, indexes=(2, 0)))
        await peers.until(lambda: len(peers.sent) == 3)
        chunks = chunks_of(tmp_path, manifest)
        assert [message for _, message in peers.sent] == [
            ManifestReply(manifest_digest=name, manifest=manifest.encode()),
            Chunk(manifest_digest=name, index=0, payload=chunks[0]),
            Chunk(manifest_digest=name, index=2, payload=chunks[2]),
        ]
        assert server.counters["chunks"] == 2

    serve(tmp_path, scenario)


def test_an_index_out_of_bounds_and_an_unknown_version_are_refused(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    name = write_small(tmp_path).manifest_digest

    async def scenario(server: ChunkServer, peers: Peers) -> None:
        server.handle(W1, ChunksRequest(manifest_digest=name, indexes=(4,)))
        server.handle(W2, ManifestRequest(manifest_digest="a" * 64))
        await peers.until(lambda: len(peers.sent) == 2)
        reasons = {peer: getattr(message, "reason", "") for peer, message in peers.sent}
        assert "no chunk 4" in reasons[W1]
        assert "has chunks 0 to 3" in reasons[W1]
        assert "version aaaaaaaaaaaa is not here (any more)" in reasons[W2]

    serve(tmp_path, scenario)


def test_a_peer_without_credit_holds_up_nobody(tmp_path: Path, write_small: WriteSmall) -> None:
    name = write_small(tmp_path).manifest_digest

    async def scenario(server: ChunkServer, peers: Peers) -> None:
        peers.credits[W1] = 0
        server.handle(W1, ChunksRequest(manifest_digest=name, indexes=(0, 1)))
        server.handle(W2, ChunksRequest(manifest_digest=name, indexes=(0, 1, 2, 3)))
        await peers.until(lambda: len(peers.sent) == 4)
        assert peers.indexes(W1) == []
        assert peers.indexes(W2) == [0, 1, 2, 3]
        peers.credits[W1] = CREDIT_BYTES
        server.look()
        await peers.until(lambda: peers.indexes(W1) == [0, 1])

    serve(tmp_path, scenario)


def test_a_peer_that_takes_nothing_loses_its_queue_and_may_come_back(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    name = write_small(tmp_path).manifest_digest

    async def scenario(server: ChunkServer, peers: Peers) -> None:
        peers.credits[W1] = 0
        server.handle(W1, ChunksRequest(manifest_digest=name, indexes=(0, 1)))
        await eventually(lambda: server.counters["peers_dropped"])
        peers.credits[W1] = CREDIT_BYTES
        server.handle(W1, ChunksRequest(manifest_digest=name, indexes=(3,)))
        await peers.until(lambda: peers.indexes(W1) == [3])

    serve(tmp_path, scenario, credit_stall_s=0.05)


def test_a_peer_that_is_gone_loses_its_queue(tmp_path: Path, write_small: WriteSmall) -> None:
    name = write_small(tmp_path).manifest_digest

    async def scenario(server: ChunkServer, peers: Peers) -> None:
        peers.gone.add(W1)
        server.handle(W1, ChunksRequest(manifest_digest=name, indexes=(0, 1)))
        server.handle(W2, ChunksRequest(manifest_digest=name, indexes=(0,)))
        await peers.until(lambda: peers.indexes(W2) == [0])
        await eventually(lambda: server.counters["peers_dropped"])
        assert server.counters["chunks"] == 1

    serve(tmp_path, scenario)


def test_a_version_that_was_removed_is_refused_even_if_it_was_open(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    name = write_small(tmp_path).manifest_digest

    async def scenario(server: ChunkServer, peers: Peers) -> None:
        server.handle(W1, ChunksRequest(manifest_digest=name, indexes=(0,)))
        await peers.until(lambda: peers.indexes(W1) == [0])
        prune(tmp_path, keep=set())
        server.handle(W1, ChunksRequest(manifest_digest=name, indexes=(1, 2)))
        await peers.until(lambda: len(peers.sent) == 2)
        assert isinstance(peers.sent[1][1], ChunksRefused)

    serve(tmp_path, scenario)


def test_open_versions_are_few_and_removed_ones_are_let_go(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    names = [write_small(tmp_path, seed=seed).manifest_digest for seed in range(4)]
    versions = OpenVersions(tmp_path, versions_max=2)
    with versions.use(names[0]) as kept:
        for name in names[1:]:
            with versions.use(name) as version:
                version.read(0)
        assert len(versions) == 2
        kept.read(0)  # no longer among them, and open until its reader is done
    with pytest.raises(WeightsError, match="was closed"):
        kept.read(0)
    prune(tmp_path, keep={names[3]})
    versions.sweep()
    assert len(versions) == 1
    with pytest.raises(WeightsError, match="not here"), versions.use(names[2]):
        pass
    versions.close()
    assert len(versions) == 0


# ------------------------------------------------------------- versions on their way here


async def an_assembly(tmp_path: Path, write_small: WriteSmall) -> tuple[Manifest, Assembly]:
    """A version that nothing of is here yet, and what it will be made of."""
    manifest = write_small(tmp_path / "published")
    store = ChunkStore(tmp_path / "store", 1 << 30)
    return manifest, await asyncio.to_thread(store.begin, manifest)


def payload(tmp_path: Path, manifest: Manifest, index: int) -> bytes:
    stored = open_version(tmp_path / "published", manifest.manifest_digest)
    assert stored is not None
    with stored:
        return stored.read(index)


def a_chunk(tmp_path: Path, manifest: Manifest, index: int) -> Chunk:
    content = payload(tmp_path, manifest, index)
    return Chunk(manifest_digest=manifest.manifest_digest, index=index, payload=content)


async def test_a_chunk_that_is_not_here_is_sent_as_soon_as_it_is(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    manifest, assembly = await an_assembly(tmp_path, write_small)
    peers = Peers()
    server = a_relay(tmp_path, peers)
    server.begins(assembly)
    digest = manifest.manifest_digest
    server.handle(W1, ChunksRequest(manifest_digest=digest, indexes=(0, 1)))
    await eventually(lambda: any(isinstance(m, RelayAlive) for _, m in peers.sent))
    assert [m for _, m in peers.sent if isinstance(m, Chunk)] == []
    alive = next(m for _, m in peers.sent if isinstance(m, RelayAlive))
    assert (alive.num_held, alive.num_awaited) == (0, 2)
    assembly.add(1, payload(tmp_path, manifest, 1))
    server.arrived(a_chunk(tmp_path, manifest, 1))
    await eventually(lambda: any(isinstance(m, Chunk) for _, m in peers.sent))
    assert [m.index for _, m in peers.sent if isinstance(m, Chunk)] == [1]
    assembly.close()
    await server.stop()


async def test_what_waits_for_the_uplink_counts_as_held(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    digest = write_small(tmp_path / "store").manifest_digest
    peers = Peers()
    server = a_relay(tmp_path, peers, uplink_mbit=1e-3)
    server.handle(W1, ChunksRequest(manifest_digest=digest, indexes=(0, 1, 2, 3)))
    await eventually(lambda: any(isinstance(m, RelayAlive) for _, m in peers.sent))
    alive = next(m for _, m in peers.sent if isinstance(m, RelayAlive))
    assert peers.indexes(W1) == [0]
    assert (alive.num_held, alive.num_awaited) == (3, 0)
    await server.stop()


async def test_what_waits_for_the_link_counts_as_held(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    digest = write_small(tmp_path / "store").manifest_digest
    peers = Peers()
    server = a_relay(tmp_path, peers)
    server.handle(W1, ChunksRequest(manifest_digest=digest, indexes=(0, 1, 2, 3)))
    await peers.until(lambda: len(peers.indexes(W1)) == 4)
    peers.credits[W1] = CREDIT_BYTES - 300_000
    await eventually(lambda: any(isinstance(m, RelayAlive) for _, m in peers.sent))
    alive = next(m for _, m in peers.sent if isinstance(m, RelayAlive))
    assert alive.num_held == 2
    peers.credits[W1] = CREDIT_BYTES
    await eventually(lambda: W1 not in server._sent_last)
    await server.stop()


async def test_a_chunk_goes_to_all_who_want_it_before_the_next_one(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    digest = write_small(tmp_path / "store").manifest_digest
    peers = Peers()
    server = a_relay(tmp_path, peers)
    for peer in (W1, W2):
        server.handle(peer, ChunksRequest(manifest_digest=digest, indexes=(3, 2, 1, 0)))
    await peers.until(lambda: len(peers.sent) == 8)
    assert [m.index for _, m in peers.sent if isinstance(m, Chunk)] == [0, 0, 1, 1, 2, 2, 3, 3]
    await server.stop()


async def test_whoever_asks_before_the_version_is_known_here_is_served_when_it_is(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    manifest, assembly = await an_assembly(tmp_path, write_small)
    peers = Peers()
    server = a_relay(tmp_path, peers, unknown_hold_s=DEADLINE_S)
    digest = manifest.manifest_digest
    server.handle(W1, ManifestRequest(manifest_digest=digest))
    server.handle(W1, ChunksRequest(manifest_digest=digest, indexes=(0,)))
    await eventually(lambda: any(isinstance(m, RelayAlive) for _, m in peers.sent))
    assert not any(isinstance(m, ChunksRefused) for _, m in peers.sent)
    assembly.add(0, payload(tmp_path, manifest, 0))
    server.begins(assembly)
    await eventually(lambda: any(isinstance(m, Chunk) for _, m in peers.sent))
    assert any(isinstance(m, ManifestReply) for _, m in peers.sent)
    assembly.close()
    await server.stop()


@pytest.mark.parametrize("is_told", [True, False])
async def test_whoever_asks_for_a_version_that_is_then_made_here_of_deltas_gets_it(
    tmp_path: Path, write_small: WriteSmall, *, is_told: bool
) -> None:
    manifest = write_small(tmp_path / "elsewhere")
    (tmp_path / "store").mkdir()
    peers = Peers()
    server = a_relay(tmp_path, peers, unknown_hold_s=DEADLINE_S)
    digest = manifest.manifest_digest
    server.handle(W1, ChunksRequest(manifest_digest=digest, indexes=(0,)))
    await eventually(lambda: any(isinstance(m, RelayAlive) for _, m in peers.sent))
    for path in (tmp_path / "elsewhere").iterdir():
        path.rename(tmp_path / "store" / path.name)
    if is_told:
        server.ends(digest, complete=True)
    await eventually(lambda: peers.indexes(W1) == [0])
    server.handle(W1, ChunksRequest(manifest_digest=digest, indexes=(1,)))
    await eventually(lambda: peers.indexes(W1) == [0, 1])
    await server.stop()


async def test_a_chunk_that_does_not_exist_is_refused_to_the_one_who_asked_alone(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    manifest, assembly = await an_assembly(tmp_path, write_small)
    digest = manifest.manifest_digest
    peers = Peers()
    server = a_relay(tmp_path, peers, unknown_hold_s=0.2)
    server.begins(assembly)
    server.handle(W1, ChunksRequest(manifest_digest=digest, indexes=(0,)))
    server.handle(W2, ChunksRequest(manifest_digest=digest, indexes=(99,)))
    assert [peer for peer, m in peers.sent if isinstance(m, ChunksRefused)] == [W2]
    for index in range(manifest.num_chunks):
        assembly.add(index, payload(tmp_path, manifest, index))
        server.arrived(a_chunk(tmp_path, manifest, index))
    (await asyncio.to_thread(assembly.finish)).close()
    server.ends(digest, complete=True)
    server.handle(W2, ChunksRequest(manifest_digest=digest, indexes=(99,)))
    await eventually(
        lambda: sum(peer == W2 and isinstance(m, ChunksRefused) for peer, m in peers.sent) == 2
    )
    await eventually(lambda: peers.indexes(W1) == [0])
    await server.stop()


async def test_what_never_begins_is_refused_after_a_while(tmp_path: Path) -> None:
    peers = Peers()
    (tmp_path / "store").mkdir()
    server = a_relay(tmp_path, peers, unknown_hold_s=0.2)
    server.handle(W1, ChunksRequest(manifest_digest="f" * 64, indexes=(0,)))
    await eventually(lambda: any(isinstance(m, ChunksRefused) for _, m in peers.sent))
    await server.stop()


async def test_one_who_makes_names_up_leaves_room_for_the_others(tmp_path: Path) -> None:
    peers = Peers()
    (tmp_path / "store").mkdir()
    server = a_relay(tmp_path, peers, unknown_hold_s=DEADLINE_S)
    for number in range(2 * VERSIONS_UNKNOWN_MAX):
        server.handle(W1, ManifestRequest(manifest_digest=f"{number:064x}"))
    refused = 2 * VERSIONS_UNKNOWN_MAX - UNKNOWN_PER_PEER_MAX
    await eventually(
        lambda: sum(isinstance(m, ChunksRefused) for _, m in peers.sent) == refused,
    )
    server.handle(W2, ManifestRequest(manifest_digest="f" * 64))
    await eventually(lambda: any(p == W2 and isinstance(m, RelayAlive) for p, m in peers.sent))
    assert not any(p == W2 and isinstance(m, ChunksRefused) for p, m in peers.sent)
    await server.stop()


async def test_a_fetch_that_ends_early_tells_those_who_wait_for_it(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    manifest, assembly = await an_assembly(tmp_path, write_small)
    peers = Peers()
    server = a_relay(tmp_path, peers)
    server.begins(assembly)
    digest = manifest.manifest_digest
    for peer in (W1, W2):
        server.handle(peer, ChunksRequest(manifest_digest=digest, indexes=(0, 1)))
    server.handle(W2, ChunksCancelled(manifest_digest=digest))
    server.ends(digest, complete=False)
    refused = [peer for peer, m in peers.sent if isinstance(m, ChunksRefused)]
    assert refused == [W1], "w-2 wanted nothing any more"
    assembly.close()
    await server.stop()


def a_relay(tmp_path: Path, peers: Peers, **settings: float) -> ChunkServer:
    server = ChunkServer(
        tmp_path / "store",
        send=peers.send,
        credit=peers.credit,
        credit_bytes=CREDIT_BYTES,
        **settings,
    )
    server.start()
    return server
