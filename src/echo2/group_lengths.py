"""How long groups are whose tokens mean nothing: one law for the engine "null" and the simulator,
so that both draw the very same lengths from the seeds of leases.
"""

from __future__ import annotations

import random


def group_tokens(seed: int, *, mean: float, cv: float) -> int:
    """Tokens of the group with this seed, gamma distributed, before each trajectory gets at least
    one."""
    if cv <= 0.0:
        return round(mean)
    shape = cv**-2
    return round(random.Random(seed).gammavariate(shape, mean / shape))


def trajectory_tokens(group: int, *, index: int, group_size: int) -> int:
    """Of trajectory `index`, when a group of that many is divided evenly; at least one."""
    whole, rest = divmod(group, group_size)
    return max(1, whole + (index < rest))
