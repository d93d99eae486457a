"""Group-relative advantages: eq. 21 of the paper's Appendix D, and what losses change in it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from echo2.config_loss import LossTable


def group_advantages(
    rewards_G: npt.ArrayLike, *, epsilon: float, scale: bool = True
) -> npt.NDArray[np.float64]:
    """[G] Â_i = (R_i - mean_G R) / (std_G R + ε), over all trajectories of one group.

    The standard deviation is that of the population (divided by G). A group whose rewards
    are all equal gets exactly 0.0, whatever rounding does to the mean. Without `scale` the
    division is left out (Dr. GRPO, arXiv 2503.20783, section 3).
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return np.asarray(centred / (rewards.std() + epsilon) if scale else centred)


def overlong_penalty(
    lengths_G: npt.ArrayLike, *, tokens_max: int, share: float
) -> npt.NDArray[np.float64]:
    """[G] what is added to the rewards of long answers, from 0 down to -1.

    DAPO (arXiv 2503.14476), eq. 13, with L_max = `tokens_max` and L_cache = `share` L_max:
    0 up to L_max - L_cache, (L_max - L_cache - length) / L_cache up to L_max, then -1.
    """
    lengths = np.asarray(lengths_G, dtype=np.float64)
    if share == 0:
        return np.zeros_like(lengths)
    cache = share * tokens_max
    return np.clip((tokens_max - cache - lengths) / cache, -1.0, 0.0)


def loss_advantages(
    rewards_G: npt.ArrayLike, lengths_G: npt.ArrayLike, table: LossTable, *, tokens_max: int
) -> npt.NDArray[np.float64]:
    """[G] as the settings of the loss say; `lengths_G` count sampled tokens."""
    shaped = np.asarray(rewards_G, dtype=np.float64) + overlong_penalty(
        lengths_G, tokens_max=tokens_max, share=table.overlong_share
    )
    return group_advantages(shaped, epsilon=table.advantage_epsilon, scale=table.scale_advantages)
