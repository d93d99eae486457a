"""`echo2 run` with a learner of two ranks, for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

CONFIG = """
[run]
name = "ranks"
no_worker_timeout_s = 120.0
learner_timeout_s = 120.0
[sampling]
max_tokens = 4
[dispatch]
group_size = 4
[learner]
steps = 4
groups_per_step = 4
ranks = 2
threads = 1
[checkpoint]
every_steps = 2
[eval]
every_steps = 4
num_tasks = 8
[worker]
slots = 4
[workers]
local = 1
"""
ECHO2 = (sys.executable, "-m", "echo2")


def test_a_learner_of_two_ranks_runs_to_its_end_and_its_records_hold(tmp_path: Path) -> None:
    config, folder = tmp_path / "ranks.toml", tmp_path / "ranks"
    config.write_text(CONFIG, encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def echo2(*arguments: str | Path) -> str:
        ran = subprocess.run(
            [*ECHO2, *arguments],
            capture_output=True,
            text=True,
            timeout=400,
            env=environment,
            check=False,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout

    said = echo2("run", config, "--run-dir", folder)
    assert "finished: 4 of 4 steps" in said
    assert "promises hold, 0 broken" in echo2("verify", folder)
    assert "rank_ended" in (folder / "logs" / "learner-rank-1.log").read_text()
    names = [path.name for path in (folder / "checkpoints" / "step-00000004-i1").iterdir()]
    assert sorted(names) == [
        *(f"optimizer-0000{rank}-of-00002.safetensors" for rank in (1, 2)),
        *(f"policy-0000{rank}-of-00002.safetensors" for rank in (1, 2)),
        *("rng.safetensors", "state.json"),
    ]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    checked = [x for line in lines if (x := line["logprob_diff_mean"]) is not None]
    assert all(x < 1e-4 for x in checked)
    assert (folder / "final" / "model.safetensors").exists()
