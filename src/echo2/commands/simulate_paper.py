"""`echo2 simulate CONFIG --model paper`: the paper's ablation, by the paper's equations."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from echo2.config import Config, load_config
from echo2.core.capacity_pool import WorkerKind
from echo2.core.dissemination import DEFAULT_UP_MBIT
from echo2.core.dissemination_hosts import megabits
from echo2.core.paper_ablation import Outcome, Scenario, Setting, ablation_outcome
from echo2.errors import ConfigError


def main(path: Path, overrides: list[str], *, as_json: bool) -> int:
    config = load_config(path, overrides)
    setting = setting_of(config, source=str(path))
    found = [
        ablation_outcome(setting, Scenario(**scenario.model_dump()))
        for scenario in config.simulation.scenarios
    ]
    if as_json:
        print(json.dumps({"scenarios": [asdict(outcome) for outcome in found]}, indent=2))
    else:
        print(text_of(found))
    return 0


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
    if not table.scenarios:
        problems.append(
            "simulation.scenarios is empty: there is nothing to compute; add "
            "[[simulation.scenarios]], as configs/paper_table2.toml does"
        )
    if not pool:
        problems.append("simulation.workers is empty: there is no pool; add [[simulation.workers]]")
    problems += [
        f"simulation.scenarios: {each.name} has {each.machines} machines, and the pool "
        f"{len(pool)}; add [[simulation.workers]], or lower its machines"
        for each in table.scenarios
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
    )


def text_of(found: list[Outcome]) -> str:
    width = max(len(outcome.name) for outcome in found)
    lines = [f"{'':{width}}  machines  $ per step  T_bcast s  wait s"]
    lines += [
        f"{o.name:{width}}  {o.machines:8}  {o.cost_per_step_usd:10.3f}  {o.t_bcast_s:9.0f}  "
        f"{o.wait_s:6.1f}"
        for o in found
    ]
    return "\n".join(lines)
