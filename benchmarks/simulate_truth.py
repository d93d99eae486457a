"""A fleet in truth and simulated: the same configuration, the same figures.

    python benchmarks/simulate_truth.py [--config configs/simulate_truth.toml] [--steps 60]

In truth: a coordinator with its ledger, a learner that takes batches, waits for the time of a step
and publishes, and one real worker daemon with the null engine for each simulated worker, over real
sockets. Simulated: `echo2 simulate` of the same file. Both leave a run folder; the figures are read
from the two in the same way, from the step after --warm-up on, and `echo2 verify` has to accept
both. Prints one JSON object and a Markdown table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
from machine import this_machine
from null_fleet import a_worker, trained, workers_joined

import echo2
from echo2.commands.simulate_run import plan_of
from echo2.config import Config, config_to_toml, load_config
from echo2.config_simulation import SimulatedWorkersTable
from echo2.logs import setup_logging
from echo2.sim.virtual import VirtualRun
from echo2.sim.virtual.records import Records
from echo2.verify import verify_run

GOAL = 0.02
"""Of $ per step: simulated over true, minus 1."""


def worker_settings(kind: SimulatedWorkersTable) -> dict[str, float | str]:
    return {
        "worker.slots": kind.slots,
        "worker.price_usd_per_h": kind.price_usd_per_h,
        "worker.null.tokens_per_s": kind.tokens_per_s,
        "worker.null.install_s": kind.install_s,
    }


async def truth(config: Config, steps: int, run_dir: Path) -> list[dict[str, float]]:
    """Play it with real processes; one row for each step."""
    path = run_dir / "config.resolved.toml"
    path.write_text(config_to_toml(config))
    kinds = config.simulation.workers
    names = [(f"{k.name}-{place}", k) for k in kinds for place in range(1, k.count + 1)]
    weights = {"w": np.zeros(16384, np.float32)}

    def changed() -> dict[str, np.ndarray]:
        weights["w"] += 1
        return weights

    async with AsyncExitStack() as stack:
        coordinator = await stack.enter_async_context(echo2.Coordinator(config, run_dir=run_dir))
        for name, kind in names:
            await a_worker(stack, path, run_dir, name, worker_settings(kind))
        await workers_joined(coordinator, len(names))
        return await trained(
            coordinator,
            changed,
            steps=steps,
            train_s=config.simulation.learner_step_s,
            groups_per_step=config.learner.groups_per_step,
            period=config.staleness.period,
        )


def simulated(config: Config, steps: int, run_dir: Path, seed: int) -> list[dict[str, float]]:
    plan = plan_of(config, hours=None, steps=steps, seed=seed)
    run = VirtualRun(plan)
    with Records(run_dir, config, clock=lambda: run.timeline.now) as records:
        run.run(records)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def figures(rows: list[dict[str, float]], run_dir: Path, warm_up: int) -> dict[str, float]:
    """From the step after `warm_up` on; expired groups by when they expired."""
    first, last = rows[warm_up], rows[-1]
    kept = rows[warm_up + 1 :]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    done = {e["step"]: e["time"] for e in events if e["event"] == "step_completed"}
    begin, end = done[warm_up], done[len(rows) - 1]
    ended = [e for e in events if e["event"] == "group_ended" and begin < e["time"] <= end]
    trained = [e for e in ended if e["end"] == "trained"]
    expired = sum(e["end"] == "expired" for e in ended)
    wait_s = sum(row["wait_s"] for row in kept)
    train_s = sum(row["train_s"] for row in kept)
    return {
        "steps_per_h": 3600.0 * len(kept) / (last["time"] - first["time"]),
        "usd_per_step": (last["cost_usd"] - first["cost_usd"]) / len(kept),
        "bubble_ratio": wait_s / (wait_s + train_s),
        "expired_share": expired / (expired + len(trained)),
        "staleness_mean": float(np.mean([e["trained_at"] - e["min_version"] for e in trained])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/simulate_truth.toml"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=5, help="Simulated runs, for their spread.")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()
    setup_logging("error", "console")
    fixed = ['log.level="error"', "http.enabled=false"]
    config = load_config(options.config, [*fixed, *options.set])
    with tempfile.TemporaryDirectory() as folder:
        true_dir = Path(folder) / "truth"
        true_dir.mkdir()
        rows = asyncio.run(truth(config, options.steps, true_dir))
        true = figures(rows, true_dir, options.warm_up)
        accepted = [verify_run(true_dir).ok]
        found = []
        began = time.perf_counter()
        for place in range(options.seeds):
            run_dir = Path(folder) / f"simulated-{place}"
            run_dir.mkdir()
            rows = simulated(config, options.steps, run_dir, config.run.seed + place)
            found.append(figures(rows, run_dir, options.warm_up))
            accepted.append(verify_run(run_dir).ok)
        seconds = (time.perf_counter() - began) / options.seeds
    same = found[0]
    error = same["usd_per_step"] / true["usd_per_step"] - 1.0
    result = {
        "benchmark": "simulate_truth",
        "machine": this_machine(),
        "parameters": {"config": str(options.config), "steps": options.steps, "set": options.set},
        "true": true,
        "simulated": same,
        "simulated_other_seeds": found[1:],
        "usd_per_step_error": error,
        "goal": GOAL,
        "ratio": abs(error) / GOAL,
        "verified": all(accepted),
        "seconds_of_a_simulation": seconds,
    }
    print(json.dumps(result, indent=1))
    print("| | true | simulated, same seed | other seeds |")
    print("|---|---|---|---|")
    for name in true:
        others = [each[name] for each in found[1:]] or [same[name]]
        print(
            f"| {name} | {true[name]:.4g} | {same[name]:.4g} | {min(others):.4g} to "
            f"{max(others):.4g} |"
        )


if __name__ == "__main__":
    main()
