"""T_bcast by share of the workers."""

from __future__ import annotations

from core_builders import a_version

from echo2.core.broadcast import BROADCASTS_MAX, PROBLEMS_TOLD, Broadcasts
from echo2.types import BroadcastWorker, PeerId, Version

V0 = a_version(0)


def installs(found: Broadcasts, name: str, now: float, version: Version = V0) -> bool:
    done = found.installed(version, PeerId(name), fetch_s=1.0, install_s=0.5, now=now)
    return done is not None


def begun(*names: str, version: Version = V0) -> Broadcasts:
    found = Broadcasts()
    found.begin(version, active=map(PeerId, names), now=100.0)
    return found


def test_a_share_is_rounded_up_to_whole_workers() -> None:
    found = begun("a", "b", "c")
    told = [installs(found, name, now) for name, now in (("c", 101.0), ("a", 103.0), ("b", 110.0))]
    assert told == [False, False, True]
    broadcast = found.broadcasts[V0]
    assert [broadcast.t_bcast_s(q) for q in (0.3, 0.5, 0.9, 1.0)] == [1.0, 3.0, 10.0, 10.0]


def test_a_share_that_was_not_reached_has_no_time() -> None:
    found = begun("a", "b")
    installs(found, "a", 101.0)
    assert (found.broadcasts[V0].t_bcast_s(0.5), found.broadcasts[V0].t_bcast_s(0.9)) == (1.0, None)
    assert found.t_bcast_s() is None


def test_only_those_who_were_active_then_are_counted_once_each() -> None:
    found = begun("a")
    assert not installs(found, "late", 101.0)
    assert installs(found, "a", 102.0)
    assert not installs(found, "a", 103.0)
    assert found.broadcasts[V0].num_workers == 1
    assert found.t_bcast_s() == 2.0


def test_nobody_there_is_nothing_to_measure() -> None:
    assert not begun().broadcasts


def test_who_is_left_out_of_one_version_is_still_waited_for_in_another() -> None:
    found = begun("a", "b")
    found.begin(a_version(1), active=map(PeerId, "ab"), now=100.0)
    installs(found, "a", 101.0)
    assert [done.version for done in found.leave_out(PeerId("b"), V0)] == [V0]
    assert found.broadcasts[a_version(1)].waiting == {"a", "b"}
    assert found.leave_out(PeerId("a")) == []
    assert found.leave_out(PeerId("b")) == []  # nobody is left who has it
    assert not found.broadcasts[a_version(1)].is_complete


def test_old_versions_are_forgotten() -> None:
    found = Broadcasts()
    for step in range(BROADCASTS_MAX + 5):
        found.begin(a_version(step), active=[PeerId("a")], now=0.0)
    assert min(found.broadcasts) == a_version(5)
    installs(found, "a", 7.0, a_version(8))
    assert found.t_bcast_s() == 7.0  # of the newest version that has it


def test_each_worker_is_told_with_why_it_has_not_installed_it_yet() -> None:
    found = begun("a", "b", "c", "d")
    found.failed(V0, PeerId("b"), "the disk is full")
    found.failed(V0, PeerId("a"), "no route")
    found.failed(V0, PeerId("stranger"), "?")
    installs(found, "a", 101.5)
    found.leave_out(PeerId("b"))
    found.leave_out(PeerId("d"))
    assert found.workers(V0) == (
        BroadcastWorker("a", 1.5, 1.0, 0.5),
        BroadcastWorker("c"),
        BroadcastWorker("b", problem="the disk is full", is_here=False),
    )
    assert found.workers(a_version(1)) == ()


def test_what_is_told_of_a_large_fleet_fits_a_message() -> None:
    names = [f"w-{number:03}" for number in range(PROBLEMS_TOLD + 10)]
    found = begun(*names)
    for name in names:
        found.failed(V0, PeerId(name), "x" * 2000)
    told = [worker for worker in found.workers(V0) if worker.problem]
    assert len(told) == PROBLEMS_TOLD
    assert {len(worker.problem) for worker in told} == {500}
