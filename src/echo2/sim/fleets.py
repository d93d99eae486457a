"""The scenarios that have a name, each a function of a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from echo2.sim.scenario import LearnerModel, Scenario, a_run, calm_fleet, faulty_fleet


def big_fleet(seed: int) -> Scenario:
    """200 workers of different speed, more than 50,000 groups, nothing breaks."""
    settings = a_run(
        seed,
        staleness_max=3,
        period=2,
        groups_per_step=256,
        group_size=4,
        heartbeat_interval_s=4.0,
        suspect_s=10.0,
    )
    return calm_fleet(
        seed,
        num_workers=200,
        steps=210,
        settings=settings,
        learner=LearnerModel(train_s=1.2, checkpoint_every=20),
    )


SCENARIOS: Final[dict[str, Callable[[int], Scenario]]] = {
    "faulty": faulty_fleet,
    "fleet": big_fleet,
}
