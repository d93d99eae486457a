"""The cheapest set of offers: against all sets of small pools, its proof, its limit, greedy."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from echo2.core.activation import Offer, cheapest_set, greedy_set

SLACK = 1e-7
"""What rounding to whole units may change, relative to the wanted rate and in $/h."""


def a_pool(rng: random.Random, num_offers: int) -> list[Offer]:
    """Prices and rates with two or with many digits, some without price or rate."""
    return [
        Offer(
            f"offer-{i}",
            usd_per_h=round(rng.uniform(0, 3), rng.choice([0, 2, 9])),
            rate=round(rng.uniform(0, 2), rng.choice([1, 2, 9])),
            count=rng.randint(0, 4),
            availability=rng.choice([1.0, 1.0, 0.9, 0.5]),
        )
        for i in range(num_offers)
    ]


def cheapest_of_all(offers: Sequence[Offer], wanted: float) -> float | None:
    """The price of the cheapest of all sets, in fractions; None if none reaches `wanted`."""
    rates = [Fraction(offer.rate) * Fraction(offer.availability) for offer in offers]
    prices = [Fraction(offer.usd_per_h) * Fraction(offer.availability) for offer in offers]
    found: Fraction | None = None
    for counts in itertools.product(*(range(offer.count + 1) for offer in offers)):
        rate = sum((r * n for r, n in zip(rates, counts, strict=True)), Fraction(0))
        price = sum((p * n for p, n in zip(prices, counts, strict=True)), Fraction(0))
        if rate >= Fraction(wanted) and (found is None or price < found):
            found = price
    return None if found is None else float(found)


@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_small_pools_are_never_dearer_than_the_cheapest_of_all_sets(seed: int) -> None:
    rng = random.Random(seed)
    answered = 0
    for _ in range(100):
        offers = a_pool(rng, rng.randint(1, 5))
        most = math.fsum(offer.mean_rate * offer.count for offer in offers)
        wanted = most * rng.uniform(0.05, 1.1)
        best = cheapest_of_all(offers, wanted)
        found = cheapest_set(offers, wanted)
        if best is None or not wanted:
            continue
        answered += 1
        assert found.reaches, (offers, wanted)
        assert found.is_cheapest, (offers, wanted)
        assert found.rate >= wanted * (1 - SLACK), (offers, wanted)
        assert found.usd_per_h <= best + SLACK, (offers, wanted)
        assert all(
            0 < found.counts[offer.name] <= offer.count
            for offer in offers
            if offer.name in found.counts
        )
        greedy = greedy_set(offers, wanted)
        assert greedy.usd_per_h >= found.usd_per_h - SLACK
        assert greedy.bound_usd_per_h <= best + SLACK
    assert answered > 50


def test_the_big_machine_that_alone_suffices_is_cheaper_than_greedy() -> None:
    offers = [Offer("small", 0.10, 1.0), Offer("big", 1.5, 10.0), Offer("middle", 0.5, 4.0, 2)]
    found = cheapest_set(offers, 5.0)
    assert found.counts == {"small": 1, "middle": 1}
    assert found.usd_per_h == pytest.approx(0.6)
    assert found.rate == 5.0
    assert found.reason.startswith("proven the cheapest (")
    alone = cheapest_set(offers, 9.5)
    assert alone.counts == {"big": 1}
    greedy = greedy_set(offers, 9.5)
    assert greedy.counts == {"small": 1, "middle": 2, "big": 1}
    assert not greedy.is_cheapest
    assert greedy.reason == "by price per rate, the lowest first"
    assert alone.bound_usd_per_h == alone.usd_per_h
    assert alone.gap == 0.0


def test_seven_times_a_tenth_reaches_seven_tenths() -> None:
    found = cheapest_set([Offer("w", 0.3, 0.1, 100)], 0.7)
    assert found.counts == {"w": 7}
    assert found.usd_per_h == pytest.approx(2.1)


def test_a_spot_machine_counts_and_costs_the_time_in_which_it_is_there() -> None:
    found = cheapest_set([Offer("spot", 0.2, 1.0, 10, availability=0.5)], 2.0)
    assert found.counts == {"spot": 4}
    assert found.rate == 2.0
    assert found.usd_per_h == pytest.approx(0.4)


def test_what_cannot_be_reached_is_all_machines_with_the_reason() -> None:
    offers = [Offer("a", 1.0, 1.0, 2), Offer("idle", 1.0, 0.0, 5)]
    for found in (cheapest_set(offers, 3.0), greedy_set(offers, 3.0)):
        assert not found.reaches
        assert not found.is_cheapest
        assert found.counts == {"a": 2}
        assert found.reason == "all 2 machines on offer that could help reach 2 of the wanted 3"


def test_nothing_wanted_costs_nothing() -> None:
    found = cheapest_set([Offer("a", 1.0, 1.0)], 0.0)
    assert (found.counts, found.usd_per_h, found.gap) == ({}, 0.0, 0.0)
    assert found.reaches
    assert found.is_cheapest


def test_a_proof_that_is_stopped_says_by_how_much_the_set_may_be_too_dear() -> None:
    rng = random.Random(5)
    offers = [
        Offer(f"o{i}", rate + 0.1, rate)
        for i, rate in enumerate(rng.uniform(0.05, 1) for _ in range(80))
    ]
    wanted = 0.4 * math.fsum(offer.rate for offer in offers)
    stopped = cheapest_set(offers, wanted, states_max=200)
    whole = cheapest_set(offers, wanted)
    assert not stopped.is_cheapest
    assert 0 < stopped.gap < 0.05
    assert stopped.bound_usd_per_h <= whole.usd_per_h <= stopped.usd_per_h
    assert stopped.usd_per_h <= greedy_set(offers, wanted).usd_per_h
    assert stopped.reason.startswith("the best found when 200 partial sets had been looked at; a")


def test_many_machines_of_a_kind_are_one_kind() -> None:
    offers = [Offer("a", 0.35, 0.21, 10**6), Offer("b", 0.5, 0.29, 10**6)]
    found = cheapest_set(offers, 1000.0)
    assert found.is_cheapest
    assert found.rate >= 1000.0
    assert sum(found.counts.values()) <= 4762


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Offer("a", -1.0, 1.0), "offer a: price -1.0 is not 0 or more, and finite"),
        (lambda: Offer("a", 1.0, math.inf), "offer a: rate inf is not 0 or more, and finite"),
        (lambda: Offer("a", 1.0, 1.0, -1), "offer a: count -1 is below 0"),
        (
            lambda: Offer("a", 1.0, 1.0, 1, 1.5),
            "offer a: availability 1.5 is not from 0 to 1",
        ),
        (lambda: cheapest_set([], math.nan), "a rate of nan cannot be wanted"),
        (
            lambda: cheapest_set([Offer("a", 1.0, 1.0)] * 2, 1.0),
            "two offers have the same name",
        ),
    ],
)
def test_values_that_cannot_be_are_refused(make: object, told: str) -> None:
    with pytest.raises(ValueError, match="^" + told.replace("(", r"\(")):
        make()  # type: ignore[operator]
