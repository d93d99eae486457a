"""Real relays over real sockets with CURVE: chains, dead and lying relays, joiners, dial-only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from echo2.config import Config
from echo2.errors import WeightsError
from echo2.messages import Chunk, Message
from echo2.net import relay_links
from echo2.net.auth import AllowList, KeyPair
from echo2.net.relay import Relay
from echo2.net.sockets import close_context, make_context
from echo2.net.version_fetch import FetchLimits
from echo2.types import PeerId, RelayPeer, Stripe
from echo2.weights.open_versions import VERSIONS_OPEN_MAX
from echo2.weights.origin import Origin
from echo2.weights.snapshot import Manifest
from echo2.weights.store import ChunkStore, write_version
from echo2.weights.versions import StoredVersion

DEADLINE_S = 120.0
CHUNK_BYTES = 1 << 14
NUM_CHUNKS = 160
MISSING = "f" * 64
REFUSED = r"the origin tcp://.* refuses version ffffffffffff"
LIMITS = FetchLimits(window_bytes=16 * CHUNK_BYTES, silence_s=1.0, stall_timeout_s=30.0)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await coroutine

    asyncio.run(within_deadline())


@dataclass
class Fleet:
    """An origin, and relays by name; every relay knows all others."""

    folder: Path
    origin: Origin
    relays: dict[str, Relay]
    stores: dict[str, ChunkStore]
    keys: dict[str, KeyPair]

    def write(self, seed: int = 1, num_chunks: int = NUM_CHUNKS) -> Manifest:
        content = random.Random(seed).randbytes(num_chunks * CHUNK_BYTES - 100)
        return write_version(
            self.folder / "run" / "versions",
            [("weight", "U8", (len(content),), content)],
            chunk_bytes=CHUNK_BYTES,
        )

    def introduce(self, *, dial_only: Sequence[str] = ()) -> None:
        peers = [
            RelayPeer(name, "" if name in dial_only else relay.endpoint, self.keys[name].public)
            for name, relay in self.relays.items()
        ]
        for relay in self.relays.values():
            relay.set_peers(peers)

    def fetch(
        self, name: str, manifest: Manifest | str, *stripes: Stripe, planned_s: float = 0.0
    ) -> asyncio.Task[StoredVersion]:
        digest = manifest if isinstance(manifest, str) else manifest.manifest_digest
        return asyncio.create_task(
            self.relays[name].fetch(
                digest,
                self.origin.endpoint,
                self.origin.public_key,
                timeout_s=DEADLINE_S,
                stripes=stripes,
                planned_s=planned_s,
            )
        )

    def sent(self, name: str = "origin") -> int:
        """Chunks that left a relay, or the origin."""
        server = self.origin.server if name == "origin" else self.relays[name].server
        return server.counters["chunks"]


@contextlib.asynccontextmanager
async def a_fleet(
    tmp_path: Path, *names: str, limits: FetchLimits = LIMITS
) -> AsyncIterator[Fleet]:
    keys = {name: KeyPair.generate() for name in names}
    allowed = AllowList(tmp_path / "run" / "keys" / "authorized")
    for name, pair in keys.items():
        allowed.authorize(name, pair.public)
    async with contextlib.AsyncExitStack() as stack:
        context = make_context()
        stack.push_async_callback(close_context, context)
        origin = Origin(context, Config(), tmp_path / "run")
        await origin.start()
        stack.push_async_callback(origin.stop)
        relays, stores = {}, {}
        for name in names:
            context = make_context()
            stack.push_async_callback(close_context, context)
            stores[name] = ChunkStore(tmp_path / name, 1 << 30)
            relays[name] = await stack.enter_async_context(
                Relay(
                    context,
                    stores[name],
                    keys=keys[name],
                    name=name,
                    bind="tcp://127.0.0.1:0",
                    limits=limits,
                )
            )
        fleet = Fleet(tmp_path, origin, relays, stores, keys)
        fleet.introduce()
        yield fleet


def chain(names: Sequence[str], name: str, num_chunks: int = NUM_CHUNKS) -> Stripe:
    """The part of `name` in a chain of `names`, the first of which is the origin's child."""
    before = names[: names.index(name)]
    return Stripe(num_chunks, tuple(reversed(before)))


def check(stored: StoredVersion, manifest: Manifest) -> None:
    with stored:
        assert stored.manifest.digest == manifest.digest
        stored.verify()


def test_a_chain_forwards_while_it_receives_and_the_origin_sends_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        names = ("w-1", "w-2", "w-3", "w-4")
        async with a_fleet(tmp_path, *names) as fleet:
            manifest = fleet.write()
            tasks = [fleet.fetch(name, manifest, chain(names, name)) for name in names]
            for stored in await asyncio.gather(*tasks):
                check(stored, manifest)
            # Each link carries a chunk once; before a parent's link was up, the origin helped.
            total = sum(map(fleet.sent, ("origin", *names)))
            assert total <= len(names) * NUM_CHUNKS + 3 * 16
            assert sum(map(fleet.sent, names)) > 0
            report = fleet.relays["w-4"].links(manifest.manifest_digest)
            assert sum(link.num_bytes for link in report) >= manifest.num_bytes

    run(scenario())


def test_stripes_over_several_trees_come_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        names = ("w-1", "w-2", "w-3")
        async with a_fleet(tmp_path, *names) as fleet:
            manifest = fleet.write()
            orders = (("w-1", "w-2", "w-3"), ("w-3", "w-1", "w-2"), ("w-2", "w-3", "w-1"))
            counts = (NUM_CHUNKS // 2, NUM_CHUNKS // 4, NUM_CHUNKS - 3 * NUM_CHUNKS // 4)
            tasks = [
                fleet.fetch(
                    name,
                    manifest,
                    *(chain(order, name, n) for order, n in zip(orders, counts, strict=True)),
                    planned_s=1.0,
                )
                for name in names
            ]
            for stored in await asyncio.gather(*tasks):
                check(stored, manifest)
            assert all(fleet.sent(name) for name in names)

    run(scenario())


def test_a_relay_that_dies_in_the_middle_is_routed_around(tmp_path: Path) -> None:
    async def scenario() -> None:
        names = ("w-1", "w-2", "w-3", "w-4")
        async with a_fleet(tmp_path, *names) as fleet:
            manifest = fleet.write(num_chunks=600)
            tasks = {name: fleet.fetch(name, manifest, chain(names, name, 600)) for name in names}
            while fleet.sent("w-2") < 50:
                assert not tasks["w-3"].done()
                await asyncio.sleep(0.001)
            tasks["w-2"].cancel()
            await asyncio.wait({tasks["w-2"]})
            await fleet.relays["w-2"].close()
            for name in ("w-1", "w-3", "w-4"):
                check(await tasks[name], manifest)

    run(scenario())


class Liar:
    """Flips a byte of every tenth chunk that it hands on."""

    def __init__(self, relay: Relay) -> None:
        self._send = relay.server._send
        self._count = 0
        relay.server._send = self.send

    def send(self, peer: PeerId, message: Message) -> bool:
        if isinstance(message, Chunk):
            self._count += 1
            if self._count % 10 == 0:
                wrong = bytes([message.payload[0] ^ 1]) + message.payload[1:]
                message = Chunk(
                    manifest_digest=message.manifest_digest, index=message.index, payload=wrong
                )
        return self._send(peer, message)


def test_a_relay_that_lies_is_found_out_and_left_out(tmp_path: Path) -> None:
    async def scenario() -> None:
        names = ("w-1", "w-2")
        async with a_fleet(tmp_path, *names) as fleet:
            Liar(fleet.relays["w-1"])
            manifest = fleet.write()
            check(await fleet.fetch("w-1", manifest, chain(names, "w-1")), manifest)
            check(await fleet.fetch("w-2", manifest, chain(names, "w-2")), manifest)
            report = fleet.relays["w-2"].links(manifest.manifest_digest)
            links = {link.peer: link for link in report}
            assert LIMITS.faults_max <= links["w-1"].num_faults < 10
            assert links["origin"].num_faults == 0
            assert links["origin"].num_bytes > manifest.num_bytes / 2

    run(scenario())


def test_a_worker_that_only_dials_forwards_to_those_that_it_can_dial(tmp_path: Path) -> None:
    async def scenario() -> None:
        names = ("w-1", "w-2")
        async with a_fleet(tmp_path, *names) as fleet:
            fleet.introduce(dial_only=["w-1"])
            manifest = fleet.write()
            check(await fleet.fetch("w-1", manifest, chain(names, "w-1")), manifest)
            fleet.relays["w-1"].serve(["w-2"])
            while not fleet.relays["w-2"]._links.is_up("w-1"):  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # a handshake owes it
            check(await fleet.fetch("w-2", manifest, chain(names, "w-2")), manifest)
            assert fleet.sent("w-1") == NUM_CHUNKS
            assert fleet.sent("origin") == NUM_CHUNKS

    run(scenario())


def test_what_is_here_is_not_asked_for_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_fleet(tmp_path, "w-1") as fleet:
            manifest = fleet.write()
            task = fleet.fetch("w-1", manifest)
            progress = fleet.relays["w-1"].progress
            while not (progress and next(iter(progress.values())).num_have > NUM_CHUNKS // 2):
                await asyncio.sleep(0)
                progress = fleet.relays["w-1"].progress
            task.cancel()
            await asyncio.wait({task})
            check(await fleet.fetch("w-1", manifest), manifest)
            (link,) = fleet.relays["w-1"].links(manifest.manifest_digest)
            assert link.num_bytes < manifest.num_bytes / 2
            check(await fleet.fetch("w-1", manifest), manifest)

    run(scenario())


def test_a_version_that_nobody_has_fails_with_the_origin_s_words(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_fleet(tmp_path, "w-1", "w-2") as fleet:
            with pytest.raises(WeightsError, match=REFUSED):
                await fleet.fetch("w-1", MISSING)
            with pytest.raises(WeightsError, match=REFUSED):
                await fleet.fetch("w-2", MISSING, Stripe(1, ("w-1",)))

    run(scenario())


def test_a_parent_that_hears_of_our_key_a_moment_later_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_links, "LISTED_WITHIN_S", DEADLINE_S)
    limits = replace(LIMITS, silence_s=DEADLINE_S, stall_timeout_s=DEADLINE_S)

    async def scenario() -> None:
        async with a_fleet(tmp_path, "w-1", "w-2", limits=limits) as fleet:
            manifest = fleet.write()
            check(await fleet.fetch("w-1", manifest), manifest)
            fleet.relays["w-1"].set_peers(())
            task = fleet.fetch("w-2", manifest, Stripe(NUM_CHUNKS, ("w-1",)))
            authenticator = fleet.relays["w-1"]._links._authenticator
            assert authenticator is not None
            while not authenticator.refused.total():  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # a handshake owes it
            fleet.introduce()
            check(await task, manifest)
            assert fleet.sent() == NUM_CHUNKS, "the origin served w-1 alone"
            assert fleet.sent("w-1") == NUM_CHUNKS

    run(scenario())


def test_a_stranger_s_relay_is_not_let_in(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_fleet(tmp_path, "w-1", "w-2") as fleet:
            manifest = fleet.write()
            check(await fleet.fetch("w-1", manifest), manifest)
            known = RelayPeer("w-1", fleet.relays["w-1"].endpoint, fleet.keys["w-1"].public)
            fleet.relays["w-1"].set_peers([known])  # w-2 is on its list no more
            fleet.relays["w-2"].set_peers([known])
            check(await fleet.fetch("w-2", manifest, Stripe(NUM_CHUNKS, ("w-1",))), manifest)
            assert fleet.sent("w-1") == 0

    run(scenario())


def test_a_later_version_costs_no_more_than_an_earlier_one(tmp_path: Path) -> None:
    """Chunks that are sent, and open files, do not grow from version to version."""

    async def scenario() -> None:
        names, num_chunks = ("w-1", "w-2"), 24
        sent, files = [], []
        async with a_fleet(tmp_path, *names) as fleet:
            for seed in range(1, 49):
                before = sum(fleet.sent(name) for name in ("origin", *names))
                manifest = fleet.write(seed, num_chunks)
                fetches = [
                    fleet.fetch(name, manifest, chain(names, name, num_chunks)) for name in names
                ]
                for fetch in fetches:
                    check(await fetch, manifest)
                sent.append(sum(fleet.sent(name) for name in ("origin", *names)) - before)
                files.append(len(os.listdir("/proc/self/fd")))
        assert sum(sent[-4:]) <= 1.5 * 4 * len(names) * num_chunks
        # Some versions stay open at each host; of a file for each version there would be 47.
        assert files[-1] <= files[0] + 3 * VERSIONS_OPEN_MAX

    run(scenario())
