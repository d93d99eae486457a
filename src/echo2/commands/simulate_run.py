"""`echo2 simulate CONFIG`: the whole run on a virtual clock, and what it would cost."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from echo2.commands.run_folder import RunFolder
from echo2.config import Config, load_config
from echo2.config_settings import settings_of
from echo2.errors import ConfigError, Echo2Error
from echo2.sim.virtual import Figures, RunPlan, VirtualRun
from echo2.sim.virtual.records import Records

HOURS_MAX: Final = 10_000.0


def main(
    path: Path,
    run_dir: Path | None,
    overrides: list[str],
    *,
    hours: float | None,
    steps: int | None,
    seed: int | None,
    as_json: bool,
) -> int:
    """0 when the run came to its end; 1 when it could not go on, with the cause."""
    config = load_config(path, overrides)
    plan = plan_of(config, hours=hours, steps=steps, seed=seed, source=str(path))
    run = VirtualRun(plan)
    began = time.perf_counter()
    with ExitStack() as stack:
        records = None
        if run_dir is not None:
            folder = RunFolder(run_dir)
            if folder.is_used():
                raise Echo2Error(
                    f"{run_dir} holds a run already: give another --run-dir, or remove it"
                )
            folder.make()
            clock = run.timeline
            records = stack.enter_context(Records(folder.path, config, clock=lambda: clock.now))
        figures = run.run(records)
    seconds = time.perf_counter() - began
    if as_json:
        print(json.dumps({"seed": plan.seed, **figures.to_json()}, indent=2))
    else:
        print(text_of(figures, plan, seconds))
    if not figures.ok:
        raise Echo2Error(f"the simulated run could not go on: {figures.reason}")
    return 0


def plan_of(
    config: Config, *, hours: float | None, steps: int | None, seed: int | None, source: str = ""
) -> RunPlan:
    """ConfigError for what cannot be simulated."""
    table = config.simulation
    problems = []
    if not table.workers:
        problems.append(
            "simulation.workers is empty: there is no fleet to simulate; add "
            "[[simulation.workers]] with name, count, tokens_per_s and slots, as "
            "configs/simulate_100.toml does"
        )
    if config.audit.share:
        problems.append(
            f"audit.share = {config.audit.share:g}: audits are not simulated; set it to 0 "
            "(--set audit.share=0)"
        )
    if hours is not None and not 0 < hours <= HOURS_MAX:
        problems.append(f"--hours {hours:g}: allowed is a number above 0 and at most 10000")
    if problems:
        raise ConfigError(problems, source=source)
    if hours is None:
        hours = table.hours if steps is None else HOURS_MAX
    seed = config.run.seed if seed is None else seed
    settings = settings_of(config, f"simulated-{seed}")
    activation = replace(settings.activation, provisions=False)  # its workers are all there
    settings = replace(settings, life="1", seed=seed, activation=activation)
    return RunPlan(
        config=config,
        settings=settings,
        seed=seed,
        hours=hours,
        steps=config.learner.steps if steps is None else steps,
    )


def text_of(figures: Figures, plan: RunPlan, seconds: float) -> str:
    """The summary for people."""
    found = figures.to_json()
    mean = _number(figures.staleness_mean)
    lines = [
        f"simulated {found['virtual_hours']:.2f} h in {seconds:.1f} s: "
        f"{figures.num_events} events, seed {plan.seed}",
        f"end        {figures.reason}",
        f"steps      {figures.steps}, {found['steps_per_h']:.1f} an hour",
        f"cost       ${figures.cost_usd:.2f}, {_usd(figures.cost_per_step_usd)} a step",
        f"bubble     {_percent(figures.bubble_ratio)} of the learner's time",
        f"staleness  {_histogram(found['staleness'])}; mean {mean} steps",
        f"groups     {_counts(found['groups'])}; {_percent(figures.expired_share)} expired; "
        f"{figures.leases_lost} leases lost",
        f"rate       {found['tokens_per_s']:.0f} tokens/s trained",
        f"T_bcast    {_broadcast(found['t_bcast_s'])}",
    ]
    for kind, hours in found["worker_hours"].items():
        lines.append(f"worker-h   {kind} {hours:.2f} h, ${found['worker_usd'][kind]:.2f}")
    return "\n".join(lines)


def _usd(value: float | None) -> str:
    return "-" if value is None else f"${value:.4f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _counts(counted: dict[str, int]) -> str:
    return ", ".join(f"{number} {end}" for end, number in counted.items()) or "none"


def _histogram(counted: dict[str, int]) -> str:
    total = sum(counted.values())
    told = (f"{steps}: {_percent(number / total)}" for steps, number in counted.items())
    return ", ".join(told) or "-"


def _broadcast(found: dict[str, Any]) -> str:
    if not found["versions"]:
        return "-"
    return (
        f"mean {found['mean']:.1f} s, p95 {found['p95']:.1f} s, until 0.9 of the workers had it "
        f"({found['versions']} versions)"
    )
