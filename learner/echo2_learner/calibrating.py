"""How long this machine's learner takes for a step, and for a version, on groups just sampled.

    build --> publish --> [ step --> publish ] ... with the loop's own verbs, without a coordinator

A step reads the batch, trains, compares logprobs where that is due, and publishes, as
`loop.Loop.do_step` does; evals, checkpoints and records are left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformers.utils import logging

from echo2.config import Config
from echo2.core.lineage import Lineage
from echo2.learner_client import Batch
from echo2.messages import BatchGranted, BatchGroup, VersionPublished
from echo2.types import Task, Version
from echo2_learner.batch import read_batch
from echo2_learner.rank_parts import RankParts, build_rank_parts
from echo2_learner.ranks import ALONE
from echo2_learner.tasks import Tasks
from echo2_workers.environment import load_environment
from echo2_workers.models import model_folder

INCARNATION = 1
STALENESS_ANY = 1 << 20
"""What is timed need not be admissible."""
VERSIONS_KEPT = 2


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds; `delta_bytes` None where no delta was made."""

    train_s: float
    publish_s: float
    num_bytes: int
    delta_bytes: int | None


@dataclass(slots=True)
class BusyLearner:
    """`step` counts what was trained here. `published` is the newest version."""

    parts: RankParts
    tasks: Tasks
    model: Path
    published: VersionPublished
    step: int = 0
    lineage: Lineage = field(default_factory=Lineage)

    @classmethod
    def build(cls, config: Config, run_dir: Path) -> BusyLearner:
        """Reads model and environment, and publishes version 0. ConfigError when they do not fit;
        an origin must serve `run_dir`."""
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        parts = build_rank_parts(config, run_dir, resume=False, ranks=ALONE)
        model = model_folder(config.model.path)
        environment = load_environment(config.environment.name, config.environment.settings, model)
        published = parts.publisher.publish(Version(INCARNATION, 0))
        learner = cls(parts, Tasks(environment), model, published)
        learner.lineage.begin(INCARNATION, 0)
        return learner

    def task(self, number: int) -> Task:
        """A training task; those of a small data set come again."""
        tasks, _ = self.tasks.train(number, 1)
        if tasks:
            return tasks[0]
        total = self.tasks.train(0, number)[0]
        return total[number % len(total)]

    def do_step(self, groups: Sequence[BatchGroup]) -> StepTimes:
        """Train on these as one batch, and publish."""
        config, parts, step = self.parts.config, self.parts, self.step
        began = time.perf_counter()
        granted = Batch(
            step=step,
            loss_from_step=0,
            groups=list(groups),
            granted=BatchGranted(
                incarnation=INCARNATION,
                step=step,
                loss_from_step=0,
                groups=tuple(group.group for group in groups),
                last=False,
            ),
            last=False,
        )
        batch = read_batch(
            granted,
            staleness_max=STALENESS_ANY,
            lineage=self.lineage,
            loss=config.learner.loss,
            max_tokens=config.sampling.max_tokens,
            vocab_size=parts.policy.vocab_size,
        )
        parts.trainer.step(batch)
        if parts.check.is_due(step):
            parts.check.check(batch)
        trained = time.perf_counter()
        self.step = step + 1
        self.published = parts.publisher.publish(Version(INCARNATION, self.step))
        done = time.perf_counter()
        parts.publisher.prune(self.step - VERSIONS_KEPT)
        deltas = [delta.num_bytes for delta in self.published.deltas]
        return StepTimes(
            train_s=trained - began,
            publish_s=done - trained,
            num_bytes=self.published.num_bytes,
            delta_bytes=min(deltas) if deltas else None,
        )
