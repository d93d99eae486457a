"""The capacity model: its limits that are known exactly, its bounds, its words."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest

from echo2.core.capacity import BUBBLE_MAX, Workload, predict
from echo2.core.capacity_pool import Pool, WorkerKind
from echo2.core.capacity_times import QUANTILES, gamma_quantiles, group_times


def a_workload(**changes: Any) -> Workload:
    values: dict[str, Any] = {
        "groups_per_step": 16,
        "train_s": 100.0,
        "staleness_max": 2,
        "latency_cv": 0.3,
    }
    return Workload(**(values | changes))


def a_pool(count: int, *, latency_s: float = 25.0, slots: int = 1, install_s: float = 0.0) -> Pool:
    kind = WorkerKind(
        name="w",
        rate_groups_per_s=slots / latency_s,
        slots=slots,
        install_s=install_s,
    )
    return Pool(((kind, count),))


# ------------------------------------------------------------------ limits known exactly


def test_a_learner_with_ample_workers_never_waits() -> None:
    found = predict(a_workload(), a_pool(12))
    assert found.bubble == 0.0
    assert found.bottleneck == "learner"


def test_a_synchronous_step_is_training_broadcast_install_and_group() -> None:
    """S = 0 with a slot for each group of equal length: nothing overlaps."""
    workload = a_workload(staleness_max=0, latency_cv=0.0, fetch_s=30.0)
    found = predict(workload, a_pool(16, install_s=5.0))
    assert found.bubble == pytest.approx(60.0 / 160.0)
    assert found.staleness_mean == 0.0


@pytest.mark.parametrize(("slots", "rounds"), [(8, 2), (6, 3), (1, 16)])
def test_few_slots_sample_a_synchronous_batch_in_rounds(slots: int, rounds: int) -> None:
    workload = a_workload(staleness_max=0, latency_cv=0.0)
    found = predict(workload, a_pool(1, slots=slots))
    assert found.bubble == pytest.approx(rounds * 25.0 / (100.0 + rounds * 25.0))


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_pool_below_the_learners_rate_sets_the_pace(share: float) -> None:
    """Slots never stand still when nothing is installed and nobody has to wait for anybody."""
    pool = a_pool(40, latency_s=25.0 * 40 / 4 / share)
    found = predict(a_workload(staleness_max=6, latency_cv=0.0), pool)
    assert found.bubble == pytest.approx(1.0 - share, abs=0.03)
    assert found.bottleneck == "rate"
    assert "add workers" in found.reason


def test_an_install_that_pauses_costs_its_share_of_the_slots_time() -> None:
    """10 s of every learner step: 10 groups' slots deliver what 9 would without installs."""
    slow = predict(
        a_workload(staleness_max=4, latency_cv=0.0, groups_per_step=40),
        a_pool(10, install_s=20.0),
    )
    step_s = 100.0 / (1.0 - slow.bubble)
    assert step_s == pytest.approx(100.0 + 20.0, rel=0.03)


def test_the_time_of_a_block_of_groups_stands_for_theirs_in_large_batches() -> None:
    small = a_workload(groups_per_step=2048, latency_cv=0.3)
    large = a_workload(groups_per_step=8192, latency_cv=0.3)
    few = predict(small, a_pool(500, latency_s=25.0))
    many = predict(large, a_pool(2000, latency_s=25.0))
    assert few.bubble > 0.01
    assert many.bubble == pytest.approx(few.bubble, abs=0.005)


# ---------------------------------------------------------------------------- the rules


def test_late_wait_loses_nothing_and_drop_loses_the_tail() -> None:
    workload = a_workload(latency_cv=1.0, staleness_max=1)
    pool = a_pool(20, latency_s=60.0)
    wait, drop, mask = (
        predict(replace(workload, late=late), pool) for late in ("wait", "drop", "mask")
    )
    assert wait.expired_share == mask.expired_share == 0.0
    assert drop.expired_share > 0.05
    assert wait.bubble > drop.bubble > 0.0
    assert wait.bottleneck == "tail"
    assert 'staleness.late = "drop"' in wait.reason


def test_without_staleness_the_window_keeps_the_learner_waiting() -> None:
    found = predict(a_workload(staleness_max=0, latency_cv=0.5), a_pool(64))
    assert found.bottleneck == "window"
    assert "staleness.max = 0" in found.reason


def test_a_broadcast_that_a_synchronous_fleet_waits_for_is_named() -> None:
    found = predict(a_workload(staleness_max=0, fetch_s=300.0), a_pool(64, install_s=4.0))
    assert found.bottleneck == "install"
    assert "304 s" in found.reason


def test_workers_sample_on_during_a_broadcast_that_is_longer_than_a_step() -> None:
    """Where the paper's Eq. (1) asks for κ·T_train > T_bcast."""
    found = predict(a_workload(staleness_max=4, fetch_s=180.0), a_pool(8))
    assert found.bubble <= BUBBLE_MAX
    assert found.staleness_mean > 2.0


def test_a_lead_of_none_waits_for_every_batch() -> None:
    lead = predict(a_workload(), a_pool(8))
    none = predict(a_workload(lead_steps=0.0), a_pool(8))
    assert none.staleness_mean < lead.staleness_mean


def test_a_straggler_gets_no_group() -> None:
    """Ten times slower than the others, and unable to finish before expiry."""
    fast = WorkerKind(name="fast", rate_groups_per_s=0.04)
    slow = WorkerKind(name="slow", rate_groups_per_s=0.001)
    workload = a_workload(latency_cv=0.0)
    alone = predict(workload, Pool(((fast, 8),)))
    mixed = predict(workload, Pool(((fast, 8), (slow, 4))))
    assert mixed.bubble == pytest.approx(alone.bubble, abs=0.02)


# ------------------------------------------------------------------------------ inputs


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups_per_step": 0},
        {"train_s": 0.0},
        {"staleness_max": -1},
        {"period": 4},
        {"latency_cv": -0.1},
        {"latency_cv": 10.1},
        {"lead_steps": -1.0},
        {"fetch_s": -1.0},
        {"train_s": math.nan},
    ],
)
def test_a_workload_out_of_range_is_refused_by_name(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} is .*; allowed is"):
        a_workload(**wrong)


def test_a_pool_without_workers_is_refused() -> None:
    with pytest.raises(ValueError, match="without workers"):
        predict(a_workload(), Pool(()))


@pytest.mark.parametrize("cv", [0.05, 0.3, 1.0, 2.0, 5.0, 10.0])
def test_quantiles_have_mean_one_and_their_coefficient_of_variation(cv: float) -> None:
    found = gamma_quantiles(cv)
    assert len(found) == QUANTILES
    assert list(found) == sorted(found)
    assert statistics.fmean(found) == pytest.approx(1.0)
    assert statistics.pstdev(found) == pytest.approx(cv, rel=0.02)


def test_quantiles_of_an_exponential_are_its_inverse_distribution() -> None:
    found = gamma_quantiles(1.0)
    for index in (100, 4000, 8000, 8191):
        exact = -math.log(1.0 - (index + 0.5) / QUANTILES)
        assert found[index] == pytest.approx(exact, rel=0.002)


def test_group_times_are_the_quantiles_in_an_order_that_the_seed_says() -> None:
    assert sorted(group_times(0.7, 1)) == sorted(gamma_quantiles(0.7))
    assert group_times(0.7, 1) == group_times(0.7, 1)
    assert group_times(0.7, 1) != group_times(0.7, 2)
