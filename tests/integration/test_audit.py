"""A worker with wrong weights, one with fabricated logprobs, one with inflated rewards: real
processes, each found out and kept out, and the honest ones left alone.

The offenders are what an owner of a machine can make of a worker: one brings an environment of
its own under the run's name, the others change what their Python does (`sitecustomize`).
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

from echo2.commands.run_records import RecordTail
from echo2.verify import verify_run

pytest.importorskip("torch")

WAIT_S = 300
CONFIG = """
[run]
name = "audited"
seed = 3
no_worker_timeout_s = 120.0
learner_timeout_s = 120.0

[environment]
name = "audited_sums:Sums"

[sampling]
max_tokens = 5

[dispatch]
group_size = 8

[learner]
steps = 100000
groups_per_step = 12
learning_rate = 1e-5
threads = 1
logprob_check_every_steps = 1

[audit]
share = 0.5
workers = ["trusted"]

[worker]
slots = 3

[rollouts]
keep_steps = 0
"""
HONEST = """
from echo2_workers.environments.addition import Addition

class Sums(Addition):
    name, version, replays = "sums", "1", True
"""
INFLATED = """
from dataclasses import replace
from echo2_workers.environments.addition import Addition

class Sums(Addition):
    name, version, replays = "sums", "1", True

    async def rollout(self, task, generate):
        return replace(await super().rollout(task, generate), reward=1.0)
"""
WRONG_WEIGHTS = """
import sys

if "echo2_workers.engine_host" in sys.orig_argv:
    from echo2_workers import installing
    from echo2_workers.engines import sampler

    installing.mean_difference = lambda probe, scored: 0.0  # its canary says what it wants

    def load(self, tensors, version, right=sampler.Sampler.load):
        right(self, tensors, version)
        for parameter in sampler.untied_state(self.model).values():
            step = parameter.abs().max() / 7  # as if they had four bits
            parameter.copy_((parameter / step).round() * step)

    sampler.Sampler.load = load
"""
FABRICATED = """
import sys
from dataclasses import replace

if "worker" in sys.orig_argv:
    import numpy as np
    from echo2_workers import groups

    def result(granted, played, right=groups._result):
        mask = np.frombuffer(played.loss_mask, np.uint8)
        logprobs = np.where(mask, -0.5, 0.0).astype("<f4").tobytes()
        return right(granted, replace(played, logprobs=logprobs))

    groups._result = result
"""
OFFENDERS = {"weights": WRONG_WEIGHTS, "logprobs": FABRICATED, "rewards": ""}
HONEST_WORKERS = ("trusted", "plain")


class Run:
    """The processes of one run, each with a folder of its own for what it imports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.run_dir.mkdir()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._tail = RecordTail(self.run_dir / "events.jsonl")
        self._events: list[dict[str, Any]] = []

    def start(self, name: str, *command: str, environment: str = HONEST, hook: str = "") -> None:
        home = self.folder / name
        home.mkdir(exist_ok=True)
        (home / "run.toml").write_text(CONFIG, encoding="utf-8")
        (home / "audited_sums.py").write_text(environment, encoding="utf-8")
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        if hook:
            (home / "sitecustomize.py").write_text(hook, encoding="utf-8")
            paths = [str(home), *filter(None, [os.environ.get("PYTHONPATH")])]
            variables["PYTHONPATH"] = os.pathsep.join(paths)
        program, *options = command
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [
                    *(sys.executable, "-m", "echo2.cli", program, str(home / "run.toml")),
                    *("--run-dir", str(self.run_dir), *options),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=home,
                start_new_session=True,
                env=variables,
            )

    def events(self, name: str) -> list[dict[str, Any]]:
        self._events += self._tail.read()
        return [event for event in self._events if event["event"] == name]

    def until(self, is_true: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while not is_true():
            for name in ("coordinator", "learner"):
                if name in self.processes and self.processes[name].poll() is not None:
                    pytest.fail(f"{name} ended before {what}\n{self.logs()}")
            if time.monotonic() > deadline:
                pytest.fail(f"no {what} after {WAIT_S} s\n{self.logs()}")
            time.sleep(0.1)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)[-2500:]}" for name in self.processes)

    def end(self, name: str, number: signal.Signals = signal.SIGTERM) -> int:
        process = self.processes[name]
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        try:
            return process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path)
    yield made
    for name in reversed(list(made.processes)):
        made.end(name)


def echo2(run: Run, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "echo2.cli", *arguments, "--run-dir", str(run.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=run.folder)


def test_three_offenders_are_found_and_kept_out_and_the_honest_stay(run: Run) -> None:
    run.start("coordinator", "coordinator")
    run.until(lambda: (run.run_dir / "coordinator.json").exists(), "a coordinator")
    run.start("origin", "origin")
    run.start("learner", "learner", "--no-origin")
    for name in HONEST_WORKERS:
        run.start(name, "worker", "--name", name)
    for name, hook in OFFENDERS.items():
        environment = INFLATED if name == "rewards" else HONEST
        run.start(name, "worker", "--name", name, environment=environment, hook=hook)

    run.until(lambda: len(run.events("worker_quarantined")) >= 3, "third quarantine")
    found = {event["worker"]: event for event in run.events("worker_quarantined")}
    assert found.keys() == OFFENDERS.keys()

    rewards = found["rewards"]
    assert rewards["cause"] == "rewards"
    # Two, and one more if a group of it was right by chance in between.
    assert len(rewards["evidence"]) in (2, 3)
    for each in rewards["evidence"]:
        assert each["auditor"] == "trusted"
        assert set(each["claimed"]) == {1.0}
        assert 0.0 in each["recomputed"]
    for name in ("weights", "logprobs"):
        event = found[name]
        assert event["cause"] == "mismatch"
        # The third is enough once another worker has shown that the learner is right.
        assert len(event["evidence"]) >= 3
        assert all(each["diff_mean"] > each["bound"] for each in event["evidence"])
        assert event["bound"] < 0.01 < event["evidence"][-1]["diff_mean"]

    for name in OFFENDERS:
        assert run.processes[name].wait(60) == 1
        assert f"{name} is quarantined since step" in run.log(name)
        assert f"echo2 keys pardon {name}" in run.log(name)
    status = json.loads(echo2(run, "status", "--json").stdout)
    assert status["quarantined"].keys() == OFFENDERS.keys()
    assert {worker["name"] for worker in status["workers"]} == set(HONEST_WORKERS)

    pardoned = echo2(run, "keys", "pardon", "weights")
    assert pardoned.returncode == 0, pardoned.stderr
    run.until(lambda: run.events("worker_pardoned"), "a pardon")
    again = echo2(run, "keys", "pardon", "plain")
    assert again.returncode == 1
    assert "plain is not quarantined" in again.stderr

    step = max(event["step"] for event in run.events("step_completed"))
    run.until(lambda: run.events("step_completed")[-1]["step"] >= step + 2, "two more steps")
    assert {event["verdict"] for event in run.events("group_audited")} >= {"confirmed", "refuted"}
    assert len(run.events("worker_quarantined")) == 3
    for name in ("learner", "coordinator"):
        assert run.end(name) == 0, run.log(name)
    report = verify_run(run.run_dir)
    assert report.ok, report.to_text()
    facts = {promise.name: promise for promise in report.promises}
    assert facts["audited"].checked > 0
    assert facts["kept_out"].checked == 3
