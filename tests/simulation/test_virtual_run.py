"""Whole runs on a virtual clock (`echo2 simulate CONFIG`): determinism, promises, what follows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from echo2.commands.simulate_run import plan_of
from echo2.config import Config, config_from_mapping
from echo2.core.effects import Effect, Emit
from echo2.core.events import Event
from echo2.core.run_state import RunState
from echo2.sim.invariants import Invariants
from echo2.sim.virtual import Figures, VirtualRun
from echo2.sim.virtual.records import Records
from echo2.verify import verify_run


def a_fleet(*kinds: Mapping[str, Any], **tables: Mapping[str, Any]) -> Config:
    """A small run; `tables` by name, of which [simulation] gets `kinds`."""
    found: dict[str, Any] = {
        "environment": {"name": "null"},
        "staleness": {"max": 2},
        "sampling": {"max_tokens": 4000},
        "dispatch": {"group_size": 4},
        "learner": {"groups_per_step": 8, "steps": 12},
        "checkpoint": {"every_steps": 4},
        "worker": {"engine": "null", "null": {"tokens_mean": 400.0, "tokens_cv": 0.7}},
        "cost": {"learner_usd_per_h": 3.0},
    }
    for name, table in tables.items():
        found[name] = found.get(name, {}) | dict(table)
    found["simulation"] = {
        "learner_step_s": 4.0,
        "learner_step_cv": 0.2,
        "publish_s": 0.1,
        "workers": [dict(kind) for kind in kinds] or [A_KIND],
    } | found.get("simulation", {})
    return config_from_mapping(found)


A_KIND: dict[str, Any] = {
    "name": "w", "count": 5, "tokens_per_s": 100.0, "slots": 2, "price_usd_per_h": 0.5,
    "install_s": 0.3,
}  # fmt: skip
LINKS = {"version_mb": 200.0, "delta_share": 0.1}


class Promises:
    """Checks every event of a run; counts what was told."""

    def __init__(self, run: VirtualRun) -> None:
        self.invariants = Invariants(run.plan.settings)
        self.ends: dict[str, str] = {}
        self.leased: set[str] = set()

    def watch(self, event: Event | None, effects: list[Effect], state: RunState) -> None:
        self.invariants.observe([(event, effects)], state)
        for effect in effects:
            if isinstance(effect, Emit) and effect.event == "lease_granted":
                self.leased.add(effect.fields["group_id"])
            if isinstance(effect, Emit) and effect.event == "group_ended":
                group = effect.fields["group_id"]
                assert group not in self.ends, f"{group} ended twice"
                self.ends[group] = effect.fields["end"]


def play(config: Config, *, seed: int = 1, hours: float = 2.0) -> tuple[Figures, Promises]:
    """To its end, with every promise checked after every event."""
    told: list[Promises] = []
    run = VirtualRun(
        plan_of(config, hours=hours, steps=None, seed=seed),
        watch=lambda event, effects, state: told[0].watch(event, effects, state),
    )
    told.append(Promises(run))
    figures = run.run()
    assert told[0].invariants.num_checked == figures.num_events
    return figures, told[0]


def recorded(config: Config, folder: Path, *, seed: int) -> Path:
    run = VirtualRun(plan_of(config, hours=2.0, steps=None, seed=seed))
    folder.mkdir()
    with Records(folder, config, clock=lambda: run.timeline.now) as records:
        run.run(records)
    return folder


def test_the_same_seed_is_the_same_run_byte_by_byte(tmp_path: Path) -> None:
    config = a_fleet(A_KIND | {"reclaims_per_h": 30.0, "back_after_s": 20.0}, simulation=LINKS)
    first, again, other = (
        recorded(config, tmp_path / str(place), seed=seed) for place, seed in enumerate((1, 1, 2))
    )
    for name in ("events.jsonl", "metrics.jsonl", "simulation.json", "config.resolved.toml"):
        assert (first / name).read_bytes() == (again / name).read_bytes(), name
    assert (first / "events.jsonl").read_bytes() != (other / "events.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("late", "on_update"),
    [
        *(("wait", on_update) for on_update in ("continue", "finish", "abort")),
        *(("drop", on_update) for on_update in ("continue", "finish", "abort")),
        ("mask", "continue"),
    ],
)
def test_every_group_ends_once_and_no_promise_breaks(late: str, on_update: str) -> None:
    config = a_fleet(staleness={"late": late, "max": 1}, worker={"on_update": on_update})
    figures, told = play(config)
    assert figures.finished
    assert figures.steps == 12
    assert told.leased == set(told.ends)
    assert figures.ends.total() == len(told.ends)
    assert figures.ends["trained"] == 12 * 8 == figures.staleness.total()
    assert max(figures.staleness) <= 1
    assert late != "wait" or not figures.ends["expired"]


def test_dropping_late_groups_expires_some_and_waits_less_than_waiting_for_them() -> None:
    slow = {**A_KIND, "name": "slow", "tokens_per_s": 20.0, "count": 2}
    dropped, _ = play(a_fleet(A_KIND, slow, staleness={"late": "drop", "max": 1}))
    waited, _ = play(a_fleet(A_KIND, slow, staleness={"late": "wait", "max": 1}))
    assert dropped.expired_share > 0
    assert waited.expired_share == 0
    assert dropped.wait_s < waited.wait_s


def test_a_fleet_twice_as_fast_never_has_the_larger_bubble() -> None:
    """Of 200 steps each, in a setting where the slower one has much of it."""
    many = {"steps": 200}
    for seed in range(3):
        slow, _ = play(a_fleet(A_KIND | {"tokens_per_s": 50.0}, learner=many), seed=seed)
        fast, _ = play(a_fleet(A_KIND | {"tokens_per_s": 100.0}, learner=many), seed=seed)
        assert slow.steps == fast.steps == 200
        assert slow.bubble_ratio > 0.2
        assert fast.bubble_ratio < slow.bubble_ratio


def test_reclaims_and_failures_are_survived_and_paid_as_they_are() -> None:
    shaky = A_KIND | {
        "reclaims_per_h": 40.0, "failures_per_h": 20.0, "back_after_s": 30.0, "notice_s": 15.0,
    }  # fmt: skip
    figures, told = play(a_fleet(shaky, learner={"steps": 150}, dispatch={"attempts_max": 50}))
    assert figures.finished
    assert figures.steps == 150
    assert figures.leases_lost > 5
    assert told.leased == set(told.ends)
    hours = figures.virtual_s / 3600.0
    assert 0.3 * 5 * hours < figures.worker_s["w"] / 3600.0 < 0.98 * 5 * hours
    # The core counts at its ticks, the figures at events: within a tick of each coming and going.
    assert figures.cost_usd == pytest.approx(3.0 * hours + figures.worker_usd["w"], rel=0.02)


def test_versions_take_the_time_of_their_links_and_deltas_less() -> None:
    whole, _ = play(a_fleet(simulation={"version_mb": 200.0}))
    deltas, _ = play(a_fleet(simulation=LINKS))
    none, _ = play(a_fleet())
    assert len(whole.t_bcast_s) > 3

    def usual(figures: Figures) -> float:
        """Without the first version, which everybody gets whole."""
        return sorted(figures.t_bcast_s.values())[0]

    # 1600 Mbit to 5 workers over uplinks of 50 each, and the origin's 50: 5 * 1600 / 300 = 26.7 s.
    assert 26.7 < usual(whole) < 40.0
    assert 2.67 < usual(deltas) < 6.0
    assert usual(none) < 1.0


def test_a_worker_that_comes_late_gets_the_version_and_works() -> None:
    late = A_KIND | {"name": "late", "start_s": 60.0, "count": 2}
    figures, _ = play(a_fleet(A_KIND, late, simulation=LINKS, learner={"steps": 60}))
    assert figures.finished
    since_s = figures.virtual_s - 60.0
    assert figures.worker_s["late"] == pytest.approx(2 * since_s, rel=0.02)


def test_evals_are_asked_for_and_the_last_is_waited_for() -> None:
    config = a_fleet(eval={"every_steps": 4, "num_tasks": 6})
    told: list[dict[str, Any]] = []
    run = VirtualRun(
        plan_of(config, hours=2.0, steps=None, seed=1),
        watch=lambda event, effects, state: told.extend(
            effect.fields
            for effect in effects
            if isinstance(effect, Emit) and effect.event == "eval_ended"
        ),
    )
    assert run.run().finished
    assert [each["step"] for each in told][::3] == [0, 12]
    assert (told[0]["num_done"], told[-1]["num_done"]) == (6, 6)


def test_the_hours_end_a_run_with_its_step_and_the_budget_does_too() -> None:
    figures, _ = play(a_fleet(learner={"steps": 10_000}), hours=0.1)
    assert figures.finished
    assert figures.reason == "the time of the simulation is over"
    assert 360.0 <= figures.virtual_s < 380.0
    config = a_fleet(learner={"steps": 10_000}, budget={"max_usd": 0.2})
    figures, _ = play(config)
    assert figures.finished
    assert 0.2 <= figures.cost_usd < 0.21


def test_a_fleet_that_never_comes_ends_the_run_with_the_cause() -> None:
    figures, _ = play(a_fleet(A_KIND | {"start_s": 5000.0}, run={"no_worker_timeout_s": 100.0}))
    assert not figures.ok
    assert "no worker could sample for 100 s" in figures.reason
    assert figures.bubble_ratio == 1.0


def test_the_records_are_those_of_a_real_run(tmp_path: Path) -> None:
    shaky = A_KIND | {"reclaims_per_h": 30.0, "back_after_s": 20.0}
    config = a_fleet(shaky, simulation=LINKS, eval={"every_steps": 4, "num_tasks": 6})
    folder = recorded(config, tmp_path / "run", seed=3)
    report = verify_run(folder)
    assert report.ok, report.to_text()
    assert report["metrics_lines"].checked == 12
    assert report["staleness"].checked == 96
    for name in ("ledger", "checkpoints", "logprobs"):
        assert report[name].skipped
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert all(line["simulated"] and "loss" not in line for line in lines)
    assert [line["step"] for line in lines] == list(range(1, 13))


def test_a_line_of_metrics_without_a_loss_is_broken_unless_it_says_simulated(
    tmp_path: Path,
) -> None:
    folder = recorded(a_fleet(), tmp_path / "run", seed=1)
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().replace('"simulated": true', '"simulated": false'))
    report = verify_run(folder)
    assert not report["records_whole"].holds
