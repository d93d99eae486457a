"""What it costs, and what it is good for, that free slots wait for a version on its way.

    python benchmarks/capacity_installs.py --out installs.jsonl [--staleness 2,3,4,6] [--steps 100]
    python benchmarks/capacity_installs.py --out installs.jsonl --summary

The rule of `core/install_wait.py` ("rule") beside always waiting where T_bcast is at most half a
learner step, as the dispatcher did before ("always"), and never ("never"). Cells over S, κ,
T_bcast, the tail of the group times and late, with pools from R/T_train upwards. The first two with
the production core on a virtual clock (capacity_fleet.py), all with the model. Every
cell is one line of the file, and a cell that is there is not played again. The summary is one JSON
object and a Markdown table; $ per step are those of a learner that costs twice as much as the pool
R/T_train.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

from capacity_fleet import Cell, truth
from machine import this_machine

from echo2.core import capacity_steps, dispatch
from echo2.core.capacity import BUBBLE_MAX, Workload, predict
from echo2.core.capacity_pool import Pool, WorkerKind

R, TRAIN_S, LATENCY_S, INSTALL_S = 64, 100.0, 40.0, 5.0
POOLS = (1.05, 1.25, 1.6)
"""Rates over R/T_train."""
GROWTH, FACTOR_MAX = 1.04, 2.0
"""μ_min is looked for in such steps, up to so many times R/T_train."""
POOL_SHARE = 0.5
"""Price of the pool R/T_train over the learner's."""
RULES = ("rule", "always", "never")
WARMUP_STEPS = 10
NOISE = 0.01
"""Differences of $ per step, and of the expired share, up to here count as noise."""


@contextmanager
def playing(rule: str) -> Iterator[None]:
    """The dispatcher and the model wait as `rule` says."""
    if rule == "rule":
        yield
    elif rule == "always":
        with (
            patch.object(dispatch.Dispatcher, "_has_time", lambda *_: True),
            patch.object(
                capacity_steps.StepRecursion, "_awaits_install", lambda it, *_: it.is_install_short
            ),
        ):
            yield
    else:
        with (
            patch.object(dispatch, "is_short", lambda *_, **__: False),
            patch.object(capacity_steps, "is_short", lambda *_, **__: False),
        ):
            yield


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for staleness_max in map(int, options.staleness.split(",")):
        for period in map(int, options.period.split(",")):
            for bcast in map(float, options.bcast.split(",")):
                for cv in map(float, options.cv.split(",")):
                    for late in options.late.split(","):
                        yield {
                            "S": staleness_max,
                            "period": period,
                            "bcast_over_train": bcast,
                            "cv": cv,
                            "late": late,
                        }


def workload_of(cell: dict[str, Any]) -> Workload:
    return Workload(
        groups_per_step=R,
        train_s=TRAIN_S,
        staleness_max=cell["S"],
        period=cell["period"],
        late=cell["late"],
        latency_cv=cell["cv"],
        fetch_s=cell["bcast_over_train"] * TRAIN_S - INSTALL_S,
    )


KIND = WorkerKind(name="w", rate_groups_per_s=1 / LATENCY_S, install_s=INSTALL_S)


def num_workers(rate: float) -> int:
    return math.ceil(rate * R * LATENCY_S / TRAIN_S)


def played(cell: dict[str, Any], rule: str, *, steps: int, seeds: int) -> dict[str, Any]:
    fleet = Cell(
        groups_per_step=R,
        train_s=TRAIN_S,
        staleness_max=cell["S"],
        period=cell["period"],
        late=cell["late"],
        latency_s=LATENCY_S,
        latency_cv=cell["cv"],
        bcast_s=cell["bcast_over_train"] * TRAIN_S - INSTALL_S,
        install_s=INSTALL_S,
    )
    pools = []
    with playing(rule):
        for rate in POOLS:
            num = num_workers(rate)
            runs = [
                truth(fleet, slots=num, steps=steps, warmup_steps=WARMUP_STEPS, seed=seed)
                for seed in range(0 if rule == "never" else seeds)
            ]
            found = predict(workload_of(cell), Pool(((KIND, num),)))
            pool: dict[str, Any] = {
                "rate_over_learner": num / LATENCY_S * TRAIN_S / R,
                "bubble_model": found.bubble,
                "expired_model": found.expired_share,
                "staleness_model": found.staleness_mean,
            }
            if runs:
                pool |= {
                    "bubbles_core": [run.bubble for run in runs],
                    "expired_core": fmean(run.expired_share for run in runs),
                    "staleness_core": fmean(run.staleness_mean for run in runs),
                }
            pools.append(pool)
        least = num_workers(1.0)
        while predict(workload_of(cell), Pool(((KIND, least),))).bubble > BUBBLE_MAX:
            least = max(least + 1, round(least * GROWTH))
            if least > num_workers(FACTOR_MAX):
                return {"pools": pools, "mu_min_model": None}
    return {"pools": pools, "mu_min_model": least / LATENCY_S * TRAIN_S / R}


def usd(pool: dict[str, Any], bubble: float) -> float:
    """Of a step, in those of the learner's price for T_train."""
    return float((1 + POOL_SHARE * pool["rate_over_learner"]) / (1 - bubble))


def bubble_of(pool: dict[str, Any], who: str) -> float:
    return fmean(pool["bubbles_core"]) if who == "core" else float(pool["bubble_model"])


def summary(rows: list[dict[str, Any]], than: str) -> dict[str, Any]:
    """The rule against another, pool by pool of every cell, by the core where it played both."""
    changes: list[float] = []
    expired: list[float] = []
    staleness: list[float] = []
    worse: list[dict[str, Any]] = []
    for row in rows:
        for mine, other in zip(row["rule"]["pools"], row[than]["pools"], strict=True):
            who = "core" if "expired_core" in other else "model"
            first, second = bubble_of(mine, who), bubble_of(other, who)
            change = usd(mine, first) / usd(other, second) - 1
            changes.append(change)
            expired.append(mine[f"expired_{who}"] - other[f"expired_{who}"])
            staleness.append(mine[f"staleness_{who}"] - other[f"staleness_{who}"])
            if change > NOISE or expired[-1] > NOISE:
                worse.append(
                    {
                        **{
                            key: row[key]
                            for key in ("S", "period", "bcast_over_train", "cv", "late")
                        },
                        "rate_over_learner": mine["rate_over_learner"],
                        "usd_per_step": change,
                        "bubbles": [mine.get("bubbles_core"), other.get("bubbles_core")],
                        "bubbles_model": [mine["bubble_model"], other["bubble_model"]],
                        "expired_share": [mine[f"expired_{who}"], other[f"expired_{who}"]],
                    }
                )
    return {
        "pools": len(changes),
        "usd_per_step_mean": fmean(changes),
        "usd_per_step_best": min(changes),
        "usd_per_step_worst": max(changes),
        "cheaper": sum(change < -NOISE for change in changes),
        "dearer": sum(change > NOISE for change in changes),
        "expired_worst": max(expired),
        "staleness_mean": fmean(staleness),
        "worse": worse,
    }


def model_summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The model beside the core, with the rule."""
    pools = [pool for row in rows for pool in row["rule"]["pools"]]
    bubbles = [abs(fmean(pool["bubbles_core"]) - pool["bubble_model"]) for pool in pools]
    return {
        "pools": len(pools),
        "bubble_within_2_points": sum(error <= 0.02 for error in bubbles),
        "bubble_worst": max(bubbles),
        "expired_worst": max(abs(pool["expired_core"] - pool["expired_model"]) for pool in pools),
        "staleness_worst": max(
            abs(pool["staleness_core"] - pool["staleness_model"]) for pool in pools
        ),
    }


def table(rows: list[dict[str, Any]]) -> str:
    """κ = 1, S = 4, late = wait, cv = 0.3: the case of docs/capacity.md."""
    text = [
        "| T_bcast/T_train | μ_min·T_train/R, bubble, staleness at 1.25·R/T_train, by the model: "
        "rule | always | never |",
        "|---|---|---|---|",
    ]
    for row in rows:
        if (row["S"], row["period"], row["cv"], row["late"]) == (4, 1, 0.3, "wait"):
            parts = []
            for rule in RULES:
                pool, least = row[rule]["pools"][1], row[rule]["mu_min_model"]
                parts.append(
                    f"{'none' if least is None else format(least, '.2f')}, "
                    f"{pool['bubble_model']:.3f}, {pool['staleness_model']:.2f}"
                )
            text.append(f"| {row['bcast_over_train']:.2f} | {' | '.join(parts)} |")
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("installs.jsonl"))
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--staleness", default="2,3,4,6")
    parser.add_argument("--period", default="1,2")
    parser.add_argument("--bcast", default="0.1,0.25,0.49,0.8", help="T_bcast/T_train.")
    parser.add_argument("--cv", default="0.3,1")
    parser.add_argument("--late", default="wait,drop")
    parser.add_argument("--seconds", type=float, default=1e9, help="Begin no cell after these.")
    parser.add_argument("--summary", action="store_true", help="Of what is in the file.")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.out.open()] if options.out.exists() else []
    begun = time.monotonic()
    if not options.summary:
        there = [{key: row[key] for key in row if key not in RULES} for row in rows]
        with options.out.open("a") as out:
            for cell in cells(options):
                if cell in there:
                    continue
                if time.monotonic() - begun > options.seconds:
                    return
                found = {
                    rule: played(cell, rule, steps=options.steps, seeds=options.seeds)
                    for rule in RULES
                }
                out.write(json.dumps({**cell, **found}) + "\n")
                out.flush()
                rows.append({**cell, **found})
    rows.sort(key=lambda row: (row["S"], row["period"], row["bcast_over_train"], row["cv"]))
    result = {
        "benchmark": "capacity_installs",
        "machine": this_machine(),
        "parameters": {
            "groups_per_step": R,
            "train_s": TRAIN_S,
            "latency_s": LATENCY_S,
            "install_s": INSTALL_S,
            "steps": options.steps,
            "seeds": options.seeds,
            "noise": NOISE,
        },
        "cells": len(rows),
        "against_always": summary(rows, "always"),
        "against_never": summary(rows, "never"),
        "model": model_summary(rows),
    }
    print(json.dumps(result, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
