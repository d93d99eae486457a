"""reasoning-gym's tasks: named, held out, scored by their own rules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo2.errors import ConfigError, EnvironmentError_
from echo2_workers.environment import environment_version, load_environment
from echo2_workers.environments import extras

pytest.importorskip("reasoning_gym", reason="needs the extra envs")

NAME = "reasoning_gym:chain_sum"
SMALL = {"max_terms": 2, "max_digits": 1}


def chain_sum(assets: Path, **settings: Any) -> Any:
    return load_environment(NAME, {"generator": SMALL, **settings}, assets)


def wanted(payload: str) -> int:
    a, sign, b, _ = json.loads(payload)["question"].split()[-4:]
    return int(a) + int(b) if sign == "+" else int(a) - int(b)


def test_a_right_answer_earns_one_and_a_wrong_one_what_the_data_set_gives(
    assets: Path, policy: Any
) -> None:
    environment = chain_sum(assets)
    assert environment.name == NAME
    payload = environment.task("train", 0)
    answer = wanted(payload)
    rollout = policy.play(environment, payload, str(answer))
    assert rollout.reward == 1.0
    assert policy.said(rollout) == [str(answer)]
    assert policy.shown == [json.loads(payload)["question"]]
    assert 0.0 < policy.play(environment, payload, f"it is {answer}").reward < 1.0
    assert policy.play(environment, payload, "none").reward == 0.0
    assert policy.play(environment, payload, "").reward == 0.0


def test_answer_prompt_and_credit_can_be_set(assets: Path, policy: Any) -> None:
    environment = chain_sum(
        assets,
        answer="after:####",
        number_credit=0.5,
        prompt="{question}\nAnswer after ####.",
        system="Add.",
    )
    payload = environment.task("train", 3)
    answer = wanted(payload)
    assert policy.play(environment, payload, f"I think #### {answer}").reward == 1.0
    question = json.loads(payload)["question"]
    assert policy.shown == [f"Add.\n{question}\nAnswer after ####."]
    assert policy.play(environment, payload, str(answer)).reward == 0.0
    near = policy.play(environment, payload, f"#### {answer + 3}").reward
    far = policy.play(environment, payload, f"#### {answer + 5}").reward
    assert 0.0 <= far <= near < 0.5
    for junk in ("#### nan", "#### inf", "#### -", "####"):
        assert policy.play(environment, payload, junk).reward == 0.0


def test_tasks_are_deterministic_and_no_eval_question_is_trained_on(assets: Path) -> None:
    first, second = chain_sum(assets), chain_sum(assets)
    train = [first.task("train", index) for index in range(300)]
    evals = [first.task("eval", index) for index in range(60)]
    assert train == [second.task("train", index) for index in range(300)]
    assert evals[7] == second.task("eval", 7)
    questions = [{json.loads(payload)["question"] for payload in some} for some in (train, evals)]
    assert not questions[0] & questions[1]
    assert chain_sum(assets, seed=1).task("train", 0) != train[0]
    by_seed = chain_sum(assets, holdout="seed")
    numbers = [
        {json.loads(by_seed.task(split, index))["number"] for index in range(50)}
        for split in ("train", "eval")
    ]
    assert not numbers[0] & numbers[1]


def test_a_worker_with_other_settings_fails_the_group(assets: Path, policy: Any) -> None:
    payload = chain_sum(assets).task("train", 0)
    with pytest.raises(EnvironmentError_, match="at the learner"):
        policy.play(chain_sum(assets, seed=4), payload, "1")


def test_a_scorer_that_raises_gives_nothing(assets: Path, policy: Any) -> None:
    environment = chain_sum(assets)

    def broken(**_: object) -> float:
        raise RuntimeError("no")

    environment._dataset.score_answer = broken
    assert policy.play(environment, environment.task("train", 0), "1").reward == 0.0


@pytest.mark.parametrize("name", ["gsm_symbolic", "acre", "leg_counting", "countdown"])
def test_data_sets_of_every_kind_give_tasks(assets: Path, name: str) -> None:
    environment = load_environment(f"reasoning_gym:{name}", {"holdout": "seed"}, assets)
    assert json.loads(environment.task("train", 10**6))["question"]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("reasoning_gym:chain_sums", {}, "near are .*chain_sum"),
        ("reasoning_gym:", {}, "lacks what comes after the colon"),
        ("reasoning_gym", {}, "reasoning_gym:chain_sum"),
        (NAME, {"generator": {"terms": 2}}, "it takes min_terms, max_terms"),
        (NAME, {"generator": {"min_terms": 3, "max_terms": 2}}, "max_terms must be >="),
        (NAME, {"generator": {"size": 3}}, "sets size, which echo2 sets itself"),
        (NAME, {"digits": 2}, "takes generator, seed"),
        (NAME, {"answer": "box"}, "answer = 'box'"),
        (NAME, {"eval_share": 1.0}, "above 0 and below 1"),
        (NAME, {"holdout": "day"}, '"question" and "seed"'),
        (NAME, {"number_credit": 1.0}, "number_credit"),
        (NAME, {"prompt": "hello"}, "question"),
        (NAME, {"chat": True}, "has no chat template"),
    ],
)
def test_what_cannot_be_is_one_clear_error(
    assets: Path, name: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        load_environment(name, settings, assets)
    assert len(caught.value.problems) == 1


def test_too_few_questions_for_an_eval_are_an_error_and_no_endless_search(assets: Path) -> None:
    one = {"min_terms": 1, "max_terms": 1, "max_digits": 1}
    environment = load_environment(NAME, {"generator": one, "eval_share": 1e-9}, assets)
    with pytest.raises(ValueError, match="too few different tasks"):
        environment.task("eval", 0)


def test_the_version_tells_that_of_the_package() -> None:
    assert environment_version(NAME).startswith("1, reasoning-gym 0.")


def test_an_absent_package_is_one_error_with_the_line_that_installs_it() -> None:
    with pytest.raises(ConfigError, match=r"pip install 'echo2\[envs\]'"):
        extras.require("no_such_package_here", extra="envs", environment="x")
    with pytest.raises(ConfigError, match=r"no-such-package.*pip install 'echo2\[envs\]'"):
        extras.versioned("1", "no-such-package", extra="envs", environment="x")
