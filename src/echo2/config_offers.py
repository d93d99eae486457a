"""The tables [[offers]] and [plan]: machines that can be had, and what `echo2 plan` assumes.

`echo2 plan` reads them, and of offers [activation] and [provisioner]. What a run has measured
stands in for what [plan] leaves out (`echo2 plan --from-run`).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field

from echo2.config_table import NonNegativeSeconds, PositiveSeconds, Price, Table

if TYPE_CHECKING:
    from echo2.config import Config

OFFERS_MAX: Final = 1000
"""Kinds of machines that a configuration may offer."""


class OfferTable(Table):
    """Machines of one kind that could be rented, or are there."""

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    price_usd_per_h: Price
    """Of one machine, while it is there."""
    groups_per_s: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """μ: rewarded groups per second of one machine with all its slots busy. Give this or
    tokens_per_s."""
    tokens_per_s: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Sampled tokens per second of one machine, of all its slots together."""
    standby_usd_per_h: Price | None = None
    """Of one whose worker stands by ([activation]); by default as much as while it works."""
    count: Annotated[int, Field(ge=1, le=100_000)] = 1
    """How many of them can be had."""
    slots: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Groups in work at once; by default worker.slots."""
    uplink_mbit: Annotated[float, Field(ge=0, le=1e9)] = 50.0
    """What it can forward, in Mbit/s; 0: nothing."""
    downlink_mbit: Annotated[float, Field(gt=0, le=1e9)] = 200.0
    """What it can receive, in Mbit/s."""
    accepts: bool = True
    """Whether inbound connections reach it; one that only dials can forward to those that
    accept."""
    egress_usd_per_gb: Price = 0.0
    """For each gigabyte (10⁹ bytes) that leaves it: results, and versions that it forwards."""
    availability: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the time in which such a machine is there, if it is a spot machine: it works, and
    is paid, only then."""


class PlanTable(Table):
    """What `echo2 plan` assumes of a run."""

    train_s: PositiveSeconds | None = None
    """T_train: seconds of a learner step, without waiting."""
    tokens_per_group: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Tokens that a group samples on average, of all its trajectories together."""
    group_tokens_cv: Annotated[float, Field(ge=0, le=10)] | None = None
    """Coefficient of variation of a group's tokens; 0.5 where nothing is known."""
    version_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = None
    """Bytes of all published tensors."""
    delta_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Bytes of a delta over those of the version; 1, where nothing is known: versions travel
    whole."""
    encode_s: NonNegativeSeconds | None = None
    """From the end of a step until the first chunk may leave the origin; 0 where nothing is
    known."""
    install_s: NonNegativeSeconds | None = None
    """How long an engine samples nothing for an install; 0 where nothing is known."""
    origin_uplink_mbit: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """What the learner's host can send, in Mbit/s; by default net.origin_uplink_mbit, if that is
    not 0."""
    origin_egress_usd_per_gb: Price = 0.0
    """For each gigabyte that leaves the learner's host."""
    staleness_min: Annotated[int, Field(ge=0, le=100)] = 0
    staleness_max: Annotated[int, Field(ge=0, le=100)] = 6
    """The S that are compared, from staleness_min to this."""
    rate_margin: Annotated[float, Field(ge=1, le=10)] = 1.1
    """γ: the workers' summed rate over what is needed at least."""
    uncertainty: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Relative standard error of what the file gives, here and in [[offers]]: of T_train, of the
    machines' rates, of T_bcast with the install. 0: none, and no intervals; what a run has measured
    has its own."""


def offer_names_problem(c: Config) -> str | None:
    """The rule over the names of offers."""
    names = Counter(offer.name for offer in c.offers)
    twice = next((name for name, times in names.items() if times > 1), None)
    if twice is None:
        return None
    return f'{names[twice]} offers are called "{twice}"; give each kind of machine its own name'


def offer_rates_problem(c: Config) -> str | None:
    """The rule over the two ways to tell an offer's rate."""
    for offer in c.offers:
        given = [offer.groups_per_s, offer.tokens_per_s].count(None)
        if given == 1:
            continue
        what = "neither" if given == 2 else "both"
        return (
            f'"{offer.name}" has {what} of groups_per_s and tokens_per_s; give one: how many '
            "rewarded groups, or sampled tokens, one such machine makes in a second"
        )
    return None


def plan_range_problem(c: Config) -> str | None:
    """The rule over the S that are compared."""
    if c.plan.staleness_min <= c.plan.staleness_max:
        return None
    return (
        f"{c.plan.staleness_min} is above plan.staleness_max {c.plan.staleness_max}; S is "
        "compared from the one to the other"
    )
