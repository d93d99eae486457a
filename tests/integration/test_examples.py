"""The programs in examples/ run as a user would run them, and end well."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from echo2.verify import verify_run

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_S = 300


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
