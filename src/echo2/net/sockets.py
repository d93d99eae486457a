"""Every socket option of echo2, in one place, with its reason.

Sockets made here are encrypted and authenticated (CURVE, ZAP domain `ZAP_DOMAIN` or, for
enrolment, `JOIN_DOMAIN`), or bound and connected on loopback only: anything else is a
ConfigError. Each lane has limits of its own (`LANES`), so that no lane can fill another's memory.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, cast
from uuid import uuid4

import zmq
import zmq.asyncio

from echo2.errors import ConfigError
from echo2.messages import (
    HEADER_MAX_BYTES,
    JOIN_SETTINGS_MAX,
    MESSAGES,
    Lane,
    Role,
    frame_fields,
)
from echo2.net.peer_budget import BudgetLimits

if TYPE_CHECKING:
    from echo2.net.keys import KeyPair

ZAP_DOMAIN: Final = "echo2"
JOIN_DOMAIN: Final = "echo2-join"
"""Of the enrolment socket: what opens it opens no other, and nothing else opens it."""
ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"

LINGER_MS: Final = 1000
"""After a close, what was already handed over may leave for so long (a goodbye)."""
HANDSHAKE_MS: Final = 10_000
"""A connection that is not through its handshake by then is closed."""
CONNECT_MS: Final = 10_000
ACCEPT_BACKLOG: Final = 1024
"""A whole fleet may reconnect at once after a restart."""
CURVE_OVERHEAD_BYTES: Final = 256
"""Added to the largest frame: CURVE wraps each in a command of its own."""


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """`sent_max`, `received_max`: high-water marks of each connection, in messages that ZeroMQ
    has taken from us, or from the peer.
    `credit_bytes`: most bytes that wait for one peer before they are handed to ZeroMQ.
    `ping_ms`, `silence_ms`: ZeroMQ's own heartbeat, of the side that dials; 0: none. It can only
    pass between two messages, so lanes with long ones allow a longer silence: a slow upload is
    not a dead peer.
    `budget`: what a server of this lane reads of one peer (`net.peer_budget`)."""

    sent_max: int
    received_max: int
    credit_bytes: int
    ping_ms: int
    silence_ms: int
    budget: BudgetLimits


LANES: Final = {
    # Heartbeats, installs, reports: a few a second of an honest worker.
    Lane.CONTROL: LaneLimits(
        *(256, 256, 16 << 20),
        ping_ms=5_000,
        silence_ms=20_000,
        budget=BudgetLimits(per_s=64, burst=1024, taken=1, refused=16),
    ),
    # As many results as a worker makes: decoding them is a small part of what they cost, and one
    # worker may have a quarter of the loop's time for that alone.
    Lane.ROLLOUTS: LaneLimits(
        *(32, 32, 256 << 20),
        ping_ms=15_000,
        silence_ms=300_000,
        budget=BudgetLimits(per_s=250, burst=2000, taken=0, refused=25),
    ),
    # Few to send: what ZeroMQ has taken can neither be put in another order nor taken back.
    # No pings: whoever dials may be fed faster than it reads by a relay that then closes, and
    # the next ping would end its process (see `_socket`). Requests are bounded where they wait
    # (`weights.request_queue`), and chunks cost time that was asked for.
    Lane.CHUNKS: LaneLimits(
        *(8, 256, 96 << 20),
        ping_ms=0,
        silence_ms=120_000,
        budget=BudgetLimits(per_s=64, burst=1024, taken=0, refused=16, per_ms=0),
    ),
    Lane.ENROLMENT: LaneLimits(
        *(4, 4, 2 << 20),
        ping_ms=5_000,
        silence_ms=20_000,
        budget=BudgetLimits(per_s=16, burst=256, taken=1, refused=4),
    ),
}
_HEADER_MAX_BYTES: Final = {Lane.ENROLMENT: 4 * JOIN_SETTINGS_MAX + 4096}
"""Where it is less than HEADER_MAX_BYTES: a token is easier come by than a worker's key."""


def domain_of(lane: Lane) -> str:
    """The authentication domain of a lane's servers."""
    return JOIN_DOMAIN if lane is Lane.ENROLMENT else ZAP_DOMAIN


def make_context(*, io_threads: int = 1) -> zmq.asyncio.Context:
    """One per process. One I/O thread encrypts about 1 GB/s."""
    context = zmq.asyncio.Context(io_threads)
    context.set(zmq.MAX_SOCKETS, 4096)
    return context


async def close_context(context: zmq.asyncio.Context) -> None:
    """Close what is left open and end the context, off the event loop; at most LINGER_MS."""
    await asyncio.to_thread(context.destroy, LINGER_MS)


def router_socket(
    context: zmq.asyncio.Context, *, lane: Lane, role: Role, keys: KeyPair | None, bind: str
) -> zmq.Socket[bytes]:
    """A ROUTER for `bind`, not bound yet. Without `keys` only loopback is allowed."""
    check_endpoint(bind, encrypted=keys is not None)
    socket = _socket(context, zmq.ROUTER, lane=lane, role=role, endpoint=bind)
    # An unknown or full peer is an error to be counted instead of a silent loss.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.BACKLOG, ACCEPT_BACKLOG)
    if keys is None:
        # Names are routing ids here; a client that comes back takes its name over.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    else:
        # No handover: with it, any allowed peer could take over another's routing id.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, domain_of(lane).encode())
        # Without a handler CURVE would admit all who know the server's key.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
    return socket


def dealer_socket(
    context: zmq.asyncio.Context,
    *,
    lane: Lane,
    role: Role,
    keys: KeyPair | None,
    server_key: str,
    endpoint: str,
    name: str,
) -> zmq.Socket[bytes]:
    """A DEALER for one connection to `endpoint`, not connected yet. Without `keys` only
    loopback is allowed."""
    check_endpoint(endpoint, encrypted=keys is not None)
    socket = _socket(context, zmq.DEALER, lane=lane, role=role, endpoint=endpoint)
    # Nothing is handed over before the handshake is done, so nothing old waits in there.
    socket.setsockopt(zmq.IMMEDIATE, 1)
    # An empty first message: the router can reach us before we have anything to say.
    socket.setsockopt(zmq.PROBE_ROUTER, 1)
    # One socket is one connection: ZeroMQ never reconnects after a refused handshake or a
    # broken protocol, so `Dealer` dials again itself, for every cause alike.
    socket.setsockopt(zmq.RECONNECT_IVL, -1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    if keys is None:
        socket.setsockopt(zmq.ROUTING_ID, name.encode())
    else:
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    return socket


def zap_socket(context: zmq.asyncio.Context) -> zmq.Socket[bytes]:
    """A REP for the process's ZAP handler, not bound yet."""
    socket = _plain_socket(context, zmq.REP)
    socket.setsockopt(zmq.LINGER, 0)
    return socket


def monitor_socket(
    context: zmq.asyncio.Context, watched: zmq.Socket[bytes], *, events: int
) -> zmq.Socket[bytes]:
    """A PAIR that tells of `events` of `watched`. Call `watched.disable_monitor()` before
    either is closed."""
    endpoint = f"inproc://monitor-{uuid4().hex}"
    watched.monitor(endpoint, events)
    socket = _plain_socket(context, zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 0)
    # No mark: at one, the I/O thread of all sockets would block on a slow reader.
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(endpoint)
    return socket


@functools.cache
def frame_max_bytes(lane: Lane, receiver: Role) -> int:
    """The largest frame of any message that `receiver` gets on `lane`."""
    sizes = [_HEADER_MAX_BYTES.get(lane, HEADER_MAX_BYTES)]
    for cls in MESSAGES.values():
        if cls.LANE is lane and receiver in cls.RECEIVERS:
            sizes += [max_bytes for _, max_bytes in frame_fields(cls)]
    return max(sizes)


def split_endpoint(endpoint: str) -> tuple[str, str]:
    """(host, port) of "tcp://host:port"; an IPv6 host without its brackets."""
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not (port == "*" or port.isdecimal()):
        raise ConfigError(
            f'endpoint "{endpoint}" is not of the form tcp://HOST:PORT, for example '
            f"tcp://127.0.0.1:5700 or tcp://[::1]:5700"
        )
    return host.removeprefix("[").removesuffix("]"), port


def endpoint_of(host: str, port: int) -> str:
    """The form that `split_endpoint` reads."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def check_endpoint(endpoint: str, *, encrypted: bool) -> None:
    """Raises ConfigError for what is no endpoint, and for one that needs CURVE and lacks it."""
    split_endpoint(endpoint)
    if not encrypted and not is_loopback(endpoint):
        raise ConfigError(
            f'net.curve is false, and at "{endpoint}" others could read and forge every message; '
            f"without CURVE only loopback is allowed, for example tcp://127.0.0.1:0; set "
            f"net.curve = true"
        )


def is_loopback(endpoint: str) -> bool:
    """Whether only this machine can be at the other end of `endpoint`."""
    host, _ = split_endpoint(endpoint)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _socket(
    context: zmq.asyncio.Context, kind: int, *, lane: Lane, role: Role, endpoint: str
) -> zmq.Socket[bytes]:
    host, _ = split_endpoint(endpoint)
    limits = LANES[lane]
    socket = _plain_socket(context, kind)
    options = {
        zmq.LINGER: LINGER_MS,
        zmq.SNDHWM: limits.sent_max,
        zmq.RCVHWM: limits.received_max,
        zmq.MAXMSGSIZE: frame_max_bytes(lane, role) + CURVE_OVERHEAD_BYTES,
        zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
        # Of the side that dials only, which also tells the server how long it may be silent
        # (TTL). A server that pings can be ended by any peer: one that sends until the mark
        # above stops the input, and then closes, leaves a connection whose next ping fails an
        # assertion of libzmq (its issues 4364, 4841).
        zmq.HEARTBEAT_IVL: limits.ping_ms if kind == zmq.DEALER else 0,
        zmq.HEARTBEAT_TIMEOUT: limits.silence_ms,
        zmq.HEARTBEAT_TTL: limits.silence_ms,
        # A peer that vanished without a word (power, NAT) is noticed by the kernel too.
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: 30,
        zmq.TCP_KEEPALIVE_INTVL: 10,
        zmq.TCP_KEEPALIVE_CNT: 3,
        zmq.TCP_MAXRT: limits.silence_ms,
        zmq.IPV6: int(":" in host),
    }
    for option, value in options.items():
        socket.setsockopt(option, value)
    return socket


def _plain_socket(context: zmq.asyncio.Context, kind: int) -> zmq.Socket[bytes]:
    """Without zmq.asyncio's own watch on it: `Wakeups` is the one that looks."""
    plain = cast("zmq.Context[zmq.Socket[bytes]]", context)
    return plain.socket(kind, socket_class=zmq.Socket)
