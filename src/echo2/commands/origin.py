"""`echo2 origin`: the process that serves a run folder's versions to the workers."""

from __future__ import annotations

from pathlib import Path

from echo2.commands.run_folder import RunFolder
from echo2.config import load_config
from echo2.logs import setup_logging
from echo2.weights.origin import run_origin


def main(path: Path, run_dir: Path | None, overrides: list[str]) -> int:
    config = load_config(path, overrides)
    setup_logging(config.log.level, config.log.format)
    folder = RunFolder.of(config, run_dir)
    folder.make()
    return run_origin(config, folder.path)
