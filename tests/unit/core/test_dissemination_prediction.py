"""The predicted time of trees simple enough to work out by hand."""

from __future__ import annotations

import pytest

from echo2.core.dissemination import Host
from echo2.core.dissemination_graph import PackedTree, RelayGraph, relay_graph
from echo2.core.dissemination_prediction import (
    allot_chunks,
    predict_arrivals_s,
    uplink_loads_s,
)

CHUNK_MBIT, NUM_CHUNKS, RTT_S = 2.0, 100, 0.1
CHAIN, STAR = [-1, 0, 1, 2], [-1, 0, 0, 0]


def a_graph(*ups: float, down: float = 1000.0) -> RelayGraph:
    hosts = [Host(f"w{i}", up, down, RTT_S, accepts=True) for i, up in enumerate(ups[1:])]
    return relay_graph(Host("origin", ups[0], 1000.0, 0.0, accepts=True), hosts)[0]


def a_tree(graph: RelayGraph, parents: list[int], rate: float = 1.0) -> PackedTree:
    return PackedTree.of(graph, parents, rate=rate, chunk_mbit=CHUNK_MBIT)


def predicted(graph: RelayGraph, trees: list[PackedTree], chunks: list[int]) -> list[float]:
    loads = uplink_loads_s(graph, trees, chunks, chunk_mbit=CHUNK_MBIT)
    return predict_arrivals_s(graph, trees, chunks, loads, chunk_mbit=CHUNK_MBIT)


def test_a_chain_takes_its_load_and_a_hop_for_each_worker_more() -> None:
    graph = a_graph(100.0, 100.0, 100.0, 100.0)
    arrivals = predicted(graph, [a_tree(graph, CHAIN)], [NUM_CHUNKS])
    hop = 0.02 + RTT_S / 2
    assert arrivals == pytest.approx([2.0 + RTT_S / 2 + i * hop for i in range(3)])


def test_a_star_takes_all_copies_from_the_origin() -> None:
    graph = a_graph(100.0, 100.0, 100.0, 100.0)
    arrivals = predicted(graph, [a_tree(graph, STAR)], [NUM_CHUNKS])
    assert arrivals == pytest.approx([6.0 + RTT_S / 2] * 3)


def test_a_slow_downlink_takes_the_whole_version() -> None:
    graph = a_graph(100.0, 100.0, 100.0, 100.0, down=10.0)
    arrivals = predicted(graph, [a_tree(graph, CHAIN)], [NUM_CHUNKS])
    assert arrivals[0] == pytest.approx(20.0 + 0.2 + RTT_S / 2)


def test_no_prediction_ends_before_the_busiest_uplink() -> None:
    graph = a_graph(60.0, 30.0, 20.0, 10.0)
    trees = [a_tree(graph, CHAIN, 3.0), a_tree(graph, STAR, 2.0), a_tree(graph, [-1, 0, 1, 1])]
    chunks = allot_chunks(graph, trees, num_chunks=NUM_CHUNKS)
    loads = uplink_loads_s(graph, trees, chunks, chunk_mbit=CHUNK_MBIT)
    assert max(loads) <= max(predicted(graph, trees, chunks))


def test_chunks_are_whole_and_near_the_rates() -> None:
    graph = a_graph(100.0, 100.0, 100.0, 100.0)
    trees = [a_tree(graph, CHAIN, 2.0), a_tree(graph, [-1, 3, 1, 0], 1.0)]
    assert allot_chunks(graph, trees, num_chunks=99) == [66, 33]


def test_a_chunk_left_over_goes_where_it_makes_the_smallest_load() -> None:
    graph = a_graph(1000.0, 100.0, 100.0, 100.0)
    trees = [a_tree(graph, CHAIN), a_tree(graph, STAR)]
    assert allot_chunks(graph, trees, num_chunks=1) == [0, 1]
