"""What a loss is given: one micro-batch of whole trajectories, as tensors.

Letters: B trajectories, T tokens (padded on the right). `logprobs` π_θ, carries the gradient;
`old` π_learner(θ_old), the learner's own logprobs at the start of the step; `behaviour`
π_sampler(θ_old), as the engine reported them; `reference` π_ref. All describe the sampled
tokens at the sampling temperature, and none but the first carries a gradient.
"""

# ruff: noqa: N815  shape letters in field names
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from echo2.config_loss import LossTable


@dataclass(frozen=True, slots=True)
class LossInputs:
    """[B, T] each but `advantages_B`. Where `mask_BT` is False all the others are 0.0.

    `shares_BT` is each token's share of the mean over the whole update (`shares.token_shares`).
    """

    logprobs_BT: Tensor
    old_BT: Tensor
    behaviour_BT: Tensor
    advantages_B: Tensor
    mask_BT: Tensor
    shares_BT: Tensor
    reference_BT: Tensor | None = None

    def masked(self) -> LossInputs:
        """The same with 0.0 outside the mask: a logprob there means nothing and may be
        infinite, and 0 * inf would be nan."""
        changed = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if name.endswith("_BT") and name not in ("mask_BT", "shares_BT") and value is not None:
                changed[name] = torch.where(self.mask_BT, value, 0.0)
        return replace(self, **changed)

    def trajectory_sum(self, values_BT: Tensor) -> Tensor:
        """[B, 1] sums over the tokens in the loss of each trajectory."""
        return torch.where(self.mask_BT, values_BT, 0.0).sum(dim=1, keepdim=True)

    def trajectory_mean(self, values_BT: Tensor) -> Tensor:
        """[B, 1] means over the tokens in the loss; 0.0 for a trajectory without any."""
        tokens_B1 = self.mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
        return self.trajectory_sum(values_BT) / tokens_B1


Objective = Callable[[LossInputs, LossTable], tuple[Tensor, Tensor]]
"""A loss: (objective, clipped), both [B, T].

The objective of each token is maximised, carries the gradient, and is finite; `clipped` is
True where a clip cuts the gradient, for the metric. Shares, correction and KL are applied to
it afterwards and are no business of a loss.
"""

Correction = Callable[[LossInputs, LossTable], Tensor]
"""[B, T] a weight for each token, without a gradient, from old and behaviour logprobs alone."""
