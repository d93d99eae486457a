"""`echo2 simulate CONFIG --model paper`: the paper's figures, by the paper's equations.

`[[simulation.scenarios]]` are its ablation (Table 2), with what the production core comes to beside
(`simulate_production`); `[[simulation.systems]]` what it saves over a baseline (Figure 3a).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from echo2.commands.simulate_production import Played, additions, production
from echo2.commands.simulate_systems import systems_json, systems_text
from echo2.commands.table import columns
from echo2.config import Config, load_config
from echo2.config_simulation import ScenarioTable
from echo2.core.capacity_pool import WorkerKind
from echo2.core.dissemination import DEFAULT_UP_MBIT
from echo2.core.dissemination_hosts import megabits
from echo2.core.paper_ablation import Outcome, Scenario, Setting, ablation_outcome
from echo2.errors import ConfigError


def main(path: Path, overrides: list[str], *, as_json: bool) -> int:
    """ConfigError when there is nothing to compute."""
    config = load_config(path, overrides)
    setting = setting_of(config, source=str(path))
    tables = config.simulation.scenarios
    found = [ablation_outcome(setting, scenario_of(table)) for table in tables]
    played: list[Played] = []
    added: list[Played] = []
    if found and config.simulation.production_steps:
        scenarios = [scenario_of(table) for table in tables]
        played = production(config, setting, scenarios)
        added = additions(config, setting, scenarios[0], played[0])
    if as_json:
        told: dict[str, Any] = {}
        if found:
            told["scenarios"] = [asdict(outcome) for outcome in found]
            told["printed"] = [
                _printed(table, outcome) for table, outcome in zip(tables, found, strict=True)
            ]
            told["production"] = [each.to_json() for each in played]
            told["additions"] = [
                each.to_json() | saved for each, saved in zip(added, _savings(added), strict=True)
            ]
        if config.simulation.systems:
            told |= systems_json(config, setting)
        print(json.dumps(told, indent=2))
        return 0
    lines = []
    if found:
        lines += text_of(found, tables)
        if played:
            lines += ["", *_production_text(played), "", *_additions_text(added)]
    if config.simulation.systems:
        lines += [*([""] if lines else []), *systems_text(config, setting)]
    print("\n".join(lines))
    return 0


def scenario_of(table: ScenarioTable) -> Scenario:
    return Scenario(
        name=table.name, machines=table.machines, peers=table.peers, by_price=table.by_price
    )


def setting_of(config: Config, *, source: str = "") -> Setting:
    """ConfigError when there is nothing to compute."""
    table = config.simulation
    pool = tuple(
        WorkerKind(
            name=f"{kind.name}-{place}",
            rate_groups_per_s=kind.tokens_per_s * kind.slots / config.worker.null.tokens_mean,
            slots=kind.slots,
            install_s=kind.install_s,
            up_mbit=kind.uplink_mbit,
            down_mbit=kind.downlink_mbit,
            usd_per_h=kind.price_usd_per_h,
            accepts=kind.reachable,
        )
        for kind in table.workers
        for place in range(1, kind.count + 1)
    )
    problems = []
    if not table.scenarios and not table.systems:
        problems.append(
            "simulation.scenarios is empty: there is nothing to compute; add "
            "[[simulation.scenarios]], as configs/paper_table2.toml does, or "
            "[[simulation.systems]], as configs/paper_figure3.toml does"
        )
    if not pool:
        problems.append("simulation.workers is empty: there is no pool; add [[simulation.workers]]")
    problems += [
        f"simulation.{which}: {each.name} has {each.machines} machines, and the pool "
        f"{len(pool)}; add [[simulation.workers]], or lower its machines"
        for which, entries in (("scenarios", table.scenarios), ("systems", table.systems))
        for each in entries
        if each.machines > len(pool) > 0
    ]
    if problems:
        raise ConfigError(problems, source=source)
    return Setting(
        groups_per_step=config.learner.groups_per_step,
        train_s=table.learner_step_s,
        period=config.staleness.period,
        size_mbit=megabits(round(1e6 * table.version_mb)),
        origin_mbit=config.net.origin_uplink_mbit or DEFAULT_UP_MBIT,
        rtt_s=table.rtt_s,
        learner_usd_per_h=config.cost.learner_usd_per_h,
        pool=pool,
        copy_s=table.copy_s,
    )


def _printed(table: ScenarioTable, outcome: Outcome) -> dict[str, Any]:
    """What the paper prints, null where it is not given, and what is computed above that: dollars
    as a share, the wait in seconds."""
    usd = table.printed_usd
    bcast_s, wait_s = table.printed_bcast_s, table.printed_wait_s
    return {
        "name": table.name,
        "cost_per_step_usd": usd,
        "t_bcast_s": bcast_s,
        "wait_s": wait_s,
        "cost_above": outcome.cost_per_step_usd / usd - 1 if usd else None,
        "t_bcast_above": outcome.t_bcast_s / bcast_s - 1 if bcast_s else None,
        "wait_above_s": outcome.wait_s - wait_s if wait_s is not None else None,
    }


def text_of(found: list[Outcome], tables: list[ScenarioTable]) -> list[str]:
    rows = []
    for outcome, table in zip(found, tables, strict=True):
        told = _printed(table, outcome)
        rows.append(
            [
                outcome.name,
                str(outcome.machines),
                f"{outcome.cost_per_step_usd:.3f}",
                f"{outcome.t_bcast_s:.0f}",
                f"{outcome.wait_s:.1f}",
                *(
                    "-" if told[key] is None else f"{told[key]:{form}}"
                    for key, form in (
                        ("cost_per_step_usd", ".3f"),
                        ("t_bcast_s", ".0f"),
                        ("wait_s", ".1f"),
                        ("cost_above", "+.1%"),
                    )
                ),
            ]
        )
    head = ("by the equations", "machines", "$ per step", "T_bcast s", "wait s", "printed: $")
    return columns((*head, "T_bcast s", "wait s", "$ off by"), rows)


def _production_text(played: list[Played]) -> list[str]:
    head = ("production core", "machines", "κ", "$ per step", "T_bcast s", "wait s", "bubble")
    return columns(head, [each.cells() for each in played])


def _additions_text(added: list[Played]) -> list[str]:
    head = ("echo2 adds", "machines", "κ", "$ per step", "T_bcast s", "wait s", "bubble")
    saved = [
        "-" if told["saves_usd"] is None else f"{told['saves_usd']:.3f} ({told['share']:.0%})"
        for told in _savings(added)
    ]
    return columns(
        (*head, "saves $"),
        [[*each.cells(), cell] for each, cell in zip(added, saved, strict=True)],
    )


def _savings(added: list[Played]) -> list[dict[str, float | None]]:
    """What each saves over the one before, and its share of what all save; null for the first."""
    usd = [each.steady.usd_per_step for each in added]
    found: list[dict[str, float | None]] = []
    for place, after in enumerate(usd):
        if not place:
            found.append({"saves_usd": None, "share": None})
            continue
        saved, whole = usd[place - 1] - after, usd[0] - usd[-1]
        found.append({"saves_usd": saved, "share": saved / whole if whole else 0.0})
    return found
