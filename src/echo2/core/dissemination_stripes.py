"""Which chunk follows which tree: the same answer on every machine.

The chunks of a stripe are spread over the version, each as early as its share allows, so
that a host which serves pending requests in the order of the chunks serves every stripe at
its planned rate, and no stripe's last chunk comes too late to be forwarded in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

_SCALE_BITS = 48


def stripe_sizes(num_chunks: int, weights: Sequence[float]) -> list[int]:
    """Chunks of each stripe: `num_chunks` in proportion to `weights`, largest remainders up.

    Exact rational arithmetic, ties by the lower index; the sum is `num_chunks`.
    """
    shares = [Fraction(weight) for weight in weights]
    total = sum(shares, Fraction(0))
    if num_chunks < 0 or min(shares, default=Fraction(0)) < 0 or (num_chunks and total <= 0):
        raise ValueError(
            f"{num_chunks} chunks cannot be split by the weights {list(weights)}; weights are "
            "at least 0 and one of them is above 0"
        )
    if not num_chunks:
        return [0] * len(shares)
    quotas = [share * num_chunks / total for share in shares]
    sizes = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (sizes[i] - quotas[i], i))
    for index in by_remainder[: num_chunks - sum(sizes)]:
        sizes[index] += 1
    return sizes


def stripes(num_chunks: int, weights: Sequence[float]) -> list[int]:
    """Index of the tree that each chunk follows, `[num_chunks]`.

    Chunk j of a stripe with m chunks stands at j/m of the version, stripes in order where
    that is equal (start times of weighted fair queueing). Of the first p chunks a stripe of
    weight w among K has at least w·p − w·K − 1 and at most w·p + 2. Integers only.
    """
    sizes = stripe_sizes(num_chunks, weights)
    keys = [
        ((place << _SCALE_BITS) // size, index)
        for index, size in enumerate(sizes)
        for place in range(size)
    ]
    keys.sort()
    return [index for _, index in keys]
