"""Processes die in the middle of a real run, and the run goes on: its records prove it.

Coordinator, origin, learner and workers are started as daemons, each by its own command, as
a user starts them on several machines.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .fleet import Fleet, finishes_well

pytest.importorskip("torch")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, steps=16)
    yield made
    made.stop()


def test_a_killed_worker_loses_its_leases_to_others_and_a_new_one_joins(fleet: Fleet) -> None:
    fleet.start_all(workers=2)
    fleet.until_step(3)
    learner = fleet.processes["learner"]
    learner.send_signal(signal.SIGSTOP)  # or it may be done before the worker's time is up
    fleet.processes["w-1"].kill()
    fleet.start("worker", "--name", "w-3", name="w-3")
    fleet.until(lambda: fleet.events("worker_gone"), "worker_gone")
    learner.send_signal(signal.SIGCONT)
    assert fleet.events("worker_gone")[0]["worker"] == "w-1"
    finishes_well(fleet)
    lines = fleet.lines("events.jsonl")
    installs = [e for e in fleet.events("version_installed") if e["worker"] == "w-3"]
    if installs:
        assert installs[0]["canary_diff"] is not None
        first = lines.index(installs[0])
        assert not any(
            e.get("worker") == "w-3" and e["event"] == "group_ended" for e in lines[:first]
        )
    assert fleet.ends("learner") == 0


def test_a_killed_learner_resumes_under_a_new_incarnation(fleet: Fleet) -> None:
    fleet.start_all(workers=2)
    fleet.until_step(6)
    fleet.processes["learner"].kill()
    fleet.ends("learner")
    fleet.start("learner", "--resume", "--no-origin", name="learner-again")
    finishes_well(fleet)
    joined = [(e["incarnation"], e["resume_step"]) for e in fleet.events("learner_joined")]
    assert joined[0] == (1, 0)
    assert joined[1][0] == 2
    assert joined[1][1] >= 4, "from the checkpoint, not from the start"
    assert fleet.ends("learner-again") == 0
    metrics = fleet.lines("metrics.jsonl")
    assert metrics[-1]["step"] == 16
    assert metrics[-1]["incarnation"] == 2


def test_a_stopped_learner_is_fenced_when_it_wakes_up(fleet: Fleet) -> None:
    fleet.start_all(workers=2)
    fleet.until_step(5)
    first = fleet.processes["learner"]
    first.send_signal(signal.SIGSTOP)
    fleet.start("learner", "--resume", "--no-origin", name="second")
    fleet.until(
        lambda: any(e["incarnation"] == 2 for e in fleet.events("step_completed")),
        "step of the second learner",
    )
    first.send_signal(signal.SIGCONT)
    assert fleet.ends("learner") == 3, fleet.logs()
    finishes_well(fleet)
    assert fleet.ends("second") == 0
    after = fleet.lines("events.jsonl")
    second = next(
        i for i, e in enumerate(after) if e["event"] == "learner_joined" and e["incarnation"] == 2
    )
    assert not any(
        e["event"] in ("step_completed", "version_published") and e["incarnation"] == 1
        for e in after[second:]
    )


def test_a_killed_coordinator_is_started_again_and_the_run_goes_on(fleet: Fleet) -> None:
    fleet.start_all(workers=2)
    fleet.until_step(4)
    fleet.processes["coordinator"].kill()
    fleet.ends("coordinator")
    fleet.start("coordinator")
    finishes_well(fleet)
    steps = [e["step"] for e in fleet.events("step_completed")]
    assert steps == list(range(16)), "each step once, under one incarnation"
    assert fleet.ends("learner") == 0


def test_a_killed_origin_is_started_again_and_the_run_goes_on(fleet: Fleet) -> None:
    fleet.start_all(workers=2)
    fleet.until_step(3)
    fleet.processes["origin"].kill()
    fleet.ends("origin")
    fleet.start("origin")
    finishes_well(fleet)
