"""`echo2 simulate CONFIG` from the command line to the records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echo2.cli import app

CONFIG = Path(__file__).parents[2] / "configs" / "simulate_100.toml"
SMALL = ("--set", "learner.groups_per_step=16", "--set", "simulation.version_mb=10")


def simulate(*options: str) -> Any:
    return CliRunner().invoke(app, ["simulate", str(CONFIG), *SMALL, *options])


def test_it_tells_what_a_run_would_come_to(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    told = simulate("--steps", "5", "--run-dir", str(run_dir))
    assert told.exit_code == 0, told.output
    lines = {line.split()[0]: line for line in told.output.splitlines()}
    assert "end        all steps are done" in told.output
    assert lines["steps"].startswith("steps      5, ")
    assert "80 trained" in lines["groups"]
    assert "of the workers had it (5 versions)" in lines["T_bcast"]
    assert told.output.count("worker-h ") == 2
    verified = CliRunner().invoke(app, ["verify", str(run_dir)])
    assert verified.exit_code == 0, verified.output
    assert "0 broken" in verified.output
    assert json.loads((run_dir / "simulation.json").read_text())["steps"] == 5


def test_json_is_the_same_for_the_same_seed_and_nothing_is_left_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, again, other = (
        simulate("--hours", "0.1", "--json", "--seed", seed) for seed in ("1", "1", "2")
    )
    assert first.exit_code == 0, first.output
    assert first.output == again.output != other.output
    found = json.loads(first.output)
    assert found["seed"] == 1
    assert found["virtual_hours"] == pytest.approx(0.1, abs=0.03)
    assert found["cost_per_step_usd"] * found["steps"] == pytest.approx(found["cost_usd"])
    assert sum(found["staleness"].values()) == found["groups"]["trained"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--hours", "1", "--steps", "3"), "give either --hours or --steps"),
        (("--chaos",), "give either a CONFIG or --chaos"),
        (("--workers", "3"), "this goes with --chaos, not a CONFIG"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    told = simulate(*options)
    assert told.exit_code == 2
    assert said in told.output


def test_a_storm_takes_no_options_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    told = CliRunner().invoke(app, ["simulate", "--chaos", "--json"])
    assert told.exit_code == 2
    assert "this goes with a CONFIG, not --chaos" in told.output


def test_check_tells_what_a_simulation_would_play() -> None:
    told = CliRunner().invoke(app, ["check", str(CONFIG)])
    assert told.exit_code == 0, told.output
    assert "plays 100 workers of 2 kinds for 4 hours at most" in told.output
    assert "$35.24 per hour while all are there" in told.output


def test_a_fleet_that_never_comes_ends_with_1_and_the_cause() -> None:
    settings = ("simulation.workers.spot.start_s=99999", "simulation.workers.rented.start_s=99999")
    told = simulate(*(part for each in settings for part in ("--set", each)))
    assert told.exit_code == 1
    assert "no worker could sample for 3600 s" in told.output
