"""The core's settings out of the TOML schema."""

from __future__ import annotations

import json
import uuid

from echo2.config import Config
from echo2.config_offers import OfferTable
from echo2.config_vllm import precision_of
from echo2.core.activation_policy import ActivationSettings
from echo2.core.settings import (
    ActivationTerms,
    AuditSettings,
    CoordinatorSettings,
    OfferTerms,
)
from echo2.core.suspicion import MismatchRule
from echo2.types import PeerId


def audit_settings_of(config: Config, key: bytes) -> AuditSettings:
    """[audit] as the core reads it; `key` is the run's secret."""
    audit = config.audit
    return AuditSettings(
        share=audit.share,
        workers=tuple(PeerId(name) for name in audit.workers),
        key=key,
        reward_tolerance=audit.reward_tolerance,
        refuted_needed=audit.refuted_needed,
        wait_s=audit.wait_s,
        in_flight_max=audit.in_flight,
        action=audit.action,
        rule=MismatchRule(
            needed=audit.mismatch_needed,
            tokens_min=audit.mismatch_tokens,
            factor=audit.mismatch_factor,
            floor=audit.mismatch_floor,
            run_precision=precision_of(config),
        ),
    )


def activation_terms_of(config: Config) -> ActivationTerms:
    """[activation] and what it goes by, as the core reads it."""
    table, provisioner = config.activation, config.provisioner
    return ActivationTerms(
        policy=table.policy,
        settings=ActivationSettings(
            margin=table.margin,
            surplus_share=table.surplus_share,
            persistence_s=table.persistence_s,
            cool_down_s=table.cool_down_s,
            errors=table.errors,
            prior_samples=table.prior_samples,
        ),
        offers=tuple(_offer_terms(config, offer) for offer in config.offers),
        train_s=config.plan.train_s,
        provisions=provisioner.kind != "static",
        machines_max=provisioner.max_workers,
        ready_timeout_s=provisioner.ready_timeout_s,
    )


def _offer_terms(config: Config, offer: OfferTable) -> OfferTerms:
    rate, tokens_per_group = offer.groups_per_s, config.plan.tokens_per_group
    if offer.tokens_per_s is not None and tokens_per_group is not None:
        rate = offer.tokens_per_s / tokens_per_group
    return OfferTerms(
        name=offer.name,
        usd_per_h=offer.price_usd_per_h,
        rate=rate,
        count=offer.count,
        standby_usd_per_h=offer.standby_usd_per_h,
        egress_usd_per_gb=offer.egress_usd_per_gb,
    )


def settings_of(config: Config, run_id: str, audit_key: bytes = b"") -> CoordinatorSettings:
    """The core's settings out of the TOML schema."""
    return CoordinatorSettings(
        run_id=run_id,
        life=uuid.uuid4().hex[:8],
        staleness_max=config.staleness.max,
        late=config.staleness.late,
        period=config.staleness.period,
        mask_min_tokens=config.staleness.mask_min_tokens,
        groups_per_step=config.learner.groups_per_step,
        group_size=config.dispatch.group_size,
        lead_steps=config.dispatch.lead_steps,
        attempts_max=config.dispatch.attempts_max,
        stall_s=config.dispatch.stall_s,
        lease_max_s=config.dispatch.lease_max_s,
        tasks_ahead=config.dispatch.tasks_ahead,
        tasks_bytes_max=config.dispatch.tasks_bytes_max,
        sampling=config.sampling.sampling(),
        filter_zero_variance=config.learner.filter_zero_variance,
        partial_batch=config.learner.partial_batch,
        heartbeat_interval_s=config.heartbeat.interval_s,
        suspect_s=config.heartbeat.suspect_s,
        gone_s=config.heartbeat.gone_s,
        environment=config.environment.name,
        environment_settings=json.dumps(config.environment.settings),
        eval_hold_s=config.eval.hold_s,
        no_worker_timeout_s=config.run.no_worker_timeout_s,
        learner_timeout_s=config.run.learner_timeout_s,
        learner_usd_per_h=config.cost.learner_usd_per_h,
        budget_usd=config.budget.max_usd,
        origin_egress_usd_per_gb=config.plan.origin_egress_usd_per_gb,
        activation=activation_terms_of(config),
        seed=config.run.seed,
        curve=config.net.curve,
        host=config.net.host,
        origin_uplink_mbit=config.net.origin_uplink_mbit,
        audit=audit_settings_of(config, audit_key),
    )
