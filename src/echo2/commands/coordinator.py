"""`echo2 coordinator`: the daemon, a thin user of `echo2.service.Coordinator`."""

from __future__ import annotations

import asyncio
import gc
import signal
from pathlib import Path
from typing import Final

import uvloop

from echo2.commands.run_folder import RunFolder
from echo2.config import Config, load_config
from echo2.logs import setup_logging
from echo2.net.descriptors import raise_descriptor_limit
from echo2.service import Coordinator


def main(path: Path, run_dir: Path | None, overrides: list[str]) -> int:
    """0 when the run finished or was stopped by a signal, 1 when it could not go on."""
    config = load_config(path, overrides)
    setup_logging(config.log.level, config.log.format)
    raise_descriptor_limit()
    folder = RunFolder.of(config, run_dir)
    folder.make()
    return uvloop.run(_serve(config, folder))


GC_THRESHOLDS: Final = (5_000, 2_000, 20)
"""Objects that came and did not go, before Python looks for cycles among them. Groups make many
objects and no cycle; by default they would all be looked at every few hundred groups, for tens
of milliseconds."""


async def _serve(config: Config, folder: RunFolder) -> int:
    loop = asyncio.get_running_loop()
    async with Coordinator(config, run_dir=folder.path) as coordinator:
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        folder.prepare(config)  # not before the folder is ours: another one may be at work there
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, coordinator.stop, f"{number.name} received")
        return await coordinator.run_until_finished()
