"""Terms that losses, corrections and metrics share: pure functions of logprobs.

Letters: B trajectories, T tokens (padded), N entries in the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ratio(logprobs_BT: Tensor, old_BT: Tensor) -> Tensor:
    """ρ of eq. 23 (papers, Appendix D): π_θ / π_θ_old."""
    return torch.exp(logprobs_BT - old_BT)


def clipped_objective(
    ratio_BT: Tensor, advantages_BT: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Inner part of eq. 25: min(ρ Â, clip(ρ, 1 - ε_low, 1 + ε_high) Â)."""
    clipped_BT = ratio_BT.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)


def is_clipped(
    ratio_BT: Tensor, advantages_BT: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """True where the clip cuts the gradient of eq. 25."""
    above_BT = (ratio_BT > 1.0 + clip_high) & (advantages_BT > 0)
    below_BT = (ratio_BT < 1.0 - clip_low) & (advantages_BT < 0)
    return above_BT | below_BT


def kl_k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """Per token, an unbiased and never negative estimate of KL(π ‖ π_other).

    k3 = π_other/π - log(π_other/π) - 1 on tokens that π (`logprobs`) sampled.
    """
    difference = other - logprobs
    return torch.exp(difference) - difference - 1.0


def mismatch_kl(old_N: Tensor, behaviour_N: Tensor) -> float:
    """Mean k3 estimate of KL(π_sampler ‖ π_learner(θ_old)) over N sampled tokens."""
    if old_N.numel() == 0:
        return 0.0
    return float(kl_k3(behaviour_N.double(), old_N.double()).mean())


def effective_sample_share(old_N: Tensor, behaviour_N: Tensor) -> float:
    """(Σw)² / (N Σw²) of the importance weights before truncation, in (0, 1]; 1 on-policy."""
    if old_N.numel() == 0:
        return 1.0
    log_weights_N = old_N.double() - behaviour_N.double()
    log_share = 2 * torch.logsumexp(log_weights_N, 0) - torch.logsumexp(2 * log_weights_N, 0)
    return float(torch.exp(log_share)) / old_N.numel()
