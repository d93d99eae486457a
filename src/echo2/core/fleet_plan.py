"""For each S, the cheapest machines on offer with which the learner hardly waits.

    machines with downlink >= d, latency <= l, rate >= r or uplink >= u
        --model--> cheapest set that is enough
    of all such levels and all periods κ: the one with the cheapest step

Who takes part decides about T_bcast, since one slow downlink holds up all, and about how long a
batch waits for its slowest group. Where uplinks are narrower than the origin's, each machine more
makes T_bcast longer, so few quick ones may do what many slow ones cannot. So the slowest in each
sense are left out one level after the other. The cheapest set is among those looked at where no
uplink is narrower than the origin's and there are at most LEVELS_MAX + 1 downlinks; elsewhere a
set between two levels may be cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final, Protocol

from echo2.core.capacity_pool import Pool, WorkerKind
from echo2.core.fleet_case import FleetCase
from echo2.core.fleet_terms import Machine, PlanRow, RunTerms

LEVELS_MAX: Final = 4
"""Downlinks, latencies, rates and uplinks that are looked at as the slowest, evenly chosen among
those there."""


class CapacityModel(Protocol):
    """Which sets of machines are enough, and how long a step takes with one."""

    @property
    def name(self) -> str: ...

    def periods(self, staleness_max: int) -> Sequence[int]:
        """The κ to look at for this S."""

    def enough(self, case: FleetCase, allowed: Sequence[Machine], below: float) -> PlanRow | None:
        """The cheapest set of `allowed` with which the learner hardly waits; None: none was found,
        or none whose step may be cheaper than `below` dollars."""

    def too_few(self, case: FleetCase) -> PlanRow:
        """What comes of a case in which no set is enough."""

    def step_s(self, case: FleetCase, pool: Pool) -> float:
        """Seconds of a learner step, waiting included."""

    def bubble_error(self, case: FleetCase, pool: Pool) -> float:
        """Standard error of the bubble behind `step_s`, from chance; 0 where nothing is played."""


def fleet_plan(
    terms: RunTerms, machines: Sequence[Machine], model: CapacityModel, staleness: range
) -> list[PlanRow]:
    """A row for each S that the model has a period for. `machines` has at least one."""
    rows = (plan_row(terms, machines, model, staleness_max=s) for s in staleness)
    return [row for row in rows if row is not None]


def plan_row(
    terms: RunTerms,
    machines: Sequence[Machine],
    model: CapacityModel,
    *,
    staleness_max: int,
    periods: Sequence[int] | None = None,
    below: float = math.inf,
) -> PlanRow | None:
    """The cheapest fleet for S, with one of `periods` (None: any that the model names), if its
    step is cheaper than `below` dollars. None when there is none; without `below`, only when the
    model has no period for S."""
    found = [k for k in model.periods(staleness_max) if periods is None or k in periods]
    cases = [FleetCase(terms, machines, staleness_max, k) for k in found]
    best = _cheapest_enough(cases, model, below)
    if best is not None or below < math.inf:
        return best
    rows = [model.too_few(case) for case in cases]
    return min(rows, key=lambda row: row.usd_per_step, default=None)


def _cheapest_enough(
    cases: Sequence[FleetCase], model: CapacityModel, below: float
) -> PlanRow | None:
    best: PlanRow | None = None
    for case in cases:
        least: list[set[str]] = []
        """Sets of machines of which some make no more than the bare rate, and are enough: fewer to
        choose from ask for no lower rate."""
        for allowed in _levels(case.machines):
            names = {machine.kind.name for machine in allowed}
            if any(names <= larger for larger in least):
                continue
            row = model.enough(case, allowed, below)
            if row is not None and row.usd_per_step < below:
                best, below = row, row.usd_per_step
            if row is not None and row.mu_min <= case.bare_rate:
                least.append(names)
        if any(len(names) == len(case.machines) for names in least) and not case.has_egress:
            break  # no set needs less, nor does a longer period, which then saves no money
    return best


def _levels(machines: Sequence[Machine]) -> Iterator[list[Machine]]:
    """All machines; then, in each sense, without the slowest, the quickest alone last."""
    yield list(machines)
    senses: list[Callable[[WorkerKind], float]] = [
        lambda kind: kind.down_mbit,
        lambda kind: -kind.latency_s,
        lambda kind: kind.rate_groups_per_s,
        lambda kind: kind.up_mbit,
    ]
    seen = {frozenset(machine.kind.name for machine in machines)}
    for sense in senses:
        for least in _spaced(sorted({sense(machine.kind) for machine in machines})):
            found = [machine for machine in machines if sense(machine.kind) >= least]
            names = frozenset(machine.kind.name for machine in found)
            if names not in seen:
                seen.add(names)
                yield found


def _spaced(values: list[float]) -> list[float]:
    """All but the first, or LEVELS_MAX of them, evenly chosen."""
    if len(values) <= LEVELS_MAX:
        return values[1:]
    step = (len(values) - 1) / LEVELS_MAX
    return [values[round(step * (i + 1))] for i in range(LEVELS_MAX)]
