"""`echo2 plan --picture FILE.svg`: dollars per step against S, and the bubble against workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from echo2.chart import Line, Panel, svg
from echo2.commands.plan_text import Plan
from echo2.config import Config
from echo2.core.capacity_pool import Pool
from echo2.core.fleet_case import FleetCase
from echo2.core.fleet_plan import CapacityModel
from echo2.core.fleet_terms import Machine, PlanRow
from echo2.errors import ConfigError

POINTS_MAX: Final = 24
"""Numbers of workers that are looked at for each line."""
BEYOND: Final = 1.6
"""Up to so many times the machines of the largest row."""
LINES_MAX: Final = 4


def check_picture(path: Path) -> None:
    """ConfigError for a name that is not that of an SVG file."""
    if path.suffix != ".svg":
        raise ConfigError(f"--picture {path}: the picture is SVG; name a file that ends in .svg")


def write_picture(path: Path, config: Config, plan: Plan, model: CapacityModel) -> None:
    """ConfigError when there is nothing to draw, or the file cannot be written."""
    if not plan.rows:
        raise ConfigError("--picture: no S has a period in this model, so nothing can be drawn")
    text = svg([cost_panel(config, plan), bubble_panel(config, plan, model)])
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--picture {path} cannot be written: {error.strerror}; name another file"
        ) from error


def cost_panel(config: Config, plan: Plan) -> Panel:
    """Dollars per step of each S, in parts; the configured S is marked."""
    parts: dict[str, Callable[[PlanRow], float]] = {
        "whole step": lambda row: row.usd_per_step,
        "of it the learner": lambda row: row.learner_usd_per_h * row.step_s / 3600.0,
        "of it machines and egress": lambda row: (
            (row.machines_usd_per_h + row.egress_usd_per_h) * row.step_s / 3600.0
        ),
    }
    lines = [
        Line(
            name=name,
            points=[(row.staleness_max, value(row)) for row in plan.rows],
            dots=True,
            dashed=name != "whole step",
        )
        for name, value in parts.items()
    ]
    return Panel(
        title="cost against S",
        x_label="S, learner steps",
        y_label="$ per learner step",
        lines=lines,
        marks=[(config.staleness.max, "configured")],
    )


def bubble_panel(config: Config, plan: Plan, model: CapacityModel) -> Panel:
    """The learner's waiting against the number of workers, taken by price for what they make, for
    some S with the κ of their rows. The number that the plan takes at the configured S is marked,
    whichever machines these are."""
    rows = shown_rows(config, plan.rows)
    most = max(sum(row.counts.values()) for row in rows)
    machines = plan.terms.machines
    there = sum(machine.count for machine in machines)
    numbers = spread(1, max(2, min(there, round(BEYOND * most) + 1)))
    lines = []
    for row in rows:
        case = FleetCase(plan.terms.terms, machines, row.staleness_max, row.period)
        points = []
        for number in numbers:
            pool = cheapest_pool(machines, number)
            bubble = 1.0 - case.terms.train_s / model.step_s(case, pool)
            points.append((float(number), 100.0 * bubble))
        lines.append(
            Line(name=f"S = {row.staleness_max}, κ = {row.period}", points=points, dots=True)
        )
    marks = [
        (float(sum(row.counts.values())), f"taken at S = {row.staleness_max}")
        for row in rows
        if row.staleness_max == config.staleness.max
    ]
    return Panel(
        title="bubble against workers",
        x_label="workers, the cheapest for what they make first",
        y_label="% of the learner's time",
        lines=lines,
        marks=marks,
    )


def shown_rows(config: Config, rows: Sequence[PlanRow]) -> list[PlanRow]:
    """The first ones, which differ most, and the configured."""
    own = [row for row in rows if row.staleness_max == config.staleness.max]
    others = [row for row in rows if row not in own]
    return sorted(own + others[: LINES_MAX - len(own)], key=lambda row: row.staleness_max)


def cheapest_pool(machines: Sequence[Machine], number: int) -> Pool:
    """So many, by $ per group ascending."""

    def members() -> Iterator[tuple[int, Machine]]:
        left = number
        for machine in sorted(machines, key=lambda each: each.on_average.usd_per_group):
            taken = min(left, machine.count)
            left -= taken
            if taken:
                yield taken, machine

    return Pool(tuple((machine.on_average, taken) for taken, machine in members()))


def spread(first: int, last: int) -> list[int]:
    """Whole numbers from `first` to `last`, at most POINTS_MAX, evenly chosen."""
    count = min(POINTS_MAX, last - first + 1)
    return sorted({first + round((last - first) * i / max(1, count - 1)) for i in range(count)})
