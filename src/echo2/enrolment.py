"""The coordinator's enrolment socket: whoever holds a live join token gets in here, once per
key, and gets nothing else.

    Enrol -> bounded queue -> one at a time, in a thread: use noted, key authorized (on the disk)
          -> Enrolled or EnrolRefused

The socket has an authentication domain of its own (`net.sockets.JOIN_DOMAIN`): the handshake
admits keys of live tokens and no peer's. Which token may let whom in is `net.token_book`'s
business.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final

import structlog
import zmq.asyncio

from echo2.errors import Echo2Error, ProtocolError
from echo2.messages import PROTOCOL, Enrol, Enrolled, EnrolRefused, Lane, Message, Role
from echo2.net.auth import Authenticator, KeyPair
from echo2.net.rate_limit import RateLimit
from echo2.net.router import Router
from echo2.net.sockets import JOIN_DOMAIN
from echo2.net.tasks import OwnedTasks
from echo2.net.token_book import EnrolmentRefusedError, TokenBook
from echo2.net.token_keys import TokenKeys, id_of_connection
from echo2.net.wakeups import Signal
from echo2.types import PeerId

log = structlog.get_logger()

WAITING_MAX: Final = 64
"""Requests that wait for their turn; one more is told to come again."""
CONNECTIONS_MAX: Final = 1024
"""Connections that an answer can reach; of more, the oldest are forgotten."""
_EVENTS_BURST: Final = 16
_EVENTS_INTERVAL_S: Final = 10.0


class Enrolment:
    """`offer(name)` makes the answer for a key that was let in. `on_event(event, fields)` is
    told of each enrolment, and of refusals as often as a disk bears."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        keys: KeyPair,
        keys_dir: Path,
        given_by_hand: Collection[str] = (),
        bind: str,
        offer: Callable[[str], Enrolled],
        on_event: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self._refused: Counter[str] = Counter()
        self._context = context
        self._book = TokenBook(keys_dir, given_by_hand=given_by_hand)
        self._offer = offer
        self._on_event = on_event
        self._router = Router(
            context,
            lane=Lane.ENROLMENT,
            role=Role.COORDINATOR,
            bind=bind,
            keys=keys,
            on_message=self._take,
            on_refused=self._on_malformed,
            client_roles=lambda peer: frozenset({Role.WORKER}),
            peers_max=CONNECTIONS_MAX,
            forgets_oldest=True,
        )
        self._waiting: deque[tuple[PeerId, Enrol]] = deque()
        self._news = Signal()
        self._told = RateLimit(_EVENTS_BURST, _EVENTS_INTERVAL_S)
        self._tasks = OwnedTasks("enrolment")

    @property
    def refused(self) -> Counter[str]:
        """Requests, messages and handshakes without CURVE that came to nothing, by reason."""
        failed = self._router.counters["handshake_failed"]
        return self._refused + self._router.refused + Counter(handshake_failed=failed)

    @property
    def endpoint(self) -> str:
        """Where it listens, once it has started."""
        return self._router.endpoint

    async def start(self) -> None:
        """Listen. ConfigError when it cannot; the context's Authenticator runs already."""
        authenticator = Authenticator.of(self._context)
        if authenticator is not None:
            authenticator.add_domain(JOIN_DOMAIN, TokenKeys(self._book))
        await self._router.start()
        self._tasks.start(self._serve(), name="serve")

    async def stop(self) -> None:
        try:
            await self._tasks.stop()
        finally:
            await self._router.stop()

    async def wait(self) -> None:
        """Until stopped; raises what crashed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tasks.wait())
            group.create_task(self._router.wait())

    def _take(self, peer: PeerId, message: Message) -> None:
        assert isinstance(message, Enrol)
        if len(self._waiting) >= WAITING_MAX:
            text = f"{WAITING_MAX} machines wait to enrol already; try again in a moment"
            self._refuse(peer, message, "busy", text)
            return
        self._waiting.append((peer, message))
        self._news.set()

    async def _serve(self) -> None:
        while True:
            while self._waiting:
                await self._answer(*self._waiting.popleft())
            await self._news.wait()

    async def _answer(self, peer: PeerId, message: Enrol) -> None:
        if message.protocol != PROTOCOL:
            text = (
                f"this coordinator speaks protocol {PROTOCOL}, that machine (echo2 "
                f"{message.echo2_version}) speaks {message.protocol}; install the same echo2 on "
                "both"
            )
            self._refuse(peer, message, "protocol", text)
            return
        token = id_of_connection(peer)
        try:
            admission = await asyncio.to_thread(
                self._book.enrol, token, message.public_key, wanted=message.name, now=time.time()
            )
        except EnrolmentRefusedError as refusal:
            self._refuse(peer, message, refusal.reason, str(refusal))
        except (Echo2Error, OSError) as error:  # a full disk ends no run for a newcomer's sake
            log.error("enrolment_failed", token=token, reason=str(error))
            text = f"the coordinator cannot write its allow-list now ({error}); try again later"
            self._refuse(peer, message, "unavailable", text)
        else:
            self._router.send(peer, self._offer(admission.name))
            if admission.is_new:
                fields = {"worker": admission.name, "token": token}
                self._on_event("worker_enrolled", {**fields, "public_key": message.public_key})

    def _refuse(self, peer: PeerId, message: Enrol, reason: str, text: str) -> None:
        self._refused[reason] += 1
        self._router.send(peer, EnrolRefused(reason=reason, text=text[:2048]))
        num_since = self._told.note(time.monotonic())
        if num_since:
            fields = {
                "token": id_of_connection(peer),
                "public_key": message.public_key,
                "reason": reason,
                "text": text,
                "num_since": num_since,
            }
            self._on_event("enrolment_refused", fields)

    def _on_malformed(self, peer: PeerId | None, error: ProtocolError) -> None:
        if num_since := self._told.note(time.monotonic()):
            log.warning(
                "message_refused",
                peer=peer,
                reason=error.reason,
                text=str(error),
                num_since=num_since,
            )
