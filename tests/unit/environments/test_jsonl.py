"""Problems from a file, and answers compared in a process that can be killed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from echo2.errors import ConfigError, EnvironmentError_
from echo2_workers.environment import load_environment
from echo2_workers.environments.math_checks import ANSWER_CHARACTERS_MAX, MathChecks

pytest.importorskip("math_verify", reason="needs the extra envs")

PARROT = """
import asyncio, os, time
from echo2.net.pipe import child_pipe
async def serve():
    pipe = await child_pipe()
    await pipe.send({"ready": True})
    while (received := await pipe.receive()) is not None:
        said = received[0]["said"]
        if said == "hang":
            time.sleep(1000)
        if said == "die":
            os._exit(3)
        await pipe.send({"equal": said == received[0]["wanted"]})
asyncio.run(serve())
"""


def a_file(path: Path, count: int) -> str:
    rows = [json.dumps({"prompt": f"What is {i} + 1?", "answer": i + 1}) for i in range(count)]
    path.write_text("\n".join(rows) + "\n\n")
    return str(path)


def test_splits_cover_the_file_and_repeat_nothing(assets: Path, tmp_path: Path) -> None:
    settings = {"path": a_file(tmp_path / "a.jsonl", 100), "eval_share": 0.2, "epochs": 2}
    environment = load_environment("jsonl", settings, assets)
    num_eval, num_train = environment.num_tasks("eval"), environment.num_tasks("train")
    assert num_eval is not None
    assert num_train == 2 * (100 - num_eval)
    evals = {environment.task("eval", index) for index in range(num_eval)}
    train = [environment.task("train", index) for index in range(num_train)]
    first, second = train[: num_train // 2], train[num_train // 2 :]
    assert len(evals) == num_eval
    assert sorted(first) == sorted(second)
    assert first != second
    assert len(evals | set(first)) == 100
    again = load_environment("jsonl", settings, assets)
    assert [again.task("train", index) for index in (0, 70, 3)] == [train[i] for i in (0, 70, 3)]
    endless = load_environment("jsonl", {"path": settings["path"]}, assets)
    assert endless.num_tasks("train") is None
    assert endless.task("train", 10**6)


def test_what_is_in_the_eval_file_is_never_trained_on(assets: Path, tmp_path: Path) -> None:
    train = a_file(tmp_path / "train.jsonl", 30)
    evals = a_file(tmp_path / "eval.jsonl", 10)
    environment = load_environment(
        "jsonl", {"path": train, "eval_path": evals, "epochs": 1}, assets
    )
    assert (environment.num_tasks("train"), environment.num_tasks("eval")) == (20, 10)


def test_answers_are_compared_as_mathematics_or_as_text(assets: Path, policy: Any) -> None:
    settings = {"path": "on/the/learner/only.jsonl", "answer": "after:####"}
    environment: Any = load_environment("jsonl", settings, assets)
    payload = json.dumps({"prompt": "Half?", "answer": "1/2"})

    async def rewards(*says: str) -> list[float]:
        try:
            return [(await policy.play_async(environment, payload, say)).reward for say in says]
        finally:
            await environment.stop()

    assert asyncio.run(
        rewards("#### 1/2", "#### 0.5", "#### \\frac{2}{4}", "#### 0.6", "0.5", "#### x(", "####")
    ) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert policy.shown == ["Half?"]
    exact = load_environment("jsonl", {**settings, "score": "exact"}, assets)
    assert policy.play(exact, payload, "#### 1/2").reward == 1.0
    assert policy.play(exact, payload, "#### 0.5").reward == 0.0


def test_a_check_that_hangs_is_killed_and_the_next_one_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "parrot_host.py").write_text(PARROT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    async def check() -> None:
        checks = MathChecks(timeout_s=0.3, module="parrot_host")
        try:
            assert await checks.equal("1", "1")
            assert not await checks.equal("1", "2")
            assert not await checks.equal("hang", "hang")
            assert checks.killed == 1
            assert await checks.equal("1", "1")
            assert not await checks.equal("die", "die")
            assert checks.killed == 2
            assert await asyncio.gather(*(checks.equal(str(i), "1") for i in range(3))) == [
                False,
                True,
                False,
            ]
            # A check that is given up leaves no answer behind for the next one.
            given_up = asyncio.ensure_future(checks.equal("hang", "hang"))
            await asyncio.sleep(0)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            assert not await checks.equal("2", "1")
            assert not await checks.equal("1" * (ANSWER_CHARACTERS_MAX + 1), "1")
        finally:
            await checks.stop()

    asyncio.run(check())


def test_a_power_tower_does_not_stop_the_real_checker(assets: Path) -> None:
    async def check() -> None:
        checks = MathChecks(timeout_s=2.0)
        try:
            assert await checks.equal("\\boxed{\\frac{3}{4}}", "0.75")
            assert not await checks.equal("9^{9^{9^{9}}}", "1")
            assert await checks.equal("(x+1)^2", "x^2+2x+1")
        finally:
            await checks.stop()

    asyncio.run(check())


def test_a_checker_that_cannot_start_is_an_environment_error() -> None:
    async def check() -> None:
        with pytest.raises(EnvironmentError_, match="did not start"):
            await MathChecks(timeout_s=1.0, module="no_such_module_here").equal("1", "1")

    asyncio.run(check())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no JSON"),
        ("[1]", "line 2 is a list"),
        ('{"answer": "1"}', 'line 2 has no text in "prompt"'),
        ('{"prompt": " ", "answer": "1"}', 'line 2 has no text in "prompt"'),
        ('{"prompt": "x"}', 'line 2 has neither text nor a number in "answer"'),
        ('{"prompt": "x", "answer": true}', "line 2 has neither text nor a number"),
        ('{"prompt": "x", "answer": ""}', 'line 2 has an empty "answer"'),
        ('{"prompt": "\\ud800", "answer": NaN', "line 2 is no JSON"),
        ("\xff", "line 2 is no JSON in UTF-8"),
    ],
)
def test_a_bad_line_is_told_with_its_number_and_what_is_allowed(
    assets: Path, tmp_path: Path, line: str, said: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "1 + 1?", "answer": 2}\n' + line.encode("latin-1") + b"\n")
    environment = load_environment("jsonl", {"path": str(path)}, assets)
    with pytest.raises(ConfigError, match=said) as caught:
        environment.num_tasks("train")
    assert "each line must be a JSON object such as" in str(caught.value)


def test_many_bad_lines_are_one_error(assets: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("x\n" * 50)
    with pytest.raises(ConfigError, match=r"line 5 .*; and 45 more") as caught:
        load_environment("jsonl", {"path": str(path)}, assets).num_tasks("train")
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "missing a required.*path"),
        ({"path": "a", "score": "maths"}, '"math" and "exact"'),
        ({"path": "a", "epochs": 0}, "at least 1"),
        ({"path": "a", "check_timeout_s": 0}, "check_timeout_s"),
        ({"path": "a", "prompt": "x"}, "prompt"),
    ],
)
def test_bad_settings_are_one_error(assets: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_environment("jsonl", settings, assets)


def test_a_file_that_is_missing_or_leaves_no_split_is_told(assets: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="read by the learner"):
        load_environment("jsonl", {"path": str(tmp_path / "none")}, assets).num_tasks("train")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="holds no problem"):
        load_environment("jsonl", {"path": str(tmp_path / "empty")}, assets).num_tasks("train")
    one = a_file(tmp_path / "one", 1)
    with pytest.raises(ConfigError, match="none is left for"):
        load_environment("jsonl", {"path": one}, assets).num_tasks("train")
