"""Whatever tokens a policy samples, a game goes on by its rules to its end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.types import Sampling, Span, Task, Version
from echo2_workers.environment import (
    Completion,
    Environment,
    Rollout,
    check_rollout,
    load_environment,
)
from echo2_workers.models import model_folder

pytest.importorskip("pokerkit", reason="needs the extra envs")
pytest.importorskip("reasoning_gym", reason="needs the extra envs")

ASSETS = model_folder("builtin:ascii-1m")
VOCAB_SIZE = 99
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6)
LETTERS = {character: 3 + i for i, character in enumerate("\n" + "".join(map(chr, range(32, 127))))}
ACTIONS = st.sampled_from(["f", "c", "a", "r4", "r6", "r12", "r20", "r40", "L", "RD", "uu"])
SAID = st.lists(
    TOKENS | ACTIONS.map(lambda text: [*(LETTERS[character] for character in text), 2]),
    min_size=1,
    max_size=20,
)


def play(environment: Environment, payload: str, says: list[list[int]]) -> Rollout:
    """A rollout in which the policy samples these ids, turn by turn, again and again."""
    turns = said_again(says)
    sampled: list[int] = []

    async def generate(token_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        ids = next(turns)
        sampled.extend(ids)
        spans = (Span(Version(1, 1), 0, len(ids)),)
        return Completion(tuple(ids), np.full(len(ids), -1.0, np.float32), spans, "stop")

    rollout = check_rollout(asyncio.run(environment.rollout(Task(0, payload), generate)))
    assert rollout.token_ids[rollout.loss_mask].tolist() == sampled
    assert not rollout.logprobs[~rollout.loss_mask].any()
    assert not rollout.loss_mask[: rollout.prompt_length].any()
    return rollout


def said_again(says: list[list[int]]) -> Iterator[list[int]]:
    while True:
        yield from says


@pytest.fixture(scope="module")
def tables() -> dict[str, Environment]:
    return {
        name: load_environment("holdem", {"opponent": name, "hands": 2}, ASSETS)
        for name in ("caller", "random", "tight", "aggressive")
    }


@settings(max_examples=60, deadline=None)
@given(says=SAID, index=st.integers(0, 50), opponent=st.sampled_from(["caller", "random", "tight"]))
def test_no_tokens_break_a_hand_and_chips_are_conserved(
    tables: dict[str, Environment], says: list[list[int]], index: int, opponent: str
) -> None:
    environment = tables[opponent]
    payload = environment.task("train", index)
    rollout = play(environment, payload, says)
    won, illegal = rollout.info["chips_bb"], rollout.info["illegal"]
    assert rollout.reward == pytest.approx((won - 0.5 * illegal) / 2)
    assert abs(won) <= 2 * 20  # no more than both stacks
    assert rollout.num_turns <= 16
    assert play(environment, payload, says).reward == rollout.reward


@pytest.fixture(scope="module")
def sokoban() -> Environment:
    return load_environment("sokoban", {"turns": 6}, ASSETS)


@settings(max_examples=40, deadline=None)
@given(says=SAID, index=st.integers(0, 20))
def test_no_tokens_break_a_puzzle_and_nothing_is_lost_from_the_board(
    sokoban: Environment, says: list[list[int]], index: int
) -> None:
    payload = sokoban.task("train", index)
    rollout = play(sokoban, payload, says)
    before, after = json.loads(payload)["board"], rollout.info["board"]
    assert rollout.reward in (0.0, 1.0)
    assert rollout.num_turns <= 6
    for kinds in ("@$", "X$%", "*%", "+"):  # boxes, goals, players, walls
        assert sum(map(before.count, kinds)) == sum(map(after.count, kinds))
