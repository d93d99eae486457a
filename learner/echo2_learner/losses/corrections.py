"""Weights of tokens for what staleness and the engine changed: pure, without a gradient.

All start from w = π_learner(θ_old) / π_sampler(θ_old) per token, the outer factor of eq. 24
(papers, Appendix D); they differ in what they cut and what they mask. A masked token weighs 0
and stays in the counts of the mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echo2.config_loss import LossTable
from echo2_learner.losses.inputs import LossInputs


def importance_weights(old_BT: Tensor, behaviour_BT: Tensor, *, cap: float) -> Tensor:
    """min(π_learner(θ_old) / π_sampler(θ_old), C) of eq. 24, a constant for the gradient."""
    return torch.exp(old_BT.detach() - behaviour_BT).clamp(max=cap)


def tis(inputs: LossInputs, table: LossTable) -> Tensor:
    """Truncated importance sampling: min(w, C). Papers, Appendix D, eq. 24."""
    return importance_weights(inputs.old_BT, inputs.behaviour_BT, cap=table.importance_cap)


def icepop(inputs: LossInputs, table: LossTable) -> Tensor:
    """w where α <= w <= β, else 0: tokens on which the two disagree leave the loss.

    IcePop of Ring-1T, arXiv 2510.18855, eq. 2 and its masking function M(k; α, β).
    """
    weights_BT = torch.exp(inputs.old_BT.detach() - inputs.behaviour_BT)
    inside_BT = (weights_BT >= table.correction_low) & (weights_BT <= table.correction_high)
    return torch.where(inside_BT, weights_BT, 0.0)


def sequence_mask(inputs: LossInputs, table: LossTable) -> Tensor:
    """min(w, C) if low <= Π_t w_t <= high for the token's trajectory, else 0.

    Masked importance sampling on sequences ("When Speed Kills Stability", Liu et al. 2025):
    a trajectory that the learner finds far more or less likely than its sampler is left out.
    """
    log_weights_BT = inputs.old_BT.detach() - inputs.behaviour_BT
    return _kept(inputs.trajectory_sum(log_weights_BT), table) * tis(inputs, table)


def geometric_mask(inputs: LossInputs, table: LossTable) -> Tensor:
    """min(w, C) if low <= (Π_t w_t)^(1/T) <= high for the token's trajectory, else 0.

    The geometric mean does not depend on the length, so long trajectories are not masked for
    being long (the same source as `sequence_mask`).
    """
    log_weights_BT = inputs.old_BT.detach() - inputs.behaviour_BT
    return _kept(inputs.trajectory_mean(log_weights_BT), table) * tis(inputs, table)


def no_correction(inputs: LossInputs, table: LossTable) -> Tensor:
    """1: behaviour logprobs play no part."""
    return torch.ones_like(inputs.behaviour_BT)


def _kept(log_ratio_B1: Tensor, table: LossTable) -> Tensor:
    """[B, 1] 1.0 where the ratio is within the bounds."""
    ratio_B1 = torch.exp(log_ratio_B1)
    inside_B1 = (ratio_B1 >= table.correction_low) & (ratio_B1 <= table.correction_high)
    return inside_B1.to(log_ratio_B1.dtype)
