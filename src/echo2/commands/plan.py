"""`echo2 plan`: for each S the cheapest machines on offer that are enough, and their price."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from echo2.commands.plan_calibrate import calibrate, calibration_text
from echo2.commands.plan_measured import Measured, measure_run
from echo2.commands.plan_picture import check_picture, write_picture
from echo2.commands.plan_terms import plan_terms
from echo2.commands.plan_text import Plan, cheapest_row, own_bcast_s, plan_text
from echo2.config import Config, load_config
from echo2.core.fleet_echo2 import Echo2Model
from echo2.core.fleet_interval import RowInterval, row_interval
from echo2.core.fleet_paper import PaperModel
from echo2.core.fleet_plan import CapacityModel, fleet_plan
from echo2.core.fleet_relaxed import Remedy, remedies
from echo2.core.fleet_terms import PlanRow

MODELS: Final[Mapping[str, CapacityModel]] = {
    model.name: model for model in (Echo2Model(), PaperModel())
}


def main(
    path: Path,
    overrides: list[str],
    *,
    from_run: Path | None,
    model: str,
    as_json: bool,
    picture: Path | None = None,
    calibrate_s: float | None = None,
) -> int:
    """ConfigError when an assumption is missing. 1 if no S has a fleet that is enough."""
    if picture is not None:
        check_picture(picture)
    config = load_config(path, overrides)
    measured = None
    if from_run is not None:
        measured = measure_run(from_run)
    elif calibrate_s is not None:
        measured = calibrate(path, config, overrides, seconds=calibrate_s)
        if not as_json:
            print("\n".join([*calibration_text(config, measured), ""]), flush=True)
    plan = plan_of(config, path, measured, MODELS[model])
    if picture is not None:
        write_picture(picture, config, plan, MODELS[model])
    if as_json:
        print(json.dumps(to_json(config, plan), indent=2))
    else:
        print("\n".join(plan_text(config, plan)))
    return 0 if plan.cheapest is not None else 1


def plan_of(config: Config, path: Path, measured: Measured | None, model: CapacityModel) -> Plan:
    """ConfigError when an assumption is missing."""
    found = plan_terms(config, measured, source=path)
    wanted = range(config.plan.staleness_min, config.plan.staleness_max + 1)
    rows = fleet_plan(found.terms, found.machines, model, wanted)
    best = cheapest_row(rows)
    told = {config.staleness.max} | ({best.staleness_max} if best else set())
    terms, machines = found.terms, found.machines
    chosen = [row for row in rows if row.staleness_max in told]
    intervals = {
        row.staleness_max: row_interval(terms, machines, model, row, found.errors) for row in chosen
    }
    return Plan(
        model.name,
        found,
        measured,
        rows,
        {row.staleness_max: remedies(terms, machines, model, row) for row in chosen},
        {s: interval for s, interval in intervals.items() if interval is not None},
    )


def to_json(config: Config, plan: Plan) -> dict[str, Any]:
    """Numbers in the units of their names; null where no finite one is true. `remedies` and
    `interval` of a row are null where they were not looked for, `interval` also where nothing is
    uncertain."""
    terms = plan.terms.terms
    return {
        "model": plan.model,
        "assumptions": {
            name: {"value": value, "source": plan.terms.sources[name]}
            for name, value in plan.terms.values.items()
        },
        "standard_errors": {
            name: {"value": getattr(plan.terms.errors, name), "source": source}
            for name, source in plan.terms.error_sources.items()
        },
        "groups_per_step": terms.groups_per_step,
        "rate_margin": terms.rate_margin,
        "learner_usd_per_h": terms.learner_usd_per_h,
        "origin_egress_usd_per_gb": terms.origin_egress_usd_per_gb,
        "offers_source": plan.terms.offers_source,
        "offers": [
            {
                "name": machine.kind.name,
                "price_usd_per_h": machine.kind.usd_per_h,
                "groups_per_s": machine.kind.rate_groups_per_s,
                "slots": machine.kind.slots,
                "count": machine.count,
                "availability": machine.availability,
                "egress_usd_per_gb": machine.egress_usd_per_gb,
                "uplink_mbit": machine.kind.up_mbit,
                "downlink_mbit": machine.kind.down_mbit,
                "accepts": machine.kind.accepts,
            }
            for machine in plan.terms.machines
        ],
        "run": _run_json(plan),
        "calibration": _calibration_json(plan),
        "configured": {"staleness_max": config.staleness.max, "period": config.staleness.period},
        "rows": [
            _row_json(
                row,
                plan.remedies.get(row.staleness_max),
                plan.intervals.get(row.staleness_max),
            )
            for row in plan.rows
        ],
        "cheapest_staleness_max": plan.cheapest.staleness_max if plan.cheapest else None,
    }


def _row_json(
    row: PlanRow, found: Sequence[Remedy] | None, interval: RowInterval | None
) -> dict[str, Any]:
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
        "step_s": row.step_s,
        "bubble_ratio": row.bubble_ratio,
        "learner_usd_per_h": row.learner_usd_per_h,
        "machines_usd_per_h": row.machines_usd_per_h,
        "egress_usd_per_h": row.egress_usd_per_h,
        "usd_per_h": row.usd_per_h,
        "usd_per_step": row.usd_per_step,
        "usd_per_1000_steps": 1000 * row.usd_per_step,
        "bottleneck": row.bottleneck,
        "interval": None
        if interval is None
        else {"bubble": list(interval.bubble), "usd_per_step": list(interval.usd_per_step)},
        "remedies": None
        if found is None
        else [
            {
                "what": each.what,
                "saves_usd_per_step": each.saves_usd_per_step,
                "makes_enough": each.makes_enough,
            }
            for each in found
        ],
    }


def _run_json(plan: Plan) -> dict[str, Any] | None:
    measured = plan.measured
    if measured is None or measured.run_dir is None:
        return None
    return {
        "run_dir": str(measured.run_dir),
        "num_steps": measured.num_steps,
        "bubble_ratio": measured.bubble_ratio,
        "bcast_s": measured.bcast_s,
        "bcast_s_of_the_plan": own_bcast_s(plan),
    }


def _calibration_json(plan: Plan) -> dict[str, Any] | None:
    measured = plan.measured
    if measured is None or measured.run_dir is not None:
        return None
    return {
        "plan": dict(measured.values),
        "offers": [offer.model_dump(exclude_none=True) for offer in measured.offers],
        "num_steps": measured.num_steps,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
