"""`echo2 plan --calibrate`: real engine, learner, origin and link; nothing is left over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300.0
SMALL = (
    "learner.groups_per_step=4",
    "dispatch.group_size=2",
    "worker.slots=4",
    "plan.staleness_min=2",
    "plan.staleness_max=2",
)


@pytest.mark.parametrize("local", [0, 1])
def test_the_quickstart_is_measured_and_planned_with(tmp_path: Path, local: int) -> None:
    command = [sys.executable, "-m", "echo2", "plan", str(ROOT / "configs/quickstart.toml")]
    command += ["--calibrate", "--seconds", "1", "--json"]
    for setting in (*SMALL, f"workers.local={local}"):
        command += ["--set", setting]
    ran = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode in (0, 1), ran.stderr  # 1: this machine's fleet is not enough
    found = json.loads(ran.stdout)
    terms = {name: each["value"] for name, each in found["assumptions"].items()}
    assert {each["source"] for each in found["assumptions"].values()} == {"measured"}
    assert terms["train_s"] > terms["encode_s"] > 0
    assert 2 <= terms["tokens_per_group"] <= 2 * 5  # two trajectories of at most max_tokens
    assert terms["version_bytes"] > 1e6
    assert 0 < terms["delta_share"] <= 1
    assert terms["install_s"] > 0
    assert terms["origin_uplink_mbit"] > 0
    (offer,) = found["offers"]
    assert offer["count"] == 1
    assert offer["slots"] == 4
    assert offer["groups_per_s"] > 0
    assert found["calibration"]["num_steps"] >= 3
    assert found["run"] is None
    assert [row["staleness_max"] for row in found["rows"]] == [2]
    assert not list(tmp_path.glob("echo2-calibrate-*"))
