"""One client connection: it comes back by itself, and says why it is not there.

    connecting -> connected -> connecting (lost) -> ...
        '-> refused (the server does not know our key) -> connecting -> ...

Each connection has a socket of its own. ZeroMQ gives up for good after a refused handshake
and goes on silently after a lost one; here both are seen through the socket's monitor, and
the next dial follows after a growing, jittered wait. Nothing of an old connection leaks into
the next: `greeting` is the first message of each.

What is sent waits in a queue bounded in bytes, also while there is no connection. A message
that was handed to a connection may be lost with it: what must arrive is sent until it is
acknowledged. What comes in is checked as in `Router`; the rest is dropped and counted. When
nobody calls `receive`, at most `INBOX_MAX` messages are taken in and then the server is
made to wait.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

import structlog
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from echo2 import wire
from echo2.errors import (
    LocalProtocolError,
    RefusedError,
    RemoteProtocolError,
    WaitTimeoutError,
)
from echo2.messages import Lane, Message, Role
from echo2.net.keys import KeyPair, check_name, check_public_key
from echo2.net.multipart import receive_frames, send_frames
from echo2.net.out_queue import OutQueue
from echo2.net.rate_limit import RateLimit
from echo2.net.sockets import LANES, check_endpoint, dealer_socket, monitor_socket
from echo2.net.tasks import Backoff, OwnedTasks
from echo2.net.wakeups import POLLIN, POLLOUT, Wakeups, is_ready

log = structlog.get_logger()

INBOX_MAX: Final = 64
_LOGGED_BURST: Final = 100
_LOGGED_INTERVAL_S: Final = 1.0
"""Messages that are refused are all counted, and logged as often as this."""
_SENT_PER_TURN: Final = 16
_MONITOR: Final = 1
"""Its place among the sockets that are watched."""
_REDIAL_BASE_S: Final = 0.1
_REDIAL_MAX_S: Final = 3.0

_EVENTS: Final = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
)


class Connection(enum.StrEnum):
    """State of a dealer's connection."""

    CONNECTING = "connecting"
    CONNECTED = "connected"
    REFUSED = "refused"


class Dealer:
    """A client's end of a lane.

    `name` is ours, for logs; it is our identity only when CURVE is off (`keys` None, loopback
    only). `greeting` makes the first message of each connection. `on_state(state, reason)` is
    called on the event loop at each change, `on_room` when the queue got shorter. With
    `on_message`, each message goes there at once, and there is nothing to `receive`; an
    exception out of it breaks the dealer.
    `queue_bytes`: most bytes that wait to be sent.
    Raises ConfigError for an endpoint or a server key that is none, and without CURVE for a
    name that is none or an endpoint that is not loopback.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        lane: Lane,
        role: Role,
        endpoint: str,
        server_key: str,
        keys: KeyPair | None,
        name: str,
        server_role: Role | None = None,
        greeting: Callable[[], Message] | None = None,
        on_state: Callable[[Connection, str], None] | None = None,
        on_room: Callable[[], None] | None = None,
        on_message: Callable[[Message], None] | None = None,
        queue_bytes: int | None = None,
        rng: random.Random | None = None,
    ) -> None:
        check_endpoint(endpoint, encrypted=keys is not None)
        if keys is not None:
            check_public_key(server_key, owner=f"the server at {endpoint}")
        else:
            check_name(name)
        self.state = Connection.CONNECTING
        self.reason = "not started"
        """Why it is not connected, for a person; "" while it is."""
        self.refused: Counter[str] = Counter()
        """Messages from the server that were dropped, by reason."""
        self.counters: Counter[str] = Counter()
        """received, sent, no_credit, connections."""
        self._context = context
        self._lane = lane
        self._role = role
        self._endpoint = endpoint
        self._server_key = server_key
        self._keys = keys
        self._name = name
        default = Role.ORIGIN if lane is Lane.CHUNKS else Role.COORDINATOR
        self._server_role = server_role or default
        self._greeting = greeting
        self._on_state = on_state
        self._on_room = on_room
        self._on_message = on_message
        self._backoff = Backoff(rng or random.Random(), base_s=_REDIAL_BASE_S, max_s=_REDIAL_MAX_S)
        self._queue = OutQueue(LANES[lane].credit_bytes if queue_bytes is None else queue_bytes)
        self._inbox: deque[Message] = deque()
        self._arrived = asyncio.Event()
        self._changed = asyncio.Event()
        self._tasks = OwnedTasks(f"dealer.{lane}")
        self._dialing: asyncio.Task[None] | None = None
        self._wakeups: Wakeups | None = None
        self._refusal_is_new = False
        self._logged = RateLimit(_LOGGED_BURST, _LOGGED_INTERVAL_S)
        self._stopping = False

    async def start(self) -> None:
        """Begin to dial."""
        self._set_state(Connection.CONNECTING, f"dialing {self._endpoint}")
        self._dialing = self._tasks.start(self._run(), name="dial")
        self._dialing.add_done_callback(lambda _: self._arrived.set())
        self._dialing.add_done_callback(lambda _: self._changed.set())

    async def stop(self, *, flush_s: float = 1.0) -> None:
        """Send what is queued if there is a connection, for at most `flush_s`, and close."""
        self._stopping = True
        if self._dialing is not None and self.state is Connection.CONNECTED:
            if self._wakeups is not None:
                self._wakeups.set()
            await asyncio.wait({self._dialing}, timeout=flush_s)
        await self._tasks.stop()

    async def wait(self) -> None:
        """Until stopped; raises what broke the dealer (`receive` does so too)."""
        await self._tasks.wait()

    async def wait_connected(self, timeout_s: float) -> None:
        """Return when connected. Raises RefusedError as soon as the server refuses our key
        (once for each refusal: dialing goes on, so one may wait again), WaitTimeoutError with
        the cause after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.state is not Connection.CONNECTED:
                    if self._refusal_is_new:
                        self._refusal_is_new = False
                        raise RefusedError(self.reason)
                    self._check_alive()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise WaitTimeoutError(
                f"no connection for the {self._lane} lane after {timeout_s:g} s: {self.reason}"
            ) from None

    def send(self, message: Message, *, urgent: bool = False) -> bool:
        """Queue `message`, connected or not. False, and counted: the queue is full. One
        message is always accepted into an empty queue.

        An `urgent` one, which must be small, goes before all others (`OutQueue`).

        Whoever sends periodically (heartbeats) looks at `state` first, or else the queue
        fills while the server is away.
        """
        if message.LANE is not self._lane or self._role not in message.SENDERS:
            raise LocalProtocolError(
                f"{type(message).__name__} is not sent by {self._role} on lane {self._lane}"
            )
        if not self._queue.add(wire.encode(message), urgent=urgent):
            self.counters["no_credit"] += 1
            return False
        self._wake()
        return True

    @property
    def credit(self) -> int:
        """Bytes that may be queued now."""
        return self._queue.credit

    async def receive(self) -> Message:
        """The next valid message of the server. For one task; may be cancelled without loss."""
        while not self._inbox:
            self._check_alive()
            self._arrived.clear()
            await self._arrived.wait()
        if len(self._inbox) >= INBOX_MAX:
            self._wake()
        return self._inbox.popleft()

    def _check_alive(self) -> None:
        if self._tasks.crash is not None:
            raise self._tasks.crash
        if self._dialing is None or self._dialing.done():
            raise LocalProtocolError(f"the {self._lane} dealer of {self._name} is not running")

    def _wake(self) -> None:
        if self._wakeups is not None:
            self._wakeups.set()

    def _set_state(self, state: Connection, reason: str) -> None:
        if (state, reason) == (self.state, self.reason):
            return
        self.state, self.reason = state, reason
        self._changed.set()
        log.debug("connection_changed", lane=self._lane, state=state, reason=reason)
        if self._on_state is not None:
            self._on_state(state, reason)

    async def _run(self) -> None:
        while not self._stopping:
            await self._connection()
            if not self._stopping:
                await asyncio.sleep(self._backoff.next_s())

    async def _connection(self) -> None:
        """From one dial to the end of its connection."""
        socket = dealer_socket(
            self._context,
            lane=self._lane,
            role=self._role,
            keys=self._keys,
            server_key=self._server_key,
            endpoint=self._endpoint,
            name=self._name,
        )
        monitor = monitor_socket(self._context, socket, events=_EVENTS)
        wakeups = self._wakeups = Wakeups(socket, monitor)
        ended = False
        try:
            socket.connect(self._endpoint)
            while True:
                if wakeups.fired(_MONITOR):
                    ended = self._read_monitor(monitor) or ended
                has_more = self._receive_turn(socket)
                if self._queue and not ended and self.state is Connection.CONNECTED:
                    self._send_turn(socket)
                    has_more = self._can_work(socket)  # a send may have swallowed news
                if has_more:
                    await asyncio.sleep(0)
                    continue
                is_flushed = self._stopping and not self._queue
                if is_flushed or (ended and not is_ready(socket)):
                    return
                await wakeups.wait()
        finally:
            self._wakeups = None
            wakeups.close()
            socket.disable_monitor()
            monitor.close()
            socket.close(linger=0 if ended else None)

    def _can_work(self, socket: zmq.Socket[bytes]) -> bool:
        """Whether the socket is ready for what we would do with it."""
        flags = POLLIN if len(self._inbox) < INBOX_MAX else 0
        return is_ready(socket, flags | POLLOUT if self._queue else flags)

    def _read_monitor(self, monitor: zmq.Socket[bytes]) -> bool:
        """Follow the connection's state; whether it ended."""
        ended = False
        while True:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return ended
            ended = self._note_event(event["event"]) or ended

    def _note_event(self, event: int) -> bool:
        at = f"the server at {self._endpoint}"
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._backoff.reset()
            self.counters["connections"] += 1
            self._refusal_is_new = False
            self._set_state(Connection.CONNECTED, "")
            if self._greeting is not None:
                self._queue.add_first(wire.encode(self._greeting()))
            return False
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self._refusal_is_new = True
            self._changed.set()
            key = "" if self._keys is None else self._keys.public
            self._set_state(
                Connection.REFUSED,
                f"{at} refused our key: {key} of {self._name} is not in its allow-list; have it "
                f"authorized there",
            )
            return True
        is_broken_off = event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL or (is_broken_off and self._keys is None):
            self._set_state(
                Connection.CONNECTING,
                f"{at} does not speak our protocol; is that its port, and is net.curve the same "
                f"on both sides?",
            )
            return True
        if is_broken_off:
            self._set_state(
                Connection.CONNECTING,
                f"{at} broke the handshake off; is the server's public key right?",
            )
            return True
        if event == zmq.EVENT_CLOSED:
            self._set_state(
                Connection.CONNECTING,
                f"nothing answers at {self._endpoint}; does the server run there, and can this "
                f"machine reach it?",
            )
        elif self.state is Connection.CONNECTED:  # EVENT_DISCONNECTED; a failure before says more
            self._set_state(Connection.CONNECTING, f"the connection to {at} was lost")
        return True

    def _receive_turn(self, socket: zmq.Socket[bytes]) -> bool:
        """Take in what is there; whether there is, or may be, more that we would take."""
        for _ in range(INBOX_MAX):
            if not is_ready(socket) or len(self._inbox) >= INBOX_MAX:
                return False
            frames = receive_frames(socket)
            try:
                message = wire.decode(
                    [frame.buffer for frame in frames],
                    lane=self._lane,
                    sender=self._server_role,
                    receiver=self._role,
                )
            except RemoteProtocolError as error:
                self.refused[error.reason] += 1
                self._log_refused(error)
                continue
            self.counters["received"] += 1
            if self._on_message is not None:
                self._on_message(message)
            else:
                self._inbox.append(message)
                self._arrived.set()
        return True

    def _log_refused(self, error: RemoteProtocolError) -> None:
        if num_since := self._logged.note(time.monotonic()):
            log.warning(
                "message_refused",
                lane=self._lane,
                server=self._endpoint,
                reason=error.reason,
                text=str(error),
                num_since=num_since,
            )

    def _send_turn(self, socket: zmq.Socket[bytes]) -> None:
        num_messages = 0
        while self._queue and num_messages < _SENT_PER_TURN:
            try:
                send_frames(socket, self._queue.first())
            except zmq.Again:
                break
            self._queue.pop()
            num_messages += 1
        self.counters["sent"] += num_messages
        if num_messages and self._on_room is not None:
            self._on_room()
