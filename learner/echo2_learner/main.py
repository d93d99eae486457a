"""Starts a learner process: configuration, session, loop, and a clean end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from echo2.config import load_config
from echo2.errors import FencedError, RunEndedError
from echo2.learner_session import LearnerSession
from echo2_learner.loop import train
from echo2_learner.parts import Parts, build
from echo2_learner.session import Session
from echo2_learner.stop import StopRequested, StopSignal


def main(
    config_path: str | Path,
    run_dir: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[str] = (),
) -> int:
    """Run a learner to its end. Returns 0 when the run finished or a signal stopped it (a
    checkpoint was written); raises FencedError, ConfigError or another Echo2Error."""
    config = load_config(config_path, overrides)
    folder = Path(run_dir) if run_dir is not None else Path(config.run.dir) / config.run.name
    with StopSignal() as stop:
        parts = build(config, folder, resume=resume)
        session: Session = LearnerSession(
            config,
            folder,
            tasks=parts.tasks.train,
            environment_version=parts.environment.version,
        )
        again = f"echo2 learner {config_path} --run-dir {folder} --resume"
        return run(parts, session, stop, again=again)


def run(parts: Parts, session: Session, stop: StopSignal, *, again: str) -> int:
    """Train with `session`, which is closed in any case; `again` is how to resume."""
    try:
        finished = train(parts, session, stop)
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
    if finished:
        print(f"finished; the final weights are in {parts.run_dir / 'final'}")
    else:
        kept = "no checkpoint yet" if parts.saved_step is None else f"step {parts.saved_step}"
        print(f"stopped by {stop.requested}, newest checkpoint: {kept}; go on with: {again}")
    return 0
