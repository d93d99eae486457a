"""What enters the loss, what may not, and how a batch is cut up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echo2.errors import LearnerError
from echo2.messages import BatchGroup
from echo2_learner.batch import TrainingBatch, split_updates

Group = Callable[..., BatchGroup]
Batch = Callable[..., TrainingBatch]


def test_the_loss_holds_the_sampled_tokens_with_their_versions(
    a_group: Group, a_batch: Batch
) -> None:
    group = a_group(rewards=(1.0, 0.0), versions=((1, 4), (1, 5)), lengths=(7, 9), prompt=3)
    batch = a_batch([group], step=5)
    first, second = batch.groups[0]
    assert first.loss_mask.tolist() == [False] * 3 + [True] * 4
    assert first.versions.tolist() == [-1] * 3 + [0, 0, 1, 1]
    assert [str(version) for version in batch.versions] == ["1.4", "1.5"]
    assert (first.advantage, second.advantage) == (
        pytest.approx(1.0, abs=1e-5),
        pytest.approx(-1.0, abs=1e-5),
    )
    assert second.length == 9
    assert batch.num_loss_tokens == 10
    assert sorted(batch.staleness().tolist()) == [0] * 5 + [1] * 5
    assert batch.reward_mean == 0.5


def test_staleness_of_exactly_the_bound_is_trained(a_group: Group, a_batch: Batch) -> None:
    batch = a_batch([a_group(versions=((1, 3),))], step=5, staleness_max=2)
    assert batch.staleness().max() == 2


def test_staleness_above_the_bound_is_refused_before_anything_is_trained(
    a_group: Group, a_batch: Batch
) -> None:
    with pytest.raises(LearnerError, match=r"staleness 3; staleness\.max is 2"):
        a_batch([a_group(), a_group(name="g2", versions=((1, 2),))], step=5, staleness_max=2)


def test_one_stale_token_in_a_fresh_trajectory_is_enough(a_group: Group, a_batch: Batch) -> None:
    with pytest.raises(LearnerError, match="tokens 3 to 5"):
        a_batch([a_group(versions=((1, 2), (1, 5)))], step=5, staleness_max=2)


def test_a_version_above_the_step_is_refused(a_group: Group, a_batch: Batch) -> None:
    with pytest.raises(LearnerError, match=r"1\.6, which is above v = 5"):
        a_batch([a_group(versions=((1, 6),))], step=5)


@pytest.mark.parametrize(
    ("version", "lineage", "alive"),
    [
        ((1, 4), [(1, 0), (2, 4)], True),  # at the checkpoint that was resumed
        ((1, 5), [(1, 0), (2, 4)], False),  # after it
        ((2, 5), [(1, 0), (2, 4)], True),
        ((3, 5), [(1, 0), (2, 4)], False),  # an incarnation that does not exist yet
    ],
)
def test_only_versions_of_the_surviving_line_are_trained(
    a_group: Group,
    a_batch: Batch,
    version: tuple[int, int],
    lineage: list[tuple[int, int]],
    alive: bool,
) -> None:
    group = a_group(versions=(version,))
    if alive:
        assert a_batch([group], lineage=lineage).num_loss_tokens == 8
        return
    with pytest.raises(LearnerError, match="not in the line of incarnation 2"):
        a_batch([group], lineage=lineage)


def test_masked_tokens_leave_the_loss_and_their_trajectory_stays_in_the_baseline(
    a_group: Group, a_batch: Batch
) -> None:
    group = a_group(rewards=(0.0, 1.0), versions=((1, 2), (1, 5)))
    batch = a_batch([group], step=5, loss_from_step=3, staleness_max=2)
    assert batch.groups[0][0].loss_mask.tolist() == [False] * 5 + [True] * 2
    assert batch.staleness().tolist() == [0] * 4
    assert batch.groups[0][0].advantage == pytest.approx(-1.0, abs=1e-5)


def test_a_window_that_is_wider_than_the_bound_is_noticed(a_group: Group, a_batch: Batch) -> None:
    with pytest.raises(LearnerError, match="staleness 3"):
        a_batch([a_group(versions=((1, 2),))], step=5, loss_from_step=2, staleness_max=2)


def test_a_sampled_token_without_a_span_is_refused(a_group: Group, a_batch: Batch) -> None:
    group = a_group()
    mask = np.frombuffer(group.loss_mask, np.uint8).copy()
    mask[2] = 1
    with pytest.raises(LearnerError, match="token 2 was sampled, but no span"):
        a_batch([a_group(loss_mask=mask.tobytes())])


def test_a_first_token_has_no_context_and_is_not_trained(a_group: Group, a_batch: Batch) -> None:
    batch = a_batch([a_group(prompt=0, lengths=(4, 4))])
    assert batch.groups[0][0].loss_mask.tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"step": 4}, "granted for step 4"),
        ({"logprobs": b""}, "frame logprobs has 0 bytes"),
        ({"token_ids": np.full(14, 32, "<i4").tobytes()}, "the model knows 0 to 31"),
        ({"token_ids": np.full(14, -1, "<i4").tobytes()}, "the model knows 0 to 31"),
        ({"logprobs": np.full(14, np.nan, "<f4").tobytes()}, "not finite"),
    ],
)
def test_a_group_that_cannot_be_trained_is_refused_with_its_reason(
    a_group: Group, a_batch: Batch, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(LearnerError, match=said):
        a_batch([a_group(**changes)])


def test_updates_share_the_groups_evenly_and_keep_them_whole(
    a_group: Group, a_batch: Batch
) -> None:
    batch = a_batch([a_group(name=f"g{i}") for i in range(5)])
    parts = split_updates(batch, 2)
    assert [[t.group for t in part] for part in parts] == [
        ["g0", "g0", "g1", "g1"],
        ["g2", "g2", "g3", "g3", "g4", "g4"],
    ]
    assert len(split_updates(batch, 8)) == 5
    assert split_updates(a_batch([]), 2) == []
