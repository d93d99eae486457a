"""The capacity equations of the ECHO-2 paper (arXiv 2602.02192), as they are printed there.

Symbols and units: R `groups_per_step` groups that one learner step consumes (the paper counts
rollouts; both sides of an equation must count the same), T_train `train_s` seconds of a learner
step, κ `period` learner steps from one published version to the next, T_bcast `bcast_s` seconds
from publication until the fleet samples with it, μ `rate` rewarded groups per second, S
`staleness_max` learner steps. The paper assumes that nothing is sampled during T_bcast that can
be trained; `core/capacity.py` does not, and docs/capacity.md compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echo2.core.capacity_pool import Pool, WorkerKind
from echo2.errors import ConfigError

GAMMA = 1.1
"""γ, the paper's safety factor on μ_min (Eq. 4, section 3.5)."""


def overlap_holds(
    *, groups_per_step: float, train_s: float, bcast_s: float, period: int, rate: float
) -> bool:
    """Eq. (1): does a period hide the broadcast and the sampling of κR groups?

    κ·T_train ≥ T_bcast + κR/μ. Then the learner never waits, under the paper's assumptions.
    """
    return period * train_s >= bcast_s + period * groups_per_step / rate


def paper_mu_min(*, groups_per_step: float, train_s: float, bcast_s: float, period: int) -> float:
    """Eq. (2): μ_min(κ) = κR/(κ·T_train − T_bcast), groups per second.

    inf where κ·T_train ≤ T_bcast: then no pool satisfies Eq. (1).
    """
    left_s = period * train_s - bcast_s
    return period * groups_per_step / left_s if left_s > 0 else math.inf


def staleness_cons(
    *, groups_per_step: float, train_s: float, bcast_s: float, period: int, rate: float
) -> int:
    """Eq. (7), the conservative bound: Δ_max ≤ κ + ⌈(T_bcast + R/μ_pool)/T_train⌉ − 1, in steps."""
    return period + _ceil((bcast_s + groups_per_step / rate) / train_s) - 1


def kappas(staleness_max: int) -> range:
    """The periods that echo2 allows for S: 1 to S + 1 (docs/staleness.md)."""
    return range(1, staleness_max + 2)


def paper_period(staleness_max: int) -> int | None:
    """The paper's default κ = S − 1, which needs S ≥ 3 (section 3.2); None for a smaller S.

    It keeps Δ_max ≤ S where ⌈(T_bcast + R/μ_pool)/T_train⌉ ≤ 2.
    """
    return staleness_max - 1 if staleness_max >= 3 else None


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """An active set that satisfies Eq. (2) for the T_bcast that it has itself.

    `bcast_s` seconds, `mu_min` and `mu_target` (γ·μ_min) in groups/s.
    """

    pool: Pool
    bcast_s: float
    mu_min: float
    mu_target: float


def paper_fixed_point(
    available: Sequence[WorkerKind],
    *,
    groups_per_step: float,
    train_s: float,
    period: int,
    bcast_s: Callable[[Pool], float],
    gamma: float = GAMMA,
) -> FixedPoint:
    """Eq. (3) by the paper's greedy rule, with T_bcast of the very set that it chooses.

    `available` names each worker once for each machine of it. They are taken in ascending order
    of ρ = c/μ (then the faster first); after each one Eq. (2) is looked at again with T_bcast of
    the set so far, and the first set A_n with Σμ ≥ γ·μ_min(κ, T_bcast(A_n)) is returned. The
    paper takes T_bcast as a constant measured before.

    Terminates: each round adds one worker, so there are at most len(available) rounds. Among
    the sets of the n cheapest workers it is the smallest that satisfies its own requirement,
    whether T_bcast grows with n or not. ConfigError when none does, with the set that came
    nearest.
    """
    order = sorted(available, key=lambda kind: (kind.usd_per_group, -kind.rate_groups_per_s))
    nearest, words = -1.0, "no worker is available"
    for count in range(1, len(order) + 1):
        pool = Pool.of(order[:count])
        seconds = bcast_s(pool)
        least = paper_mu_min(
            groups_per_step=groups_per_step, train_s=train_s, bcast_s=seconds, period=period
        )
        rate = pool.rate_groups_per_s
        if rate >= gamma * least:
            return FixedPoint(pool, seconds, least, gamma * least)
        if rate / (gamma * least) > nearest:
            nearest = rate / (gamma * least)
            words = _shortfall(pool, seconds, gamma * least, period=period, train_s=train_s)
    raise ConfigError(
        f"no set of the {len(order)} workers satisfies Eq. (2) with κ = {period}: {words}; "
        "raise staleness.max or staleness.period, send deltas, or add workers"
    )


def _shortfall(pool: Pool, seconds: float, target: float, *, period: int, train_s: float) -> str:
    if math.isinf(target):
        return (
            f"T_bcast is {seconds:.4g} s for {pool.num_workers} workers, and κ·T_train only "
            f"{period * train_s:.4g} s"
        )
    return (
        f"{pool.num_workers} workers deliver {pool.rate_groups_per_s:.4g} groups/s, with their "
        f"T_bcast of {seconds:.4g} s {target:.4g} are needed"
    )


def _ceil(value: float) -> int:
    """⌈value⌉, where a whole number with an error of rounding stays itself."""
    return math.ceil(value - 1e-9)
