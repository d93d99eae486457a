"""What a peer is owed: lowest first, versions by turns, bounded, and counted until it is sent."""

from __future__ import annotations

import random

from echo2.weights.request_queue import REQUESTS_PER_PEER_MAX, RequestQueue


def a_queue(**wanted: list[int]) -> RequestQueue:
    queue = RequestQueue()
    for version, indexes in wanted.items():
        for index in indexes:
            assert queue.add(version, index)
    return queue


def test_versions_take_turns_and_each_gives_its_lowest_chunk() -> None:
    queue = a_queue(old=[3, 0, 2, 1], new=[7])
    assert queue.add("old", 0), "asked for again while it waits"
    assert len(queue) == 5
    assert queue.lowest() == 0
    assert [queue.take() for _ in range(5)] == [
        ("old", 0),
        ("new", 7),
        ("old", 1),
        ("old", 2),
        ("old", 3),
    ]
    assert len(queue) == 0


def test_a_queue_is_bounded_and_can_be_dropped() -> None:
    queue = a_queue(a=list(range(REQUESTS_PER_PEER_MAX)))
    assert not queue.add("b", 0)
    queue.take()
    assert not queue.add("b", 0), "what is in hand is owed too"
    queue.drop("b")
    queue.drop("a")
    assert (len(queue), queue.num_all) == (0, 0)
    assert queue.add("b", 0)
    queue.drop()
    assert len(queue) == 0


def test_what_is_owed_is_counted_whatever_was_done_with_it() -> None:
    """The count is kept, not summed up: a peer may name a version for each chunk it asks for."""
    rng = random.Random(7)
    queue = RequestQueue()
    for _ in range(5000):
        version, index = rng.choice("abcd"), rng.randrange(8)
        match rng.randrange(7):
            case 0 | 1:
                queue.add(version, index, here=rng.random() < 0.5)
            case 2:
                queue.arrived(version, index)
            case 3 if queue:
                queue.take()
            case 4:
                queue.let_go(version, index)
            case 5:
                queue.drop(version, rng.sample(range(8), 2))
            case 6:
                queue.drop(version if rng.random() < 0.9 else None)
        assert queue.num_all == sum(ready + awaited for ready, awaited in queue.counts().values())


def test_what_is_in_hand_is_held_until_it_is_let_go() -> None:
    queue = a_queue(v=[0, 1])
    queue.add("v", 2, here=False)
    queue.take()
    assert queue.counts() == {"v": (2, 1)}
    assert queue.add("v", 0), "asked for again while it is in hand"
    assert queue.counts() == {"v": (2, 1)}
    assert queue.let_go("v", 0)
    assert not queue.let_go("v", 0)
    assert queue.counts() == {"v": (1, 1)}


def test_what_is_dropped_while_it_is_in_hand_is_not_sent() -> None:
    queue = a_queue(v=[0, 1, 2])
    for _ in range(3):
        queue.take()
    queue.drop("v", [1])
    assert [queue.let_go("v", index) for index in range(3)] == [True, False, True]
    assert queue.num_all == 0


def test_what_is_awaited_is_ready_when_it_is_here() -> None:
    queue = RequestQueue()
    queue.add("v", 5, here=False)
    queue.add("v", 4, here=False)
    assert queue.awaited("v") == (4, 5)
    assert queue.arrived("v", 5)
    assert not queue.arrived("v", 6)
    assert (len(queue), queue.lowest(), queue.counts()) == (1, 5, {"v": (1, 1)})
