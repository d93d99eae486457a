"""Lanes do not queue behind each other: heartbeats are echoed while weights and rollouts flow."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from echo2.config import config_from_mapping
from echo2.messages import Heartbeat, HeartbeatEcho, Lane, Message, Role
from echo2.net.auth import AllowList, Authenticator, KeyPair
from echo2.net.dealer import Dealer
from echo2.net.relay import Relay
from echo2.net.router import Router
from echo2.net.sockets import close_context, make_context
from echo2.types import PeerId
from echo2.weights.origin import Origin
from echo2.weights.store import ChunkStore, write_version

DEADLINE_S = 120.0
NUM_BYTES = 4 << 20
UPLINK_MBIT = 16.0
"""So the fetch takes two seconds, whatever this machine can do."""
ECHOES_MIN = 20


def test_heartbeats_are_echoed_while_a_version_is_on_its_way(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with asyncio.timeout(DEADLINE_S), contextlib.AsyncExitStack() as stack:
            run_dir, keys, server = tmp_path / "run", KeyPair.generate(), KeyPair.generate()
            allowed = AllowList(run_dir / "keys" / "authorized")
            allowed.authorize("w-1", keys.public)
            content = bytes(range(256)) * (NUM_BYTES // 256)
            manifest = write_version(
                run_dir / "versions", [("weight", "U8", (NUM_BYTES,), content)]
            )

            context = make_context()
            stack.push_async_callback(close_context, context)
            authenticator = Authenticator(context, allowed)
            await authenticator.start()
            stack.push_async_callback(authenticator.stop)
            config = config_from_mapping({"net": {"origin_uplink_mbit": UPLINK_MBIT}})
            origin = Origin(context, config, run_dir)
            await origin.start()
            stack.push_async_callback(origin.stop)

            def echo(peer: PeerId, message: Message) -> None:
                assert isinstance(message, Heartbeat)
                router.send(peer, HeartbeatEcho(sequence=message.sequence))

            router = Router(
                context,
                lane=Lane.CONTROL,
                role=Role.COORDINATOR,
                bind="tcp://127.0.0.1:*",
                keys=server,
                on_message=echo,
            )
            await router.start()
            stack.push_async_callback(router.stop)

            own = make_context()
            stack.push_async_callback(close_context, own)
            relay = await stack.enter_async_context(
                Relay(own, ChunkStore(tmp_path / "store", 1 << 30), keys=keys, name="w-1", bind="")
            )
            dealer = Dealer(
                own,
                lane=Lane.CONTROL,
                role=Role.WORKER,
                endpoint=router.endpoint,
                server_key=server.public,
                keys=keys,
                name="w-1",
            )
            await dealer.start()
            stack.push_async_callback(dealer.stop)
            await dealer.wait_connected(DEADLINE_S)

            fetch = asyncio.create_task(
                relay.fetch(
                    manifest.manifest_digest,
                    origin.endpoint,
                    origin.public_key,
                    timeout_s=DEADLINE_S,
                )
            )
            echoes = 0
            while not fetch.done():
                dealer.send(Heartbeat(sequence=echoes, state="syncing", lease_tokens={}))
                answer = await dealer.receive()
                assert isinstance(answer, HeartbeatEcho)
                echoes += 1
                await asyncio.sleep(0.01)  # a pace, so that the fetch has the loop too
            (await fetch).close()
            assert echoes >= ECHOES_MIN

    asyncio.run(scenario())
