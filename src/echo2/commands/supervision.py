"""What `echo2 run` does when one of its processes has ended: a verdict and its reason.

Decides only; `LocalRun` carries it out and prints the very sentence.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from echo2.cli import EXIT_CONFIG, EXIT_FENCED, EXIT_OUT_OF_TASKS
from echo2.commands.processes import ended_how


class Part(enum.StrEnum):
    """Which of the system's processes it is."""

    COORDINATOR = "coordinator"
    ORIGIN = "origin"
    LEARNER = "learner"
    WORKER = "worker"


class Action(enum.StrEnum):
    RESTART = "restart"
    LEAVE = "leave"
    """It stays away; the run goes on."""
    FINISH = "finish"
    """The run is over in good order: end the others."""
    FAIL = "fail"


_FROM: Final = {
    Part.COORDINATOR: "from its ledger",
    Part.LEARNER: "from its newest checkpoint",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    action: Action
    reason: str


def verdict_on_end(
    part: Part, code: int, *, name: str, restarts: int, restarts_max: int
) -> Verdict:
    """`code` as `LocalProcess.code`; `restarts` so far."""
    how = ended_how(code)
    if part is Part.COORDINATOR and code == 0:
        return Verdict(Action.FINISH, "the coordinator ended the run")
    if part is Part.COORDINATOR and not was_killed(code):
        return Verdict(Action.FAIL, f"the coordinator ended with {how}")
    if code == 0 and part is Part.LEARNER:
        return Verdict(Action.FINISH, "the learner is done")
    if code == 0 and part is Part.WORKER:
        return Verdict(Action.LEAVE, f"{name} left in good order; it is not started again")
    if code == EXIT_CONFIG:
        return Verdict(
            Action.FAIL, f"{name} refused its configuration or arguments ({how}); mend it first"
        )
    if part is Part.LEARNER and code == EXIT_FENCED:
        return Verdict(Action.LEAVE, "a newer learner took over; the run goes on with that one")
    if part is Part.LEARNER and code == EXIT_OUT_OF_TASKS:
        return Verdict(Action.FAIL, "the tasks are used up before the last step (learner.steps)")
    if restarts >= restarts_max:
        action = Action.LEAVE if part is Part.WORKER else Action.FAIL
        return Verdict(
            action,
            f"{name} ended with {how} and was started again {restarts} times already "
            "(run.restarts_max); it stays away",
        )
    return Verdict(
        Action.RESTART,
        f"{name} ended with {how}; started {_FROM.get(part, 'anew')}, {restarts + 1} of "
        f"{restarts_max}",
    )


def was_killed(code: int) -> bool:
    """Whether a signal ended it, and no decision of its own."""
    return code < 0
