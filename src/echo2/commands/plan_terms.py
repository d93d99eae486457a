"""From a configuration, and what a run has measured, to the terms of a plan.

Each assumption comes from the configuration, else from the measured run, else from a default
where one is safe; `sources` remembers which. What is left over is told all at once, with the
three ways to give it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from echo2.commands.plan_measured import Measured
from echo2.config import Config
from echo2.config_offers import OfferTable
from echo2.core.capacity_pool import WorkerKind
from echo2.core.capacity_spread import Weights
from echo2.core.fleet_interval import StandardErrors
from echo2.core.fleet_terms import Machine, RunTerms
from echo2.errors import ConfigError

TOKEN_BYTES: Final = 9
"""Of a finished group on the wire: int32 token, float32 logprob and one byte of mask."""
DEFAULTS: Final[Mapping[str, float]] = {
    "group_tokens_cv": 0.5,
    "delta_share": 1.0,
    "encode_s": 0.0,
    "install_s": 0.0,
}
_NEEDED: Final = {
    "train_s": "seconds of a learner step",
    "tokens_per_group": "tokens that a group samples",
    "version_bytes": "bytes of all published tensors",
    "origin_uplink_mbit": "what the learner's host sends",
}


@dataclass(frozen=True, slots=True)
class PlanTerms:
    """`values` and `sources` ("given", "measured", "default") of each assumption; `errors`, and
    where each is from ("given", "measured")."""

    terms: RunTerms
    machines: list[Machine]
    values: Mapping[str, float]
    sources: Mapping[str, str]
    offers_source: str
    errors: StandardErrors
    error_sources: Mapping[str, str]


@dataclass(slots=True)
class _Assumptions:
    given: Mapping[str, float]
    measured: Mapping[str, float]
    values: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def look_up(self, name: str) -> bool:
        for source, known in (
            ("given", self.given),
            ("measured", self.measured),
            ("default", DEFAULTS),
        ):
            if name in known:
                self.values[name], self.sources[name] = known[name], source
                return True
        return False


def plan_terms(config: Config, measured: Measured | None, *, source: Path) -> PlanTerms:
    """The terms of `config`; ConfigError with everything that is missing."""
    plan = config.plan.model_dump(exclude_none=True)
    if "origin_uplink_mbit" not in plan and config.net.origin_uplink_mbit:
        plan["origin_uplink_mbit"] = config.net.origin_uplink_mbit
    assumed = _Assumptions(plan, measured.values if measured else {})
    missing = [
        f"plan.{name} ({what})" for name, what in _NEEDED.items() if not assumed.look_up(name)
    ]
    for name in DEFAULTS:
        assumed.look_up(name)
    offers = config.offers or (measured.offers if measured else [])
    if not offers:
        missing.append("[[offers]] (machines that can be had)")
    if missing:
        raise ConfigError(_lacks(missing, measured), source=str(source))
    values = assumed.values
    terms = RunTerms(
        groups_per_step=config.learner.groups_per_step,
        train_s=values["train_s"],
        weights=Weights(
            num_bytes=round(values["version_bytes"]),
            origin_up_mbit=values["origin_uplink_mbit"],
            delta_share=values["delta_share"],
            encode_s=values["encode_s"],
        ),
        learner_usd_per_h=config.cost.learner_usd_per_h,
        origin_egress_usd_per_gb=config.plan.origin_egress_usd_per_gb,
        bytes_per_group=values["tokens_per_group"] * TOKEN_BYTES,
        latency_cv=values["group_tokens_cv"],
        rate_margin=config.plan.rate_margin,
        late=config.staleness.late,
        lead_steps=config.dispatch.lead_steps,
    )
    machines = [_machine(offer, config, values) for offer in offers]
    offers_source = "given" if config.offers else "measured"
    sources = assumed.sources
    known = {
        name: measured.errors[name]
        for name, source in (
            ("train", sources["train_s"]),
            ("rate", offers_source),
            ("bcast", sources["origin_uplink_mbit"]),
        )
        if measured is not None and source == "measured" and name in measured.errors
    }
    given = dict.fromkeys(("train", "rate", "bcast"), config.plan.uncertainty)
    return PlanTerms(
        terms,
        machines,
        values,
        sources,
        offers_source,
        StandardErrors(**(given | known)),
        {name: "measured" if name in known else "given" for name in given},
    )


def _machine(offer: OfferTable, config: Config, values: Mapping[str, Any]) -> Machine:
    if offer.groups_per_s is not None:
        rate = offer.groups_per_s
    else:
        assert offer.tokens_per_s is not None  # the configuration's rules
        rate = offer.tokens_per_s / values["tokens_per_group"]
    return Machine(
        kind=WorkerKind(
            name=offer.name,
            rate_groups_per_s=rate,
            slots=offer.slots or config.worker.slots,
            install_s=values["install_s"],
            up_mbit=offer.uplink_mbit,
            down_mbit=offer.downlink_mbit,
            usd_per_h=offer.price_usd_per_h,
            accepts=offer.accepts,
        ),
        count=offer.count,
        availability=offer.availability,
        egress_usd_per_gb=offer.egress_usd_per_gb,
    )


def _lacks(missing: list[str], measured: Measured | None) -> str:
    first = missing[0].partition(" ")[0]
    example = f"{first}=NUMBER" if first.startswith("plan.") else "'offers=[{name=...}]'"
    ways = f"in the file ([plan], [[offers]]), by --set {example}"
    if measured is None:
        ways += ", or measured, by --from-run RUN_DIR or --calibrate"
    elif measured.run_dir is None:
        ways += "; the calibration does not measure it"
    else:
        ways += f"; {measured.run_dir} has not measured it"
    return f"echo2 plan needs {', '.join(missing)}; give that {ways}"
