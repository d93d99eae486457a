"""Starts a learner process: configuration, ranks, session, loop, and a clean end."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import structlog

from echo2.cli import EXIT_OUT_OF_TASKS
from echo2.config import Config, load_config
from echo2.errors import FencedError, RunEndedError
from echo2.learner_session import LearnerSession
from echo2_learner.follow import follow
from echo2_learner.loop import End, train
from echo2_learner.parts import Parts, build
from echo2_learner.rank_parts import build_rank_parts
from echo2_learner.ranks import RankLostError, Ranks, is_lost, join
from echo2_learner.session import Session
from echo2_learner.stop import StopRequested, StopSignal

log = structlog.get_logger(__name__)

EXIT_RANK_LOST = 4
"""Of a rank that ended because another one had: the launcher looks for the cause there."""


def main(
    config_path: str | Path,
    run_dir: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
) -> int:
    """Run a learner to its end, or one rank of it. Returns 0 when the run finished or a signal
    stopped it (a checkpoint was written), EXIT_OUT_OF_TASKS when the tasks ended before its last
    step, EXIT_RANK_LOST when another rank ended before;
    raises FencedError, ConfigError or another Echo2Error."""
    config = load_config(config_path, overrides)
    folder = Path(run_dir) if run_dir is not None else Path(config.run.dir) / config.run.name
    # torchrun starts all ranks again after one died, with the same command line.
    resume = resume or int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    again = f"echo2 learner {config_path} --run-dir {folder} --resume"
    try:
        with join(config.learner) as ranks:
            if ranks.is_lead:
                return lead(config, folder, ranks, resume=resume, again=again)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)  # rank 0 decides, and says when it is over
            follow(build_rank_parts(config, folder, resume=resume, ranks=ranks))
            return 0
    except (RuntimeError, RankLostError) as error:
        if not is_lost(error):
            raise
        log.warning("rank_lost", reason=str(error))  # its launcher tells which one, and why
        return EXIT_RANK_LOST


def lead(config: Config, folder: Path, ranks: Ranks, *, resume: bool, again: str) -> int:
    """Rank 0, or the one process of a learner: it alone talks to the coordinator."""
    with StopSignal() as stop:
        parts = build(config, folder, resume=resume, ranks=ranks)
        session: Session = LearnerSession(
            config,
            folder,
            tasks=parts.tasks.train,
            environment_version=parts.environment.version,
        )
        return run(parts, session, stop, again=again)


def run(parts: Parts, session: Session, stop: StopSignal, *, again: str) -> int:
    """Train with `session`, which is closed in any case; `again` is how to resume."""
    try:
        end = train(parts, session, stop)
    except StopRequested:
        session.close(f"stopped by {stop.requested} before the first step", finished=False)
        print(f"stopped by {stop.requested} before the first step")
        return 0
    except RunEndedError as error:
        session.close("the coordinator ended", finished=False)
        if not error.finished:
            raise
        print(f"{error}; the final weights are in {parts.run_dir / 'final'}")
        return 0
    except FencedError:
        session.close("fenced", finished=False)
        raise
    except BaseException as error:
        session.close(f"failed: {type(error).__name__}: {error}"[:1000], finished=False)
        raise
    finally:
        parts.trackers.close()
    if end is End.OUT_OF_TASKS:
        print(
            f"ended before step {parts.config.learner.steps} (learner.steps): the tasks are used "
            f"up; the weights until then are in {parts.run_dir / 'final'}"
        )
        return EXIT_OUT_OF_TASKS
    if end is End.FINISHED:
        print(f"finished; the final weights are in {parts.run_dir / 'final'}")
    else:
        kept = "no checkpoint yet" if parts.saved_step is None else f"step {parts.saved_step}"
        print(f"stopped by {stop.requested}, newest checkpoint: {kept}; go on with: {again}")
    return 0
