"""The coordinator's state as plain values."""

from __future__ import annotations

import json

from core_builders import Scene, a_digest, a_running_scene, a_version

from echo2.core.status import status

V0, V1 = a_version(0), a_version(1)


def test_an_empty_run_shows_that_it_waits_for_a_learner() -> None:
    scene = Scene()
    scene.tick()
    shown = status(scene.state, "")
    assert (shown["run_id"], shown["state"], shown["learner"]) == ("run", "no learner", None)
    assert shown["versions"] == {"published": None, "digest": None, "bcast_s": None}
    assert shown["workers"] == []
    assert shown["buffer"] == {"total": 0, "max": 4, "by_version": {}}


def test_a_running_run_shows_workers_groups_and_versions() -> None:
    scene = a_running_scene(slots=2, tasks=0)
    scene.evaluates(V0, tasks=1)
    scene.submits(3)
    scene.delivers(scene.leases()[0])
    scene.beats("w-1")
    scene.now = 2.0
    scene.learner_beats("trains")
    shown = status(scene.state, "")
    (worker,) = shown["workers"]
    assert (worker["name"], worker["state"], worker["version"]) == ("w-1", "ready", "1.0")
    assert (worker["slots"], worker["leases"], worker["tokens_per_s"]) == (2, 2, 10.0)
    assert worker["silent_s"] == 2.0
    assert shown["learner"] == {"name": "learner", "state": "trains", "silent_s": 0.0}
    assert shown["buffer"] == {"total": 1, "max": 4, "by_version": {"1.0": 1}}
    assert (shown["leases"], shown["queue"], shown["tokens_per_s"]) == (1, 1, 10.0)
    assert (shown["versions"]["published"], shown["versions"]["digest"]) == ("1.0", a_digest(V0))
    assert [wait["text"] for wait in shown["waits"]] == [
        "the coordinator waits for 5 tasks from g3 on",
        "eval e of version 1.0: 0 of 1 done, 1 in flight",
    ]
    assert shown["waits"][1] | {"ends_in_s": 0} == {
        "wait": "eval e",
        "owner": "coordinator",
        "text": "eval e of version 1.0: 0 of 1 done, 1 in flight",
        "since_s": 2.0,
        "ends_in_s": 0,
        "then": "its slowest lease is given to another",
    }
    assert json.loads(json.dumps(shown)) == shown


def test_the_time_that_versions_need_is_shown_when_it_is_known() -> None:
    scene = a_running_scene(tasks=0)
    scene.state.step = 1
    scene.publishes(1)
    scene.now = 1.5
    scene.installs("w-1", V1)
    assert status(scene.state, "")["versions"]["bcast_s"] == 1.5


def test_a_learner_is_joining_until_it_says_what_it_does() -> None:
    scene = Scene()
    scene.learner_joins()
    assert status(scene.state, "")["learner"]["state"] == "joining"


def test_the_state_of_the_run_in_a_word() -> None:
    scene = a_running_scene(slots=2)

    def word() -> str:
        return str(status(scene.state, "")["state"])

    assert word() == "learner busy"
    scene.wants_batch()
    assert word() == "waiting"
    for lease in scene.leases():
        scene.delivers(lease)
    assert word() == "training"
    scene.tick(after=16.0)
    assert word() == "learner silent"
    assert status(scene.state, "")["learner"]["state"] == "silent"
    scene.operator_stops()
    assert word() == "stopped"


def test_a_finished_run_says_so() -> None:
    scene = a_running_scene()
    scene.learner_leaves(finished=True)
    assert status(scene.state, "")["state"] == "finished"
    assert status(scene.state, "")["groups"]["cancelled"] == 2
