"""Storms: every kind of fault strikes, nothing breaks, and what breaks is made small."""

from __future__ import annotations

from collections import Counter

import pytest
from typer.testing import CliRunner

from echo2.cli import app
from echo2.core import staleness
from echo2.errors import ConfigError
from echo2.sim.chaos import KINDS, Broken, Chaos, played, shrunk
from echo2.sim.simulation import Simulation

SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def storms() -> list[Simulation | Broken]:
    return [played(Chaos(seed)) for seed in SEEDS]


def test_a_storm_of_twenty_workers_breaks_no_promise(storms: list[Simulation | Broken]) -> None:
    for storm in storms:
        assert isinstance(storm, Simulation), f"{storm.trace}\n{storm.text}\n{storm.chaos.command}"
        assert storm.outcome.num_events >= 20_000
        assert storm.invariants.num_checked >= 20_000 * 0.9


def test_every_kind_of_fault_strikes(storms: list[Simulation | Broken]) -> None:
    struck: Counter[str] = Counter()
    for storm in storms:
        assert isinstance(storm, Simulation)
        struck += storm.outcome.faults
        struck["install_failure"] += storm.outcome.events["install_failed"]
        struck["records_reordered"] += storm.scenario.faults.records_reordered
    kinds = {kind for kind in KINDS if kind not in ("loss", "duplication", "reordering")}
    kinds |= {"messages_lost", "messages_doubled", "messages_reordered"}
    assert {kind for kind in kinds if not struck[kind]} == set()


def test_a_kind_that_is_left_out_does_not_strike() -> None:
    chaos = Chaos(1, hours=0.02, num_workers=3, without=frozenset({"worker_death", "loss"}))
    storm = played(chaos)
    assert isinstance(storm, Simulation)
    assert storm.outcome.faults["worker_death"] == 0
    assert storm.outcome.faults["wrong_message"] > 0
    assert storm.scenario.network.loss == 0.0


def test_what_breaks_is_shrunk_to_a_smaller_storm_that_breaks_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The window is one step wider than S, which the books of the simulation do not believe."""
    right = staleness.expiry_step
    for module in ("staleness", "buffer", "history", "dispatch", "worker_desk"):
        monkeypatch.setattr(
            f"echo2.core.{module}.expiry_step",
            lambda sampled, *, staleness_max: right(sampled, staleness_max=staleness_max) + 1,
        )
    broken = next(found for seed in range(20) if isinstance(found := played(Chaos(seed)), Broken))
    smaller = shrunk(broken, plays=12)
    assert smaller.num_events < broken.num_events
    assert smaller.chaos.num_workers < 20 or smaller.chaos.without
    again = played(smaller.chaos)
    assert isinstance(again, Broken)
    assert (again.text, again.num_events) == (smaller.text, smaller.num_events)
    monkeypatch.setattr("echo2.commands.simulate.shrunk", lambda broken: broken)
    told = CliRunner().invoke(app, smaller.chaos.command.split()[1:])
    assert told.exit_code == 1
    assert "again:  echo2 simulate --chaos --seed" in told.output


def test_the_command_names_the_whole_storm() -> None:
    assert Chaos(7).command == "echo2 simulate --chaos --seed 7"
    small = Chaos(7, hours=0.5, num_workers=3, without=frozenset({"replay", "loss"}))
    assert small.command == (
        "echo2 simulate --chaos --seed 7 --hours 0.5 --workers 3 --without loss --without replay"
    )


def test_the_command_plays_seeds_and_counts_faults() -> None:
    told = CliRunner().invoke(
        app, ["simulate", "--chaos", "--count", "2", "--hours", "0.01", "--workers", "2"]
    )
    assert told.exit_code == 0, told.output
    assert "no promise was broken: 2 seeds" in told.output
    assert "wrong_message" in told.output


def test_an_unknown_kind_and_an_empty_storm_are_refused() -> None:
    with pytest.raises(ConfigError, match="thunder is no kind of fault; known are clock_jump, "):
        Chaos(1, without=frozenset({"thunder"}))
    with pytest.raises(ConfigError, match="0 hours with 20 workers cannot be simulated"):
        Chaos(1, hours=0.0)


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_within_minutes_seeds_are_played_that_nobody_named(jobs: str) -> None:
    asked = ["simulate", "--chaos", "--minutes", "0", "--jobs", jobs]
    told = CliRunner().invoke(app, [*asked, "--hours", "0.005", "--workers", "2"])
    assert told.exit_code == 0, told.output
    played_seed = int(told.output.split(":")[0].removeprefix("seed "))
    assert played_seed >= 10**6
