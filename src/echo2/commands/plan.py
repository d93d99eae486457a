"""`echo2 plan`: for each S the cheapest machines on offer that are enough, and their price."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo2.commands.plan_measured import Measured, measure_run
from echo2.commands.plan_terms import PlanTerms, plan_terms
from echo2.commands.table import columns
from echo2.config import Config, load_config
from echo2.core.capacity_pool import Pool
from echo2.core.capacity_spread import fluid_bcast_s
from echo2.core.fleet_paper import PaperModel
from echo2.core.fleet_plan import CapacityModel, fleet_plan
from echo2.core.fleet_relaxed import Remedy, remedies
from echo2.core.fleet_terms import PlanRow

MODELS: Final[Mapping[str, CapacityModel]] = {"paper": PaperModel()}
REMEDIES_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class PlannedRow:
    row: PlanRow
    bottleneck: str
    remedies: Sequence[Remedy]


def main(
    path: Path, overrides: list[str], *, from_run: Path | None, model: str, as_json: bool
) -> int:
    """ConfigError when an assumption is missing. 1 if no S has a fleet that is enough."""
    config = load_config(path, overrides)
    measured = measure_run(from_run) if from_run is not None else None
    plan = plan_terms(config, measured, source=path)
    capacity = MODELS[model]
    wanted = range(config.plan.staleness_min, config.plan.staleness_max + 1)
    planned = [
        PlannedRow(
            row,
            bottleneck(plan.terms, row),
            remedies(plan.terms, plan.machines, capacity, row),
        )
        for row in fleet_plan(plan.terms, plan.machines, capacity, wanted)
    ]
    if as_json:
        print(json.dumps(to_json(config, plan, measured, capacity, planned), indent=2))
    else:
        print("\n".join(to_text(config, plan, measured, capacity, planned)))
    return 0 if any(each.row.is_enough for each in planned) else 1


def to_json(
    config: Config,
    plan: PlanTerms,
    measured: Measured | None,
    model: CapacityModel,
    planned: Sequence[PlannedRow],
) -> dict[str, Any]:
    """Numbers in the units of their names; null where no finite one is true."""
    best = cheapest(planned)
    return {
        "model": model.name,
        "assumptions": {
            name: {"value": value, "source": plan.sources[name]}
            for name, value in plan.values.items()
        },
        "groups_per_step": plan.terms.groups_per_step,
        "rate_margin": plan.terms.rate_margin,
        "learner_usd_per_h": plan.terms.learner_usd_per_h,
        "offers": [
            {
                "name": machine.kind.name,
                "price_usd_per_h": machine.kind.usd_per_h,
                "groups_per_s": machine.kind.rate_groups_per_s,
                "count": machine.count,
                "availability": machine.availability,
                "egress_usd_per_gb": machine.egress_usd_per_gb,
                "uplink_mbit": machine.kind.up_mbit,
                "downlink_mbit": machine.kind.down_mbit,
            }
            for machine in plan.machines
        ],
        "offers_source": plan.offers_source,
        "measured": None if measured is None else _measured_json(measured, plan),
        "configured": {
            "staleness_max": config.staleness.max,
            "period": config.staleness.period,
        },
        "rows": [_row_json(each) for each in planned],
        "cheapest_staleness_max": best.row.staleness_max if best else None,
    }


def _row_json(planned: PlannedRow) -> dict[str, Any]:
    row = planned.row
    return {
        "staleness_max": row.staleness_max,
        "period": row.period,
        "mu_min_groups_per_s": _finite(row.mu_min),
        "rate_groups_per_s": row.rate,
        "machines": dict(row.counts),
        "is_enough": row.is_enough,
        "is_cheapest": row.is_cheapest,
        "proof": row.proof,
        "bcast_s": row.bcast_s,
        "step_s": _finite(row.step_s),
        "bubble_ratio": row.bubble_ratio,
        "learner_usd_per_h": row.learner_usd_per_h,
        "machines_usd_per_h": row.machines_usd_per_h,
        "egress_usd_per_h": row.egress_usd_per_h,
        "usd_per_h": row.usd_per_h,
        "usd_per_step": _finite(row.usd_per_step),
        "usd_per_1000_steps": _finite(1000 * row.usd_per_step),
        "bottleneck": planned.bottleneck,
        "remedies": [
            {
                "what": each.what,
                "saves_usd_per_step": _finite(each.saves_usd_per_step),
                "makes_enough": each.makes_enough,
            }
            for each in planned.remedies
        ],
    }


def _measured_json(measured: Measured, plan: PlanTerms) -> dict[str, Any]:
    return {
        "run_dir": str(measured.run_dir),
        "num_steps": measured.num_steps,
        "bubble_ratio": measured.bubble_ratio,
        "bcast_s": measured.bcast_s,
        "bcast_s_of_the_model": _own_bcast_s(measured, plan),
    }


def _own_bcast_s(measured: Measured, plan: PlanTerms) -> float | None:
    """T_bcast of the run's own workers, as the plan reckons it; None with offers of the file."""
    if plan.offers_source != "measured":
        return None
    return fluid_bcast_s(
        plan.terms.weights, Pool(tuple((each.kind, each.count) for each in plan.machines))
    )


def to_text(
    config: Config,
    plan: PlanTerms,
    measured: Measured | None,
    model: CapacityModel,
    planned: Sequence[PlannedRow],
) -> list[str]:
    lines = [*_terms_text(plan, measured, model), ""]
    if not planned:
        return [
            *lines,
            f"no S from {config.plan.staleness_min} to {config.plan.staleness_max} has a period "
            f"in this model; raise plan.staleness_max",
        ]
    head = (
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
    lines += columns(head, [_cells(config, each.row) for each in planned])
    if any(_is_configured(config, each.row) for each in planned):
        lines.append("* staleness.max of this configuration")
    lines.append("")
    for each in planned:
        lines.append(f"S = {each.row.staleness_max}: {each.bottleneck}")
        lines += [f"    {remedy_text(remedy)}" for remedy in each.remedies[:REMEDIES_SHOWN]]
        if each.row.is_enough and not each.row.is_cheapest:
            lines.append(f"    not proven the cheapest: {each.row.proof}")
    best = cheapest(planned)
    lines.append("")
    if best is None:
        lines.append("No set of these machines is enough at any of these S.")
    else:
        lines.append(
            f"Cheapest step: S = {best.row.staleness_max} with κ = {best.row.period}, "
            f"{_machines_text(best.row.counts)}, {_usd(best.row.usd_per_step)} per step."
        )
    return lines


def cheapest(planned: Sequence[PlannedRow]) -> PlannedRow | None:
    """The one with the cheapest step; of equal ones that with the smallest S."""
    enough = [each for each in planned if each.row.is_enough]
    return min(enough, key=lambda each: each.row.usd_per_step, default=None)


def _terms_text(plan: PlanTerms, measured: Measured | None, model: CapacityModel) -> list[str]:
    terms, values, weights = plan.terms, plan.values, plan.terms.weights

    def from_run(*names: str) -> str:
        told = sorted({plan.sources[name] for name in names} - {"given"})
        return f" ({', '.join(told)})" if told else ""

    rows = [
        ("model", f"{model.name}; {terms.rate_margin:g} times what is needed at least"),
        (
            "learner",
            f"T_train {terms.train_s:.4g} s{from_run('train_s')}, R = {terms.groups_per_step} "
            f"groups of {values['tokens_per_group']:.0f} tokens{from_run('tokens_per_group')}, "
            f"${terms.learner_usd_per_h:g} per hour",
        ),
        (
            "versions",
            f"{_bytes(weights.num_bytes)}{from_run('version_bytes')}, of which "
            f"{weights.delta_share:.3g} travels{from_run('delta_share')}; encoding {weights.encode_s:.3g} s"
            f"{from_run('encode_s')}, install {values['install_s']:.3g} s{from_run('install_s')}; "
            f"origin {weights.origin_up_mbit:.4g} Mbit/s{from_run('origin_uplink_mbit')}",
        ),
    ]
    for machine in plan.machines:
        kind = machine.kind
        spot = f", there {machine.availability:.0%} of the time" if machine.availability < 1 else ""
        rows.append(
            (
                "offer" if plan.offers_source == "given" else "measured",
                f"{machine.count} {kind.name}: ${kind.usd_per_h:g} per hour, "
                f"{kind.rate_groups_per_s:.4g} groups/s, {kind.up_mbit:.4g} up and "
                f"{kind.down_mbit:.4g} down Mbit/s{spot}",
            )
        )
    if measured is not None:
        told = f"{measured.num_steps} steps, bubble {measured.bubble_ratio:.1%}"
        own_s = _own_bcast_s(measured, plan)
        if measured.bcast_s is not None:
            told += f", T_bcast {measured.bcast_s:.3g} s"
            told += f" (this plan's for the same fleet: {own_s:.3g} s)" if own_s else ""
        rows.append(("run", f"{measured.run_dir}: {told}"))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {text}" for name, text in rows]


def _cells(config: Config, row: PlanRow) -> tuple[str, ...]:
    return (
        f"{row.staleness_max}{'*' if _is_configured(config, row) else ''}",
        str(row.period),
        f"{row.bcast_s:.4g} s",
        f"{row.mu_min:.4g}" if math.isfinite(row.mu_min) else "none",
        f"{row.rate:.4g}",
        _machines_text(row.counts) + ("" if row.is_enough else " (not enough)"),
        f"{row.usd_per_h:.2f}",
        f"{row.usd_per_step:.4g}",
        f"{1000 * row.usd_per_step:.4g}",
        f"{row.bubble_ratio:.1%}",
    )


def _is_configured(config: Config, row: PlanRow) -> bool:
    return row.staleness_max == config.staleness.max


def _machines_text(counts: Mapping[str, int]) -> str:
    return " + ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def remedy_text(remedy: Remedy) -> str:
    saved = remedy.saves_usd_per_step
    effects = ["makes it enough"] if remedy.makes_enough else []
    if math.isfinite(saved):
        effects.append(f"{'saves' if saved >= 0 else 'costs'} {_usd(abs(saved))} per step")
    return f"{remedy.what} {' and '.join(effects)}"


def _usd(value: float) -> str:
    return f"${value:.2f}" if value >= 1 else f"${value:.3g}"


def _bytes(number: float) -> str:
    return f"{number / 1e9:.3g} GB" if number >= 1e9 else f"{number / 1e6:.3g} MB"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
