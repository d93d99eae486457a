"""Whole fleets on a virtual clock, every promise checked after every event.

A seed that fails prints its last events and the one command that plays it again.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from echo2.core.effects import Emit, Send
from echo2.core.run_state import RunState
from echo2.messages import LeaseGranted
from echo2.sim import LearnerModel, Outcome, Scenario, Simulation, WorkerModel, a_run
from echo2.sim.__main__ import main
from echo2.sim.fleets import SCENARIOS, big_fleet
from echo2.sim.simulation import command_of


def play(name: str, seed: int, scenario: Scenario | None = None) -> Outcome:
    simulation = Simulation(scenario or SCENARIOS[name](seed))
    try:
        return simulation.run()
    except AssertionError as error:
        pytest.fail(
            f"{simulation.last_events()}\n{type(error).__name__}: {error}\n"
            f"again: {command_of(name, seed)}",
            pytrace=False,
        )


def test_two_hundred_workers_end_more_than_fifty_thousand_groups() -> None:
    simulation = Simulation(big_fleet(1))
    began = time.perf_counter()
    outcome = simulation.run()
    wall_s = time.perf_counter() - began
    ended = outcome.ends.total()
    print(
        f"{ended} groups ended in {wall_s:.1f} s: {outcome.num_events} events, "
        f"{outcome.virtual_s:.0f} virtual seconds"
    )
    assert outcome.finished
    assert ended >= 50_000
    assert outcome.events["worker_ready"] == 200
    assert simulation.invariants.num_checked == outcome.num_events
    assert outcome.ends["trained"] == 256 * outcome.step == outcome.staleness.total()
    assert outcome.ends["expired"] == outcome.ends["failed"] == 0
    assert max(outcome.staleness) <= 3
    assert not outcome.refused


@pytest.mark.parametrize("seed", range(40))
def test_a_fleet_on_which_much_breaks_keeps_its_promises(seed: int) -> None:
    outcome = play("faulty", seed)
    assert outcome.events["run_finished"] == 1


@pytest.mark.parametrize("seed", range(8))
def test_workers_that_come_back_late_break_nothing(seed: int) -> None:
    outcome = play("silent", seed)
    assert outcome.finished
    assert outcome.ends["expired"] == 0


@pytest.mark.parametrize("seed", range(12))
def test_liars_are_found_out_and_nobody_else(seed: int) -> None:
    """That nobody honest is, and that nothing of theirs is trained afterwards, is checked after
    every event. Where a share of the groups is audited, a run may end before enough of those of a
    liar were."""
    simulation = Simulation(SCENARIOS["lying"](seed))
    simulation.run()
    liars, audits = simulation.scenario.liars, simulation.core.state.audits
    found = simulation.invariants.books.quarantined.keys()
    assert found <= liars.keys()
    for peer in liars.keys() - found:
        assert liars[peer] == "rewards"
        assert len(audits.rewards[peer].refuted) < audits.settings.refuted_needed


def test_without_faults_a_liar_is_found_within_the_groups_that_the_documents_state() -> None:
    """Wrong logprobs: 3 compared groups of 64 tokens each. Inflated rewards: 2 audited groups."""
    seeds = [s for s in range(30) if not SCENARIOS["lying"](s).faults.until_s]
    assert len(seeds) >= 5
    for seed in seeds:
        simulation = Simulation(SCENARIOS["lying"](seed))
        told: list[dict[str, Any]] = []
        simulation.ledger.observe = (  # type: ignore[method-assign]
            lambda event, fields, told=told: told.append({"event": event, **fields})
        )
        simulation.run()
        by_cause = {e["cause"]: e for e in told if e["event"] == "worker_quarantined"}
        assert by_cause["rewards"]["worker"] == "w0"
        assert len(by_cause["rewards"]["evidence"]) == 2
        assert by_cause["mismatch"]["worker"] == "w1"
        odd = by_cause["mismatch"]["evidence"]
        # The third is enough, once groups of other workers were compared.
        assert len(odd) == 3 or odd[2]["centre"] is None
        assert len([each for each in odd if each["centre"] is not None]) <= 3


@pytest.mark.parametrize("seed", range(15))
def test_rewinds_lose_nothing_and_train_nothing_twice(seed: int) -> None:
    assert play("rewinding", seed).finished


@pytest.mark.parametrize("seed", range(8))
def test_lost_messages_cost_time_and_nothing_else(seed: int) -> None:
    outcome = play("lossy", seed)
    assert outcome.finished
    assert outcome.step == 12


def test_the_same_seed_is_the_same_run() -> None:
    first, again, other = play("faulty", 3), play("faulty", 3), play("faulty", 4)
    assert first == again
    assert first != other


def test_the_runs_of_many_seeds_meet_every_kind_of_end_and_fault() -> None:
    ends: Counter[str] = Counter()
    events: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    returned = 0
    for seed in range(100, 140):
        outcome = play("faulty", seed)
        ends += outcome.ends
        events += outcome.events
        refused += outcome.refused
        returned += outcome.returned
    assert set(ends) == {"trained", "expired", "failed", "filtered", "cancelled"}
    assert returned > 0
    for event in (
        "learner_fenced", "learner_returned", "lease_revoked", "lease_failed", "install_failed",
        "worker_gone", "worker_suspect", "result_refused", "eval_ended", "peer_refused",
    ):  # fmt: skip
        assert events[event], event
    for reason in ("unknown_peer", "wrong_lease", "unknown_version", "wrong_digest", "wrong_step"):
        assert refused[reason], reason


def a_fleet(late: str, *, staleness_max: int = 1, num_workers: int = 6) -> Scenario:
    """Equal workers whose groups differ much in length; the learner is quick."""
    model = WorkerModel(slots=2, latency_s=4.0, latency_cv=1.0, num_tokens=16)
    return Scenario(
        seed=5,
        settings=a_run(
            5, late=late, staleness_max=staleness_max, groups_per_step=4, lead_steps=9.0
        ),
        steps=40,
        workers=(model,) * num_workers,
        learner=LearnerModel(train_s=0.5),
    )


@pytest.mark.parametrize("late", ["wait", "drop", "mask"])
def test_what_a_late_group_costs_is_what_the_policy_says(late: str) -> None:
    """Waiting loses none and waits longest; dropping and masking lose what does not fit."""
    waiting = play("a_fleet", 5, a_fleet("wait"))
    outcome = play("a_fleet", 5, a_fleet(late))
    assert outcome.finished
    assert outcome.step == 40
    if late == "wait":
        assert outcome.ends["expired"] == 0
    else:
        assert outcome.virtual_s < waiting.virtual_s
    if late == "drop":
        assert outcome.ends["expired"] > 0


def test_with_s_0_exactly_r_groups_are_leased_for_each_step_and_then_it_waits() -> None:
    scenario = a_fleet("wait", staleness_max=0)
    simulation = Simulation(scenario)
    take, settle = simulation.core.take, simulation.core.settle
    leased: list[int] = [0]

    def watched(effects):  # type: ignore[no-untyped-def]
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, LeaseGranted):
                leased[-1] += 1
                assert effect.message.version.step == simulation.core.state.step
            if isinstance(effect, Emit) and effect.event == "step_completed":
                leased.append(0)
        return effects

    simulation.core.take = lambda event, now: watched(take(event, now))  # type: ignore[method-assign]
    simulation.core.settle = lambda: watched(settle())  # type: ignore[method-assign]
    outcome = simulation.run()
    assert outcome.finished
    assert set(outcome.staleness) == {0}
    assert leased[:-1] == [4] * 40
    assert leased[-1] <= 4


def test_memory_does_not_grow_with_the_run() -> None:
    """What the core keeps after 40 steps and after 160 is about the same."""

    def sizes(state: RunState) -> int:
        return (
            len(state.book.groups)
            + len(state.history.trained)
            + len(state.lineage.published)
            + len(state.announcements)
            + len(state.published_at)
            + len(state.pending)
            + len(state.evals.evals)
            + len(state.lineage.starts)
        )

    kept = []
    for steps in (40, 160):
        simulation = Simulation(replace(a_fleet("wait"), steps=steps))
        simulation.run()
        kept.append(sizes(simulation.core.state))
    assert kept[1] <= kept[0] + 8


def test_a_budget_ends_the_run_clean() -> None:
    scenario = a_fleet("wait")
    settings = replace(scenario.settings, budget_usd=0.03)
    outcome = play("a_fleet", 5, replace(scenario, settings=settings, steps=100_000))
    assert outcome.finished
    assert outcome.reason.startswith("the data is used up; budget.max_usd = 0.03 is spent: $0.03")
    assert 0.03 <= outcome.cost_usd < 0.04


def test_the_command_plays_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["faulty", "--seed", "2", "--count", "2"]) == 0
    shown = capsys.readouterr().out
    assert "seed 2: " in shown
    assert "seed 3: " in shown


def test_a_broken_promise_prints_the_command_that_plays_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.core.batch_desk.hold_verdict", lambda *_, **__: True)
    assert main(["silent", "--seed", "0", "--count", "20"]) == 1
    shown = capsys.readouterr().out
    assert "Violation: the batch of" in shown
    assert "again: python -m echo2.sim silent --seed" in shown.splitlines()[-1]
