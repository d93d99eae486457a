"""Behaviour logprobs, recomputed with the version that sampled them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo2.config import LearnerTable
from echo2.messages import BatchGroup
from echo2.types import Version
from echo2_learner.batch import TrainingBatch
from echo2_learner.logprob_check import LogprobCheck, first_version_tokens
from echo2_learner.policy import Policy
from echo2_learner.publish import Publisher

Group = Callable[..., BatchGroup]
Batch = Callable[..., TrainingBatch]


@pytest.fixture
def publisher(tiny: Policy, run_dir: Path) -> Publisher:
    """Versions 1.3, 1.4 and 1.5 with weights that differ."""
    scratch = Policy.load(tiny.folder)
    made = Publisher(tiny, run_dir, scratch=scratch, run_name="r", origin_timeout_s=1.0)
    for step in (3, 4, 5):
        with torch.no_grad():
            for tensor in tiny.tensors().values():
                tensor.mul_(1.05)
        made.publish(Version(1, step))
    return made


def a_check(publisher: Publisher, **settings: Any) -> LogprobCheck:
    table = LearnerTable.model_validate(settings)
    return LogprobCheck(publisher.versions, publisher.scratch, table, temperature=1.0)


def sampled_by(
    publisher: Publisher, group: BatchGroup, version: Version, **changes: Any
) -> BatchGroup:
    """The group with the logprobs that `version` gives its tokens."""
    publisher.versions.load(version, publisher.scratch)
    tokens = np.frombuffer(group.token_ids, "<i4").reshape(len(group.trajectories), -1)
    lengths = torch.full((len(tokens),), tokens.shape[1])
    with torch.no_grad():
        logprobs, _ = publisher.scratch.logprobs(
            torch.from_numpy(tokens.copy()).long(), lengths, temperature=1.0
        )
    values = {field: getattr(group, field) for field in group.__dataclass_fields__}
    return BatchGroup(**{**values, "logprobs": logprobs.numpy().astype("<f4").tobytes(), **changes})


def groups_of(publisher: Publisher, a_group: Group, count: int, size: int = 10) -> list[BatchGroup]:
    """Groups of 40 sampled tokens each, by three versions and two workers."""
    made = []
    for i in range(count):
        version = Version(1, 3 + i % 3)
        group = a_group(
            name=f"g{i}",
            rewards=[0.0, 1.0] * (size // 2),
            versions=((1, version.step),),
            worker=f"w-{i % 2}",
            seed=i,
        )
        made.append(sampled_by(publisher, group, version))
    return made


def test_each_token_is_compared_with_the_version_that_sampled_it(
    publisher: Publisher, a_group: Group, a_batch: Batch
) -> None:
    batch = a_batch(groups_of(publisher, a_group, 30))
    result = a_check(publisher).check(batch)
    assert result.diff_mean is not None
    assert result.diff_mean < 1e-6
    assert result.tokens >= 1024
    assert result.by_worker.keys() == {"w-0", "w-1"}


def test_a_wrong_version_shows(publisher: Publisher, a_group: Group, a_batch: Batch) -> None:
    groups = groups_of(publisher, a_group, 30)
    # Worker w-1 says 1.5 and sampled with 1.3.
    for i in range(1, 30, 2):
        fresh = a_group(name=f"x{i}", rewards=[0.0, 1.0] * 5, worker="w-1", seed=i)
        groups[i] = sampled_by(publisher, fresh, Version(1, 3))
    result = a_check(publisher).check(a_batch(groups))
    assert result.diff_mean is not None
    assert result.diff_mean > 1e-2
    assert result.by_worker["w-0"] < 1e-6
    assert result.by_worker["w-1"] > 2e-2


def test_a_mean_over_few_tokens_goes_on_with_the_next_batch(
    publisher: Publisher, a_group: Group, a_batch: Batch
) -> None:
    check = a_check(publisher, logprob_check_every_steps=4)
    batch = a_batch(groups_of(publisher, a_group, 10))  # 400 tokens
    assert [check.is_due(step) for step in range(5)] == [True, False, False, False, True]
    first = check.check(batch)
    assert (first.diff_mean, first.tokens) == (None, 0)
    assert first.by_worker
    assert check.is_due(1)
    assert check.check(batch).diff_mean is None
    third = check.check(batch)
    assert third.diff_mean is not None
    assert third.tokens == 1200
    assert not check.is_due(3)


def test_no_more_is_recomputed_than_asked_and_every_worker_has_its_turn(
    publisher: Publisher, a_group: Group, a_batch: Batch
) -> None:
    groups = sorted(groups_of(publisher, a_group, 60), key=lambda group: group.worker)
    result = a_check(publisher, logprob_check_tokens=1100).check(a_batch(groups))
    assert 1100 <= result.tokens < 1110
    assert len(result.by_worker) == 2


def test_versions_that_are_gone_are_left_out(
    publisher: Publisher, a_group: Group, a_batch: Batch
) -> None:
    batch = a_batch(groups_of(publisher, a_group, 30))
    publisher.prune(5)
    check = a_check(publisher)
    result = check.check(batch)
    assert result.diff_mean is None
    assert result.by_worker.keys() == {"w-0", "w-1"}
    assert check.check(batch).diff_mean is None
    assert check.check(batch).tokens == 1200


def test_after_an_update_in_flight_only_the_first_version_counts(
    a_group: Group, a_batch: Batch
) -> None:
    batch = a_batch([a_group(versions=((1, 4), (1, 5)))])
    index, mask = first_version_tokens(batch.groups[0][0])
    assert str(batch.versions[index]) == "1.4"
    assert mask.tolist() == [False] * 3 + [True, True, False, False]


def test_a_batch_without_sampled_tokens_compares_nothing(
    publisher: Publisher, a_group: Group, a_batch: Batch
) -> None:
    batch = a_batch([a_group(loss_mask=bytes(14))])
    result = a_check(publisher).check(batch)
    assert (result.diff_mean, result.tokens, result.by_worker) == (None, 0, {})
