"""A fleet of real processes on shaped lines beside what was foretold of it.

    python benchmarks/fleet_truth.py --out fleet.jsonl [--staleness 2,3,4,6] [--cv 0.3,1]
        [--late wait,drop] [--part 0/3] [--seconds 170]
    python benchmarks/fleet_truth.py --out fleet.jsonl --summary

For each S with the paper's κ = S - 1: an origin with a coordinator, its ledger and a learner whose
step takes TRAIN_S, and a few worker daemons with the null engine, each on a host of its own
with a line of its own (wan.py; needs root or a user namespace), over which versions of VERSION_MB
go by echo2's relays. The pool is set by the workers' slots: R/T_train, the model's μ_min, a tenth
above it, or the paper's μ_min with --pools. Beside each run: the model (core/capacity.py) with the
fluid bound as T_bcast, once more with the T_bcast and the time of a group that the run had,
`echo2 simulate` of the same configuration, and the paper's rule. What the learner spends between
its steps is measured and given to the simulation (`simulation.publish_s`).

Each run is one line of the file; what is there is not run again. --part i/n: every n-th run only,
so that n of these may go side by side. --kill N: that many workers are killed, one after the other,
at even distances, and started again after BACK_S. The summary is one JSON object and a table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import numpy as np
from machine import this_machine
from null_fleet import trained, worker_argv, workers_joined
from simulate_truth import figures, simulated, worker_settings
from wan import HostLink, Wan

import echo2
from echo2.config import Config, config_from_mapping, config_to_toml, load_config
from echo2.core.capacity import BUBBLE_MAX, Prediction, Workload, predict
from echo2.core.capacity_paper import paper_mu_min
from echo2.core.capacity_pool import Pool, WorkerKind
from echo2.core.capacity_spread import Weights, fluid_bcast_s
from echo2.logs import setup_logging
from echo2.verify import verify_run

R, G = 32, 4
TRAIN_S, LATENCY_S, INSTALL_S = 2.0, 0.8, 0.1
TOKENS = 600.0
VERSION_MB = 2.0
ORIGIN_MBIT = 40.0
LEARNER_USD_PER_H, POOL_USD_PER_H = 12.0, 6.0
"""Of the learner, and of a pool with the rate R/T_train."""
WARM_UP = 6
BACK_S: Final = 4.0
LIMIT_S: Final = 60.0
"""Beyond the time of a run's steps."""
ORIGIN: Final = "origin"
KEY = ("S", "period", "cv", "late", "worker_mbit", "workers", "slots", "kill")
BARE = R * LATENCY_S / TRAIN_S
"""Slots whose rate is R/T_train."""


def a_config(row: dict[str, Any], *, host: str, seed: int) -> Config:
    """Of one run: the slots are dealt evenly to the workers."""
    few, more = divmod(row["slots"], row["workers"])
    kinds = [
        {
            "name": name,
            "count": count,
            "slots": slots,
            "tokens_per_s": TOKENS / LATENCY_S,
            "price_usd_per_h": POOL_USD_PER_H * slots / BARE,
            "uplink_mbit": row["worker_mbit"],
            "downlink_mbit": row["worker_mbit"],
            "install_s": INSTALL_S,
        }
        for name, count, slots in (("a", more, few + 1), ("b", row["workers"] - more, few))
        if count
    ]
    return config_from_mapping(
        {
            "run": {"name": "fleet_truth", "seed": seed},
            "environment": {"name": "null"},
            "staleness": {"max": row["S"], "period": row["period"], "late": row["late"]},
            "sampling": {"max_tokens": 8000},
            "dispatch": {"group_size": G, "stall_s": 120.0},
            "learner": {"groups_per_step": R, "deltas": False, "steps": 100_000},
            "worker": {
                "engine": "null",
                "null": {"tokens_mean": TOKENS, "tokens_cv": row["cv"]},
            },
            "heartbeat": {"interval_s": 0.5, "suspect_s": 2.0, "gone_s": 4.0},
            "cost": {"learner_usd_per_h": LEARNER_USD_PER_H},
            "net": {"host": host, "origin_uplink_mbit": ORIGIN_MBIT},
            "http": {"enabled": False},
            "log": {"level": "error"},
            "simulation": {
                "hours": 100.0,
                "learner_step_s": TRAIN_S,
                "version_mb": VERSION_MB,
                "rtt_s": 0.002,
                "workers": kinds,
            },
        }
    )


def pool_of(row: dict[str, Any], slots: int, latency_s: float = LATENCY_S) -> Pool:
    few, more = divmod(slots, row["workers"])
    return Pool(
        tuple(
            (
                WorkerKind(
                    name=name,
                    rate_groups_per_s=num / latency_s,
                    slots=num,
                    install_s=INSTALL_S,
                    up_mbit=row["worker_mbit"],
                    down_mbit=row["worker_mbit"],
                ),
                count,
            )
            for name, count, num in (("a", more, few + 1), ("b", row["workers"] - more, few))
            if count
        )
    )


WEIGHTS = Weights(num_bytes=round(VERSION_MB * 1e6), origin_up_mbit=ORIGIN_MBIT)


def bound_s(row: dict[str, Any]) -> float:
    """T_bcast as `echo2 plan` takes it."""
    return fluid_bcast_s(WEIGHTS, pool_of(row, row["workers"]))


def foretold(
    row: dict[str, Any], slots: int, bcast_s: float | None = None, latency_s: float = LATENCY_S
) -> Prediction:
    bcast_s = bound_s(row) if bcast_s is None else bcast_s
    workload = Workload(
        groups_per_step=R,
        train_s=TRAIN_S,
        staleness_max=row["S"],
        period=row["period"],
        late=row["late"],
        latency_cv=row["cv"],
        fetch_s=max(0.0, bcast_s - INSTALL_S),
    )
    return predict(workload, pool_of(row, slots, latency_s))


def least_slots(row: dict[str, Any]) -> int | None:
    """μ_min of the model, in slots; None: three times R/T_train is not enough."""
    for slots in range(math.ceil(BARE), math.ceil(3 * BARE) + 1):
        if foretold(row, slots).bubble <= BUBBLE_MAX:
            return slots
    return None


def paper_slots(row: dict[str, Any]) -> int:
    rate = paper_mu_min(
        groups_per_step=R, train_s=TRAIN_S, bcast_s=bound_s(row), period=row["period"]
    )
    return math.ceil(rate * LATENCY_S)


def runs(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for staleness_max in map(int, options.staleness.split(",")):
        for late in options.late.split(","):
            for cv in map(float, options.cv.split(",")):
                period = max(1, staleness_max - 1)
                row = {
                    "S": staleness_max,
                    "period": period,
                    "cv": cv,
                    "late": late,
                    "worker_mbit": options.worker_mbit,
                    "workers": options.workers,
                }
                least = least_slots(row)
                ours = least or math.ceil(1.5 * BARE)
                named = {
                    "bare": math.ceil(BARE),
                    "model": ours,
                    "above": max(ours + 1, round(1.1 * ours)),
                    "paper": paper_slots(row),
                }
                for slots in sorted({named[name] for name in options.pools.split(",")}):
                    yield {
                        **row,
                        "slots": slots,
                        "kill": options.kill,
                        "mu_min_model": least and least / BARE,
                        "mu_min_paper": paper_slots(row) / BARE,
                    }


# ---------------------------------------------------------------------------- in truth


async def play(config: Config, run_dir: Path, steps: int, num_workers: int) -> None:
    """On the origin's host: coordinator and learner; their rows go to rows.json."""
    rng = np.random.default_rng(config.run.seed)
    size = round(VERSION_MB * 1e6) // 4

    def drawn() -> dict[str, np.ndarray]:
        return {"w": rng.standard_normal(size, np.float32)}

    async with echo2.Coordinator(config, run_dir=run_dir) as coordinator:
        print("up", flush=True)
        await workers_joined(coordinator, num_workers)
        rows = await trained(
            coordinator,
            drawn,
            steps=steps,
            train_s=config.simulation.learner_step_s,
            groups_per_step=config.learner.groups_per_step,
            period=config.staleness.period,
        )
        (run_dir / "rows.json").write_text(json.dumps(rows))


def truth(
    row: dict[str, Any], folder: Path, *, steps: int, seed: int
) -> tuple[Config, Path, list[dict[str, float]]]:
    """RuntimeError when the run does not end."""
    names = [f"{kind}-{i}" for kind, count in _names(row) for i in range(1, count + 1)]
    links = [HostLink(ORIGIN, ORIGIN_MBIT, 1000.0)]
    mbit = row["worker_mbit"]
    links += [HostLink(name, mbit, mbit) for name in names]
    with Wan(links) as wan:
        config = a_config(row, host=wan.address(ORIGIN), seed=seed)
        run_dir = folder / "truth"
        run_dir.mkdir()
        path = run_dir / "config.resolved.toml"
        path.write_text(config_to_toml(config), encoding="utf-8")
        log = (run_dir / "learner.log").open("wb")
        argv = [sys.executable, __file__, "--play", str(run_dir), "--steps", str(steps)]
        argv += ["--workers", str(row["workers"])]
        learner = wan.popen(ORIGIN, argv, stdout=subprocess.PIPE, stderr=log)
        assert learner.stdout is not None
        learner.stdout.readline()
        kinds = {kind.name: kind for kind in config.simulation.workers}

        def start(name: str) -> subprocess.Popen[Any]:
            settings = worker_settings(kinds[name.split("-", maxsplit=1)[0]])
            settings["worker.uplink_mbit"] = settings["worker.downlink_mbit"] = mbit
            argv = worker_argv(path, run_dir, name, settings)
            with (run_dir / f"{name}.log").open("ab") as worker_log:
                return wan.popen(name, argv, stdout=worker_log, stderr=worker_log)

        workers = {name: start(name) for name in names}
        deadline = time.monotonic() + steps * TRAIN_S * 3 + LIMIT_S
        kills = [
            (WARM_UP + (steps - WARM_UP) * (i + 1) / (row["kill"] + 1), names[i % len(names)])
            for i in range(row["kill"])
        ]
        back: list[tuple[float, str]] = []
        while learner.poll() is None:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{row}: no end\n{(run_dir / 'learner.log').read_text()[-2000:]}"
                )
            time.sleep(0.2)
            if kills and _steps_done(run_dir) >= kills[0][0]:
                _, name = kills.pop(0)
                with suppress(ProcessLookupError):  # it may just have ended by itself
                    os.killpg(workers[name].pid, signal.SIGKILL)
                workers[name].wait()
                back.append((time.monotonic() + BACK_S, name))
            if back and time.monotonic() >= back[0][0]:
                _, name = back.pop(0)
                workers[name] = start(name)
        if learner.returncode:
            raise RuntimeError(f"{row}: {(run_dir / 'learner.log').read_text()[-2000:]}")
    return config, run_dir, json.loads((run_dir / "rows.json").read_text())


def _names(row: dict[str, Any]) -> Sequence[tuple[str, int]]:
    more = row["slots"] % row["workers"]
    return (("a", more), ("b", row["workers"] - more))


def _steps_done(run_dir: Path) -> int:
    path = run_dir / "events.jsonl"
    return path.read_text().count('"step_completed"') if path.exists() else 0


def bcast_s(run_dir: Path) -> float:
    """Mean T_bcast until all workers had the version, without the first."""
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    found = [
        event["t100_s"]
        for event in events
        if event["event"] == "version_disseminated" and event["step"] > 0
    ]
    known = [seconds for seconds in found if seconds is not None]
    return fmean(known) if known else math.nan


def compared(row: dict[str, Any], *, steps: int, seeds: int) -> dict[str, Any]:
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="fleet-truth-") as temporary:
        folder = Path(temporary)
        config, run_dir, rows = truth(row, folder, steps=steps, seed=row["slots"])
        true = figures(rows, run_dir, WARM_UP)
        is_accepted = verify_run(run_dir).ok
        kept = rows[WARM_UP + 1 :]
        idle_s = rows[-1]["time"] - rows[WARM_UP]["time"]
        idle_s -= sum(each["wait_s"] + each["train_s"] for each in kept)
        table = config.simulation.model_copy(
            update={"publish_s": max(0.0, idle_s / len(kept) * row["period"])}
        )
        played = config.model_copy(update={"simulation": table})
        found = []
        for place in range(seeds):
            sim_dir = folder / f"simulated-{place}"
            sim_dir.mkdir()
            metrics = simulated(played, steps, sim_dir, config.run.seed + place)
            found.append({**figures(metrics, sim_dir, WARM_UP), "bcast_s": bcast_s(sim_dir)})
        true["bcast_s"] = bcast_s(run_dir)
        true["train_s"] = fmean(each["train_s"] for each in kept)
        # What a group takes by itself: without the installs that came meanwhile.
        pauses = 1.0 + INSTALL_S / (row["period"] * TRAIN_S)
        true["latency_s"] = fmean(each["latency_s"] for each in kept) / pauses
    model = foretold(row, row["slots"])
    return {
        **row,
        "steps": steps,
        "rate_over_learner": row["slots"] / BARE,
        "true": true,
        "verified": is_accepted,
        "simulated": found,
        "publish_s": table.publish_s,
        "model": {
            "bubble_ratio": model.bubble,
            "expired_share": model.expired_share,
            "staleness_mean": model.staleness_mean,
            "bcast_s": bound_s(row),
        },
        "bubble_model_measured": foretold(
            row, row["slots"], true["bcast_s"], true["latency_s"]
        ).bubble,
        "load": load,
    }


# ------------------------------------------------------------------------------ summary


def usd_error(row: dict[str, Any]) -> float:
    mean = fmean(each["usd_per_step"] for each in row["simulated"])
    return float(mean / row["true"]["usd_per_step"] - 1)


def table(rows: list[dict[str, Any]]) -> str:
    text = [
        "| S | κ | late | cv | pool over R/T_train "
        "| bubble: true, model, model with what was measured, simulated "
        "| staleness: true, model, simulated | T_bcast: true, bound, simulated "
        "| $ a step: true, simulated |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        true, model = row["true"], row["model"]
        sim = {key: fmean(each[key] for each in row["simulated"]) for key in row["simulated"][0]}
        text.append(
            f"| {row['S']} | {row['period']} | {row['late']} | {row['cv']:g} "
            f"| {row['rate_over_learner']:.2f}{' (kills)' if row['kill'] else ''} "
            f"| {true['bubble_ratio']:.3f}, {model['bubble_ratio']:.3f}, "
            f"{row['bubble_model_measured']:.3f}, {sim['bubble_ratio']:.3f} "
            f"| {true['staleness_mean']:.2f}, {model['staleness_mean']:.2f}, "
            f"{sim['staleness_mean']:.2f} "
            f"| {true['bcast_s']:.2f}, {model['bcast_s']:.2f}, {sim['bcast_s']:.2f} s "
            f"| {true['usd_per_step']:.5f}, {100 * usd_error(row):+.1f} % |"
        )
    return "\n".join(text)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    bubbles = [abs(r["true"]["bubble_ratio"] - r["model"]["bubble_ratio"]) for r in rows]
    measured = [abs(r["true"]["bubble_ratio"] - r["bubble_model_measured"]) for r in rows]
    errors = [usd_error(row) for row in rows]
    sims = [
        abs(r["true"]["bubble_ratio"] - fmean(each["bubble_ratio"] for each in r["simulated"]))
        for r in rows
    ]
    return {
        "runs": len(rows),
        "verified": sum(row["verified"] for row in rows),
        "bubble_model_within_2_points": sum(error <= 0.02 for error in bubbles),
        "bubble_model_worst": max(bubbles),
        "bubble_model_measured_within_2_points": sum(error <= 0.02 for error in measured),
        "bubble_model_measured_worst": max(measured),
        "bubble_simulated_within_2_points": sum(error <= 0.02 for error in sims),
        "usd_within_2_percent": sum(abs(error) <= 0.02 for error in errors),
        "usd_error_mean": fmean(errors),
        "usd_error_worst": max(errors, key=abs),
        "staleness_model_worst": max(
            abs(r["true"]["staleness_mean"] - r["model"]["staleness_mean"]) for r in rows
        ),
        "latency_over_nominal": fmean(r["true"]["latency_s"] / LATENCY_S for r in rows),
        "bcast_over_bound": fmean(r["true"]["bcast_s"] / r["model"]["bcast_s"] for r in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("fleet.jsonl"))
    parser.add_argument("--staleness", default="2,3,4,6")
    parser.add_argument("--cv", default="0.3,1")
    parser.add_argument("--late", default="wait,drop")
    parser.add_argument("--pools", default="bare,model,above", help="also: paper")
    parser.add_argument("--worker-mbit", type=float, default=15.0, help="Of each worker's line.")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kill", type=int, default=0)
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--seeds", type=int, default=3, help="Simulated runs.")
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--seconds", type=float, default=1e9, help="Begin no run after these.")
    parser.add_argument("--summary", action="store_true", help="Of what is in the file.")
    parser.add_argument("--play", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    setup_logging("error", "console")
    if options.play:
        config = load_config(options.play / "config.resolved.toml")
        asyncio.run(play(config, options.play, options.steps, options.workers))
        return
    rows = [json.loads(line) for line in options.out.open()] if options.out.exists() else []
    begun, (part, parts) = time.monotonic(), map(int, options.part.split("/"))
    if not options.summary:
        there = [[row[key] for key in KEY] for row in rows]
        for place, row in enumerate(runs(options)):
            if place % parts != part or [row[key] for key in KEY] in there:
                continue
            if time.monotonic() - begun > options.seconds:
                return
            found = compared(row, steps=options.steps, seeds=options.seeds)
            rows.append(found)
            with options.out.open("a") as out:
                out.write(json.dumps(found) + "\n")
            print(table([found]).splitlines()[-1], file=sys.stderr, flush=True)
    rows.sort(key=lambda row: [row[key] for key in KEY])
    result = {
        "benchmark": "fleet_truth",
        "machine": this_machine(),
        "parameters": {
            "groups_per_step": R,
            "train_s": TRAIN_S,
            "latency_s": LATENCY_S,
            "install_s": INSTALL_S,
            "version_mb": VERSION_MB,
            "origin_mbit": ORIGIN_MBIT,
            "learner_usd_per_h": LEARNER_USD_PER_H,
            "bare_pool_usd_per_h": POOL_USD_PER_H,
        },
        **summary(rows),
    }
    print(json.dumps(result, indent=1))
    print(table(rows))


if __name__ == "__main__":
    main()
