"""The ablation of the ECHO-2 paper (arXiv 2602.02192, Table 2), by the paper's own equations.

Symbols as in `core/capacity_paper.py`; c_0 $ per hour of the learner, A the active set, n its size.

    T_bcast  chains with peers, a star without them           (core/capacity_spread.py)
    wait     w = max(0, T_bcast + κR/μ − κ·T_train)            once a period: what Eq. (1) lacks
    cost     (c_0 + Σ_{i∈A} c_i) · (T_train + w/κ)             $ per learner step

Cost-aware activation takes workers by ρ ascending; without it they are drawn uniformly, and what
is expected of one is the mean of the pool.

Two readings of a star. At once: all copies share the uplink B_0, max(G/B_w, n·G/B_0) + install. In
turn: the origin hands out one copy after the other, each in `copy_s` seconds, and the last still
takes its time on the worker's line: G/B_w + n·copy_s + install.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from echo2.core.capacity_paper import paper_fixed_point
from echo2.core.capacity_pool import Pool, WorkerKind
from echo2.core.capacity_spread import chain_bcast_s, star_bcast_s
from echo2.messages import CHUNK_MAX_BYTES

CHUNK_MBIT = CHUNK_MAX_BYTES * 8 / 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`machines`: n; 0: as many as the paper's rule activates. `peers`: workers forward to each
    other. `by_price`: activation is cost-aware."""

    name: str
    machines: int = 0
    peers: bool = True
    by_price: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """R groups a step, T_train and the round trip in seconds, κ steps, G in megabits, B_0 in
    Mbit/s, c_0; `pool` names each machine once. `copy_s`: a star's copies in turn; 0: at once.
    ValueError for an empty pool."""

    groups_per_step: int
    train_s: float
    period: int
    size_mbit: float
    origin_mbit: float
    rtt_s: float
    learner_usd_per_h: float
    pool: tuple[WorkerKind, ...]
    copy_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.pool:
            raise ValueError("the pool has no machines")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Seconds, $ per learner step, and n."""

    name: str
    cost_per_step_usd: float
    t_bcast_s: float
    wait_s: float
    machines: int


def ablation_outcome(setting: Setting, scenario: Scenario) -> Outcome:
    """What the equations say of one scenario. ConfigError when no set of the pool is enough, or it
    has fewer machines than the scenario."""
    pool = scenario_pool(setting, scenario)
    period, seconds = setting.period, paper_bcast_s(setting, pool, peers=scenario.peers)
    sampled_s = period * setting.groups_per_step / pool.rate_groups_per_s
    wait_s = max(0.0, seconds + sampled_s - period * setting.train_s)
    usd_per_h = setting.learner_usd_per_h + pool.usd_per_h
    return Outcome(
        name=scenario.name,
        cost_per_step_usd=usd_per_h * (setting.train_s + wait_s / period) / 3600.0,
        t_bcast_s=seconds,
        wait_s=wait_s,
        machines=pool.num_workers,
    )


def scenario_pool(setting: Setting, scenario: Scenario) -> Pool:
    """The machines that are active. ConfigError when no set of the pool is enough."""
    order = by_price(setting.pool)
    if not scenario.by_price:
        order = [_mean(setting.pool)] * len(setting.pool)
    if scenario.machines:
        return Pool.of(order[: scenario.machines])
    return paper_fixed_point(
        order,
        groups_per_step=setting.groups_per_step,
        train_s=setting.train_s,
        period=setting.period,
        bcast_s=lambda pool: paper_bcast_s(setting, pool, peers=scenario.peers),
    ).pool


def by_price(pool: Sequence[WorkerKind]) -> list[WorkerKind]:
    """By ρ ascending."""
    return sorted(pool, key=lambda kind: (kind.usd_per_group, kind.name))


def paper_bcast_s(setting: Setting, pool: Pool, *, peers: bool) -> float:
    """T_bcast in seconds of chains, or of a star."""
    slowest = min(kind.down_mbit for kind, _ in pool.members)
    install_s = max(kind.install_s for kind, _ in pool.members)
    if not peers:
        in_turn = setting.copy_s > 0
        at_once_s = star_bcast_s(
            setting.size_mbit,
            pool.num_workers,
            worker_mbit=slowest,
            origin_mbit=None if in_turn else setting.origin_mbit,
            install_s=install_s,
        )
        return at_once_s + pool.num_workers * setting.copy_s
    chains = max(1, math.floor(setting.origin_mbit / slowest))
    return chain_bcast_s(
        setting.size_mbit,
        math.ceil(pool.num_workers / chains),
        worker_mbit=slowest,
        chunk_mbit=CHUNK_MBIT,
        hop_s=setting.rtt_s / 2,
        install_s=install_s,
    )


def _mean(pool: Sequence[WorkerKind]) -> WorkerKind:
    """What is expected of a machine that is drawn uniformly."""
    count = len(pool)
    return replace(
        pool[0],
        name="drawn",
        usd_per_h=math.fsum(kind.usd_per_h for kind in pool) / count,
        rate_groups_per_s=math.fsum(kind.rate_groups_per_s for kind in pool) / count,
    )
