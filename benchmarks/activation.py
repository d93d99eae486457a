"""How quickly the cheapest set of offers is found and proven, and how much dearer greedy is.

    python benchmarks/activation.py [--offers 300] [--pools 100] [--seed 1]

Random pools of different offers of one machine each, with a wanted rate of a tenth to six tenths
of all: prices and rates without relation; prices near in proportion to rates, as a market makes
them; prices that are rates plus a constant, the hardest kind for any knapsack. Then few kinds
with many machines each. Prints one JSON object: the machine, the parameters, and of each kind of
pool the milliseconds (median and largest), the sets proven the cheapest, the largest gap that was
left, and how much dearer the paper's greedy rule is than the set found (mean and largest).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from echo2.core.activation import Offer, cheapest_set, greedy_set

GOAL_MS = 100.0
Make = Callable[[random.Random, int], list[Offer]]


def unrelated(rng: random.Random, size: int) -> list[Offer]:
    return [Offer(f"o{i}", rng.uniform(0.1, 1), rng.uniform(0.05, 1)) for i in range(size)]


def market(rng: random.Random, size: int) -> list[Offer]:
    """Prices in tenths of a cent, within a quarter of 0.7 times the rate."""
    rates = [rng.uniform(0.05, 1) for _ in range(size)]
    return [
        Offer(f"o{i}", max(0.001, round(0.7 * rate * rng.uniform(0.8, 1.25), 3)), rate)
        for i, rate in enumerate(rates)
    ]


def rate_plus_constant(rng: random.Random, size: int) -> list[Offer]:
    return [
        Offer(f"o{i}", rate + 0.1, rate)
        for i, rate in enumerate(rng.uniform(0.05, 1) for _ in range(size))
    ]


def many_of_few(rng: random.Random, size: int) -> list[Offer]:
    """Twelve kinds with `size` machines in all or more."""
    each = -(-size // 12)
    return [
        Offer(f"o{i}", round(rng.uniform(0.1, 1), 2), round(rng.uniform(0.05, 1), 3), each)
        for i in range(12)
    ]


POOLS: dict[str, tuple[Make, int | None]] = {
    "prices and rates unrelated": (unrelated, None),
    "prices near in proportion to rates": (market, None),
    "the same, 10 offers": (market, 10),
    "12 kinds, many machines of each": (many_of_few, None),
    "price = rate + constant": (rate_plus_constant, None),
}


def measure(make: Make, size: int, pools: int, rng: random.Random) -> dict[str, Any]:
    milliseconds, dearer, gaps, proven = [], [], [], 0
    for _ in range(pools):
        offers = make(rng, size)
        wanted = rng.uniform(0.1, 0.6) * sum(offer.rate * offer.count for offer in offers)
        start = time.perf_counter()
        found = cheapest_set(offers, wanted)
        milliseconds.append(1e3 * (time.perf_counter() - start))
        dearer.append(greedy_set(offers, wanted).usd_per_h / found.usd_per_h - 1)
        gaps.append(found.gap)
        proven += found.is_cheapest
    return {
        "machines": sum(offer.count for offer in offers),
        "ms_median": round(statistics.median(milliseconds), 2),
        "ms_max": round(max(milliseconds), 2),
        "goal_ms": GOAL_MS,
        "ratio_of_median_to_goal": round(statistics.median(milliseconds) / GOAL_MS, 3),
        "proven": proven,
        "gap_max": round(max(gaps), 6),
        "greedy_dearer_mean": round(statistics.mean(dearer), 5),
        "greedy_dearer_max": round(max(dearer), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--offers", type=int, default=300)
    parser.add_argument("--pools", type=int, default=100, help="of each kind")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    result = {
        "benchmark": "activation",
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            "load_1min": round(os.getloadavg()[0], 2),
        },
        "parameters": vars(options),
        "pools": {
            name: measure(make, size or options.offers, options.pools, rng)
            for name, (make, size) in POOLS.items()
        },
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
