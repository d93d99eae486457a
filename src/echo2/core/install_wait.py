"""Is a free slot better left empty until its worker has installed the version on its way?

What is sampled meanwhile under the older version is staler, and has to be trained earlier. A slot
that waits delivers nothing. So there are two reasons to wait, each where an install is short
against a learner step (`is_short`), and none else:

- *Time to spare* (`has_time`): the pool makes up for what the slots miss before the learner needs
  it. The tokens are fresher, and it costs nothing.
- *Too late* (`comes_too_late`): a group begun under the older version may well outlast its expiry.
  With late = "wait" it would hold the batch, with "drop" be lost.

The dispatcher and the capacity model (`core/capacity_steps.py`) ask the same functions. Times in
seconds.
"""

from __future__ import annotations

import math

INSTALL_SHARE_MAX = 0.5
"""Wait for an install only if it usually takes less than this share of a learner step."""
SPARE_SHARE_MAX = 0.7
"""Of the time that the pool has to spare, waiting may take this share; rates are estimates."""
TAIL_Z = 2.7
"""A group may take as long as this quantile of the normal distribution says: of 1000, three or
four take longer."""
DEVIATIONS_PER_SIGMA = math.sqrt(math.pi / 2.0)
"""Standard deviation over mean absolute deviation, of a normal distribution."""


def is_short(usual_s: float, *, step_s: float) -> bool:
    """Is the time to installation, `usual_s`, short against a learner step?"""
    return usual_s <= INSTALL_SHARE_MAX * step_s


def missed_s(usual_s: float, *, latency_s: float) -> float:
    """What a slot misses of `usual_s`, on average: before it waits it ends a group that takes
    `latency_s` in all and was begun at any time before."""
    if usual_s > latency_s:
        return usual_s - latency_s / 2
    return usual_s * usual_s / (2 * latency_s) if latency_s > 0 else 0.0


def has_time(usual_s: float, *, latency_s: float, train_s: float, pool_s: float) -> bool:
    """Has the pool time to spare? It needs `pool_s` for the groups of a step, the learner
    `train_s` to train them. The lead is too short to carry time from one step to the next."""
    return missed_s(usual_s, latency_s=latency_s) <= SPARE_SHARE_MAX * (train_s - pool_s)


def comes_too_late(*, latency_s: float, deviation_share: float, until_s: float) -> bool:
    """May a group begun now end after `until_s`, when its last batch can be formed? Its time has
    the mean `latency_s`, and a mean absolute deviation of that times `deviation_share`."""
    return latency_s * tail(deviation_share) > until_s


def tail(deviation_share: float) -> float:
    """How many means a long group takes, if times are gamma distributed: with their coefficient of
    variation c and skewness 2c, the quantile z is 1 + zc + (z² - 1)c²/3 (Cornish and Fisher)."""
    cv = DEVIATIONS_PER_SIGMA * deviation_share
    return 1.0 + TAIL_Z * cv + (TAIL_Z * TAIL_Z - 1.0) / 3.0 * cv * cv
