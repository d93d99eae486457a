"""What enters the loss, what may not, and how a batch is cut up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from echo2.errors import LearnerError
from echo2.messages import BatchGroup
from echo2_learner.batch import TrainingBatch, micro_batches, padded_runs, split_updates
from echo2_learner.loss import grpo_loss
from echo2_learner.policy import Policy

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


@pytest.mark.parametrize("tokens_max", [1, 12, 20, 1000])
def test_micro_batches_keep_within_their_padded_tokens(
    a_group: Group, a_batch: Batch, tokens_max: int
) -> None:
    lengths = [5, 9, 7, 6, 12, 5]
    batch = a_batch([a_group(rewards=[0, 1, 0, 1, 0, 1], lengths=lengths)])
    made = micro_batches(list(batch.trajectories), tokens_max=tokens_max, aggregate="token_mean")
    assert sorted(int(n) for micro in made for n in micro.lengths_B) == sorted(lengths)
    for micro in made:
        assert micro.token_ids_BT.numel() <= tokens_max or len(micro.lengths_B) == 1
    assert sum(float(micro.shares_BT.sum()) for micro in made) == pytest.approx(1.0)


def test_runs_of_rows_fill_their_budget() -> None:
    assert list(padded_runs([2, 2, 3, 3, 8], tokens_max=9)) == [range(3), range(3, 4), range(4, 5)]
    assert list(padded_runs([], tokens_max=9)) == []


@pytest.mark.parametrize("aggregate", ["trajectory_mean", "token_mean"])
def test_accumulated_gradients_are_those_of_one_batch(
    aggregate: str, tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    """Of trajectories of different lengths, some of them partly or wholly masked."""
    tiny.module.double()
    batch = a_batch(
        [
            a_group(name="g1", rewards=(0, 1, 0), lengths=(5, 9, 7), seed=1),
            a_group(
                name="g2",
                rewards=(1, 0, 0),
                lengths=(12, 6, 8),
                versions=((1, 2), (1, 4), (1, 5)),
                seed=2,
            ),
            a_group(name="g3", rewards=(1, 0), versions=((1, 1),), seed=3),
        ],
        loss_from_step=3,
    )
    gradients = []
    for tokens_max in (10, 30, 100_000):
        tiny.module.zero_grad()
        made = micro_batches(
            list(batch.trajectories),
            tokens_max=tokens_max,
            aggregate=aggregate,
            dtype=torch.float64,
        )
        for micro in made:
            logprobs, _ = tiny.logprobs(micro.token_ids_BT, micro.lengths_B, temperature=1.0)
            grpo_loss(
                logprobs,
                old_BT=logprobs.detach() + 0.1,
                behaviour_BT=micro.behaviour_BT,
                advantages_B=micro.advantages_B,
                mask_BT=micro.mask_BT,
                shares_BT=micro.shares_BT,
                clip_low=0.2,
                clip_high=0.2,
                importance_cap=2.0,
            ).backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in tiny.module.parameters() if p.grad is not None])
        )
    assert len(micro_batches(list(batch.trajectories), tokens_max=10, aggregate=aggregate)) > 3
    assert float(gradients[0].norm()) > 0
    for other in gradients[1:]:
        torch.testing.assert_close(gradients[0], other, rtol=1e-9, atol=1e-12)
