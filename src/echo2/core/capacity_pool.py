"""Workers as the capacity model sees them: how fast, how many at once, at what price.

A group is the unit of all rates: with G trajectories in a group, a rate of one group per second
is G rollouts per second in the paper's words. docs/capacity.md holds the symbols.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from echo2.core.dissemination_hosts import Host


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerKind:
    """Workers that can stand for each other.

    `rate_groups_per_s` is the μ_i of one worker in groups/s: rewarded groups delivered while
    all its slots are busy; `slots` the groups in work at once, so that a group takes
    slots / rate seconds (`latency_s`). `install_s`: seconds without a token while a version is
    installed. `up_mbit`, `down_mbit` in Mbit/s. `usd_per_h`: c_i, $ per hour of one worker.
    `accepts`: inbound connections reach it. ValueError when a value is out of its range.
    """

    name: str
    rate_groups_per_s: float
    slots: int = 1
    install_s: float = 0.0
    up_mbit: float = 100.0
    down_mbit: float = 100.0
    usd_per_h: float = 0.0
    accepts: bool = True

    def __post_init__(self) -> None:
        for field, value, least in (
            ("rate_groups_per_s", self.rate_groups_per_s, 1e-12),
            ("slots", self.slots, 1),
            ("install_s", self.install_s, 0.0),
            ("up_mbit", self.up_mbit, 0.0),
            ("down_mbit", self.down_mbit, 1e-6),
            ("usd_per_h", self.usd_per_h, 0.0),
        ):
            if not least <= value < 1e12:
                raise ValueError(
                    f"{field} of {self.name} is {value}; allowed is {least:g} up to 1e12"
                )

    @property
    def latency_s(self) -> float:
        """Mean seconds of a group in a slot."""
        return self.slots / self.rate_groups_per_s

    @property
    def usd_per_group(self) -> float:
        """ρ_i = c_i / μ_i in $ per group (the paper's unit throughput cost)."""
        return self.usd_per_h / 3600.0 / self.rate_groups_per_s

    def host(self, name: str) -> Host:
        """One of them as the dissemination knows it."""
        return Host(name, self.up_mbit, self.down_mbit, accepts=self.accepts)


@dataclass(frozen=True, slots=True)
class Pool:
    """A set of workers: (kind, how many of it), each count at least 1."""

    members: tuple[tuple[WorkerKind, int], ...]

    def __post_init__(self) -> None:
        for kind, count in self.members:
            if count < 1:
                raise ValueError(f"a pool has {count} of {kind.name}; allowed is 1 and more")

    @classmethod
    def of(cls, workers: Iterable[WorkerKind]) -> Pool:
        """The pool of these workers, one entry a kind, in order of appearance."""
        counts: dict[WorkerKind, int] = {}
        for worker in workers:
            counts[worker] = counts.get(worker, 0) + 1
        return cls(tuple(counts.items()))

    @property
    def num_workers(self) -> int:
        return sum(count for _, count in self.members)

    @property
    def rate_groups_per_s(self) -> float:
        """μ_pool = Σ μ_i in groups/s (paper, section 3.1)."""
        return math.fsum(kind.rate_groups_per_s * count for kind, count in self.members)

    @property
    def usd_per_h(self) -> float:
        """Σ c_i in $ per hour."""
        return math.fsum(kind.usd_per_h * count for kind, count in self.members)

    @property
    def hosts(self) -> tuple[Host, ...]:
        """All workers as the dissemination knows them."""
        return tuple(
            kind.host(f"{kind.name}-{i}") for kind, count in self.members for i in range(count)
        )
