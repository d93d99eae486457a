"""The programs in examples/ run as a user would run them, and end well."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from echo2.types import Sampling, Span, Task, Version
from echo2.verify import verify_run
from echo2_workers.environment import Completion, check_rollout, load_environment
from echo2_workers.tokenizer import EOS, decode, encode

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 300


@pytest.mark.parametrize(
    ("said", "reward"), [("42", 1.0), ("43", 0.98), ("142", 0.0), ("4+", 0.0), ("", 0.0)]
)
def test_the_environment_of_the_example_rewards_what_is_near(
    monkeypatch: pytest.MonkeyPatch, said: str, reward: float
) -> None:
    async def generate(token_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        assert decode(token_ids) == "30+12="
        ids = (*encode(said), EOS)
        spans = (Span(Version(1, 0), 0, len(ids)),)
        return Completion(ids, np.zeros(len(ids), np.float32), spans, "stop")

    monkeypatch.syspath_prepend(EXAMPLES)
    environment = load_environment("my_environment:NearSum", {"largest": 50})
    assert environment.task("train", 3) == environment.task("train", 3)
    rollout = asyncio.run(environment.rollout(Task(0, '{"a": 30, "b": 12}'), generate))
    assert check_rollout(rollout).reward == pytest.approx(reward)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(run folder, output) of embed_coordinator.py."""
    folder = tmp_path_factory.mktemp("example")
    ran = subprocess.run(
        [
            *(sys.executable, str(EXAMPLES / "embed_coordinator.py")),
            *("--steps", "3", "--run-dir", str(folder / "run")),
        ],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return folder / "run", ran.stdout


def test_the_embedded_coordinator_trains_batches_and_ends(embedded: tuple[Path, str]) -> None:
    _, output = embedded
    batches = re.findall(r"^batch (\d+): (\d+) groups, reward (\d\.\d+)", output, re.MULTILINE)
    assert [(step, groups) for step, groups, _ in batches] == [("0", "8"), ("1", "8"), ("2", "8")]
    assert any(float(reward) > 0.0 for _, _, reward in batches)
    assert output.splitlines()[-1].startswith("done: 3 batches")


def test_its_records_keep_every_promise(embedded: tuple[Path, str]) -> None:
    report = verify_run(embedded[0])
    assert report.ok, report.to_text()
    assert report["staleness"].checked == 24


def test_its_worker_left_in_good_order(embedded: tuple[Path, str]) -> None:
    lines = (embedded[0] / "events.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["worker"] for e in events if e["event"] == "worker_joined"] == ["w-1"]
    assert [e["worker"] for e in events if e["event"] == "worker_gone"] == ["w-1"]
    assert not [e for e in events if e["event"] == "lease_failed"]
