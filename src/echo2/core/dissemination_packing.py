"""Packs relay trees into the uplinks, without loss in the fluid limit.

One tree after the other is peeled off what is left of the uplinks. A tree needs n slots for
children: one of the origin's, and n − 1 more that are dealt to the hosts by the method of
highest averages (d'Hondt): the next slot goes to the host with the largest u_i/(k_i + 1), the
origin standing in with what it has beyond the rate still to be delivered. That makes
min u_i/k_i, and so the tree's rate, as large as it can be. Each peel uses up some host, hence
at most n + 1 trees; and it keeps u_0 ≥ R and u_0 + Σu_i ≥ nR for the R still to be delivered,
hence a rate that meets the bound is reached in full (docs/dissemination.md, Packing).

Dial-only workers D receive from the origin and from accepting workers A only, so those must
keep |D| R for them. A tree in which D sends to k_D workers takes n − k_D times its rate from
them, k_D ≤ |A|: as long as they have more than |D| R, its rate is at most what they have more
over |A| − k_D; then D gets |A| slots before the others are dealt any.

With `lump` f a host gets its slots f at a time: fewer relays in each tree with more children
each, so shallower trees and more of them. f = 1 begins with chains, f = n − 1 is the depth-two
construction of Mundinger, Weber and Weiss and of Kumar and Ross.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heapreplace

from echo2.core.dissemination_graph import PackedTree, RelayGraph
from echo2.core.dissemination_growth import grow_tree

TREES_MAX = 128
"""A plan has at most so many trees; what a larger fleet would gain by more is below 1 %."""
REMAINDER = 0.005
"""Share of the rate that may be left unpacked; it is spread over the trees that there are."""
TIGHT = 1e-4
"""Share of the rate below which nothing is left to serve dial-only workers with."""
_NOTHING = 1e-6
"""Share of the rate below which a tree, or what is left of an uplink, is none."""


def pack_trees(
    graph: RelayGraph,
    *,
    rate: float,
    lump: int,
    chunk_mbit: float,
    scarce_first: bool = False,
) -> list[PackedTree]:
    """Trees that together deliver `rate` Mbit/s to every worker, or what could be packed of it.

    `rate` is at most the origin's uplink; `lump` as above. With `scarce_first` hosts that can
    send to fewer workers than others get their slots before those. Heaviest tree first.
    """
    up = graph.up
    budget = [0.0 if i == 0 else up[i] for i in range(len(up))]
    budget[0] = max(0.0, up[0] - rate)
    left = rate
    used = [0] * len(up)
    trees: list[PackedTree] = []
    scarce = _scarce(graph) if scarce_first else []
    dialling = [i for i, accepts in enumerate(graph.accepts) if not accepts]
    while left > rate * REMAINDER and len(trees) < TREES_MAX:
        spare = _spare_for_dialled(graph, budget, left)
        wished = _deal_slots(graph, budget, lump, dialling if spare <= rate * TIGHT else scarce)
        parents = grow_tree(graph, wished, budget, chunk_mbit=chunk_mbit, used=used)
        tree = PackedTree.of(graph, parents, rate=0.0, chunk_mbit=chunk_mbit)
        for child in tree.order:
            used[parents[child]] |= 1 << child
        beyond = [tree.fanout[0] - 1, *tree.fanout[1:]]
        got = min([left, *(budget[i] / k for i, k in enumerate(beyond) if k > 0)])
        dialled = sum(
            k for k, accepts in zip(tree.fanout, graph.accepts, strict=True) if not accepts
        )
        if dialled < graph.num_accepting and spare > rate * TIGHT:
            got = min(got, spare / (graph.num_accepting - dialled))
        if got <= rate * _NOTHING:
            break
        budget = [max(0.0, b - got * k) for b, k in zip(budget, beyond, strict=True)]
        budget = [0.0 if b < rate * _NOTHING else b for b in budget]
        left -= got
        trees.append(replace(tree, rate=got))
    return sorted(trees, key=lambda tree: -tree.rate)


def one_tree(graph: RelayGraph, *, chunk_mbit: float) -> PackedTree:
    """A single tree that works in any graph: each worker under who has most uplink to spare."""
    nothing = [0] * len(graph.up)
    parents = grow_tree(graph, [1, *nothing[1:]], graph.up, chunk_mbit=chunk_mbit, used=nothing)
    return _alone(graph, parents, chunk_mbit)


def star(graph: RelayGraph, *, chunk_mbit: float) -> PackedTree | None:
    """The origin sends to everyone; None where it cannot."""
    if graph.sends[0] != (1 << len(graph.up)) - 2:
        return None
    return _alone(graph, [-1] + [0] * graph.num_workers, chunk_mbit)


def _alone(graph: RelayGraph, parents: Sequence[int], chunk_mbit: float) -> PackedTree:
    """A tree alone in the fleet, at the rate that its uplinks allow."""
    tree = PackedTree.of(graph, parents, rate=0.0, chunk_mbit=chunk_mbit)
    return replace(tree, rate=min(graph.up[i] / k for i, k in enumerate(tree.fanout) if k))


def _spare_for_dialled(graph: RelayGraph, budget: Sequence[float], left: float) -> float:
    """What the origin and accepting workers have beyond serving all dial-only ones, Mbit/s.

    Nobody else can serve those. Infinite where there are none.
    """
    dial_only = graph.num_workers - graph.num_accepting
    if not dial_only:
        return float("inf")
    serving = left + sum(b for b, accepts in zip(budget, graph.accepts, strict=True) if accepts)
    return serving - dial_only * left


def _scarce(graph: RelayGraph) -> list[int]:
    """Hosts that can send to fewer workers than some other can, itself not counted."""
    counts = [mask.bit_count() for mask in graph.sends]
    most = max(counts[1:])
    return [i for i, count in enumerate(counts) if count < (graph.num_workers if i == 0 else most)]


def _deal_slots(
    graph: RelayGraph, budget: Sequence[float], lump: int, first: Sequence[int]
) -> list[int]:
    """Fan-outs that sum to n: one for the origin, n − 1 by highest averages in lumps.

    Dial-only workers together get at most as many slots as there are workers that accept
    connections, since they can forward to nobody else. The hosts in `first` are dealt theirs
    before the others get any.
    """
    wished = [0] * len(budget)
    wished[0] = 1
    slots = graph.num_workers - 1
    for early in (True, False):
        able = [i for i in range(len(budget)) if budget[i] > 0 and (i in first) is early]
        slots -= _deal(graph, budget, lump, able, slots, wished)
    return wished


def _deal(
    graph: RelayGraph,
    budget: Sequence[float],
    lump: int,
    able: Sequence[int],
    slots: int,
    wished: list[int],
) -> int:
    """Deals up to `slots` to the hosts in `able`, adds them to `wished`; how many it dealt."""
    left = slots
    dial_left = graph.num_accepting - sum(
        k for k, accepts in zip(wished, graph.accepts, strict=True) if not accepts
    )
    heap = [(-budget[i] / lump, i, 0) for i in able]
    heapify(heap)
    while left and heap:
        _, index, had = heap[0]
        room = left if graph.accepts[index] else min(left, dial_left)
        children = graph.sends[index].bit_count() - (1 if index == 0 else 0)
        given = min(lump, room, children - had)
        if given <= 0:
            heappop(heap)
            continue
        wished[index] += given
        left -= given
        dial_left -= 0 if graph.accepts[index] else given
        heapreplace(heap, (-budget[index] / (had + given + lump), index, had + given))
    return slots - left
