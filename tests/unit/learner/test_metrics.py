"""metrics.jsonl holds whole lines only."""

from __future__ import annotations

import json
from pathlib import Path

from echo2_learner.metrics import MetricsFile


def test_a_half_line_of_a_killed_learner_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.mend()  # nothing is there yet
    file.append({"step": 1})
    with path.open("a") as raw:
        raw.write('{"step": 2, "rew')
    file.mend()
    file.append({"step": 2})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_value_that_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path).append({"loss": float("nan"), "ess": float("inf"), "entropy": 0.5})
    assert json.loads(path.read_text()) == {"loss": None, "ess": None, "entropy": 0.5}
