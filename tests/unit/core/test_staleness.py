"""The staleness rules at both edges, each verdict with its sentence."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from echo2.core.staleness import (
    ALLOWED,
    Verdict,
    expiry_step,
    hold_verdict,
    pacing_verdict,
    publish_verdict,
    window_verdict,
)


def test_a_verdict_is_true_when_it_allows() -> None:
    assert ALLOWED
    assert ALLOWED.reason == ""
    assert not Verdict(ok=False, reason="no")


def test_a_version_expires_staleness_steps_after_itself() -> None:
    assert expiry_step(4, staleness_max=0) == 4
    assert expiry_step(4, staleness_max=2) == 6


@pytest.mark.parametrize("sampled", [3, 4, 5])
def test_the_window_holds_both_of_its_edges(sampled: int) -> None:
    assert window_verdict(sampled, train_step=5, staleness_max=2)


@pytest.mark.parametrize("sampled", [2, 6])
def test_one_step_outside_of_the_window_is_refused(sampled: int) -> None:
    verdict = window_verdict(sampled, train_step=5, staleness_max=2)
    assert not verdict
    assert verdict.reason == (
        f"sampled by version {sampled}, window is [3, 5]; raise staleness.max or add workers"
    )


def test_the_window_of_a_synchronous_run_is_v_alone() -> None:
    assert window_verdict(5, train_step=5, staleness_max=0)
    assert not window_verdict(4, train_step=5, staleness_max=0)


def test_the_window_does_not_begin_below_zero() -> None:
    assert window_verdict(0, train_step=1, staleness_max=4)
    assert "window is [0, 1]" in window_verdict(2, train_step=1, staleness_max=4).reason


# ------------------------------------------------------------------------------- pacing


def pacing(held: dict[int, int], *, expiry: int, next_step: int = 0, groups: int = 2) -> Verdict:
    return pacing_verdict(held, new_expiry=expiry, next_step=next_step, groups_per_step=groups)


def test_the_first_group_has_room() -> None:
    assert pacing({}, expiry=0)


def test_the_last_place_of_a_batch_is_given_and_not_one_more() -> None:
    assert pacing({0: 1}, expiry=0)
    verdict = pacing({0: 2}, expiry=0)
    assert not verdict
    assert verdict.reason == ("3 groups would expire by version 0, and the batches 0 to 0 train 2")


def test_pacing_looks_at_every_version_from_the_next_batch_on() -> None:
    """As the rule says it, for every e; what is looked at is less."""
    rng = Random(0)
    allowed = 0
    for _ in range(3000):
        held = {rng.randint(0, 8): rng.randint(1, 6) for _ in range(rng.randint(0, 4))}
        expiry, next_step, groups = rng.randint(0, 8), rng.randint(0, 4), rng.randint(1, 3)
        after = Counter(held)
        after[expiry] += 1
        fits = expiry >= next_step and all(
            sum(count for at, count in after.items() if at <= e) <= groups * (e - next_step + 1)
            for e in range(expiry, 12)
        )
        found = pacing(held, expiry=expiry, next_step=next_step, groups=groups)
        assert bool(found) == fits, (held, expiry, next_step, groups, found.reason)
        allowed += fits
    assert 300 < allowed < 2700


def test_the_room_grows_with_each_batch_until_expiry() -> None:
    assert pacing({2: 5}, expiry=2)
    verdict = pacing({2: 6}, expiry=2)
    assert verdict.reason == ("7 groups would expire by version 2, and the batches 0 to 2 train 6")


def test_groups_of_earlier_expiry_take_room_too() -> None:
    assert pacing({0: 2, 1: 1}, expiry=1)
    assert not pacing({0: 2, 1: 2}, expiry=1)


def test_an_early_group_may_not_push_later_ones_out() -> None:
    verdict = pacing({1: 4}, expiry=0)
    assert verdict.reason == ("5 groups would expire by version 1, and the batches 0 to 1 train 4")


def test_later_groups_do_not_stand_in_the_way_of_a_free_place() -> None:
    assert pacing({3: 7}, expiry=0)


def test_what_could_not_be_trained_at_all_is_not_started() -> None:
    assert pacing({}, expiry=4, next_step=4)
    verdict = pacing({}, expiry=3, next_step=4)
    assert verdict.reason == "expiry 3 is before the next batch, trained at 4"


def test_what_is_held_from_before_the_next_batch_counts() -> None:
    assert not pacing({1: 2}, expiry=4, next_step=4)
    assert pacing({1: 1}, expiry=4, next_step=4)


# --------------------------------------------------------------------------------- hold


def hold(out: dict[int, int], *, step: int = 3, groups: int = 2) -> Verdict:
    return hold_verdict(out, train_step=step, groups_per_step=groups)


def test_nothing_holds_a_batch_when_nothing_is_out() -> None:
    assert hold({})


@pytest.mark.parametrize("expiry", [2, 3])
def test_a_lease_that_expires_with_the_batch_holds_it(expiry: int) -> None:
    verdict = hold({expiry: 1})
    assert not verdict
    assert verdict.reason == (
        "1 groups in flight expire by version 3, later batches have room for 0"
    )


def test_slow_groups_hold_a_batch_only_beyond_the_room_of_later_ones() -> None:
    assert hold({4: 2})
    verdict = hold({4: 3})
    assert verdict.reason == (
        "3 groups in flight expire by version 4, later batches have room for 2"
    )


def test_slow_groups_of_several_expiries_add_up() -> None:
    assert hold({4: 2, 5: 2})
    assert hold({4: 1, 5: 4}).reason == (
        "5 groups in flight expire by version 5, later batches have room for 4"
    )


# ------------------------------------------------------------------------------- period


def published(step: int, *, last: int | None, period: int = 2, final: bool = False) -> Verdict:
    return publish_verdict(step, last_step=last, period=period, final=final)


def test_the_first_version_of_an_incarnation_may_have_any_step() -> None:
    assert published(7, last=None)


def test_a_version_comes_one_period_after_the_last_and_not_sooner() -> None:
    assert published(4, last=2)
    assert published(5, last=2)
    verdict = published(3, last=2)
    assert verdict.reason == "version 3 follows 2 by less than the period κ = 2"


def test_the_last_version_of_a_run_need_not_wait_for_the_period() -> None:
    assert published(3, last=2, final=True)


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("step", [1, 2])
def test_versions_only_go_up(step: int, final: bool) -> None:
    verdict = published(step, last=2, final=final)
    assert verdict.reason == f"version {step} is not above the last one, 2"
