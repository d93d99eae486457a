"""When a free slot is better left empty until the version on its way is installed."""

from __future__ import annotations

import pytest

from echo2.core.capacity_times import gamma_quantiles, mean_deviation
from echo2.core.install_wait import comes_too_late, has_time, is_short, missed_s, tail


def test_an_install_is_short_up_to_half_a_step() -> None:
    assert is_short(5.0, step_s=10.0)
    assert not is_short(5.1, step_s=10.0)


@pytest.mark.parametrize(
    ("usual_s", "missed"),
    [(0.0, 0.0), (20.0, 5.0), (40.0, 20.0), (60.0, 40.0)],
)
def test_a_slot_ends_the_group_that_it_has_before_it_waits(usual_s: float, missed: float) -> None:
    # One of 40 s was begun at any time of the last 40 s: it ends after 0 to 40 s.
    assert missed_s(usual_s, latency_s=40.0) == pytest.approx(missed)


def test_slots_without_a_group_miss_the_whole_time() -> None:
    assert missed_s(7.0, latency_s=0.0) == 7.0


def test_a_pool_that_is_just_enough_has_no_time() -> None:
    # 49 s of a step of 100 s: each slot misses 29 s.
    assert not has_time(49.0, latency_s=40.0, train_s=100.0, pool_s=95.0)
    assert not has_time(49.0, latency_s=40.0, train_s=100.0, pool_s=100 - 29 / 0.7 + 0.1)


def test_a_pool_that_is_faster_makes_up_for_it() -> None:
    assert has_time(49.0, latency_s=40.0, train_s=100.0, pool_s=100 - 29 / 0.7 - 0.1)


def test_a_pool_that_is_too_slow_has_never_time() -> None:
    assert not has_time(1e-3, latency_s=40.0, train_s=100.0, pool_s=100.0)


@pytest.mark.parametrize("cv", [0.3, 0.5, 1.0])
def test_two_to_six_of_a_thousand_groups_take_longer_than_the_tail(cv: float) -> None:
    quantiles = gamma_quantiles(cv)
    longer = sum(value > tail(mean_deviation(cv)) for value in quantiles)
    assert 0.002 < longer / len(quantiles) < 0.007


def test_groups_that_are_all_alike_have_no_tail() -> None:
    assert tail(0.0) == 1.0
    assert not comes_too_late(latency_s=40.0, deviation_share=0.0, until_s=40.0)
    assert comes_too_late(latency_s=40.0, deviation_share=0.0, until_s=39.9)
