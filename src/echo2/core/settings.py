"""What the core needs to know of a configuration, in plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from echo2.core.activation_policy import ActivationSettings
from echo2.core.suspicion import MismatchRule
from echo2.types import PeerId, Sampling

Late = Literal["wait", "drop", "mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSettings:
    """Names and units as in [audit] of the TOML schema. `key` makes the choice of groups a secret
    of the coordinator; `rule` says when logprobs are suspicious."""

    share: float = 0.0
    workers: tuple[PeerId, ...] = ()
    key: bytes = field(default=b"", repr=False)
    reward_tolerance: float = 1e-6
    refuted_needed: int = 2
    wait_s: float = 60.0
    in_flight_max: int = 8
    action: Literal["quarantine", "report"] = "quarantine"
    rule: MismatchRule = field(default_factory=MismatchRule)


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferTerms:
    """An entry of [[offers]]. `rate`: groups/s of one machine, None where the file does not tell;
    `standby_usd_per_h` None: as much as while it works."""

    name: str
    usd_per_h: float
    rate: float | None = None
    count: int = 1
    standby_usd_per_h: float | None = None
    egress_usd_per_gb: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationTerms:
    """[activation], and what of [[offers]], [plan] and [provisioner] it goes by. `train_s`: T_train
    before any was measured. `provisions`: machines are started and stopped, at most `machines_max`
    at once; one whose worker is not ready after `ready_timeout_s` is stopped."""

    policy: Literal["all", "cheapest"] = "all"
    settings: ActivationSettings = field(default_factory=ActivationSettings)
    offers: tuple[OfferTerms, ...] = ()
    train_s: float | None = None
    provisions: bool = False
    machines_max: int = 0
    ready_timeout_s: float = 600.0

    def offer(self, name: str) -> OfferTerms | None:
        return next((offer for offer in self.offers if offer.name == name), None)

    def offer_of(self, worker: str) -> OfferTerms | None:
        """The offer that a worker is of: its name is the offer's, or begins with it and a dash;
        of several the longest."""
        if not self.offers:
            return None
        own = [o for o in self.offers if worker == o.name or worker.startswith(f"{o.name}-")]
        return max(own, key=lambda offer: len(offer.name), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """Names and units as in the TOML schema (`echo2.config`), which documents them."""

    run_id: str
    life: str = ""
    """Differs between coordinators of one run, and so do the names of their leases."""
    staleness_max: int
    late: Late = "wait"
    period: int = 1
    mask_min_tokens: int = 1
    groups_per_step: int = 1
    group_size: int = 1
    lead_steps: float | None = None
    attempts_max: int = 3
    stall_s: float = 60.0
    lease_max_s: float = 3600.0
    tasks_ahead: int = 4
    tasks_bytes_max: int = 256 << 20
    sampling: Sampling = field(default_factory=Sampling)
    filter_zero_variance: bool = False
    partial_batch: Literal["train", "drop"] = "train"
    heartbeat_interval_s: float = 1.0
    suspect_s: float = 5.0
    gone_s: float = 15.0
    environment: str = "null"
    environment_settings: str = "{}"
    eval_hold_s: float = 30.0
    no_worker_timeout_s: float = 300.0
    learner_timeout_s: float = 600.0
    disk_timeout_s: float = 300.0
    """The ledger takes a record within this, or the run ends. Not in the schema."""
    learner_usd_per_h: float = 0.0
    budget_usd: float = 0.0
    origin_egress_usd_per_gb: float = 0.0
    activation: ActivationTerms = field(default_factory=ActivationTerms)
    seed: int = 0
    curve: bool = True
    host: str = "127.0.0.1"
    """What the coordinator listens on."""
    origin_uplink_mbit: float = 0.0
    audit: AuditSettings = field(default_factory=AuditSettings)

    @property
    def buffer_max(self) -> int:
        """Most groups that may be buffered or leased at once: R·(S + 1)."""
        return self.groups_per_step * (self.staleness_max + 1)
