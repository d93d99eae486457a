"""The hosts as numbers: 0 is the origin, workers count from 1 in their given order.

Edges that can work are bit masks: bit c of `sends[p]` and bit p of `senders[c]` say that p can
send to c. Workers
that no path of such edges leads to are left out before a graph is made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from echo2.core.dissemination_hosts import Host, Pair, can_send


@dataclass(frozen=True, slots=True)
class RelayGraph:
    """Rates in Mbit/s by number; `accepts[0]` is True."""

    hosts: tuple[Host, ...]
    up: tuple[float, ...]
    down: tuple[float, ...]
    rtt: tuple[float, ...]
    accepts: tuple[bool, ...]
    sends: tuple[int, ...]
    senders: tuple[int, ...]
    has_blocked: bool

    @property
    def num_workers(self) -> int:
        return len(self.hosts) - 1

    @property
    def num_accepting(self) -> int:
        """Workers that accept connections."""
        return sum(self.accepts) - 1


@dataclass(frozen=True, slots=True)
class PackedTree:
    """A tree by host numbers: its rate in Mbit/s, parents (−1 for the origin) and fan-outs.

    `order` names the workers so that every parent stands before its children. `hops_s[i]` is
    h_i: one chunk from the parent to all the parent's children, and half a round trip.
    """

    rate: float
    parents: tuple[int, ...]
    fanout: tuple[int, ...]
    order: tuple[int, ...]
    hops_s: tuple[float, ...]

    @classmethod
    def of(
        cls, graph: RelayGraph, parents: Sequence[int], *, rate: float, chunk_mbit: float
    ) -> PackedTree:
        """The tree in which `parents[i]` sends to i, with chunks of `chunk_mbit` megabits."""
        children: list[list[int]] = [[] for _ in parents]
        for child in range(1, len(parents)):
            children[parents[child]].append(child)
        order = [0]
        hops_s = [0.0] * len(parents)
        for host in order:
            order.extend(children[host])
            for child in children[host]:
                sends_s = len(children[host]) * chunk_mbit / graph.up[host]
                passes_s = max(sends_s, chunk_mbit / graph.down[child])
                hops_s[child] = passes_s + max(graph.rtt[host], graph.rtt[child]) / 2
        fanout = tuple(map(len, children))
        return cls(rate, tuple(parents), fanout, tuple(order[1:]), tuple(hops_s))


def relay_graph(
    origin: Host, workers: Sequence[Host], *, blocked: Collection[Pair] = frozenset()
) -> tuple[RelayGraph, tuple[str, ...]]:
    """The graph of the workers that can be reached, and the names of the others."""
    hosts = (origin, *workers)
    sends = [_mask(index, hosts, blocked) for index in range(len(hosts))]
    reached, frontier = 1, 1
    while frontier:
        found = 0
        for index in range(len(hosts)):
            if frontier >> index & 1:
                found |= sends[index]
        frontier = found & ~reached
        reached |= frontier
    kept = tuple(host for index, host in enumerate(hosts) if reached >> index & 1)
    lost = tuple(host.name for index, host in enumerate(hosts) if not reached >> index & 1)
    if lost:
        sends = [_mask(index, kept, blocked) for index in range(len(kept))]
    names = {host.name for host in kept}
    graph = RelayGraph(
        hosts=kept,
        up=tuple(host.up for host in kept),
        down=tuple(host.down for host in kept),
        rtt=tuple(host.rtt for host in kept),
        accepts=(True, *(host.accepts for host in kept[1:])),
        sends=tuple(sends),
        senders=tuple(_turned(sends)),
        has_blocked=any(one in names and other in names for one, other in blocked),
    )
    return graph, lost


def numbers_in(mask: int) -> Iterator[int]:
    """The numbers whose bits are set in `mask`, ascending."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def _mask(parent: int, hosts: Sequence[Host], blocked: Collection[Pair]) -> int:
    mask = 0
    for child in range(1, len(hosts)):
        if child != parent and can_send(
            hosts[parent], hosts[child], is_origin=parent == 0, blocked=blocked
        ):
            mask |= 1 << child
    return mask


def _turned(sends: Sequence[int]) -> list[int]:
    """Masks of who sends to each, from the masks of whom each sends to."""
    return [
        sum(1 << parent for parent, mask in enumerate(sends) if mask >> child & 1)
        for child in range(len(sends))
    ]
