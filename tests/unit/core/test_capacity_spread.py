"""T_bcast of star, chains and the fluid bound, at the figures that the paper reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.core.capacity_pool import Pool, WorkerKind
from echo2.core.capacity_spread import Weights, chain_bcast_s, fluid_bcast_s, star_bcast_s

QWEN3_8B_MBIT = 131_000.0
OVERHEAD_S = 127.0
"""Of the paper's broadcasts: pipeline fill and reload."""


def a_pool(count: int, *, up: float = 100.0, down: float = 100.0, install_s: float = 0.0) -> Pool:
    kind = WorkerKind(
        name="w", rate_groups_per_s=1.0, up_mbit=up, down_mbit=down, install_s=install_s
    )
    return Pool(((kind, count),))


@pytest.mark.parametrize(("num_workers", "measured_s"), [(9, 1830.0), (10, 1872.0)])
def test_the_limited_star_of_the_papers_table_2(num_workers: int, measured_s: float) -> None:
    predicted = star_bcast_s(
        QWEN3_8B_MBIT,
        num_workers,
        worker_mbit=100.0,
        origin_mbit=725.0,
        install_s=OVERHEAD_S,
    )
    assert predicted == pytest.approx(measured_s, rel=0.06)


def test_an_unlimited_star_takes_what_one_worker_takes() -> None:
    assert star_bcast_s(1000.0, 50, worker_mbit=100.0) == 10.0
    assert star_bcast_s(1000.0, 50, worker_mbit=100.0, origin_mbit=100.0) == 500.0


def test_the_chain_of_the_papers_table_2() -> None:
    """4 chains of 9 workers: what is above G/B_w is the reload."""
    predicted = chain_bcast_s(
        QWEN3_8B_MBIT, 3, worker_mbit=100.0, chunk_mbit=8.0, install_s=OVERHEAD_S
    )
    assert predicted == pytest.approx(1437.0, rel=0.01)


def test_a_longer_chain_costs_a_chunk_and_a_hop_each() -> None:
    short = chain_bcast_s(1000.0, 1, worker_mbit=100.0, chunk_mbit=10.0, hop_s=0.5)
    long = chain_bcast_s(1000.0, 5, worker_mbit=100.0, chunk_mbit=10.0, hop_s=0.5)
    assert short == 10.0
    assert long == pytest.approx(10.0 + 4 * 0.6)


@pytest.mark.parametrize(
    ("origin", "up", "down", "seconds"),
    [(100.0, 1000.0, 1000.0, 8.0), (1000.0, 1000.0, 50.0, 16.0), (100.0, 0.0, 1000.0, 32.0)],
)
def test_each_term_of_the_fluid_bound(
    origin: float, up: float, down: float, seconds: float
) -> None:
    weights = Weights(num_bytes=100_000_000, origin_up_mbit=origin)
    assert fluid_bcast_s(weights, a_pool(4, up=up, down=down)) == pytest.approx(seconds)


def test_a_delta_an_encoding_and_an_install_count() -> None:
    weights = Weights(num_bytes=100_000_000, origin_up_mbit=100.0, delta_share=0.25, encode_s=1.5)
    assert fluid_bcast_s(weights, a_pool(2, install_s=3.0)) == pytest.approx(2.0 + 1.5 + 3.0)


def test_nobody_waits_for_a_version_in_an_empty_pool() -> None:
    assert fluid_bcast_s(Weights(num_bytes=10, origin_up_mbit=1.0), Pool(())) == 0.0


def test_workers_without_an_open_port_are_a_star() -> None:
    kind = WorkerKind(name="w", rate_groups_per_s=1.0, down_mbit=1000.0, accepts=False)
    weights = Weights(num_bytes=100_000_000, origin_up_mbit=100.0)
    assert fluid_bcast_s(weights, Pool(((kind, 5),))) == pytest.approx(5 * 8.0)


@given(
    count=st.integers(1, 20),
    origin=st.floats(1.0, 1e4),
    up=st.floats(0.0, 1e4),
    down=st.floats(1.0, 1e4),
    share=st.floats(0.0, 1.0),
)
def test_the_bound_is_below_the_star_and_falls_with_the_share_that_travels(
    count: int, origin: float, up: float, down: float, share: float
) -> None:
    weights = Weights(num_bytes=10**9, origin_up_mbit=origin)
    part = Weights(num_bytes=10**9, origin_up_mbit=origin, delta_share=share)
    pool = a_pool(count, up=up, down=down)
    whole_s = fluid_bcast_s(weights, pool)
    star = star_bcast_s(weights.size_mbit, count, worker_mbit=down, origin_mbit=origin)
    assert whole_s <= star * (1 + 1e-9)
    assert fluid_bcast_s(part, pool) <= whole_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "wrong", [{"origin_up_mbit": 0.0}, {"num_bytes": -1}, {"delta_share": 1.5}, {"encode_s": -1.0}]
)
def test_weights_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        Weights(**({"num_bytes": 1, "origin_up_mbit": 1.0} | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong", [{"rate_groups_per_s": 0.0}, {"slots": 0}, {"usd_per_h": -1.0}, {"down_mbit": 0.0}]
)
def test_a_worker_out_of_range_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))} of w is"):
        WorkerKind(**({"name": "w", "rate_groups_per_s": 1.0} | wrong))  # type: ignore[arg-type]


def test_a_pool_adds_up() -> None:
    one = WorkerKind(name="a", rate_groups_per_s=0.5, slots=2, usd_per_h=0.35)
    two = WorkerKind(name="b", rate_groups_per_s=2.0, slots=8, usd_per_h=3.6)
    pool = Pool.of([one, two, one])
    assert pool.members == ((one, 2), (two, 1))
    assert pool.num_workers == 3
    assert pool.rate_groups_per_s == pytest.approx(3.0)
    assert pool.usd_per_h == pytest.approx(4.3)
    assert one.latency_s == 4.0
    assert two.usd_per_group == pytest.approx(0.0005)
    assert len({host.name for host in pool.hosts}) == 3
    with pytest.raises(ValueError, match="0 of a"):
        Pool(((one, 0),))
