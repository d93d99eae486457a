"""The data position: which tasks were asked for, and which come again."""

from __future__ import annotations

import pytest
from core_builders import a_task

from echo2.core.task_queue import REQUEST_MAX, TaskRequest, TaskStream, group_of, index_of


def tasks(start: int, count: int) -> tuple:
    return tuple(a_task(start + i) for i in range(count))


def test_a_group_is_named_by_the_index_of_its_task() -> None:
    assert group_of(12) == "g12"
    assert index_of(group_of(12)) == 12


def test_one_request_at_a_time() -> None:
    stream = TaskStream()
    assert stream.request(3) == TaskRequest(0, 3)
    assert stream.request(3) is None
    stream.forget_request()
    assert stream.request(2) == TaskRequest(0, 2)


def test_nothing_is_asked_for_without_room() -> None:
    assert TaskStream().request(0) is None


def test_a_request_is_bounded() -> None:
    assert TaskStream().request(10_000) == TaskRequest(0, REQUEST_MAX)


def test_an_answer_moves_the_position() -> None:
    stream = TaskStream()
    stream.request(3)
    assert [task.index for task in stream.accept(0, tasks(0, 2), exhausted=False)] == [0, 1]
    assert stream.next_index == 2
    assert stream.request(3) == TaskRequest(2, 3)


@pytest.mark.parametrize(("start", "count"), [(1, 1), (0, 4)])
def test_an_answer_to_another_request_is_ignored(start: int, count: int) -> None:
    stream = TaskStream()
    assert stream.accept(0, tasks(0, 1), exhausted=False) == [], "nothing was asked for"
    stream.request(3)
    assert stream.accept(start, tasks(start, count), exhausted=False) == []
    assert (stream.next_index, stream.outstanding) == (0, TaskRequest(0, 3))


def test_an_answer_with_a_gap_is_refused_and_changes_nothing() -> None:
    stream = TaskStream()
    stream.request(3)
    with pytest.raises(ValueError, match=r"numbered from 0 on without a gap, got \[0, 2\]"):
        stream.accept(0, (a_task(0), a_task(2)), exhausted=True)
    assert (stream.next_index, stream.exhausted_at) == (0, None)
    assert stream.outstanding == TaskRequest(0, 3)


def test_an_exhausted_stream_asks_no_more() -> None:
    stream = TaskStream()
    stream.request(3)
    stream.accept(0, tasks(0, 2), exhausted=True)
    assert stream.exhausted
    assert stream.request(3) is None


def test_tasks_that_come_again_are_asked_for_first_run_by_run() -> None:
    stream = TaskStream(next_index=9, again=(5, 2, 3))
    assert stream.request(8) == TaskRequest(2, 2)
    stream.accept(2, tasks(2, 2), exhausted=False)
    assert stream.again == [5]
    assert stream.next_index == 9
    assert stream.request(8) == TaskRequest(5, 1)
    stream.accept(5, tasks(5, 1), exhausted=False)
    assert stream.request(8) == TaskRequest(9, 8)


def test_no_more_than_there_is_room_for_come_again() -> None:
    assert TaskStream(next_index=9, again=(1, 2, 3)).request(2) == TaskRequest(1, 2)


def test_a_stream_with_tasks_that_come_again_is_not_exhausted() -> None:
    stream = TaskStream()
    stream.request(2)
    stream.accept(0, tasks(0, 2), exhausted=True)
    stream.put_back(1)
    stream.put_back(0)
    stream.put_back(1)
    assert stream.again == [0, 1]
    assert not stream.exhausted
    assert stream.request(9) == TaskRequest(0, 2)


def test_tasks_beyond_the_end_of_a_shorter_stream_do_not_come_again() -> None:
    stream = TaskStream(next_index=6, again=(2, 5))
    stream.request(8)
    stream.accept(2, tasks(2, 1), exhausted=True)
    assert stream.again == []
    assert stream.exhausted


def test_what_is_awaited_is_asked_for_first_in_one_run_and_whatever_room_there_is() -> None:
    stream = TaskStream(next_index=20, again=(3, 7, 8, 12))
    assert stream.request(0) is None
    assert stream.request(0, {7, 8, 12}) == TaskRequest(7, 2)
    assert stream.request(5, {12}) is None, "one at a time"
    stream.accept(7, (a_task(7), a_task(8)), exhausted=False)
    assert stream.request(5, {12}) == TaskRequest(12, 1)
