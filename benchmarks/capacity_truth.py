"""Is the capacity model true? Its bubble and μ_min beside those of the production core.

    python benchmarks/capacity_truth.py [--steps 150] [--staleness 2,3,4,6] [--out truth.json]

Fleets on a virtual clock around `echo2.core.coordinator.CoordinatorState` (capacity_fleet.py), no
faults: for each S, κ, late policy and tail of the group times, pools of one-slot workers from
R/T_train upwards, until the learner hardly waits or no more slots can be of use. At each pool the
bubble ratio of the core and of `echo2.core.capacity.predict`; of each cell μ_min over R/T_train,
where the bubble falls under 1 % (between two pools by interpolation), of the core and the model,
and that of the paper (Eq. 2). Prints one JSON object and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from capacity_fleet import Cell, truth
from machine import this_machine

from echo2.core.capacity import BUBBLE_MAX, Workload, predict
from echo2.core.capacity_paper import paper_mu_min
from echo2.core.capacity_pool import Pool, WorkerKind

R, TRAIN_S = 64, 100.0
LATENCY_S, INSTALL_S = 40.0, 5.0
GROWTH = 1.15
FACTOR_MAX = 3.0
"""Pools grow by GROWTH, from R/T_train to FACTOR_MAX times that at most."""
BUBBLE_POINTS, MU_SHARE = 0.02, 0.10
"""The goals: as near the model shall come."""


def cells(staleness: list[int], bcast_s: list[float], lates: list[Any]) -> Iterator[Cell]:
    for staleness_max in staleness:
        for period in sorted({1, max(2, staleness_max - 1)}):
            for late in lates:
                for cv in (0.3, 1.0):
                    for seconds in bcast_s:
                        yield Cell(
                            groups_per_step=R,
                            train_s=TRAIN_S,
                            staleness_max=staleness_max,
                            period=period,
                            late=late,
                            latency_s=LATENCY_S,
                            latency_cv=cv,
                            bcast_s=seconds,
                            install_s=INSTALL_S,
                        )


def compared(cell: Cell, *, steps: int, seeds: int) -> dict[str, Any]:
    workload = Workload(
        groups_per_step=R,
        train_s=TRAIN_S,
        staleness_max=cell.staleness_max,
        period=cell.period,
        late=cell.late,
        latency_cv=cell.latency_cv,
        fetch_s=cell.bcast_s,
    )
    kind = WorkerKind(name="w", rate_groups_per_s=1 / LATENCY_S, slots=1, install_s=INSTALL_S)
    pools: list[dict[str, Any]] = []
    num, most = math.ceil(R * LATENCY_S / TRAIN_S), R * (1 + cell.staleness_max)
    while num <= most and num <= FACTOR_MAX * R * LATENCY_S / TRAIN_S:
        runs = [truth(cell, slots=num, steps=steps, warmup_steps=12, seed=s) for s in range(seeds)]
        bubble = sum(run.bubble for run in runs) / seeds
        found = predict(workload, Pool(((kind, num),)))
        pools.append(
            {
                "workers": num,
                "rate_over_learner": num / LATENCY_S * TRAIN_S / R,
                "bubble_core": bubble,
                "bubble_model": found.bubble,
                "expired_core": sum(run.expired_share for run in runs) / seeds,
                "expired_model": found.expired_share,
                "staleness_core": sum(run.staleness_mean for run in runs) / seeds,
                "staleness_model": found.staleness_mean,
            }
        )
        if max(bubble, found.bubble) < BUBBLE_MAX:
            break
        num = max(num + 1, round(num * GROWTH))
    learner_rate = R / TRAIN_S
    paper = paper_mu_min(
        groups_per_step=R,
        train_s=TRAIN_S,
        bcast_s=cell.bcast_s + cell.install_s,
        period=cell.period,
    )
    core, model = _crossing(pools, "bubble_core"), _crossing(pools, "bubble_model")
    errors = [abs(pool["bubble_core"] - pool["bubble_model"]) for pool in pools]
    return {
        "S": cell.staleness_max,
        "period": cell.period,
        "late": cell.late,
        "cv": cell.latency_cv,
        "bcast_over_train": (cell.bcast_s + cell.install_s) / TRAIN_S,
        "mu_min_core": core,
        "mu_min_model": model,
        "mu_min_paper": paper / learner_rate,
        "mu_min_ok": core == model or abs(model / core - 1) <= MU_SHARE,
        "bubble_error_max": max(errors),
        "bubble_ok": max(errors) <= BUBBLE_POINTS,
        "pools": pools,
    }


def _crossing(pools: list[dict[str, Any]], name: str) -> float:
    """Where this bubble falls under BUBBLE_MAX, over R/T_train; inf where it does not."""
    before = None
    for pool in pools:
        bubble, rate = pool[name], pool["rate_over_learner"]
        if bubble <= BUBBLE_MAX:
            if before is None:
                return float(rate)
            share = (before[0] - BUBBLE_MAX) / (before[0] - bubble)
            return float(before[1] + share * (rate - before[1]))
        before = bubble, rate
    return math.inf


def table(rows: list[dict[str, Any]]) -> str:
    text = [
        "| S | κ | late | cv | T_bcast/T_train | bubble at R/T_train: core, model "
        "| largest difference of the bubble | μ_min·T_train/R: core | model | paper |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        first = row["pools"][0]
        missed = "" if row["bubble_ok"] else " (missed)"
        text.append(
            f"| {row['S']} | {row['period']} | {row['late']} | {row['cv']:g} "
            f"| {row['bcast_over_train']:.2f} "
            f"| {first['bubble_core']:.3f}, {first['bubble_model']:.3f} "
            f"| {row['bubble_error_max']:.3f}{missed} | {_number(row['mu_min_core'])} "
            f"| {_number(row['mu_min_model'])}{'' if row['mu_min_ok'] else ' (missed)'} "
            f"| {_number(row['mu_min_paper'])} |"
        )
    return "\n".join(text)


def _number(value: float) -> str:
    return "none" if math.isinf(value) else f"{value:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--staleness", default="2,3,4,6")
    parser.add_argument("--bcast", default="30,75", help="seconds of a transfer, of T_train 100")
    parser.add_argument("--late", default="wait,drop")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    staleness = [int(part) for part in options.staleness.split(",")]
    bcast_s = [float(part) for part in options.bcast.split(",")]
    rows, began = [], time.perf_counter()
    for cell in cells(staleness, bcast_s, options.late.split(",")):
        rows.append(compared(cell, steps=options.steps, seeds=options.seeds))
        print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    result = {
        "benchmark": "capacity_truth",
        "machine": this_machine(),
        "parameters": {
            "groups_per_step": R,
            "train_s": TRAIN_S,
            "latency_s": LATENCY_S,
            "install_s": INSTALL_S,
            "steps": options.steps,
            "seeds": options.seeds,
        },
        "seconds": time.perf_counter() - began,
        "goal": {"bubble_points": BUBBLE_POINTS, "mu_min_share": MU_SHARE},
        "cells": len(rows),
        "cells_with_bubble_ok": sum(row["bubble_ok"] for row in rows),
        "cells_with_mu_min_ok": sum(row["mu_min_ok"] for row in rows),
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    print(table(rows))


if __name__ == "__main__":
    main()
