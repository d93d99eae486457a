"""What echo2's prices save over a centralised baseline: the paper's Figure 3a, and by its rule."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from echo2.commands.table import columns
from echo2.config import Config
from echo2.config_simulation import SystemTable
from echo2.core.capacity_paper import paper_fixed_point
from echo2.core.capacity_pool import Pool
from echo2.core.paper_ablation import Setting, by_price, paper_bcast_s
from echo2.core.paper_reduction import System, mean_of, reductions


def systems_json(config: Config, setting: Setting) -> dict[str, Any]:
    """`systems` and `reductions` with the configured machines, the same `by_the_rule`."""
    told: dict[str, Any] = {}
    for key, ruled in (("", False), ("by_the_rule", True)):
        systems = _systems(config, setting, ruled=ruled)
        found = reductions(systems)
        part: dict[str, Any] = {
            "systems": [
                asdict(each) | {"cost_per_step_usd": each.usd_per_step} for each in systems
            ],
            "reductions": [asdict(each) for each in found],
            "reduction_mean": {
                each.name: mean_of(found, each.name)
                for each in systems
                if each.is_baseline and any(one.baseline == each.name for one in found)
            },
        }
        told |= {key: part} if key else part
    told["printed_reduction_percent"] = config.simulation.printed_reduction_percent
    return told


def systems_text(config: Config, setting: Setting) -> list[str]:
    systems = _systems(config, setting, ruled=False)
    lines = columns(
        ("", "workers", "$ per h", "s per step", "$ per step"),
        [
            [
                each.name,
                "-" if each.is_baseline else str(each.machines),
                f"{each.usd_per_h:.2f}",
                f"{each.step_s:.1f}",
                f"{each.usd_per_step:.3f}",
            ]
            for each in systems
        ],
    )
    lines += ["", *_reductions_text(systems, "saved, %")]
    printed = config.simulation.printed_reduction_percent
    if printed:
        lines.append(f"the paper prints {' to '.join(f'{percent:g}' for percent in printed)} %")
    ruled = _systems(config, setting, ruled=True)
    counts = ", ".join(f"{each.name} {each.machines}" for each in ruled if not each.is_baseline)
    return [
        *lines,
        "",
        f"with as many workers as Eqs. (2) to (4) activate: {counts}",
        *_reductions_text(ruled, "saved, %"),
    ]


def _reductions_text(systems: list[System], title: str) -> list[str]:
    found = reductions(systems)
    baselines = list(dict.fromkeys(each.baseline for each in found))
    names = list(dict.fromkeys(each.system for each in found))
    shares = {(each.system, each.baseline): each.share for each in found}
    rows = [[name, *(f"{100 * shares[name, base]:.1f}" for base in baselines)] for name in names]
    if len(names) > 1:
        rows.append(["mean", *(f"{100 * mean_of(found, base):.1f}" for base in baselines)])
    return columns((title, *(f"over {base}" for base in baselines)), rows)


def _systems(config: Config, setting: Setting, *, ruled: bool) -> list[System]:
    """`ruled`: their workers are those that the paper's rule activates."""
    return [_system(table, setting, ruled=ruled) for table in config.simulation.systems]


def _system(table: SystemTable, setting: Setting, *, ruled: bool) -> System:
    if table.usd_per_h:
        return System(
            name=table.name, step_s=table.step_s, usd_per_h=table.usd_per_h, is_baseline=True
        )
    order = by_price(setting.pool)
    if table.machines and not ruled:
        pool = Pool.of(order[: table.machines])
    else:
        own = replace(setting, train_s=table.step_s, period=table.period)
        pool = paper_fixed_point(
            order,
            groups_per_step=own.groups_per_step,
            train_s=own.train_s,
            period=own.period,
            bcast_s=lambda these: paper_bcast_s(own, these, peers=True),
        ).pool
    return System(
        name=table.name,
        step_s=table.step_s,
        usd_per_h=setting.learner_usd_per_h + pool.usd_per_h,
        machines=pool.num_workers,
    )
