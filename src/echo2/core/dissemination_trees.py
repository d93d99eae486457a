"""Relay trees and plans, and an independent check of a plan.

A plan is a weighted set of trees rooted at the origin. Each spans all workers that can be
reached; a tree's weight is its share of the version's chunks. The check knows nothing of how
plans are made: whoever receives one in a message can hold it against the hosts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from echo2.core.dissemination_hosts import Host, Pair, can_send

WEIGHT_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class RelayTree:
    """One stripe's way: `parents` maps each worker to who sends it the stripe's chunks."""

    weight: float
    parents: Mapping[str, str]

    def children(self) -> dict[str, list[str]]:
        """Who is sent to by whom; the inverse of `parents`, in its order."""
        found: dict[str, list[str]] = {}
        for child, parent in self.parents.items():
            found.setdefault(parent, []).append(child)
        return found


@dataclass(frozen=True, slots=True)
class RelayPlan:
    """How one version travels: trees, the time predicted, the bound, and why this plan.

    `predicted_s` is until the last worker has the last chunk, from the first byte sent.
    `bound_s` is the fluid bound, which knows neither latency nor reachability, `bound_by`
    the term of it that binds. `reason` is a sentence for the log and the operator. `unreached`
    names workers that no path of working connections leads to; no tree holds them.
    `arrivals_s` is the predicted time of each worker's last chunk.
    """

    trees: tuple[RelayTree, ...]
    predicted_s: float
    bound_s: float
    bound_by: str
    reason: str
    arrivals_s: Mapping[str, float] = field(default_factory=dict)
    unreached: tuple[str, ...] = ()

    def reached_s(self, share: float) -> float:
        """When `share` of the reached workers, rounded up, have the version (paper: q)."""
        times = sorted(self.arrivals_s.values())
        return times[max(1, math.ceil(share * len(times) - 1e-9)) - 1] if times else 0.0

    @property
    def connections(self) -> frozenset[Pair]:
        """All (parent, child) over which chunks flow, in any tree."""
        return frozenset((p, c) for tree in self.trees for c, p in tree.parents.items())

    def descendants(self) -> dict[str, int]:
        """To how many workers chunks come through each worker, in whatever tree; only of those
        that forward. The first has the most, of equal ones the first by name."""
        bits = {name: 1 << place for place, name in enumerate(self.arrivals_s)}
        below = dict.fromkeys(bits, 0)
        for tree in self.trees:
            children = tree.children()
            order = [parent for parent in children if parent not in tree.parents]
            for host in order:  # it grows meanwhile: everybody behind who sends to them
                order += children.get(host, ())
            reached = dict.fromkeys(order, 0)
            for child in reversed(order):
                if child in tree.parents:
                    reached[tree.parents[child]] |= reached[child] | bits[child]
                    below[child] |= reached[child]
        counts = {name: found.bit_count() for name, found in sorted(below.items()) if found}
        return dict(sorted(counts.items(), key=lambda item: -item[1]))


def plan_problem(
    plan: RelayPlan,
    origin: Host,
    workers: Sequence[Host],
    *,
    blocked: Collection[Pair] = frozenset(),
) -> str | None:
    """What is wrong with `plan` for these hosts, in one sentence; None if nothing is.

    Every tree holds each worker but the unreached exactly once, is free of cycles, is rooted
    at the origin and uses only connections that can work; weights are positive and sum to 1.
    """
    hosts = {host.name: host for host in workers}
    if len(hosts) != len(workers) or origin.name in hosts:
        return "two hosts have the same name"
    lost = [name for name in plan.unreached if name not in hosts]
    if lost:
        return f"unreached {lost[0]} is not among the workers"
    wanted = set(hosts) - set(plan.unreached)
    if not wanted:
        return "there are trees but nobody to reach" if plan.trees else None
    if not plan.trees:
        return f"there are no trees, and {len(wanted)} workers to reach"
    for index, tree in enumerate(plan.trees):
        problem = _tree_problem(tree, origin, hosts, wanted, blocked)
        if problem:
            return f"tree {index}: {problem}"
    total = math.fsum(tree.weight for tree in plan.trees)
    if abs(total - 1.0) > WEIGHT_TOLERANCE:
        return f"the weights sum to {total}, not to 1"
    return None


def _tree_problem(
    tree: RelayTree,
    origin: Host,
    hosts: Mapping[str, Host],
    wanted: set[str],
    blocked: Collection[Pair],
) -> str | None:
    if not 0.0 < tree.weight <= 1.0 + WEIGHT_TOLERANCE:
        return f"its weight {tree.weight} is not in (0, 1]"
    if set(tree.parents) != wanted:
        wrong = sorted(set(tree.parents) ^ wanted)
        return f"{wrong[0]} is {'missing' if wrong[0] in wanted else 'not a worker to reach'}"
    for child, parent in tree.parents.items():
        is_origin = parent == origin.name
        if not is_origin and parent not in wanted:
            return f"{child} has the parent {parent}, which gets no chunks"
        sender = origin if is_origin else hosts[parent]
        if not can_send(sender, hosts[child], is_origin=is_origin, blocked=blocked):
            return f"{parent} cannot send to {child}"
    rooted = {origin.name}
    for child in tree.parents:
        path: list[str] = []
        name = child
        while name not in rooted:
            if len(path) > len(wanted):
                return f"{child} is on or below a cycle"
            path.append(name)
            name = tree.parents[name]
        rooted.update(path)
    return None
