"""`echo2 learner`: the learner, with an origin beside it that outlives it.

With `learner.ranks` above 1 this process starts the ranks, each of them this same command
again, and watches them; under torchrun, or as one of them, it is a rank.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from echo2.commands.extras import need_extras, need_trackers
from echo2.commands.learner_ranks import is_lead, is_rank, run_ranks
from echo2.commands.origin_process import end_origin, ensure_origin
from echo2.commands.processes import command_line
from echo2.commands.run_folder import RunFolder
from echo2.config import Config, load_config
from echo2.errors import ConfigError
from echo2.logs import setup_logging
from echo2_workers.environment import add_import_paths


def main(
    path: Path,
    run_dir: Path | None,
    overrides: list[str],
    *,
    resume: bool,
    with_origin: bool,
    replay: Path | None = None,
) -> int:
    """0 when the run finished, or after a signal and a checkpoint."""
    config = load_config(path, overrides)
    need_extras("learner")
    need_trackers(config.trackers)
    setup_logging(config.log.level, config.log.format)
    if replay is not None:
        return _replay(path, config, replay, run_dir, overrides, resume=resume)
    folder = RunFolder.of(config, run_dir)
    folder.make()
    settings = [word for override in overrides for word in ("--set", override)]
    arguments = [str(path), "--run-dir", str(folder.path), *settings]
    with_origin = with_origin and is_lead()
    if with_origin:
        ensure_origin(folder, arguments, timeout_s=config.net.connect_timeout_s)
    if config.learner.ranks > 1 and not is_rank():
        again = ["--resume"] if resume else []
        code = run_ranks(
            command_line("learner", *arguments, "--no-origin", *again),
            num_ranks=config.learner.ranks,
            logs=folder.logs,
        )
    else:
        code = _learn(path, folder, overrides, resume=resume)
    if with_origin and code == 0 and (folder.path / "final").exists():
        end_origin(folder)  # the run is over: nobody will ask any more
    return code


def _learn(path: Path, folder: RunFolder, overrides: list[str], *, resume: bool) -> int:
    add_import_paths(path.absolute().parent, Path.cwd())  # where a user's environment may lie
    learner = import_module("echo2_learner.main")  # torch takes seconds: after all checks
    return int(learner.main(path, folder.path, resume, overrides))


def _replay(
    path: Path,
    config: Config,
    source: Path,
    run_dir: Path | None,
    overrides: list[str],
    *,
    resume: bool,
) -> int:
    """Train on the rollouts that the run in `source` saved, into RUN-replay by default."""
    if resume:
        raise ConfigError("--replay begins anew each time; leave --resume out")
    source = source.absolute()
    folder = RunFolder(run_dir or source.with_name(f"{source.name}-replay"))
    if folder.path != source:  # the learner says what is wrong with that
        folder.prepare(config)
    add_import_paths(path.absolute().parent, Path.cwd())
    learner = import_module("echo2_learner.replay")
    return int(learner.main(path, source, folder.path, overrides))
