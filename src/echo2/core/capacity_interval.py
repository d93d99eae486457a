"""What a prediction is worth when its inputs were measured: intervals.

First order, one input at a time: each input is moved down and up by Z of its standard errors while
the others stay; what this adds to an output is added in squares, upward and downward apart, with
the error of what was played. So an interval need not be symmetric: a bubble of 0 can only grow.
It holds Z = 1.64 standard errors each way, nine tenths of a normal distribution, as far as the
inputs' errors are independent and the model is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from echo2.core.capacity import LATENCY_CV_MAX, Workload, predict
from echo2.core.capacity_pool import Pool

Z = 1.64


@dataclass(frozen=True, slots=True, kw_only=True)
class StandardErrors:
    """Of the inputs; 0 is known. `train_s` and `fetch_s` (from the publication until the bytes are
    there) in seconds, `rate_share` that of all workers' rates together, as a share of them,
    `latency_cv` in its own unit."""

    train_s: float = 0.0
    rate_share: float = 0.0
    fetch_s: float = 0.0
    latency_cv: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    low: float
    expected: float
    high: float


@dataclass(frozen=True, slots=True)
class PredictionInterval:
    """Units as in Prediction."""

    bubble: Interval
    expired_share: Interval
    staleness_mean: Interval
    steps_per_h: Interval
    usd_per_step: Interval


def predict_interval(
    workload: Workload, pool: Pool, errors: StandardErrors, *, seed: int = 0
) -> PredictionInterval:
    """The prediction with its intervals: one prediction, and two for each input that is not known.

    ValueError for a pool without workers.
    """
    expected = predict(workload, pool, seed=seed)
    moved = [predict(*case, seed=seed) for case in _moved(workload, pool, errors)]
    speed_error = expected.bubble_error / (1.0 - expected.bubble)

    def interval(name: str, error: float = 0.0) -> Interval:
        value: float = getattr(expected, name)
        changes = [getattr(other, name) - value for other in moved]
        up = math.hypot(Z * error, *(change for change in changes if change > 0))
        down = math.hypot(Z * error, *(change for change in changes if change < 0))
        return Interval(max(0.0, value - down), value, value + up)

    bubble = interval("bubble", expected.bubble_error)
    return PredictionInterval(
        bubble=replace(bubble, high=min(1.0, bubble.high)),
        expired_share=interval("expired_share"),
        staleness_mean=interval("staleness_mean"),
        steps_per_h=interval("steps_per_h", speed_error * expected.steps_per_h),
        usd_per_step=interval("usd_per_step", speed_error * expected.usd_per_step),
    )


def _moved(
    workload: Workload, pool: Pool, errors: StandardErrors
) -> Iterator[tuple[Workload, Pool]]:
    """Workload and pool with one input moved down, or up."""
    fetch_s = workload.fetch_s(pool)
    for z in (-Z, Z):
        if errors.train_s:
            train_s = max(workload.train_s / 100.0, workload.train_s + z * errors.train_s)
            yield replace(workload, train_s=train_s), pool
        if errors.rate_share:
            share = max(0.01, 1.0 + z * errors.rate_share)
            members = tuple(
                (replace(kind, rate_groups_per_s=kind.rate_groups_per_s * share), count)
                for kind, count in pool.members
            )
            yield workload, Pool(members)
        if errors.fetch_s:
            yield replace(workload, spread=max(0.0, fetch_s + z * errors.fetch_s)), pool
        if errors.latency_cv:
            cv = workload.latency_cv + z * errors.latency_cv
            yield replace(workload, latency_cv=min(LATENCY_CV_MAX, max(0.0, cv))), pool
