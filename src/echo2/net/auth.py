"""No stranger gets in: ZeroMQ asks here about every CURVE key, and the allow-list answers.

One `Authenticator` per context serves all its sockets. It is started before the first bind
(a `Router` refuses to bind without it), and every socket names its domain and enforces it,
since without a handler CURVE admits all who know the server's public key. A domain has a key
list of its own, and opens to no other: those of peers, and the join tokens' for enrolment. A
key on the list gets its NAME as User-Id, which each of its messages then carries; it cannot be
forged, and `Router` checks name and key against the list once more for each message.

What is refused is counted. It is told (logged, and to `on_refused`) once per key, and so rarely
that a flood of keys fills no disk. A revoked key is refused at its next handshake; ZeroMQ
cannot close its connection, so `Router` ignores it from then on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Final
from weakref import WeakKeyDictionary

import structlog
import zmq
import zmq.asyncio
from zmq.utils import z85

from echo2.errors import LocalProtocolError
from echo2.net.keys import AllowList, KeyList, KeyPair, load_or_create_key
from echo2.net.rate_limit import RateLimit
from echo2.net.sockets import ZAP_DOMAIN, ZAP_ENDPOINT, zap_socket
from echo2.net.tasks import OwnedTasks
from echo2.net.wakeups import Wakeups

__all__ = [
    "KEY_PROPERTY",
    "AllowList",
    "Authenticator",
    "KeyPair",
    "load_or_create_key",
]

log = structlog.get_logger()

KEY_PROPERTY: Final = "Echo2-Key"
"""Property of each message that holds the verified public key."""
_STRANGERS_LOGGED_MAX: Final = 1024
_TURN_S: Final = 0.002
"""After so long of answers others have their turn."""
_TOLD_BURST: Final = 16
_TOLD_INTERVAL_S: Final = 10.0


class Authenticator:
    """The ZAP handler of `context` (RFC 27). Counts `admitted` and `refused` by reason.

    `on_refused(reason, public_key, address, num_since)`: `num_since` handshakes were refused
    since it was called last, this one included.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        allow_list: KeyList,
        *,
        on_refused: Callable[[str, str, str, int], None] | None = None,
    ) -> None:
        self.allow_list = allow_list
        self._lists: dict[str, KeyList] = {ZAP_DOMAIN: allow_list}
        self._on_refused = on_refused
        self._told = RateLimit(_TOLD_BURST, _TOLD_INTERVAL_S)
        self.admitted = 0
        self.refused: Counter[str] = Counter()
        self._context = context
        self._logged: set[str] = set()
        self._tasks = OwnedTasks("authenticator")
        self._socket: zmq.Socket[bytes] | None = None

    @staticmethod
    def of(context: zmq.asyncio.Context) -> Authenticator | None:
        """The one that runs on `context`."""
        return _running.get(context)

    def add_domain(self, domain: str, keys: KeyList) -> None:
        """Let `keys` in to sockets of `domain`, and to no other."""
        self._lists[domain] = keys

    def keys_of(self, domain: str) -> KeyList:
        """Who is let in to sockets of `domain`. LocalProtocolError when nobody said so."""
        found = self._lists.get(domain)
        if found is None:
            raise LocalProtocolError(
                f"no keys were given for the domain {domain}; call add_domain before a socket of "
                "it binds"
            )
        return found

    async def start(self) -> None:
        """Raises LocalProtocolError if the context has one already."""
        if _running.setdefault(self._context, self) is not self or self._socket is not None:
            raise LocalProtocolError(
                "this context already has an Authenticator; one serves all sockets of a context"
            )
        self._socket = zap_socket(self._context)
        try:
            self._socket.bind(ZAP_ENDPOINT)
        except zmq.ZMQError as error:
            await self.stop()
            raise LocalProtocolError(f"{ZAP_ENDPOINT} is taken in this context: {error}") from error
        self._tasks.start(self._run(self._socket), name="serve")

    async def stop(self) -> None:
        """From now on every handshake is refused. Raises what ended the handler, if anything."""
        if _running.get(self._context) is self:
            del _running[self._context]
        try:
            await self._tasks.stop()
        finally:
            if self._socket is not None:
                self._socket.close()

    async def wait(self) -> None:
        """Until stopped; raises what ended the handler: nobody could connect without it."""
        await self._tasks.wait()

    async def _run(self, socket: zmq.Socket[bytes]) -> None:
        wakeups = Wakeups(socket)
        until_s = time.monotonic() + _TURN_S
        try:
            while True:
                try:
                    request = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    await wakeups.wait()
                    until_s = time.monotonic() + _TURN_S
                    continue
                socket.send_multipart(self.answer(request))
                if time.monotonic() > until_s:
                    await asyncio.sleep(0)
                    until_s = time.monotonic() + _TURN_S
        finally:
            wakeups.close()

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to a request: [version, request id, domain, address, routing id,
        mechanism, credentials...]."""
        if len(request) < 6:
            raise LocalProtocolError(f"ZeroMQ sent a ZAP request of {len(request)} frames")
        version, request_id, domain, address, _, mechanism, *credentials = request
        name, key, reason = None, "", ""
        if version != b"1.0" or mechanism != b"CURVE" or [len(c) for c in credentials] != [32]:
            reason = "mechanism"
        elif (keys := self._lists.get(domain.decode(errors="replace"))) is None:
            reason = "domain"
        else:
            key = z85.encode(credentials[0]).decode()
            name = keys.name_of(key)
            reason = "" if name is not None else keys.refusal(key)
        if name is None:
            self._note_refusal(reason, key=key, address=address.decode(errors="replace"))
            return [b"1.0", request_id, b"400", reason.encode(), b"", b""]
        self.admitted += 1
        log.debug("peer_admitted", peer=name, address=address.decode(errors="replace"))
        return [b"1.0", request_id, b"200", b"", name.encode(), _property(KEY_PROPERTY, key)]

    def _note_refusal(self, reason: str, *, key: str, address: str) -> None:
        self.refused[reason] += 1
        if key in self._logged:
            self._told.pass_over()
            return
        if len(self._logged) >= _STRANGERS_LOGGED_MAX:
            self._logged.clear()
        num_since = self._told.note(time.monotonic())
        if not num_since:
            return
        self._logged.add(key)
        log.warning(
            "peer_refused", reason=reason, public_key=key, address=address, num_since=num_since
        )
        if self._on_refused is not None:
            self._on_refused(reason, key, address, num_since)


_running: WeakKeyDictionary[zmq.asyncio.Context, Authenticator] = WeakKeyDictionary()


def _property(name: str, value: str) -> bytes:
    """One ZMTP metadata property."""
    name_bytes, value_bytes = name.encode(), value.encode()
    return (
        len(name_bytes).to_bytes(1, "big")
        + name_bytes
        + len(value_bytes).to_bytes(4, "big")
        + value_bytes
    )
