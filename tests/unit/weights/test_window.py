"""Which chunks are asked for, when, and how often: without a socket or a clock."""

from __future__ import annotations

from typing import Any

from echo2.weights.window import ChunkWindow


def a_window(num_wanted: int = 10, **changes: Any) -> ChunkWindow:
    settings: dict[str, Any] = {
        "requests_max": 4,
        "request_timeout_s": 5.0,
        "faults_max": 3,
        "now": 0.0,
    }
    return ChunkWindow(range(num_wanted), **{**settings, **changes})


def test_no_more_is_asked_for_than_the_window_holds() -> None:
    window = a_window()
    assert window.take(0.0, at_most=3) == (0, 1, 2)
    assert window.take(0.0, at_most=3) == (3,)
    assert window.take(0.0, at_most=3) == ()
    assert window.arrived(1, 1.0)
    assert window.take(1.0, at_most=3) == (4,)


def test_it_is_done_when_all_are_verified() -> None:
    window = a_window(1)
    window.take(0.0, at_most=4)
    assert not window.is_done
    window.arrived(0, 1.0)
    assert not window.is_done
    window.verified(0)
    assert window.is_done


def test_what_was_not_asked_for_or_came_already_is_dropped() -> None:
    window = a_window()
    window.take(0.0, at_most=2)
    assert not window.arrived(7, 1.0)
    assert window.arrived(0, 1.0)
    assert not window.arrived(0, 1.0)


def test_a_wrong_chunk_is_asked_for_first_and_only_so_often() -> None:
    window = a_window()
    for fault in (1, 2, 3):
        assert window.take(0.0, at_most=1) == (0,)
        window.arrived(0, 1.0)
        assert window.wrong(0) is (fault < 3)
        assert window.num_faults == fault


def test_a_request_that_could_not_be_sent_is_taken_again() -> None:
    window = a_window()
    taken = window.take(0.0, at_most=3)
    window.give_back(taken)
    assert window.num_asked == 0
    assert window.take(0.0, at_most=3) == taken


def test_silence_makes_all_that_is_asked_for_be_asked_for_again() -> None:
    window = a_window()
    window.take(0.0, at_most=4)
    assert window.next_expiry() == 5.0
    assert window.expire(4.9) == []
    assert window.expire(5.0) == [0, 1, 2, 3]
    assert window.num_reasked == 4
    assert window.next_expiry() is None
    assert window.take(5.0, at_most=4) == (0, 1, 2, 3)


def test_as_long_as_something_arrives_a_slow_link_is_not_asked_twice() -> None:
    window = a_window()
    window.take(0.0, at_most=4)
    now = 0.0
    for index in range(3):
        now += 4.9
        assert window.expire(now) == []
        assert window.arrived(index, now)
    assert window.next_expiry() == now + 5.0
    assert window.expire(now + 5.0) == [3]


def test_a_request_made_after_the_silence_began_has_its_own_deadline() -> None:
    window = a_window()
    window.take(0.0, at_most=1)
    window.take(3.0, at_most=1)
    assert window.expire(5.0) == [0]
    assert window.next_expiry() == 8.0


def test_a_request_that_two_windows_of_later_ones_overtook_is_lost() -> None:
    window = a_window(20)
    window.take(0.0, at_most=4)
    lost: list[int] = []
    for index in range(1, 12):
        assert not lost
        window.arrived(index, 0.1)
        window.verified(index)
        lost = window.expire(0.1)
        window.take(0.1, at_most=1)
        if lost:
            assert lost == [0]
            assert index == 8
            break
    assert lost


def test_a_late_answer_to_a_lost_request_is_dropped_until_it_is_asked_for_again() -> None:
    window = a_window(1)
    window.take(0.0, at_most=1)
    window.expire(5.0)
    assert not window.arrived(0, 6.0)
    assert window.take(6.0, at_most=1) == (0,)
    assert window.arrived(0, 6.1)
