"""The environment protocol: loading, the rollout builder, and the built-in tasks."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo2.errors import ConfigError, EnvironmentError_
from echo2.types import Sampling, Span, Task, Version
from echo2_workers.environment import (
    BUILTIN,
    Completion,
    Environment,
    Rollout,
    RolloutBuilder,
    add_import_paths,
    check_rollout,
    environment_version,
    load_environment,
)
from echo2_workers.tokenizer import BOS, EOS, VOCAB_SIZE, decode, encode

V1, V2 = Version(1, 1), Version(1, 2)


def a_completion(token_ids: Sequence[int], *, version: Version = V1) -> Completion:
    length = len(token_ids)
    return Completion(
        tuple(token_ids), np.full(length, -0.5, np.float32), (Span(version, 0, length),), "stop"
    )


def play(environment: Environment, payload: str, answer: Sequence[int]) -> Rollout:
    """A rollout in which the policy answers with these tokens."""

    async def generate(token_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        return a_completion(answer)

    return asyncio.run(environment.rollout(Task(0, payload), generate))


# ------------------------------------------------------------------------- the builder


def test_a_rollout_of_many_turns_masks_what_the_environment_said() -> None:
    rollout = RolloutBuilder([1, 5, 6])
    rollout.add_completion(a_completion([7, 8]))
    rollout.add_observation([9])
    assert rollout.token_ids == [1, 5, 6, 7, 8, 9]
    rollout.add_completion(a_completion([10], version=V2))
    finished = rollout.finish(0.5, info={"turns": 2})
    assert finished.token_ids.tolist() == [1, 5, 6, 7, 8, 9, 10]
    assert finished.loss_mask.tolist() == [False, False, False, True, True, False, True]
    assert finished.logprobs.tolist() == [0, 0, 0, -0.5, -0.5, 0, -0.5]
    assert finished.spans == (Span(V1, 3, 5), Span(V2, 6, 7))
    assert (finished.prompt_length, finished.num_turns, finished.finish) == (3, 2, "stop")
    assert check_rollout(finished) is finished


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (lambda: None, "NoneType"),
        (lambda: RolloutBuilder([1]).finish(1.0), "0 spans"),
        (lambda: _played().finish(float("nan")), "reward is nan"),
        (lambda: _many_turns(257), "257 spans"),
    ],
)
def test_a_rollout_that_no_group_can_hold_is_an_environment_error(
    rollout: Callable[[], Any], said: str
) -> None:
    with pytest.raises(EnvironmentError_, match=said):
        check_rollout(rollout())


def _played() -> RolloutBuilder:
    rollout = RolloutBuilder([1])
    rollout.add_completion(a_completion([5]))
    return rollout


def _many_turns(turns: int) -> Rollout:
    rollout = RolloutBuilder([1])
    for _ in range(turns):
        rollout.add_completion(a_completion([5]))
        rollout.add_observation([6])
    return rollout.finish(1.0)


# ----------------------------------------------------------------------------- loading


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_built_in_environments_load_and_have_a_version(name: str) -> None:
    environment = load_environment(name, {})
    assert environment.name == name
    assert environment_version(name) == environment.version


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("additoin", {}, "known are addition, holdem, jsonl, null, reversal"),
        ("no_such_module_here:Env", {}, "ModuleNotFoundError"),
        ("json:NoSuchClass", {}, "AttributeError"),
        ("json:JSONDecoder", {}, "version"),
        ("addition", {"digits": 2}, "digits"),
        ("reversal", {"digits": 1}, "from 3 to 512"),
    ],
)
def test_what_cannot_be_loaded_says_why(name: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_environment(name, settings)


OWN = """
class Own:
    name = "own"
    version = "3"
    def __init__(self, *, assets, size=1):
        self.assets, self.size = assets, size
    def num_tasks(self, split): return None
    def task(self, split, index): return "{}"
    async def rollout(self, task, generate): ...
"""


def test_a_class_of_the_users_own_gets_settings_and_assets(tmp_path: Path) -> None:
    (tmp_path / "own_environment_module.py").write_text(OWN)
    add_import_paths(tmp_path)
    environment: Any = load_environment("own_environment_module:Own", {"size": 4}, tmp_path)
    assert (environment.size, environment.assets, environment.version) == (4, tmp_path, "3")


def test_an_entry_point_names_an_environment(tmp_path: Path) -> None:
    package = tmp_path / "own_env-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: own-env\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(
        "[echo2.environments]\nnumbers = echo2_workers.environments.addition:Addition\n"
    )
    add_import_paths(tmp_path)
    assert load_environment("numbers", {}).name == "addition"


# --------------------------------------------------------------------------- built-ins


def test_addition_rewards_exactly_three_digits_and_the_end() -> None:
    environment = load_environment("addition", {})
    payload = '{"prompt": "07+45=", "answer": "052"}'
    right = [*encode("052"), EOS]
    rollout = play(environment, payload, right)
    assert rollout.token_ids.tolist() == [BOS, *encode("07+45="), *right]
    assert (rollout.reward, rollout.prompt_length) == (1.0, 7)
    for wrong in (encode("052"), [*encode("52"), EOS], [*encode("053"), EOS], [EOS]):
        assert play(environment, payload, wrong).reward == 0.0


def test_additions_eval_pairs_are_held_out_and_tasks_are_deterministic() -> None:
    first, second = load_environment("addition", {}), load_environment("addition", {})
    num_eval = first.num_tasks("eval")
    assert num_eval is not None
    assert 1700 < num_eval < 2300
    assert first.num_tasks("train") is None
    evals = {first.task("eval", index) for index in range(num_eval)}
    assert len(evals) == num_eval
    num_train = 10_000 - num_eval
    one_pass = [first.task("train", index) for index in range(num_train)]
    assert len(set(one_pass)) == num_train
    assert not evals & set(one_pass)
    assert first.task("train", num_train + 5) in set(one_pass)
    assert one_pass != [first.task("train", num_train + index) for index in range(num_train)]
    for index in (0, 77, 9000, 3):
        assert first.task("train", index) == second.task("train", index)
        content = json.loads(first.task("train", index))
        a, b = content["prompt"].rstrip("=").split("+")
        assert content["answer"] == f"{int(a) + int(b):03d}"
    other = load_environment("addition", {"seed": 1})
    assert {other.task("eval", index) for index in range(1000)} - evals


def test_reversal_pays_for_each_position_and_a_bonus_for_all_of_it() -> None:
    environment = load_environment("reversal", {"digits": 4, "bonus": 0.2})
    payload = '{"prompt": "1234=", "answer": "4321"}'

    def reward(text: str, *, ended: bool = True) -> float:
        return play(environment, payload, [*encode(text), *([EOS] if ended else [])]).reward

    assert reward("4321") == pytest.approx(1.0)
    assert reward("4321", ended=False) == pytest.approx(0.8)
    assert reward("4301") == pytest.approx(0.6)
    assert reward("43") == pytest.approx(0.4)
    assert reward("43211") == pytest.approx(0.8)
    assert reward("0000") == 0.0


def test_reversals_eval_strings_are_held_out() -> None:
    environment = load_environment("reversal", {"digits": 3})
    train = {environment.task("train", index) for index in range(3000)}
    evals = {environment.task("eval", index) for index in range(500)}
    assert not train & evals
    assert 100 < len(evals) < 300
    content = json.loads(environment.task("train", 8))
    assert content["prompt"] == content["answer"][::-1] + "="


def test_the_null_environments_rewards_vary() -> None:
    environment = load_environment("null", {"prompt_tokens": 3})
    rewards = [play(environment, environment.task("train", 0), [3, i]).reward for i in (4, 5)]
    assert rewards == [1.0, 0.0]


# --------------------------------------------------------------------------- tokenizer


def test_the_tokenizer_has_a_character_for_each_id_from_three_on() -> None:
    assert encode("0123456789") == list(range(3, 13))
    text = "12+34=(5*6) -7\n"
    assert decode([BOS, *encode(text), EOS]) == text
    assert max(encode(" \n")) < VOCAB_SIZE
    assert decode([VOCAB_SIZE - 1]) == "\ufffd"
    with pytest.raises(ValueError, match="'x' has no token"):
        encode("x")


def test_neither_the_daemon_nor_the_environments_import_torch() -> None:
    code = (
        "import sys, echo2_workers.daemon, echo2_workers.environment_host;"
        "from echo2_workers.environment import BUILTIN, load_environment;"
        "[load_environment(name, {}) for name in BUILTIN];"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
