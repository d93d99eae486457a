"""What a plan of a fleet is made from, and what it says: terms, machines, rows.

Units: seconds, groups per second, $ and $ per hour, Mbit/s (10⁶ bits per second), gigabytes of
10⁹ bytes. Symbols as in docs/plan.md and the papers: R groups of a step, T_train, T_bcast, κ, S,
μ_min, γ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from echo2.core.activation import Offer
from echo2.core.capacity_pool import WorkerKind
from echo2.core.capacity_spread import Weights

GIGABYTE = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTerms:
    """What the learner asks of a fleet, and what it costs itself.

    `groups_per_step` R; `train_s` T_train; `bytes_per_group` what a finished group sends;
    `latency_cv` the coefficient of variation of a group's time; `rate_margin` γ.
    """

    groups_per_step: int
    train_s: float
    weights: Weights
    learner_usd_per_h: float = 0.0
    origin_egress_usd_per_gb: float = 0.0
    bytes_per_group: float = 0.0
    latency_cv: float = 0.0
    rate_margin: float = 1.0
    late: Literal["wait", "drop", "mask"] = "wait"
    lead_steps: float | None = None

    @property
    def wire_gb(self) -> float:
        """Gigabytes of a version as it travels."""
        return self.weights.num_bytes * self.weights.delta_share / GIGABYTE


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`count` machines of a kind that can be had, there for the share `availability` of the
    time."""

    kind: WorkerKind
    count: int = 1
    availability: float = 1.0
    egress_usd_per_gb: float = 0.0

    def offer(self, terms: RunTerms, period: int) -> Offer:
        """As the activation knows it: its price holds the egress of what it sends, the results
        and, at most, one copy of each version."""
        versions_per_h = 3600.0 / (period * terms.train_s)
        results_gb = self.kind.rate_groups_per_s * 3600.0 * terms.bytes_per_group / GIGABYTE
        sent_gb = versions_per_h * terms.wire_gb + results_gb
        return Offer(
            self.kind.name,
            self.kind.usd_per_h + self.egress_usd_per_gb * sent_gb,
            self.kind.rate_groups_per_s,
            self.count,
            self.availability,
        )

    def with_kind(self, **changed: Any) -> Machine:
        """The same machine with these fields of its kind changed."""
        return replace(self, kind=replace(self.kind, **changed))

    @property
    def on_average(self) -> WorkerKind:
        """The kind with the rate, and the slots, that it has on average over its absences."""
        if self.availability == 1:
            return self.kind
        return replace(
            self.kind,
            rate_groups_per_s=self.kind.rate_groups_per_s * self.availability,
            slots=max(1, round(self.kind.slots * self.availability)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """The cheapest fleet for one S.

    `counts` machines by name, `rate` what they make on average, `mu_min` what is needed at least
    (without the margin γ; inf: no rate is enough). `is_enough` False: no set on offer reaches
    γ·μ_min, and this is one with which a step costs least. `proof` says how sure it is that no set
    is cheaper, `bottleneck` what the fleet is held back by.
    """

    staleness_max: int
    period: int
    mu_min: float
    counts: Mapping[str, int]
    rate: float
    bcast_s: float
    step_s: float
    bubble_ratio: float
    learner_usd_per_h: float
    machines_usd_per_h: float
    egress_usd_per_h: float
    is_enough: bool
    is_cheapest: bool
    proof: str
    bottleneck: str

    @property
    def usd_per_h(self) -> float:
        return self.learner_usd_per_h + self.machines_usd_per_h + self.egress_usd_per_h

    @property
    def usd_per_step(self) -> float:
        return self.usd_per_h * self.step_s / 3600.0
