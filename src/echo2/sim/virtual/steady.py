"""What a simulated run comes to once its fleet is at work.

At its start the whole first version travels, and the learner waits for the first batch. A run of
many steps does so once; one of a few would count it too often. So the first steps are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from echo2.errors import Echo2Error
from echo2.sim.virtual.plan import RunPlan
from echo2.sim.virtual.run import VirtualRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """Means over the steps counted: $ and seconds of a learner step, the learner's wait of it,
    T_bcast of the versions published meanwhile (None: none was whole anywhere)."""

    usd_per_step: float
    step_s: float
    wait_s: float
    t_bcast_s: float | None

    @property
    def bubble_ratio(self) -> float:
        return self.wait_s / self.step_s


@dataclass(frozen=True, slots=True)
class _Moment:
    step: int
    at_s: float
    waited_s: float
    usd: float


def steady_figures(plan: RunPlan, *, left_out: int) -> Steady:
    """Plays `plan` to its end and counts the steps after the first `left_out`. Echo2Error when it
    does not come to more than those."""
    found: list[_Moment] = []

    def watch(*_: Any) -> None:
        state = run.core.state
        if state.step >= left_out and (not found or state.step > found[-1].step):
            found.append(
                _Moment(state.step, run.timeline.now, run.learner.waited_s, state.cost_usd)
            )

    run = VirtualRun(plan, watch=watch)
    figures = run.run()
    if not figures.ok or len(found) < 2:
        raise Echo2Error(
            f"the simulated run ended at step {figures.steps}, {left_out} are left out and "
            f"{plan.steps} were to be played: {figures.reason}"
        )
    first, last = found[0], found[-1]
    steps = last.step - first.step
    bcasts = [seconds for version, seconds in figures.t_bcast_s.items() if version.step >= left_out]
    return Steady(
        usd_per_step=(last.usd - first.usd) / steps,
        step_s=(last.at_s - first.at_s) / steps,
        wait_s=(last.waited_s - first.waited_s) / steps,
        t_bcast_s=sum(bcasts) / len(bcasts) if bcasts else None,
    )
