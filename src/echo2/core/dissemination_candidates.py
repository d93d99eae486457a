"""Chooses among ways to pack relay trees: the fewest connections among the quickest.

Candidates are a star, a single tree, and packings from deep and narrow to shallow and wide,
each cut to its heaviest trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echo2.core.dissemination_graph import PackedTree, RelayGraph
from echo2.core.dissemination_packing import one_tree, pack_trees, star
from echo2.core.dissemination_prediction import (
    allot_chunks,
    predict_arrivals_s,
    uplink_loads_s,
)

LUMPS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64)
"""Slots dealt to a host at a time: 1 begins with chains, n − 1 makes every relay a star."""
TREE_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""How many of a packing's heaviest trees are kept, the rest's chunks given to those."""
RATE_SHARES = (1.0, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2)
"""Shares of the rate to try where missing connections keep the whole from being packed."""
PATIENCE = 3
"""The search ends after so many wider packings without a gain."""
CUT_PATIENCE = 2
"""A packing's search ends after so many longer cuts without a gain."""
SLACK = 0.04
"""Predictions that differ by no more than this are as good as equal."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Trees with their chunks, when each worker has all, and the busiest uplink's load."""

    trees: tuple[PackedTree, ...]
    chunks: tuple[int, ...]
    arrivals_s: tuple[float, ...]
    busiest_s: float
    num_connections: int

    @property
    def predicted_s(self) -> float:
        return max(self.arrivals_s)

    @property
    def num_chunks(self) -> int:
        return sum(self.chunks)

    @property
    def depth(self) -> int:
        """Hops to the farthest worker of the deepest tree."""
        deepest = 0
        for tree in self.trees:
            for worker in range(1, len(tree.parents)):
                host, hops = worker, 0
                while host:
                    host, hops = tree.parents[host], hops + 1
                deepest = max(deepest, hops)
        return deepest


def best_candidate(
    graph: RelayGraph, *, rate: float, num_chunks: int, chunk_mbit: float
) -> Candidate:
    """The candidate to use for `num_chunks` of `chunk_mbit` megabits each.

    `rate` is what the bound allows, in Mbit/s to every worker. Among predictions within
    `SLACK` of the best: fewest connections, then the quickest.
    """
    bound_s = num_chunks * chunk_mbit / rate
    best_s = float("inf")
    found: list[Candidate] = []
    packings_without_gain, patience = 0, PATIENCE * len(_deal_orders(graph))
    for packing in _packings(graph, rate=rate, chunk_mbit=chunk_mbit):
        before_s = best_s
        last_s, cuts_without_gain = float("inf"), 0
        for trees in _cuts(packing):
            most_s = best_s * (1 + SLACK)
            candidate = _judge(graph, trees, num_chunks, chunk_mbit, most_s)
            if candidate is None:
                continue
            if candidate.predicted_s <= best_s * (1 + SLACK):
                found.append(candidate)
                best_s = min(best_s, candidate.predicted_s)
            cuts_without_gain = 0 if candidate.predicted_s < last_s else cuts_without_gain + 1
            last_s = min(last_s, candidate.predicted_s)
            if cuts_without_gain == CUT_PATIENCE:
                break
        packings_without_gain = 0 if best_s < before_s else packings_without_gain + 1
        # What would come later has more connections, for less than the slack or for nothing.
        if best_s <= bound_s * (1 + SLACK) or packings_without_gain == patience:
            break
    good = [candidate for candidate in found if candidate.predicted_s <= best_s * (1 + SLACK)]
    return min(good, key=lambda c: (c.num_connections, c.predicted_s))


def _cuts(packing: Sequence[PackedTree]) -> Iterator[Sequence[PackedTree]]:
    """A packing's heaviest trees, more and more of them."""
    for count in TREE_COUNTS if packing else ():
        yield packing[:count]
        if count >= len(packing):
            return


def _judge(
    graph: RelayGraph,
    trees: Sequence[PackedTree],
    num_chunks: int,
    chunk_mbit: float,
    most_s: float,
) -> Candidate | None:
    """The candidate that `trees` make, without those that get no chunk.

    None where an uplink alone is busy for longer than `most_s`.
    """
    chunks = allot_chunks(graph, trees, num_chunks=num_chunks)
    if max(uplink_loads_s(graph, trees, chunks, chunk_mbit=chunk_mbit)) > most_s:
        return None
    kept = [(tree, count) for tree, count in zip(trees, chunks, strict=True) if count]
    return with_chunks(graph, [tree for tree, _ in kept], [count for _, count in kept], chunk_mbit)


def with_chunks(
    graph: RelayGraph, trees: Sequence[PackedTree], chunks: Sequence[int], chunk_mbit: float
) -> Candidate:
    """The candidate of trees whose chunks are set, at least one each."""
    loads = uplink_loads_s(graph, trees, chunks, chunk_mbit=chunk_mbit)
    arrivals = predict_arrivals_s(graph, trees, chunks, loads, chunk_mbit=chunk_mbit)
    edges = {(p, c) for tree in trees for c, p in enumerate(tree.parents) if c}
    return Candidate(tuple(trees), tuple(chunks), tuple(arrivals), max(loads), len(edges))


def _packings(
    graph: RelayGraph, *, rate: float, chunk_mbit: float
) -> Iterator[Sequence[PackedTree]]:
    """Lists of trees to be cut and judged, heaviest tree first in each."""
    straight = star(graph, chunk_mbit=chunk_mbit)
    if straight:
        yield [straight]
    yield [one_tree(graph, chunk_mbit=chunk_mbit)]
    last = dict.fromkeys(_deal_orders(graph), 0)
    for lump in LUMPS:
        if lump > max(1, graph.num_workers - 1):
            break
        for scarce_first, place in last.items():
            # What one lump could not pack, the next one hardly can.
            shares = RATE_SHARES[max(0, place - 1) :]
            trees, found = _packed(graph, rate, lump, chunk_mbit, shares, scarce_first)
            last[scarce_first] = found
            if trees:
                yield trees


def _deal_orders(graph: RelayGraph) -> tuple[bool, ...]:
    """Values of `scarce_first` to try: both where pairs are blocked."""
    return (False, True) if graph.has_blocked else (False,)


def _packed(
    graph: RelayGraph,
    rate: float,
    lump: int,
    chunk_mbit: float,
    shares: Sequence[float],
    scarce_first: bool,
) -> tuple[list[PackedTree], int]:
    """Trees for `rate`; where connections are missing, for the share at which most is packed.

    With them the place of that share in `RATE_SHARES`.
    """
    best: list[PackedTree] = []
    got, place = 0.0, 0
    for share in shares:
        if got >= rate * share:
            break
        trees = pack_trees(
            graph,
            rate=rate * share,
            lump=lump,
            chunk_mbit=chunk_mbit,
            scarce_first=scarce_first,
        )
        packed = sum(tree.rate for tree in trees)
        if packed > got:
            best, got, place = trees, packed, RATE_SHARES.index(share)
        if packed >= 0.97 * rate * share:
            break
    return best, place
