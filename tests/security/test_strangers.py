"""Who has no key: at every socket of a run nothing is given, everything is counted."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from echo2 import wire
from echo2.messages import ChunksRequest, Lane, ManifestRequest, Role
from echo2.net.auth import KeyPair
from echo2.net.relay import Relay
from echo2.net.sockets import close_context, make_context
from echo2.types import RelayPeer
from echo2.weights.store import ChunkStore

from .ground import LANES, a_config, a_ground, a_hello, a_version, an_origin, until

REASON = {Lane.CONTROL: "stranger", Lane.ROLLOUTS: "stranger", Lane.ENROLMENT: "token_unknown"}


@pytest.mark.parametrize("lane", LANES)
async def test_a_stranger_with_a_key_of_its_own_is_refused_counted_and_recorded(
    tmp_path: Path, lane: Lane
) -> None:
    stranger = KeyPair.generate()
    async with a_ground(tmp_path) as ground:
        with ground.unchanged():
            await ground.is_refused(lane, stranger, greeting=a_hello)
        await ground.counts(REASON[lane])
        (event,) = ground.events("handshake_refused")
        assert event["reason"] == REASON[lane]
        assert event["public_key"] == stranger.public


@pytest.mark.parametrize("lane", LANES)
async def test_a_stranger_without_any_key_gets_nothing(tmp_path: Path, lane: Lane) -> None:
    async with a_ground(tmp_path) as ground:
        with ground.unchanged():
            plain = ground.raw(ground.endpoints[lane], None)
            plain.send_multipart(wire.encode(a_hello()))
            await ground.counts("handshake_failed")
            assert not plain.poll(0)


async def test_a_stranger_who_knows_only_the_server_s_key_is_a_stranger(tmp_path: Path) -> None:
    """Without an authentication domain that is enforced, CURVE would let it in."""
    async with a_ground(tmp_path) as ground:
        with ground.unchanged():
            raw = ground.raw(ground.endpoints[Lane.CONTROL], KeyPair.generate())
            raw.send_multipart(wire.encode(a_hello()))
            await ground.counts("stranger")
            assert not raw.poll(0)


async def test_the_server_s_own_key_opens_none_of_its_sockets(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        secret = (ground.run_dir / "keys" / "coordinator.key").read_text().splitlines()[-1]
        for lane in LANES:
            with ground.unchanged():
                await ground.is_refused(lane, KeyPair.from_secret(secret))


async def test_a_stolen_manifest_digest_is_worth_nothing_at_the_origin(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground, an_origin(ground) as (origin, digest):
        requests = (
            ManifestRequest(manifest_digest=digest),
            ChunksRequest(manifest_digest=digest, indexes=(0,)),
        )
        for request in requests:
            await ground.is_refused(
                Lane.CHUNKS,
                KeyPair.generate(),
                endpoint=origin.endpoint,
                server_key=origin.public_key,
                greeting=lambda request=request: request,
            )
        assert origin.server is not None
        assert not origin.server.counters.total()
        worker = await ground.gets_in(
            Lane.CHUNKS,
            ground.a_peer("w-1"),
            endpoint=origin.endpoint,
            server_key=origin.public_key,
            greeting=lambda: requests[0],
        )
        await until(lambda: worker.counters["received"])


async def test_a_stolen_manifest_digest_is_worth_nothing_at_a_relay(tmp_path: Path) -> None:
    relay_keys, friend, stranger = (KeyPair.generate() for _ in range(3))
    store = ChunkStore(tmp_path / "store", 1 << 20)
    digest = a_version(store.folder)
    context = make_context()
    try:
        async with (
            a_ground(tmp_path) as ground,
            Relay(context, store, keys=relay_keys, name="w-1", bind="tcp://127.0.0.1:*") as relay,
        ):
            relay.set_peers([RelayPeer("w-2", "", friend.public)])

            def asks() -> ManifestRequest:
                return ManifestRequest(manifest_digest=digest)

            more = {
                "endpoint": relay.endpoint,
                "server_key": relay_keys.public,
                "server_role": Role.WORKER,
                "greeting": asks,
            }
            await ground.is_refused(Lane.CHUNKS, stranger, **more)
            listed = await ground.gets_in(Lane.CHUNKS, friend, **more)
            await until(lambda: listed.counters["received"])
            relay.set_peers([])
            await until(lambda: not relay._links.is_up("w-2"))
            await ground.is_refused(Lane.CHUNKS, friend, **more)
    finally:
        await close_context(context)


async def test_http_on_loopback_asks_for_its_token_and_changes_nothing(tmp_path: Path) -> None:
    config = a_config(http={"token": "secret"})
    async with (
        a_ground(tmp_path, config) as ground,
        aiohttp.ClientSession() as session,
    ):
        url = ground.coordinator.http_url
        with ground.unchanged():
            for path in ("/api/status", "/metrics", "/health", "/api/../api/status"):
                for headers in ({}, {"Authorization": "Bearer wrong"}):
                    async with session.get(url + path, headers=headers) as reply:
                        assert reply.status == 401
                        assert ground.coordinator.run_id not in await reply.text()
            right = {"Authorization": "Bearer secret"}
            async with session.post(f"{url}/api/status", headers=right) as reply:
                assert reply.status == 405
            async with session.get(f"{url}/../../keys/coordinator.key", headers=right) as reply:
                assert reply.status == 404
