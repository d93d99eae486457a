"""`echo2 worker`: a worker daemon."""

from __future__ import annotations

from pathlib import Path

from echo2.commands.extras import need_extras
from echo2.config import load_config
from echo2_workers import daemon


def main(path: Path, run_dir: Path | None, overrides: list[str], *, name: str) -> int:
    """0 when it was drained or the run is over."""
    if load_config(path, overrides).worker.engine == "transformers":
        need_extras("worker")
    return daemon.main(path, run_dir, name, overrides)
