"""Whatever the fleet, a relay plan is sound, and near the bound where latency lets it be."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.core.dissemination import (
    Host,
    fluid_bound,
    plan_problem,
    plan_relays,
    reach_bound,
    stripe_sizes,
    stripes,
)
from echo2.sim.relays import Service, relay_arrivals_s

CHUNK_BYTES = 256 * 1024
CHUNKS_PER_WORKER = 64
"""So many chunks for each worker, and
so many round trips of the farthest one within the bound, and the prediction is within 10 %."""
ROUND_TRIPS = 60

rates = st.one_of(
    st.sampled_from([20.0, 50.0, 100.0, 200.0, 1000.0]),
    st.floats(0.5, 5000.0, allow_nan=False),
)


@st.composite
def fleets(draw: st.DrawFn, *, most: int, blocks: bool) -> tuple[Host, list[Host], frozenset]:
    """An origin, workers (some without an uplink, some that only dial out), blocked pairs."""
    num = draw(st.integers(1, most))
    equal = draw(st.booleans())
    up, down = draw(rates), draw(rates)
    accepting = draw(st.sampled_from(["all", "some", "none"]))
    workers = [
        Host(
            f"w{i}",
            up if equal else draw(st.one_of(st.just(0.0), rates)),
            down if equal else draw(rates),
            draw(st.sampled_from([0.0, 0.02, 0.1, 0.3])),
            accepting == "all" or (accepting == "some" and draw(st.booleans())),
        )
        for i in range(num)
    ]
    origin = Host("origin", draw(rates), 10_000.0, 0.0, accepts=True)
    names = [host.name for host in (origin, *workers)]
    pairs = st.tuples(st.sampled_from(names), st.sampled_from(names))
    blocked = draw(st.frozensets(pairs, max_size=2 * num)) if blocks else frozenset()
    return origin, workers, blocked


@given(fleets(most=24, blocks=True), st.integers(1, 300 * CHUNK_BYTES))
@settings(max_examples=80, deadline=None)
def test_any_plan_brings_each_chunk_to_each_worker_once(
    fleet: tuple[Host, list[Host], frozenset], num_bytes: int
) -> None:
    origin, workers, blocked = fleet
    plan = plan_relays(
        origin, workers, num_bytes=num_bytes, chunk_bytes=CHUNK_BYTES, blocked=blocked
    )
    assert plan_problem(plan, origin, workers, blocked=blocked) is None
    reached = [host for host in workers if host.name not in plan.unreached]
    assert set(plan.arrivals_s) == {host.name for host in reached}
    if not reached:
        return
    num_chunks = -(-num_bytes // CHUNK_BYTES)
    assert len(stripes(num_chunks, [tree.weight for tree in plan.trees])) == num_chunks
    bound_s, _ = fluid_bound(origin, reached, num_bytes)
    reach_s, _ = reach_bound(origin, reached, num_bytes, blocked=blocked)
    assert plan.bound_s == bound_s <= reach_s
    assert reach_s <= plan.predicted_s * (1 + 1e-9)
    assert plan.reached_s(1.0) == plan.predicted_s


@given(fleets(most=64, blocks=False))
@settings(max_examples=60, deadline=None)
def test_a_prediction_is_within_ten_percent_of_the_bound(
    fleet: tuple[Host, list[Host], frozenset],
) -> None:
    origin, workers, _ = fleet
    num_chunks = CHUNKS_PER_WORKER * len(workers)
    reach_s, _ = reach_bound(origin, workers, num_chunks * CHUNK_BYTES)
    least_s = ROUND_TRIPS * max(host.rtt for host in workers)
    num_chunks = max(num_chunks, int(num_chunks * least_s / reach_s) + 1)
    num_bytes = num_chunks * CHUNK_BYTES
    plan = plan_relays(origin, workers, num_bytes=num_bytes, chunk_bytes=CHUNK_BYTES)
    assert plan.predicted_s <= 1.1 * reach_bound(origin, workers, num_bytes)[0], plan.reason


@given(fleets(most=8, blocks=True), st.integers(1, 80), st.sampled_from(Service))
@settings(max_examples=40, deadline=None)
def test_a_played_plan_ends_and_never_before_the_bound(
    fleet: tuple[Host, list[Host], frozenset], num_chunks: int, service: Service
) -> None:
    origin, workers, blocked = fleet
    num_bytes = num_chunks * CHUNK_BYTES
    plan = plan_relays(
        origin, workers, num_bytes=num_bytes, chunk_bytes=CHUNK_BYTES, blocked=blocked
    )
    arrivals = relay_arrivals_s(
        plan, origin, workers, num_bytes=num_bytes, chunk_bytes=CHUNK_BYTES, service=service
    )
    assert set(arrivals) == set(plan.arrivals_s)
    assert max(arrivals.values(), default=0.0) >= plan.bound_s * (1 - 1e-9)


@given(
    st.integers(0, 2000),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12).filter(lambda ws: sum(ws) > 1e-6),
)
@settings(max_examples=100, deadline=None)
def test_every_prefix_of_the_chunks_is_near_the_weights(
    num_chunks: int, weights: list[float]
) -> None:
    tree_of = stripes(num_chunks, weights)
    sizes = stripe_sizes(num_chunks, weights)
    assert len(tree_of) == num_chunks
    assert sorted(Counter(tree_of).items()) == [(i, m) for i, m in enumerate(sizes) if m]
    seen = [0] * len(weights)
    for prefix, tree in enumerate(tree_of, 1):
        seen[tree] += 1
        for size, count in zip(sizes, seen, strict=True):
            share = size / num_chunks
            assert share * (prefix - len(weights)) - 1 <= count <= share * prefix + 2
