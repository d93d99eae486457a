"""One S and one period κ of a plan: sets of machines, their T_bcast, and what a step costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo2.core.activation import OfferSet, cheapest_set
from echo2.core.capacity_pool import Pool
from echo2.core.capacity_spread import fluid_bcast_s
from echo2.core.dissemination_hosts import Host, megabits, reach_bound
from echo2.core.fleet_terms import Machine, PlanRow, RunTerms


@dataclass(frozen=True, slots=True)
class Fleet:
    """Machines taken, as they are on average over their absences."""

    chosen: OfferSet
    pool: Pool


@dataclass(frozen=True, slots=True)
class FleetCase:
    terms: RunTerms
    machines: Sequence[Machine]
    staleness_max: int
    period: int

    @property
    def bare_rate(self) -> float:
        """R/T_train: groups per second that a learner eats which never waits."""
        return self.terms.groups_per_step / self.terms.train_s

    @property
    def has_egress(self) -> bool:
        """Whether what is sent costs money."""
        machines = self.machines
        return self.terms.origin_egress_usd_per_gb > 0 or any(
            machine.egress_usd_per_gb for machine in machines
        )

    def least_usd_per_step(self, allowed: Sequence[Machine], rate: float) -> float:
        """No set of `allowed` that makes `rate` has a cheaper step; inf if all make less."""
        fleet = self.fleet(allowed, rate)
        if fleet is None:
            return math.inf
        usd_per_h = self.terms.learner_usd_per_h + fleet.chosen.bound_usd_per_h
        return usd_per_h * self.terms.train_s / 3600.0

    def fleet(self, allowed: Sequence[Machine], rate: float) -> Fleet | None:
        """The cheapest of `allowed` that make `rate` groups per second; None if all make less."""
        offers = [machine.offer(self.terms, self.period) for machine in allowed]
        chosen = cheapest_set(offers, rate)
        return Fleet(chosen, _pool(allowed, chosen.counts)) if chosen.reaches else None

    def whole(self) -> Fleet:
        """All machines."""
        counts = {machine.kind.name: machine.count for machine in self.machines}
        return self.these(counts, why="all on offer")

    def these(self, counts: Mapping[str, int], *, why: str) -> Fleet:
        """So many of each, by name."""
        offers = [machine.offer(self.terms, self.period) for machine in self.machines]
        pool = _pool(self.machines, counts)
        usd_per_h = math.fsum(offer.mean_usd_per_h * counts.get(offer.name, 0) for offer in offers)
        return Fleet(
            OfferSet(counts, usd_per_h, pool.rate_groups_per_s, usd_per_h, True, why), pool
        )

    def bcast_s(self, pool: Pool) -> float:
        return fluid_bcast_s(self.terms.weights, pool)

    def row(
        self, fleet: Fleet, *, mu_min: float, step_s: float, bottleneck: str, is_enough: bool
    ) -> PlanRow:
        """`bottleneck` "" stands for the price of what costs most."""
        terms, chosen = self.terms, fleet.chosen
        by_name = {machine.kind.name: machine for machine in self.machines}
        rented = math.fsum(
            by_name[name].kind.usd_per_h * by_name[name].availability * count
            for name, count in chosen.counts.items()
        )
        egress = chosen.usd_per_h - rented + self._origin_egress_usd_per_h(fleet.pool)
        prices = {
            "the learner": terms.learner_usd_per_h,
            "the machines that sample": rented,
            "egress": egress,
        }
        return PlanRow(
            staleness_max=self.staleness_max,
            period=self.period,
            mu_min=mu_min,
            counts=chosen.counts,
            rate=chosen.rate,
            bcast_s=self.bcast_s(fleet.pool),
            step_s=step_s,
            bubble_ratio=1.0 - terms.train_s / step_s,
            learner_usd_per_h=terms.learner_usd_per_h,
            machines_usd_per_h=rented,
            egress_usd_per_h=egress,
            is_enough=is_enough,
            is_cheapest=chosen.is_cheapest,
            proof=chosen.reason,
            bottleneck=bottleneck or _dearest(prices),
        )

    def bcast_words(self, pool: Pool) -> str:
        """What the longest part of T_bcast is."""
        weights = self.terms.weights
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

    def _origin_egress_usd_per_h(self, pool: Pool) -> float:
        """Of what the origin's uplink can send while a version travels, at most a copy each."""
        terms, weights = self.terms, self.terms.weights
        travels_s = self.bcast_s(pool) - weights.encode_s
        most_gb = weights.origin_up_mbit * travels_s / 8e3
        sent_gb = min(most_gb, pool.num_workers * terms.wire_gb)
        return terms.origin_egress_usd_per_gb * sent_gb * 3600.0 / (self.period * terms.train_s)


def _pool(machines: Sequence[Machine], counts: Mapping[str, int]) -> Pool:
    taken = [(machine.on_average, counts.get(machine.kind.name, 0)) for machine in machines]
    return Pool(tuple((kind, count) for kind, count in taken if count))


def _dearest(prices: Mapping[str, float]) -> str:
    total = math.fsum(prices.values())
    if not total:
        return "the learner: it hardly waits, and nothing has a price"
    name = max(prices, key=lambda each: prices[each])
    return f"the learner hardly waits; most of the price, {prices[name] / total:.0%}, is {name}"
