"""A plan for people: its terms, a table with a line for each S, what holds each back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from echo2.commands.plan_measured import Measured
from echo2.commands.plan_terms import PlanTerms
from echo2.commands.table import columns
from echo2.config import Config
from echo2.core.capacity_pool import Pool
from echo2.core.capacity_spread import fluid_bcast_s
from echo2.core.fleet_interval import RowInterval
from echo2.core.fleet_relaxed import Remedy
from echo2.core.fleet_terms import PlanRow

REMEDIES_SHOWN: Final = 4
_HEAD: Final = (
    "S",
    "κ",
    "T_bcast",
    "μ_min",
    "μ",
    "machines",
    "$/h",
    "$/step",
    "$/1000 steps",
    "bubble",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """`remedies` and `intervals` by S: of the configured one and of that with the cheapest step. No
    `intervals` where nothing is uncertain."""

    model: str
    terms: PlanTerms
    measured: Measured | None
    rows: Sequence[PlanRow]
    remedies: Mapping[int, Sequence[Remedy]]
    intervals: Mapping[int, RowInterval]

    @property
    def cheapest(self) -> PlanRow | None:
        return cheapest_row(self.rows)


def cheapest_row(rows: Sequence[PlanRow]) -> PlanRow | None:
    """The one with the cheapest step of those that are enough; of equal ones that with the
    smallest S."""
    enough = [row for row in rows if row.is_enough]
    return min(enough, key=lambda row: row.usd_per_step, default=None)


def own_bcast_s(plan: Plan) -> float | None:
    """T_bcast of the measured run's own workers, as the plan reckons it; None with offers of the
    file."""
    if plan.terms.offers_source != "measured":
        return None
    machines = plan.terms.machines
    return fluid_bcast_s(
        plan.terms.terms.weights, Pool(tuple((each.kind, each.count) for each in machines))
    )


def plan_text(config: Config, plan: Plan) -> list[str]:
    lines = [*_terms(plan), ""]
    if not plan.rows:
        return [
            *lines,
            f"no S from {config.plan.staleness_min} to {config.plan.staleness_max} has a period in "
            f"this model; raise plan.staleness_max, or take another --model",
        ]
    lines += columns(
        _HEAD,
        [_cells(config, row, plan.intervals.get(row.staleness_max)) for row in plan.rows],
    )
    if any(_is_configured(config, row) for row in plan.rows):
        lines.append("* staleness.max of this configuration")
    if plan.intervals:
        lines.append("(low to high) holds the true value in 90 % of cases, if the model is right")
    lines.append("")
    for _, group in groupby(plan.rows, key=lambda row: row.bottleneck):
        lines += _held_back(plan, list(group))
    best = plan.cheapest
    lines.append("")
    if best is None:
        lines.append("No set of these machines is enough at any of these S.")
    else:
        lines.append(
            f"Cheapest step: S = {best.staleness_max} with κ = {best.period}, "
            f"{_machines(best.counts)}, {_usd(best.usd_per_step)} per step."
        )
    return lines


def _held_back(plan: Plan, rows: Sequence[PlanRow]) -> Iterator[str]:
    """What holds back these rows, which is the same of each, and what would save money."""
    first, last = rows[0].staleness_max, rows[-1].staleness_max
    yield f"S = {first}{f' to {last}' if last > first else ''}: {rows[0].bottleneck}"
    for row in rows:
        at = f"at S = {row.staleness_max}: " if last > first else ""
        found = plan.remedies.get(row.staleness_max, ())
        for remedy in found[:REMEDIES_SHOWN]:
            yield f"    {at}{remedy_text(remedy)}"
        if row.is_enough and not row.is_cheapest:
            yield f"    {at}not proven the cheapest: {row.proof}"


def remedy_text(remedy: Remedy) -> str:
    saved = remedy.saves_usd_per_step
    word = "saves" if saved >= 0 else "costs"
    enough = "makes it enough and " if remedy.makes_enough else ""
    return f"{remedy.what} {enough}{word} {_usd(abs(saved))} per step"


def _terms(plan: Plan) -> list[str]:
    terms, values, weights = plan.terms.terms, plan.terms.values, plan.terms.terms.weights

    def of(*names: str) -> str:
        told = sorted({plan.terms.sources[name] for name in names} - {"given"})
        return f" ({', '.join(told)})" if told else ""

    rows = [
        ("model", f"{plan.model}; {terms.rate_margin:g} times the rate that is needed at least"),
        (
            "learner",
            f"T_train {terms.train_s:.4g} s{of('train_s')}, R = {terms.groups_per_step} groups of "
            f"{values['tokens_per_group']:.0f} tokens{of('tokens_per_group')}, cv "
            f"{terms.latency_cv:.2g}{of('group_tokens_cv')}; ${terms.learner_usd_per_h:g} per hour",
        ),
        (
            "versions",
            f"{_bytes(weights.num_bytes)}{of('version_bytes')}, "
            f"{_share(weights.delta_share)} of it travels{of('delta_share')}; "
            f"encoding {weights.encode_s:.3g} s{of('encode_s')}, "
            f"install {values['install_s']:.3g} s{of('install_s')}; "
            f"origin {weights.origin_up_mbit:.4g} Mbit/s{of('origin_uplink_mbit')}",
        ),
        *_offers(plan),
    ]
    errors = _errors(plan)
    if errors:
        rows.append(("errors", errors))
    if plan.measured is not None and plan.measured.run_dir is not None:
        rows.append(("run", _run(plan, plan.measured)))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _errors(plan: Plan) -> str:
    """What is uncertain, and by how much."""
    errors, sources = plan.terms.errors, plan.terms.error_sources
    return ", ".join(
        f"{what} {100 * error:.2g}%" + (" (measured)" if sources[name] == "measured" else "")
        for name, what, error in (
            ("train", "T_train", errors.train),
            ("rate", "rates", errors.rate),
            ("bcast", "T_bcast", errors.bcast),
        )
        if error
    )


def _offers(plan: Plan) -> Iterator[tuple[str, str]]:
    for machine in plan.terms.machines:
        kind = machine.kind
        egress, there = machine.egress_usd_per_gb, machine.availability
        yield (
            "offer" if plan.terms.offers_source == "given" else "measured",
            f"{machine.count} {kind.name}: ${kind.usd_per_h:g} per hour, "
            f"{kind.rate_groups_per_s:.4g} groups/s, {kind.up_mbit:.4g} up and "
            f"{kind.down_mbit:.4g} down Mbit/s"
            + (f", ${egress:g} per GB sent" if egress else "")
            + (f", there {there:.0%} of the time" if there < 1 else ""),
        )


def _run(plan: Plan, measured: Measured) -> str:
    told = f"{measured.run_dir}: {measured.num_steps} steps, bubble {measured.bubble_ratio:.1%}"
    if measured.bcast_s is None:
        return told
    own_s = own_bcast_s(plan)
    of_plan = f" (this plan's for the same workers: {own_s:.3g} s)" if own_s is not None else ""
    return f"{told}, T_bcast {measured.bcast_s:.3g} s{of_plan}"


def _cells(config: Config, row: PlanRow, interval: RowInterval | None) -> tuple[str, ...]:
    usd, bubble = _amount(row.usd_per_step), f"{row.bubble_ratio:.1%}"
    if interval is not None:
        low, high = interval.usd_per_step
        usd += f" ({_amount(low)} to {_amount(high)})"
        low, high = interval.bubble
        bubble += f" ({100 * low:.1f} to {100 * high:.1f})"
    return (
        f"{row.staleness_max}{'*' if _is_configured(config, row) else ''}",
        str(row.period),
        f"{row.bcast_s:.4g} s",
        f"{row.mu_min:.4g}" if math.isfinite(row.mu_min) else "none",
        f"{row.rate:.4g}",
        _machines(row.counts) + ("" if row.is_enough else " (not enough)"),
        _amount(row.usd_per_h),
        usd,
        _amount(1000 * row.usd_per_step),
        bubble,
    )


def _is_configured(config: Config, row: PlanRow) -> bool:
    return row.staleness_max == config.staleness.max


def _machines(counts: Mapping[str, int]) -> str:
    return " + ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _share(value: float) -> str:
    return "all" if value == 1 else f"{value:.3g}"


def _usd(value: float) -> str:
    return f"${value:.2f}" if value >= 1 else f"${value:.3g}"


def _amount(value: float) -> str:
    """Four digits, and no power of ten for large ones."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def _bytes(number: float) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"
