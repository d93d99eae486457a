"""Mends a relay tree where connections are missing: moves branches off the busiest host.

A grown tree may put too much on one host because the others cannot connect to whom it was to
send to. One move takes a branch, lets any host x in it be its new top (the connections between
x and the old top turn round) and hangs it under a host that can send to x, so that the busiest
host has one child less and nobody becomes as busy as it was. (Edge swaps, as for spanning
trees of small degree: Fürer and Raghavachari, 1994.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from echo2.core.dissemination_graph import RelayGraph, numbers_in


@dataclass(frozen=True, slots=True)
class _Move:
    """Hang the branch below `top` under `parent` by `joint`; `room` is the worst new share."""

    top: int
    joint: int
    parent: int
    room: float


def mend_tree(
    graph: RelayGraph, parents: list[int], budget: Sequence[float], *, enough: float
) -> None:
    """Raises min budget_i/k_i of the tree `parents` to `enough`, in place, by at most 2n moves.

    The origin's first child is not counted, as its budget is what it has beyond one child.
    """
    for _ in range(2 * graph.num_workers):
        children: list[list[int]] = [[] for _ in parents]
        for child in range(1, len(parents)):
            children[parents[child]].append(child)
        counts = [len(children[0]) - 1, *map(len, children[1:])]
        least, busiest = min(
            (budget[i] / count, i) if count > 0 else (float("inf"), i)
            for i, count in enumerate(counts)
        )
        if least >= enough:
            return
        shares = [b / (count + 1) for b, count in zip(budget, counts, strict=True)]
        moves = _moves(graph, parents, children, busiest, shares, least * (1 + 1e-9))
        best = max(moves, key=lambda move: move.room, default=None)
        if best is None:
            return
        _apply(parents, best)


def _moves(
    graph: RelayGraph,
    parents: Sequence[int],
    children: Sequence[Sequence[int]],
    busiest: int,
    shares: Sequence[float],
    least: float,
) -> Iterator[_Move]:
    """All moves that take a child from `busiest`; whoever gets one keeps a share above `least`."""
    roomy = sum(1 << i for i, share in enumerate(shares) if share > least)
    for top in [*children[busiest], *([busiest] if busiest else [])]:
        branch = _branch(top, children)
        # The old parent of the busiest host loses a child by the move, and may get one back.
        able = roomy | (1 << parents[top] if top == busiest else 0)
        for joint in _joints(graph, top, children):
            turned = joint != top
            if (turned and shares[joint] <= least) or (top == busiest and not turned):
                continue
            for parent in numbers_in(able & graph.senders[joint] & ~branch):
                new = shares[parent] if parent != parents[top] else float("inf")
                yield _Move(top, joint, parent, min(new, shares[joint]) if turned else new)


def _branch(top: int, children: Sequence[Sequence[int]]) -> int:
    """Mask of `top` and all below it."""
    mask, below = 0, [top]
    for host in below:
        mask |= 1 << host
        below.extend(children[host])
    return mask


def _joints(graph: RelayGraph, top: int, children: Sequence[Sequence[int]]) -> list[int]:
    """Hosts of the branch that can be its top: all connections up to the old one turn round."""
    found = [top]
    for host in found:
        found.extend(child for child in children[host] if graph.sends[child] >> host & 1)
    return found


def _apply(parents: list[int], move: _Move) -> None:
    host, above = move.joint, move.parent
    while True:
        before = parents[host]
        parents[host] = above
        if host == move.top:
            return
        host, above = before, host
