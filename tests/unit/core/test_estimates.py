"""Running estimates."""

from __future__ import annotations

import pytest

from echo2.core.estimates import Estimate


def an_estimate(*values: float) -> Estimate:
    estimate = Estimate()
    for value in values:
        estimate.add(value)
    return estimate


def test_nothing_is_known_before_the_first_value() -> None:
    estimate = Estimate()
    assert not estimate.known
    assert (estimate.mean, estimate.high) == (0.0, 0.0)


def test_the_first_value_is_the_mean() -> None:
    estimate = an_estimate(4.0)
    assert estimate.known
    assert (estimate.mean, estimate.deviation, estimate.high) == (4.0, 0.0, 4.0)


def test_the_first_few_values_are_averaged() -> None:
    assert an_estimate(1.0, 2.0, 6.0).mean == pytest.approx(3.0)


def test_later_values_weigh_a_fifth() -> None:
    estimate = an_estimate(*[10.0] * 20, 20.0)
    assert estimate.mean == pytest.approx(12.0)
    assert estimate.deviation == pytest.approx(2.0)
    assert estimate.high == pytest.approx(14.0)
