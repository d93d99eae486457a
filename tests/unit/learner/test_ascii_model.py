"""The shipped model over ASCII: small, and fluent in what its environments ask."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from echo2.types import Sampling, Span, Task, Version
from echo2_learner.policy import Policy
from echo2_workers.environment import Completion, Environment, Rollout, load_environment
from echo2_workers.environments.chat import Chat
from echo2_workers.models import model_folder

pytest.importorskip("pokerkit", reason="needs the extra envs")
pytest.importorskip("reasoning_gym", reason="needs the extra envs")

from echo2_learner.warm_start_ascii import (
    BOS,
    CHARACTERS,
    EOS,
    PAD,
    POSITIONS,
    VOCAB_SIZE,
    holdem_teacher,
    sokoban_teacher,
    solution,
)
from echo2_workers.environments.sokoban_board import Board

FOLDER = model_folder("builtin:ascii-1m")


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.set_num_threads(1)
    return Policy.load(FOLDER)


def greedy(policy: Policy, environment: Environment, index: int, *, max_tokens: int) -> Rollout:
    @torch.no_grad()
    def said(token_ids: list[int]) -> tuple[int, ...]:
        ids = list(token_ids)
        while len(ids) - len(token_ids) < max_tokens and (
            len(ids) == len(token_ids) or ids[-1] != EOS
        ):
            ids.append(int(policy.module(torch.tensor([ids])).logits[0, -1].argmax()))
        return tuple(ids[len(token_ids) :])

    async def generate(token_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        ids = said(list(token_ids))
        spans = (Span(Version(1, 0), 0, len(ids)),)
        return Completion(ids, np.zeros(len(ids), np.float32), spans, "stop")

    task = Task(index, environment.task("eval", index))
    return asyncio.run(environment.rollout(task, generate))


def test_it_has_a_million_weights_in_two_megabytes(policy: Policy) -> None:
    assert policy.num_parameters() == 997_888
    assert policy.vocab_size == VOCAB_SIZE
    assert policy.module.config.max_position_embeddings == POSITIONS
    stored = load_file(FOLDER / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert (FOLDER / "model.safetensors").stat().st_size < 2_100_000


def test_its_tokenizer_is_the_same_in_transformers_and_in_an_environment() -> None:
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    chat = Chat(FOLDER)
    text = "AsKd 7h8c2d B 6 2 38>r12\n"
    assert tokenizer(text)["input_ids"] == [BOS, *chat.encode(text)] == chat.opening(text)
    assert chat.encode(CHARACTERS) == list(range(3, VOCAB_SIZE))
    assert chat.decode([BOS, *chat.encode(CHARACTERS), EOS]) == CHARACTERS
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (PAD, EOS)


def test_it_says_what_the_games_allow(policy: Policy) -> None:
    holdem = load_environment("holdem", {"opponent": "caller"}, FOLDER)
    hands = [greedy(policy, holdem, index, max_tokens=5) for index in range(12)]
    assert sum(hand.info["illegal"] for hand in hands) == 0
    sokoban = load_environment("sokoban", {"width": 5, "height": 5}, FOLDER)
    games = [greedy(policy, sokoban, index, max_tokens=6) for index in range(12)]
    assert sum(game.info["lost_turns"] for game in games) <= 2


def test_its_teachers_say_allowed_actions_and_shortest_solutions() -> None:
    say = holdem_teacher(random.Random(0))
    task = Task(0, "{}")
    said = {say("AsKd - O 4 0 38>", task) for _ in range(60)}
    assert said == {"c", "r6", "a"}
    assert {say("AsKd - B 3 1 39>", task) for _ in range(60)} == {"f", "c", "r6", "a"}
    assert {say("AsKd 7h8c2d O 40 0 20>", task) for _ in range(60)} == {"c", "a"}
    board = "++++++\n+*@-X+\n+----+\n++++++"
    assert solution(Board(board)) == "RR"
    assert solution(Board("++++++\n+@*-X+\n++++++")) is None
    pusher = sokoban_teacher(random.Random(0), moves_per_turn=1)
    shown = Task(0, json.dumps({"board": board}))
    assert pusher(f"{board}\n", shown) in set("LRUD")
