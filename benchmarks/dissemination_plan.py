"""What the dissemination planner predicts, against the fluid bound and a chunk-level simulation.

    python benchmarks/dissemination_plan.py [--fleets 240] [--seed 1] [--picture FILE.png]

First the fleets of docs/dissemination.md, each with its bound, the plan's predicted time, the
time that `echo2.sim.relays` plays it in (requests served in the order of the chunks, and
children in turn), and the same for two other ways on the same links: the star, and chains of
all chunks as many as the origin feeds at a worker's uplink (ECHO-2, §4.2). Then random fleets:
predicted over bound, processor time of planning, and a picture if matplotlib is installed.
Prints one JSON object and Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echo2.core.dissemination import (
    Host,
    RelayPlan,
    RelayTree,
    plan_problem,
    plan_relays,
    reach_bound,
)
from echo2.sim.relays import Service, relay_arrivals_s

CHUNK_BYTES = 256 * 1024
VERSION_BYTES = 64_000_000
WINDOW_CHUNKS = 256  # never what limits these fleets
SIZES = {"64 MB": 64_000_000, "1 GB": 10**9, "16 GB": 16 * 10**9}


def links(
    ups: Sequence[float], downs: Sequence[float], rtt_s: float = 0.002, dial_only: int = 0
) -> list[Host]:
    return [
        Host(f"w{i}", up, down, rtt_s, accepts=i >= dial_only)
        for i, (up, down) in enumerate(zip(ups, downs, strict=True))
    ]


UNEQUAL = ([20.0, 50.0, 100.0, 200.0] * 2, [200.0, 200.0, 400.0, 400.0] * 2)
SCENARIOS: dict[str, tuple[float, list[Host]]] = {
    "8 at 100/100, origin 300": (300.0, links([100.0] * 8, [100.0] * 8)),
    "8 at 100/100, origin 100": (100.0, links([100.0] * 8, [100.0] * 8)),
    "8 at 100/400, origin 300": (300.0, links([100.0] * 8, [400.0] * 8)),
    "8 at 20, 50, 100, 200 (twice) / 200, 200, 400, 400, origin 300": (300.0, links(*UNEQUAL)),
    "4 at 40/40, origin 80, round trip 100 ms": (80.0, links([40.0] * 4, [40.0] * 4, 0.1)),
    "8 at 100/100, origin 300, 4 dial-only": (300.0, links([100.0] * 8, [100.0] * 8, 0.002, 4)),
    "8 at 100/100, origin 300, 7 dial-only": (300.0, links([100.0] * 8, [100.0] * 8, 0.002, 7)),
    "8 at 100/100, origin 300, all dial-only": (300.0, links([100.0] * 8, [100.0] * 8, 0.002, 8)),
}


def by_hand(parents: dict[str, str]) -> RelayPlan:
    """One tree of all chunks, for a comparison."""
    even = dict.fromkeys(parents, 1.0)
    return RelayPlan((RelayTree(1.0, parents),), 0.0, 0.0, "", "by hand", arrivals_s=even)


def chains(origin: Host, workers: Sequence[Host]) -> RelayPlan:
    """N chains of all chunks, N the origin's uplink over the workers' mean one."""
    mean = statistics.mean(host.up for host in workers)
    count = max(1, min(len(workers), round(origin.up / mean)))
    names = [host.name for host in workers]
    return by_hand(
        {name: names[i - count] if i >= count else origin.name for i, name in enumerate(names)}
    )


def played_s(plan: RelayPlan, origin: Host, workers: Sequence[Host], service: Service) -> float:
    arrivals = relay_arrivals_s(
        plan,
        origin,
        workers,
        num_bytes=VERSION_BYTES,
        chunk_bytes=CHUNK_BYTES,
        service=service,
        window_chunks=WINDOW_CHUNKS,
    )
    return max(arrivals.values())


def scenario_rows() -> list[dict[str, Any]]:
    rows = []
    for name, (up, workers) in SCENARIOS.items():
        origin = Host("origin", up, 1000.0, 0.0, accepts=True)
        plan = plan_relays(origin, workers, num_bytes=VERSION_BYTES, chunk_bytes=CHUNK_BYTES)
        assert plan_problem(plan, origin, workers) is None
        chained = chains(origin, workers)
        possible = plan_problem(chained, origin, workers) is None
        star = by_hand({host.name: "origin" for host in workers})
        rows.append(
            {
                "fleet": name,
                "bound_s": plan.bound_s,
                "reach_bound_s": reach_bound(origin, workers, VERSION_BYTES)[0],
                "predicted_s": plan.predicted_s,
                "played_s": played_s(plan, origin, workers, Service.CHUNK_ORDER),
                "played_in_turn_s": played_s(plan, origin, workers, Service.ROUND_ROBIN),
                "star_s": played_s(star, origin, workers, Service.CHUNK_ORDER),
                "chains_s": (
                    played_s(chained, origin, workers, Service.CHUNK_ORDER) if possible else None
                ),
                "trees": len(plan.trees),
                "connections": len(plan.connections),
                "reason": plan.reason,
            }
        )
    return rows


def a_random_fleet(rng: random.Random) -> tuple[Host, list[Host]]:
    """1 to 64 workers; links equal, nearly equal, or over a factor of 100; some dial-only."""
    num = round(2 ** rng.uniform(0, 6))
    middle, spread = 10 ** rng.uniform(1, 3), rng.choice([0.0, 0.02, 0.3, 1.0])
    accepting = rng.choice([1.0, 1.0, 0.7, 0.3])

    def up() -> float:
        return middle * 10 ** (spread * rng.uniform(-1, 1))

    workers = [
        Host(
            f"w{i}",
            up(),
            middle * rng.choice([2.0, 4.0, 10.0]),
            rng.choice([0.01, 0.05, 0.15]),
            accepts=rng.random() < accepting,
        )
        for i in range(num)
    ]
    return Host("origin", middle * 10 ** rng.uniform(0, 1), 10_000.0, 0.0, accepts=True), workers


def random_rows(num: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = []
    for _ in range(num):
        origin, workers = a_random_fleet(rng)
        for size, num_bytes in SIZES.items():
            began = time.process_time()
            plan = plan_relays(origin, workers, num_bytes=num_bytes, chunk_bytes=CHUNK_BYTES)
            planning_s = time.process_time() - began
            assert plan_problem(plan, origin, workers) is None
            rows.append(
                {
                    "size": size,
                    "workers": len(workers),
                    "bound_s": plan.bound_s,
                    "reach_bound_s": reach_bound(origin, workers, num_bytes)[0],
                    "predicted_s": plan.predicted_s,
                    "connections": len(plan.connections),
                    "planning_s": planning_s,
                }
            )
            if size == "64 MB" and len(workers) <= 24:
                rows[-1]["played_s"] = played_s(plan, origin, workers, Service.CHUNK_ORDER)
    return rows


def blocked_rows(num: int, seed: int) -> list[dict[str, Any]]:
    """The same fleets with 1 GB, and a share of all pairs that cannot connect."""
    rows = []
    for share in (0.02, 0.05, 0.2):
        rng = random.Random(seed)
        ratios = []
        for _ in range(num):
            origin, workers = a_random_fleet(rng)
            names = [origin.name, *(host.name for host in workers)]
            pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
            blocked = frozenset(pair for pair in pairs if rng.random() < share)
            plan = plan_relays(
                origin, workers, num_bytes=10**9, chunk_bytes=CHUNK_BYTES, blocked=blocked
            )
            assert plan_problem(plan, origin, workers, blocked=blocked) is None
            reached = [host for host in workers if host.name not in plan.unreached]
            if reached:
                bound_s, _ = reach_bound(origin, reached, 10**9, blocked=blocked)
                ratios.append(plan.predicted_s / bound_s)
        rows.append({"size": f"1 GB, {share:.0%} of pairs blocked"} | spread(sorted(ratios)))
    return rows


def spread(ratios: Sequence[float]) -> dict[str, float]:
    """Of sorted `ratios`."""
    return {
        "median": statistics.median(ratios),
        "p90": ratios[int(0.9 * (len(ratios) - 1))],
        "largest": ratios[-1],
        "within_10_percent": sum(ratio <= 1.1 for ratio in ratios) / len(ratios),
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Predicted over bound (with reachability) by size of the version."""
    found = []
    for size in SIZES:
        ratios = sorted(r["predicted_s"] / r["reach_bound_s"] for r in rows if r["size"] == size)
        found.append({"size": size} | spread(ratios))
    return found


def draw(rows: Sequence[dict[str, Any]], path: Path) -> str:
    """Predicted over bound, and played over predicted; what came of it."""
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for size in SIZES:
        chosen = [row for row in rows if row["size"] == size]
        left.scatter(
            [row["reach_bound_s"] for row in chosen],
            [row["predicted_s"] / row["reach_bound_s"] for row in chosen],
            s=7,
            label=size,
        )
    left.axhline(1.1, color="grey", linewidth=0.8, linestyle="--")
    left.set(xscale="log", xlabel="bound, s", ylabel="predicted / bound", ylim=(0.98, 2.1))
    left.legend(title="version", frameon=False)
    played = [row for row in rows if "played_s" in row]
    right.scatter(
        [row["predicted_s"] for row in played],
        [row["played_s"] / row["predicted_s"] for row in played],
        s=7,
    )
    right.axhline(1.0, color="grey", linewidth=0.8, linestyle="--")
    right.set(xscale="log", xlabel="predicted, s", ylabel="simulated / predicted")
    right.set_title("64 MB, up to 24 workers", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return str(path)


def tables(result: dict[str, Any]) -> str:
    lines = [
        "| fleet (up/down, Mbit/s) | bound | with reachability | predicted | simulated | in turn "
        "| star | chains | trees, connections |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["scenarios"]:
        chained = "impossible" if row["chains_s"] is None else f"{row['chains_s']:.2f}"
        lines.append(
            f"| {row['fleet']} | {row['bound_s']:.2f} | {row['reach_bound_s']:.2f} "
            f"| {row['predicted_s']:.2f} | {row['played_s']:.2f} | {row['played_in_turn_s']:.2f} "
            f"| {row['star_s']:.2f} | {chained} | {row['trees']}, {row['connections']} |"
        )
    lines += ["", "| version | median | 90 % | largest | within 10 % |", "|---|---|---|---|---|"]
    lines += [
        f"| {row['size']} | {row['median']:.3f} | {row['p90']:.3f} | {row['largest']:.2f} "
        f"| {row['within_10_percent']:.0%} |"
        for row in result["random"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fleets", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    rows = random_rows(arguments.fleets, arguments.seed)
    full = [row["planning_s"] for row in rows if row["workers"] >= 48]
    played = [row["played_s"] / row["predicted_s"] for row in rows if "played_s" in row]
    result = {
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "version_bytes": VERSION_BYTES,
        "chunk_bytes": CHUNK_BYTES,
        "fleets": arguments.fleets,
        "seed": arguments.seed,
        "scenarios": scenario_rows(),
        "random": summary(rows) + blocked_rows(arguments.fleets, arguments.seed),
        "played_over_predicted": {
            "median": statistics.median(played),
            "p90": sorted(played)[int(0.9 * (len(played) - 1))],
            "largest": max(played),
        },
        "planning_s_48_to_64_workers": {
            "mean": statistics.mean(full),
            "largest": max(full),
        },
        "picture": draw(rows, arguments.picture) if arguments.picture else None,
    }
    print(json.dumps(result, indent=1))
    print(tables(result))


if __name__ == "__main__":
    main()
