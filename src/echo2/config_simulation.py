"""The table [simulation]: what `echo2 simulate CONFIG` cannot read elsewhere in a configuration.

Everything else is the run's own: [staleness], [dispatch], [learner], [sampling], [heartbeat],
[cost], the lengths of groups in [worker.null] and what workers do at an update in [worker]. A
real run reads nothing of this table.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field

from echo2.config_table import NonNegativeSeconds, PositiveSeconds, Price, Table
from echo2.messages import WORKERS_MAX

if TYPE_CHECKING:
    from echo2.config import Config

KINDS_MAX: Final = 256
SCENARIOS_MAX: Final = 64
SYSTEMS_MAX: Final = 64
LinkMbit = Annotated[float, Field(gt=0, le=1e6)]
PerHour = Annotated[float, Field(ge=0, le=3600)]
Printed = Annotated[float, Field(ge=0, le=1e9)] | None
_TAKEN: Final = re.compile(r"(coordinator|origin|learner)(-.*)?")


class SimulatedWorkersTable(Table):
    """Workers of one kind. They are named NAME-1, NAME-2 and so on."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w-]{0,47}$")] = "w"
    count: Annotated[int, Field(ge=1, le=WORKERS_MAX)] = 1
    tokens_per_s: Annotated[float, Field(gt=0, le=1e9)] = 1000.0
    """Rate of one slot, in which one group is sampled."""
    slots: Annotated[int, Field(ge=1, le=4096)] = 8
    """Groups in work at once."""
    price_usd_per_h: Price = 0.0
    uplink_mbit: LinkMbit = 50.0
    downlink_mbit: LinkMbit = 200.0
    """The line, in Mbit/s, over which versions come and go."""
    reachable: bool = True
    """Others can connect to it; false: it only dials out."""
    start_s: NonNegativeSeconds = 0.0
    """After the run's beginning it says hello. Nothing is paid before."""
    install_s: NonNegativeSeconds = 0.0
    """Time that an install takes, in which nothing is sampled."""
    failures_per_h: PerHour = 0.0
    """Times an hour, in the mean, at which one of them dies without a word: it is paid, and its
    groups are missed, until heartbeat.gone_s."""
    reclaims_per_h: PerHour = 0.0
    """Times an hour, in the mean, at which one of them is taken back with a notice (SIGTERM): it
    hands over what it can within worker.drain_timeout_s and `notice_s`."""
    notice_s: NonNegativeSeconds = 120.0
    """From the notice until the machine is gone."""
    back_after_s: PositiveSeconds = 600.0
    """After it died or left another one takes its place, with an empty disk."""


class ScenarioTable(Table):
    """A case of the paper's ablation, for `echo2 simulate CONFIG --model paper`."""

    name: Annotated[str, Field(pattern=r"^[\w-]{1,48}$")] = "full"
    machines: Annotated[int, Field(ge=0, le=WORKERS_MAX)] = 0
    """Workers that are active; 0: as many as the paper's rule activates."""
    peers: bool = True
    """Workers forward versions to each other; false: the origin sends to each."""
    by_price: bool = True
    """The cheapest for what they deliver are activated; false: they are drawn uniformly."""
    printed_usd: Printed = None
    """Dollars per learner step that the paper prints, to be shown beside what is computed."""
    printed_bcast_s: Printed = None
    """T_bcast that the paper prints."""
    printed_wait_s: Printed = None
    """The learner's wait that the paper prints, once a period."""


class SystemTable(Table):
    """A system of which the paper prints a learner step, for what one saves over another."""

    name: Annotated[str, Field(pattern=r"^[\w-]{1,48}$")] = "echo2"
    step_s: PositiveSeconds = 60.0
    """Time of a learner step."""
    usd_per_h: Price = 0.0
    """Of a baseline, all in all; 0: this is no baseline, and costs cost.learner_usd_per_h with
    `machines` of simulation.workers, the cheapest first."""
    machines: Annotated[int, Field(ge=0, le=WORKERS_MAX)] = 0
    """Workers; 0: as many as the paper's rule activates."""
    period: Annotated[int, Field(ge=1, le=1000)] = 2
    """κ, for the paper's rule."""


class SimulationTable(Table):
    """`echo2 simulate CONFIG`: the whole run on a virtual clock (docs/simulate.md)."""

    hours: Annotated[float, Field(gt=0, le=10_000)] = 1.0
    """Virtual hours after which the learner ends with its step; learner.steps may come first."""
    learner_step_s: PositiveSeconds = 60.0
    """Mean time that the learner trains on a batch."""
    learner_step_cv: Annotated[float, Field(ge=0, le=10)] = 0.0
    """Coefficient of variation of that time (gamma distributed)."""
    publish_s: NonNegativeSeconds = 0.0
    """Time for which the learner stands still to write a version."""
    version_mb: Annotated[float, Field(ge=0, le=1e7)] = 0.0
    """Size of a version, in 10⁶ bytes; 0: it is there at once."""
    delta_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Size of a delta as a share of the version, for workers that have the version before; 1:
    there are none (nor without learner.deltas)."""
    rtt_s: Annotated[float, Field(ge=0, le=60)] = 0.05
    """Round trip between any two of coordinator, learner, origin and workers."""
    workers: Annotated[list[SimulatedWorkersTable], Field(max_length=KINDS_MAX)] = Field(
        default_factory=list
    )
    """The fleet, as [[simulation.workers]] of one kind each."""
    copy_s: NonNegativeSeconds = 0.0
    """For `--model paper`, without peers: time after which the origin has handed out one copy, all
    of them one after the other; 0: they share its uplink, and nothing else takes time."""
    production_steps: Annotated[int, Field(ge=0, le=10_000)] = 0
    """For `--model paper`: learner steps for which the production core plays each scenario, after
    those in which its fleet starts; 0: none."""
    production_delta_shares: Annotated[
        list[Annotated[float, Field(gt=0, lt=1)]], Field(max_length=16)
    ] = Field(default_factory=list)
    """Sizes of deltas, as shares of a version, that it then plays one after the other."""
    scenarios: Annotated[list[ScenarioTable], Field(max_length=SCENARIOS_MAX)] = Field(
        default_factory=list
    )
    """What `--model paper` computes, as [[simulation.scenarios]]."""
    systems: Annotated[list[SystemTable], Field(max_length=SYSTEMS_MAX)] = Field(
        default_factory=list
    )
    """What `--model paper` compares, as [[simulation.systems]]."""
    printed_reduction_percent: Annotated[
        list[Annotated[float, Field(ge=-1000, le=100)]], Field(max_length=2)
    ] = Field(default_factory=list)
    """What the paper says these systems save: least and most, in percent."""


def simulation_problem(c: Config) -> str | None:
    """The rule over simulation.workers."""
    kinds = c.simulation.workers
    names: set[str] = set()
    for kind in kinds:
        if _TAKEN.fullmatch(kind.name):
            return (
                f'the name "{kind.name}" is that of another part (coordinator, origin, learner); '
                'for example "spot"'
            )
        if kind.name in names:
            return f'two kinds are named "{kind.name}"; give each its own name'
        names.add(kind.name)
    total = sum(kind.count for kind in kinds)
    if total > WORKERS_MAX:
        return f"{total} workers in all; a coordinator takes {WORKERS_MAX}; lower their counts"
    return None
