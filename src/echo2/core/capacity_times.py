"""How long groups take in a slot, for the capacity model: gamma distributed, with mean 1."""

from __future__ import annotations

import math
from functools import lru_cache

QUANTILES = 8192


@lru_cache(maxsize=64)
def gamma_quantiles(cv: float) -> tuple[float, ...]:
    """QUANTILES equally likely values, with mean 1, of a gamma distribution with coefficient of
    variation `cv`, 0 to 10: the middles of equal shares of its mass, ascending."""
    if cv < 1e-3:
        return (1.0,) * QUANTILES
    shape, cells = 1.0 / cv**2, 20_000
    # With x = e^z the density over z is x^shape e^(-shape x), which is smooth for every shape.
    low = -12.0 * cv if cv < 1.0 else max(-700.0, -30.0 / shape)
    high = math.log(1.0 + 40.0 * cv * (1.0 + cv))
    width = (high - low) / cells
    mass = []
    for i in range(cells):
        z = low + (i + 0.5) * width
        mass.append(math.exp(shape * (z - math.exp(z) + 1.0)))
    total, found, below, i = math.fsum(mass), [], 0.0, 0
    for q in range(QUANTILES):
        wanted = (q + 0.5) / QUANTILES * total
        while below + mass[i] < wanted:
            below += mass[i]
            i += 1
        found.append(math.exp(low + (i + (wanted - below) / mass[i]) * width))
    mean = math.fsum(found) / QUANTILES
    return tuple(value / mean for value in found)


@lru_cache(maxsize=64)
def mean_deviation(cv: float) -> float:
    """Of the quantiles from their mean, 1."""
    return math.fsum(abs(value - 1.0) for value in gamma_quantiles(cv)) / QUANTILES


@lru_cache(maxsize=64)
def group_times(cv: float, seed: int) -> tuple[float, ...]:
    """The quantiles, shuffled: in each QUANTILES groups every one comes once, so that two
    predictions differ little by luck."""
    times, draw = list(gamma_quantiles(cv)), 2 * seed + 1
    for i in range(len(times) - 1, 0, -1):
        draw = (draw * 6364136223846793005 + 1442695040888963407) % 2**64
        j = (draw >> 33) % (i + 1)
        times[i], times[j] = times[j], times[i]
    return tuple(times)
