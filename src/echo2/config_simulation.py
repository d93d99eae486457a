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
LinkMbit = Annotated[float, Field(gt=0, le=1e6)]
PerHour = Annotated[float, Field(ge=0, le=3600)]
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
    scenarios: Annotated[list[ScenarioTable], Field(max_length=SCENARIOS_MAX)] = Field(
        default_factory=list
    )
    """What `--model paper` computes, as [[simulation.scenarios]]."""


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
