"""`echo2 learner`: the learner, with an origin beside it that outlives it."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from echo2.commands.extras import need_extras
from echo2.commands.origin_process import end_origin, ensure_origin
from echo2.commands.run_folder import RunFolder
from echo2.config import load_config
from echo2.logs import setup_logging
from echo2_workers.environment import add_import_paths


def main(
    path: Path, run_dir: Path | None, overrides: list[str], *, resume: bool, with_origin: bool
) -> int:
    """0 when the run finished, or after a signal and a checkpoint."""
    config = load_config(path, overrides)
    need_extras("learner")
    setup_logging(config.log.level, config.log.format)
    folder = RunFolder.of(config, run_dir)
    if with_origin:
        settings = [word for override in overrides for word in ("--set", override)]
        ensure_origin(
            folder,
            [str(path), "--run-dir", str(folder.path), *settings],
            timeout_s=config.net.connect_timeout_s,
        )
    add_import_paths(path.absolute().parent, Path.cwd())  # where a user's environment may lie
    learner = import_module("echo2_learner.main")  # torch takes seconds: after all checks
    code = int(learner.main(path, folder.path, resume, overrides))
    if with_origin and code == 0 and (folder.path / "final").exists():
        end_origin(folder)  # the run is over: nobody will ask any more
    return code
