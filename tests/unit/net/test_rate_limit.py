"""What others bring about as often as they like is told rarely, and counted all the same."""

from __future__ import annotations

from echo2.net.rate_limit import RateLimit


def test_a_burst_is_told_and_then_one_each_interval() -> None:
    limit = RateLimit(2, 10.0)
    assert [limit.note(0.0) for _ in range(4)] == [1, 1, 0, 0]
    assert limit.note(9.9) == 0
    assert limit.note(10.0) == 4, "this one and the three that were passed over"
    assert limit.note(10.0) == 0


def test_rest_gives_back_no_more_than_the_burst() -> None:
    limit = RateLimit(2, 1.0)
    assert [limit.note(0.0), limit.note(0.0)] == [1, 1]
    assert [limit.note(1000.0) for _ in range(3)] == [1, 1, 0]


def test_what_is_not_worth_telling_is_counted() -> None:
    limit = RateLimit(2, 1.0)
    assert limit.note(0.0) == 1
    limit.pass_over()
    assert limit.note(0.0) == 2
