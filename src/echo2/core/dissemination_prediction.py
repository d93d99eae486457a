"""Predicts when each worker has the last chunk of a version sent over given trees.

Symbols as in docs/dissemination.md: c the megabits of a chunk, m_t the chunks of tree t, k_it
the children of host i in tree t, p the parent of i in the tree at hand. The model is of
cut-through relays that serve pending requests in the order of the chunks:

    load     L_i   = Σ_t k_it m_t c / u_i                      all that i has to send
    hop      h_i,t = max(k_pt c / u_p, c / d_i) + rtt/2        a chunk from p to all its children
    wait     w_p,t = max over t' ≠ t of k_pt' c / u_p          another stripe is being sent
    start    s_i   = min_t (the hops on the way to i)          i has something to send
    arrival  A_i,t = max(A_p,t + w_p,t, s_p + (1 − 1/m_t) L_p) + h_i,t
    predicted for i = max(max_t A_i,t, s_i + G/d_i)

The last chunk of a stripe stands 1/m_t before the end of the version (`stripes`), so its way
through the tree lies mostly inside the transfer. In the heaviest of the trees in which p
forwards, (1 − 1/m_t) L_p is at least L_p less the last chunk's own sending, so that no uplink
ends before its load is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo2.core.dissemination_graph import PackedTree, RelayGraph


def allot_chunks(graph: RelayGraph, trees: Sequence[PackedTree], *, num_chunks: int) -> list[int]:
    """Chunks of each tree: whole numbers near the rates, so that the busiest uplink ends early.

    Shares are rounded down; each chunk left goes where the largest load that it makes is
    smallest. The sum is `num_chunks`; a tree may get none.
    """
    total = sum(tree.rate for tree in trees)
    chunks = [int(num_chunks * tree.rate / total + 1e-9) for tree in trees]
    up = graph.up
    relays = [[(i, k) for i, k in enumerate(tree.fanout) if k] for tree in trees]
    load = [0.0] * len(up)
    for count, hosts in zip(chunks, relays, strict=True):
        for i, k in hosts:
            load[i] += k * count / up[i]
    for _ in range(num_chunks - sum(chunks)):
        best, best_load = 0, float("inf")
        for index, hosts in enumerate(relays):
            most = max(load[i] + k / up[i] for i, k in hosts)
            if most < best_load - 1e-12:
                best, best_load = index, most
        chunks[best] += 1
        for i, k in relays[best]:
            load[i] += k / up[i]
    return chunks


def uplink_loads_s(
    graph: RelayGraph, trees: Sequence[PackedTree], chunks: Sequence[int], *, chunk_mbit: float
) -> list[float]:
    """L_i of every host in seconds: how long its uplink is busy."""
    sent = [0] * len(graph.hosts)
    for tree, count in zip(trees, chunks, strict=True):
        for i, k in enumerate(tree.fanout):
            sent[i] += k * count
    return [
        count * chunk_mbit / up if count else 0.0 for count, up in zip(sent, graph.up, strict=True)
    ]


def predict_arrivals_s(
    graph: RelayGraph,
    trees: Sequence[PackedTree],
    chunks: Sequence[int],
    loads_s: Sequence[float],
    *,
    chunk_mbit: float,
) -> list[float]:
    """Seconds until each worker has every chunk, worker 1 first.

    `chunks` are at least 1 for each tree, `loads_s` what `uplink_loads_s` says of them.
    """
    send_s = [chunk_mbit / up if up else 0.0 for up in graph.up]
    start = [0.0] + [float("inf")] * graph.num_workers
    queued = 0.0  # first chunks of earlier trees, which leave the origin before this one's
    for tree in trees:
        parents, hops_s = tree.parents, tree.hops_s
        first = [queued] * len(graph.hosts)
        queued += tree.fanout[0] * send_s[0]
        for child in tree.order:
            first[child] = begins = first[parents[child]] + hops_s[child]
            if begins < start[child]:
                start[child] = begins
    size = sum(chunks) * chunk_mbit
    ends = [begin + size / down for begin, down in zip(start, graph.down, strict=True)]
    widest, second = _two_widest(trees, len(graph.hosts))
    ended = [False] * len(graph.hosts)
    for index, (tree, count) in enumerate(zip(trees, chunks, strict=True)):
        leaves = [0.0] * len(graph.hosts)  # when the last chunk leaves each relay, if not later
        waits = [0.0] * len(graph.hosts)
        for host, children in enumerate(tree.fanout):
            if not children:
                continue
            leaves[host] = start[host] + loads_s[host] * (1 - 1 / count)
            if not ended[host]:  # trees are in order of weight
                ended[host] = True
                whole_s = start[host] + loads_s[host] - children * send_s[host]
                leaves[host] = max(leaves[host], whole_s)
            other = second[host] if widest[host][1] == index else widest[host]
            waits[host] = other[0] * send_s[host]
        parents, hops_s = tree.parents, tree.hops_s
        last = [0.0] * len(graph.hosts)
        for child in tree.order:
            parent = parents[child]
            ready = last[parent] + waits[parent]
            ready = (ready if ready > leaves[parent] else leaves[parent]) + hops_s[child]
            last[child] = ready
            if ready > ends[child]:
                ends[child] = ready
    return ends[1:]


def _two_widest(
    trees: Sequence[PackedTree], num_hosts: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(fan-out, tree) of the two trees in which each host has most children."""
    widest, second = [(0, -1)] * num_hosts, [(0, -1)] * num_hosts
    for index, tree in enumerate(trees):
        for host, children in enumerate(tree.fanout):
            if children > widest[host][0]:
                widest[host], second[host] = (children, index), widest[host]
            elif children > second[host][0]:
                second[host] = (children, index)
    return widest, second
