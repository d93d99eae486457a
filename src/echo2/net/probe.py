"""Does a ZeroMQ socket of somebody else accept connections? Asked without being a peer of it.

A ZMTP peer greets whoever connects with the byte 0xFF (RFC 23, "Signature"), before it knows
who that is. So a plain TCP connection that reads it has shown that the address is reached and
that something speaks ZMTP there; not whose it is: that is for the CURVE handshake of those who
connect in earnest.
"""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from typing import Final

PROBE_S: Final = 3.0
ZMTP_SIGNATURE: Final = 0xFF


@dataclass(frozen=True, slots=True)
class Probe:
    """`rtt_s`: how long the connection took to be made; None, with the reason, unless `ok`."""

    ok: bool
    rtt_s: float | None
    reason: str = ""


async def probe_endpoint(endpoint: str, *, timeout_s: float = PROBE_S) -> Probe:
    """Connect to "tcp://HOST:PORT" and read the first byte, within `timeout_s` in all."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(timeout_s):
            return await _probe(host.strip("[]"), int(port))
    except TimeoutError:
        return Probe(False, None, f"{endpoint} did not greet within {timeout_s:g} s")
    except OSError as error:
        return Probe(False, None, f"{endpoint} was not reached: {error.strerror or error}")
    except ValueError as error:  # a host name or a port that the system cannot write down
        return Probe(False, None, f"{endpoint} is no address: {error}")


async def _probe(host: str, port: int) -> Probe:
    """The name is looked up first: its time is no part of a round trip."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    began = time.monotonic()
    reader, writer = await asyncio.open_connection(*found[0][4][:2])
    rtt_s = time.monotonic() - began
    try:
        first = await reader.read(1)
    finally:
        writer.close()
    if not first:
        return Probe(False, None, f"{host}:{port} closed the connection without a greeting")
    if first[0] != ZMTP_SIGNATURE:
        return Probe(False, None, f"what listens at {host}:{port} speaks no ZMTP")
    return Probe(True, rtt_s)
