"""Sampling noise that depends on a request's seed and the position, and on nothing else.

Counter-based (splitmix64), so the same request gives the same tokens in whatever batch it
runs, and one request never shifts another's noise.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: U64, counters: U64) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (seed, counter) [B]."""
    state = _mix(_mix(seeds + _GAMMA) + counters * _GAMMA)
    return np.asarray((state >> np.uint64(12)).astype(np.float64) * 2.0**-52, np.float64)


def _mix(state: U64) -> U64:
    """The output function of splitmix64; uint64 arithmetic wraps."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(state ^ (state >> np.uint64(31)), np.uint64)
