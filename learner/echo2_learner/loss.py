"""The GRPO objective of the paper's Appendix D, eqs. 23 to 25: pure functions of logprobs.

Letters: B trajectories of a micro-batch, T tokens (padded), N entries in the loss.
`logprobs` π_θ, carries the gradient; `old` π_learner(θ_old), the learner's own logprobs at
the start of the step; `behaviour` π_sampler(θ_old), as the engine reported them;
`reference` π_ref. All describe the sampled tokens at the sampling temperature, and none but
the first carries a gradient.

Sums over a batch are sums over its micro-batches: every token brings its share of the mean
with it (`shares_BT`), so accumulated gradients equal those of one whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ratio(logprobs_BT: Tensor, old_BT: Tensor) -> Tensor:
    """ρ of eq. 23: π_θ / π_θ_old."""
    return torch.exp(logprobs_BT - old_BT)


def importance_weights(old_BT: Tensor, behaviour_BT: Tensor, *, cap: float) -> Tensor:
    """Outer factor of eq. 24, per token: min(π_learner(θ_old) / π_sampler(θ_old), C).

    It corrects what the engine computes differently and what staleness moved; a constant
    for the gradient.
    """
    return torch.exp(old_BT.detach() - behaviour_BT).clamp(max=cap)


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


def token_shares(
    mask_BT: Tensor,
    *,
    aggregate: str,
    num_trajectories: int,
    num_tokens: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[B, T] each token's share of the batch mean; 0.0 where the mask is False.

    "trajectory_mean": 1 / (tokens of its trajectory x trajectories), as in eq. 25;
    "token_mean": 1 / tokens. Both counts are those of the whole update, and count only
    what is in the loss (a trajectory that is masked out entirely has no mean).
    """
    mask_BT = mask_BT.to(dtype)
    if aggregate == "token_mean":
        return mask_BT / max(num_tokens, 1)
    lengths_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1.0)
    return mask_BT / lengths_B1 / max(num_trajectories, 1)


def grpo_loss(
    logprobs_BT: Tensor,
    *,
    old_BT: Tensor,
    behaviour_BT: Tensor,
    advantages_B: Tensor,
    mask_BT: Tensor,
    shares_BT: Tensor,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
    kl_coefficient: float = 0.0,
    reference_BT: Tensor | None = None,
) -> Tensor:
    """-J of eq. 24, summed over the tokens in the loss; minimise it.

    As eq. 24 has it, the importance weight multiplies the KL term too. `reference_BT` is
    needed when `kl_coefficient` is not 0.
    """
    # Outside the mask a logprob means nothing and may be infinite: 0 * inf would be nan.
    logprobs_BT = torch.where(mask_BT, logprobs_BT, 0.0)
    old_BT = torch.where(mask_BT, old_BT, 0.0)
    behaviour_BT = torch.where(mask_BT, behaviour_BT, 0.0)
    objective_BT = clipped_objective(
        ratio(logprobs_BT, old_BT), advantages_B[:, None], clip_low=clip_low, clip_high=clip_high
    )
    if kl_coefficient > 0:
        if reference_BT is None:
            raise ValueError(f"kl_coefficient is {kl_coefficient}; give reference logprobs")
        reference_BT = torch.where(mask_BT, reference_BT, 0.0)
        objective_BT = objective_BT - kl_coefficient * kl_k3(logprobs_BT, reference_BT)
    weights_BT = importance_weights(old_BT, behaviour_BT, cap=importance_cap)
    return -(shares_BT * weights_BT * objective_BT).sum()


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
