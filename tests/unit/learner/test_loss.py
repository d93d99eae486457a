"""The objective of eqs. 23 to 25, against a version written as the equations read."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from echo2_learner.loss import (
    clipped_objective,
    effective_sample_share,
    grpo_loss,
    importance_weights,
    is_clipped,
    kl_k3,
    mismatch_kl,
    token_shares,
)

LOW, HIGH, CAP = 0.2, 0.3, 1.5


def random_case(seed: int, rows: int = 5, length: int = 7) -> dict[str, Tensor]:
    rng = np.random.default_rng(seed)

    def draw() -> Tensor:
        return torch.from_numpy(rng.normal(-1.0, 0.6, (rows, length)))

    mask = torch.from_numpy(rng.random((rows, length)) < 0.6)
    mask[0, :] = False  # a trajectory that is masked out entirely
    mask[1, 2] = True
    return {
        "logprobs": draw(),
        "old": draw(),
        "behaviour": draw(),
        "reference": draw(),
        "advantages": torch.from_numpy(rng.normal(size=rows)),
        "mask": mask,
    }


def straightforward(
    case: dict[str, Tensor], logprobs: Tensor, aggregate: str, beta: float
) -> Tensor:
    """-J with Python loops, token by token."""
    trajectory_means, every = [], []
    for i in range(len(logprobs)):
        terms = []
        for t in range(logprobs.shape[1]):
            if not case["mask"][i, t]:
                continue
            advantage = case["advantages"][i]
            rho = torch.exp(logprobs[i, t] - case["old"][i, t])
            clipped = torch.clamp(rho, 1 - LOW, 1 + HIGH)
            inner = torch.minimum(rho * advantage, clipped * advantage)
            apart = case["reference"][i, t] - logprobs[i, t]
            inner = inner - beta * (torch.exp(apart) - apart - 1)
            weight = min(math.exp(case["old"][i, t] - case["behaviour"][i, t]), CAP)
            terms.append(weight * inner)
        every += terms
        if terms:
            trajectory_means.append(sum(terms) / len(terms))
    parts = trajectory_means if aggregate == "trajectory_mean" else every
    total: Tensor = sum(parts) / len(parts)  # type: ignore[assignment]
    return -total


def ours(case: dict[str, Tensor], logprobs: Tensor, aggregate: str, beta: float) -> Tensor:
    shares = token_shares(
        case["mask"],
        aggregate=aggregate,
        num_trajectories=int(case["mask"].any(1).sum()),
        num_tokens=int(case["mask"].sum()),
        dtype=torch.float64,
    )
    return grpo_loss(
        logprobs,
        old_BT=case["old"],
        behaviour_BT=case["behaviour"],
        advantages_B=case["advantages"],
        mask_BT=case["mask"],
        shares_BT=shares,
        clip_low=LOW,
        clip_high=HIGH,
        importance_cap=CAP,
        kl_coefficient=beta,
        reference_BT=case["reference"] if beta else None,
    )


@pytest.mark.parametrize("aggregate", ["trajectory_mean", "token_mean"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("seed", range(5))
def test_loss_and_gradient_are_those_of_the_equations(
    aggregate: str, beta: float, seed: int
) -> None:
    case = random_case(seed)
    one, other = (case["logprobs"].clone().requires_grad_() for _ in range(2))
    mine, expected = ours(case, one, aggregate, beta), straightforward(case, other, aggregate, beta)
    torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    mine.backward()
    expected.backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_what_lies_outside_the_mask_changes_nothing_even_if_infinite() -> None:
    case = random_case(3)
    before = ours(case, case["logprobs"], "trajectory_mean", 0.3)
    for name in ("old", "behaviour", "reference"):
        case[name] = torch.where(case["mask"], case[name], -math.inf)
    logprobs = torch.where(case["mask"], case["logprobs"], -math.inf).requires_grad_()
    after = ours(case, logprobs, "trajectory_mean", 0.3)
    after.backward()
    assert float(after.detach()) == pytest.approx(float(before), abs=1e-15)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()


def test_the_importance_weight_is_truncated_and_carries_no_gradient() -> None:
    old = torch.tensor([[0.0, 0.0, 0.0]], requires_grad=True)
    behaviour = torch.tensor([[0.0, -math.log(1.25), -1000.0]])
    weights = importance_weights(old, behaviour, cap=CAP)
    assert weights.tolist() == [[1.0, pytest.approx(1.25), CAP]]
    assert not weights.requires_grad


@pytest.mark.parametrize(
    ("ratio", "advantage", "objective", "clipped"),
    [
        (1.5, 1.0, 1.3, True),  # above, and good: no more of it
        (1.5, -1.0, -1.5, False),  # above, and bad: still pushed down
        (0.5, -1.0, -0.8, True),
        (0.5, 1.0, 0.5, False),
        (1.25, 1.0, 1.25, False),  # the two sides have bounds of their own
        (0.75, -1.0, -0.8, True),
    ],
)
def test_the_clip_has_a_low_and_a_high_side(
    ratio: float, advantage: float, objective: float, clipped: bool
) -> None:
    values = torch.tensor([ratio]), torch.tensor([advantage])
    assert float(clipped_objective(*values, clip_low=LOW, clip_high=HIGH)) == pytest.approx(
        objective
    )
    assert bool(is_clipped(*values, clip_low=LOW, clip_high=HIGH)) is clipped


def test_k3_is_never_negative_and_its_expectation_is_the_kl() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.rand((2, 10), generator=generator, dtype=torch.float64).log_softmax(-1)
    estimates = kl_k3(p, q)
    assert (estimates >= 0).all()
    expected = (p.exp() * (p - q)).sum()
    torch.testing.assert_close((p.exp() * estimates).sum(), expected)
    assert torch.equal(kl_k3(p, p), torch.zeros(10, dtype=torch.float64))


def test_on_policy_the_mismatch_is_zero_and_every_sample_counts() -> None:
    logprobs = torch.linspace(-4, -0.1, 50)
    assert mismatch_kl(logprobs, logprobs) == 0.0
    assert effective_sample_share(logprobs, logprobs) == pytest.approx(1.0)
    assert (
        mismatch_kl(torch.zeros(0), torch.zeros(0)),
        effective_sample_share(torch.zeros(0), torch.zeros(0)),
    ) == (0.0, 1.0)


def test_the_effective_sample_size_is_that_of_the_weights_and_does_not_overflow() -> None:
    old, behaviour = torch.tensor([0.0, -1.0, -2.0]), torch.tensor([-1.0, -1.0, -1.0])
    weights = np.exp([1.0, 0.0, -1.0])
    expected = weights.sum() ** 2 / (3 * (weights**2).sum())
    assert effective_sample_share(old, behaviour) == pytest.approx(expected)
    assert effective_sample_share(torch.tensor([0.0, 0.0]), torch.tensor([-2000.0, 0.0])) == (
        pytest.approx(0.5)
    )


def test_a_kl_coefficient_without_a_reference_is_refused() -> None:
    case = random_case(0)
    with pytest.raises(ValueError, match="give reference logprobs"):
        grpo_loss(
            case["logprobs"],
            old_BT=case["old"],
            behaviour_BT=case["behaviour"],
            advantages_B=case["advantages"],
            mask_BT=case["mask"],
            shares_BT=case["mask"].double(),
            clip_low=LOW,
            clip_high=HIGH,
            importance_cap=CAP,
            kl_coefficient=0.1,
        )
