"""The origin's host in broadcast.py: an embedded coordinator that publishes one snapshot.

    python benchmarks/broadcast_publisher.py CONFIG RUN SNAPSHOT

Says `up` when daemons can join, publishes when it is told a line, says `published`, and serves
until its stdin ends. What happens meanwhile stands in RUN/events.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

import uvloop

from echo2 import Coordinator, load_config
from echo2.logs import setup_logging


async def publish(config_path: Path, run_dir: Path, snapshot: Path) -> None:
    config = load_config(config_path)
    setup_logging(config.log.level, config.log.format)
    async with Coordinator(config, run_dir=run_dir) as coordinator:
        print("up", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        await coordinator.publish(snapshot)
        print("published", flush=True)
        await asyncio.to_thread(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("snapshot", type=Path)
    options = parser.parse_args()
    uvloop.run(publish(options.config, options.run_dir, options.snapshot))


if __name__ == "__main__":
    main()
