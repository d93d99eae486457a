"""Whole fleets from a seed: the production core, every promise checked after every event."""

from __future__ import annotations

import time

import pytest

from echo2.sim.fleets import SCENARIOS
from echo2.sim.simulation import Outcome, Simulation, command_of

FAULTY_SEEDS = 80
BLOCK = 20


def play(scenario: str, seed: int) -> Outcome:
    simulation = Simulation(SCENARIOS[scenario](seed))
    try:
        return simulation.run()
    except Exception:
        print(simulation.last_events())
        print(f"again: {command_of(scenario, seed)}")
        raise


def test_a_fleet_of_200_workers_trains_50_000_groups_and_keeps_every_promise() -> None:
    began = time.perf_counter()
    outcome = play("fleet", 1)
    print(f"{outcome.num_events} events in {time.perf_counter() - began:.1f} s")
    assert outcome.finished
    assert sum(outcome.ends.values()) >= 50_000
    assert outcome.ends["expired"] == outcome.ends["failed"] == 0
    assert max(outcome.staleness) <= 3


@pytest.mark.parametrize("first", range(0, FAULTY_SEEDS, BLOCK))
def test_small_fleets_on_which_much_breaks_reach_their_end(first: int) -> None:
    for seed in range(first, first + BLOCK):
        assert play("faulty", seed).finished


def test_the_same_seed_plays_the_same_run() -> None:
    first, second = play("faulty", 3), play("faulty", 3)
    assert first == second
