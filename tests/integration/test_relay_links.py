"""Two relays that dialed each other: what one asked for outlives the other connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from echo2.messages import ManifestRequest, Message
from echo2.net.auth import KeyPair
from echo2.net.relay_links import RelayLinks
from echo2.net.sockets import close_context, make_context
from echo2.types import RelayPeer

DEADLINE_S = 60.0
NAMES = ("a", "b")
REQUEST = ManifestRequest(manifest_digest="f" * 64)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await coroutine

    asyncio.run(within_deadline())


class End:
    """One of two relays' links, and what they told."""

    def __init__(self, name: str, keys: KeyPair) -> None:
        self.received: list[tuple[str, Message]] = []
        self.void: list[str] = []
        self.ups: list[str] = []
        self.downs: list[str] = []
        self.context = make_context()
        self.links = RelayLinks(
            self.context,
            name=name,
            keys=keys,
            bind="tcp://127.0.0.1:0",
            on_message=lambda peer, message: self.note(self.received, (peer, message)),
            on_up=lambda peer: self.note(self.ups, peer),
            on_down=lambda peer, _: self.note(self.downs, peer),
            on_void=lambda peer: self.note(self.void, peer),
            on_room=lambda: None,
        )
        self.changed = asyncio.Event()

    def note(self, where: list[Any], what: Any) -> None:
        where.append(what)
        self.changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            self.changed.clear()
            await self.changed.wait()


@contextlib.asynccontextmanager
async def two_ends() -> AsyncIterator[tuple[End, End]]:
    keys = {name: KeyPair.generate() for name in NAMES}
    ends = {name: End(name, keys[name]) for name in NAMES}
    async with contextlib.AsyncExitStack() as stack:
        for end in ends.values():
            stack.push_async_callback(close_context, end.context)
            await end.links.start()
            stack.push_async_callback(end.links.stop)
        peers = [
            RelayPeer(name, end.links.endpoint, keys[name].public) for name, end in ends.items()
        ]
        for end in ends.values():
            end.links.set_peers(peers)
        yield ends["a"], ends["b"]


def test_a_request_over_their_connection_stays_valid_when_we_make_one_of_our_own() -> None:
    async def scenario() -> None:
        async with two_ends() as (a, b):
            b.links.dial("a")
            await a.until(lambda: a.links.is_up("b"))
            assert a.links.send("b", REQUEST)
            await b.until(lambda: bool(b.received))
            b.void.clear()
            a.links.dial("b")
            await b.until(lambda: b.ups.count("a") == 2)
            assert b.void == []
            assert b.received == [("a", REQUEST)]

    run(scenario())


def test_a_request_is_void_when_the_connection_it_came_over_is_made_anew() -> None:
    async def scenario() -> None:
        async with two_ends() as (a, b):
            a.links.dial("b")
            await a.until(lambda: a.links.is_up("b"))
            assert a.links.send("b", REQUEST)
            await b.until(lambda: bool(b.received))
            b.void.clear()
            a.links.hang_up("b")
            a.links.dial("b")
            await b.until(lambda: bool(b.void))
            assert b.void == ["a"]
            assert a.downs == ["b"]

    run(scenario())


def test_a_request_over_our_connection_is_void_when_we_end_it_and_not_one_over_theirs() -> None:
    async def scenario() -> None:
        async with two_ends() as (a, b):
            b.links.dial("a")
            await a.until(lambda: a.links.is_up("b"))
            a.links.dial("b")
            await b.until(lambda: b.links.is_up("a"))
            await a.until(lambda: a.ups.count("b") == 2)
            assert a.links.send("b", REQUEST)  # over the connection that a made
            await b.until(lambda: bool(b.received))
            b.void.clear()
            b.links.hang_up("a")
            assert b.void == []
            a.links.hang_up("b")
            await a.until(lambda: a.downs == ["b"])
            b.links.dial("a")
            await a.until(lambda: a.ups.count("b") == 3)
            assert a.links.send("b", REQUEST)  # over the one that b made
            await b.until(lambda: len(b.received) == 2)
            b.links.hang_up("a")
            assert b.void == ["a"]

    run(scenario())
