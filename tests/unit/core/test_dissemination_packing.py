"""Packings deliver the rate that the bound allows, within every uplink."""

from __future__ import annotations

import pytest

from echo2.core.dissemination import Host, reach_bound
from echo2.core.dissemination_graph import RelayGraph, relay_graph
from echo2.core.dissemination_packing import REMAINDER, one_tree, pack_trees, star

CHUNK_MBIT = 2.097152
FLEETS = {
    "equal": [100.0] * 8,
    "unequal": [20.0, 50.0, 100.0, 200.0] * 2,
    "one fast": [1000.0] + [10.0] * 7,
    "some without an uplink": [0.0, 0.0, 0.0, 300.0, 200.0, 7.0],
    "one worker": [100.0],
}


def a_fleet(ups: list[float], *, accepting: int) -> list[Host]:
    return [Host(f"w{i}", up, 1e4, 0.01, i < accepting) for i, up in enumerate(ups)]


def a_graph(ups: list[float], *, origin_up: float = 300.0, accepting: int = 99) -> RelayGraph:
    origin = Host("origin", origin_up, 1e4, 0.0, accepts=True)
    return relay_graph(origin, a_fleet(ups, accepting=accepting))[0]


@pytest.mark.parametrize("lump", [1, 2, 7])
@pytest.mark.parametrize("name", FLEETS)
def test_all_of_the_rate_is_packed_into_at_most_one_tree_more_than_workers(
    name: str, lump: int
) -> None:
    graph = a_graph(FLEETS[name])
    rate = min(graph.up[0], sum(graph.up) / graph.num_workers)
    trees = pack_trees(graph, rate=rate, lump=lump, chunk_mbit=CHUNK_MBIT)
    assert sum(tree.rate for tree in trees) >= rate * (1 - REMAINDER)
    assert len(trees) <= graph.num_workers + 1
    for host, up in enumerate(graph.up):
        assert sum(tree.rate * tree.fanout[host] for tree in trees) <= up * (1 + 1e-9)


@pytest.mark.parametrize("accepting", [1, 3, 7])
@pytest.mark.parametrize("origin_up", [120.0, 300.0])
def test_dial_only_workers_are_packed_up_to_their_bound(accepting: int, origin_up: float) -> None:
    ups = FLEETS["unequal"]
    graph = a_graph(ups, origin_up=origin_up, accepting=accepting)
    bound_s, _ = reach_bound(graph.hosts[0], a_fleet(ups, accepting=accepting), 125_000_000)
    rate = 1000.0 / bound_s
    trees = pack_trees(graph, rate=rate, lump=1, chunk_mbit=CHUNK_MBIT)
    assert sum(tree.rate for tree in trees) >= 0.97 * rate


def test_a_larger_lump_makes_shallower_trees() -> None:
    graph = a_graph([100.0] * 16, origin_up=110.0)
    narrow, wide = (
        pack_trees(graph, rate=100.0, lump=lump, chunk_mbit=CHUNK_MBIT) for lump in (1, 4)
    )
    assert [max(tree.fanout) for tree in (narrow[0], wide[0])] == [1, 4]


def test_a_single_tree_puts_each_worker_under_who_has_most_to_spare() -> None:
    tree = one_tree(a_graph([1000.0] + [10.0] * 7), chunk_mbit=CHUNK_MBIT)
    assert tree.fanout[1] >= 5
    assert tree.fanout[3:] == (0,) * 6


def test_there_is_no_star_where_the_origin_cannot_send_to_all() -> None:
    origin = Host("origin", 300.0, 1e4, 0.0, accepts=True)
    workers = a_fleet([100.0] * 3, accepting=3)
    graph, _ = relay_graph(origin, workers, blocked=frozenset({("w1", "origin")}))
    assert star(graph, chunk_mbit=CHUNK_MBIT) is None
    assert star(a_graph([100.0] * 3), chunk_mbit=CHUNK_MBIT) is not None
