"""How many virtual hours of a fleet one core simulates in a minute.

    python benchmarks/simulate_speed.py [--hours 4] [--config configs/simulate_100.toml]

Plays `echo2 simulate` of the configuration (a hundred workers) for some virtual hours, with its
heartbeats as they are and at one a second, with and without a run folder. Prints one JSON object:
processor seconds, virtual hours in a minute of one core, and the ratio to the goal (four hours).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import this_machine

from echo2.commands.simulate_run import plan_of
from echo2.config import load_config
from echo2.sim.virtual import VirtualRun
from echo2.sim.virtual.records import Records

GOAL_HOURS = 4.0
"""Virtual hours in a minute of one core."""
EACH_SECOND = [
    *("heartbeat.interval_s=1.0", "heartbeat.suspect_s=5.0", "heartbeat.gone_s=15.0"),
]


def played(config_path: Path, settings: list[str], hours: float, run_dir: Path | None) -> Any:
    config = load_config(config_path, settings)
    run = VirtualRun(plan_of(config, hours=hours, steps=None, seed=0))
    began = time.process_time()
    if run_dir is None:
        figures = run.run()
    else:
        with Records(run_dir, config, clock=lambda: run.timeline.now) as records:
            figures = run.run(records)
    seconds = time.process_time() - began
    found = figures.to_json()
    return {
        "virtual_hours": round(found["virtual_hours"], 2),
        "workers": sum(kind.count for kind in config.simulation.workers),
        "steps": found["steps"],
        "groups": sum(found["groups"].values()),
        "events": found["events"],
        "core_s": round(seconds, 1),
        "virtual_hours_in_a_minute": round(60.0 * found["virtual_hours"] / seconds, 1),
        "ratio": round(60.0 * found["virtual_hours"] / seconds / GOAL_HOURS, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, default=Path("configs/simulate_100.toml"))
    parser.add_argument("--hours", type=float, default=4.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {
            "as configured": played(options.config, [], options.hours, None),
            "with a run folder": played(options.config, [], options.hours, Path(folder)),
            "a heartbeat each second": played(options.config, EACH_SECOND, options.hours, None),
        }
    print(
        json.dumps(
            {
                "benchmark": "simulate_speed",
                "machine": this_machine(),
                "parameters": {"config": str(options.config), "hours": options.hours},
                "goal_virtual_hours_in_a_minute": GOAL_HOURS,
                **rows,
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
