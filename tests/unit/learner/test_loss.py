"""Losses and corrections, against versions written as their formulas read (plain_losses.py)."""

from __future__ import annotations

import math
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.config import LearnerTable, config_from_mapping
from echo2.config_loss import LossTable
from echo2.errors import ConfigError
from echo2.messages import BatchGroup
from echo2_learner.batch import TrainingBatch
from echo2_learner.losses import CORRECTIONS, OBJECTIVES, LossInputs, objective_named, total_loss
from echo2_learner.losses.corrections import importance_weights
from echo2_learner.losses.shares import token_shares
from echo2_learner.losses.terms import (
    clipped_objective,
    effective_sample_share,
    is_clipped,
    kl_k3,
    mismatch_kl,
)
from echo2_learner.policy import Policy
from echo2_learner.trainer import Trainer

LOW, HIGH, CAP, LENGTH = 0.2, 0.3, 1.5, 9


def random_inputs(seed: int, rows: int = 5, length: int = 7, spread: float = 0.6) -> LossInputs:
    """A case whose first trajectory is masked out entirely, if there are several."""
    rng = np.random.default_rng(seed)

    def draw() -> torch.Tensor:
        return torch.from_numpy(rng.normal(-1.0, spread, (rows, length)))

    mask_BT = torch.from_numpy(rng.random((rows, length)) < 0.6)
    mask_BT[-1, -1] = True
    if rows > 1:
        mask_BT[0, :] = False
    return LossInputs(
        logprobs_BT=draw().requires_grad_(),
        old_BT=draw(),
        behaviour_BT=draw(),
        reference_BT=draw(),
        advantages_B=torch.from_numpy(rng.normal(size=rows)),
        mask_BT=mask_BT,
        shares_BT=torch.zeros(0),
    )


def ours(inputs: LossInputs, table: LossTable) -> torch.Tensor:
    shares_BT = token_shares(
        inputs.mask_BT,
        aggregate=table.aggregate,
        num_trajectories=int(inputs.mask_BT.any(1).sum()),
        num_tokens=int(inputs.mask_BT.sum()),
        length=LENGTH,
        dtype=torch.float64,
    )
    given_ = LossInputs(
        inputs.logprobs_BT,
        inputs.old_BT,
        inputs.behaviour_BT,
        inputs.advantages_B,
        inputs.mask_BT,
        shares_BT,
        inputs.reference_BT,
    )
    return total_loss(given_, table, objective=objective_named(table.name))[0]


def plainly(inputs: LossInputs, table: LossTable, plain: ModuleType) -> Any:
    """(loss, [B, T] gradient) of the straightforward version."""
    scalars = [
        [torch.tensor(float(x), dtype=torch.float64, requires_grad=True) for x in row]
        for row in inputs.logprobs_BT.detach()
    ]
    assert inputs.reference_BT is not None
    case = plain.Case(
        scalars,
        inputs.old_BT.tolist(),
        inputs.behaviour_BT.tolist(),
        inputs.reference_BT.tolist(),
        inputs.advantages_B.tolist(),
        inputs.mask_BT.tolist(),
    )
    total = plain.loss(case, table, length=LENGTH)
    if total.requires_grad:
        total.backward()
    gradient = [[0.0 if s.grad is None else float(s.grad) for s in row] for row in scalars]
    return total.detach(), torch.tensor(gradient, dtype=torch.float64)


@given(
    name=st.sampled_from(sorted(OBJECTIVES)),
    correction=st.sampled_from(sorted(CORRECTIONS)),
    aggregate=st.sampled_from(["trajectory_mean", "token_mean", "constant"]),
    beta=st.sampled_from([0.0, 0.3]),
    rows=st.integers(1, 5),
    length=st.integers(1, 6),
    spread=st.sampled_from([0.02, 0.6]),
    seed=st.integers(0, 10_000),
)
@settings(max_examples=150, deadline=None)
def test_every_loss_and_gradient_is_that_of_its_formula(
    plain_losses: ModuleType,
    name: str,
    correction: str,
    aggregate: str,
    beta: float,
    rows: int,
    length: int,
    spread: float,
    seed: int,
) -> None:
    table = LossTable.model_validate(
        {
            "name": name,
            "correction": correction,
            "aggregate": aggregate,
            "kl_coefficient": beta,
            "importance_cap": CAP,
        }
    )
    inputs = random_inputs(seed, rows, length, spread)
    mine = ours(inputs, table)
    mine.backward()
    expected, gradient = plainly(inputs, table, plain_losses)
    torch.testing.assert_close(mine.detach(), expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(inputs.logprobs_BT.grad, gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_what_lies_outside_the_mask_changes_nothing_even_if_infinite(
    name: str, correction: str
) -> None:
    table = LossTable.model_validate(
        {"name": name, "correction": correction, "kl_coefficient": 0.3, "correction_low": 0.0}
    )
    inputs = random_inputs(3)
    before = ours(inputs, table)
    spoilt = {
        name: torch.where(inputs.mask_BT, getattr(inputs, name).detach(), -math.inf)
        for name in ("logprobs_BT", "old_BT", "behaviour_BT", "reference_BT")
    }
    spoilt["logprobs_BT"].requires_grad_()
    after = ours(
        LossInputs(
            **spoilt,
            advantages_B=inputs.advantages_B,
            mask_BT=inputs.mask_BT,
            shares_BT=inputs.shares_BT,
        ),
        table,
    )
    after.backward()
    assert float(after.detach()) == pytest.approx(float(before.detach()), abs=1e-12)
    assert torch.isfinite(spoilt["logprobs_BT"].grad).all()  # type: ignore[arg-type]


def test_names_set_the_defaults_that_their_papers_give_and_a_setting_of_ones_own_wins() -> None:
    grpo, dr, dapo, gspo, cispo = (LossTable(name=name) for name in OBJECTIVES)
    assert (grpo.clip_low, grpo.clip_high, grpo.aggregate) == (0.2, 0.2, "trajectory_mean")
    assert grpo.correction == "tis"
    assert (dr.aggregate, dr.scale_advantages) == ("constant", False)
    assert (dapo.clip_high, dapo.aggregate, dapo.overlong_share) == (0.28, "token_mean", 0.2)
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    assert (cispo.clip_low, cispo.clip_high) == (1.0, 4.0)
    assert LossTable(name="dapo", clip_high=0.5).clip_high == 0.5
    assert LossTable(correction="icepop").correction_high == 5.0
    assert LossTable(correction="icepop", correction_high=3.0).correction_high == 3.0


def test_the_importance_weight_is_truncated_and_carries_no_gradient() -> None:
    old = torch.tensor([[0.0, 0.0, 0.0]], requires_grad=True)
    behaviour = torch.tensor([[0.0, -math.log(1.25), -1000.0]])
    weights = importance_weights(old, behaviour, cap=CAP)
    assert weights.tolist() == [[1.0, pytest.approx(1.25), CAP]]
    assert not weights.requires_grad


def test_a_trajectory_far_from_its_sampler_is_masked_whole_and_a_token_alone() -> None:
    log_w = torch.tensor([[0.1, 0.1, 0.1, 2.0], [0.01, 0.0, -0.01, 0.0]], dtype=torch.float64)
    mask_BT = torch.ones_like(log_w, dtype=torch.bool)
    inputs = LossInputs(
        log_w, log_w, torch.zeros_like(log_w), torch.ones(2), mask_BT, torch.ones_like(log_w)
    )
    kept = {
        name: [
            [w > 0 for w in row] for row in CORRECTIONS[name](inputs, LossTable(correction=name))
        ]
        for name in ("icepop", "sequence_mask", "geometric_mask", "tis")
    }
    assert kept["icepop"] == [[True, True, True, False], [True] * 4]
    assert kept["sequence_mask"] == kept["geometric_mask"] == [[False] * 4, [True] * 4]
    assert kept["tis"] == [[True] * 4] * 2


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
    inputs = random_inputs(0)
    alone = LossInputs(
        inputs.logprobs_BT,
        inputs.old_BT,
        inputs.behaviour_BT,
        inputs.advantages_B,
        inputs.mask_BT,
        inputs.mask_BT.double(),
    )
    with pytest.raises(ValueError, match="give reference logprobs"):
        total_loss(alone, LossTable(kl_coefficient=0.1), objective=OBJECTIVES["grpo"])


def test_a_loss_of_ones_own_is_found_by_name_or_told_why_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("my_losses")
    module.reinforce = lambda inputs, table: (  # type: ignore[attr-defined]
        inputs.advantages_B[:, None] * inputs.logprobs_BT,
        torch.zeros_like(inputs.mask_BT),
    )
    module.scalar = lambda inputs, table: (inputs.logprobs_BT.sum(), inputs.mask_BT)  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_losses", module)
    inputs = random_inputs(2)
    loss = ours(inputs, LossTable(name="my_losses:reinforce", correction="none"))
    share = 1 / inputs.mask_BT.sum(1, keepdim=True).clamp(min=1) / inputs.mask_BT.any(1).sum()
    expected = torch.where(
        inputs.mask_BT, share * inputs.advantages_B[:, None] * inputs.logprobs_BT, 0
    )
    torch.testing.assert_close(loss, -expected.sum())
    with pytest.raises(ValueError, match=r"shape \(\)"):
        ours(inputs, LossTable(name="my_losses:scalar"))
    with pytest.raises(ConfigError, match="it must be a function"):
        objective_named("my_losses:number")
    with pytest.raises(ConfigError, match="cannot be imported"):
        objective_named("my_losses:nothing")
    with pytest.raises(ConfigError, match="cannot be imported"):
        objective_named("no_such_package:loss")


def test_the_loss_in_the_docs_trains_and_at_the_start_of_a_step_is_grpo(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tiny_folder: Path,
    a_group: Callable[..., BatchGroup],
    a_batch: Callable[..., TrainingBatch],
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "losses.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (table,) = re.findall(r"^```toml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "my_losses.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    own = config_from_mapping(tomllib.loads(table)).learner
    norms = []
    for learner in (own, LearnerTable(loss=LossTable(correction="icepop"))):
        trainer = Trainer(Policy.load(tiny_folder), learner, temperature=1.0)
        norms.append(trainer.step(a_batch([a_group(rewards=(1.0, 0.0))])).grad_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
