"""Every wait has its owner and its cause in one sentence."""

from __future__ import annotations

import pytest
from core_builders import Scene, a_granted_batch, a_running_scene, a_version

from echo2.core.dispatch import TASKS_PATIENCE_S
from echo2.core.waits import waiting_text, waits

V0 = a_version(0)


def told(scene: Scene, reason: str = "") -> list[tuple[str, str, float, float | None]]:
    """What is waited for, who ends it, how old it is, and in how many seconds at the latest."""
    return [
        (
            wait.text,
            wait.owner,
            scene.now - wait.since,
            None if wait.deadline is None else wait.deadline - scene.now,
        )
        for wait in waits(scene.state, reason)
    ]


def test_a_run_waits_for_a_learner() -> None:
    scene = Scene()
    scene.tick()
    scene.tick(after=7.0)
    timeout_s = scene.state.settings.learner_timeout_s
    assert told(scene) == [("the run waits for a learner", "coordinator", 7.0, timeout_s - 7.0)]


def test_a_learner_is_silent() -> None:
    scene = a_running_scene(workers=(), tasks=0)
    scene.tick(after=16.0)
    (wait,) = (wait for wait in told(scene) if "learner" in wait[1] or "learner" in wait[0])
    timeout_s = scene.state.settings.learner_timeout_s
    assert wait == ("learner learner is silent", "coordinator", 16.0, timeout_s - 16.0)


def test_a_learner_that_works_waits_for_nothing() -> None:
    scene = a_running_scene()
    assert told(scene) == []


def test_a_batch_waits_for_groups_at_workers() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=1)
    scene.wants_batch()
    scene.delivers(scene.leases("w-1")[0])
    (found,) = (wait for wait in waits(scene.state, "") if wait.key == "batch")
    assert found.text == (
        "step 0 waits for groups: 1 of 2 admissible; 2 in flight at 2 workers; slowest lease on w-2"
    )
    slowest = next(lease for lease in scene.state.book.leases.values() if lease.worker == "w-2")
    assert found.deadline == min(
        slowest.progressed_at + scene.state.settings.stall_s,
        slowest.granted_at + slowest.revoke_after_s,
    )
    assert found.then == "its lease on w-2 is given to another"


def test_a_batch_that_no_worker_can_fill_ends_the_run_at_a_time_that_is_told() -> None:
    scene = a_running_scene(workers=())
    scene.wants_batch()
    scene.passes(4.0)
    (found,) = (wait for wait in waits(scene.state, "") if wait.key == "batch")
    assert found.deadline == scene.state.no_worker_since + scene.state.settings.no_worker_timeout_s
    assert found.then == "the run ends with code 1"


def test_tasks_that_do_not_come_are_waited_for_from_the_first_time_they_were_asked_for() -> None:
    scene = a_running_scene(tasks=None)
    assert scene.state.stream.outstanding is None
    scene = Scene()
    scene.learner_joins()
    scene.publishes(0)
    scene.worker_joins("w-1")
    scene.installs("w-1", V0)
    scene.passes(20.0, alive=("w-1",))
    (found,) = (wait for wait in waits(scene.state, "") if wait.key == "tasks")
    assert found.owner == "learner learner"
    assert scene.now - found.since >= 20.0
    assert found.deadline is not None
    assert found.deadline - scene.now <= TASKS_PATIENCE_S


def test_what_is_not_on_the_disk_is_waited_for() -> None:
    scene = a_running_scene()
    scene.delivers(scene.leases()[0], durable=False)
    hanging, scene.undurable = scene.undurable, []
    scene.tick(after=3.0)
    (found,) = (wait for wait in waits(scene.state, "") if wait.key == "disk")
    assert (found.owner, scene.now - found.since) == ("ledger", 3.0)
    assert found.deadline == found.since + scene.state.settings.disk_timeout_s
    scene.undurable = hanging
    scene.becomes_durable()
    assert not [wait for wait in waits(scene.state, "") if wait.key == "disk"]


def test_leases_without_a_token_are_told_with_their_worker() -> None:
    scene = a_running_scene(stall_s=40.0)
    scene.passes(11.0, alive=("w-1",))
    (found,) = (wait for wait in waits(scene.state, "") if wait.key == "leases w-1")
    assert found.text == "worker w-1 makes no token for 2 of its leases"
    assert found.deadline is not None
    assert found.deadline - scene.now == pytest.approx(29.0, abs=1.5)


def test_a_version_is_waited_for_until_all_have_installed_it() -> None:
    scene = a_granted_batch()
    scene.completes()
    scene.publishes(1)
    (found,) = (wait for wait in waits(scene.state, "") if wait.key == "version 1.1")
    assert found.text == "version 1.1 is not installed by w-1"
    scene.installs("w-1", a_version(1))
    assert not [wait for wait in waits(scene.state, "") if wait.key == "version 1.1"]


@pytest.mark.parametrize(("age_s", "shown"), [(9.9, 9), (10.0, 10), (19.9, 10), (83.0, 80)])
def test_ages_are_rounded_so_that_the_sentence_rarely_changes(age_s: float, shown: int) -> None:
    scene = a_running_scene(slots=1)
    scene.state.now = age_s
    assert waiting_text(scene.state, "").endswith(f"slowest lease {shown} s on w-1")


def test_without_leases_the_reason_of_the_dispatcher_is_told() -> None:
    scene = a_running_scene(workers=())
    assert waiting_text(scene.state, "no task is ready").endswith("; no task is ready")
    assert waiting_text(scene.state, "").endswith("0 in flight at 0 workers")


def test_evals_and_workers_are_waited_for_too() -> None:
    scene = a_running_scene(slots=1, tasks=0)
    scene.evaluates(V0, tasks=3)
    scene.delivers("l.1")
    scene.worker_joins("w-2")
    scene.now = 6.0
    scene.learner_beats()
    scene.beats("w-2")
    scene.tick()
    assert [(text, owner, since) for text, owner, since, _ in told(scene)[1:]] == [
        ("eval e of version 1.0: 1 of 3 done, 1 in flight", "coordinator", 6.0),
        ("worker w-1 is silent", "coordinator", 6.0),
        ("worker w-2 has no version yet", "worker w-2", 6.0),
    ]
