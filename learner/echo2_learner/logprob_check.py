"""Recomputes behaviour logprobs with the very version that sampled them.

The learner's own logprobs at θ_old differ from the worker's for two reasons: staleness, and
what the engine computes differently. This check takes staleness out: it loads each version
that sampled, as published, and compares. What is left is the engine's numerics, or a fault
(wrong weights, wrong version span, wrong temperature).

In a trajectory that several versions sampled, only the tokens before the first change count:
afterwards an engine may go on with a key-value cache of the old weights, which no single
version reproduces.

Every worker gets its turn: one trajectory of each after the other, beginning with those of which
the fewest tokens were compared so far, so that none is left out however long its rollouts are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from echo2.config import LearnerTable
from echo2.types import GroupId, GroupMismatch, Version
from echo2_learner.batch import NO_VERSION, TrainingBatch, Trajectory
from echo2_learner.micro_batch import padded
from echo2_learner.packing import padded_runs
from echo2_learner.policy import Policy
from echo2_learner.publish import PublishedVersions

REPORTED_TOKENS_MIN: Final = 1000
"""A mean over fewer tokens is not reported: it goes on with the next batch."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """`diff_mean` is mean |logprob learner - logprob worker| over `tokens` tokens, null
    while there are too few; `by_worker` and `by_group` hold the means of this check alone."""

    diff_mean: float | None = None
    tokens: int = 0
    by_worker: dict[str, float] = field(default_factory=dict)
    by_group: tuple[GroupMismatch, ...] = ()


class LogprobCheck:
    """Owns the sums that are carried from one check to the next. Borrows `scratch`."""

    def __init__(
        self,
        versions: PublishedVersions,
        scratch: Policy,
        table: LearnerTable,
        *,
        temperature: float,
    ) -> None:
        self._versions = versions
        self._scratch = scratch
        self._table = table
        self._temperature = temperature
        self._sum = 0.0
        self._tokens = 0
        self._compared: Counter[str] = Counter()

    def is_due(self, step: int) -> bool:
        """Every `logprob_check_every_steps` steps, and until a mean has enough tokens."""
        return self._tokens > 0 or step % self._table.logprob_check_every_steps == 0

    def check(self, batch: TrainingBatch) -> CheckResult:
        """Compare at least `logprob_check_tokens` tokens, or all that can be compared.

        Tokens of versions that are no longer kept are left out.
        """
        sums: dict[tuple[str, str], tuple[float, int]] = {}
        for version, rows in self._chosen(batch).items():
            self._versions.load(version, self._scratch)
            rows.sort(key=lambda row: row[0].length)
            lengths = [trajectory.length for trajectory, _ in rows]
            for some in padded_runs(lengths, tokens_max=self._table.micro_batch_tokens):
                chosen = rows[some.start : some.stop]
                for (trajectory, mask), diffs in zip(chosen, self._diffs(chosen), strict=True):
                    place = trajectory.worker, trajectory.group
                    total, tokens = sums.get(place, (0.0, 0))
                    sums[place] = total + float(diffs[mask].sum()), tokens + int(mask.sum())
        self._sum += sum(total for total, _ in sums.values())
        self._tokens += sum(tokens for _, tokens in sums.values())
        by_worker = _by_worker(sums)
        by_group = tuple(
            GroupMismatch(GroupId(group), tokens, total / tokens)
            for (_, group), (total, tokens) in sums.items()
        )
        if self._tokens < REPORTED_TOKENS_MIN:
            return CheckResult(by_worker=by_worker, by_group=by_group)
        result = CheckResult(self._sum / self._tokens, self._tokens, by_worker, by_group)
        self._sum, self._tokens = 0.0, 0
        return result

    def _chosen(
        self, batch: TrainingBatch
    ) -> dict[Version, list[tuple[Trajectory, npt.NDArray[np.bool_]]]]:
        """Trajectories to compare, by version, each with the mask of its tokens."""
        found: dict[Version, list[tuple[Trajectory, npt.NDArray[np.bool_]]]] = defaultdict(list)
        num_tokens = 0
        for trajectory in _by_turns(batch.groups, self._compared):
            version_index, mask = first_version_tokens(trajectory)
            if version_index == NO_VERSION or batch.versions[version_index] not in self._versions:
                continue
            found[batch.versions[version_index]].append((trajectory, mask))
            num_tokens += int(mask.sum())
            self._compared[trajectory.worker] += int(mask.sum())
            if num_tokens >= self._table.logprob_check_tokens:
                break
        return found

    @torch.no_grad()
    def _diffs(
        self, rows: Sequence[tuple[Trajectory, npt.NDArray[np.bool_]]]
    ) -> list[npt.NDArray[np.float64]]:
        """|learner - worker| of every token of each row; only sampled ones mean anything."""
        token_ids_BT = padded([trajectory.token_ids for trajectory, _ in rows]).long()
        lengths = [trajectory.length for trajectory, _ in rows]
        device = self._scratch.device
        logprobs_BT, _ = self._scratch.logprobs(
            token_ids_BT.to(device),
            torch.tensor(lengths, device=device),
            temperature=self._temperature,
        )
        own_BT = logprobs_BT.double().cpu().numpy()
        return [
            np.abs(own_BT[index, : trajectory.length] - trajectory.logprobs.astype(np.float64))
            for index, (trajectory, _) in enumerate(rows)
        ]


def first_version_tokens(trajectory: Trajectory) -> tuple[int, npt.NDArray[np.bool_]]:
    """(index of the version that sampled first, [T] its tokens before any other version's)."""
    mask = trajectory.sampled.copy()
    mask[0] = False
    sampled_by = trajectory.versions[mask]
    if len(sampled_by) == 0:
        return NO_VERSION, mask
    others = mask & (trajectory.versions != sampled_by[0])
    if others.any():
        mask[int(np.argmax(others)) :] = False
    return int(sampled_by[0]), mask


def _by_worker(sums: Mapping[tuple[str, str], tuple[float, int]]) -> dict[str, float]:
    """Mean difference of each worker, of sums by (worker, group)."""
    found: dict[str, tuple[float, int]] = {}
    for (worker, _), (total, tokens) in sums.items():
        before, count = found.get(worker, (0.0, 0))
        found[worker] = before + total, count + tokens
    return {worker: total / tokens for worker, (total, tokens) in found.items()}


def _by_turns(
    groups: Sequence[Sequence[Trajectory]], compared: Mapping[str, int]
) -> Iterator[Trajectory]:
    """One trajectory of each worker after the other, those with the fewest tokens `compared`
    first."""
    by_worker: dict[str, list[Trajectory]] = defaultdict(list)
    for group in groups:
        by_worker[group[0].worker].extend(group)
    order = sorted(by_worker, key=lambda worker: (compared.get(worker, 0), worker))
    for turn in zip_longest(*(by_worker[worker] for worker in order)):
        for trajectory in turn:
            if trajectory is not None:
                yield trajectory
