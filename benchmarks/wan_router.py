"""A router in user space: delay, loss and downlink rates for hosts on TUN devices.

    Wan (its only user) starts it with one TUN descriptor per host; on stdin a JSON line with
    the links, then `cut NAME` or `mend NAME`; each is answered by a line. End of file ends it.

A packet from a to b is lost with probability 1 - (1 - loss_a)(1 - loss_b), arrives at b's
downlink after delay_a + delay_b, and leaves it at b's rate, behind what waits there; what
would wait for over QUEUE_S is dropped. The uplink's rate is a tbf on the host's device, which
holds the sender back as a network card does.

One core carries hundreds of megabits, since the kernel hands over (and takes) TCP segments in
bunches with a virtio header. A bunch that loses some of its segments is cut into what is left
of it, so loss strikes single packets of at most the MTU as on a wire.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import random
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

VNET_BYTES: Final = 10
VNET_HEADER: Final = struct.Struct("=BBHHHH")
"""flags, gso_type, hdr_len, gso_size, csum_start, csum_offset."""
PACKET_BYTES_MAX: Final = 1 << 17
QUEUE_S: Final = 0.1
BURST_BYTES: Final = 128 << 10
READS_MAX: Final = 64
NICENESS: Final = -10
"""A link does not slow down because the hosts' processors are busy."""
FIN, PSH, CWR = 0x01, 0x08, 0x80


@dataclass(slots=True, eq=False)
class Port:
    """A host's end. `free_at`: when its downlink will have sent all that it has taken."""

    name: str
    address: bytes
    fd: int
    delay_s: float
    loss: float
    down_bits_per_s: float
    is_cut: bool = False
    free_at: float = 0.0
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)


class Losses:
    """Which packets of a path are lost: gaps between losses are geometric, one draw each."""

    def __init__(self, share: float, rng: random.Random) -> None:
        self._share = share
        self._rng = rng
        self._gap = self._draw()

    def among(self, count: int) -> list[int]:
        """Indices of the lost ones among the next `count`."""
        lost = []
        at = self._gap
        while at < count:
            lost.append(at)
            at += 1 + self._draw()
        self._gap = at - count
        return lost

    def _draw(self) -> int:
        if self._share <= 0.0:
            return sys.maxsize >> 1
        if self._share >= 1.0:
            return 0
        return int(math.log(1.0 - self._rng.random()) / math.log1p(-self._share))


class Router:
    def __init__(self, ports: list[Port], *, seed: int) -> None:
        rng = random.Random(seed)
        self._ports = {port.name: port for port in ports}
        self._by_fd = {port.fd: port for port in ports}
        self._by_address = {port.address: port for port in ports}
        self._losses = {
            (a.fd, b.fd): Losses(1 - (1 - a.loss) * (1 - b.loss), rng) for a in ports for b in ports
        }
        self._travelling: list[tuple[float, int, Port, bytes, int]] = []
        """A heap: arrival at the downlink, a counter for order, whose, packet, bytes on wire."""
        self._count = 0
        self._queued: set[str] = set()
        """Names of ports where packets wait for the downlink."""

    def run(self) -> None:
        poll = select.epoll()
        for fd in (*self._by_fd, sys.stdin.fileno()):
            poll.register(fd, select.EPOLLIN)
        while True:
            now = time.monotonic()
            for fd, _ in poll.poll(self._timeout_s(now)):
                port = self._by_fd.get(fd)
                if port is not None:
                    self._read(port)
                elif not self._obey():
                    return
            self._advance(time.monotonic())

    def _timeout_s(self, now: float) -> float:
        """Until the next packet is due; -1 when none travels."""
        due = [self._ports[name].waiting[0][0] for name in self._queued]
        if self._travelling:
            due.append(self._travelling[0][0])
        return max(0.0, min(due) - now) if due else -1

    def _obey(self) -> bool:
        line = sys.stdin.readline()
        if not line:
            return False
        verb, _, name = line.strip().partition(" ")
        self._ports[name].is_cut = {"cut": True, "mend": False}[verb]
        print("done", flush=True)
        return True

    # ------------------------------------------------------------------- the way

    def _read(self, source: Port) -> None:
        for _ in range(READS_MAX):
            try:
                packet = os.read(source.fd, PACKET_BYTES_MAX)
            except BlockingIOError:
                return
            target = self._by_address.get(packet[VNET_BYTES + 16 : VNET_BYTES + 20])
            if target is None or source.is_cut or packet[VNET_BYTES] >> 4 != 4:
                continue
            count, header_bytes = segments(packet)
            lost = self._losses[source.fd, target.fd].among(count)
            arrival = time.monotonic() + source.delay_s + target.delay_s
            for left, num in split(packet, lost, count) if lost else ((packet, count),):
                self._count += 1
                wire = len(left) - VNET_BYTES + (num - 1) * header_bytes
                heapq.heappush(self._travelling, (arrival, self._count, target, left, wire))

    def _advance(self, now: float) -> None:
        """Whatever is due: into the downlink, out of the downlink."""
        while self._travelling and self._travelling[0][0] <= now:
            arrival, _, target, packet, wire = heapq.heappop(self._travelling)
            self._arrive(target, packet, wire, arrival)
        for name in tuple(self._queued):
            port = self._ports[name]
            while port.waiting and port.waiting[0][0] <= now:
                _write(port, port.waiting.popleft()[1])
            if not port.waiting:
                self._queued.discard(name)

    def _arrive(self, target: Port, packet: bytes, wire: int, arrival: float) -> None:
        bits_per_s = target.down_bits_per_s
        begin = max(target.free_at, arrival - BURST_BYTES * 8 / bits_per_s)
        if begin - arrival > QUEUE_S:
            return
        target.free_at = begin + wire * 8 / bits_per_s
        target.waiting.append((target.free_at, packet))
        self._queued.add(target.name)


def _write(port: Port, packet: bytes) -> None:
    if not port.is_cut:
        with contextlib.suppress(OSError):  # the host's device is down: the packet is lost
            os.write(port.fd, packet)


# -------------------------------------------------------------------- bunches of segments


def segments(packet: bytes) -> tuple[int, int]:
    """How many packets the wire would see, and the bytes of the headers of each."""
    _, gso_type, _, size, _, _ = VNET_HEADER.unpack_from(packet)
    if not gso_type or not size:
        return 1, 0
    header_bytes = _header_bytes(packet)
    return max(1, -((VNET_BYTES + header_bytes - len(packet)) // size)), header_bytes


def split(packet: bytes, lost: list[int], count: int) -> Iterator[tuple[bytes, int]]:
    """What is left without the `lost` of `count` segments: bunches, and segments in each."""
    begin = 0
    for end in (*lost, count):
        if end > begin:
            yield (_part(packet, begin, end, count) if count > 1 else packet), end - begin
        begin = end + 1


def _header_bytes(packet: bytes) -> int:
    ip_bytes = (packet[VNET_BYTES] & 15) * 4
    tcp_bytes = (packet[VNET_BYTES + ip_bytes + 12] >> 4) * 4
    return ip_bytes + tcp_bytes


def _part(packet: bytes, begin: int, end: int, count: int) -> bytes:
    """Segments [begin, end) of a bunch of TCP segments over IPv4, with headers of its own.

    The TCP checksum stays partial (the sum of the pseudo header), as the kernel left it.
    """
    flags, gso_type, _, size, csum_start, csum_offset = VNET_HEADER.unpack_from(packet)
    header_bytes = _header_bytes(packet)
    start = VNET_BYTES + header_bytes
    body = packet[start + begin * size : start + end * size]
    if end - begin == 1:
        gso_type = size_left = 0
    else:
        size_left = size
    vnet = VNET_HEADER.pack(flags, gso_type, header_bytes, size_left, csum_start, csum_offset)
    head = bytearray(packet[VNET_BYTES:start])
    ip_bytes = (head[0] & 15) * 4
    identification = struct.unpack_from("!H", head, 4)[0] + begin
    struct.pack_into("!HH", head, 2, header_bytes + len(body), identification & 0xFFFF)
    struct.pack_into("!H", head, 10, 0)
    struct.pack_into("!H", head, 10, _sum16(head[:ip_bytes]) ^ 0xFFFF)
    sequence = struct.unpack_from("!I", head, ip_bytes + 4)[0] + begin * size
    struct.pack_into("!I", head, ip_bytes + 4, sequence & 0xFFFFFFFF)
    if end < count:
        head[ip_bytes + 13] &= ~(FIN | PSH) & 0xFF
    if begin:
        head[ip_bytes + 13] &= ~CWR & 0xFF
    pseudo = head[12:20] + struct.pack("!HH", 6, len(head) - ip_bytes + len(body))
    struct.pack_into("!H", head, ip_bytes + 16, _sum16(pseudo))
    return vnet + bytes(head) + body


def _sum16(content: bytes | bytearray) -> int:
    """The Internet checksum's sum (RFC 1071), not inverted; of an even number of bytes."""
    total: int = sum(struct.unpack(f"!{len(content) // 2}H", content))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def main() -> int:
    links: list[dict[str, Any]] = json.loads(sys.stdin.readline())
    ports = [
        Port(
            name=link["name"],
            address=bytes(map(int, link["address"].split("."))),
            fd=link["fd"],
            delay_s=link["delay_s"],
            loss=link["loss"],
            down_bits_per_s=link["down_mbit"] * 1e6,
        )
        for link in links
    ]
    with contextlib.suppress(PermissionError):  # else at the priority that it has
        os.nice(NICENESS)
    print("done", flush=True)
    Router(ports, seed=1).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
