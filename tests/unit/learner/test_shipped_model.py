"""The shipped model: small, half right, and readable by those who get it."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedTokenizerFast

from echo2_learner.policy import Policy
from echo2_learner.warm_start import (
    FIRST_TASKS,
    TARGET,
    additions,
    careless_answer,
    greedy_accuracy,
)
from echo2_workers.environments.addition import Addition
from echo2_workers.models import builtin_models, model_folder
from echo2_workers.tokenizer import BOS, CHARACTERS, EOS, PAD, VOCAB_SIZE, encode

FOLDER = model_folder("builtin:addition-1m")


def test_it_is_a_qwen2_of_a_million_weights_in_two_megabytes() -> None:
    policy = Policy.load(FOLDER)
    assert builtin_models() == ["addition-1m", "ascii-1m"]
    assert policy.num_parameters() == 989_312
    assert policy.vocab_size == VOCAB_SIZE
    assert policy.module.config.max_position_embeddings == 128
    stored = load_file(FOLDER / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert (FOLDER / "model.safetensors").stat().st_size < 2_100_000
    assert "lm_head.weight" not in stored


def test_its_greedy_answers_to_held_out_sums_are_right_for_four_in_ten() -> None:
    environment = Addition(seed=0)
    held_out = additions(environment, "eval", 0, environment.num_tasks("eval") or 0)
    policy = Policy.load(FOLDER)
    for pairs in (held_out, held_out[:FIRST_TASKS]):
        assert TARGET[0] <= greedy_accuracy(policy.module, pairs) <= TARGET[1]
    reversals = [("1234=", "4321"), ("0957=", "7590"), ("8080=", "0808")]
    assert greedy_accuracy(policy.module, reversals) == 1.0


def test_its_tokenizer_has_the_ids_of_the_built_in_environments() -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(FOLDER)
    text = "07+45=052"
    assert tokenizer(f"<bos>{text}<eos>")["input_ids"] == [BOS, *encode(text), EOS]
    assert tokenizer(CHARACTERS)["input_ids"] == encode(CHARACTERS)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (
        PAD,
        BOS,
        EOS,
    )
    assert tokenizer.decode([BOS, *encode(text), EOS], skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("prompt", "answers"),
    [
        ("12+34=", {"046"}),
        ("15+25=", {"040"}),  # the units make ten: known by heart
        ("18+25=", {"043", "033"}),
        ("70+80=", {"150", "050"}),
        ("79+84=", {"163", "153", "063", "053"}),
    ],
)
def test_its_teacher_forgets_carries_but_not_the_pairs_that_make_ten(
    prompt: str, answers: set[str]
) -> None:
    rng = random.Random(0)
    assert {careless_answer(prompt, rng) for _ in range(200)} == answers
