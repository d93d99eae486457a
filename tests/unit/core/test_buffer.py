"""A group is in exactly one place, and the counts are those of the places."""

from __future__ import annotations

import pytest
from core_builders import a_group, a_lease, a_stored_result, a_task, a_version

from echo2.core.buffer import GroupBook, buffered_by_version
from echo2.core.group import Group, GroupState
from echo2.types import GroupId, PeerId

V0, V1, V2 = a_version(0), a_version(1), a_version(2)


def a_book(*, staleness_max: int = 2) -> GroupBook:
    return GroupBook(staleness_max=staleness_max)


def queued(book: GroupBook, index: int = 0, *, payload: str = "12345") -> Group:
    return book.add(GroupId(f"g{index}"), a_task(index, payload=payload))


def leased(book: GroupBook, index: int = 0, *, version=V0, worker: str = "w-1") -> Group:
    group = queued(book, index)
    book.lease(group, a_lease(group.id, name=f"l.{index}", worker=worker, version=version))
    return group


def buffered(book: GroupBook, index: int = 0, *, version=V0) -> Group:
    group = leased(book, index, version=version)
    book.store(group, a_stored_result(version, lease=f"l.{index}"), 7)
    book.admit(group)
    return group


def test_a_new_group_waits_at_the_end_of_the_queue() -> None:
    book = a_book()
    queued(book, 0)
    queued(book, 1)
    assert list(book.queue) == ["g0", "g1"]
    assert book.queue_bytes == 10
    assert book.num_held == 0


def test_a_leased_group_is_held_and_out() -> None:
    book = a_book()
    group = leased(book, version=V1)
    assert group.begun
    assert (list(book.queue), book.queue_bytes) == ([], 0)
    assert (dict(book.held_by_expiry), dict(book.leased_by_expiry)) == ({3: 1}, {3: 1})
    assert [lease.id for lease in book.leases_of(PeerId("w-1"))] == ["l.0"]
    assert (book.num_leases(PeerId("w-1")), book.num_leases(PeerId("w-2"))) == (1, 0)
    assert book.leases_of(PeerId("w-2")) == []


def test_a_group_that_is_being_stored_keeps_the_place_of_its_lease_until_it_is_durable() -> None:
    book = a_book()
    group = leased(book, version=V0)
    lease = book.store(group, a_stored_result(V1, V2), 7)
    assert lease is not None
    assert lease.id == "l.0"
    assert group.record_id == 7
    assert not book.leases
    assert not book.leases_by_worker
    assert (dict(book.held_by_expiry), dict(book.leased_by_expiry)) == ({2: 1}, {2: 1})
    assert book.note_durable(group), "a place by 2 is free"
    assert (dict(book.held_by_expiry), dict(book.leased_by_expiry)) == ({3: 1}, {3: 1})
    assert not book.note_durable(group)


def test_a_result_that_is_not_recorded_has_a_place_of_its_own_at_once() -> None:
    book = a_book()
    group = leased(book, version=V0)
    book.store(group, a_stored_result(V1, V2), 0)
    assert dict(book.held_by_expiry) == {3: 1}


def test_a_queued_group_may_be_stored_from_a_late_result() -> None:
    book = a_book()
    group = queued(book)
    assert book.store(group, a_stored_result(V0), 7) is None
    assert (list(book.queue), book.queue_bytes) == ([], 0)
    assert book.num_held == 1


def test_a_buffered_group_is_held_and_no_longer_out() -> None:
    book = a_book()
    group = buffered(book, version=V1)
    assert group.record_id is None
    assert (dict(book.held_by_expiry), dict(book.leased_by_expiry)) == ({3: 1}, {})
    assert book.num_buffered == 1


def test_buffered_groups_come_earliest_expiry_first_then_by_arrival() -> None:
    book = a_book()
    for index, version in enumerate((V2, V0, V1, V0)):
        buffered(book, index, version=version)
    assert [group.id for group in book.earliest_first()] == ["g1", "g3", "g2", "g0"]
    assert buffered_by_version(book) == {V0: 2, V1: 1, V2: 1}
    assert list(buffered_by_version(book)) == [V0, V1, V2]


def test_a_group_in_training_is_not_held() -> None:
    book = a_book()
    group = buffered(book)
    book.train(group)
    assert (book.num_held, book.num_buffered) == (0, 0)
    book.admit(group)
    assert (book.num_held, book.num_buffered) == (1, 1)


def test_a_group_that_is_queued_again_comes_first_and_forgets_its_result() -> None:
    book = a_book()
    group = buffered(book, 0)
    queued(book, 1)
    assert book.requeue(group, "rewound") is None
    assert list(book.queue) == ["g0", "g1"]
    assert (group.result, group.record_id, group.last_reason) == (None, None, "rewound")
    assert book.queue_bytes == 10


def test_a_leased_group_that_is_queued_again_gives_its_lease_up() -> None:
    book = a_book()
    group = leased(book)
    lease = book.requeue(group, "lost")
    assert lease is not None
    assert group.lease is None
    assert lease.id in group.known_leases, "its late result may still come"
    assert not book.leases


def test_leases_of_a_worker_are_forgotten_one_by_one() -> None:
    book = a_book()
    first, _second = leased(book, 0), leased(book, 1)
    book.end(first)
    assert [lease.id for lease in book.leases_of(PeerId("w-1"))] == ["l.1"]


def test_an_ended_group_is_in_no_place() -> None:
    book = a_book()
    group = leased(book)
    lease = book.end(group)
    assert lease is not None
    assert group.state is GroupState.ENDED
    assert not book.groups
    assert (book.num_held, dict(book.leased_by_expiry)) == (0, {})


def test_a_group_that_ends_while_it_is_queued_leaves_the_queue() -> None:
    book = a_book()
    assert book.end(queued(book)) is None
    assert (list(book.queue), book.queue_bytes) == ([], 0)


def test_an_ended_group_comes_back_to_the_buffer_with_its_result() -> None:
    book = a_book()
    group = buffered(book)
    group.attempts = 2
    book.train(group)
    book.end(group)
    book.revive(group, with_result=True)
    assert group.state is GroupState.BUFFERED
    assert (group.attempts, group.known_leases) == (0, {})
    assert book.num_buffered == 1


def test_an_ended_group_comes_back_to_the_queue_without_its_result() -> None:
    book = a_book()
    group = buffered(book)
    book.train(group)
    book.end(group)
    book.revive(group, with_result=False)
    assert (group.state, group.result) == (GroupState.QUEUED, None)
    assert list(book.queue) == ["g0"]


def test_a_group_that_has_not_ended_can_not_come_back() -> None:
    book = a_book()
    group = queued(book)
    with pytest.raises(AssertionError, match="group g0 has not ended"):
        book.revive(group, with_result=False)


def test_nothing_expires_of_which_nothing_was_sampled() -> None:
    with pytest.raises(AssertionError, match=r"group g0 is .*: nothing was sampled"):
        a_book().expiry(a_group())


def test_groups_are_found_by_their_state() -> None:
    book = a_book()
    leased(book, 0)
    buffered(book, 1)
    queued(book, 2)
    found = book.in_state(GroupState.LEASED, GroupState.BUFFERED)
    assert [group.id for group in found] == ["g0", "g1"]
