"""Every wait has its owner and its cause in one sentence."""

from __future__ import annotations

import pytest
from core_builders import Scene, a_running_scene, a_version

from echo2.core.waits import waiting_text, waits

V0 = a_version(0)


def test_a_run_waits_for_a_learner() -> None:
    scene = Scene()
    scene.tick()
    scene.tick(after=7.0)
    assert waits(scene.state, "") == ["the run waits for a learner since 7 s"]


def test_a_learner_is_silent() -> None:
    scene = a_running_scene(workers=(), tasks=0)
    scene.tick(after=16.0)
    assert waits(scene.state, "") == ["learner learner is silent since 16 s"]


def test_a_learner_that_works_waits_for_nothing() -> None:
    scene = a_running_scene()
    assert waits(scene.state, "") == []


def test_a_batch_waits_for_groups_at_workers() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=1)
    scene.wants_batch()
    scene.delivers(scene.leases("w-1")[0])
    assert waits(scene.state, "") == [
        "step 0 waits for groups: 1 of 2 admissible; 2 in flight at 2 workers; "
        "slowest lease 0 s on w-2"
    ]


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
    assert waits(scene.state, "") == [
        "eval e of version 1.0: 1 of 3 done, 1 in flight",
        "worker w-1 is silent since 6 s",
        "worker w-2 has no version yet, it joined 6 s ago",
    ]
