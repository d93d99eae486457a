"""What would make a step of a planned fleet cheaper.

Each remedy is one changed term; the plan is made again with it, at the same S or the next, and
the difference of the two prices per step is what the remedy saves. A remedy that costs money
itself (a wider line) is told without that price, which only the user knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from echo2.core.fleet_plan import CapacityModel, plan_row
from echo2.core.fleet_terms import Machine, PlanRow, RunTerms

SAVING_SHARE_MIN: Final = 0.005
"""Savings below this share of a step's price are not told."""
USED_UP_MAX: Final = 2
"""Offers of which all are taken, for which it is asked what twice as many would save: those with
the lowest price per group."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """`what` is changed, from what to what; `saves_usd_per_step` in $. `makes_enough`: without it
    no set of machines is enough."""

    what: str
    saves_usd_per_step: float
    makes_enough: bool = False


@dataclass(frozen=True, slots=True)
class _Change:
    what: str
    terms: RunTerms
    machines: Sequence[Machine]
    staleness_max: int


def remedies(
    terms: RunTerms, machines: Sequence[Machine], model: CapacityModel, row: PlanRow
) -> list[Remedy]:
    """What would save most, the best first, at the same κ or the next. What makes a fleet enough
    that is not comes before it."""
    found = []
    near = range(row.period - 1, row.period + 2)
    for change in _changes(terms, machines, row):
        other = plan_row(
            change.terms,
            change.machines,
            model,
            staleness_max=change.staleness_max,
            periods=near,
            below=(1 - SAVING_SHARE_MIN) * row.usd_per_step if row.is_enough else math.inf,
        )
        if other is None:
            continue
        saved = row.usd_per_step - other.usd_per_step
        if other.is_enough > row.is_enough:
            found.append(Remedy(change.what, saved, makes_enough=True))
        elif saved > SAVING_SHARE_MIN * row.usd_per_step:
            found.append(Remedy(change.what, saved))
    return sorted(found, key=lambda each: (not each.makes_enough, -each.saves_usd_per_step))


def _changes(terms: RunTerms, machines: Sequence[Machine], row: PlanRow) -> Iterator[_Change]:
    s = row.staleness_max
    weights = terms.weights

    def with_weights(what: str, **changed: Any) -> _Change:
        return _Change(what, replace(terms, weights=replace(weights, **changed)), machines, s)

    def with_machines(what: str, changed: Sequence[Machine]) -> _Change:
        return _Change(what, terms, changed, s)

    up = weights.origin_up_mbit
    yield with_weights(f"origin uplink {up:.4g} -> {2 * up:.4g} Mbit/s", origin_up_mbit=2 * up)
    share = weights.delta_share
    yield with_weights(
        f"half the bytes of a version (delta share {share:.3g} -> {share / 2:.3g})",
        delta_share=share / 2,
    )
    if weights.encode_s:
        yield with_weights(
            f"encoding {weights.encode_s:.3g} -> {weights.encode_s / 2:.3g} s",
            encode_s=weights.encode_s / 2,
        )
    yield _Change(f"S {s} -> {s + 1}", terms, machines, s + 1)
    yield with_machines(
        "a line twice as wide at each machine",
        [m.with_kind(up_mbit=2 * m.kind.up_mbit, down_mbit=2 * m.kind.down_mbit) for m in machines],
    )
    if any(m.kind.install_s for m in machines):
        yield with_machines(
            "an install in half the time",
            [m.with_kind(install_s=m.kind.install_s / 2) for m in machines],
        )
    used_up = [m for m in machines if row.counts.get(m.kind.name, 0) == m.count]
    for machine in sorted(used_up, key=lambda m: m.kind.usd_per_group)[:USED_UP_MAX]:
        yield with_machines(
            f"{2 * machine.count} of {machine.kind.name} instead of {machine.count}",
            [replace(m, count=2 * m.count) if m is machine else m for m in machines],
        )
