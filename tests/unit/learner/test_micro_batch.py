"""However an update is cut, packed and computed, its gradient stays what it was."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echo2.config_loss import LossTable
from echo2.messages import BatchGroup
from echo2_learner.batch import TrainingBatch
from echo2_learner.layout import packed_difference
from echo2_learner.losses import LossInputs, objective_named, total_loss
from echo2_learner.micro_batch import Cut, MicroBatch, micro_batches
from echo2_learner.policy import Policy

Group = Callable[..., BatchGroup]
Batch = Callable[..., TrainingBatch]


def whole_loss(policy: Policy, batch: TrainingBatch, table: LossTable) -> torch.Tensor:
    """The update's loss with one forward pass for each trajectory, on its own."""
    rows = [t for t in batch.trajectories if t.loss_mask.any()]
    num_tokens = sum(t.num_loss_tokens for t in rows)
    total = torch.zeros((), dtype=torch.float64)
    for t in rows:
        tokens = torch.from_numpy(t.token_ids.copy()).long()[None]
        logits = policy.module(tokens).logits[:, :-1]
        all_ = torch.log_softmax(logits, -1)
        logprobs = torch.nn.functional.pad(all_.gather(2, tokens[:, 1:, None])[..., 0], (1, 0))
        mask = torch.from_numpy(t.loss_mask)[None]
        share = 1 / num_tokens
        if table.aggregate == "trajectory_mean":
            share = 1 / t.num_loss_tokens / len(rows)
        inputs = LossInputs(
            logprobs_BT=logprobs,
            old_BT=logprobs.detach() + 0.1,
            behaviour_BT=torch.from_numpy(t.logprobs.copy()).double()[None],
            advantages_B=torch.tensor([t.advantage], dtype=torch.float64),
            mask_BT=mask,
            shares_BT=mask.double() * share,
        )
        total = total + total_loss(inputs, table, objective=objective_named(table.name))[0]
    return total


def cut_loss(policy: Policy, micro: MicroBatch, table: LossTable) -> torch.Tensor:
    logprobs = micro.spread(policy.token_logprobs(micro.rows, temperature=1.0)[0])
    inputs = LossInputs(
        logprobs_BT=logprobs,
        old_BT=logprobs.detach() + 0.1,
        behaviour_BT=micro.behaviour_BT,
        advantages_B=micro.advantages_B,
        mask_BT=micro.mask_BT,
        shares_BT=micro.shares_BT,
    )
    return total_loss(inputs, table, objective=objective_named(table.name))[0]


def gradient(policy: Policy) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in policy.module.parameters() if p.grad is not None])


@pytest.fixture(scope="module")
def exact(tiny_folder: Path) -> Policy:
    policy = Policy.load(tiny_folder)
    policy.module.double()
    return policy


@pytest.fixture(scope="module")
def recomputing(tiny_folder: Path) -> Policy:
    policy = Policy.load(tiny_folder)
    policy.module.double()
    policy.checkpoint_activations()
    return policy


@given(
    shapes=st.lists(st.lists(st.integers(4, 14), min_size=2, max_size=4), min_size=1, max_size=3),
    layout=st.sampled_from(["tree", "flat", "padded"]),
    tokens_max=st.sampled_from([6, 17, 40, 10_000]),
    pair_cost=st.sampled_from([1e-3, 0.05]),
    num_ranks=st.integers(1, 3),
    logit_chunk=st.sampled_from([32, 96, 1 << 20]),
    recompute=st.booleans(),
    same_prompt=st.booleans(),
    name=st.sampled_from(["grpo", "gspo", "dapo"]),
    seed=st.integers(0, 999),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_micro_batches_packing_ranks_chunks_and_recomputing_leave_the_gradient_as_it_was(
    exact: Policy,
    recomputing: Policy,
    a_group: Group,
    a_batch: Batch,
    shapes: list[list[int]],
    layout: str,
    tokens_max: int,
    pair_cost: float,
    num_ranks: int,
    logit_chunk: int,
    recompute: bool,
    same_prompt: bool,
    name: str,
    seed: int,
) -> None:
    groups = []
    for index, lengths in enumerate(shapes):
        rewards = [float((seed >> k) & 1) for k in range(len(lengths))]
        group = a_group(name=f"g{index}", rewards=rewards, lengths=lengths, seed=seed + index)
        groups.append(with_common_prompt(group, lengths) if same_prompt else group)
    batch, table = a_batch(groups), LossTable(name=name)
    exact.module.zero_grad()
    expected = whole_loss(exact, batch, table)
    expected.backward()
    policy = recomputing if recompute else exact
    before = gradient(exact).clone()
    policy.module.zero_grad()
    policy.forward_module.logit_chunk = logit_chunk
    total, counts = 0.0, set()
    for rank in range(num_ranks):
        cut = Cut(
            tokens_max=tokens_max,
            layout=layout,  # type: ignore[arg-type]
            pair_cost=pair_cost,
            rank=rank,
            num_ranks=num_ranks,
            dtype=torch.float64,
            compute_dtype=torch.float64,
        )
        made = micro_batches(list(batch.trajectories), cut, table)
        counts.add(tuple(micro.has_gradient for micro in made))
        for micro in made:
            loss = cut_loss(policy, micro, table)
            total += float(loss.detach())
            if micro.has_gradient:
                loss.backward()
    assert len(counts) == 1  # all ranks compute the same kinds of passes in the same order
    assert total == pytest.approx(float(expected.detach()), abs=1e-6)
    if any(t.advantage for t in batch.trajectories):
        # The model's norms compute in float32, so that its float64 gradients do not agree to more.
        difference = float((gradient(policy) - before).norm() / before.norm())
        assert difference < 1e-5


def with_common_prompt(group: BatchGroup, lengths: list[int]) -> BatchGroup:
    """All its trajectories begin with the same three tokens."""
    tokens = np.frombuffer(group.token_ids, "<i4").copy()
    starts = np.cumsum([0, *lengths[:-1]])
    for start in starts:
        tokens[start : start + 3] = tokens[:3]
    return dataclasses.replace(group, token_ids=tokens.tobytes())


@pytest.mark.parametrize("layout", ["tree", "flat"])
def test_packed_tokens_have_the_logprobs_that_they_have_alone(tiny: Policy, layout: str) -> None:
    assert packed_difference(tiny, layout) < 1e-5  # type: ignore[arg-type]


def test_a_rank_without_work_computes_a_gradient_of_zero_for_every_parameter(
    tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    """So it takes part in what the ranks do together."""
    batch = a_batch([a_group(lengths=(5, 5))])
    cut = Cut(tokens_max=100, rank=2, num_ranks=3)
    (micro,) = micro_batches(list(batch.trajectories), cut, LossTable())
    loss = cut_loss(tiny, micro, LossTable())
    loss.backward()
    assert micro.has_gradient
    assert (micro.place_N.numel(), float(loss.detach())) == (0, 0.0)
    for parameter in tiny.trained_parameters().values():
        assert parameter.grad is not None
        assert not parameter.grad.any()
