"""The lowest chunk goes first, and nobody gets less than half of an equal share."""

from __future__ import annotations

from collections import Counter

from echo2.types import PeerId
from echo2.weights.send_order import SendOrder

W1, W2, W3 = PeerId("w-1"), PeerId("w-2"), PeerId("w-3")


def test_the_lowest_chunk_goes_first_whoever_wants_it() -> None:
    order = SendOrder()
    positions = {W1: [0, 4, 8], W2: [1, 2, 3, 5, 6, 7]}
    sent = []
    while positions:
        peer = order.next({name: chunks[0] for name, chunks in positions.items()})
        sent.append(positions[peer].pop(0))
        positions = {name: chunks for name, chunks in positions.items() if chunks}
    assert sent == list(range(9))


def test_of_equal_chunks_each_peer_gets_one_in_turn() -> None:
    order = SendOrder()
    got: Counter[PeerId] = Counter()
    for _ in range(30):
        got[order.next({W1: 0, W2: 0, W3: 0})] += 1
    assert set(got.values()) == {10}


def test_a_peer_that_begins_does_not_starve_those_that_are_nearly_done() -> None:
    order = SendOrder()
    got = Counter(order.next({W1: 0, W2: 900, W3: 950}) for _ in range(600))
    assert 395 <= got[W1] <= 405
    assert min(got[W2], got[W3]) >= 98


def test_a_share_that_was_not_taken_is_not_saved_up() -> None:
    order = SendOrder()
    order.next({W1: 0, W2: 9})
    for _ in range(100):
        order.next({W1: 0})  # w-2 has no credit
    got = Counter(order.next({W1: 0, W2: 9}) for _ in range(40))
    assert got[W2] <= 12


def test_who_is_forgotten_begins_anew() -> None:
    order = SendOrder()
    for _ in range(3):
        order.next({W1: 0, W2: 9})
    order.forget(W2)
    assert order.next({W1: 0, W2: 9}) == W1
