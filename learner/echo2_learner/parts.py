"""What a learner is made of, put together from the configuration, and its small verbs.

The loop says when; here is how. Life-cycle: `build` (files are read, nothing is written) ->
`begin` (the coordinator gave an incarnation: this learner owns the run folder) -> publish,
write_line, save_checkpoint, save_final.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from echo2.config import Config
from echo2.core.lineage import Lineage
from echo2.errors import ConfigError, LearnerError
from echo2.messages import BatchGroup, LearnerWelcome
from echo2.types import Version
from echo2_learner.batch import TrainingBatch, read_batch
from echo2_learner.checkpoint import Checkpoint, CheckpointState, CheckpointStore
from echo2_learner.logprob_check import LogprobCheck
from echo2_learner.metrics import MetricsFile
from echo2_learner.policy import DTYPES, Policy, choose_device
from echo2_learner.publish import Publisher
from echo2_learner.session import GrantedBatch, Session
from echo2_learner.tasks import Tasks
from echo2_learner.trainer import Trainer
from echo2_workers.environment import Environment, load_environment
from echo2_workers.models import model_folder

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Parts:
    """`incarnation` and `lineage` are set by `begin`; `published` is the last step that was."""

    config: Config
    run_dir: Path
    environment: Environment
    tasks: Tasks
    policy: Policy
    trainer: Trainer
    publisher: Publisher
    check: LogprobCheck
    checkpoints: CheckpointStore
    metrics: MetricsFile
    resumed: Checkpoint | None
    incarnation: int = 0
    run_id: str = ""
    lineage: Lineage = field(default_factory=Lineage)
    published: Version | None = None
    saved_step: int | None = None
    next_task_index: int = 0
    groups_trained: int = 0

    @property
    def resume_step(self) -> int:
        return self.resumed.state.step if self.resumed else 0

    def begin(self, welcome: LearnerWelcome) -> None:
        """Take the seat: the line goes on under this incarnation, and the folder is ours."""
        if welcome.step != self.resume_step:
            raise LearnerError(
                f"the coordinator is at step {welcome.step}, and this learner resumed at step "
                f"{self.resume_step}; start the coordinator again, then the learner with --resume"
            )
        self.incarnation, self.run_id = welcome.incarnation, welcome.run_id
        if self.resumed is not None:
            state = self.resumed.state
            # A coordinator that lost its records counts incarnations from 1 again.
            for incarnation, step in state.starts:
                if incarnation < welcome.incarnation:
                    self.lineage.begin(incarnation, step)
            self.next_task_index, self.groups_trained = state.next_task_index, state.groups_trained
            self.saved_step = state.step
        self.lineage.begin(welcome.incarnation, welcome.step)
        self.checkpoints.claim(welcome.incarnation)
        self.metrics.mend()
        self.publisher.versions.find(self.lineage)
        log.info("learner_started", incarnation=self.incarnation, step=self.resume_step)

    def version(self, step: int) -> Version:
        return Version(self.incarnation, step)

    def read(self, granted: GrantedBatch, step: int) -> TrainingBatch:
        """Convert the batch to train at v = `step`; promise 1 is asserted here."""
        if granted.step != step:
            raise LearnerError(
                f"the coordinator granted the batch of step {granted.step}, and v is {step}; "
                "nothing was trained: start the learner again with --resume"
            )
        return read_batch(
            granted,
            staleness_max=self.config.staleness.max,
            lineage=self.lineage,
            advantage_epsilon=self.config.learner.loss.advantage_epsilon,
            vocab_size=self.policy.vocab_size,
        )

    def count(self, groups: Sequence[BatchGroup]) -> None:
        self.groups_trained += len(groups)
        self.next_task_index = max([self.next_task_index, *(g.task.index + 1 for g in groups)])

    def publish(self, session: Session, step: int, *, final: bool = False) -> None:
        """Publish version `step`, and let go of those that nobody needs any more."""
        self.checkpoints.check_claim()
        session.say(f"publishes version {step}")
        message = self.publisher.publish(self.version(step), final=final)
        keep_from = session.publish(message)
        self.published = message.version
        self.publisher.prune(keep_from)

    def write_line(self, line: Mapping[str, Any]) -> None:
        self.checkpoints.check_claim()
        self.metrics.append(line)

    def save_checkpoint(self, session: Session | None, step: int) -> None:
        """Write the checkpoint of v = `step`, unless it is there; without a session nobody is
        told (the coordinator has ended)."""
        if self.saved_step == step:
            return
        state = CheckpointState(
            step=step,
            incarnation=self.incarnation,
            run_id=self.run_id,
            starts=tuple(self.lineage.starts),
            next_task_index=self.next_task_index,
            groups_trained=self.groups_trained,
        )
        kept = self.checkpoints.save(state, self.policy, self.trainer)
        self.saved_step = step
        log.info("checkpoint_saved", step=step, kept=kept)
        if session is not None:
            session.checkpoint_saved(step, kept)

    def save_final(self) -> None:
        """RUN/final: the policy as a Hugging Face folder, whole or not there."""
        self.checkpoints.check_claim()
        aside = self.run_dir / f".final-{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        self.policy.save(aside)
        shutil.rmtree(self.run_dir / "final", ignore_errors=True)
        aside.rename(self.run_dir / "final")


def build(config: Config, run_dir: Path, *, resume: bool) -> Parts:
    """Read model, environment and the newest checkpoint. ConfigError when they do not fit.

    With `resume` and without any checkpoint the run starts at step 0: the learner may have
    died before the first one.
    """
    table = config.learner
    checkpoints = CheckpointStore(run_dir, keep=config.checkpoint.keep)
    if not resume and checkpoints.exists():
        raise ConfigError(
            f"{run_dir} holds checkpoints of a run that was started before; go on with --resume, "
            "or choose another --run-dir"
        )
    if table.threads:
        torch.set_num_threads(table.threads)
    seed_all(config.run.seed)
    folder = model_folder(config.model.path)
    device = choose_device(table.device)
    policy = Policy.load(folder, device=device)
    reference = Policy.load(folder, device=device) if table.loss.kl_coefficient > 0 else None
    temperature = config.sampling.temperature
    trainer = Trainer(policy, table, temperature=temperature, reference=reference)
    publisher = Publisher(
        policy,
        run_dir,
        dtype=DTYPES[config.model.dtype],
        run_name=config.run.name,
        origin_timeout_s=config.net.connect_timeout_s,
    )
    resumed = checkpoints.newest() if resume else None
    if resumed is not None:
        resumed.restore(policy, trainer)
    environment = load_environment(config.environment.name, config.environment.settings, folder)
    return Parts(
        config=config,
        run_dir=run_dir,
        environment=environment,
        tasks=Tasks(environment),
        policy=policy,
        trainer=trainer,
        publisher=publisher,
        check=LogprobCheck(publisher.versions, publisher.scratch, table, temperature=temperature),
        checkpoints=checkpoints,
        metrics=MetricsFile(run_dir / "metrics.jsonl"),
        resumed=resumed,
    )


def seed_all(seed: int) -> None:
    """Seed torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
