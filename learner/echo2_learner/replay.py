"""Training on saved rollouts alone: no coordinator, no workers, the same steps in order.

From the same weights, on the same machine, with the same settings of the learner, a replay
computes the same losses, gradients and weights as the run did, bit by bit. It starts where
the saved rollouts start: at step 0 with the model of the configuration, or, when the first
steps were not kept, from the checkpoint of the run that precedes the first kept ones.

What is left out: versions are not published, so logprobs cannot be compared with the version
that sampled, and no evals are played. Incarnations of the run are one line here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import structlog

from echo2.config import Config, load_config
from echo2.errors import ConfigError, LearnerError
from echo2.learner_client import Batch
from echo2.messages import (
    BatchGroup,
    EvalResult,
    LearnerWelcome,
    VersionPublished,
)
from echo2.types import GroupMismatch, Sampling, Span, Task, TrajectoryHeader, Version
from echo2_learner.checkpoint import Checkpoint, read_checkpoint
from echo2_learner.main import run
from echo2_learner.parts import Parts, build
from echo2_learner.publish import Publisher
from echo2_learner.rollout_files import FOLDER, read_saved_batch, saved_steps
from echo2_learner.session import Session
from echo2_learner.stop import StopSignal

log = structlog.get_logger(__name__)

BEFORE: Final = 1
"""Incarnation of what was before the replay."""
REPLAYED: Final = 2


class ReplaySession:
    """The learner's session, out of files: `steps` maps step of a metrics' line to file."""

    def __init__(self, steps: dict[int, Path], *, resume_step: int) -> None:
        self._steps = steps
        self._resume_step = resume_step

    def start(
        self, *, resume_step: int, digest: str = "", checkpoint_steps: Sequence[int] = ()
    ) -> LearnerWelcome:
        return LearnerWelcome(
            protocol=0,
            run_id="replay",
            incarnation=REPLAYED,
            step=self._resume_step,
            heartbeat_interval_s=0.0,
            silence_max_s=0.0,
        )

    def next_batch(self, step: int) -> Batch | None:
        path = self._steps.get(step + 1)
        if path is None:
            return None
        saved = read_saved_batch(path)
        granted = replace(saved.granted, incarnation=REPLAYED)
        groups = [self._replayed(group) for group in saved.groups]
        last = saved.last or step + 2 not in self._steps
        return Batch(step, saved.loss_from_step, groups, granted, last)

    def complete(
        self, step: int, *, train_s: float, wait_s: float, mismatch: Sequence[GroupMismatch]
    ) -> None:
        print(f"step {step + 1}: replayed in {train_s:.2f} s", flush=True)

    def publish(self, message: VersionPublished) -> int:
        return message.version.step

    def checkpoint_saved(self, step: int, kept: Sequence[int]) -> None:
        log.debug("checkpoint_kept", step=step, kept=list(kept))

    def evaluate(
        self, version: Version, tasks: Sequence[Task], sampling: Sampling, group_size: int
    ) -> str:
        raise LearnerError("a replay has no workers that could play an eval")

    def poll_evals(self) -> Sequence[EvalResult]:
        return ()

    def wait_eval(self, eval_id: str, timeout_s: float) -> EvalResult:
        raise LearnerError("a replay has no workers that could play an eval")

    def say(self, text: str) -> None:
        log.debug("learner_state", text=text)

    @property
    def tasks_ended(self) -> bool:
        return False  # it ends with the rollouts that were saved

    def close(self, reason: str, *, finished: bool, missing_steps: int = 0) -> None:
        log.info("replay_ended", reason=reason, finished=finished)

    def _replayed(self, group: BatchGroup) -> BatchGroup:
        headers = tuple(self._header(header) for header in group.trajectories)
        return replace(group, incarnation=REPLAYED, trajectories=headers)

    def _header(self, header: TrajectoryHeader) -> TrajectoryHeader:
        def version(step: int) -> Version:
            return Version(REPLAYED if step >= self._resume_step else BEFORE, step)

        spans = tuple(Span(version(s.version.step), s.start, s.end) for s in header.spans)
        return replace(header, spans=spans)


class Unpublished(Publisher):
    """Names versions that nobody will fetch."""

    def __init__(self, publisher: Publisher) -> None:
        self.policy = publisher.policy
        self.scratch = publisher.scratch
        self.versions = publisher.versions

    def publish(self, version: Version, *, final: bool = False) -> VersionPublished:
        return VersionPublished(
            version=version,
            manifest_digest="0" * 64,
            assets_digest="",
            num_bytes=0,
            origin="",
            origin_key="",
            final=final,
            vocab_size=self.policy.vocab_size,
        )

    def prune(self, keep_from: int) -> None:
        """There is nothing to let go of."""


def main(
    config_path: str | Path, source: Path, run_dir: Path, overrides: Sequence[str] = ()
) -> int:
    """Replay the run in `source` into `run_dir`. Raises ConfigError when it cannot be done."""
    config = replay_config(load_config(config_path, overrides))
    parts, session = prepare(config, source, run_dir)
    with StopSignal() as stop:
        return run(
            parts, session, stop, again=f"the same command with another --run-dir ({source})"
        )


def replay_config(config: Config) -> Config:
    """The configuration without what a replay has not."""
    if config.learner.ranks > 1:
        raise ConfigError(
            f"learner.ranks is {config.learner.ranks}; a replay runs in one process: add --set "
            "learner.ranks=1"
        )
    return config.model_copy(
        update={
            "eval": config.eval.model_copy(update={"every_steps": 0}),
            "rollouts": config.rollouts.model_copy(update={"keep_steps": 0}),
        }
    )


def prepare(config: Config, source: Path, run_dir: Path) -> tuple[Parts, Session]:
    """The parts of a learner that stands where the saved rollouts begin, and their session."""
    if run_dir.resolve() == source.resolve():
        raise ConfigError(
            f"{run_dir} is the run that is to be replayed; give another --run-dir, which will hold "
            "the replay's metrics, checkpoints and final weights"
        )
    steps = saved_steps(source / FOLDER)
    if not steps:
        raise ConfigError(
            f"{source / FOLDER} holds no saved rollouts; a run saves them with "
            "rollouts.keep_steps above 0"
        )
    start = _start(source, steps)
    parts = build(config, run_dir, resume=False)
    resume_step = 0
    if start is not None:
        start.restore(parts.policy, parts.trainer)
        resume_step = start.state.step
        state = replace(start.state, starts=((BEFORE, 0),), incarnation=BEFORE)
        parts.resumed = replace(start, state=state)
    parts.publisher = Unpublished(parts.publisher)
    chosen = _in_a_row(steps, resume_step)
    print(f"replays steps {resume_step + 1} to {max(chosen)} of {source}", flush=True)
    return parts, ReplaySession(chosen, resume_step=resume_step)


def _start(source: Path, steps: dict[int, Path]) -> Checkpoint | None:
    """The earliest checkpoint whose next step is saved; None: the beginning of the run."""
    if 1 in steps:
        return None
    folders = sorted((source / "checkpoints").glob("step-*-i*"), key=lambda path: path.name)
    problems = []
    for folder in folders:
        try:
            checkpoint = read_checkpoint(folder)
        except LearnerError as error:
            problems.append(f"{folder.name}: {error}")
            continue
        if checkpoint.state.step + 1 in steps:
            return checkpoint
        problems.append(f"{folder.name}: step {checkpoint.state.step + 1} is not saved")
    raise ConfigError(
        f"the saved rollouts of {source} begin at step {min(steps)}, and no checkpoint leads there "
        f"({'; '.join(problems) or 'there is none'}); a whole run is kept with "
        "rollouts.keep_steps = learner.steps"
    )


def _in_a_row(steps: dict[int, Path], resume_step: int) -> dict[int, Path]:
    """The saved steps after `resume_step`, up to the first that is missing."""
    chosen: dict[int, Path] = {}
    step = resume_step + 1
    while step in steps:
        chosen[step] = steps[step]
        step += 1
    if step < max(steps):
        log.warning(
            "replay_cut_short",
            reason=f"step {step} was not saved; the {max(steps) - step} steps after it cannot be "
            "trained as the run did",
        )
    return chosen
