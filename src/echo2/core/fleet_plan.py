"""For each S, the cheapest machines on offer with which the learner hardly waits.

    level d: machines with downlink >= d --model--> cheapest set that is enough
    of all levels and all periods κ: the one with the cheapest step

T_bcast depends on who takes part: one slow downlink holds up all. So the slowest are left out one
level after the other. Uplinks are not chosen by: where they are scarce, a set with fewer but
wider ones may be cheaper, and is found only if a level leads to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from echo2.core.fleet_case import FleetCase
from echo2.core.fleet_terms import Machine, PlanRow, RunTerms

LEVELS_MAX: Final = 12
"""Downlinks that are looked at as the slowest, evenly chosen among those on offer."""


class CapacityModel(Protocol):
    """Which sets of machines are enough, and how long a step takes with one."""

    @property
    def name(self) -> str: ...

    def periods(self, staleness_max: int) -> Sequence[int]:
        """The κ to look at for this S."""

    def enough(self, case: FleetCase, allowed: Sequence[Machine]) -> PlanRow | None:
        """The cheapest set of `allowed` with which the learner hardly waits; None: there is none,
        or none was found."""

    def too_few(self, case: FleetCase) -> PlanRow:
        """What comes of a case in which no set is enough."""


def fleet_plan(
    terms: RunTerms, machines: Sequence[Machine], model: CapacityModel, staleness: range
) -> list[PlanRow]:
    """A row for each S that the model has a period for. `machines` has at least one."""
    rows = (plan_row(terms, machines, model, staleness_max=s) for s in staleness)
    return [row for row in rows if row is not None]


def plan_row(
    terms: RunTerms, machines: Sequence[Machine], model: CapacityModel, *, staleness_max: int
) -> PlanRow | None:
    """The cheapest fleet for S; None when the model has no period for it."""
    cases = [FleetCase(terms, machines, staleness_max, k) for k in model.periods(staleness_max)]
    rows = [
        row
        for case in cases
        for allowed in _levels(machines)
        if (row := model.enough(case, allowed)) is not None
    ]
    rows = rows or [model.too_few(case) for case in cases]
    return min(rows, key=lambda row: row.usd_per_step, default=None)


def _levels(machines: Sequence[Machine]) -> Iterator[list[Machine]]:
    """The machines with at least some downlink: all of them first, the widest alone last."""
    downs = sorted({machine.kind.down_mbit for machine in machines})
    if len(downs) > LEVELS_MAX:
        step = (len(downs) - 1) / (LEVELS_MAX - 1)
        downs = [downs[round(step * i)] for i in range(LEVELS_MAX)]
    for least in downs:
        yield [machine for machine in machines if machine.kind.down_mbit >= least]
