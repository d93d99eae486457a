"""Plans how a version travels: who forwards which stripe to whom, and how long it takes.

`plan_relays` takes hosts as they were measured (uplink, downlink, round trip, reachability)
and returns relay trees rooted at the origin with their shares of the chunks, the predicted
time beside the fluid bound, and the reason for the choice. Pure and deterministic: the same
hosts give the same plan everywhere. docs/dissemination.md derives it.

Candidates are packings from deep and narrow (the paper's chains, §4.2 of ECHO-2) to shallow
and wide, each cut to its heaviest trees; the one with the fewest connections is taken among
those whose prediction is within 2 % of the best.

Left to others: sending (the relay), measuring, and what happens when a relay dies.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo2.core.dissemination_candidates import Candidate, best_candidate
from echo2.core.dissemination_graph import PackedTree, RelayGraph, relay_graph
from echo2.core.dissemination_hosts import (
    DEFAULT_DOWN_MBIT,
    DEFAULT_RTT_S,
    DEFAULT_UP_MBIT,
    Host,
    Pair,
    edge_rtt_s,
    fluid_bound,
    megabits,
    reach_bound,
)
from echo2.core.dissemination_stragglers import slow_workers, spared_candidate
from echo2.core.dissemination_stripes import stripe_sizes, stripes
from echo2.core.dissemination_trees import RelayPlan, RelayTree, plan_problem

__all__ = [
    "DEFAULT_DOWN_MBIT",
    "DEFAULT_RTT_S",
    "DEFAULT_UP_MBIT",
    "Host",
    "RelayPlan",
    "RelayTree",
    "edge_rtt_s",
    "fluid_bound",
    "plan_problem",
    "plan_relays",
    "reach_bound",
    "stripe_sizes",
    "stripes",
]


def plan_relays(
    origin: Host,
    workers: Sequence[Host],
    *,
    num_bytes: int,
    chunk_bytes: int,
    blocked: frozenset[Pair] = frozenset(),
) -> RelayPlan:
    """The plan for a version of `num_bytes` in chunks of `chunk_bytes`.

    Host names are unique; `origin.accepts` is not looked at, an origin always accepts.
    `blocked` are pairs of names between which no connection works, in either order. Workers
    that nothing can reach come back as `unreached`. ValueError for what is no fleet.
    """
    if num_bytes < 1 or chunk_bytes < 1:
        raise ValueError(f"a version of {num_bytes} bytes in chunks of {chunk_bytes}: at least 1")
    if origin.up <= 0:
        raise ValueError(f"the origin {origin.name} has no uplink; a plan needs one above 0")
    names = [origin.name, *(host.name for host in workers)]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two hosts are named {twice}; names in a plan are unique")
    graph, lost = relay_graph(origin, workers, blocked=blocked)
    reached = graph.hosts[1:]
    bound_s, bound_by = fluid_bound(origin, reached, num_bytes)
    if not reached:
        reason = f"nobody to send to: {_listed(lost)} cannot be reached" if lost else "no workers"
        return RelayPlan((), 0.0, 0.0, bound_by, reason, unreached=lost)
    num_chunks = -(-num_bytes // chunk_bytes)
    # The last chunk may be short; all are counted as equal parts of the version.
    chunk_mbit = megabits(num_bytes) / num_chunks
    reach_s, reach_by = reach_bound(origin, reached, num_bytes, blocked=blocked)
    rate = megabits(num_bytes) / reach_s
    best = best_candidate(graph, rate=rate, num_chunks=num_chunks, chunk_mbit=chunk_mbit)
    spared = spared_candidate(
        graph,
        num_chunks=num_chunks,
        chunk_mbit=chunk_mbit,
        blocked=blocked,
        most_s=best.predicted_s,
    )
    best = spared or best
    reason = " ".join(_sentences(graph, best, bound_s, bound_by, reach_s, reach_by, lost))
    return RelayPlan(
        trees=tuple(
            _named(graph, tree, count / num_chunks)
            for tree, count in zip(best.trees, best.chunks, strict=True)
        ),
        arrivals_s=dict(zip((host.name for host in reached), best.arrivals_s, strict=True)),
        predicted_s=best.predicted_s,
        bound_s=bound_s,
        bound_by=bound_by,
        reason=reason,
        unreached=lost,
    )


def _named(graph: RelayGraph, tree: PackedTree, weight: float) -> RelayTree:
    names = [host.name for host in graph.hosts]
    parents = {names[c]: names[tree.parents[c]] for c in range(1, len(names))}
    return RelayTree(weight=weight, parents=parents)


def _sentences(
    graph: RelayGraph,
    best: Candidate,
    bound_s: float,
    bound_by: str,
    reach_s: float,
    reach_by: str,
    lost: Sequence[str],
) -> list[str]:
    """Why this plan: its form, its time, what bounds it, what it costs, what would help."""
    said = [
        f"{_form(graph, best)}: predicted {best.predicted_s:.3g} s, "
        f"{best.predicted_s / bound_s:.2f} of the bound {bound_s:.3g} s, set by {bound_by}."
    ]
    if reach_s > bound_s * 1.01:
        said.append(f"Reachability raises the bound to {reach_s:.3g} s: {reach_by}.")
    slow = slow_workers(graph)
    if slow and not any(tree.fanout[i] for tree in best.trees for i in slow):
        others_s = max(s for i, s in enumerate(best.arrivals_s, 1) if i not in slow)
        names = _listed([graph.hosts[i].name for i in sorted(slow)])
        verb = "forward" if len(slow) > 1 else "forwards"
        said.append(
            f"{names} {verb} nothing for want of downlink; all others have it in {others_s:.3g} s."
        )
    over_s, fill_s = best.predicted_s - reach_s, best.predicted_s - best.busiest_s
    if over_s > 0.1 * reach_s:
        cause = (
            f"the way of the first and the last chunk through trees of depth {best.depth}"
            if fill_s > over_s / 2
            else f"the busiest uplink, which takes {best.busiest_s:.3g} s"
        )
        said.append(f"It is {over_s:.3g} s above that with {best.num_chunks} chunks: {cause}.")
    if graph.num_workers > 1 and not graph.num_accepting:
        said.append(
            "No worker accepts connections, so the origin sends every copy; a relay-only node "
            '(engine = "none") with an open port would share that.'
        )
    elif reach_s > bound_s * 1.01:
        said.append('Workers with an open port, or a relay-only node (engine = "none"), help.')
    guessed = [host.name for host in graph.hosts if not host.measured]
    if guessed:
        said.append(
            f"Rates of {_listed(guessed)} are not measured yet: {DEFAULT_UP_MBIT:g} up and "
            f"{DEFAULT_DOWN_MBIT:g} down Mbit/s assumed."
        )
    if lost:
        said.append(f"{_listed(lost)} cannot be reached by anyone.")
    return said


def _form(graph: RelayGraph, best: Candidate) -> str:
    """The plan's form in words."""
    count = graph.num_workers
    workers = f"{count} worker{'s' if count > 1 else ''}"
    if len(best.trees) > 1:
        return (
            f"{len(best.trees)} trees over stripes for {workers}, {best.num_connections} "
            f"connections, depth {best.depth}"
        )
    fanout = best.trees[0].fanout
    if best.depth == 1:
        return f"a star from the origin to {workers}"
    if max(fanout[1:]) == 1:
        chains = f"{fanout[0]} chains" if fanout[0] > 1 else "one chain"
        return f"{chains} of all chunks through {workers}, depth {best.depth}"
    return f"one tree of all chunks for {workers}, depth {best.depth}"


def _listed(names: Sequence[str]) -> str:
    """Up to three names, and how many more."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
