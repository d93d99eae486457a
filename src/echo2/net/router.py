"""One server socket: verified peers' valid messages go in, replies find their way back.

Every message is checked before anyone sees it: its sender is the name of a key that is in
the allow-list now (User-Id of the message, never the routing id), and its content is a
message that this peer may send here. The rest is refused and counted by reason; no input
stops the router. A peer that costs more than its budget is not read (`net.peer_budget`), and
that is counted as "flood". `on_message` runs on the event loop and does not wait, and so does
`on_turn`, when all messages that came together were given; an exception out of them is our own
bug: it is logged, stops the router, and is raised by `wait` and `stop`.

One task owns the socket:

    receive a bounded number -> on_message each -> on_turn -> send as many -> yield -> again

so a flood from one peer delays the loop by one turn only. What is sent waits in a queue per
peer, bounded in bytes: a slow peer fills its own and no other. A peer that cannot be reached
loses its queue. A queued message may be lost with its connection: what must arrive is sent
until it is acknowledged, which is the senders' business. A peer whose key was revoked, or whose
name went to another key, is sent nothing from REFRESH_S later on, also while nothing comes in.

A peer can be reached as soon as its `Dealer` is connected, over the connection on which it
spoke last. When two connections of one key speak by turns (a key that was copied to two
daemons), it is logged once.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import structlog
import zmq
import zmq.asyncio

from echo2 import wire
from echo2.errors import ConfigError, LocalProtocolError, ProtocolError, RemoteProtocolError
from echo2.messages import Lane, Message, Role
from echo2.net.auth import KEY_PROPERTY, Authenticator
from echo2.net.keys import NAME_PATTERN, KeyList, KeyPair
from echo2.net.multipart import receive_frames, send_frames
from echo2.net.out_queue import OutQueue
from echo2.net.peer_budget import BudgetLimits, PeerBudgets
from echo2.net.sockets import (
    LANES,
    check_endpoint,
    domain_of,
    monitor_socket,
    router_socket,
    split_endpoint,
)
from echo2.net.tasks import OwnedTasks
from echo2.net.wakeups import Wakeups, is_ready
from echo2.types import PeerId

log = structlog.get_logger()

MESSAGES_PER_TURN: Final = 64
BYTES_PER_TURN: Final = 8 << 20
_TURN_S: Final = 0.0025
"""After so long a turn takes, or sends, no more: all else on the event loop waits for it."""
PEERS_MAX: Final = 65536
FLOOD: Final = "flood"
"""Why a message is refused that was not read: its peer's budget is used up."""
_SENT_PER_PEER_AND_TURN: Final = 16
_MONITOR: Final = 1
"""Its place among the sockets that are watched."""
_BROKEN_HANDSHAKES: Final = (
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
"""Who speaks no CURVE, and who breaks off before one can tell: often the same, seen sooner or
later. A key that is refused is the Authenticator's to count."""
_RETRY_S: Final = 0.25
REFRESH_S: Final = 0.25
"""So often the allow-list is looked at while nothing happens."""
_BIND_RETRY_S: Final = 0.05
_LOOKED_AT_S: Final = 1e-3


@dataclass(slots=True, eq=False)
class _Peer:
    route: bytes
    queue: OutQueue
    key: str
    route_before: bytes = b""


class Router:
    """The server's end of a lane.

    `on_peer` is told of each connection, as soon as the peer can be sent to, `on_gone` when a
    message to it could not be delivered, or it is not allowed any more, `on_room` when its
    queue got shorter.
    `client_roles` narrows what a peer may send to the messages of these roles; by default
    any role but our own. Without `keys` (loopback only) a peer is who it says it is.
    `credit_bytes`: most bytes that wait for one peer. `peers_max`: most peers that are known;
    one more is refused, or with `forgets_oldest` takes the place of the one that came first.
    `budget_of`: what is read of a peer; by default the lane's budget for every peer.
    Raises ConfigError for an address that is none, and without CURVE for one that is not
    loopback.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        lane: Lane,
        role: Role,
        bind: str,
        keys: KeyPair | None,
        on_message: Callable[[PeerId, Message], None],
        on_turn: Callable[[], None] | None = None,
        on_refused: Callable[[PeerId | None, ProtocolError], None] | None = None,
        on_peer: Callable[[PeerId], None] | None = None,
        on_gone: Callable[[PeerId], None] | None = None,
        on_room: Callable[[PeerId], None] | None = None,
        client_roles: Callable[[PeerId], frozenset[Role]] | None = None,
        credit_bytes: int | None = None,
        peers_max: int = PEERS_MAX,
        forgets_oldest: bool = False,
        budget_of: Callable[[PeerId], BudgetLimits] | None = None,
    ) -> None:
        self.endpoint = ""
        """Where it is bound, with the real port; "" before `start`."""
        self.refused: Counter[str] = Counter()
        """Messages that were refused, by reason."""
        self.counters: Counter[str] = Counter()
        """connections, received, sent, unknown_peer, no_credit, unreachable, dropped,
        handshake_failed."""
        check_endpoint(bind, encrypted=keys is not None)
        self._context = context
        self._lane = lane
        self._role = role
        self._bind = bind
        self._keys = keys
        self._on_message = on_message
        self._on_turn = on_turn
        self._on_refused = on_refused
        self._on_peer = on_peer
        self._on_gone = on_gone
        self._on_room = on_room
        others = frozenset(Role) - {role}
        self._client_roles = client_roles or (lambda peer: others)
        self._credit_bytes = LANES[lane].credit_bytes if credit_bytes is None else credit_bytes
        self._peers_max = peers_max
        self._forgets_oldest = forgets_oldest
        budget = LANES[lane].budget
        self._budgets = PeerBudgets(budget_of or (lambda peer: budget))
        self._peers: dict[PeerId, _Peer] = {}
        self._queued: dict[PeerId, None] = {}  # who has a queue, in the order of service
        self._twins: set[PeerId] = set()
        self._last: tuple[Message, list[bytes]] | None = None
        self._allow_list: KeyList | None = None
        self._generation = 0
        self._turn_began_s = 0.0
        self._tasks = OwnedTasks(f"router.{lane}")
        self._serving: asyncio.Task[None] | None = None
        self._wakeups: Wakeups | None = None
        self._sockets: tuple[zmq.Socket[bytes], zmq.Socket[bytes]] | None = None
        self._stopping = False

    async def start(self, *, bind_timeout_s: float = 2.0) -> None:
        """Bind and serve. A port that a process just left is tried for `bind_timeout_s`.

        Raises ConfigError when the address cannot be bound, LocalProtocolError when no
        Authenticator runs yet.
        """
        if self._keys is not None:
            authenticator = Authenticator.of(self._context)
            if authenticator is None:
                raise LocalProtocolError(
                    f"no Authenticator runs on this context; start it before the {self._lane} "
                    f"router binds"
                )
            self._allow_list = authenticator.keys_of(domain_of(self._lane))
        socket = router_socket(
            self._context, lane=self._lane, role=self._role, keys=self._keys, bind=self._bind
        )
        monitor = monitor_socket(self._context, socket, events=_BROKEN_HANDSHAKES)
        self._sockets = (socket, monitor)
        try:
            self.endpoint = await self._bind_socket(socket, bind_timeout_s)
        except BaseException:  # also when it is cancelled: no socket is left behind
            self._close()
            raise
        self._wakeups = Wakeups(socket, monitor)
        run = self._run(socket, monitor, self._wakeups)
        self._serving = self._tasks.start(run, name="serve")

    async def stop(self, *, flush_s: float = 1.0) -> None:
        """Send what is queued, for at most `flush_s`, and close. Raises what stopped the
        router before, unless `wait` did."""
        self._stopping = True
        if self._serving is not None and self._wakeups is not None:
            self._wakeups.set()
            await asyncio.wait({self._serving}, timeout=flush_s)
        try:
            await self._tasks.stop()
        finally:
            self._close()

    async def wait(self) -> None:
        """Until stopped; raises what stopped it (an exception out of `on_message`). Its
        owner awaits this."""
        await self._tasks.wait()

    def send(self, peer: PeerId, message: Message, *, urgent: bool = False) -> bool:
        """Queue `message`. False, and counted: the peer is not known or not allowed any
        more, or its credit is used up. One message is always accepted into an empty queue.
        An `urgent` one, which must be small, goes before all others (`OutQueue`).

        Raises LocalProtocolError when the message is not one of ours to send.
        """
        if message.LANE is not self._lane or self._role not in message.SENDERS:
            raise LocalProtocolError(
                f"{type(message).__name__} is not sent by {self._role} on lane {self._lane}"
            )
        state = self._peers.get(peer)
        if state is None:
            self.counters["unknown_peer"] += 1
            return False
        if not state.queue.add(self._encoded(message), urgent=urgent):
            self.counters["no_credit"] += 1
            return False
        self._queued[peer] = None
        if self._wakeups is not None:
            self._wakeups.set()
        return True

    def _encoded(self, message: Message) -> list[bytes]:
        """The same message is often for many peers, one after the other."""
        if self._last is None or self._last[0] is not message:
            self._last = message, wire.encode(message)
        return self._last[1]

    def charge_refusal(self, peer: PeerId) -> None:
        """What the peer sent was a message, and was refused all the same: that costs it as much
        as one that was none."""
        self._charge(peer, 0.0, refused=True)

    def credit(self, peer: PeerId) -> int:
        """Bytes that may be queued for `peer` now; 0 if it is not known."""
        state = self._peers.get(peer)
        return 0 if state is None else state.queue.credit

    def knows(self, peer: PeerId) -> bool:
        """Whether it can be sent to, as far as known."""
        return peer in self._peers

    def forget(self, peer: PeerId) -> None:
        """It has left: nothing is kept for it any more. If it speaks again, it is known again."""
        if peer in self._peers:
            self._forget(peer)

    def peers(self) -> tuple[PeerId, ...]:
        """Those that can be sent to, as far as known."""
        return tuple(self._peers)

    async def _run(
        self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], wakeups: Wakeups
    ) -> None:
        try:
            while True:
                self._forget_revoked()
                can_receive = not self._stopping and self._receive_turn(socket)
                if self._on_turn is not None:
                    self._on_turn()
                num_sent = 0
                if self._queued:
                    num_sent = self._send_turn(socket)
                    # A send may have swallowed news.
                    can_receive = is_ready(socket) and not self._stopping
                if wakeups.fired(_MONITOR):
                    self._count_failed_handshakes(monitor)
                if self._stopping and not self._queued:
                    return
                if can_receive or (num_sent and self._queued):
                    await asyncio.sleep(0)
                else:
                    # Whose pipe has room again cannot be asked of a ROUTER, but its descriptor
                    # tells; what is queued is looked at now and then all the same.
                    await wakeups.wait(self._patience_s())
        finally:
            self._close()

    def _patience_s(self) -> float | None:
        if self._queued:
            return _RETRY_S
        return None if self._allow_list is None else REFRESH_S

    def _close(self) -> None:
        """Also when `_run` was cancelled before its first step."""
        if self._wakeups is not None:
            self._wakeups.close()
            self._wakeups = None
        if self._sockets is not None:
            socket, monitor = self._sockets
            self._sockets = None
            socket.disable_monitor()
            monitor.close()
            socket.close()

    async def _bind_socket(self, socket: zmq.Socket[bytes], timeout_s: float) -> str:
        host, port = split_endpoint(self._bind)
        address = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        wanted = f"{address}:{'*' if port == '0' else port}"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            try:
                socket.bind(wanted)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE or loop.time() > deadline:
                    raise ConfigError(
                        f"the {self._lane} socket cannot listen on {self._bind}: "
                        f"{zmq.strerror(error.errno or 0)}; choose an address of this machine and "
                        f"a free port (0: any free port)"
                    ) from error
                await asyncio.sleep(_BIND_RETRY_S)
            else:
                return socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def _receive_turn(self, socket: zmq.Socket[bytes]) -> bool:
        """Take in what is there, up to a bound; whether there may be more."""
        num_messages = num_bytes = 0
        self._turn_began_s = time.thread_time()
        until_s = time.monotonic() + _TURN_S
        while num_messages < MESSAGES_PER_TURN and num_bytes < BYTES_PER_TURN:
            if num_messages and time.monotonic() > until_s:
                break
            try:
                frames = receive_frames(socket)
            except zmq.Again:
                return is_ready(socket)
            num_messages += 1
            num_bytes += sum(map(len, frames))
            self._take(frames)
        return True

    def _take(self, frames: list[zmq.Frame]) -> None:
        route, *parts = frames
        peer = None
        began_s = time.perf_counter()
        try:
            peer, key = self._identify(route, parts[0])
            if len(parts) == 1 and not len(parts[0]):
                self._learn_route(peer, key, route.bytes)  # a Dealer connected (PROBE_ROUTER)
                self.counters["connections"] += 1
                return
            self._check_budget(peer)
            message = wire.decode(
                [part.buffer for part in parts],
                lane=self._lane,
                sender=self._client_roles(peer),
                receiver=self._role,
            )
            self._learn_route(peer, key, route.bytes)
            self._charge(peer, self._spent_s(began_s), refused=False)
        except RemoteProtocolError as error:
            self.refused[error.reason] += 1
            if peer is not None and error.reason != FLOOD:
                self._charge(peer, self._spent_s(began_s), refused=True)
            if self._on_refused is not None:
                self._on_refused(peer, error)
            return
        self.counters["received"] += 1
        try:
            self._on_message(peer, message)
        except Exception as error:  # whatever it is, it goes on, and says by whose message
            error.add_note(f"while {peer}'s {type(message).__name__} was handled")
            raise

    def _check_budget(self, peer: PeerId) -> None:
        if not self._budgets.allows(peer, time.monotonic()):
            limits = self._budgets.limits_of(peer)
            raise RemoteProtocolError(
                f"{peer} sends more on the {self._lane} lane than is read of one peer (a burst of "
                f"{limits.burst:g} units, then {limits.per_s:g} a second; a refused message costs "
                f"{limits.refused:g}); this one was dropped",
                reason=FLOOD,
            )

    def _spent_s(self, began_s: float) -> float:
        """What a message took since `began_s`. The processor's time counts, since other processes
        are not the peer's doing; but to ask for it takes a tenth of what a group takes, so that it
        is asked for only where much time went by: then that of the turn until now, at most."""
        spent_s = time.perf_counter() - began_s
        if spent_s > _LOOKED_AT_S:
            spent_s = min(spent_s, time.thread_time() - self._turn_began_s)
        return spent_s

    def _charge(self, peer: PeerId, seconds: float, *, refused: bool) -> None:
        self._budgets.charge(peer, time.monotonic(), refused=refused, seconds=seconds)

    def _identify(self, route: zmq.Frame, part: zmq.Frame) -> tuple[PeerId, str]:
        """(who sent it, with which verified key); "" for the key without CURVE."""
        if self._allow_list is None:
            name = route.bytes.decode(errors="replace")
            if not NAME_PATTERN.fullmatch(name):
                raise RemoteProtocolError(
                    "a peer without a name connected; a Dealer names itself when CURVE is off",
                    reason="unauthenticated",
                )
            return PeerId(name), ""
        try:
            name, key = str(part.get("User-Id")), str(part.get(KEY_PROPERTY))
        except zmq.ZMQError:
            raise RemoteProtocolError(
                "a message without a verified key came", reason="unauthenticated"
            ) from None
        if not self._allow_list.holds(name, key):
            raise RemoteProtocolError(
                f"{name} sent a message, but its key is not in the allow-list any more",
                reason="revoked",
            )
        return PeerId(name), key

    def _learn_route(self, peer: PeerId, key: str, route: bytes) -> None:
        state = self._peers.get(peer)
        if state is None:
            self._make_room(peer)
            self._peers[peer] = _Peer(route, OutQueue(self._credit_bytes), key)
            self._tell_of(peer)
            return
        state.key = key
        if state.route != route:
            if state.route_before == route and peer not in self._twins:
                self._twins.add(peer)
                log.warning("connections_alternated", peer=peer, lane=self._lane)
            state.route_before, state.route = state.route, route
            self._drop_queue(peer, state)
            self._tell_of(peer)

    def _make_room(self, peer: PeerId) -> None:
        if len(self._peers) < self._peers_max:
            return
        if not self._forgets_oldest:
            raise RemoteProtocolError(
                f"{peer} is one peer too many; at most {self._peers_max} are served",
                reason="too_many_peers",
            )
        self._forget(next(iter(self._peers)))

    def _tell_of(self, peer: PeerId) -> None:
        if self._on_peer is not None:
            self._on_peer(peer)

    def _forget_revoked(self) -> None:
        if self._allow_list is None:
            return
        self._allow_list.refresh()
        if self._generation != self._allow_list.generation:
            self._generation = self._allow_list.generation
            for peer, state in list(self._peers.items()):
                if not self._allow_list.holds(peer, state.key):
                    self._forget(peer)

    def _send_turn(self, socket: zmq.Socket[bytes]) -> int:
        num_messages = num_bytes = 0
        until_s = time.monotonic() + _TURN_S
        for peer in list(self._queued):
            if num_messages >= MESSAGES_PER_TURN or num_bytes >= BYTES_PER_TURN:
                break
            if num_messages and time.monotonic() > until_s:
                break
            state = self._peers[peer]
            sent, sent_bytes = self._send_some(socket, peer, state)
            num_messages += sent
            num_bytes += sent_bytes
            self._queued.pop(peer, None)
            if state.queue:
                self._queued[peer] = None  # to the end of the line
        return num_messages

    def _send_some(self, socket: zmq.Socket[bytes], peer: PeerId, state: _Peer) -> tuple[int, int]:
        """(messages, bytes) that were sent."""
        num_messages = num_bytes = 0
        while state.queue and num_messages < _SENT_PER_PEER_AND_TURN:
            try:
                send_frames(socket, [state.route, *state.queue.first()])
            except zmq.Again:
                break  # its pipe is full
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                self.counters["unreachable"] += 1
                self._forget(peer)
                break
            num_bytes += state.queue.pop()
            num_messages += 1
        self.counters["sent"] += num_messages
        if num_messages and self._on_room is not None:
            self._on_room(peer)
        return num_messages, num_bytes

    def _forget(self, peer: PeerId) -> None:
        self._drop_queue(peer, self._peers.pop(peer))
        self._twins.discard(peer)
        if self._on_gone is not None:
            self._on_gone(peer)

    def _drop_queue(self, peer: PeerId, state: _Peer) -> None:
        self.counters["dropped"] += len(state.queue)
        state.queue.clear()
        self._queued.pop(peer, None)
        if self._on_room is not None:
            self._on_room(peer)

    def _count_failed_handshakes(self, monitor: zmq.Socket[bytes]) -> None:
        while True:
            try:
                monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.counters["handshake_failed"] += 1
