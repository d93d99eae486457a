"""The policy that activates and releases: no flapping, need, reclaims, priors, standby prices."""

from __future__ import annotations

import random
from dataclasses import replace

from echo2.core.activation_policy import (
    ActivationDecision,
    ActivationPolicy,
    ActivationSettings,
    WorkerEstimate,
)

SETTINGS = ActivationSettings()


class Fleet:
    """Workers with true rates, measured with noise; what the policy decides is done."""

    def __init__(self, rates: list[float], *, active: int, noise: float, seed: int = 1) -> None:
        self.rng = random.Random(seed)
        self.noise = noise
        self.policy = ActivationPolicy(SETTINGS)
        self.rates = {f"w-{i}": rate for i, rate in enumerate(rates)}
        self.workers = {
            name: WorkerEstimate(name=name, prior_rate=rate, usd_per_h=0.3, is_active=i < active)
            for i, (name, rate) in enumerate(self.rates.items())
        }
        self.now = 0.0
        self.changes: list[ActivationDecision] = []

    def run(self, seconds: int, *, wanted: float) -> None:
        """A decision every ten seconds, on means of the last five measurements."""
        for _ in range(0, seconds, 10):
            self.now += 10
            for name, worker in self.workers.items():
                if worker.is_active:
                    samples = [
                        self.rates[name] * self.rng.uniform(1 - self.noise, 1 + self.noise)
                        for _ in range(5)
                    ]
                    mean = sum(samples) / 5
                    deviation = (sum((s - mean) ** 2 for s in samples) / 4) ** 0.5
                    self.workers[name] = replace(
                        worker, rate_mean=mean, rate_deviation=deviation, num_samples=5
                    )
            decision = self.policy.decide(self.now, wanted, list(self.workers.values()))
            if decision.activate or decision.release:
                self.changes.append(decision)
            for name in decision.activate:
                self.workers[name] = replace(self.workers[name], is_active=True)
            for name in decision.release:
                self.workers[name] = replace(self.workers[name], is_active=False)

    @property
    def num_active(self) -> int:
        return sum(worker.is_active and worker.is_here for worker in self.workers.values())


def test_a_noisy_rate_does_not_make_it_flap() -> None:
    """Eleven of 0.1 make just γ times what is needed; each measurement is off by up to half."""
    for seed in range(5):
        fleet = Fleet([0.1] * 20, active=11, noise=0.5, seed=seed)
        fleet.run(100_000, wanted=1.0)
        assert len(fleet.changes) <= 3, fleet.changes
        assert 11 <= fleet.num_active <= 13
        assert not any(change.release for change in fleet.changes)


def test_too_few_are_made_enough_once_and_not_twice() -> None:
    fleet = Fleet([0.1] * 20, active=4, noise=0.0)
    fleet.run(50, wanted=1.0)
    assert fleet.changes == []
    fleet.run(1000, wanted=1.0)
    assert len(fleet.changes) == 1
    assert fleet.num_active == 11
    assert fleet.changes[0].reason == "short: 0.4 ± 0 of 1.1 groups/s"


def test_who_was_reclaimed_is_replaced() -> None:
    fleet = Fleet([0.1] * 20, active=11, noise=0.0)
    fleet.workers["w-3"] = replace(fleet.workers["w-3"], is_here=False)
    fleet.workers["w-4"] = replace(fleet.workers["w-4"], is_here=False)
    fleet.run(1000, wanted=1.0)
    assert fleet.num_active == 11
    (change,) = fleet.changes
    assert len(change.activate) == 2
    assert not {"w-3", "w-4"} & set(change.activate)


def test_a_surplus_is_released_one_at_a_time_the_dearest_first() -> None:
    fleet = Fleet([0.1] * 20, active=20, noise=0.0)
    fleet.workers["w-7"] = replace(fleet.workers["w-7"], usd_per_h=2.0)
    fleet.run(10_000, wanted=1.0)
    assert fleet.changes[0].release == ("w-7",)
    assert all(len(change.release) == 1 for change in fleet.changes)
    assert fleet.num_active == 12


def test_what_standing_by_costs_is_no_price_of_activating() -> None:
    policy = ActivationPolicy(SETTINGS)
    workers = [
        WorkerEstimate(name="kept", prior_rate=1.0, usd_per_h=1.0, standby_usd_per_h=0.9),
        WorkerEstimate(name="new", prior_rate=1.0, usd_per_h=0.5),
    ]
    assert policy.decide(0.0, 0.5, workers).activate == ()
    decision = policy.decide(60.0, 0.5, workers)
    assert decision.activate == ("kept",)


def test_all_that_stand_by_are_taken_where_they_are_not_enough() -> None:
    fleet = Fleet([0.1] * 6, active=2, noise=0.0)
    fleet.run(200, wanted=1.0)
    assert fleet.num_active == 6
    fleet.run(1000, wanted=1.0)
    assert len(fleet.changes) == 1


def test_a_worker_that_was_never_measured_counts_with_its_prior() -> None:
    worker = WorkerEstimate(name="w", prior_rate=1.0, usd_per_h=1.0)
    assert (worker.rate(2.0), worker.error(2.0)) == (1.0, 0.5)
    measured = replace(worker, rate_mean=2.0, rate_deviation=0.4, num_samples=2)
    assert (measured.rate(2.0), measured.error(2.0)) == (1.5, 0.2)
    assert worker.rate(0.0) == 1.0
