"""`echo2 worker`: a worker daemon, with the run's configuration or with a join token."""

from __future__ import annotations

from pathlib import Path

from echo2.commands.extras import need_extras
from echo2.config import Config, load_config
from echo2.logs import setup_logging
from echo2_workers import daemon
from echo2_workers.joining import join_run


def main(
    path: Path | None, run_dir: Path | None, overrides: list[str], *, name: str, join: str = ""
) -> int:
    """0 when it was drained or the run is over."""
    if path is not None:
        _need_engine(load_config(path, overrides))
        return daemon.main(path, run_dir, name, overrides)
    setup_logging("info", "console")
    joined = join_run(join, run_dir, wanted=name, overrides=overrides)
    setup_logging(joined.config.log.level, joined.config.log.format)
    _need_engine(joined.config)
    return daemon.serve(joined.config, joined.run_dir, joined.identity, [Path.cwd()])


def _need_engine(config: Config) -> None:
    if config.worker.engine == "transformers":
        need_extras("worker")
