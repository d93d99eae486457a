"""A learner step: what it changes, and what it measures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from echo2.config import LearnerTable
from echo2.errors import LearnerError
from echo2.messages import BatchGroup
from echo2_learner.batch import TrainingBatch
from echo2_learner.policy import Policy
from echo2_learner.schedule import scheduled_learning_rate
from echo2_learner.trainer import Trainer

Group = Callable[..., BatchGroup]
Batch = Callable[..., TrainingBatch]


def a_table(**settings: Any) -> LearnerTable:
    return LearnerTable.model_validate({"learning_rate": 1e-3, **settings})


def loss_tokens(policy: Policy, batch: TrainingBatch) -> list[float]:
    """Sum of the logprobs in the loss, of each trajectory."""
    sums = []
    for trajectory in batch.trajectories:
        tokens = torch.from_numpy(trajectory.token_ids.copy()).long()[None]
        logprobs, _ = policy.logprobs(tokens, torch.tensor([trajectory.length]), temperature=1.0)
        sums.append(float(logprobs[0][torch.from_numpy(trajectory.loss_mask)].sum().detach()))
    return sums


def snapshot(policy: Policy) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in policy.tensors().values()]).clone()


def test_a_step_makes_rewarded_trajectories_likelier_than_the_others(
    tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    batch = a_batch([a_group(rewards=(1.0, 0.0, 0.0, 1.0), seed=4)])
    trainer = Trainer(tiny, a_table(), temperature=1.0)
    before = loss_tokens(tiny, batch)
    metrics = trainer.step(batch)
    gains = [new - old for new, old in zip(loss_tokens(tiny, batch), before, strict=True)]
    assert min(gains[0], gains[3]) > max(gains[1], gains[2])
    assert metrics.tokens == 16
    assert metrics.num_updates == 1
    assert metrics.clip_fraction == 0.0
    assert metrics.entropy > 0
    assert 0 < metrics.ess <= 1
    assert metrics.mismatch_kl > 0


@pytest.mark.parametrize("aggregate", ["trajectory_mean", "token_mean"])
def test_the_micro_batch_budget_is_no_part_of_the_result(
    aggregate: str, tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    tiny.module.double()
    groups = [a_group(rewards=(1, 0, 0), lengths=(6, 9, 5), seed=i, name=f"g{i}") for i in range(4)]
    start = {name: tensor.clone() for name, tensor in tiny.tensors().items()}
    results = []
    for tokens in (12, 100_000):
        tiny.load_tensors(start)
        table = a_table(
            updates_per_step=2, micro_batch_tokens=tokens, loss={"aggregate": aggregate}
        )
        metrics = Trainer(tiny, table, temperature=1.0).step(a_batch(groups))
        results.append((snapshot(tiny), metrics))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-9, atol=1e-12)
    assert results[0][1].loss == pytest.approx(results[1][1].loss, abs=1e-9)
    assert results[0][1].entropy == pytest.approx(results[1][1].entropy, rel=1e-9)


def test_with_two_updates_the_second_is_clipped_against_the_start_of_the_step(
    tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    same = a_group(rewards=(1.0, 0.0), seed=1)
    batch = a_batch([same, same])
    trainer = Trainer(tiny, a_table(updates_per_step=2, learning_rate=0.05), temperature=1.0)
    metrics = trainer.step(batch)
    assert metrics.num_updates == 2
    # The second update sees tokens whose ratio the first one moved beyond the clip.
    assert 0 < metrics.clip_fraction <= 0.5
    assert metrics.tokens == 16


def test_the_importance_weight_scales_the_step_of_stale_tokens(
    tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    """The same tokens with behaviour logprobs far above the learner's weigh almost nothing."""
    norms = []
    for offset in (0.0, 8.0):
        batch = a_batch([a_group(seed=2)])
        for trajectory in batch.trajectories:
            tokens = torch.from_numpy(trajectory.token_ids.copy()).long()[None]
            own, _ = tiny.logprobs(tokens, torch.tensor([trajectory.length]), temperature=1.0)
            trajectory.logprobs.setflags(write=False)
            object.__setattr__(
                trajectory, "logprobs", own[0].detach().numpy().astype("f4") + offset
            )
        trainer = Trainer(tiny, a_table(learning_rate=1e-9), temperature=1.0)
        norms.append(trainer.step(batch).grad_norm)
    assert norms[1] == pytest.approx(norms[0] * 2.718281828**-8, rel=1e-3)


def test_the_kl_term_pulls_towards_the_reference(
    tiny: Policy, tiny_folder: Any, a_group: Group, a_batch: Batch
) -> None:
    batch = a_batch([a_group(rewards=(1.0, 1.0), seed=3)])  # no advantage: only the KL is left
    reference = Policy.load(tiny_folder)
    target = loss_tokens(reference, batch)
    with torch.no_grad():
        for tensor in tiny.tensors().values():
            tensor.mul_(1.1)
    table = a_table(loss={"kl_coefficient": 1.0}, learning_rate=2e-3)
    trainer = Trainer(tiny, table, temperature=1.0, reference=reference)

    def distance() -> float:
        return sum(abs(a - b) for a, b in zip(loss_tokens(tiny, batch), target, strict=True))

    before = distance()
    for _ in range(20):
        trainer.step(batch)
    assert distance() < 0.5 * before
    with pytest.raises(ValueError, match="give a reference policy"):
        Trainer(tiny, table, temperature=1.0)


def test_a_batch_without_a_token_in_the_loss_changes_nothing(
    tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    before = snapshot(tiny)
    trainer = Trainer(tiny, a_table(weight_decay=0.1), temperature=1.0)
    metrics = trainer.step(a_batch([a_group(versions=((1, 2),))], loss_from_step=3))
    assert (metrics.tokens, metrics.num_updates) == (0, 0)
    assert torch.equal(snapshot(tiny), before)
    assert not trainer.optimizer_tensors()


def test_a_loss_that_is_not_finite_leaves_the_weights_alone(
    tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    trainer = Trainer(tiny, a_table(), temperature=1.0)
    with torch.no_grad():
        tiny.tensors()["model.norm.weight"][0] = float("nan")
    before = snapshot(tiny)
    with pytest.raises(LearnerError, match="step 5: the loss is nan"):
        trainer.step(a_batch([a_group()]))
    assert torch.equal(snapshot(tiny).nan_to_num(7.0), before.nan_to_num(7.0))


def test_groups_without_variance_count_in_the_mean_and_in_the_metrics(
    tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    """They have no gradient, so the other groups' weighs half as much beside them."""
    alone = a_batch([a_group(seed=1)])
    both = a_batch([a_group(seed=1), a_group(name="g2", rewards=(1.0, 1.0), seed=2)])
    table = a_table(learning_rate=1e-9)
    metrics = [Trainer(tiny, table, temperature=1.0).step(batch) for batch in (alone, both)]
    assert metrics[1].grad_norm == pytest.approx(metrics[0].grad_norm / 2, rel=1e-4)
    assert [found.tokens for found in metrics] == [8, 16]


def test_without_any_advantage_an_update_goes_on_with_its_momentum(
    tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    trainer = Trainer(tiny, a_table(), temperature=1.0)
    trainer.step(a_batch([a_group()]))
    before = snapshot(tiny)
    metrics = trainer.step(a_batch([a_group(rewards=(1.0, 1.0))]))
    assert (metrics.grad_norm, metrics.loss, metrics.num_updates) == (0.0, 0.0, 1)
    assert not torch.equal(snapshot(tiny), before)
    steps = {float(v) for k, v in trainer.optimizer_tensors().items() if k.endswith("/step")}
    assert steps == {2.0}


def test_gradients_are_clipped_to_the_norm_that_is_allowed(
    tiny: Policy, a_group: Group, a_batch: Batch
) -> None:
    batch = a_batch([a_group()])
    trainer = Trainer(tiny, a_table(grad_norm_max=1e-3), temperature=1.0)
    norm = trainer.step(batch).grad_norm
    left = torch.cat([p.grad.flatten() for p in tiny.module.parameters() if p.grad is not None])
    assert norm > 1e-3
    assert float(left.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_vectors_are_not_decayed(tiny: Policy) -> None:
    trainer = Trainer(tiny, a_table(weight_decay=0.1), temperature=1.0)
    matrices, vectors = trainer.optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in vectors["params"]} == {1}
    assert sum(len(g["params"]) for g in trainer.optimizer.param_groups) == len(
        tiny.trained_parameters()
    )


@pytest.mark.parametrize(
    ("schedule", "step", "share"),
    [
        ("constant", 0, 0.25),  # warm-up over four steps
        ("constant", 3, 1.0),
        ("constant", 99, 1.0),
        ("linear", 4, 1.0),
        ("linear", 52, 0.5),
        ("linear", 100, 0.0),
        ("cosine", 4, 1.0),
        ("cosine", 52, 0.5),
        ("cosine", 200, 0.0),
    ],
)
def test_the_learning_rate_follows_its_schedule(schedule: str, step: int, share: float) -> None:
    table = a_table(schedule=schedule, warmup_steps=4, steps=100, learning_rate=0.01)
    assert scheduled_learning_rate(step, table) == pytest.approx(0.01 * share, abs=1e-12)


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        ("cosine", 4, 0.01),
        ("cosine", 52, 0.006),
        ("cosine", 100, 0.002),
        ("linear", 52, 0.006),
        ("linear", 500, 0.002),
        ("constant", 100, 0.01),
    ],
)
def test_a_schedule_ends_at_the_lowest_learning_rate(schedule: str, step: int, rate: float) -> None:
    table = a_table(
        schedule=schedule, warmup_steps=4, steps=100, learning_rate=0.01, learning_rate_min=0.002
    )
    assert scheduled_learning_rate(step, table) == pytest.approx(rate, abs=1e-12)
