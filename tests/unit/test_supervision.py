"""What happens when a process of a run has ended: the verdict and the sentence."""

from __future__ import annotations

import signal

import pytest

from echo2.commands.supervision import Action, Part, verdict_on_end


@pytest.mark.parametrize(
    ("part", "code", "restarts", "action", "said"),
    [
        (Part.COORDINATOR, 0, 0, Action.FINISH, "the coordinator ended the run"),
        (Part.COORDINATOR, 1, 0, Action.FAIL, "the coordinator ended with exit code 1"),
        (Part.COORDINATOR, -9, 0, Action.RESTART, "x ended with signal SIGKILL; started from its"),
        (Part.COORDINATOR, -9, 2, Action.FAIL, "started again 2 times already (run.restarts_max)"),
        (Part.LEARNER, 0, 3, Action.FINISH, "the learner is done"),
        (Part.LEARNER, -9, 0, Action.RESTART, "started from its newest checkpoint, 1 of 2"),
        (Part.LEARNER, 1, 1, Action.RESTART, "ended with exit code 1; started"),
        (Part.LEARNER, 1, 2, Action.FAIL, "started again 2 times already (run.restarts_max)"),
        (Part.LEARNER, 2, 0, Action.FAIL, "refused its configuration or arguments"),
        (Part.LEARNER, 3, 0, Action.LEAVE, "a newer learner took over"),
        (Part.WORKER, 0, 0, Action.LEAVE, "x left in good order"),
        (Part.WORKER, -15, 0, Action.RESTART, "x ended with signal SIGTERM; started anew, 1 of 2"),
        (Part.WORKER, 1, 2, Action.LEAVE, "it stays away"),
        (Part.WORKER, 2, 0, Action.FAIL, "refused its configuration or arguments"),
        (Part.ORIGIN, -9, 0, Action.RESTART, "started anew, 1 of 2"),
        (Part.ORIGIN, 0, 0, Action.RESTART, "ended with exit code 0; started anew"),
        (Part.ORIGIN, 1, 2, Action.FAIL, "it stays away"),
    ],
)
def test_an_end_has_a_verdict_and_its_reason(
    part: Part, code: int, restarts: int, action: Action, said: str
) -> None:
    verdict = verdict_on_end(part, code, name="x", restarts=restarts, restarts_max=2)
    assert verdict.action is action
    assert said in verdict.reason


def test_without_restarts_the_first_death_is_the_last() -> None:
    dead = -signal.SIGKILL
    verdict = verdict_on_end(Part.LEARNER, dead, name="learner", restarts=0, restarts_max=0)
    assert verdict.action is Action.FAIL
