"""The scenarios that have a name, each a function of a seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from echo2.sim.scenario import LearnerModel, Scenario, a_run, calm_fleet, faulty_fleet


def big_fleet(seed: int) -> Scenario:
    """200 workers of different speed, more than 50,000 groups, nothing breaks."""
    settings = a_run(seed, staleness_max=3, groups_per_step=128, group_size=4)
    return calm_fleet(
        seed,
        num_workers=200,
        steps=400,
        settings=settings,
        learner=LearnerModel(train_s=1.2, checkpoint_every=20),
    )


SCENARIOS: Final[dict[str, Callable[[int], Scenario]]] = {
    "faulty": faulty_fleet,
    "fleet": big_fleet,
}
