"""The capacity models that a plan of a fleet can go by (`CapacityModel`)."""

from __future__ import annotations

import math

from echo2.core.capacity_paper import paper_mu_min
from echo2.core.capacity_pool import Pool
from echo2.core.fleet_terms import RunTerms


class PaperModel:
    """The paper's equations (1), (2) and (7), which assume that nothing sampled during T_bcast
    can be trained.

    Eq. (7) asks R/μ ≤ (S + 1 − κ)·T_train − T_bcast for Δ_max ≤ S, so κ is 1 to S.
    """

    name = "paper"

    def periods(self, staleness_max: int) -> range:
        return range(1, staleness_max + 1)

    def mu_min(
        self, terms: RunTerms, pool: Pool, *, staleness_max: int, period: int, bcast_s: float
    ) -> float:
        overlap = paper_mu_min(
            groups_per_step=terms.groups_per_step,
            train_s=terms.train_s,
            bcast_s=bcast_s,
            period=period,
        )
        left_s = (staleness_max + 1 - period) * terms.train_s - bcast_s
        window = terms.groups_per_step / left_s if left_s > 0 else math.inf
        return max(overlap, window)

    def step_s(
        self, terms: RunTerms, pool: Pool, *, staleness_max: int, period: int, bcast_s: float
    ) -> float:
        """The shortest T for which Eq. (1) and Eq. (7) hold, at least T_train."""
        sampling_s = terms.groups_per_step / pool.rate_groups_per_s
        return max(
            terms.train_s,
            bcast_s / period + sampling_s,
            (bcast_s + sampling_s) / (staleness_max + 1 - period),
        )
