"""Connections of a relay to other relays and to the origin, by name, whoever dialed.

    we dial      a Dealer of our own, redialed by itself while it is wanted
    they dial    our Router, which knows the peer by its key

Both ends may ask and answer over either kind. A peer that both dialed and was dialed is
spoken to over the connection that we made, if it is up; what it asked for stays valid until the
connection ends, or is made anew, over which it asked. Whom we may dial, and whose key may
dial us, says the list of peers (`set_peers`); the origin is dialed at the address and with the
key that its version was announced with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import structlog
import zmq.asyncio

from echo2.core.relay_fetch import ORIGIN
from echo2.errors import ConfigError
from echo2.messages import Chunk, Lane, ManifestReply, Message, Role
from echo2.net.auth import Authenticator, KeyPair
from echo2.net.dealer import Connection, Dealer
from echo2.net.keys import PeerKeys
from echo2.net.router import Router
from echo2.net.tasks import OwnedTasks
from echo2.types import PeerId, RelayPeer

log = structlog.get_logger(__name__)

CREDIT_BYTES: Final = 2 << 20
"""Bytes that wait here for one peer, beside what its connection has under way."""
DIALED_MAX: Final = 256
LISTED_WITHIN_S: Final = 1.0
"""A peer that is dialed may be told of our key a moment after we were told of its."""


class RelayLinks:
    """`on_message(name, message)`, `on_up(name)` and `on_down(name, reason)` are called on the
    event loop. `keys` None: without CURVE, on loopback alone."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        name: str,
        keys: KeyPair | None,
        bind: str,
        on_message: Callable[[str, Message], None],
        on_up: Callable[[str], None],
        on_down: Callable[[str, str], None],
        on_void: Callable[[str], None],
        on_room: Callable[[], None],
    ) -> None:
        """`bind`: where to listen, "tcp://HOST:PORT"; "" to dial only. `on_void` is told of
        a peer whose connection ended or was made anew, before `on_down` and `on_up`: what it
        asked for over it is void. `on_room`: somebody's `credit` grew."""
        self.endpoint = ""
        self._context = context
        self._name = name
        self._keys = keys
        self._bind = bind
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self._on_void = on_void
        self._on_room = on_room
        self._peers: dict[str, RelayPeer] = {}
        self._allowed = PeerKeys()
        self._dialed: dict[str, _Dialed] = {}
        self._spoke_over_ours: dict[str, bool] = {}
        """Whether a peer's last message came over the connection that we made."""
        self._router: Router | None = None
        self._authenticator: Authenticator | None = None
        self._tasks = OwnedTasks("relay_links")

    async def start(self) -> None:
        """Listen, if asked to. ConfigError when the address cannot be bound."""
        if not self._bind:
            return
        if self._keys is not None:
            self._authenticator = Authenticator(self._context, self._allowed)
            await self._authenticator.start()
        self._router = Router(
            self._context,
            lane=Lane.CHUNKS,
            role=Role.WORKER,
            bind=self._bind,
            keys=self._keys,
            on_message=lambda peer, message: self._take(str(peer), message, over_ours=False),
            on_peer=self._accepted,
            on_gone=self._gone,
            on_room=lambda _: self._on_room(),
            client_roles=lambda peer: frozenset({Role.WORKER}),
            credit_bytes=CREDIT_BYTES,
        )
        await self._router.start()
        self.endpoint = self._router.endpoint

    async def wait(self) -> None:
        """Until stopped; raises what crashed."""
        async with asyncio.TaskGroup() as group:
            for part in (self._router, self._authenticator, self._tasks):
                if part is not None:
                    group.create_task(part.wait())

    async def stop(self) -> None:
        dialed, self._dialed = list(self._dialed.values()), {}
        await asyncio.gather(*(each.close() for each in dialed))
        await self._tasks.stop()
        for part in (self._router, self._authenticator):
            if part is not None:
                await part.stop()

    def set_peers(self, peers: Iterable[RelayPeer]) -> None:
        """Whom we may talk to from now on. ConfigError for keys that are none."""
        known = {peer.name: peer for peer in peers if peer.name != self._name}
        self._allowed.replace({name: peer.key for name, peer in known.items() if peer.key})
        for name in list(self._dialed):
            if name != ORIGIN and known.get(name) != self._peers.get(name):
                self.hang_up(name)
        self._peers = known
        for name in self._spoke_over_ours.keys() - known.keys() - {ORIGIN}:
            del self._spoke_over_ours[name]

    def can_dial(self, name: str) -> bool:
        peer = self._peers.get(name)
        return peer is not None and bool(peer.endpoint)

    def dial(self, name: str) -> None:
        """Have a connection to a peer; `on_up` or `on_down` tells."""
        peer = self._peers.get(name)
        if peer is None or not peer.endpoint:
            self._on_down(name, f"{name} is not known, or has no address")
            return
        self._dial(name, peer.endpoint, peer.key, Role.WORKER)

    def dial_origin(self, endpoint: str, key: str) -> None:
        """Have a connection to the origin, which may have another address than before.
        ConfigError when the address or the key cannot be right."""
        self._dial(ORIGIN, endpoint, key, Role.ORIGIN)

    def hang_up(self, name: str) -> None:
        dialed = self._dialed.pop(name, None)
        if dialed is not None:
            self._tasks.start(dialed.close(), name=f"close.{name}")
            if dialed.is_up:
                self._ended(name, "we ended the connection", ours=True)

    def is_up(self, name: str) -> bool:
        dialed = self._dialed.get(name)
        if dialed is not None and dialed.is_up:
            return True
        return self._router is not None and self._router.knows(PeerId(name))

    def send(self, name: str, message: Message) -> bool:
        """False when the peer cannot be reached, or its credit is used up. Whatever is no
        chunk and no manifest goes before those that wait."""
        urgent = not isinstance(message, Chunk | ManifestReply)
        dialed = self._dialed.get(name)
        if dialed is not None and dialed.is_up:
            return dialed.dealer.send(message, urgent=urgent)
        if self._router is not None and self._router.knows(PeerId(name)):
            return self._router.send(PeerId(name), message, urgent=urgent)
        return False

    def credit(self, name: str) -> int:
        """Bytes that may be queued for the peer now."""
        dialed = self._dialed.get(name)
        if dialed is not None and dialed.is_up:
            return dialed.dealer.credit
        return 0 if self._router is None else self._router.credit(PeerId(name))

    def _accepted(self, peer: PeerId) -> None:
        self._void(str(peer), ours=False)
        self._on_up(str(peer))

    def _gone(self, peer: PeerId) -> None:
        if self.is_up(str(peer)):
            self._void(str(peer), ours=False)
        else:
            self._ended(str(peer), "the connection that it made is gone", ours=False)

    def _take(self, name: str, message: Message, *, over_ours: bool) -> None:
        self._spoke_over_ours[name] = over_ours
        self._on_message(name, message)

    def _ended(self, name: str, reason: str, *, ours: bool) -> None:
        self._void(name, ours=ours)
        self._on_down(name, reason)

    def _void(self, name: str, *, ours: bool) -> None:
        if self._spoke_over_ours.get(name, ours) is ours:
            self._on_void(name)

    def _dial(self, name: str, endpoint: str, key: str, role: Role) -> None:
        dialed = self._dialed.get(name)
        if dialed is not None and (dialed.endpoint, dialed.key) == (endpoint, key):
            if dialed.is_up:
                self._on_up(name)
            return
        self.hang_up(name)
        while len(self._dialed) >= DIALED_MAX:
            self.hang_up(next(other for other in self._dialed if other != ORIGIN))
        try:
            made = _Dialed(self, name, endpoint, key, role)
        except ConfigError as error:
            if role is Role.ORIGIN:
                raise
            self._on_down(name, str(error))
            return
        self._dialed[name] = made
        self._tasks.start(made.run(), name=f"dialed.{name}")

    def _make_dealer(
        self,
        name: str,
        endpoint: str,
        key: str,
        role: Role,
        on_state: Callable[[Connection, str], None],
    ) -> Dealer:
        return Dealer(
            self._context,
            lane=Lane.CHUNKS,
            role=Role.WORKER,
            endpoint=endpoint,
            server_key=key,
            server_role=role,
            keys=self._keys,
            name=self._name,
            on_state=on_state,
            on_room=self._on_room,
            on_message=partial(self._take, name, over_ours=True),
            queue_bytes=CREDIT_BYTES,
        )


class _Dialed:
    """One connection that we made."""

    def __init__(self, links: RelayLinks, name: str, endpoint: str, key: str, role: Role) -> None:
        self.endpoint = endpoint
        self.key = key
        self._links = links
        self._name = name
        self._closed = False
        self._began = asyncio.get_running_loop().time()
        self.dealer = links._make_dealer(name, endpoint, key, role, self._state_changed)

    @property
    def is_up(self) -> bool:
        return self.dealer.state is Connection.CONNECTED

    async def run(self) -> None:
        await self.dealer.start()
        await self.dealer.wait()

    async def close(self) -> None:
        self._closed = True
        await self.dealer.stop(flush_s=0.0)

    def _state_changed(self, state: Connection, reason: str) -> None:
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        listed_at = self._began + LISTED_WITHIN_S
        if state is Connection.CONNECTED:
            self._links._on_up(self._name)
        elif state is Connection.REFUSED and loop.time() < listed_at:
            loop.call_at(listed_at, self._tell_down)  # the dealer dials again meanwhile
        elif reason and not reason.startswith("dialing"):
            self._tell_down()

    def _tell_down(self) -> None:
        if not self._closed and not self.is_up:
            log.info("relay_link_down", peer=self._name, reason=self.dealer.reason)
            self._links._ended(self._name, self.dealer.reason, ours=True)
