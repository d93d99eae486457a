"""The quickstart's run while a process of it is killed every few seconds, then left alone.

`ECHO2_CHAOS_S=300 pytest tests/chaos/test_random_kills.py` kills every 15 s for five minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo2.verify import verify_run

from .fleet import processes_below

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds the processes of a run in /proc"
)
QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"
SEED = 5
CHAOS_S = float(os.environ.get("ECHO2_CHAOS_S", "50"))
KILL_EVERY_S = 15.0 if CHAOS_S >= 75 else 10.0
STEPS = int(0.8 * CHAOS_S)
"""More than are done while processes are killed."""
END_S = 600.0
PARTS = {
    "coordinator": "\0coordinator\0",
    "learner": "\0learner\0",
    "origin": "\0origin\0",
    "worker": "\0worker\0",
    "engine": "echo2_workers.engine_host",
}


class Run:
    """`echo2 run configs/quickstart.toml`, and the processes below it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "run"
        self.output = folder / "output"
        settings = (f"learner.steps={STEPS}", "checkpoint.every_steps=10", "run.restarts_max=100")
        command = [sys.executable, "-m", "echo2.cli", "run", str(QUICKSTART)]
        command += ["--run-dir", str(self.folder)]
        for setting in settings:
            command += ["--set", setting]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def processes(self, part: str) -> list[int]:
        """Of the run's processes those that are this part of it."""
        return processes_below(self.process.pid, PARTS[part])

    def kill_one(self, part: str, rng: random.Random) -> None:
        """As soon as there is one: it may be on its way up after an earlier kill."""
        deadline = time.monotonic() + END_S
        while not (found := self.processes(part)):
            assert self.process.poll() is None, f"the run ended early\n{self.text}"
            assert time.monotonic() < deadline, f"no {part} came back\n{self.text}"
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(found), signal.SIGKILL)

    @property
    def num_steps(self) -> int:
        """Learner steps so far."""
        path = self.folder / "metrics.jsonl"
        written = path.read_text().splitlines(keepends=True) if path.exists() else []
        return max((json.loads(line)["step"] for line in written if line.endswith("\n")), default=0)

    def lines(self, name: str) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    started = Run(tmp_path)
    yield started
    if started.process.poll() is None:
        started.process.kill()
        started.process.wait()


def victims(rng: random.Random, count: int) -> list[str]:
    """Every part in turn, in an order of its own each time."""
    named: list[str] = []
    while len(named) < count:
        named += rng.sample(sorted(PARTS), len(PARTS))
    return named[:count]


def test_a_run_whose_processes_are_killed_one_after_the_other_reaches_its_end(run: Run) -> None:
    rng = random.Random(SEED)
    began = time.monotonic()
    planned = victims(rng, int(CHAOS_S / KILL_EVERY_S))
    for number, part in enumerate(planned, 1):
        due, step = began + number * KILL_EVERY_S, number * STEPS // (len(planned) + 1)
        while time.monotonic() < due and run.num_steps < step:  # a quick machine is killed sooner
            time.sleep(0.1)
        run.kill_one(part, rng)
        print(f"{time.monotonic() - began:6.1f} s: killed {part}")
    assert run.process.wait(END_S) == 0, run.text
    print(run.text)
    report = verify_run(run.folder)
    assert report.ok, report.to_text()
    print(report.to_text())
    assert run.lines("metrics.jsonl")[-1]["step"] == STEPS
    restarts = run.text.count("ended with signal SIGKILL; started")
    assert restarts == sum(part != "engine" for part in planned), run.text
