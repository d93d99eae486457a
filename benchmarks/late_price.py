"""What late = "wait" and "mask" cost beside "drop" where lengths have a long tail.

    python benchmarks/late_price.py [--picture docs/pictures/late_price.png]

By the capacity model (core/capacity.py), for groups with a coefficient of variation of 1: bubble
and $ per step of the three policies, and the groups that "drop" loses, by S and by concurrency, the
groups in work at once over R. The paper's κ = S - 1, at least 1. $ are those of a learner that
costs twice as much as the pool R/T_train. Prints one JSON object and a Markdown table, and draws.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from machine import this_machine

from echo2.core.capacity import Workload, predict
from echo2.core.capacity_pool import Pool, WorkerKind

R, TRAIN_S, LATENCY_S, INSTALL_S, BCAST_S, CV = 64, 100.0, 40.0, 5.0, 45.0, 1.0
POOL_SHARE = 0.5
RATES = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5)
"""Of the pool over R/T_train."""
STALENESS = (1, 2, 3, 4, 6)
LATES = ("drop", "wait", "mask")


def row(staleness_max: int, rate: float) -> dict[str, Any]:
    slots = math.ceil(rate * R * LATENCY_S / TRAIN_S)
    kind = WorkerKind(name="w", rate_groups_per_s=1 / LATENCY_S, install_s=INSTALL_S)
    found: dict[str, Any] = {"S": staleness_max, "concurrency": slots / R}
    for late in LATES:
        workload = Workload(
            groups_per_step=R,
            train_s=TRAIN_S,
            staleness_max=staleness_max,
            period=max(1, staleness_max - 1),
            late=late,  # type: ignore[arg-type]
            latency_cv=CV,
            fetch_s=BCAST_S - INSTALL_S,
        )
        seen = predict(workload, Pool(((kind, slots),)))
        pool_usd = POOL_SHARE * slots / (R * LATENCY_S / TRAIN_S)
        found[late] = {
            "bubble": seen.bubble,
            "bubble_error": seen.bubble_error,
            "expired_share": seen.expired_share,
            "staleness_mean": seen.staleness_mean,
            "usd_per_step": (1 + pool_usd) / (1 - seen.bubble),
        }
    return found


def dearer(one: dict[str, Any], late: str) -> float:
    """$ per step over those of drop, minus 1."""
    return float(one[late]["usd_per_step"] / one["drop"]["usd_per_step"] - 1)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> str:
    try:
        import matplotlib
    except ImportError:
        return "no picture: matplotlib is not installed (pip install matplotlib)"
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    for staleness_max in STALENESS:
        chosen = [each for each in rows if each["S"] == staleness_max]
        where = [each["concurrency"] for each in chosen]
        label = f"S = {staleness_max}"
        for axes, late in ((left, "wait"), (middle, "mask")):
            values = [100 * dearer(each, late) for each in chosen]
            axes.plot(where, values, marker="o", markersize=3, label=label)
        lost = [100 * each["drop"]["expired_share"] for each in chosen]
        right.plot(where, lost, marker="o", markersize=3, label=label)
    left.set(ylabel="$ a step over drop, %", title='"wait"')
    middle.set(title='"mask"')
    right.set(ylabel="groups that expire, %", title='"drop"')
    for axes in (left, middle, right):
        axes.set(xlabel="groups in work at once / R")
        axes.axhline(0.0, color="grey", linewidth=0.8)
    top = max(left.get_ylim()[1], middle.get_ylim()[1])
    low = min(left.get_ylim()[0], middle.get_ylim()[0])
    left.set_ylim(low, top)
    middle.set_ylim(low, top)
    right.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    return str(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    rows = [row(staleness_max, rate) for staleness_max in STALENESS for rate in RATES]
    result = {
        "benchmark": "late_price",
        "machine": this_machine(),
        "parameters": {
            "groups_per_step": R,
            "train_s": TRAIN_S,
            "latency_s": LATENCY_S,
            "latency_cv": CV,
            "bcast_s": BCAST_S,
            "install_s": INSTALL_S,
        },
        "rows": rows,
    }
    if options.picture:
        result["picture"] = draw(rows, options.picture)
    print(json.dumps(result, indent=1))
    print("| S | in work over R | bubble: drop, wait, mask | $ over drop: wait, mask | expired |")
    print("|---|---|---|---|---|")
    for each in rows:
        bubbles = ", ".join(f"{each[late]['bubble']:.3f}" for late in LATES)
        print(
            f"| {each['S']} | {each['concurrency']:.2f} | {bubbles} "
            f"| {100 * dearer(each, 'wait'):+.0f} %, {100 * dearer(each, 'mask'):+.0f} % "
            f"| {100 * each['drop']['expired_share']:.1f} % |"
        )


if __name__ == "__main__":
    main()
