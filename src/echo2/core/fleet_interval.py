"""What a row of a plan is worth when its terms were measured, or are uncertain: intervals.

The machines of the row stay. One term at a time is multiplied and divided by e^m, m up to Z of
its standard errors, while the others stay; the largest changes of bubble and price on the way, up
and down apart, are added in squares over the terms, with the error of what was played. So an
interval need not be symmetric (a bubble of 0 can only grow), and is never narrower where an error
is larger. It holds Z = 1.64 standard errors each way, nine tenths of a normal distribution, as far
as the errors are independent and the model is right.

The model is asked at MOVES only; between them the curve is taken for straight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

from echo2.core.fleet_case import FleetCase
from echo2.core.fleet_plan import CapacityModel
from echo2.core.fleet_terms import Machine, PlanRow, RunTerms

Z: Final = 1.64
ERROR_MAX: Final = 0.5
"""Largest relative standard error of a term."""
MOVES: Final = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Natural logarithms of the factors; the last is above Z·ERROR_MAX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardErrors:
    """Relative: `train` of T_train, `rate` of all machines' rates together, `bcast` of T_bcast,
    install and all. 0 is known; ValueError outside 0 to ERROR_MAX."""

    train: float = 0.0
    rate: float = 0.0
    bcast: float = 0.0

    def __post_init__(self) -> None:
        for error in (self.train, self.rate, self.bcast):
            if not 0 <= error <= ERROR_MAX:
                raise ValueError(f"a standard error is {error}; allowed is 0 to {ERROR_MAX:g}")


@dataclass(frozen=True, slots=True)
class RowInterval:
    """(low, high); each holds what the row says."""

    bubble: tuple[float, float]
    usd_per_step: tuple[float, float]


_Terms: TypeAlias = tuple[RunTerms, Sequence[Machine]]
_Point: TypeAlias = tuple[float, float]
"""Bubble, $ per step."""


def row_interval(
    terms: RunTerms,
    machines: Sequence[Machine],
    model: CapacityModel,
    row: PlanRow,
    errors: StandardErrors,
) -> RowInterval | None:
    """None where nothing is uncertain."""
    moves = (
        (errors.train, _train_moved),
        (errors.rate, _rate_moved),
        (errors.bcast, _bcast_moved),
    )
    if not any(error for error, _ in moves):
        return None

    def point(at: Callable[[_Terms, float], _Terms], move: float) -> _Point:
        case = FleetCase(*at((terms, machines), math.exp(move)), row.staleness_max, row.period)
        fleet = case.these(row.counts, why=row.proof)
        step_s = model.step_s(case, fleet.pool)
        found = case.row(fleet, mu_min=row.mu_min, step_s=step_s, bottleneck="", is_enough=True)
        return found.bubble_ratio, found.usd_per_step

    case = FleetCase(terms, machines, row.staleness_max, row.period)
    played = model.bubble_error(case, case.these(row.counts, why=row.proof).pool)
    noise = (Z * played, Z * played / (1.0 - row.bubble_ratio) * row.usd_per_step)
    reaches = [(noise, noise)]
    reaches += [_reach(partial(point, move), Z * error) for error, move in moves if error]
    (less_bubble, less_usd), (more_bubble, more_usd) = (
        [math.hypot(*(reach[side][i] for reach in reaches)) for i in (0, 1)] for side in (0, 1)
    )
    bubble, usd = row.bubble_ratio, row.usd_per_step
    return RowInterval(
        (max(0.0, bubble - less_bubble), min(1.0, bubble + more_bubble)),
        (max(0.0, usd - less_usd), usd + more_usd),
    )


# ------------------------------------------------------------------------------- helpers


def _reach(point: Callable[[float], _Point], width: float) -> tuple[_Point, _Point]:
    """By how much bubble and price are at most below, and above, those of the row, for moves from
    -width to width."""
    centre = point(0.0)
    seen = [centre]
    for sign in (-1, 1):
        before, last = 0.0, centre
        for move in MOVES:
            there = point(sign * move)
            if move >= width:
                share = (width - before) / (move - before)
                seen.append(
                    (
                        last[0] + share * (there[0] - last[0]),
                        last[1] + share * (there[1] - last[1]),
                    )
                )
                break
            seen.append(there)
            before, last = move, there
    bubbles, prices = zip(*seen, strict=True)
    return (
        (centre[0] - min(bubbles), centre[1] - min(prices)),
        (max(bubbles) - centre[0], max(prices) - centre[1]),
    )


def _train_moved(at: _Terms, factor: float) -> _Terms:
    terms, machines = at
    return replace(terms, train_s=terms.train_s * factor), machines


def _rate_moved(at: _Terms, factor: float) -> _Terms:
    terms, machines = at
    return terms, [
        m.with_kind(rate_groups_per_s=m.kind.rate_groups_per_s * factor) for m in machines
    ]


def _bcast_moved(at: _Terms, factor: float) -> _Terms:
    """Slower lines, encoding and installs: the bytes, which cost egress, stay."""
    terms, machines = at
    weights = replace(
        terms.weights,
        origin_up_mbit=terms.weights.origin_up_mbit / factor,
        encode_s=terms.weights.encode_s * factor,
    )
    return replace(terms, weights=weights), [
        m.with_kind(
            up_mbit=m.kind.up_mbit / factor,
            down_mbit=m.kind.down_mbit / factor,
            install_s=m.kind.install_s * factor,
        )
        for m in machines
    ]
