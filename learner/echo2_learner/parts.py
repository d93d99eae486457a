"""What a learner is made of, put together from the configuration, and its small verbs.

The loop says when; here is how. Life-cycle: `build` (files are read, nothing is written) ->
`begin` (the coordinator gave an incarnation: this learner owns the run folder) -> train,
publish, write_line, save_checkpoint, save_final.

Of several ranks these are the parts of rank 0; what every rank holds is in `rank_parts`, and
each verb that needs the others begins with an order to them, which `follow` carries out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import structlog
from safetensors import SafetensorError

from echo2.config import Config
from echo2.core.lineage import Lineage
from echo2.errors import ConfigError, LearnerError
from echo2.messages import BatchGroup, LearnerWelcome
from echo2.types import Version
from echo2_learner.batch import TrainingBatch, read_batch
from echo2_learner.batch_bytes import batch_to_bytes
from echo2_learner.checkpoint import CheckpointState
from echo2_learner.final_folder import save_final_folder
from echo2_learner.logprob_check import CheckResult
from echo2_learner.metrics import MetricsFile
from echo2_learner.rank_parts import RankParts, build_rank_parts
from echo2_learner.ranks import ALONE, Ranks
from echo2_learner.rollout_files import RolloutFiles
from echo2_learner.session import GrantedBatch, Session
from echo2_learner.tasks import Tasks
from echo2_learner.trackers import Trackers
from echo2_learner.trainer import StepMetrics
from echo2_workers.environment import Environment, load_environment
from echo2_workers.models import model_folder

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Parts(RankParts):
    """`incarnation` and `lineage` are set by `begin`; `published` is the last step that was."""

    environment: Environment
    tasks: Tasks
    metrics: MetricsFile
    rollouts: RolloutFiles
    trackers: Trackers
    incarnation: int = 0
    run_id: str = ""
    lineage: Lineage = field(default_factory=Lineage)
    published: Version | None = None
    saved_step: int | None = None
    next_task_index: int = 0
    groups_trained: int = 0

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
        with _disk_errors("learner.json and metrics.jsonl", self.run_dir):
            self.checkpoints.claim(welcome.incarnation)
            self.metrics.mend()
        self.rollouts.begin(welcome.step)
        self.trackers.begin(resume_step=welcome.step, run_id=welcome.run_id)
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
            loss=self.config.learner.loss,
            max_tokens=self.config.sampling.max_tokens,
            vocab_size=self.policy.vocab_size,
        )

    def train(self, batch: TrainingBatch) -> StepMetrics:
        """One learner step, on all ranks."""
        if self.ranks.size > 1:
            self.ranks.order("train", batch_to_bytes(batch))
        return self.trainer.step(batch)

    def compare(self, batch: TrainingBatch) -> CheckResult:
        """The log-probability check of the batch that was trained last."""
        self.ranks.order("check", known=self.publisher.versions.known())
        return self.check.check(batch)

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
        with _disk_errors(f"the line of step {line['step']}", self.run_dir):
            self.metrics.append(line)
        self.trackers.log(line)

    def save_rollouts(
        self, granted: GrantedBatch, batch: TrainingBatch, check: CheckResult
    ) -> None:
        """Keep the batch that was trained in RUN/rollouts, if that is wanted and possible."""
        self.rollouts.save(
            granted,
            batch,
            incarnation=self.incarnation,
            run_id=self.run_id,
            mismatch=check.by_worker,
            start_logprobs=self.trainer.start_logprobs,
        )

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
        with _disk_errors("the final weights", self.run_dir):
            save_final_folder(self.policy, self.run_dir / "final", self.ranks)


@contextlib.contextmanager
def _disk_errors(what: str, folder: Path) -> Iterator[None]:
    """What the disk does not take ends the learner in a sentence; its checkpoints are whole."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        cause = getattr(error, "strerror", None) or str(error)
        raise LearnerError(
            f"{what} could not be written to {folder} ({cause}); free space there, then start the "
            "learner again with --resume"
        ) from error


def build(config: Config, run_dir: Path, *, resume: bool, ranks: Ranks = ALONE) -> Parts:
    """Read model, environment and the newest checkpoint. ConfigError when they do not fit.

    With `resume` and without any checkpoint the run starts at step 0: the learner may have
    died before the first one.
    """
    trackers = Trackers(config, run_dir)
    held = build_rank_parts(config, run_dir, resume=resume, ranks=ranks)
    environment = load_environment(
        config.environment.name, config.environment.settings, model_folder(config.model.path)
    )
    if config.audit.share and not getattr(type(environment), "replays", False):
        raise ConfigError(
            f"audit.share is {config.audit.share:g}, and the rewards of environment "
            f"{config.environment.name!r} cannot be recomputed: its class does not say replays = "
            "True (a rollout is a function of its task and of what the policy says); set it there, "
            "or audit.share = 0"
        )
    return Parts(
        **{part.name: getattr(held, part.name) for part in fields(held)},
        environment=environment,
        tasks=Tasks(environment),
        metrics=MetricsFile(run_dir / "metrics.jsonl"),
        rollouts=RolloutFiles(run_dir, config.rollouts),
        trackers=trackers,
    )
