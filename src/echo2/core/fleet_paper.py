"""A plan by the paper's equations (1), (2) and (7), which assume that nothing sampled during
T_bcast can be trained.

Eq. (7) asks R/μ ≤ (S + 1 − κ)·T_train − T_bcast for Δ_max ≤ S, so κ is 1 to S. T_bcast depends
on who takes part, and the rate that is needed on T_bcast: the cheapest set is found again until
it bears the T_bcast that it has itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from echo2.core.capacity_paper import paper_mu_min
from echo2.core.capacity_pool import Pool
from echo2.core.fleet_case import FleetCase
from echo2.core.fleet_terms import Machine, PlanRow

ROUNDS_MAX: Final = 20
"""Times that T_bcast is looked at again."""
OVERHEAD_SHARE: Final = 0.05
"""Below this share of μ_min, what dissemination asks for beyond R/T_train is no bottleneck."""


class PaperModel:
    name = "paper"

    def periods(self, staleness_max: int) -> Sequence[int]:
        return range(1, staleness_max + 1)

    def enough(self, case: FleetCase, allowed: Sequence[Machine], below: float) -> PlanRow | None:
        """The cheapest set of `allowed` that reaches γ·μ_min; None if none was found, or none has
        a step cheaper than `below`."""
        margin = case.terms.rate_margin
        if case.least_usd_per_step(allowed, margin * case.bare_rate) >= below:
            return None
        slowest = min(allowed, key=lambda machine: machine.kind.down_mbit)
        bcast_s = case.bcast_s(Pool(((slowest.on_average, 1),)))
        for _ in range(ROUNDS_MAX):
            wanted = self.mu_min(case, bcast_s)
            fleet = case.fleet(allowed, margin * wanted) if math.isfinite(wanted) else None
            if fleet is None:
                return None
            own_s = case.bcast_s(fleet.pool)
            mu_min = self.mu_min(case, own_s)
            if fleet.chosen.rate * (1 + 1e-6) >= margin * mu_min:
                overhead = 1 - case.bare_rate / mu_min
                words = (
                    f"dissemination: {overhead:.0%} of the rate makes up for T_bcast, "
                    f"{own_s:.4g} s, most of it {case.bcast_words(fleet.pool)}"
                )
                return case.row(
                    fleet,
                    mu_min=mu_min,
                    step_s=self.step_s(case, fleet.pool),
                    bottleneck=words if overhead > OVERHEAD_SHARE else "",
                    is_enough=True,
                )
            bcast_s = max(own_s, bcast_s * (1 + 1e-6))
        return None

    def too_few(self, case: FleetCase) -> PlanRow:
        """All machines."""
        fleet = case.whole()
        bcast_s = case.bcast_s(fleet.pool)
        mu_min = self.mu_min(case, bcast_s)
        number = fleet.pool.num_workers
        if math.isfinite(mu_min):
            words = (
                f"the machines on offer: all {number} make {fleet.chosen.rate:.4g} of the "
                f"{case.terms.rate_margin * mu_min:.4g} groups/s needed"
            )
        else:
            words = (
                f"dissemination: no rate is enough, with all {number} machines T_bcast is "
                f"{bcast_s:.4g} s of κ·T_train = {case.period * case.terms.train_s:.4g} s, most of "
                f"it {case.bcast_words(fleet.pool)}"
            )
        return case.row(
            fleet,
            mu_min=mu_min,
            step_s=self.step_s(case, fleet.pool),
            bottleneck=words,
            is_enough=False,
        )

    def mu_min(self, case: FleetCase, bcast_s: float) -> float:
        """Groups per second that Eq. (2) and Eq. (7) ask for; inf if no rate is enough."""
        terms = case.terms
        overlap = paper_mu_min(
            groups_per_step=terms.groups_per_step,
            train_s=terms.train_s,
            bcast_s=bcast_s,
            period=case.period,
        )
        left_s = (case.staleness_max + 1 - case.period) * terms.train_s - bcast_s
        window = terms.groups_per_step / left_s if left_s > 0 else math.inf
        return max(overlap, window)

    def step_s(self, case: FleetCase, pool: Pool) -> float:
        """The shortest step for which Eq. (1) and Eq. (7) hold, at least T_train."""
        sampling_s = case.terms.groups_per_step / pool.rate_groups_per_s
        bcast_s = case.bcast_s(pool)
        return max(
            case.terms.train_s,
            bcast_s / case.period + sampling_s,
            (bcast_s + sampling_s) / (case.staleness_max + 1 - case.period),
        )

    def bubble_error(self, case: FleetCase, pool: Pool) -> float:
        return 0.0
