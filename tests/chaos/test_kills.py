"""Processes die in the middle of a real run, and the run goes on: its records prove it.

Coordinator, origin, learner and workers are started as daemons, each by its own command, as
a user starts them on several machines.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2.verify import verify_run

pytest.importorskip("torch")

ECHO2 = (sys.executable, "-m", "echo2.cli")
WAIT_S = 240
CONFIG = """
[run]
name = "chaos"
no_worker_timeout_s = 120.0
learner_timeout_s = 120.0

[dispatch]
group_size = 4
stall_s = 120.0

[heartbeat]
interval_s = 0.5
suspect_s = 2.0
gone_s = 5.0

[learner]
steps = {steps}
groups_per_step = 8
threads = 1

[checkpoint]
every_steps = 4

[worker]
slots = 4
"""


class Fleet:
    """The processes of one run, by name."""

    def __init__(self, folder: Path, *, steps: int) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.config = folder / "chaos.toml"
        self.config.write_text(CONFIG.format(steps=steps))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, command: str, *options: str, name: str = "") -> subprocess.Popen[bytes]:
        """`echo2 COMMAND CONFIG --run-dir RUN OPTIONS`, in a process group of its own."""
        name = name or command
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*ECHO2, command, str(self.config), "--run-dir", str(self.run_dir), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        self.processes[name] = process
        return process

    def start_all(self, *, workers: int) -> None:
        self.run_dir.mkdir()
        self.start("coordinator")
        self.until(lambda: (self.run_dir / "coordinator.json").exists(), "a coordinator")
        self.start("origin")
        self.start("learner", "--no-origin")
        for number in range(1, workers + 1):
            self.start("worker", "--name", f"w-{number}", name=f"w-{number}")

    def events(self, name: str) -> list[dict[str, Any]]:
        return [line for line in self.lines("events.jsonl") if line["event"] == name]

    def lines(self, file: str) -> list[dict[str, Any]]:
        path = self.run_dir / file
        if not path.exists():
            return []
        whole = path.read_bytes().rpartition(b"\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def until(self, is_true: Callable[[], object], what: str) -> None:
        """Wait for what the processes bring about; their logs are shown when they do not."""
        deadline = time.monotonic() + WAIT_S
        while not is_true():
            if time.monotonic() > deadline:
                pytest.fail(f"no {what} after {WAIT_S} s\n{self.logs()}")
            time.sleep(0.1)

    def until_step(self, step: int) -> None:
        self.until(
            lambda: any(e["step"] >= step for e in self.events("step_completed")), f"step {step}"
        )

    def ends(self, name: str) -> int:
        """The exit code of a process that ends by itself."""
        try:
            return self.processes[name].wait(WAIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{name} did not end\n{self.logs()}")

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def stop(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, steps=16)
    yield made
    made.stop()


def finishes_well(fleet: Fleet) -> None:
    assert fleet.ends("coordinator") == 0, fleet.logs()
    report = verify_run(fleet.run_dir)
    assert report.ok, report.to_text()
    assert fleet.events("run_finished")[-1]["finished"] is True


def test_a_killed_worker_loses_its_leases_to_others_and_a_new_one_joins(fleet: Fleet) -> None:
    fleet.start_all(workers=2)
    fleet.until_step(3)
    fleet.processes["w-1"].kill()
    fleet.start("worker", "--name", "w-3", name="w-3")
    fleet.until(lambda: fleet.events("worker_gone"), "worker_gone")
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
