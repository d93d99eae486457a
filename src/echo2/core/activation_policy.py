"""Which workers to activate and to release while a run goes (papers, sections 3.5 and 4.3).

    enough --pool below γ·μ_min by more than its error--> short --persistence_s--> activate
       |                                                                              |
       '---pool above it by surplus_share and its error--> surplus --same--> release one
                                                                                      |
       after either: nothing for cool_down_s  <---------------------------------------'

A worker that is activated counts from then on, though it is of use only after its lead time, so
that the same need is not met twice. One that was never measured counts with its prior. `decide` is
pure: the same history of calls gives the same decisions. It only suggests; nothing is started here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from echo2.core.activation import Offer, cheapest_set

ROUNDING: Final = 1e-9
"""A pool is not short by this share of the target: sums of rates are rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """`margin` γ; `surplus_share` of the target that must be left over before one is released;
    `persistence_s` for which a deviation must last, `cool_down_s` after each change; `errors`:
    how many standard errors of the pool's rate a deviation must exceed; `prior_samples`: as how
    many measurements the prior of a worker counts."""

    margin: float = 1.1
    surplus_share: float = 0.15
    persistence_s: float = 60.0
    cool_down_s: float = 120.0
    errors: float = 1.0
    prior_samples: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEstimate:
    """A worker as it is known now. `rate_mean` and `rate_deviation` of `num_samples` measurements,
    `prior_rate` before any, in groups/s. `is_here`: heartbeats come, and it was not reclaimed.
    `standby_usd_per_h` is what it costs while it is not active. Without `may_leave` it is never
    released, nor is one by which nothing would be saved."""

    name: str
    prior_rate: float
    usd_per_h: float
    standby_usd_per_h: float = 0.0
    rate_mean: float = 0.0
    rate_deviation: float = 0.0
    num_samples: int = 0
    is_here: bool = True
    is_active: bool = False
    may_leave: bool = True

    def rate(self, prior_samples: float) -> float:
        """The mean of the measurements and the prior, each with its weight."""
        weight = prior_samples + self.num_samples
        if not weight:
            return self.prior_rate
        return (prior_samples * self.prior_rate + self.num_samples * self.rate_mean) / weight

    def error(self, prior_samples: float) -> float:
        """Standard error of `rate`; half of the prior's rate where nothing was measured."""
        if not self.num_samples:
            return self.prior_rate / 2
        return self.rate_deviation / math.sqrt(prior_samples + self.num_samples)


@dataclass(frozen=True, slots=True)
class ActivationDecision:
    """Names of workers to activate and to release, and why, also where there are none."""

    activate: tuple[str, ...]
    release: tuple[str, ...]
    reason: str


class ActivationPolicy:
    def __init__(self, settings: ActivationSettings) -> None:
        self.settings = settings
        self._deviation = ""
        self._deviates_since = 0.0
        self._quiet_until = -math.inf

    def decide(
        self, now: float, wanted_rate: float, workers: Sequence[WorkerEstimate]
    ) -> ActivationDecision:
        """To be called regularly; `wanted_rate` is μ_min in groups/s, `now` in seconds."""
        settings = self.settings
        active = [worker for worker in workers if worker.is_here and worker.is_active]
        pool = math.fsum(worker.rate(settings.prior_samples) for worker in active)
        error = math.hypot(*(worker.error(settings.prior_samples) for worker in active))
        target = settings.margin * wanted_rate
        told = f"{pool:.4g} ± {error:.2g} of {target:.4g} groups/s"
        if pool + settings.errors * error < target * (1 - ROUNDING):
            deviation = "short"
        elif pool - settings.errors * error > (1 + settings.surplus_share) * target:
            deviation = "surplus"
        else:
            deviation = ""
        if deviation != self._deviation:
            self._deviation, self._deviates_since = deviation, now
        if not deviation:
            return ActivationDecision((), (), f"enough: {told}")
        if now < self._quiet_until:
            return ActivationDecision((), (), f"{deviation}: {told}; cooling down")
        lasted_s = now - self._deviates_since
        if lasted_s < settings.persistence_s:
            return ActivationDecision((), (), f"{deviation} for {lasted_s:.0f} s: {told}")
        if deviation == "short":
            chosen = self._cheapest(workers, target - pool)
            decision = ActivationDecision(chosen, (), f"short: {told}")
        else:
            released = self._dearest(active, pool, target)
            decision = ActivationDecision((), released, f"surplus: {told}")
        if decision.activate or decision.release:
            self._quiet_until = now + settings.cool_down_s
        return decision

    def _cheapest(self, workers: Sequence[WorkerEstimate], missing: float) -> tuple[str, ...]:
        """The cheapest of those that stand by; all of them if they are not enough."""
        offers = [
            Offer(
                worker.name,
                max(0.0, worker.usd_per_h - worker.standby_usd_per_h),
                worker.rate(self.settings.prior_samples),
            )
            for worker in workers
            if worker.is_here and not worker.is_active
        ]
        return tuple(cheapest_set(offers, missing).counts)

    def _dearest(
        self, active: Sequence[WorkerEstimate], pool: float, target: float
    ) -> tuple[str, ...]:
        """The one that saves most per rate, of those without which enough is left."""
        prior = self.settings.prior_samples
        spare = pool - (1 + self.settings.surplus_share / 2) * target
        able = [
            worker
            for worker in active
            if worker.may_leave
            and worker.rate(prior) <= spare
            and worker.usd_per_h > worker.standby_usd_per_h
        ]

        def price_per_rate(worker: WorkerEstimate) -> float:
            saved = worker.usd_per_h - worker.standby_usd_per_h
            return saved / worker.rate(prior) if worker.rate(prior) else math.inf

        return (max(able, key=price_per_rate).name,) if able else ()
