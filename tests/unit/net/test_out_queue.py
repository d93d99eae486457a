"""Bounded in bytes, in order, urgent messages first."""

from __future__ import annotations

from echo2.net.out_queue import URGENT_BYTES, OutQueue


def emptied(queue: OutQueue) -> list[bytes]:
    found = []
    while queue:
        found.append(b"".join(queue.first()))
        queue.pop()
    return found


def test_messages_leave_in_order_and_their_bytes_are_given_back() -> None:
    queue = OutQueue(10)
    assert queue.add([b"abc", b"de"])
    assert queue.add([b"fghij"])
    assert queue.credit == 0
    assert not queue.add([b"k"])
    assert queue.pop() == 5
    assert queue.credit == 5
    assert emptied(queue) == [b"fghij"]
    assert queue.credit == 10


def test_an_empty_queue_takes_a_message_of_any_size() -> None:
    queue = OutQueue(1)
    assert queue.add([bytes(100)])
    assert not queue.add([b"a"])
    assert queue.credit == 0


def test_urgent_messages_go_first_in_their_own_order_and_a_little_beyond_the_bound() -> None:
    queue = OutQueue(3)
    assert queue.add([b"abc"])
    assert queue.add([b"1"], urgent=True)
    assert queue.add([b"2"], urgent=True)
    assert not queue.add([bytes(URGENT_BYTES)], urgent=True)
    queue.add_first([b"0"])
    assert emptied(queue) == [b"0", b"1", b"2", b"abc"]
    assert queue.add([b"x"])
    assert queue.add([b"y"], urgent=True)
    queue.clear()
    assert (len(queue), queue.credit) == (0, 3)
