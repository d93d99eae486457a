"""The capacity model beside the coordinator's core: the same fleets, played by both.

benchmarks/capacity_truth.py compares more of them, for longer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echo2.core.capacity import Workload, predict
from echo2.core.capacity_pool import Pool, WorkerKind

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from capacity_fleet import Cell, truth

STEPS, WARMUP_STEPS = 110, 10


def a_cell(staleness_max: int, period: int, late: str, cv: float, **changes: float) -> Cell:
    return Cell(
        groups_per_step=16,
        train_s=100.0,
        staleness_max=staleness_max,
        period=period,
        late=late,  # type: ignore[arg-type]
        latency_s=40.0,
        latency_cv=cv,
        **({"bcast_s": 60.0, "install_s": 5.0} | changes),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("cell", "slots"),
    [
        (a_cell(2, 1, "wait", 0.3), 7),
        (a_cell(2, 2, "wait", 0.3), 9),
        (a_cell(2, 1, "drop", 1.0), 8),
        (a_cell(1, 1, "drop", 0.3), 10),
        (a_cell(4, 3, "mask", 1.0), 7),
        (a_cell(4, 1, "wait", 0.3), 12),
        (a_cell(2, 1, "wait", 0.3, bcast_s=30.0), 8),
        (a_cell(4, 1, "wait", 0.3, bcast_s=40.0), 7),
        (a_cell(3, 2, "drop", 1.0, bcast_s=40.0), 9),
        (a_cell(3, 1, "wait", 1.0, bcast_s=20.0), 12),
        (a_cell(3, 1, "wait", 0.3, bcast_s=180.0), 8),
        (a_cell(0, 1, "wait", 0.3), 16),
    ],
    ids=str,
)
def test_the_model_foresees_what_the_core_does(cell: Cell, slots: int) -> None:
    seen = truth(cell, slots=slots, steps=STEPS, warmup_steps=WARMUP_STEPS)
    workload = Workload(
        groups_per_step=cell.groups_per_step,
        train_s=cell.train_s,
        staleness_max=cell.staleness_max,
        period=cell.period,
        late=cell.late,
        latency_cv=cell.latency_cv,
        fetch_s=cell.bcast_s,
    )
    kind = WorkerKind(
        name="w", rate_groups_per_s=1 / cell.latency_s, slots=1, install_s=cell.install_s
    )
    found = predict(workload, Pool(((kind, slots),)))
    assert found.bubble == pytest.approx(seen.bubble, abs=0.025)
    assert found.expired_share == pytest.approx(seen.expired_share, abs=0.02)
    assert found.staleness_mean == pytest.approx(seen.staleness_mean, abs=0.1)
