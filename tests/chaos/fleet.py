"""The processes of one run, started by their commands, for tests that hurt them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from echo2.verify import verify_run

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
engine_silence_s = {engine_silence_s}
"""


class Fleet:
    """The processes of one run, by name."""

    def __init__(self, folder: Path, *, steps: int, engine_silence_s: float = 60.0) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.config = folder / "chaos.toml"
        self.config.write_text(CONFIG.format(steps=steps, engine_silence_s=engine_silence_s))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def popen(self, name: str, argv: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Where the process of this name belongs; here it is this machine."""
        return subprocess.Popen(argv, start_new_session=True, **options)

    def start(self, command: str, *options: str, name: str = "") -> subprocess.Popen[bytes]:
        """`echo2 COMMAND CONFIG --run-dir RUN OPTIONS`, in a process group of its own."""
        name = name or command
        with (self.folder / f"{name}.log").open("ab") as log:
            process = self.popen(
                name,
                [*ECHO2, command, str(self.config), "--run-dir", str(self.run_dir), *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
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


def processes_below(pid: int, marker: str) -> list[int]:
    """Of a process and those that it started the ones with `marker` in their command line."""
    parents, commands = {}, {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked
            stat = (path / "stat").read_text(errors="replace")
            parents[int(path.name)] = int(stat.rpartition(")")[2].split()[1])
            commands[int(path.name)] = (path / "cmdline").read_text(errors="replace")
    found = []
    for each, command in sorted(commands.items()):
        above = each
        while above in parents and above != pid:
            above = parents[above]
        if above == pid and marker in command:
            found.append(each)
    return found


def finishes_well(fleet: Fleet) -> None:
    assert fleet.ends("coordinator") == 0, fleet.logs()
    report = verify_run(fleet.run_dir)
    assert report.ok, report.to_text()
    assert fleet.events("run_finished")[-1]["finished"] is True
