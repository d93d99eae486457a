"""Plans on fleets of known shape: their form, their time against the bound, their reason."""

from __future__ import annotations

import pytest

from echo2.core.dissemination import (
    Host,
    RelayPlan,
    plan_problem,
    plan_relays,
    stripe_sizes,
    stripes,
)
from echo2.sim.relays import Service, relay_arrivals_s

VERSION_BYTES = 64_000_000
CHUNK_BYTES = 256 * 1024
BLOCKED_NONE: frozenset[tuple[str, str]] = frozenset()


def an_origin(up: float = 300.0) -> Host:
    return Host("origin", up, 1000.0, 0.0, accepts=True)


def fleet(
    ups: list[float], downs: list[float], *, rtt_s: float = 0.002, accepting: int = 99
) -> list[Host]:
    return [
        Host(f"w{i}", up, down, rtt_s, accepts=i < accepting)
        for i, (up, down) in enumerate(zip(ups, downs, strict=True))
    ]


def planned(
    origin: Host,
    workers: list[Host],
    *,
    num_bytes: int = VERSION_BYTES,
    blocked: frozenset[tuple[str, str]] = BLOCKED_NONE,
) -> RelayPlan:
    plan = plan_relays(
        origin, workers, num_bytes=num_bytes, chunk_bytes=CHUNK_BYTES, blocked=blocked
    )
    assert plan_problem(plan, origin, workers, blocked=blocked) is None
    return plan


SCENARIOS = {
    "equal links": (300.0, [100.0] * 8, [100.0] * 8, 0.002, 1.03),
    "the origin is no faster than a worker": (100.0, [100.0] * 8, [100.0] * 8, 0.002, 1.05),
    "uplinks a quarter of the downlinks": (300.0, [100.0] * 8, [400.0] * 8, 0.002, 1.05),
    "unequal links": (
        300.0, [20.0, 50.0, 100.0, 200.0] * 2, [200.0, 200.0, 400.0, 400.0] * 2, 0.002, 1.08,
    ),
    "far away": (80.0, [40.0] * 4, [40.0] * 4, 0.1, 1.05),
}  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_plan_comes_near_the_bound_and_its_simulation_near_the_prediction(name: str) -> None:
    origin_up, ups, downs, rtt_s, most = SCENARIOS[name]
    origin, workers = an_origin(origin_up), fleet(ups, downs, rtt_s=rtt_s)
    plan = planned(origin, workers)
    assert plan.bound_s < plan.predicted_s < most * plan.bound_s
    arrivals = relay_arrivals_s(
        plan, origin, workers, num_bytes=VERSION_BYTES, chunk_bytes=CHUNK_BYTES
    )
    assert max(arrivals.values()) == pytest.approx(plan.predicted_s, rel=0.03)
    assert max(arrivals.values()) < 1.1 * plan.bound_s


def test_equal_links_get_the_papers_chains() -> None:
    plan = planned(an_origin(300.0), fleet([100.0] * 8, [100.0] * 8))
    assert [tree.weight for tree in plan.trees] == [1.0]
    assert sorted(len(c) for c in plan.trees[0].children().values()) == [1] * 5 + [3]
    assert len(plan.connections) == 8
    assert plan.reason.startswith("3 chains of all chunks through 8 workers, depth 3: predicted")
    assert "set by the downlink of w0, 100 Mbit/s." in plan.reason
    one = planned(an_origin(100.0), fleet([100.0] * 8, [100.0] * 8))
    assert one.reason.startswith("one chain of all chunks through 8 workers, depth 8: predicted")


def test_uplinks_below_the_downlinks_get_trees_over_stripes() -> None:
    plan = planned(an_origin(300.0), fleet([100.0] * 8, [400.0] * 8))
    assert plan.reason.startswith(f"{len(plan.trees)} trees over stripes for 8 workers, ")
    assert "set by the uplinks of all, 1100 Mbit/s for 8 copies." in plan.reason
    assert 2 <= len(plan.trees) <= 9


def test_no_uplink_is_planned_for_more_than_the_predicted_time() -> None:
    origin, workers = an_origin(), fleet([20.0, 50.0, 100.0, 200.0] * 2, [400.0] * 8)
    plan = planned(origin, workers)
    num_chunks = -(-VERSION_BYTES // CHUNK_BYTES)
    sizes = stripe_sizes(num_chunks, [tree.weight for tree in plan.trees])
    for host in (origin, *workers):
        sent = sum(
            size * len(tree.children().get(host.name, []))
            for size, tree in zip(sizes, plan.trees, strict=True)
        )
        assert sent / num_chunks * VERSION_BYTES * 8e-6 / host.up <= plan.predicted_s


def test_near_equal_uplinks_need_few_connections() -> None:
    ups = [100.0 + 0.37 * (i * 7 % 11 - 5) for i in range(32)]
    plan = planned(an_origin(1000.0), fleet(ups, [100.0] * 32), num_bytes=10**9)
    assert plan.predicted_s < 1.02 * plan.bound_s
    assert len(plan.connections) <= 64


def test_dial_only_workers_leave_the_star_and_the_reason_says_what_mends_it() -> None:
    origin, workers = an_origin(), fleet([100.0] * 8, [100.0] * 8, accepting=0)
    plan = planned(origin, workers)
    assert [set(tree.parents.values()) for tree in plan.trees] == [{"origin"}]
    assert plan.predicted_s == pytest.approx(8 * 512 / 300, rel=0.01)
    assert plan.reason.startswith("a star from the origin to 8 workers: predicted")
    assert "Reachability raises the bound to 13.7 s" in plan.reason
    assert 'a relay-only node (engine = "none") with an open port would share that' in plan.reason
    mended = planned(origin, [*workers, Host("relay", 1000.0, 1000.0, 0.002, accepts=True)])
    assert mended.predicted_s < 0.45 * plan.predicted_s


def test_half_of_the_workers_accepting_is_as_good_as_all() -> None:
    downs = [400.0] * 8
    half = planned(an_origin(), fleet([100.0] * 8, downs, accepting=4))
    every = planned(an_origin(), fleet([100.0] * 8, downs))
    assert half.predicted_s < 1.05 * every.predicted_s
    assert half.predicted_s < 1.1 * half.bound_s


def test_a_slow_downlink_does_not_slow_the_others() -> None:
    origin, workers = an_origin(), fleet([100.0] * 8, [100.0] * 7 + [10.0])
    plan = planned(origin, workers)
    assert plan.predicted_s == pytest.approx(51.2, rel=0.02)
    assert plan.reached_s(7 / 8) < 1.05 * 5.12
    assert "w7 forwards nothing for want of downlink; all others have it in 5." in plan.reason
    assert all("w7" not in tree.children() for tree in plan.trees)
    arrivals = relay_arrivals_s(
        plan, origin, workers, num_bytes=VERSION_BYTES, chunk_bytes=CHUNK_BYTES
    )
    for name, arrival_s in plan.arrivals_s.items():
        assert arrivals[name] == pytest.approx(arrival_s, rel=0.05)


def test_blocked_pairs_are_gone_around() -> None:
    origin, workers = an_origin(100.0), fleet([100.0] * 4, [100.0] * 4)
    # One chain is left: the origin to w2, w1, w3 and w0.
    blocked = frozenset({("origin", "w0"), ("w1", "w0"), ("w0", "w2"), ("w3", "w2")})
    plan = planned(origin, workers, blocked=blocked)
    assert plan.trees[0].parents == {"w2": "origin", "w1": "w2", "w3": "w1", "w0": "w3"}
    assert plan.predicted_s < 1.1 * plan.bound_s


def test_a_worker_that_nobody_can_reach_is_named_and_left_out() -> None:
    workers = fleet([100.0] * 3, [100.0] * 3, accepting=2)
    blocked = frozenset({("origin", "w2"), ("w0", "w2"), ("w2", "w1")})
    plan = planned(an_origin(), workers, blocked=blocked)
    assert plan.unreached == ("w2",)
    assert plan.reason.endswith("w2 cannot be reached by anyone.")
    alone = planned(an_origin(), workers[:1], blocked=frozenset({("w0", "origin")}))
    assert (alone.trees, alone.unreached) == ((), ("w0",))
    assert alone.reason == "nobody to send to: w0 cannot be reached"


def test_without_workers_there_is_nothing_to_plan() -> None:
    plan = planned(an_origin(), [])
    assert (plan.trees, plan.predicted_s, plan.reason) == ((), 0.0, "no workers")


def test_rates_that_were_never_measured_are_assumed_and_named() -> None:
    plan = planned(an_origin(), [Host(f"w{i}", accepts=True) for i in range(5)])
    assert plan.reason.endswith(
        "Rates of w0, w1, w2 and 2 more are not measured yet: 50 up and 200 down Mbit/s assumed."
    )


def test_the_way_of_a_chunk_is_named_where_it_is_what_a_small_version_waits_for() -> None:
    plan = planned(an_origin(), fleet([100.0] * 8, [100.0] * 8, rtt_s=0.1), num_bytes=10**6)
    assert "with 4 chunks: the way of the first and the last chunk through trees of" in plan.reason
    assert plan.predicted_s < 0.5


def test_a_single_byte_is_a_version() -> None:
    plan = planned(an_origin(), fleet([100.0] * 3, [100.0] * 3), num_bytes=1)
    assert stripes(1, [tree.weight for tree in plan.trees]) == [0]


def test_the_same_hosts_give_the_same_plan() -> None:
    workers = fleet([20.0, 50.0, 100.0, 200.0] * 4, [400.0] * 16, accepting=9)
    assert planned(an_origin(), workers) == planned(an_origin(), list(workers))


def test_requests_in_the_order_of_the_chunks_beat_children_in_turn() -> None:
    origin, workers = an_origin(), fleet([20.0, 50.0, 100.0, 200.0] * 2, [400.0] * 8)
    plan = planned(origin, workers)
    took = {
        service: max(
            relay_arrivals_s(
                plan,
                origin,
                workers,
                num_bytes=VERSION_BYTES,
                chunk_bytes=CHUNK_BYTES,
                service=service,
            ).values()
        )
        for service in Service
    }
    assert 1.05 * took[Service.CHUNK_ORDER] < took[Service.ROUND_ROBIN]


@pytest.mark.parametrize(
    ("origin", "names", "num_bytes", "words"),
    [
        (an_origin(0.0), ["a"], 1, "the origin origin has no uplink"),
        (an_origin(), ["a", "b", "a"], 1, "two hosts are named a"),
        (an_origin(), ["origin"], 1, "two hosts are named origin"),
        (an_origin(), ["a"], 0, "a version of 0 bytes"),
    ],
)
def test_what_is_no_fleet_is_refused(
    origin: Host, names: list[str], num_bytes: int, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        plan_relays(origin, [Host(n) for n in names], num_bytes=num_bytes, chunk_bytes=1)
