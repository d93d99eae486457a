"""What the frames of a group result may hold."""

from __future__ import annotations

import numpy as np
import pytest

from echo2.frames import frames_problem
from echo2.messages import GroupResult
from echo2.types import GroupId, LeaseId, Span, TrajectoryHeader, Version


def a_result(
    *,
    mask: tuple[int, ...] = (0, 1, 1),
    logprobs: tuple[float, ...] = (0.0, -1.0, -2.0),
    token_ids: tuple[int, ...] = (5, 6, 7),
    num_sampled: int = 2,
) -> GroupResult:
    header = TrajectoryHeader(3, 1, num_sampled, 1.0, "stop", 1, (Span(Version(1, 0), 1, 3),))
    return GroupResult(
        lease=LeaseId("l-1"),
        group=GroupId("g1"),
        attempt=1,
        trajectories=(header, header),
        generate_s=0.0,
        environment_s=0.0,
        token_ids=np.array(token_ids * 2, np.int32).tobytes(),
        logprobs=np.array(logprobs * 2, np.float32).tobytes(),
        loss_mask=bytes(mask * 2),
    )


def test_an_honest_group_has_no_problem() -> None:
    assert frames_problem(a_result()) == ""
    assert frames_problem(a_result(mask=(0, 0, 1), num_sampled=1)) == ""


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"logprobs": (0.0, float("nan"), -2.0)}, "logprob is nan"),
        ({"logprobs": (0.0, float("-inf"), -2.0)}, "logprob is -inf"),
        ({"logprobs": (0.0, -1.0, -800.0)}, "logprob is -800"),
        ({"logprobs": (0.0, 0.5, -2.0)}, "logprob is 0.5"),
        ({"mask": (0, 2, 1)}, "loss_mask holds 2"),
        ({"mask": (1, 1, 1), "num_sampled": 3}, "3 sampled tokens, 2 of them in spans"),
        ({"mask": (0, 1, 0)}, "1 sampled tokens, 1 of them in spans, and the header says 2"),
        ({"token_ids": (5, -1, 7)}, "token id is negative"),
    ],
)
def test_what_would_end_the_learner_is_told(changes: dict[str, object], said: str) -> None:
    assert said in frames_problem(a_result(**changes))  # type: ignore[arg-type]


def test_a_token_outside_the_vocabulary_is_told_where_the_vocabulary_is_known() -> None:
    assert frames_problem(a_result(), vocab_size=8) == ""
    assert "a token id is 7; the policy's vocabulary has 7" in frames_problem(
        a_result(), vocab_size=7
    )
