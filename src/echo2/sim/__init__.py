"""The whole system on a virtual clock, from one seed, around the production core.

`Simulation(scenario).run()` plays a fleet of simulated workers and a learner against the
very `CoordinatorState.handle` that production runs, checks every promise after every event
and says what came of it. `python -m echo2.sim` does so from the command line.
"""

from __future__ import annotations

from echo2.sim.invariants import Invariants, Violation
from echo2.sim.scenario import (
    Faults,
    LearnerModel,
    NetworkModel,
    Scenario,
    WorkerModel,
    a_run,
    calm_fleet,
    faulty_fleet,
)
from echo2.sim.simulation import Outcome, Simulation

__all__ = [
    "Faults",
    "Invariants",
    "LearnerModel",
    "NetworkModel",
    "Outcome",
    "Scenario",
    "Simulation",
    "Violation",
    "WorkerModel",
    "a_run",
    "calm_fleet",
    "faulty_fleet",
]
