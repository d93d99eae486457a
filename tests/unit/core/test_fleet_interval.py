"""Intervals of a plan's row: what is exact of them, and how they follow the errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from echo2.core.capacity_pool import WorkerKind
from echo2.core.capacity_spread import Weights
from echo2.core.fleet_echo2 import Echo2Model
from echo2.core.fleet_interval import ERROR_MAX, MOVES, StandardErrors, Z, row_interval
from echo2.core.fleet_paper import PaperModel
from echo2.core.fleet_plan import CapacityModel, plan_row
from echo2.core.fleet_terms import Machine, PlanRow, RunTerms

TERMS = RunTerms(
    groups_per_step=32,
    train_s=100.0,
    weights=Weights(num_bytes=10**9, origin_up_mbit=200.0, encode_s=2.0),
    learner_usd_per_h=3.0,
    bytes_per_group=1e6,
    latency_cv=0.5,
    origin_egress_usd_per_gb=0.05,
)
MODELS = (Echo2Model(), PaperModel())
EACH = ("train", "rate", "bcast")
A_TENTH = 0.1 / Z
"""An error with which a term is moved to e^0.1 of it, for which a model is asked itself."""


def machines(count: int = 20) -> list[Machine]:
    kind = WorkerKind(name="m", rate_groups_per_s=0.05, usd_per_h=0.36, install_s=3.0, up_mbit=50.0)
    return [Machine(kind=kind, count=count, egress_usd_per_gb=0.02)]


def a_row(
    model: CapacityModel, terms: RunTerms = TERMS, pool: Sequence[Machine] | None = None
) -> PlanRow:
    row = plan_row(terms, pool or machines(), model, staleness_max=3)
    assert row is not None
    return row


def of_paper(count: int, errors: StandardErrors) -> tuple[PlanRow, tuple[float, float]]:
    """A row of too few machines, all of them, and the interval of its price."""
    model, pool = PaperModel(), machines(count)
    row = a_row(model, pool=pool)
    assert row.counts == {"m": count}
    found = row_interval(TERMS, pool, model, row, errors)
    assert found is not None
    return row, found.usd_per_step


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_what_is_known_has_no_interval(model: CapacityModel) -> None:
    assert row_interval(TERMS, machines(), model, a_row(model), StandardErrors()) is None


@pytest.mark.parametrize("wrong", [-0.01, 0.51, math.nan])
def test_an_error_out_of_its_range_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match=r"a standard error is .*; allowed is 0 to 0.5"):
        StandardErrors(rate=wrong)
    assert MOVES[-1] > Z * ERROR_MAX


def test_a_rate_that_is_lower_costs_what_the_plan_with_it_costs() -> None:
    row, (low, high) = of_paper(4, StandardErrors(rate=A_TENTH))
    for sign, usd in ((1, low), (-1, high)):
        rate = 0.05 * math.exp(0.1 * sign)
        pool = [machines(4)[0].with_kind(rate_groups_per_s=rate)]
        assert a_row(PaperModel(), pool=pool).usd_per_step == pytest.approx(usd)
    assert low < row.usd_per_step < high


def test_a_step_that_is_longer_costs_what_the_plan_with_it_costs() -> None:
    """Where nobody waits, hours of machines and learner, not the bytes of each version."""
    model, pool = PaperModel(), machines(60)
    terms = replace(TERMS, rate_margin=2.0)
    row = a_row(model, terms, pool)
    assert row.bubble_ratio == 0.0
    found = row_interval(terms, pool, model, row, StandardErrors(train=A_TENTH))
    assert found is not None
    assert found.bubble == (0.0, 0.0)
    results = 0.02 * row.rate * 3600 * terms.bytes_per_group / 1e9
    timed = row.learner_usd_per_h + row.machines_usd_per_h + results
    longer = timed * 100.0 * math.expm1(0.1) / 3600
    assert found.usd_per_step[1] - row.usd_per_step == pytest.approx(longer)


def test_a_slower_broadcast_is_longer_by_its_factor_and_sends_no_more() -> None:
    row, (low, high) = of_paper(4, StandardErrors(bcast=A_TENTH))
    versions_usd = row.egress_usd_per_h * row.step_s / 3600
    longer_s = row.bcast_s / row.period * math.expm1(0.1)
    shorter_s = -row.bcast_s / row.period * math.expm1(-0.1)
    assert versions_usd > 0
    assert high - row.usd_per_step == pytest.approx(row.usd_per_h * longer_s / 3600)
    assert row.usd_per_step - low == pytest.approx(row.usd_per_h * shorter_s / 3600)


def test_errors_of_several_terms_add_up_in_squares() -> None:
    row, (_, both) = of_paper(4, StandardErrors(rate=0.1, bcast=0.2))
    _, (_, rate) = of_paper(4, StandardErrors(rate=0.1))
    _, (_, bcast) = of_paper(4, StandardErrors(bcast=0.2))
    usd = row.usd_per_step
    assert both - usd == pytest.approx(math.hypot(rate - usd, bcast - usd))


def test_what_is_played_has_an_error_of_its_own() -> None:
    """The slowest group of a batch decides, so chance does."""
    model, pool = Echo2Model(), machines(8)
    terms = replace(TERMS, latency_cv=1.0)
    row = a_row(model, terms, pool)
    found = row_interval(terms, pool, model, row, StandardErrors(bcast=1e-9))
    assert found is not None
    assert found.bubble[0] < row.bubble_ratio - 0.001
    assert found.bubble[1] > row.bubble_ratio + 0.001


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_an_interval_holds_its_row_and_is_never_narrower_for_a_larger_error(
    model: CapacityModel, name: str
) -> None:
    row = a_row(model)
    before = (row.bubble_ratio, row.bubble_ratio, row.usd_per_step, row.usd_per_step)
    for error in (0.001, 0.02, 0.05, 0.1, 0.11, 0.3, ERROR_MAX):
        found = row_interval(TERMS, machines(), model, row, StandardErrors(**{name: error}))
        assert found is not None
        least, most = found.bubble
        low, high = found.usd_per_step
        assert 0.0 <= least <= before[0] <= before[1] <= most <= 1.0
        assert 0.0 <= low <= before[2] <= before[3] <= high
        before = (least, most, low, high)
    assert high > 1.05 * row.usd_per_step
