"""The built-in objectives. Each is a pure function of `LossInputs`; see docs/losses.md."""

from __future__ import annotations

import torch
from torch import Tensor

from echo2.config_loss import LossTable
from echo2_learner.losses.inputs import LossInputs
from echo2_learner.losses.terms import clipped_objective, is_clipped, ratio


def grpo(inputs: LossInputs, table: LossTable) -> tuple[Tensor, Tensor]:
    """Per token min(ρ Â, clip(ρ, 1 - ε_low, 1 + ε_high) Â), ρ = π_θ / π_θ_old.

    Papers, Appendix D, eqs. 23 and 25 (PPO's surrogate with group advantages). The same
    function is DAPO (arXiv 2503.14476, eq. 8: ε_high > ε_low, mean over tokens) and Dr. GRPO
    (arXiv 2503.20783, section 3: a constant instead of the length, no division by the standard
    deviation); they differ in the settings that their names set.
    """
    ratio_BT = ratio(inputs.logprobs_BT, inputs.old_BT)
    advantages_B1 = inputs.advantages_B[:, None]
    objective_BT = clipped_objective(
        ratio_BT, advantages_B1, clip_low=table.clip_low, clip_high=table.clip_high
    )
    clipped_BT = is_clipped(
        ratio_BT.detach(), advantages_B1, clip_low=table.clip_low, clip_high=table.clip_high
    )
    return objective_BT, clipped_BT


def gspo(inputs: LossInputs, table: LossTable) -> tuple[Tensor, Tensor]:
    """min(s Â, clip(s, 1 - ε_low, 1 + ε_high) Â) with one ratio for a whole trajectory:

    s = (π_θ(y) / π_θ_old(y))^(1/|y|) = exp(mean over its tokens of log π_θ - log π_θ_old).

    Group Sequence Policy Optimization, arXiv 2507.18071, eqs. 5 to 7. Every token carries its
    trajectory's objective, so the mean over a trajectory's tokens is eq. 5's term.
    """
    log_ratio_B1 = inputs.trajectory_mean(inputs.logprobs_BT - inputs.old_BT)
    ratio_BT = torch.exp(log_ratio_B1).expand_as(inputs.logprobs_BT)
    advantages_B1 = inputs.advantages_B[:, None]
    objective_BT = clipped_objective(
        ratio_BT, advantages_B1, clip_low=table.clip_low, clip_high=table.clip_high
    )
    clipped_BT = is_clipped(
        ratio_BT.detach(), advantages_B1, clip_low=table.clip_low, clip_high=table.clip_high
    )
    return objective_BT, clipped_BT


def cispo(inputs: LossInputs, table: LossTable) -> tuple[Tensor, Tensor]:
    """sg(clip(ρ, 1 - ε_low, 1 + ε_high)) Â log π_θ: the weight is clipped, not the update.

    CISPO of MiniMax-M1, arXiv 2506.13585, eqs. 4 and 5; sg stops the gradient, so every token
    keeps one. With the default ε_low = 1 there is no lower bound. `clipped` tells where the
    weight was cut.
    """
    ratio_BT = ratio(inputs.logprobs_BT.detach(), inputs.old_BT)
    weight_BT = ratio_BT.clamp(1.0 - table.clip_low, 1.0 + table.clip_high)
    objective_BT = weight_BT * inputs.advantages_B[:, None] * inputs.logprobs_BT
    return objective_BT, weight_BT != ratio_BT
