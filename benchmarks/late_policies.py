"""The price of each late policy on a fleet with long tails and slow links.

    python benchmarks/late_policies.py [--steps 40] [--out late_policies.json]

Real sockets and real worker daemons with the null engine: group latencies are exponential
(coefficient of variation 1), one worker is ten times slower, an install takes half a
learner step. The learner's step is a fixed wait. For S in 0, 1, 2, 4 and late = wait, drop,
mask: bubble ratio, mean staleness, share of groups that expired by decile of their length,
and what `echo2.verify` says of the records. Prints one JSON object and a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
from machine import this_machine
from null_fleet import a_worker, trained, workers_joined

import echo2
from echo2.config import config_from_mapping, config_to_toml
from echo2.core.dispatch import lease_seed
from echo2.group_lengths import group_tokens
from echo2.logs import setup_logging
from echo2.verify import verify_run

R, G = 16, 4
TRAIN_S = 0.5
TOKENS_MEAN, TOKENS_PER_S = 400, 1000.0
NUM_FAST = 6


def a_config(staleness_max: int, late: str) -> echo2.Config:
    return config_from_mapping(
        {
            "environment": {"name": "null"},
            "staleness": {"max": staleness_max, "late": late},
            "sampling": {"max_tokens": 4000},
            "dispatch": {"group_size": G, "stall_s": 120.0},
            "learner": {"groups_per_step": R, "partial_batch": "drop"},
            "worker": {
                "engine": "null",
                "slots": 4,
                "null": {
                    "tokens_per_s": TOKENS_PER_S,
                    "tokens_mean": TOKENS_MEAN,
                    "tokens_cv": 1.0,
                    "install_s": TRAIN_S / 2,
                },
            },
            "heartbeat": {"interval_s": 0.5, "suspect_s": 30.0, "gone_s": 60.0},
            "http": {"enabled": False},
            "log": {"level": "error"},
        }
    )


async def run(staleness_max: int, late: str, steps: int, run_dir: Path) -> dict[str, Any]:
    """One fleet, `steps` learner steps after two for warming up."""
    config = a_config(staleness_max, late)
    path = run_dir / "config.resolved.toml"
    weights = {"w": np.zeros(16384, np.float32)}

    def changed() -> dict[str, np.ndarray]:
        weights["w"] += 1
        return weights

    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(echo2.Coordinator(config, run_dir=run_dir))
        for i in range(NUM_FAST + 1):
            rate = TOKENS_PER_S if i < NUM_FAST else TOKENS_PER_S / 10
            settings = {"worker.null.tokens_per_s": rate}
            await a_worker(stack, path, run_dir, f"w-{i}", settings)
        await workers_joined(coordinator, NUM_FAST + 1)
        rows = await trained(coordinator, changed, steps=steps, train_s=TRAIN_S, groups_per_step=R)
    waits = [row["wait_s"] for row in rows]
    return {"S": staleness_max, "late": late, **figures(config, run_dir, waits[2:])}


def figures(config: echo2.Config, run_dir: Path, waits: list[float]) -> dict[str, Any]:
    """From the records: staleness and expiry are those that events.jsonl states."""
    lines = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    ended = [line for line in lines if line["event"] == "group_ended"]
    trained = [e for e in ended if e["end"] == "trained"]
    judged = [e for e in ended if e["end"] in ("trained", "expired")]
    lengths = [true_tokens(config, e) for e in judged]
    order = np.argsort(lengths, kind="stable")
    deciles = []
    for part in np.array_split(order, 10):
        deciles.append(float(np.mean([judged[i]["end"] == "expired" for i in part])))
    staleness = [e["trained_at"] - e["min_version"] for e in trained]
    report = verify_run(run_dir)
    return {
        "bubble_ratio": sum(waits) / (sum(waits) + TRAIN_S * len(waits)),
        "staleness_mean": float(np.mean(staleness)),
        "staleness_max": max(staleness),
        "trained": len(trained),
        "expired": len(judged) - len(trained),
        "tokens_mean_trained": float(np.mean([true_tokens(config, e) for e in trained])),
        "expired_share_by_length_decile": deciles,
        "verify_ok": report.ok,
    }


def true_tokens(config: echo2.Config, ended: dict[str, Any]) -> int:
    """The length that the group had or would have had, from its seed."""
    seed = lease_seed(config.run.seed, int(ended["group_id"][1:]), ended["attempts"])
    null = config.worker.null
    return group_tokens(seed, mean=null.tokens_mean, cv=null.tokens_cv)


def table(rows: list[dict[str, Any]]) -> str:
    text = [
        "| S | late | bubble ratio | staleness mean (max) | expired | mean tokens trained "
        "| expired share by length decile, shortest to longest |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        share = " ".join(f"{100 * d:.0f}" for d in row["expired_share_by_length_decile"])
        total = row["trained"] + row["expired"]
        text.append(
            f"| {row['S']} | {row['late']} | {row['bubble_ratio']:.2f} "
            f"| {row['staleness_mean']:.2f} ({row['staleness_max']}) "
            f"| {100 * row['expired'] / total:.1f} % | {row['tokens_mean_trained']:.0f} "
            f"| {share} % |"
        )
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="S:late, for one run")
    options = parser.parse_args()
    setup_logging("error", "console")
    cases = [(s, late) for s in (0, 1, 2, 4) for late in ("wait", "drop", "mask")]
    if options.only:
        staleness_max, late = options.only.split(":")
        cases = [(int(staleness_max), late)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for staleness_max, late in cases:
            run_dir = Path(folder) / f"{staleness_max}-{late}"
            run_dir.mkdir()
            resolved = config_to_toml(a_config(staleness_max, late))
            (run_dir / "config.resolved.toml").write_text(resolved)
            rows.append(asyncio.run(run(staleness_max, late, options.steps, run_dir)))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    result = {
        "benchmark": "late_policies",
        "machine": this_machine(),
        "parameters": {
            "groups_per_step": R,
            "group_size": G,
            "train_s": TRAIN_S,
            "install_s": TRAIN_S / 2,
            "latency_mean_s": TOKENS_MEAN / TOKENS_PER_S,
            "latency_cv": 1.0,
            "workers": NUM_FAST + 1,
            "slots": 4,
            "slow_worker_factor": 10,
            "steps": options.steps,
        },
        "rows": rows,
    }
    text = json.dumps(result, indent=1)
    if options.out:
        options.out.write_text(text + "\n")
    print(text)
    print(table(rows))


if __name__ == "__main__":
    main()
