"""T_bcast against the number of workers: stars and planned trees (ECHO-2 paper, Figure 4).

    python benchmarks/dissemination_workers.py [--workers 32] [--picture FILE.svg]

A version of Qwen3-8B in bfloat16 (16.38 GB) to 1 to `--workers` workers with lines of 100 Mbit/s,
from origins of 300, 500 and 800 Mbit/s as in the paper's figure. For each number: the star whose
origin has no limit, G/B_w; the star, max(G/B_w, n·G/B_0); the paper's chains; the relay trees that
the planner would announce, by its own prediction, and the fluid bound that no plan beats. All
with the install of configs/paper_table2.toml. The last number of workers is also played chunk by
chunk for a version of 1 GB. The paper prints no numbers of this figure; it says that the limited
star grows linearly, and that the tree stays nearly constant, close to the unlimited star.
Prints one JSON object; about a minute of work.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path
from typing import Any, Final

from echo2.chart import Line, Panel, svg
from echo2.core.capacity_spread import chain_bcast_s, star_bcast_s
from echo2.core.dissemination import Host, RelayPlan, plan_relays
from echo2.core.dissemination_hosts import megabits
from echo2.messages import CHUNK_MAX_BYTES
from echo2.sim.relays import Service, relay_arrivals_s

VERSION_BYTES: Final = 16_380_000_000
PLAYED_BYTES: Final = 1_000_000_000
WORKER_MBIT: Final = 100.0
ORIGINS_MBIT: Final = (300.0, 500.0, 800.0)
INSTALL_S: Final = 126.6
RTT_S: Final = 0.05
SIZE_MBIT: Final = megabits(VERSION_BYTES)
CHUNK_MBIT: Final = megabits(CHUNK_MAX_BYTES)


def fleet(number: int) -> list[Host]:
    return [Host(f"w{i}", WORKER_MBIT, WORKER_MBIT, RTT_S, accepts=True) for i in range(number)]


def planned(origin_mbit: float, number: int, num_bytes: int) -> tuple[Host, RelayPlan]:
    origin = Host("origin", origin_mbit, 1000.0, 0.0, accepts=True)
    plan = plan_relays(origin, fleet(number), num_bytes=num_bytes, chunk_bytes=CHUNK_MAX_BYTES)
    return origin, plan


def row(number: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "workers": number,
        "star_unlimited_s": star_bcast_s(
            SIZE_MBIT, number, worker_mbit=WORKER_MBIT, install_s=INSTALL_S
        ),
    }
    for origin_mbit in ORIGINS_MBIT:
        began = time.process_time()
        _, plan = planned(origin_mbit, number, VERSION_BYTES)
        found[f"{origin_mbit:g}"] = {
            "star_s": star_bcast_s(
                SIZE_MBIT,
                number,
                worker_mbit=WORKER_MBIT,
                origin_mbit=origin_mbit,
                install_s=INSTALL_S,
            ),
            "chains_s": chain_bcast_s(
                SIZE_MBIT,
                math.ceil(number / (origin_mbit // WORKER_MBIT)),
                worker_mbit=WORKER_MBIT,
                chunk_mbit=CHUNK_MBIT,
                hop_s=RTT_S / 2,
                install_s=INSTALL_S,
            ),
            "trees_s": plan.predicted_s + INSTALL_S,
            "bound_s": plan.bound_s + INSTALL_S,
            "trees": len(plan.trees),
            "planning_s": round(time.process_time() - began, 3),
        }
    return found


def played(number: int) -> list[dict[str, Any]]:
    rows = []
    for origin_mbit in ORIGINS_MBIT:
        origin, plan = planned(origin_mbit, number, PLAYED_BYTES)
        arrivals = relay_arrivals_s(
            plan,
            origin,
            fleet(number),
            num_bytes=PLAYED_BYTES,
            chunk_bytes=CHUNK_MAX_BYTES,
            service=Service.CHUNK_ORDER,
            window_chunks=256,
        )
        rows.append(
            {
                "origin_mbit": origin_mbit,
                "workers": number,
                "version_bytes": PLAYED_BYTES,
                "predicted_s": plan.predicted_s,
                "played_s": max(arrivals.values()),
                "star_s": max(1 / WORKER_MBIT, number / origin_mbit) * megabits(PLAYED_BYTES),
            }
        )
    return rows


def picture(rows: list[dict[str, Any]]) -> str:
    lines = [
        Line(
            name="star, origin without a limit",
            points=[(each["workers"], each["star_unlimited_s"]) for each in rows],
            dashed=True,
        )
    ]
    for origin_mbit in ORIGINS_MBIT:
        for kind, dashed in (("star", False), ("trees", True)):
            lines.append(
                Line(
                    name=f"{kind}, origin {origin_mbit:g} Mbit/s",
                    points=[
                        (each["workers"], each[f"{origin_mbit:g}"][f"{kind}_s"]) for each in rows
                    ],
                    dashed=dashed,
                )
            )
    title = "T_bcast of 16.38 GB, workers with 100 Mbit/s"
    return svg([Panel(title=title, x_label="workers", y_label="T_bcast, s", lines=lines)])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    rows = [row(number) for number in range(1, options.workers + 1)]
    last = rows[-1]
    report = {
        "benchmark": "dissemination_workers",
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "version_bytes": VERSION_BYTES,
        "worker_mbit": WORKER_MBIT,
        "origins_mbit": ORIGINS_MBIT,
        "install_s": INSTALL_S,
        "rtt_s": RTT_S,
        "rows": rows,
        "trees_over_star_unlimited_at_most": max(
            each[f"{mbit:g}"]["trees_s"] / each["star_unlimited_s"]
            for each in rows
            for mbit in ORIGINS_MBIT
        ),
        "star_over_trees_at_the_last": {
            f"{mbit:g}": last[f"{mbit:g}"]["star_s"] / last[f"{mbit:g}"]["trees_s"]
            for mbit in ORIGINS_MBIT
        },
        "played": played(options.workers),
    }
    if options.picture:
        options.picture.parent.mkdir(parents=True, exist_ok=True)
        options.picture.write_text(picture(rows), encoding="utf-8")
        report["picture"] = str(options.picture)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
