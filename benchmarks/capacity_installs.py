"""What it costs that free slots wait for a version that is about to be installed.

    python benchmarks/capacity_installs.py [--steps 80]

Where T_bcast is usually at most INSTALL_SHARE_MAX of a learner step, a free slot gets no group
under the older version (core/dispatch.py). With that rule and without it, for T_bcast from a tenth
of a step on: the least pool of one-slot workers that the model finds enough, and bubble and
staleness of the production core with that pool (capacity_fleet.py). Prints one JSON object and a
Markdown table.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from typing import Any

from capacity_fleet import Cell, truth

from echo2.core import capacity_steps, dispatch
from echo2.core.capacity import BUBBLE_MAX, Workload, predict
from echo2.core.capacity_pool import Pool, WorkerKind

R, TRAIN_S, LATENCY_S, INSTALL_S, CV, S = 64, 100.0, 40.0, 5.0, 0.3, 4
RULES = (dispatch.INSTALL_SHARE_MAX, 0.0)
BCAST_S = (10.0, 25.0, 35.0, 49.0, 60.0, 80.0)


def row(bcast_s: float, share: float, *, steps: int) -> dict[str, Any]:
    for module in (dispatch, capacity_steps):
        module.__dict__["INSTALL_SHARE_MAX"] = share
    fetch_s = bcast_s - INSTALL_S
    workload = Workload(
        groups_per_step=R,
        train_s=TRAIN_S,
        staleness_max=S,
        latency_cv=CV,
        fetch_s=fetch_s,
    )
    kind = WorkerKind(name="w", rate_groups_per_s=1 / LATENCY_S, install_s=INSTALL_S)
    num = math.ceil(R * LATENCY_S / TRAIN_S)
    while predict(workload, Pool(((kind, num),))).bubble > BUBBLE_MAX:
        num += 1
    cell = Cell(
        groups_per_step=R,
        train_s=TRAIN_S,
        staleness_max=S,
        period=1,
        late="wait",
        latency_s=LATENCY_S,
        latency_cv=CV,
        bcast_s=fetch_s,
        install_s=INSTALL_S,
    )
    seen = truth(cell, slots=num, steps=steps, warmup_steps=10)
    return {
        "bcast_over_train": bcast_s / TRAIN_S,
        "install_share_max": share,
        "workers": num,
        "mu_min_over_learner": num / LATENCY_S * TRAIN_S / R,
        "bubble_core": seen.bubble,
        "staleness_core": seen.staleness_mean,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    options = parser.parse_args()
    rows = [[row(b, share, steps=options.steps) for share in RULES] for b in BCAST_S]
    result = {
        "benchmark": "capacity_installs",
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.processor() or platform.machine(),
        },
        "parameters": {
            "groups_per_step": R,
            "train_s": TRAIN_S,
            "latency_s": LATENCY_S,
            "latency_cv": CV,
            "install_s": INSTALL_S,
            "S": S,
            "period": 1,
            "steps": options.steps,
        },
        "rows": [each for pair in rows for each in pair],
    }
    print(json.dumps(result, indent=1))
    print("| T_bcast/T_train | μ_min·T_train/R, staleness, with the rule | without |")
    print("|---|---|---|")
    for ruled, free in rows:
        cells = [
            f"{each['mu_min_over_learner']:.2f}, {each['staleness_core']:.2f}"
            for each in (ruled, free)
        ]
        print(f"| {ruled['bcast_over_train']:.2f} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
