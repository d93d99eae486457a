"""For each S, the cheapest machines on offer with which the learner hardly waits.

T_bcast depends on who takes part, and how many groups per second are needed depends on T_bcast.
So the slowest downlinks are left out one level after the other; at each level the cheapest set
that reaches γ·μ_min is found (`core/activation.py`), T_bcast is looked at again with that very
set, and the set is found again until it bears the T_bcast that it has itself:

    level d: machines with downlink >= d --> T_bcast --> γ·μ_min --> cheapest set
                                               ^------ longer? -------'

Each set is the cheapest for its level and T_bcast; of all levels and all periods κ the one with
the cheapest step is taken. Uplinks are not chosen by: where they are scarce, a set with fewer
but wider ones may be cheaper, and is found only if a level leads to it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from echo2.core.activation import OfferSet, cheapest_set
from echo2.core.capacity_pool import Pool
from echo2.core.capacity_spread import fluid_bcast_s
from echo2.core.dissemination_hosts import Host, megabits, reach_bound
from echo2.core.fleet_terms import CapacityModel, Machine, PlanRow, RunTerms

LEVELS_MAX: Final = 12
"""Downlinks that are looked at as the slowest, evenly chosen among those on offer."""
ROUNDS_MAX: Final = 20
"""Times that T_bcast is looked at again for one level."""


def fleet_plan(
    terms: RunTerms,
    machines: Sequence[Machine],
    model: CapacityModel,
    staleness_range: range,
) -> list[PlanRow]:
    """A row for each S that the model allows a period for. `machines` has at least one."""
    rows = (plan_row(terms, machines, model, staleness_max=s) for s in staleness_range)
    return [row for row in rows if row is not None]


def plan_row(
    terms: RunTerms, machines: Sequence[Machine], model: CapacityModel, *, staleness_max: int
) -> PlanRow | None:
    """The cheapest fleet for S; None when the model allows no period."""
    rows = [
        row
        for period in model.periods(staleness_max)
        for row in _rows(_Case(terms, machines, model, staleness_max, period))
    ]
    enough = [row for row in rows if row.is_enough]
    return min(enough or rows, key=lambda row: row.usd_per_step, default=None)


def _rows(case: _Case) -> Iterator[PlanRow]:
    """One for each level of downlinks; of all machines when no level has enough."""
    enough = False
    for allowed in _levels(case.machines):
        row = case.fixed_point(allowed)
        if row is not None:
            enough = True
            yield row
    if not enough:
        yield case.whole()


def _levels(machines: Sequence[Machine]) -> Iterator[list[Machine]]:
    """The machines with at least some downlink, the widest first."""
    downs = sorted({machine.kind.down_mbit for machine in machines}, reverse=True)
    if len(downs) > LEVELS_MAX:
        step = (len(downs) - 1) / (LEVELS_MAX - 1)
        downs = [downs[round(step * i)] for i in range(LEVELS_MAX)]
    for least in downs:
        yield [machine for machine in machines if machine.kind.down_mbit >= least]


class _Case:
    """One S and one κ."""

    def __init__(
        self,
        terms: RunTerms,
        machines: Sequence[Machine],
        model: CapacityModel,
        staleness_max: int,
        period: int,
    ) -> None:
        self.terms = terms
        self.machines = machines
        self.model = model
        self.staleness_max = staleness_max
        self.period = period

    def fixed_point(self, allowed: Sequence[Machine]) -> PlanRow | None:
        """The cheapest set of `allowed` that bears its own T_bcast; None if none was found."""
        offers = [machine.offer(self.terms, self.period) for machine in allowed]
        bcast_s, pool = self._least_bcast_s(allowed), _pool(allowed, {})
        for _ in range(ROUNDS_MAX):
            mu_min = self._mu_min(pool, bcast_s)
            if not math.isfinite(mu_min):
                return None
            found = cheapest_set(offers, self.terms.rate_margin * mu_min)
            if not found.reaches:
                return None
            pool = _pool(allowed, found.counts)
            own_s = fluid_bcast_s(self.terms.weights, pool)
            own_mu_min = self._mu_min(pool, own_s)
            if found.rate * (1 + 1e-6) >= self.terms.rate_margin * own_mu_min:
                return self._row(found, pool, own_s, own_mu_min)
            bcast_s = max(own_s, bcast_s * (1 + 1e-6))
        return None

    def whole(self) -> PlanRow:
        """All machines, which are not enough."""
        offers = [machine.offer(self.terms, self.period) for machine in self.machines]
        counts = {machine.kind.name: machine.count for machine in self.machines}
        pool = _pool(self.machines, counts)
        bcast_s = fluid_bcast_s(self.terms.weights, pool)
        mu_min = self._mu_min(pool, bcast_s)
        usd_per_h = math.fsum(offer.mean_usd_per_h * offer.count for offer in offers)
        if math.isfinite(mu_min):
            reason = (
                f"all {pool.num_workers} machines on offer make {pool.rate_groups_per_s:.4g} of "
                f"the {self.terms.rate_margin * mu_min:.4g} groups/s needed"
            )
        else:
            reason = (
                f"no rate is enough: with all {pool.num_workers} machines on offer T_bcast is "
                f"{bcast_s:.4g} s, of κ·T_train = {self.period * self.terms.train_s:.4g} s"
            )
        found = OfferSet(
            counts, usd_per_h, pool.rate_groups_per_s, usd_per_h, reaches=False, reason=reason
        )
        return self._row(found, pool, bcast_s, mu_min)

    def _least_bcast_s(self, allowed: Sequence[Machine]) -> float:
        """T_bcast of any of them alone that has the slowest downlink."""
        slowest = min(allowed, key=lambda machine: machine.kind.down_mbit)
        return fluid_bcast_s(self.terms.weights, Pool(((slowest.on_average, 1),)))

    def _mu_min(self, pool: Pool, bcast_s: float) -> float:
        return self.model.mu_min(
            self.terms,
            pool,
            staleness_max=self.staleness_max,
            period=self.period,
            bcast_s=bcast_s,
        )

    def _row(self, found: OfferSet, pool: Pool, bcast_s: float, mu_min: float) -> PlanRow:
        terms = self.terms
        step_s = self.model.step_s(
            terms, pool, staleness_max=self.staleness_max, period=self.period, bcast_s=bcast_s
        )
        prices = {machine.kind.name: machine for machine in self.machines}
        rented = math.fsum(
            prices[name].kind.usd_per_h * prices[name].availability * count
            for name, count in found.counts.items()
        )
        return PlanRow(
            staleness_max=self.staleness_max,
            period=self.period,
            mu_min=mu_min,
            counts=found.counts,
            rate=found.rate,
            bcast_s=bcast_s,
            bcast_words=_bcast_words(terms, pool),
            step_s=step_s,
            bubble_ratio=1.0 - terms.train_s / step_s,
            learner_usd_per_h=terms.learner_usd_per_h,
            machines_usd_per_h=rented,
            egress_usd_per_h=found.usd_per_h - rented + self._origin_egress_usd_per_h(pool),
            is_enough=found.reaches,
            is_cheapest=found.is_cheapest,
            proof=found.reason,
        )

    def _origin_egress_usd_per_h(self, pool: Pool) -> float:
        """Of what the origin's uplink can send while a version travels, at most a copy each."""
        terms, weights = self.terms, self.terms.weights
        travels_s = fluid_bcast_s(weights, pool) - weights.encode_s
        most_gb = weights.origin_up_mbit * travels_s / 8e3
        sent_gb = min(most_gb, pool.num_workers * terms.wire_gb)
        return terms.origin_egress_usd_per_gb * sent_gb * 3600.0 / (self.period * terms.train_s)


def _pool(machines: Sequence[Machine], counts: Mapping[str, int]) -> Pool:
    """The machines taken, as they are on average; one of each where `counts` names none."""
    taken = [(m.on_average, counts.get(m.kind.name, 0) if counts else 1) for m in machines]
    return Pool(tuple((kind, count) for kind, count in taken if count))


def _bcast_words(terms: RunTerms, pool: Pool) -> str:
    """What the longest part of T_bcast is."""
    weights = terms.weights
    travels = round(weights.num_bytes * weights.delta_share)
    origin = Host("origin", weights.origin_up_mbit)
    workers = [kind.host(kind.name) for kind, count in pool.members for _ in range(count)]
    seconds, words = reach_bound(origin, workers, travels)
    install_s = max((kind.install_s for kind, _ in pool.members), default=0.0)
    parts = {
        f"for {megabits(travels) / 8e3:.3g} GB over {words}": seconds,
        f"for encoding, {weights.encode_s:.3g} s": weights.encode_s,
        f"for the install, {install_s:.3g} s": install_s,
    }
    return max(parts, key=lambda part: parts[part])
