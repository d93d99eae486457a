"""`echo2 run` for real: coordinator, origin, learner and workers as processes of this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2.commands.run_folder import is_alive
from echo2.commands.run_records import surviving_lines

pytest.importorskip("torch")

CONFIG = """
[run]
name = "tiny"
no_worker_timeout_s = 60.0
learner_timeout_s = 60.0

[environment]
name = "tiny_environment:TinyAddition"

[sampling]
max_tokens = 4

[dispatch]
group_size = 4

[learner]
steps = 6
groups_per_step = 4
threads = 1

[checkpoint]
every_steps = 2

[eval]
every_steps = 3
num_tasks = 16

[worker]
slots = 4
price_usd_per_h = 0.05

[cost]
learner_usd_per_h = 0.1
"""
ENVIRONMENT = """
from echo2_workers.environments.addition import Addition

class TinyAddition(Addition):
    name, version = "tiny-addition", "1"
"""
ECHO2 = (sys.executable, "-m", "echo2.cli")
TIMEOUT_S = 240


class Started:
    """An `echo2 run` in a session of its own, as a shell would start it."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        config = folder.parent / "tiny.toml"
        config.write_text(CONFIG, encoding="utf-8")
        (folder.parent / "tiny_environment.py").write_text(ENVIRONMENT, encoding="utf-8")
        self._out = folder.parent / f"out-{time.monotonic_ns()}"
        with self._out.open("w") as out:
            self.process = subprocess.Popen(
                [*ECHO2, "run", str(config), "--run-dir", str(folder), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )

    @property
    def text(self) -> str:
        return self._out.read_text(encoding="utf-8")

    def ends(self) -> int:
        return self.process.wait(TIMEOUT_S)

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        deadline = time.monotonic() + TIMEOUT_S
        while not (value := condition()):
            assert self.process.poll() is None, f"ended before {what}:\n{self.text}"
            assert time.monotonic() < deadline, f"not {what} in {TIMEOUT_S} s:\n{self.text}"
            time.sleep(0.02)
        return value

    def steps(self) -> int:
        return len(surviving_lines(self.folder / "metrics.jsonl"))

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "events.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [event for line in lines if (event := json.loads(line))["event"] == name]


def family_of(pid: int) -> set[int]:
    """A process and all that descend from it."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        parents[int(stat.parent.name)] = int(fields[1])
    family, grown = {pid}, True
    while grown:
        found = {child for child, parent in parents.items() if parent in family} - family
        family |= found
        grown = bool(found)
    return family


def wait_until_gone(pids: set[int]) -> None:
    deadline = time.monotonic() + 60
    while alive := {pid for pid in pids if is_alive(pid)}:
        assert time.monotonic() < deadline, f"still alive: {alive}"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    started: list[Started] = []

    def begin(*arguments: str) -> Started:
        started.append(Started(tmp_path / "tiny", *arguments))
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            each.process.kill()
            each.process.wait()


def verified(folder: Path) -> str:
    ran = subprocess.run(
        [*ECHO2, "verify", str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_a_tiny_run_trains_to_its_end_and_its_records_hold_the_promises(
    start: Callable[..., Started],
) -> None:
    run = start()
    assert run.ends() == 0, run.text
    assert run.steps() == 6
    assert re.search(r"^step \d+/6  version 1\.\d+  reward ", run.text, re.MULTILINE)
    assert "finished: 6 of 6 steps" in run.text
    assert re.search(r"^eval: \S+ at version 0, \S+ at version 6$", run.text, re.MULTILINE)
    assert re.search(r"^groups: 24 trained.*; cost \$0\.\d*[1-9]", run.text, re.MULTILINE)
    assert f"echo2 verify {run.folder}" in run.text
    assert sorted(path.name for path in (run.folder / "logs").iterdir()) == [
        "coordinator.log", "learner.log", "origin.log", "w-1.log", "w-2.log",
    ]  # fmt: skip
    assert "promises hold, 0 broken" in verified(run.folder)
    refused = start()
    assert refused.ends() == 1
    assert "holds a run already: go on with it by --resume" in refused.text


def test_a_killed_learner_and_a_killed_worker_come_back_and_the_run_ends(
    start: Callable[..., Started],
) -> None:
    run = start("--set", "learner.steps=10")
    run.until(lambda: run.events("checkpoint_saved"), "a checkpoint was saved")
    for part in ("learner", "worker"):
        victims = [
            pid
            for pid in family_of(run.process.pid)
            if f"\0{part}\0".encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(victims[0], signal.SIGKILL)
    assert run.ends() == 0, run.text
    assert (
        "learner ended with signal SIGKILL; started from its newest checkpoint, 1 of 3" in run.text
    )
    assert re.search(r"w-\d ended with signal SIGKILL; started anew, 1 of 3", run.text)
    assert run.steps() == 10
    verified(run.folder)


def test_an_interrupt_leaves_a_checkpoint_and_the_run_goes_on_from_it(
    start: Callable[..., Started],
) -> None:
    run = start("--set", "learner.steps=12", "--set", "workers.local=1")
    run.until(lambda: run.steps() >= 3, "3 steps were trained")
    family = family_of(run.process.pid)
    os.killpg(run.process.pid, signal.SIGINT)
    assert run.ends() == 130, run.text
    wait_until_gone(family)
    assert "asked the learner to checkpoint and close" in run.text
    assert re.search(r"^go on with: echo2 run \S+ --run-dir \S+ --resume$", run.text, re.MULTILINE)
    kept = run.events("checkpoint_saved")[-1]["step"]
    assert kept == run.steps()
    again = start("--set", "learner.steps=12", "--set", "workers.local=1", "--resume")
    assert again.ends() == 0, again.text
    assert again.steps() == 12
    assert again.events("learner_joined")[-1]["resume_step"] == kept
    verified(again.folder)


def test_nothing_outlives_a_run_that_is_killed(start: Callable[..., Started]) -> None:
    run = start("--set", "learner.steps=1000", "--set", "workers.local=1")
    run.until(lambda: run.steps() >= 1, "a step was trained")
    family = family_of(run.process.pid)
    assert len(family) >= 6
    run.process.kill()
    run.process.wait()
    wait_until_gone(family)


def test_a_worker_that_cannot_work_fails_the_run_with_its_cause(
    start: Callable[..., Started],
) -> None:
    run = start("--set", "environment.name=no_such_environment")
    assert run.ends() == 1, run.text
    assert "failed: " in run.text
    assert "no_such_environment" in run.text
