"""Keeps a few workers with slow downlinks from slowing the others.

A version is everywhere only when the slowest downlink has taken it, but the others need not
wait for that: where they could have it in half the time, the trees are planned for them, and
the slow ones hang below as leaves that forward nothing.
"""

from __future__ import annotations

from dataclasses import replace

from echo2.core.dissemination_candidates import SLACK, Candidate, best_candidate, with_chunks
from echo2.core.dissemination_graph import PackedTree, RelayGraph, relay_graph
from echo2.core.dissemination_hosts import Pair, megabits, reach_bound
from echo2.core.dissemination_prediction import uplink_loads_s

SLOWER = 2.0
"""How many times sooner the others must be able to have the version."""


def slow_workers(graph: RelayGraph) -> frozenset[int]:
    """Workers without whom the others' rate is at least twice the fastest of their downlinks.

    The largest such set of fewer than half of the workers, the slowest downlinks first; the
    others' rate is the fluid one, with the slow workers' downlinks taken off the uplinks.
    """
    order = sorted(range(1, len(graph.down)), key=lambda i: (graph.down[i], i))
    found = 0
    for count in range(1, (len(order) + 1) // 2):
        slow, rest = order[:count], order[count:]
        uplinks = sum(graph.up[i] for i in rest) + graph.up[0] - sum(graph.down[i] for i in slow)
        rate = min(graph.up[0], graph.down[rest[0]], uplinks / len(rest))
        if rate >= SLOWER * graph.down[slow[-1]]:
            found = count
    return frozenset(order[:found])


def spared_candidate(
    graph: RelayGraph,
    *,
    num_chunks: int,
    chunk_mbit: float,
    blocked: frozenset[Pair],
    most_s: float,
) -> Candidate | None:
    """A candidate in which slow workers forward nothing.

    None where no worker is slow, where the others cannot be reached without the slow ones, or
    where it would take the last worker longer than `most_s` and the slack.
    """
    slow = slow_workers(graph)
    if not slow:
        return None
    numbers = [i for i in range(len(graph.hosts)) if i not in slow]
    hosts = [graph.hosts[i] for i in numbers]
    fast, lost = relay_graph(hosts[0], hosts[1:], blocked=blocked)
    if lost:
        return None
    num_bytes = round(num_chunks * chunk_mbit * 1e6 / 8)
    taken = sum(graph.down[i] for i in slow)
    rate = min(
        megabits(num_bytes) / reach_bound(hosts[0], hosts[1:], num_bytes, blocked=blocked)[0],
        (sum(fast.up) - taken) / fast.num_workers,
    )
    best = best_candidate(fast, rate=rate, num_chunks=num_chunks, chunk_mbit=chunk_mbit)
    loads = uplink_loads_s(fast, best.trees, best.chunks, chunk_mbit=chunk_mbit)
    load_s = dict(zip(numbers, loads, strict=True))
    below: dict[int, int] = {}
    for worker in sorted(slow):
        able = [i for i in numbers if graph.sends[i] >> worker & 1]
        if not able:
            return None
        whole_s = {i: load_s[i] + num_chunks * chunk_mbit / graph.up[i] for i in able}
        below[worker] = min(able, key=lambda i: (whole_s[i], i))
        load_s[below[worker]] = whole_s[below[worker]]
    trees = [
        PackedTree.of(
            graph,
            _with_leaves(tree, numbers, below),
            rate=tree.rate,
            chunk_mbit=chunk_mbit,
        )
        for tree in best.trees
    ]
    whole = with_chunks(graph, trees, best.chunks, chunk_mbit)
    if whole.predicted_s > most_s * (1 + SLACK):
        return None
    # Requests of slow workers take their downlink of a parent's uplink, no more, while the
    # others are served: the others' arrivals are those of the trees without them.
    arrivals = list(whole.arrivals_s)
    for place, arrival_s in zip(numbers[1:], best.arrivals_s, strict=True):
        arrivals[place - 1] = arrival_s
    return replace(whole, arrivals_s=tuple(arrivals))


def _with_leaves(tree: PackedTree, numbers: list[int], below: dict[int, int]) -> list[int]:
    """Parents of a tree of the fast workers in the numbers of all, the slow ones as leaves."""
    size = len(numbers) + len(below)
    parents = [-1] * size
    for own, number in enumerate(numbers[1:], 1):
        parents[number] = numbers[tree.parents[own]]
    for worker, parent in below.items():
        parents[worker] = parent
    return parents
