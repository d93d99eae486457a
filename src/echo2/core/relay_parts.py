"""A relay plan cut into what each worker is told: its stripes, and whom it has to dial.

A stripe names the way up its tree, parent first; the origin stands behind the last and is not
named. Index k of every worker's stripes is tree k. Beside them stand helpers, whose uplinks the
plan does not use up. Also the part of a worker that joins late,
which follows no tree: an equal stripe from each source, behind which the others stand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from echo2.core.delta_choice import Way
from echo2.core.dissemination import RelayPlan, RelayTree, stripe_sizes
from echo2.core.relay_rates import ORIGIN
from echo2.messages import STRIPES_MAX, VersionAnnounced, VersionPublished
from echo2.types import Name, PeerId, Stripe, Version

SOURCES_MAX: Final = 64
"""Most ancestors that a stripe names; the origin stands behind them however many there are."""
JOINER_SOURCES_MAX: Final = 3
HELPERS_MAX: Final = 2
SPARE_SHARE: Final = 0.25
"""Of the version, in the planned time, must be left of a helper's uplink."""
MOST_NEEDED_MAX: Final = 8
"""Relays of which the records tell how many workers are behind them."""


@dataclass(frozen=True, slots=True)
class RelayPart:
    """`stripes` empty: everything comes from the origin."""

    stripes: tuple[Stripe, ...] = ()
    serves: tuple[PeerId, ...] = ()
    planned_s: float = 0.0

    @property
    def sources(self) -> set[str]:
        """Helpers included."""
        return {name for stripe in self.stripes for name in (*stripe.sources, *stripe.helpers)}

    def among(self, present: Collection[str]) -> RelayPart:
        """The part without those who are not present."""
        if self.sources.issubset(present) and all(name in present for name in self.serves):
            return self
        stripes = [
            Stripe(
                stripe.num_chunks,
                tuple(name for name in stripe.sources if name in present),
                tuple(name for name in stripe.helpers if name in present),
            )
            for stripe in self.stripes
        ]
        serves = tuple(name for name in self.serves if name in present)
        return RelayPart(tuple(stripes), serves, self.planned_s)


def planned_fields(version: Version, plan: RelayPlan) -> dict[str, Any]:
    """What the records keep of a plan."""
    return {
        "incarnation": version.incarnation,
        "step": version.step,
        "predicted_s": plan.predicted_s,
        "bound_s": plan.bound_s,
        "trees": len(plan.trees),
        "connections": len(plan.connections),
        "most_needed": dict(list(plan.descendants().items())[:MOST_NEEDED_MAX]),
        "reason": plan.reason,
    }


def announcement(published: VersionPublished, part: RelayPart, way: Way) -> VersionAnnounced:
    """What a worker is told of a version, and by which way it gets it."""
    return VersionAnnounced(
        version=published.version,
        manifest_digest=published.manifest_digest,
        num_bytes=way.num_bytes,
        origin=published.origin,
        origin_key=published.origin_key,
        assets_digest=published.assets_digest,
        path=way.path,
        stripes=part.stripes,
        serves=part.serves,
        planned_s=part.planned_s,
        probe_length=published.probe_length,
        probe_tokens=published.probe_tokens,
        probe_logprobs=published.probe_logprobs,
    )


def planned_parts(
    plan: RelayPlan,
    accepting: Collection[str],
    num_chunks: int,
    *,
    spare: Mapping[str, float] | None = None,
) -> dict[PeerId, RelayPart]:
    """Every reached worker's part. Trees beyond STRIPES_MAX, the lightest, give their chunks to
    the others; so does a tree that would get none. `spare`: how many times the version each
    could send in the planned time beside what the plan has it send."""
    trees = _heaviest(plan.trees)
    sizes = stripe_sizes(num_chunks, [tree.weight for tree in trees])
    used = [(tree, size) for tree, size in zip(trees, sizes, strict=True) if size]
    serves: dict[str, dict[str, None]] = {}
    for tree, _ in used:
        for child, parent in tree.parents.items():
            if parent != ORIGIN and parent not in accepting and child in accepting:
                serves.setdefault(parent, {})[child] = None
    spare = spare or {}
    able = [
        name
        for name in plan.arrivals_s
        if name in accepting and spare.get(name, 0.0) >= SPARE_SHARE
    ]
    able.sort(key=lambda name: (-spare[name], name))
    above = {name: _above(plan.trees, name) for name in plan.arrivals_s}
    parts = {}
    for place, name in enumerate(plan.arrivals_s):
        # Whoever is below waits for us; the rest take turns, so that not all ask the same.
        free = [h for h in able if h != name and name not in above[h] and h not in above[name]]
        first = place % len(free) if free else 0
        helpers = tuple((free[first:] + free[:first])[:HELPERS_MAX])
        ways = [(size, _way_up(tree, name)) for tree, size in used]
        stripes = tuple(Stripe(size, way, helpers if way else ()) for size, way in ways)
        parts[PeerId(name)] = RelayPart(
            stripes if any(stripe.sources for stripe in stripes) else (),
            tuple(PeerId(child) for child in serves.get(name, ())),
            plan.predicted_s,
        )
    return parts


def _above(trees: Sequence[RelayTree], name: str) -> set[str]:
    """All that stand above it in any tree."""
    return {above for tree in trees for above in _way_up(tree, name)}


def planned_shares(plan: RelayPlan) -> dict[str, float]:
    """How many times the version each worker sends, by the plan: Σ over trees of k · w."""
    shares: dict[str, float] = {}
    for tree in plan.trees:
        for parent in tree.parents.values():
            if parent != ORIGIN:
                shares[parent] = shares.get(parent, 0.0) + tree.weight
    return shares


def joiner_part(sources: Sequence[PeerId], num_chunks: int) -> RelayPart:
    """Equal stripes, one for each source. If that is slow or gone the next one helps, before
    the origin does; none of them waits for the joiner, so no two wait for each other."""
    if not sources or num_chunks < 1:
        return RelayPart()
    sizes = stripe_sizes(num_chunks, [1.0] * len(sources))
    return RelayPart(
        tuple(Stripe(size, (*sources[k:], *sources[:k])) for k, size in enumerate(sizes) if size)
    )


def followers(parts: Mapping[PeerId, RelayPart], name: PeerId) -> set[PeerId]:
    """Who gets chunks from `name`, directly or through others. None of them is a source for
    it: they would wait for each other."""
    receivers: dict[str, list[PeerId]] = {}
    for peer, part in parts.items():
        for source in part.sources:
            receivers.setdefault(source, []).append(peer)
    found: set[PeerId] = set()
    ahead = [name]
    while ahead:
        new = [peer for peer in receivers.get(ahead.pop(), ()) if peer not in found]
        found.update(new)
        ahead += new
    return found


def suppliers(part: RelayPart, receiving: RelayPart, sender: Name) -> set[Name] | None:
    """From whom the sender, whose part is `part`, gets what it sends to the worker whose part
    is `receiving`; None if that one follows no trees."""
    if not receiving.planned_s or (part.stripes and not part.planned_s):
        return None
    trees = [k for k, s in enumerate(receiving.stripes) if s.sources[:1] == (sender,)]
    if not part.stripes:
        return {ORIGIN} if trees else set()
    return {(part.stripes[k].sources or (ORIGIN,))[0] for k in trees}


def rate_beside_a_star(
    origin_mbit: float, up_mbit: Sequence[float], down_mbit: Sequence[float], *, num_star: int
) -> float:
    """What the origin has left for a plan while `num_star` workers without a relay get the
    version from it alone, all of them together in the fluid limit.

    R = min(u_0/(k + 1), (u_0 + Σu_i)/(n + k), min d_i) is the rate in which everybody could
    receive, with n workers in the plan and k beside it; u_0 - kR is left, at least R.
    """
    if not num_star:
        return origin_mbit
    copies = len(up_mbit) + num_star
    rate = min(origin_mbit / (num_star + 1), (origin_mbit + sum(up_mbit)) / copies, *down_mbit)
    return origin_mbit - num_star * rate


def _heaviest(trees: Sequence[RelayTree]) -> list[RelayTree]:
    """At most STRIPES_MAX, in their order."""
    if len(trees) <= STRIPES_MAX:
        return list(trees)
    kept = sorted(range(len(trees)), key=lambda index: (-trees[index].weight, index))
    return [trees[index] for index in sorted(kept[:STRIPES_MAX])]


def _way_up(tree: RelayTree, name: str) -> tuple[str, ...]:
    way: list[str] = []
    found = tree.parents[name]
    while found != ORIGIN and len(way) < SOURCES_MAX:
        way.append(found)
        found = tree.parents[found]
    return tuple(way)
