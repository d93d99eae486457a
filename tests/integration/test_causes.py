"""What cannot make progress ends with a non-zero exit and the cause, whichever it is.

The commands are run as a user runs them. Each test takes away one thing that a run needs.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

ECHO2 = (sys.executable, "-m", "echo2.cli")
TIMEOUT_S = 240.0
ENVIRONMENT = """
import time
from echo2_workers.environments.addition import Addition

class Broken(Addition):
    name, version = "broken", "1"

    async def rollout(self, task, generate):
        raise ValueError("the grader is out of order")

class Poisoned(Addition):
    name, version = "poisoned", "1"

    async def rollout(self, task, generate):
        while task.index == 2:
            pass
        return await super().rollout(task, generate)

class Few(Addition):
    name, version = "few", "1"

    def num_tasks(self, split):
        return 10 if split == "train" else 0

class Stuck(Addition):
    name, version = "stuck", "1"

    def task(self, split, index):
        if split == "train" and index >= 4:
            time.sleep(1e6)
        return super().task(split, index)
"""
CONFIG = """
[run]
name = "causes"
no_worker_timeout_s = {no_worker_s}
learner_timeout_s = {learner_s}

[environment]
name = "causes_environment:{environment}"
hang_timeout_s = 2.0
rollout_timeout_s = 10.0

[sampling]
max_tokens = 4

[dispatch]
group_size = 2
attempts_max = 1

[heartbeat]
interval_s = 0.5
suspect_s = 2.0
gone_s = 4.0

[learner]
steps = 6
groups_per_step = 4
threads = 1

[eval]
every_steps = 0

[worker]
slots = 8
"""


class Commands:
    """Processes of one run, each with its output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.started: list[subprocess.Popen[bytes]] = []
        (folder / "causes_environment.py").write_text(ENVIRONMENT)

    def configure(
        self, environment: str, *, no_worker_s: float = 120.0, learner_s: float = 120.0
    ) -> None:
        text = CONFIG.format(environment=environment, no_worker_s=no_worker_s, learner_s=learner_s)
        (self.folder / "causes.toml").write_text(text)

    def start(self, command: str, *options: str) -> subprocess.Popen[bytes]:
        config = self.folder / "causes.toml"
        with (self.folder / f"{command}.out").open("wb") as out:
            process = subprocess.Popen(
                [*ECHO2, command, str(config), "--run-dir", str(self.run_dir), *options],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )
        self.started.append(process)
        return process

    def start_pair(self) -> tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]:
        """A coordinator, then an origin and a learner."""
        coordinator = self.start("coordinator")
        self.until((self.run_dir / "coordinator.json").exists, "a coordinator")
        self.start("origin")
        return coordinator, self.start("learner", "--no-origin")

    def said(self, command: str) -> str:
        return (self.folder / f"{command}.out").read_text(errors="replace")

    def until(self, is_true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_true():
            assert time.monotonic() < deadline, f"no {what}"
            time.sleep(0.05)

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [event for line in lines if (event := json.loads(line))["event"] == name]

    def end(self) -> dict[str, Any]:
        return self.events("run_finished")[-1]


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    made = Commands(tmp_path)
    yield made
    for process in made.started:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def test_no_worker_within_the_time_out(commands: Commands) -> None:
    commands.configure("Few", no_worker_s=45.0)
    coordinator, learner = commands.start_pair()
    commands.until(lambda: commands.events("version_published"), "a version")
    status = [*ECHO2, "status", "--run-dir", str(commands.run_dir)]
    commands.until(
        lambda: re.search(
            r"^waits     step 0 waits for groups: 0 of 4 admissible; .*, since \d+ s  "
            r"\(coordinator: the run ends with code 1 in \d+ s\)$",
            subprocess.run(status, capture_output=True, text=True, timeout=60, check=False).stdout,
            re.MULTILINE,
        ),
        "wait in the status",
    )
    assert coordinator.wait(TIMEOUT_S) == 1, commands.said("coordinator")
    cause = "no worker could sample for 45 s (run.no_worker_timeout_s) while step 0 waits for"
    assert commands.end()["reason"].startswith(cause)
    assert cause in commands.said("coordinator")
    assert learner.wait(TIMEOUT_S) == 1
    assert cause in commands.said("learner")
    told = [e["text"] for e in commands.events("wait_changed") if e["wait"] == "batch"]
    assert told, "the watchdog told of it before"
    assert told[0].startswith("step 0 waits for groups: 0 of 4 admissible")


def test_a_learner_that_is_gone(commands: Commands) -> None:
    commands.configure("Few", learner_s=40.0)
    coordinator, learner = commands.start_pair()
    commands.until(lambda: commands.events("learner_joined"), "a learner")
    learner.kill()
    assert coordinator.wait(TIMEOUT_S) == 1, commands.said("coordinator")
    assert re.match(
        r"no learner for \d+ s \(run.learner_timeout_s = 40\); start it with: echo2 learner",
        commands.end()["reason"],
    )
    assert "no learner for" in commands.said("coordinator")


def test_all_groups_failing(commands: Commands) -> None:
    commands.configure("Broken")
    assert commands.start("run").wait(TIMEOUT_S) == 1, commands.said("run")
    cause = re.search(r"(\d+) groups failed one after the other", commands.said("run"))
    assert cause is not None, commands.said("run")
    assert int(cause[1]) >= 32
    reasons = {e["reason"] for e in commands.events("group_ended") if e["end"] == "failed"}
    assert any("the grader is out of order" in reason for reason in reasons)


def test_tasks_that_are_used_up(commands: Commands) -> None:
    commands.configure("Few")
    assert commands.start("run").wait(TIMEOUT_S) == 1, commands.said("run")
    cause = "the tasks are used up: 3 of 6 steps are done; give more, or set learner.steps to 3"
    assert commands.end() | {"time": 0} == {
        "time": 0,
        "event": "run_finished",
        "reason": cause,
        "finished": True,
    }
    assert f"not finished ({cause})" in commands.said("run")
    assert "3 of 6 steps" in commands.said("run")
    assert (commands.run_dir / "final").is_dir()


def test_tasks_that_never_come(commands: Commands) -> None:
    commands.configure("Stuck")
    coordinator, learner = commands.start_pair()
    assert learner.wait(TIMEOUT_S) == 1, commands.said("learner")
    assert "the environment made no task for 10 s (environment.rollout_timeout_s)" in commands.said(
        "learner"
    )
    assert coordinator.poll() is None, "another learner may come"


def test_one_poisonous_prompt_costs_its_own_group_only(commands: Commands) -> None:
    commands.configure("Poisoned")
    assert commands.start("run").wait(TIMEOUT_S) == 0, commands.said("run")
    ends = [e for e in commands.events("group_ended") if e["end"] == "failed"]
    assert [e["group_id"] for e in ends] == ["g2"]
    assert "2 s" in ends[0]["reason"]
