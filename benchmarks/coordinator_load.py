"""Groups a second through one coordinator with durable acknowledgements, beside Ray's actor calls.

    python benchmarks/coordinator_load.py [--workers 200] [--seconds 12] [--rounds 1]
        [--peers ray | none] [--ray-python VENV/bin/python] [--out FILE]

Null workers (sockets of their own, few processes) answer each lease at once with a group of
16 x 512 tokens with logprobs; a null learner takes every batch; the coordinator is one real
`echo2 coordinator`, with its ledger on the disk, which acknowledges a group after the commit
that holds it. The run folder is a temporary one (--folder DIR: in there). Then:

    plain, curve   as many groups as go through; at half of that rate the time from a result's
                   sending to its acknowledgement
    durability     processor time of the coordinator's process for a group at --cpu-rate groups
                   a second, with the ledger on the disk and in memory (benchmarks'
                   load_memory_coordinator.py), one after the other, --rounds times
    ray            the same groups given to one Ray actor that keeps the newest: one caller, and
                   two, 16 calls in flight each; the better one counts

All of it shares this machine's cores, as Ray's processes do. Goals: 4 times Ray plain, 2.5 with
CURVE; 99 % acknowledged within 20 ms at half the rate; durability costs at most 15 %.
Ray needs a Python of its own: python3 -m venv VENV && VENV/bin/pip install ray numpy
Takes about three minutes. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from load_clients import Shape
from load_run import Load, LoadRun, LoadSpec, machine

WARM_UP_S: Final = 3.0
RAY_S: Final = 240.0
GOALS: Final = {
    "plain_over_ray": 4.0,
    "curve_over_ray": 2.5,
    "acknowledged_p99_ms": 20.0,
    "durability_share": 0.15,
}


def top_and_half(folder: Path, spec: LoadSpec, seconds: float) -> dict[str, Any]:
    with LoadRun(folder, spec) as run:
        run.pace(None)
        run.measure(WARM_UP_S)
        top = run.measure(seconds)
        run.pace(top.groups_per_s / 2)
        run.measure(WARM_UP_S)
        half = run.measure(seconds)
        steps, groups = run.trained()
    return {
        "top": top.report(),
        "half": half.report(),
        "trained_groups": groups,
        "learner_steps": steps,
    }


def cost_at(folder: Path, spec: LoadSpec, rate: float, seconds: float) -> Load:
    with LoadRun(folder, spec) as run:
        run.pace(rate)
        run.measure(WARM_UP_S)
        return run.measure(seconds)


def durability(
    folder: Path, spec: LoadSpec, rate: float, seconds: float, rounds: int
) -> dict[str, Any]:
    """Medians of the rounds."""
    found: dict[str, list[Load]] = {"disk": [], "memory": []}
    for _ in range(rounds):
        for ledger, loads in found.items():
            made = replace(spec, ledger=ledger)  # type: ignore[arg-type]
            loads.append(cost_at(folder, made, rate, seconds))
    costs = {
        ledger: statistics.median(1e6 * load.cpu_s / load.groups for load in loads)
        for ledger, loads in found.items()
    }
    reached = {ledger: min(load.groups_per_s for load in loads) for ledger, loads in found.items()}
    return {
        "wanted_groups_per_s": rate,
        "groups_per_s": {ledger: round(value) for ledger, value in reached.items()},
        "cpu_us_per_group": {ledger: round(cost, 1) for ledger, cost in costs.items()},
        "cpu_us_per_group_by_thread": {
            ledger: loads[-1].report()["cpu_us_per_group_by_thread"]
            for ledger, loads in found.items()
        },
        "cost_share": round(costs["disk"] / costs["memory"] - 1, 3),
        "goal_share": GOALS["durability_share"],
    }


def ray_problem(python: str) -> str:
    """Why Ray cannot run with this Python; empty if it can."""
    done = subprocess.run(
        [python, "-c", "import ray, numpy"], capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    return (
        f"it needs ray and numpy in {python}: make a virtual environment, pip install ray numpy, "
        "and name its Python with --ray-python, or leave Ray out with --peers none"
    )


def ray_calls(python: str, shape: Shape, seconds: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for callers in (1, 2):
        options = {
            "callers": callers,
            "seconds": seconds,
            "group-size": shape.group_size,
            "tokens": shape.tokens,
            "prompt": shape.prompt,
        }
        done = subprocess.run(
            [
                *(python, str(Path(__file__).parent / "coordinator_ray.py")),
                *(f"--{name}={value}" for name, value in options.items()),
            ],
            capture_output=True,
            text=True,
            timeout=RAY_S,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"Ray's side failed:\n{done.stderr[-2000:]}")
        line = json.loads(done.stdout.strip().splitlines()[-1])
        found[f"callers_{callers}"], found["version"] = line["groups_per_s"], line["ray"]
    found["best"] = max(found["callers_1"], found["callers_2"])
    return found


def report(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    shape = Shape(options.group_size, options.tokens, min(32, options.tokens // 4))
    spec = LoadSpec(
        workers=options.workers,
        processes=options.processes,
        slots=options.slots,
        shape=shape,
        groups_per_step=options.groups_per_step,
    )
    found: dict[str, Any] = {
        "benchmark": "coordinator_load",
        "machine": machine(),
        "parameters": {
            "workers": options.workers,
            "processes": options.processes,
            "slots": options.slots,
            "group": f"{shape.group_size} x {shape.tokens} tokens",
            "group_bytes": shape.group_size * shape.tokens * 9,
            "groups_per_step": options.groups_per_step,
            "seconds": options.seconds,
        },
        "goals": GOALS,
    }
    wanted = options.only.split(",") if options.only else ["plain", "curve", "durability", "ray"]
    if "plain" in wanted:
        found["plain"] = top_and_half(folder, spec, options.seconds)
    if "curve" in wanted:
        found["curve"] = top_and_half(folder, replace(spec, curve=True), options.seconds)
    if "durability" in wanted:
        found["durability"] = durability(
            folder, spec, options.cpu_rate, options.seconds, options.rounds
        )
    if "ray" in wanted and options.peers == "ray":
        found["ray"] = ray_calls(options.ray_python, shape, options.seconds)
        best = found["ray"]["best"]
        found["ratios"] = {
            f"{kind}_over_ray": round(found[kind]["top"]["groups_per_s"] / best, 2)
            for kind in ("plain", "curve")
            if kind in found
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--groups-per-step", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cpu-rate", type=float, default=2000.0)
    parser.add_argument("--peers", choices=["ray", "none"], default="ray")
    parser.add_argument("--ray-python", default=sys.executable)
    parser.add_argument("--only", default="", help="plain, curve, durability, ray: some of them")
    parser.add_argument("--folder", type=Path, help="for the run folders; on the disk to measure")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.peers == "ray" and (problem := ray_problem(options.ray_python)):
        sys.exit(problem)
    with tempfile.TemporaryDirectory(prefix="coordinator-load-", dir=options.folder) as name:
        found = report(options, Path(name) / "load")
    text = json.dumps(found, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
