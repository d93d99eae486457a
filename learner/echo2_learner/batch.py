"""From the groups of a granted batch to tensors, with the staleness promise asserted.

Promise 1 of the design: no token is in the loss with staleness above S. The coordinator
enforces it three times; `read_batch` asserts it once more, at the version at which the
batch trains, and raises LearnerError instead of training.

Life-cycle of a batch: BatchGroup messages -> `read_batch` -> TrainingBatch -> `split_updates`
(one part per optimizer update, whole groups) -> `micro_batch.micro_batches` (tensors).

Letters: T tokens of one trajectory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo2.config_loss import LossTable
from echo2.core.lineage import Lineage
from echo2.errors import LearnerError
from echo2.messages import BatchGroup
from echo2.types import TrajectoryHeader, Version
from echo2_learner.advantage import loss_advantages
from echo2_learner.session import GrantedBatch

NO_VERSION = -1


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One trajectory, read-only views of the frames that a worker sent.

    `versions` [T] index into the batch's versions, NO_VERSION where no policy sampled.
    `loss_mask` [T] is `sampled` minus the tokens outside the window (late = "mask") and
    minus a token without any context, which no policy gives a probability.
    """

    group: str
    worker: str
    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    sampled: npt.NDArray[np.bool_]
    loss_mask: npt.NDArray[np.bool_]
    versions: npt.NDArray[np.int32]
    reward: float
    advantage: float

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def num_loss_tokens(self) -> int:
        return int(self.loss_mask.sum())


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """The batch of one learner step, trained at version `step`."""

    step: int
    versions: tuple[Version, ...]
    groups: tuple[tuple[Trajectory, ...], ...]

    @property
    def trajectories(self) -> Iterator[Trajectory]:
        return (trajectory for group in self.groups for trajectory in group)

    @property
    def num_loss_tokens(self) -> int:
        return sum(trajectory.num_loss_tokens for trajectory in self.trajectories)

    @property
    def reward_mean(self) -> float | None:
        rewards = [trajectory.reward for trajectory in self.trajectories]
        return float(np.mean(rewards)) if rewards else None

    def staleness(self) -> npt.NDArray[np.int64]:
        """Of every token in the loss, in order of groups, trajectories and tokens."""
        steps = np.array([version.step for version in self.versions], dtype=np.int64)
        found = [self.step - steps[t.versions[t.loss_mask]] for t in self.trajectories]
        return np.concatenate(found) if found else np.zeros(0, dtype=np.int64)


def read_batch(
    granted: GrantedBatch,
    *,
    staleness_max: int,
    lineage: Lineage,
    loss: LossTable,
    max_tokens: int,
    vocab_size: int,
) -> TrainingBatch:
    """Check and convert a granted batch. LearnerError when promise 1 would be broken.

    Advantages are those of the whole group, whether or not all its tokens are in the loss;
    `max_tokens` (sampling.max_tokens) is the length up to which `loss` may shape rewards.
    """
    versions = _Versions(granted.step, staleness_max=staleness_max, lineage=lineage)
    groups = []
    for group in granted.groups:
        if group.step != granted.step:
            raise LearnerError(
                f"group {group.group} was granted for step {group.step}, and this batch trains at "
                f"step {granted.step}; nothing was trained: start the learner again with --resume"
            )
        advantages = loss_advantages(
            [header.reward for header in group.trajectories],
            [header.num_sampled for header in group.trajectories],
            loss,
            tokens_max=max_tokens,
        )
        _check_vocabulary(group, vocab_size)
        groups.append(
            tuple(
                _trajectory(group, index, start, float(advantages[index]), granted, versions)
                for index, start in enumerate(_starts(group))
            )
        )
    return TrainingBatch(granted.step, tuple(versions.found), tuple(groups))


def split_updates(batch: TrainingBatch, num_updates: int) -> list[list[Trajectory]]:
    """Disjoint parts for `num_updates` optimizer updates, of whole groups, in order.

    Sizes differ by at most one group; with fewer groups than updates there are fewer parts.
    """
    num_parts = min(num_updates, len(batch.groups))
    bounds = [len(batch.groups) * i // num_parts for i in range(num_parts + 1)] if num_parts else []
    return [
        [trajectory for group in batch.groups[low:high] for trajectory in group]
        for low, high in itertools.pairwise(bounds)
    ]


class _Versions:
    """The versions of a batch, each checked once: existing, not above, in the line."""

    def __init__(self, step: int, *, staleness_max: int, lineage: Lineage) -> None:
        self.step = step
        self.staleness_max = staleness_max
        self.found: dict[Version, int] = {}
        self._lineage = lineage

    def index(self, version: Version, where: str) -> int:
        known = self.found.get(version)
        if known is not None:
            return known
        if version.step > self.step:
            raise LearnerError(
                f"{where} was sampled by version {version}, which is above v = {self.step}; "
                "no such version can exist yet. Nothing was trained. This is a fault of the "
                "coordinator: keep the run folder and report it"
            )
        if not self._lineage.is_alive(version):
            raise LearnerError(
                f"{where} was sampled by version {version}, which is not in the line of "
                f"incarnation {self._lineage.incarnation} (incarnations and their first steps: "
                f"{self._lineage.starts}). Nothing was trained. This is a fault of the "
                "coordinator: keep the run folder and report it"
            )
        return self.found.setdefault(version, len(self.found))

    def check_staleness(self, version: Version, where: str) -> None:
        staleness = self.step - version.step
        if staleness > self.staleness_max:
            raise LearnerError(
                f"{where} was sampled by version {version} and would be in the loss at step "
                f"{self.step} with staleness {staleness}; staleness.max is {self.staleness_max}. "
                "Nothing was trained. This is a fault of the coordinator: keep the run folder "
                "and report it"
            )


def _starts(group: BatchGroup) -> list[int]:
    """Where each trajectory starts in the frames, which must hold just their tokens."""
    bounds = np.cumsum([0, *(header.length for header in group.trajectories)])
    for name, unit in (("token_ids", 4), ("logprobs", 4), ("loss_mask", 1)):
        size = len(getattr(group, name))
        if size != bounds[-1] * unit:
            raise LearnerError(
                f"group {group.group}: frame {name} has {size} bytes, and its {bounds[-1]} tokens "
                f"need {bounds[-1] * unit}; nothing was trained: restart with --resume"
            )
    return [int(bound) for bound in bounds[:-1]]


def _check_vocabulary(group: BatchGroup, vocab_size: int) -> None:
    token_ids = np.frombuffer(group.token_ids, np.dtype("<i4"))
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise LearnerError(
            f"group {group.group} from worker {group.worker} holds token ids from "
            f"{token_ids.min()} to {token_ids.max()}; the model knows 0 to {vocab_size - 1}. "
            "Nothing was trained: give worker and learner the same model and tokenizer"
        )


def _trajectory(
    group: BatchGroup,
    index: int,
    start: int,
    advantage: float,
    granted: GrantedBatch,
    versions: _Versions,
) -> Trajectory:
    header = group.trajectories[index]
    where = f"group {group.group}, trajectory {index}"
    token_ids = np.frombuffer(group.token_ids, np.dtype("<i4"), header.length, start * 4)
    logprobs = np.frombuffer(group.logprobs, np.dtype("<f4"), header.length, start * 4)
    sampled = np.frombuffer(group.loss_mask, np.uint8, header.length, start) == 1
    version_of = _version_indexes(header, where, versions)
    if np.any(sampled & (version_of == NO_VERSION)):
        token = int(np.argmax(sampled & (version_of == NO_VERSION)))
        raise LearnerError(
            f"{where}: token {token} was sampled, but no span says by which version, so its "
            "staleness is unknown. Nothing was trained: restart with --resume"
        )
    loss_mask = sampled.copy()
    loss_mask[0] = False
    for span in header.spans:
        if span.version.step < granted.loss_from_step:
            loss_mask[span.start : span.end] = False
        elif loss_mask[span.start : span.end].any():
            versions.check_staleness(span.version, f"{where}, tokens {span.start} to {span.end}")
    if not np.isfinite(logprobs[loss_mask]).all():
        raise LearnerError(
            f"{where} from worker {group.worker} holds a behaviour logprob that is not finite. "
            "Nothing was trained: restart with --resume, and look at that worker"
        )
    return Trajectory(
        group=group.group,
        worker=group.worker,
        token_ids=token_ids,
        logprobs=logprobs,
        sampled=sampled,
        loss_mask=loss_mask,
        versions=version_of,
        reward=header.reward,
        advantage=advantage,
    )


def _version_indexes(
    header: TrajectoryHeader, where: str, versions: _Versions
) -> npt.NDArray[np.int32]:
    version_of = np.full(header.length, NO_VERSION, dtype=np.int32)
    for span in header.spans:
        version_of[span.start : span.end] = versions.index(
            span.version, f"{where}, tokens {span.start} to {span.end}"
        )
    return version_of
