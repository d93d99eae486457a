"""A group's states as a table, and what its result says of itself."""

from __future__ import annotations

import pytest
from core_builders import a_group, a_header, a_stored_result, a_version

from echo2.core.group import TRANSITIONS, GroupState, StoredResult, transition_table
from echo2.types import LeaseId, PeerId

V0, V1, V2 = a_version(0), a_version(1), a_version(2)
Q, L, S, A, B, T, E = (
    GroupState.QUEUED,
    GroupState.LEASED,
    GroupState.STORING,
    GroupState.AUDITING,
    GroupState.BUFFERED,
    GroupState.TRAINING,
    GroupState.ENDED,
)
ALLOWED = {
    (Q, L),
    (Q, S),
    (Q, E),
    (L, Q),
    (L, S),
    (L, E),
    (S, Q),
    (S, A),
    (S, B),
    (S, E),
    (A, Q),
    (A, B),
    (A, T),
    (A, E),
    (B, Q),
    (B, A),
    (B, T),
    (B, E),
    (T, Q),
    (T, B),
    (T, E),
    (E, Q),
    (E, B),
}


def test_the_table_names_every_state() -> None:
    assert set(TRANSITIONS) == set(GroupState)


@pytest.mark.parametrize("before", GroupState)
@pytest.mark.parametrize("after", GroupState)
def test_a_group_moves_as_the_table_says_and_not_otherwise(
    before: GroupState, after: GroupState
) -> None:
    group = a_group()
    group.state = before
    if (before, after) in ALLOWED:
        group.move(after)
        assert group.state is after
    else:
        with pytest.raises(AssertionError, match=f"group g0 cannot go from {before} to {after}"):
            group.move(after)
        assert group.state is before


def test_the_printed_table_is_the_one_that_is_followed() -> None:
    rows = transition_table().splitlines()
    assert rows[0] == "| state | may become |"
    assert "| storing | queued, auditing, buffered, ended |" in rows
    assert len(rows) == 2 + len(GroupState)


def a_result_of_two() -> StoredResult:
    """Tokens: two of each version named, so [V0 V1] and [V1 V2]."""
    headers = (a_header(V0, V1, reward=0.0), a_header(V1, V2, reward=1.0))
    return StoredResult(LeaseId("l.1"), PeerId("w-1"), headers, None)


def test_a_result_spans_versions_from_its_oldest_to_its_newest_token() -> None:
    result = a_result_of_two()
    assert (result.min_version, result.max_version) == (V0, V2)
    assert result.versions == {V0, V1, V2}
    assert result.tokens == 8
    assert result.reward_mean == 0.5


def test_rewards_vary_or_not() -> None:
    assert a_result_of_two().has_reward_variance
    assert not a_stored_result(V0).has_reward_variance


@pytest.mark.parametrize(
    ("step", "tokens", "oldest"), [(0, 8, V0), (1, 6, V1), (2, 2, V2), (3, 0, None)]
)
def test_tokens_below_a_step_leave_the_loss(step: int, tokens: int, oldest: object) -> None:
    result = a_result_of_two()
    assert result.tokens_from(step) == tokens
    assert result.min_version_from(step) == oldest
