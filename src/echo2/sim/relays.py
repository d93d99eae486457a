"""Plays a relay plan chunk by chunk: an independent check of what the planner predicts.

A discrete-event model that shares nothing with the planner but the plan and the rule of
`stripes`. Each child keeps a window of requests pending at its parent in each tree; a parent
answers a request once it has the chunk whole. An uplink sends one chunk at a time at full
rate, the bytes reach the child half a round trip later and pass its downlink in turn, and the
chunk is there with its last byte. What the model leaves out: hashing, TCP's ramp and loss,
headers, and competition from other lanes.

`Service` is what a parent sends next among the requests that it can answer: the lowest chunk
(what plans assume) or the children in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum
from heapq import heapify, heappop, heappush
from math import ceil

from echo2.core.dissemination import Host, RelayPlan, edge_rtt_s, stripes

SPARE_CHUNKS = 4


class Service(Enum):
    """Which pending request a parent answers first."""

    CHUNK_ORDER = "chunk_order"
    ROUND_ROBIN = "round_robin"


def relay_arrivals_s(
    plan: RelayPlan,
    origin: Host,
    workers: Sequence[Host],
    *,
    num_bytes: int,
    chunk_bytes: int,
    service: Service = Service.CHUNK_ORDER,
    window_chunks: int | None = None,
) -> Mapping[str, float]:
    """When each worker has its last chunk, in seconds from the first byte that the origin sends.

    `window_chunks` requests of each child in each tree are at its parent from the start; None
    takes three times what the planned rate has under way in a round trip, and four.
    """
    if not plan.trees:
        return {}
    return _Play(
        plan, [origin, *workers], num_bytes, chunk_bytes, service, window_chunks
    ).arrivals_s()


class _Sender:
    """A host's uplink and the requests that it can answer now."""

    def __init__(self, service: Service) -> None:
        self.free_s = 0.0
        self.busy = False
        self._service = service
        self._by_chunk: list[tuple[int, int, str]] = []
        self._turns: deque[str] = deque()
        self._of_child: dict[str, list[int]] = {}
        self._count = 0

    def add(self, chunk: int, child: str) -> None:
        if self._service is Service.CHUNK_ORDER:
            self._count += 1
            heappush(self._by_chunk, (chunk, self._count, child))
            return
        queue = self._of_child.setdefault(child, [])
        if not queue:
            self._turns.append(child)
        heappush(queue, chunk)

    def next(self) -> tuple[int, str] | None:
        if self._service is Service.CHUNK_ORDER:
            if not self._by_chunk:
                return None
            chunk, _, child = heappop(self._by_chunk)
            return chunk, child
        if not self._turns:
            return None
        child = self._turns.popleft()
        chunk = heappop(self._of_child[child])
        if self._of_child[child]:
            self._turns.append(child)
        return chunk, child


class _Play:
    def __init__(
        self,
        plan: RelayPlan,
        hosts: Sequence[Host],
        num_bytes: int,
        chunk_bytes: int,
        service: Service,
        window_chunks: int | None,
    ) -> None:
        self._hosts = {host.name: host for host in hosts}
        self._origin = hosts[0].name
        num_chunks = -(-num_bytes // chunk_bytes)
        self._chunk_mbit = num_bytes * 8 / 1e6 / num_chunks
        self._tree_of = stripes(num_chunks, [tree.weight for tree in plan.trees])
        self._parents = [tree.parents for tree in plan.trees]
        self._names = list(plan.trees[0].parents)
        self._senders = {name: _Sender(service) for name in self._hosts}
        self._down_free_s = dict.fromkeys(self._hosts, 0.0)
        self._has = {name: bytearray(num_chunks) for name in self._names}
        self._has[self._origin] = bytearray(b"\1" * num_chunks)
        self._wanting: dict[str, dict[int, list[str]]] = {name: {} for name in self._hosts}
        self._last_s: dict[str, float] = {}
        of_tree: list[list[int]] = [[] for _ in plan.trees]
        for chunk, tree in enumerate(self._tree_of):
            of_tree[tree].append(chunk)
        self._unasked: dict[tuple[str, int], deque[int]] = {}
        self._events: list[tuple[float, int, str, str, int, str]] = []
        self._count = 0
        for name in self._names:
            for tree, chunks in enumerate(of_tree):
                parent = self._parents[tree][name]
                rtt_s = edge_rtt_s(self._hosts[parent], self._hosts[name])
                under_way = len(chunks) * rtt_s / plan.arrivals_s[name]
                window = window_chunks or SPARE_CHUNKS + ceil(3 * under_way)
                for chunk in chunks[:window]:
                    self._at(0.0, "request", parent, chunk, name)
                self._unasked[name, tree] = deque(chunks[window:])
        heapify(self._events)

    def arrivals_s(self) -> Mapping[str, float]:
        while self._events:
            now, _, kind, host, chunk, child = heappop(self._events)
            if kind == "request":
                if self._has[host][chunk]:
                    self._senders[host].add(chunk, child)
                else:
                    self._wanting[host].setdefault(chunk, []).append(child)
            elif kind == "arrived":
                self._arrived(host, chunk, now)
            else:
                self._senders[host].busy = False
            self._send(host, now)
        assert all(all(self._has[name]) for name in self._names), "a chunk never arrived"
        return self._last_s

    def _arrived(self, host: str, chunk: int, now: float) -> None:
        self._has[host][chunk] = 1
        self._last_s[host] = now
        for child in self._wanting[host].pop(chunk, []):
            self._senders[host].add(chunk, child)
        tree = self._tree_of[chunk]
        unasked = self._unasked[host, tree]
        if unasked:
            parent = self._parents[tree][host]
            travel_s = edge_rtt_s(self._hosts[parent], self._hosts[host]) / 2
            self._at(now + travel_s, "request", parent, unasked.popleft(), host)

    def _send(self, host: str, now: float) -> None:
        sender = self._senders[host]
        wanted = None if sender.busy else sender.next()
        if wanted is None:
            return
        chunk, child = wanted
        parent, receiver = self._hosts[host], self._hosts[child]
        travel_s = edge_rtt_s(parent, receiver) / 2
        sent = now + self._chunk_mbit / parent.up
        begins = max(self._down_free_s[child], now + travel_s)
        arrives = max(sent + travel_s, begins + self._chunk_mbit / receiver.down)
        self._down_free_s[child] = arrives
        sender.busy = True
        self._at(sent, "free", host, 0, "")
        self._at(arrives, "arrived", child, chunk, "")

    def _at(self, when: float, kind: str, host: str, chunk: int, child: str) -> None:
        self._count += 1
        heappush(self._events, (when, self._count, kind, host, chunk, child))
