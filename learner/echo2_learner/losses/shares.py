"""Each token's share of the mean over an update.

Sums over an update are sums over its micro-batches, on whatever rank: every token brings its
share of the mean with it, so accumulated gradients equal those of one whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


def token_shares(
    mask_BT: Tensor,
    *,
    aggregate: str,
    num_trajectories: int,
    num_tokens: int,
    length: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """[B, T] each token's share of the update's mean; 0.0 where the mask is False.

    "trajectory_mean": 1 / (tokens of its trajectory x trajectories), as in eq. 25;
    "token_mean": 1 / tokens (DAPO, arXiv 2503.14476, eq. 8);
    "constant": 1 / (`length` x trajectories), a constant for all lengths (Dr. GRPO, arXiv
    2503.20783, section 3). The counts are those of the whole update, and count only
    what is in the loss (a trajectory that is masked out entirely has no mean).
    """
    mask_BT = mask_BT.to(dtype)
    match aggregate:
        case "token_mean":
            return mask_BT / max(num_tokens, 1)
        case "constant":
            return mask_BT / length / max(num_trajectories, 1)
        case _:
            lengths_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1.0)
            return mask_BT / lengths_B1 / max(num_trajectories, 1)
