"""A run with vLLM: it trains, every promise holds, and a killed engine costs only its leases."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ECHO2 = (sys.executable, "-m", "echo2.cli")
DEADLINE_S = 400.0
POLL_S = 0.2
SETTINGS = (
    "learner.steps=8", "learner.groups_per_step=8", "checkpoint.every_steps=4",
    "eval.every_steps=0", "workers.local=1", "worker.python=", "worker.slots=8",
    "learner.logprob_check_every_steps=1",
)  # fmt: skip


def events(run_dir: Path, name: str) -> list[dict[str, Any]]:
    path = run_dir / "events.jsonl"
    if not path.exists():
        return []
    whole = path.read_bytes().rpartition(b"\n")[0].splitlines()
    return [line for line in map(json.loads, whole) if line["event"] == name]


def wait_for(found: Callable[[], Any], what: str, run: subprocess.Popen[Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        result = found()
        if result:
            return result
        assert run.poll() is None, f"the run ended before {what}"
        time.sleep(POLL_S)
    raise AssertionError(f"no {what} within {DEADLINE_S:g} s")


def engine_process(run: int) -> int | None:
    """The engine process that descends from `run`."""
    parents: dict[int, int] = {}
    engines = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int(
                (folder / "stat").read_text().rpartition(")")[2].split()[1]
            )
            if b"echo2_workers.engine_host" in (folder / "cmdline").read_bytes():
                engines.append(int(folder.name))
        except OSError:
            continue  # it ended meanwhile
    for engine in engines:
        pid = engine
        while pid in parents:
            pid = parents[pid]
            if pid == run:
                return engine
    return None


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_run_outlives_its_engine(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [*ECHO2, "run", str(ROOT / "configs" / "quickstart_vllm.toml")]
    with (tmp_path / "out").open("w") as out:
        run = subprocess.Popen(
            [*command, "--run-dir", str(run_dir), *settings],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        wait_for(lambda: events(run_dir, "step_completed"), "step", run)
        engine = wait_for(lambda: engine_process(run.pid), "engine", run)
        os.kill(engine, signal.SIGKILL)
        assert run.wait(DEADLINE_S) == 0, (tmp_path / "out").read_text()
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    told = (run_dir / "logs" / "w-1.log").read_text(encoding="utf-8")
    assert "killed by SIGKILL: out of memory?" in told
    failed = events(run_dir, "lease_failed")
    assert all(each["stage"] == "engine" for each in failed)
    assert all("SIGKILL" in each["reason"] for each in failed)
    assert len(events(run_dir, "step_completed")) == 8
    metrics = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    checked = [json.loads(line)["logprob_diff_mean"] for line in metrics]
    assert [diff for diff in checked if diff is not None]
    assert all(diff is None or diff < 1e-3 for diff in checked)
    verified = subprocess.run(
        [*ECHO2, "verify", str(run_dir)], capture_output=True, text=True, check=False, timeout=120
    )
    assert verified.returncode == 0, verified.stdout
