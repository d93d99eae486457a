"""Group-relative advantages: eq. 21 of the paper's Appendix D."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def group_advantages(rewards_G: npt.ArrayLike, *, epsilon: float) -> npt.NDArray[np.float64]:
    """[G] Â_i = (R_i - mean_G R) / (std_G R + ε), over all trajectories of one group.

    The standard deviation is that of the population (divided by G). A group whose rewards
    are all equal gets exactly 0.0, whatever rounding does to the mean.
    """
    rewards = np.asarray(rewards_G, dtype=np.float64)
    if rewards.max() == rewards.min():
        return np.zeros_like(rewards)
    return np.asarray((rewards - rewards.mean()) / (rewards.std() + epsilon))
