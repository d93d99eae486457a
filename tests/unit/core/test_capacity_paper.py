"""The paper's equations, at the figures that the paper reports (8B, section 5)."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from echo2.core.capacity_paper import (
    kappas,
    overlap_holds,
    paper_fixed_point,
    paper_mu_min,
    paper_period,
    staleness_cons,
)
from echo2.core.capacity_pool import Pool, WorkerKind
from echo2.errors import ConfigError

R, T_TRAIN, T_BCAST = 2048, 1631.2, 1437.0

seconds = st.floats(0.01, 1e5)
periods = st.integers(1, 20)


def a_worker(name: str = "w", rate: float = 1.0, usd: float = 1.0, **more: float) -> WorkerKind:
    return WorkerKind(name=name, rate_groups_per_s=rate, usd_per_h=usd, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(("period", "rate"), [(2, 2.244), (3, 1.777), (5, 1.524), (10, 1.377)])
def test_mu_min_of_the_papers_figures(period: int, rate: float) -> None:
    found = paper_mu_min(groups_per_step=R, train_s=T_TRAIN, bcast_s=T_BCAST, period=period)
    assert found == pytest.approx(rate, abs=0.001)


def test_no_rate_suffices_where_the_broadcast_outlasts_the_period() -> None:
    assert paper_mu_min(groups_per_step=R, train_s=10.0, bcast_s=10.0, period=1) == math.inf


@given(train_s=seconds, bcast_s=seconds, period=periods, groups=st.integers(1, 10_000))
def test_mu_min_is_the_least_rate_of_eq_1(
    train_s: float, bcast_s: float, period: int, groups: int
) -> None:
    assume(period * train_s > bcast_s * 1.001)
    given_: dict[str, Any] = {
        "groups_per_step": groups,
        "train_s": train_s,
        "bcast_s": bcast_s,
        "period": period,
    }
    least = paper_mu_min(**given_)
    assert overlap_holds(rate=least * (1 + 1e-6), **given_)
    assert not overlap_holds(rate=least * (1 - 1e-6), **given_)
    assert least >= groups / train_s


def test_a_longer_period_needs_less_down_to_what_the_learner_eats() -> None:
    rates = [
        paper_mu_min(groups_per_step=R, train_s=T_TRAIN, bcast_s=T_BCAST, period=period)
        for period in range(1, 200)
    ]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(R / T_TRAIN, rel=0.01)


def test_the_staleness_bound_of_the_papers_first_figure() -> None:
    """Fig. 1: S = 3, κ = 2, T_bcast below T_train."""
    bound = staleness_cons(groups_per_step=10, train_s=10.0, bcast_s=6.0, period=2, rate=1.5)
    assert bound == 3


@given(
    train_s=seconds,
    bcast_share=st.floats(0.0, 0.999),
    period=st.integers(2, 20),
    surplus=st.floats(1.0, 10.0),
)
def test_kappa_below_s_keeps_the_bound_where_the_broadcast_is_shorter_than_a_step(
    train_s: float, bcast_share: float, period: int, surplus: float
) -> None:
    """The corollary of the paper's appendix: with κ = S − 1 and Eq. (1) the bound is S."""
    bcast_s = bcast_share * train_s
    least = paper_mu_min(groups_per_step=64, train_s=train_s, bcast_s=bcast_s, period=period)
    bound = staleness_cons(
        groups_per_step=64, train_s=train_s, bcast_s=bcast_s, period=period, rate=surplus * least
    )
    assert bound <= period + math.ceil((1 - 1 / period) * bcast_s / train_s)  # Eq. (12)
    assert bound <= period + 1


def test_the_periods_of_s() -> None:
    assert list(kappas(0)) == [1]
    assert list(kappas(3)) == [1, 2, 3, 4]
    assert [paper_period(s) for s in (1, 2, 3, 6)] == [None, None, 2, 5]


# ------------------------------------------------------------------- the fixed point


def grows(pool: Pool) -> float:
    return 10.0 * pool.num_workers


def fixed_point(workers: list[WorkerKind], **changes: object) -> object:
    kwargs = {
        "groups_per_step": 100,
        "train_s": 100.0,
        "period": 1,
        "bcast_s": grows,
        "gamma": 1.0,
    } | changes
    return paper_fixed_point(workers, **kwargs)  # type: ignore[arg-type]


def test_the_active_set_pays_for_the_broadcast_that_it_makes_longer() -> None:
    """Two workers at 1 group/s deliver 2; with T_bcast = 20 s, 100/(100 − 20) = 1.25 are needed."""
    found = paper_fixed_point(
        [a_worker()] * 5, groups_per_step=100, train_s=100.0, period=1, bcast_s=grows, gamma=1.0
    )
    assert found.pool.num_workers == 2
    assert found.bcast_s == 20.0
    assert found.mu_min == pytest.approx(1.25)


def test_the_cheapest_per_group_is_taken_first() -> None:
    workers = [a_worker("dear", rate=2.0, usd=3.0), a_worker("cheap", rate=1.0, usd=1.0)]
    found = paper_fixed_point(
        workers, groups_per_step=50, train_s=100.0, period=1, bcast_s=grows, gamma=1.0
    )
    assert [kind.name for kind, _ in found.pool.members] == ["cheap"]


def test_gamma_is_on_top_of_mu_min() -> None:
    found = paper_fixed_point(
        [a_worker(rate=0.1)] * 40,
        groups_per_step=100,
        train_s=100.0,
        period=1,
        bcast_s=lambda _: 0.0,
    )
    assert found.pool.num_workers == 11
    assert found.mu_target == pytest.approx(1.1 * found.mu_min)


def test_a_broadcast_that_outgrows_the_period_is_said_with_its_values() -> None:
    with pytest.raises(ConfigError, match=r"κ = 1: .*T_bcast.*raise staleness\.max"):
        fixed_point([a_worker(rate=0.1)] * 12)
    with pytest.raises(ConfigError, match="no worker is available"):
        fixed_point([])


@given(
    rates=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=12),
    times=st.lists(st.floats(0.0, 300.0), min_size=12, max_size=12),
    period=st.integers(1, 3),
)
def test_the_fixed_point_is_the_smallest_prefix_that_satisfies_its_own_requirement(
    rates: list[float], times: list[float], period: int
) -> None:
    """Also where T_bcast does not grow with the set; it is found or refused, never looped for."""
    workers = [a_worker(f"w{i}", rate, usd=1.0) for i, rate in enumerate(rates)]
    order = sorted(workers, key=lambda kind: kind.usd_per_group)

    def holds(count: int) -> bool:
        least = paper_mu_min(
            groups_per_step=100, train_s=100.0, bcast_s=times[count - 1], period=period
        )
        return Pool.of(order[:count]).rate_groups_per_s >= 1.1 * least

    fitting = [count for count in range(1, len(order) + 1) if holds(count)]
    try:
        found = paper_fixed_point(
            workers,
            groups_per_step=100,
            train_s=100.0,
            period=period,
            bcast_s=lambda pool: times[pool.num_workers - 1],
        )
    except ConfigError:
        assert not fitting
    else:
        assert found.pool.num_workers == fitting[0]
