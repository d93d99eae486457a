"""`echo2 simulate CONFIG`: a whole run on a virtual clock, from the run's own configuration.

    coordinator   core.coordinator.CoordinatorState     the production core, as it is
    workers       core.worker.WorkerState               the production core, as it is
    learner       core.learner_client                   the production core, as it is
    between them  this package: a clock, engines, links, machines that come and go, a learner's
                  time; it decides nothing that a core decides

Promise: the same configuration and seed give the same run, event by event and byte by byte.
What is left out is named in docs/simulate.md.
"""

from __future__ import annotations

from echo2.sim.virtual.figures import Figures
from echo2.sim.virtual.plan import RunPlan
from echo2.sim.virtual.run import VirtualRun

__all__ = ["Figures", "RunPlan", "VirtualRun"]
