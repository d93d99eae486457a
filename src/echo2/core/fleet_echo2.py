"""A plan by echo2's own capacity model, which plays the learner's steps (`core/capacity.py`).

A set is enough when the bubble that is predicted of it is at most BUBBLE_MAX. μ_min is the lowest
of the rates R/T_train·RATIO^k whose cheapest set is enough, found by bisection: a set of a higher
rate waits less, but for the noise of what is played. The plan takes the cheapest set that makes
γ·μ_min, and is enough itself.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from echo2.core.capacity import BUBBLE_MAX, Prediction, Workload, predict
from echo2.core.capacity_pool import Pool, WorkerKind
from echo2.core.fleet_case import Fleet, FleetCase
from echo2.core.fleet_terms import Machine, PlanRow

RATIO: Final = 1.03
"""From one rate that is looked at to the next."""
LATENCY_RATIO: Final = 1.2
"""Workers whose mean times of a group are within this are played as one kind."""
RATE_MOST: Final = 6.0
"""Highest rate that is looked at, in R/T_train: what that does not mend, no rate does."""
RATES_ABOVE_MARGIN_MAX: Final = 10
"""Rates above γ·μ_min that are looked at."""
NUM_RATES_TOO_FEW: Final = 5
"""Rates among which the cheapest step is looked for, where no set is enough."""


class Echo2Model:
    name = "echo2"

    def periods(self, staleness_max: int) -> Sequence[int]:
        """The shortest, the longest, and those between by powers of two."""
        return sorted({min(2**k, staleness_max + 1) for k in range(staleness_max.bit_length() + 1)})

    def enough(self, case: FleetCase, allowed: Sequence[Machine], below: float) -> PlanRow | None:
        """Nothing, too, where only the margin γ cannot be had."""
        index = self._least(case, allowed, below)
        if index is None:
            return None
        mu_min = self._rate(case, index)
        fleet = self._with_margin(case, allowed, case.terms.rate_margin * mu_min)
        if fleet is None:
            return None
        words = ""
        if index:
            failed = self._predicted(case, allowed, index - 1)
            words = f"{failed.reason}; from {mu_min:.4g} groups/s on the learner hardly waits"
        return case.row(
            fleet,
            mu_min=mu_min,
            step_s=self.step_s(case, fleet.pool),
            bottleneck=words,
            is_enough=True,
        )

    def too_few(self, case: FleetCase) -> PlanRow:
        """All machines, where they lack only the margin γ; else the fleet with the cheapest step,
        of some between R/T_train and all machines."""
        whole = case.whole()
        index = self._least(case, case.machines, math.inf)
        if index is not None:
            mu_min = self._rate(case, index)
            words = (
                f"the machines on offer: all {whole.pool.num_workers} make "
                f"{whole.chosen.rate / mu_min:.3g} times what is needed at least, and "
                f"plan.rate_margin asks for {case.terms.rate_margin:g} times"
            )
            return self._row_too_few(case, whole, mu_min, words)
        most = whole.chosen.rate
        least = min(case.bare_rate, most)
        fleets = [whole]
        for k in range(NUM_RATES_TOO_FEW):
            fleet = case.fleet(case.machines, least * (most / least) ** (k / NUM_RATES_TOO_FEW))
            if fleet is not None:
                fleets.append(fleet)
        rows = [self._row_too_few(case, fleet, math.inf, "") for fleet in fleets]
        return min(rows, key=lambda row: row.usd_per_step)

    def step_s(self, case: FleetCase, pool: Pool) -> float:
        return case.terms.train_s / (1.0 - self._of(case, pool).bubble)

    def bubble_error(self, case: FleetCase, pool: Pool) -> float:
        return self._of(case, pool).bubble_error

    def _row_too_few(self, case: FleetCase, fleet: Fleet, mu_min: float, words: str) -> PlanRow:
        prediction = self._of(case, fleet.pool)
        return case.row(
            fleet,
            mu_min=mu_min,
            step_s=self.step_s(case, fleet.pool),
            bottleneck=words or prediction.reason,
            is_enough=False,
        )

    def _least(self, case: FleetCase, allowed: Sequence[Machine], below: float) -> int | None:
        """The index of the lowest rate whose cheapest set is enough; None if no rate's is, or none
        whose step may be cheaper than `below`."""
        whole = sum(machine.on_average.rate_groups_per_s * machine.count for machine in allowed)
        most = min(whole * (1 - 1e-9) / case.bare_rate, RATE_MOST)
        if most < 1 - BUBBLE_MAX:
            return None
        low, high = 0, math.floor(math.log(most / (1 - BUBBLE_MAX), RATIO))
        if below < math.inf:
            margin = case.terms.rate_margin

            def least_usd(index: int) -> float:
                return case.least_usd_per_step(allowed, margin * self._rate(case, index))

            high = bisect_left(range(high + 1), below, key=least_usd) - 1
            if high < 0:
                return None
        if self._is_enough(case, allowed, low):
            return low
        if not self._is_enough(case, allowed, high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._is_enough(case, allowed, middle):
                high = middle
            else:
                low = middle
        return high

    def _with_margin(
        self, case: FleetCase, allowed: Sequence[Machine], rate: float
    ) -> Fleet | None:
        """The cheapest that makes `rate`, or little more: it is enough too. None if none is. One
        with slower machines in it may wait longer, though it makes more."""
        for _ in range(RATES_ABOVE_MARGIN_MAX):
            fleet = case.fleet(allowed, rate)
            if fleet is None or self._of(case, fleet.pool).bubble <= BUBBLE_MAX:
                return fleet
            rate *= RATIO
        return None

    def _rate(self, case: FleetCase, index: int) -> float:
        return case.bare_rate * (1 - BUBBLE_MAX) * RATIO**index

    def _is_enough(self, case: FleetCase, allowed: Sequence[Machine], index: int) -> bool:
        return self._predicted(case, allowed, index).bubble <= BUBBLE_MAX

    def _predicted(self, case: FleetCase, allowed: Sequence[Machine], index: int) -> Prediction:
        fleet = case.fleet(allowed, self._rate(case, index))
        assert fleet is not None  # the index is bounded by the rate of all
        return self._of(case, fleet.pool)

    def _of(self, case: FleetCase, pool: Pool) -> Prediction:
        terms = case.terms
        return _predict(
            Workload(
                groups_per_step=terms.groups_per_step,
                train_s=terms.train_s,
                staleness_max=case.staleness_max,
                period=case.period,
                late=terms.late,
                latency_cv=terms.latency_cv,
                lead_steps=terms.lead_steps,
                fetch_s=case.bcast_s(pool) - max(kind.install_s for kind, _ in pool.members),
            ),
            _alike(pool),
        )


def _alike(pool: Pool) -> Pool:
    """The same with workers whose groups take about as long as one kind, since what is played
    takes longer with each. Rates and slots stay, so does each kind's mean time of a group."""
    found: dict[tuple[int, float], list[tuple[WorkerKind, int]]] = defaultdict(list)
    for kind, count in pool.members:
        place = round(math.log(kind.latency_s, LATENCY_RATIO))
        found[place, kind.install_s].append((kind, count))
    return Pool(tuple(_merged(members) for _, members in sorted(found.items())))


def _merged(members: Sequence[tuple[WorkerKind, int]]) -> tuple[WorkerKind, int]:
    """One worker that does what all of them do; the only one as it is."""
    if len(members) == 1:
        return members[0]
    first = members[0][0]
    rate = math.fsum(kind.rate_groups_per_s * count for kind, count in members)
    slots = sum(kind.slots * count for kind, count in members)
    return replace(first, rate_groups_per_s=rate, slots=slots), 1


_predict = lru_cache(maxsize=4096)(predict)
