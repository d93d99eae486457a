"""T_bcast as the capacity model needs it: seconds until the fleet serves a new version.

The paper measures T_bcast and gives no formula (section 3.7); its figures fit the star and the
chunked chain below. What echo2 does is bounded from below by the fluid bound of
docs/dissemination.md. All times in seconds, rates in Mbit/s (10⁶ bits per second), sizes in
megabits, G the bytes that travel.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo2.core.capacity_pool import Pool
from echo2.core.dissemination_hosts import Host, megabits, reach_bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A version on its way: `num_bytes` of all tensors, `delta_share` of them that travels (1: the
    whole, 0.01: a delta of one percent), `origin_up_mbit` the uplink u_0 of the learner's host,
    `encode_s` seconds to make the delta before the first byte leaves. ValueError when a value is
    out of its range."""

    num_bytes: int
    origin_up_mbit: float
    delta_share: float = 1.0
    encode_s: float = 0.0

    def __post_init__(self) -> None:
        if not (
            self.num_bytes >= 0
            and 0 < self.origin_up_mbit < 1e12
            and 0 <= self.delta_share <= 1
            and 0 <= self.encode_s < 1e9
        ):
            raise ValueError(
                f"{self} is not allowed: bytes and encode_s are at least 0, origin_up_mbit is "
                "above 0, delta_share is 0 to 1"
            )

    @property
    def size_mbit(self) -> float:
        """G of what travels, in megabits."""
        return megabits(self.num_bytes) * self.delta_share


def fluid_bcast_s(weights: Weights, pool: Pool) -> float:
    """Least T_bcast in seconds: encode, the fluid bound, then the slowest install.

        encode + max(G/u_0, G/min d_i, nG/(u_0 + Σu_i)) + install

    with G times the share that travels; workers without an open port raise the bound as in
    docs/dissemination.md. 0 for no workers.
    """
    if not pool.members:
        return 0.0
    install_s = max(kind.install_s for kind, _ in pool.members)
    origin = Host("origin", weights.origin_up_mbit)
    travels = round(weights.num_bytes * weights.delta_share)
    bound_s, _ = reach_bound(origin, pool.hosts, travels)
    return weights.encode_s + bound_s + install_s


def star_bcast_s(
    size_mbit: float,
    num_workers: int,
    *,
    worker_mbit: float,
    origin_mbit: float | None = None,
    install_s: float = 0.0,
) -> float:
    """T_bcast in seconds of direct sending to n workers, each of whom takes B_w = `worker_mbit`.

        max(G/B_w, n·G/B_0) + install

    `origin_mbit` is B_0; None means that the origin's egress is not limited, so only the first
    term is left. Derived from the paper's Table 2 (Star-Limited, Star-Unlimited); the paper prints
    no formula.
    """
    own_s = size_mbit / worker_mbit
    if origin_mbit is None:
        return own_s + install_s
    return max(own_s, num_workers * size_mbit / origin_mbit) + install_s


def chain_bcast_s(
    size_mbit: float,
    depth: int,
    *,
    worker_mbit: float,
    chunk_mbit: float,
    hop_s: float = 0.0,
    install_s: float = 0.0,
) -> float:
    """T_bcast in seconds of the paper's pipelined chains, `depth` workers in each (section 4.2).

        G/B_w + (d − 1)·(c/B_w + hop) + install

    The origin feeds N = B_0/B_w chains at once, so d = ⌈n/N⌉. Chunks of c = `chunk_mbit`; `hop_s`
    is the latency of a hop. Derived; the paper measures 1437 s where G/B_w is 1310 s.
    """
    fill_s = max(0, depth - 1) * (chunk_mbit / worker_mbit + hop_s)
    return size_mbit / worker_mbit + fill_s + install_s
