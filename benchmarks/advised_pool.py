"""The fleet that `echo2 plan` advises, simulated: does its learner wait as little as promised?

    python benchmarks/advised_pool.py [--hours 2] [--staleness 2,3,4,6] [--seeds 2]

late = "drop", groups with a coefficient of variation of 0.3. For each S: the plan's machines and κ
(`echo2.commands.plan.plan_of`), then `echo2 simulate` of that fleet, once steady and once with a
fifth of the workers reclaimed an hour, each back after ten minutes with an empty disk. Figures are
those of the steps after --warm-up. Prints one JSON object and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

from machine import this_machine
from simulate_truth import figures, simulated

from echo2.commands.plan import MODELS, plan_of
from echo2.config import Config, config_from_mapping
from echo2.verify import verify_run

R, TRAIN_S, CV = 64, 60.0, 0.3
TOKENS, SLOTS, TOKENS_PER_S = 6400, 2, 533.0
VERSION_MB, INSTALL_S, LINE_MBIT, ORIGIN_MBIT = 300.0, 1.0, 100.0, 300.0
USD_PER_H, LEARNER_USD_PER_H = 0.35, 12.24
GOALS = {"steady": 0.01, "reclaimed": 0.03}
RECLAIMS_PER_H = {"steady": 0.0, "reclaimed": 0.2}


def a_config(staleness_max: int, period: int, changes: dict[str, Any]) -> Config:
    return config_from_mapping(
        {
            "environment": {"name": "null"},
            "staleness": {"max": staleness_max, "period": period, "late": "drop"},
            "sampling": {"max_tokens": 16_000},
            "dispatch": {"group_size": 8},
            "learner": {"groups_per_step": R, "deltas": False, "steps": 100_000},
            "worker": {
                "engine": "null",
                "slots": SLOTS,
                "null": {"tokens_mean": TOKENS, "tokens_cv": CV},
            },
            "heartbeat": {"interval_s": 5.0, "suspect_s": 15.0, "gone_s": 30.0},
            "cost": {"learner_usd_per_h": LEARNER_USD_PER_H},
            "net": {"origin_uplink_mbit": ORIGIN_MBIT},
            "http": {"enabled": False},
            **changes,
        }
    )


def advised(staleness_max: int) -> dict[str, Any]:
    """What the plan says for this S."""
    config = a_config(
        staleness_max,
        1,
        {
            "plan": {
                "train_s": TRAIN_S,
                "tokens_per_group": TOKENS,
                "group_tokens_cv": CV,
                "version_bytes": round(VERSION_MB * 1e6),
                "install_s": INSTALL_S,
                "staleness_min": staleness_max,
                "staleness_max": staleness_max,
            },
            "offers": [
                {
                    "name": "w",
                    "price_usd_per_h": USD_PER_H,
                    "tokens_per_s": TOKENS_PER_S,
                    "slots": SLOTS,
                    "count": 64,
                    "uplink_mbit": LINE_MBIT,
                    "downlink_mbit": LINE_MBIT,
                }
            ],
        },
    )
    (row,) = plan_of(config, Path("the plan"), None, MODELS["echo2"]).rows
    return {
        "S": staleness_max,
        "period": row.period,
        "workers": row.counts["w"],
        "mu_min_over_learner": row.mu_min * TRAIN_S / R,
        "rate_over_learner": row.rate * TRAIN_S / R,
        "bcast_s": row.bcast_s,
        "bubble": row.bubble_ratio,
        "usd_per_step": row.usd_per_step,
    }


def played(plan: dict[str, Any], case: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    worker = {
        "name": "w",
        "count": plan["workers"],
        "slots": SLOTS,
        "tokens_per_s": TOKENS_PER_S / SLOTS,
        "price_usd_per_h": USD_PER_H,
        "uplink_mbit": LINE_MBIT,
        "downlink_mbit": LINE_MBIT,
        "install_s": INSTALL_S,
        "reclaims_per_h": RECLAIMS_PER_H[case],
        "back_after_s": 600.0,
    }
    simulation = {
        "hours": 1000.0,
        "learner_step_s": TRAIN_S,
        "version_mb": VERSION_MB,
        "workers": [worker],
    }
    config = a_config(plan["S"], plan["period"], {"simulation": simulation})
    steps = options.warm_up + round(options.hours * 3600 / TRAIN_S)
    found = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            rows = simulated(config, steps, Path(folder), seed)
            true = figures(rows, Path(folder), options.warm_up)
            found.append({**true, "verified": verify_run(Path(folder)).ok})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=2.0)
    parser.add_argument("--warm-up", type=int, default=8)
    parser.add_argument("--staleness", default="2,3,4,6")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    rows = []
    for staleness_max in map(int, options.staleness.split(",")):
        plan = advised(staleness_max)
        rows.append({**plan, **{case: played(plan, case, options) for case in GOALS}})
    result = {
        "benchmark": "advised_pool",
        "machine": this_machine(),
        "parameters": {"groups_per_step": R, "train_s": TRAIN_S, "cv": CV, "hours": options.hours},
        "goal": GOALS,
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    print(
        "| S | κ | workers (rate over R/T_train) | bubble: plan | steady | a fifth reclaimed "
        "| $ a step: plan | steady | reclaimed |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        bubbles = [", ".join(f"{each['bubble_ratio']:.3f}" for each in row[case]) for case in GOALS]
        usd = [f"{fmean(each['usd_per_step'] for each in row[case]):.4f}" for case in GOALS]
        print(
            f"| {row['S']} | {row['period']} | {row['workers']} ({row['rate_over_learner']:.2f}) "
            f"| {row['bubble']:.3f} | {' | '.join(bubbles)} | {row['usd_per_step']:.4f} "
            f"| {' | '.join(usd)} |"
        )


if __name__ == "__main__":
    main()
