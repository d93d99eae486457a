"""Ranks: one process alone is the identity; batches travel as bytes; who may join."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from echo2.config import LearnerTable
from echo2.errors import ConfigError, LearnerError
from echo2_learner.batch import TrainingBatch
from echo2_learner.batch_bytes import batch_from_bytes, batch_to_bytes
from echo2_learner.ranks import ALONE, join


def test_one_process_alone_needs_no_group() -> None:
    with join(LearnerTable()) as ranks:
        assert ranks is ALONE
        assert not torch.distributed.is_initialized()
    assert (ranks.rank, ranks.size, ranks.is_lead) == (0, 1, True)
    assert ranks.sum_floats([1, 2.5]) == [1.0, 2.5]
    assert ranks.collect(b"x") == [b"x"]
    vector = torch.arange(3)
    assert ranks.joined(vector) is vector
    assert ranks.device(torch.device("cpu")) == torch.device("cpu")
    ranks.order("train")
    with pytest.raises(LearnerError, match="gives itself no orders"):
        ranks.next_order()


def test_ranks_that_nobody_started_are_refused() -> None:
    with (
        pytest.raises(ConfigError, match=r"learner\.ranks is 4, .* started alone"),
        join(LearnerTable(ranks=4)),
    ):
        pass


def test_another_number_of_ranks_than_configured_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ConfigError, match=r"learner\.ranks is 4, and 2 ranks were started"),
        join(LearnerTable(ranks=4)),
    ):
        pass


def test_a_batch_comes_back_from_its_bytes(
    a_batch: Callable[..., TrainingBatch], a_group: Callable[..., object]
) -> None:
    groups = [a_group(name=f"g{i}", lengths=[5, 9 + i], seed=i, worker=f"w{i}") for i in range(3)]
    batch = a_batch([*groups, a_group(name="g9", versions=((1, 4), (1, 5)))])
    again = batch_from_bytes(batch_to_bytes(batch))
    assert (again.step, again.versions) == (batch.step, batch.versions)
    for mine, theirs in zip(again.trajectories, batch.trajectories, strict=True):
        for name in theirs.__dataclass_fields__:
            found, expected = getattr(mine, name), getattr(theirs, name)
            if isinstance(expected, np.ndarray):
                assert found.dtype == expected.dtype
                assert np.array_equal(found, expected)
            else:
                assert found == expected
    empty = TrainingBatch(3, (), ())
    assert batch_from_bytes(batch_to_bytes(empty)) == empty


def test_bytes_of_another_batch_are_refused(
    a_batch: Callable[..., TrainingBatch], a_group: Callable[..., object]
) -> None:
    data = batch_to_bytes(a_batch([a_group()])) + b"\0"
    with pytest.raises(LearnerError, match="all ranks must run the same echo2"):
        batch_from_bytes(data)
