"""Whatever the fleet, a prediction keeps its bounds."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.core.capacity import Workload, predict
from echo2.core.capacity_pool import Pool, WorkerKind


def a_pool(count: int, *, latency_s: float, slots: int, install_s: float) -> Pool:
    rate = slots / latency_s
    kind = WorkerKind(name="w", rate_groups_per_s=rate, slots=slots, install_s=install_s)
    return Pool(((kind, count),))


@settings(max_examples=40, deadline=None)
@given(
    groups=st.integers(1, 40),
    staleness=st.integers(0, 5),
    data=st.data(),
    late=st.sampled_from(["wait", "drop", "mask"]),
    cv=st.sampled_from([0.0, 0.3, 1.0, 3.0]),
    fetch_s=st.floats(0.0, 500.0),
    install_s=st.floats(0.0, 50.0),
    latency_s=st.floats(0.1, 600.0),
    slots=st.integers(1, 8),
    count=st.integers(1, 12),
)
def test_whatever_the_fleet_the_prediction_keeps_its_bounds(
    groups: int,
    staleness: int,
    data: st.DataObject,
    late: Any,
    cv: float,
    fetch_s: float,
    install_s: float,
    latency_s: float,
    slots: int,
    count: int,
) -> None:
    workload = Workload(
        train_s=100.0,
        groups_per_step=groups,
        staleness_max=staleness,
        period=data.draw(st.integers(1, staleness + 1)),
        late=late,
        latency_cv=cv,
        fetch_s=fetch_s,
    )
    pool = a_pool(count, latency_s=latency_s, slots=slots, install_s=install_s)
    found = predict(workload, pool)
    assert 0.0 <= found.bubble < 1.0
    assert 0.0 <= found.staleness_mean <= staleness
    assert 0.0 <= found.expired_share < 1.0
    if late != "drop":
        assert found.expired_share == 0.0
    eaten = groups * (1.0 - found.bubble) / workload.train_s
    assert eaten <= workload.learner_rate * (1 + 1e-9)
    if cv <= 1.0:
        assert eaten <= pool.rate_groups_per_s * 1.15
    assert found == predict(workload, pool)


@settings(max_examples=25, deadline=None)
@given(
    cv=st.sampled_from([0.0, 0.3, 1.0]),
    count=st.integers(3, 12),
    staleness=st.integers(1, 4),
    fetch_s=st.floats(0.0, 150.0),
)
def test_a_larger_pool_hardly_waits_longer(
    cv: float, count: int, staleness: int, fetch_s: float
) -> None:
    """Under drop; under wait it may, since more groups of a batch are the slowest."""
    workload = Workload(
        groups_per_step=16,
        train_s=100.0,
        latency_cv=cv,
        staleness_max=staleness,
        fetch_s=fetch_s,
        late="drop",
    )
    small, large = (
        predict(workload, a_pool(n, latency_s=25.0, slots=1, install_s=0.0))
        for n in (count, 2 * count)
    )
    assert large.bubble <= small.bubble + 0.03
