"""Grows one relay tree from wished fan-outs, within what can connect.

The wish says how many children each host should have. Relays stand near the root, wide ones
first; a worker that only dials out hangs under one that accepts, and forwards only to those.
Where the wish cannot be met, the worker left over is taken by the host that has most uplink
to spare for one more child, so that a tree always comes out (every worker is reachable), and
where pairs are blocked the tree is mended.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import islice
from math import inf

from echo2.core.dissemination_graph import RelayGraph, numbers_in
from echo2.core.dissemination_mending import mend_tree

MEND_BELOW = 0.9
"""A tree is mended where its rate falls below this share of what the wish would have given."""


def grow_tree(
    graph: RelayGraph,
    wished: Sequence[int],
    budget: Sequence[float],
    *,
    chunk_mbit: float,
    used: Sequence[int],
) -> list[int]:
    """Parent of each host by number, `[num_workers + 1]`, −1 for the origin.

    `wished[p]` is the fan-out wished of p, `budget[p]` the uplink that is left of it in
    Mbit/s (for the origin: beyond one child). `used[p]` is the mask of children to whom p has
    a connection from other trees: leaves prefer those.
    """
    growth = _Growth(graph, wished, chunk_mbit)
    growth.add_relays()
    growth.add_leaves(used)
    growth.add_the_rest(budget)
    if graph.has_blocked:
        shares = [budget[i] / k for i, k in enumerate([wished[0] - 1, *wished[1:]]) if k > 0]
        mend_tree(graph, growth.parents, budget, enough=MEND_BELOW * min(shares, default=inf))
    return growth.parents


class _Growth:
    """A tree that grows. Open slots are sorted by when a chunk would come through them."""

    def __init__(self, graph: RelayGraph, wished: Sequence[int], chunk_mbit: float) -> None:
        self.graph = graph
        self.parents = [-1] * len(graph.hosts)
        self.fanout = [0] * len(graph.hosts)
        self._wished = wished
        self._chunk_mbit = chunk_mbit
        self._arrival_s = [0.0] * len(graph.hosts)
        self._left = (1 << len(graph.hosts)) - 2  # mask of workers without a parent
        self._placed = 1
        self._open: list[tuple[float, int]] = []  # (arrival at a child, parent that accepts)
        self._open_dial: list[tuple[float, int]] = []  # the same of parents that only dial out
        dialled = sum(k for k, accepts in zip(wished, graph.accepts, strict=True) if not accepts)
        self._spare_accepting = graph.num_accepting - dialled
        self._open_slots(0)

    def add_relays(self) -> None:
        """Hosts with a wished fan-out, wide ones first, then near ones."""
        graph, wished = self.graph, self._wished
        order = sorted(
            (v for v in range(1, len(wished)) if wished[v]),
            key=lambda v: (-wished[v], graph.rtt[v], v),
        )
        accepting = [v for v in order if graph.accepts[v]]
        dialling = [v for v in order if not graph.accepts[v]]
        # An accepting relay goes under a dial-only one where a slot is open, since nobody else
        # can; it takes a slot of the others only while enough accepting ones are left for the
        # dial-only relays, or where nothing else fits.
        while accepting or dialling:
            if self._take_first(accepting, self._open_dial):
                continue
            if self._spare_accepting > 0 and self._take_first(accepting, self._open):
                self._spare_accepting -= 1
                continue
            if self._take_first(dialling, self._open):
                continue
            if not self._take_first(accepting, self._open):
                return

    def add_leaves(self, used: Sequence[int]) -> None:
        """Everybody else into the open slots: over connections that exist, then over new ones."""
        for slots in (self._open_dial, self._open):
            for again in (True, False):
                for _, parent in list(slots):
                    mask = self._left & self.graph.sends[parent]
                    if again:
                        mask &= used[parent]
                    free = self._wished[parent] - self.fanout[parent]
                    for child in islice(numbers_in(mask), free):
                        self._attach(child, parent)
            slots.clear()

    def add_the_rest(self, budget: Sequence[float]) -> None:
        """Whoever found no slot: under the host with most uplink for one more child."""
        graph = self.graph
        while self._left:
            progress = False
            for child in numbers_in(self._left):
                able = self._placed & graph.senders[child]
                if not able:
                    continue
                parent = max(numbers_in(able), key=lambda p: (self._share(p, budget), -p))
                self._attach(child, parent)
                progress = True
            assert progress, "a worker that nobody can send to is not in a graph"

    def _share(self, parent: int, budget: Sequence[float]) -> float:
        """Uplink for each of one more than its children (the origin's first is not counted)."""
        children = max(self.fanout[parent], self._wished[parent]) + 1
        return budget[parent] / max(1, children - 1 if parent == 0 else children)

    def _take_first(self, relays: list[int], slots: list[tuple[float, int]]) -> bool:
        """Puts the first relay that fits into the earliest slot that takes it."""
        for index, child in enumerate(relays):
            for _, parent in slots:
                if _sends(self.graph, parent, child):
                    del relays[index]
                    self._attach(child, parent)
                    if self.fanout[parent] >= self._wished[parent]:
                        slots[:] = [slot for slot in slots if slot[1] != parent]
                    self._open_slots(child)
                    return True
        return False

    def _attach(self, child: int, parent: int) -> None:
        graph = self.graph
        self.parents[child] = parent
        self.fanout[parent] += 1
        self._left &= ~(1 << child)
        self._placed |= 1 << child
        self._arrival_s[child] = self._through_s(parent) + graph.rtt[child] / 2

    def _through_s(self, parent: int) -> float:
        """When a chunk has gone out to all children wished of `parent`."""
        children = max(1, self._wished[parent])
        send_s = children * self._chunk_mbit / self.graph.up[parent] if self.graph.up[parent] else 0
        return self._arrival_s[parent] + send_s

    def _open_slots(self, parent: int) -> None:
        if self._wished[parent] and self.graph.up[parent] > 0:
            slots = self._open if self.graph.accepts[parent] else self._open_dial
            insort(slots, (self._through_s(parent), parent))


def _sends(graph: RelayGraph, parent: int, child: int) -> bool:
    return bool(graph.sends[parent] >> child & 1)
