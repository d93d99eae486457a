"""Environments of the library verifiers, played as they are through the rollout's endpoint."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo2.errors import ConfigError, EnvironmentError_
from echo2_workers.engine import RequestError
from echo2_workers.environment import environment_version, load_environment

pytest.importorskip("verifiers.v1", reason="needs the extra verifiers")

EXAMPLES = Path(__file__).parents[3] / "examples"
MODULES = Path(__file__).parent / "verifiers_modules"
SUMS = "verifiers:verifiers_sums"
HEAD = """
import verifiers.v1 as vf
class Ask(vf.Task[vf.TaskData]):
    {task}
class Asks(vf.Taskset[Ask]):
    def load(self):
        {load}
__all__ = ["Asks"]
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.syspath_prepend(MODULES)


def a_module(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> str:
    """The name of an environment in a file of its own."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    return f"verifiers:{name}"


def data(payload: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(payload)["task"]
    return found


# ------------------------------------------------------------------------------- playing


def test_the_environments_own_rewards_score_what_the_policy_sampled(
    assets: Path, policy: Any
) -> None:
    environment = load_environment(SUMS, {"taskset": {"task": {"near": 0.5}}}, assets)
    payload = environment.task("train", 0)
    answer = data(payload)["answer"]
    rollout = policy.play(environment, payload, str(answer))
    assert rollout.reward == 1.0
    assert policy.shown == [data(payload)["prompt"]]
    assert policy.said(rollout) == [str(answer)]
    assert rollout.logprobs[rollout.loss_mask].tolist() == [-0.5] * int(rollout.loss_mask.sum())
    assert [(span.start, span.end) for span in rollout.spans] == [
        (rollout.prompt_length, len(rollout.token_ids))
    ]
    assert rollout.info == {
        **{"calls": 1, "branches": 1, "beginnings": 1},
        **{"right": 1.0, "near": 0.0, "is_number": 1.0, "stop": "agent_completed"},
    }
    assert policy.play(environment, payload, str(answer + 5)).reward == pytest.approx(0.375)
    assert policy.play(environment, payload, "no").reward == 0.0


def test_an_environment_of_several_turns_is_one_trajectory_that_is_never_encoded_twice(
    assets: Path, policy: Any
) -> None:
    environment = load_environment("verifiers:guess_number", {}, assets)
    assert environment.num_tasks("train") is None
    assert environment.num_tasks("eval") is None
    payload = environment.task("train", 3)
    secret = data(payload)["secret"]
    rollout = policy.play(environment, payload, ["1", "999999", str(secret)])
    assert rollout.reward == 0.5
    assert rollout.num_turns == 3
    assert policy.said(rollout) == ["1", "999999", str(secret)]
    question = data(payload)["prompt"]
    assert policy.shown == [question, f"{question}1+", f"{question}1+999999-"]
    seated = {"env": {"agent": {"max_turns": 2}}}
    rollout = policy.play(
        load_environment("verifiers:guess_number", seated, assets), payload, ["1", "2", "3"]
    )
    assert rollout.num_turns == 2
    assert rollout.reward == 0.0
    assert rollout.info["stop"] == "max_turns"


def test_a_shared_tool_server_answers_every_rollout_and_a_stop_ends_one(
    assets: Path, policy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(MODULES))
    environment = load_environment(
        "verifiers:tool_sums", {"eval_taskset": {}, "eval_share": 0.5}, assets
    )
    payload = environment.task("eval", 0)

    def call(name: str, arguments: Any) -> str:
        written = json.dumps({"name": name, "arguments": arguments})
        return f"<tool_call>{written}</tool_call>"

    async def both() -> list[Any]:
        good = [call("adder_add", {"a": 40, "b": 2}), "42"]
        first = await policy.play_async(environment, payload, good)
        shown = list(policy.shown)
        odd = [call("nothing", {}), call("adder_add", 7), call("adder_add", {"a": 1, "b": 2})]
        return [first, shown, await policy.play_async(environment, payload, odd)]

    rollout, shown, stopped = asyncio.run(both())
    assert rollout.reward == 1.0
    assert rollout.num_turns == 2
    assert re.search(r"42 by \d+", shown[1])
    assert "Use the tool." in shown[0]
    assert "adder_add" in shown[0]
    assert "unknown tool 'nothing'" in policy.shown[1]
    assert "must be a JSON object" in policy.shown[2]
    assert stopped.num_turns == 3
    assert stopped.info["stop"] == "said_enough"


# --------------------------------------------------------------------------------- tasks


def test_tasks_are_deterministic_and_what_is_held_out_is_never_trained_on(assets: Path) -> None:
    settings = {"taskset": {"largest": 12}, "epochs": 2}
    first, second = (load_environment(SUMS, settings, assets) for _ in range(2))
    train, evals = first.num_tasks("train"), first.num_tasks("eval")
    assert train is not None
    assert evals is not None
    assert train // 2 + evals == 144
    tasks = [first.task("train", index) for index in range(train)]
    assert tasks == [second.task("train", index) for index in range(train)]
    prompts = [data(task)["prompt"] for task in tasks]
    assert sorted(prompts[: train // 2]) == sorted(prompts[train // 2 :])
    assert prompts[: train // 2] != prompts[train // 2 :]
    held_out = {data(first.task("eval", index))["prompt"] for index in range(evals)}
    assert len(held_out) == evals
    assert not held_out & set(prompts)
    own = load_environment(SUMS, {**settings, "eval_taskset": {"largest": 5}}, assets)
    assert own.num_tasks("eval") == 25
    assert own.num_tasks("train") == 2 * (144 - 25)


def test_an_endless_taskset_is_read_again_where_it_was_left_behind(
    assets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2_workers.environments.verifiers_tasks.KEPT", 4)
    environment = load_environment("verifiers:guess_number", {"eval_share": 0.5}, assets)
    tasks = [environment.task("train", index) for index in range(20)]
    evals = [environment.task("eval", index) for index in range(20)]
    assert not {data(task)["secret"] for task in tasks} & {data(task)["secret"] for task in evals}
    assert environment.task("train", 18) == tasks[18]
    assert environment.task("train", 2) == tasks[2]
    assert environment.task("train", 19) == tasks[19]


# ------------------------------------------------------------------------------ failures


def test_what_fails_in_the_environment_fails_the_group_with_the_reason(
    assets: Path, policy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = HEAD.format(
        task="@vf.reward\n    async def broken(self, trace: vf.Trace): return 1 / 0",
        load="yield Ask(vf.TaskData(prompt='a'))\n        yield Ask(vf.TaskData(prompt='b'))",
    )
    name = a_module(tmp_path, monkeypatch, "breaks_at_scoring", text)
    environment = load_environment(name, {"eval_taskset": {}}, assets)
    payload = environment.task("eval", 0)
    with pytest.raises(EnvironmentError_, match=r"episode failed .*ZeroDivisionError"):
        policy.play(environment, payload, "1")
    other = json.dumps({**json.loads(payload), "by": "breaks 2"})
    with pytest.raises(EnvironmentError_, match=r"'breaks 2'.*same release"):
        policy.play(environment, other, "1")


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (RequestError("900 tokens"), EnvironmentError_, "not asked once.*900 tokens"),
        (ZeroDivisionError("the engine"), ZeroDivisionError, "the engine"),
    ],
)
def test_what_fails_in_the_engine_is_told_as_it_is(
    assets: Path, policy: Any, error: Exception, kind: type[Exception], said: str
) -> None:
    def fails(_: str) -> str:
        raise error

    environment = load_environment(SUMS, {}, assets)
    with pytest.raises(kind, match=said):
        policy.play(environment, environment.task("train", 0), fails)


SHELL = """
class Shell(vf.Harness[vf.HarnessConfig]):
    async def launch(self, *args): ...
__all__.append("Shell")
"""
TWO = """
class PairConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig()
    judge: vf.AgentConfig = vf.AgentConfig()
class Pair(vf.Env[PairConfig]):
    async def run(self, task, agents): ...
__all__.append("Pair")
"""
BOXED = HEAD.format(task="NEEDS_CONTAINER = True", load="yield Ask(vf.TaskData(prompt='a'))")
PLAIN = HEAD.format(task="pass", load="yield Ask(vf.TaskData(prompt='a'))")


@pytest.mark.parametrize(
    ("text", "settings", "said"),
    [
        ("import no_such_thing", {}, "needs the module 'no_such_thing'"),
        ("import verifiers as v\ndef load_environment() -> v.Environment: ...", {}, "classic"),
        ("from verifiers import SingleTurnEnv", {}, "classic"),
        ("__all__ = []\ndef load_environment(): ...", {}, "classic"),
        ("1 / 0", {}, "cannot be imported.*ZeroDivisionError"),
        (PLAIN + TWO, {}, r"has 2 agents \(solver, judge\)"),
        (PLAIN + SHELL, {}, "needs a container.*echo2 plays"),
        (BOXED, {}, "Ask needs a container"),
        (PLAIN, {"env": {"agent": {"harness": {"id": "bash"}}}}, "runs commands of the policy"),
        (PLAIN, {"env": {"agent": {"runtime": {"type": "docker"}}}}, "runtime is 'docker'"),
        (PLAIN, {"env": {"agent": {"model": "other"}}}, "model = 'other'"),
        (PLAIN, {"env": {"agent": {"turns": 3}}}, "do not fit.*turns"),
        (PLAIN, {"taskset": {"size": 3}}, "do not fit.*size"),
        (PLAIN, {"env": {"taskset": {}}}, "settings.taskset"),
        (PLAIN, {"epochs": 0}, "at least 1"),
        (PLAIN, {"eval_share": 1.0}, "above 0 and below 1"),
        (PLAIN, {"trained": "best"}, "longest"),
        (PLAIN, {"size": 3}, "takes taskset, eval_taskset"),
    ],
)
def test_what_cannot_be_played_is_one_clear_error(
    assets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    text: str,
    settings: dict[str, Any],
    said: str,
) -> None:
    number = request.node.callspec.indices["text"]
    name = a_module(tmp_path, monkeypatch, f"case_{number}", text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_environment(name, settings, assets)
    assert len(caught.value.problems) == 1


def test_tasks_that_cannot_be_had_are_one_clear_error(
    assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = a_module(tmp_path, monkeypatch, "plain_one", PLAIN)
    with pytest.raises(ConfigError, match=r"no task for (train|eval).*set eval_taskset"):
        [load_environment(name, {}, assets).num_tasks(split) for split in ("train", "eval")]
    text = HEAD.format(task="pass", load="raise OSError('no such file')")
    name = a_module(tmp_path, monkeypatch, "no_data", text)
    with pytest.raises(ConfigError, match=r"cannot give its tasks for train .*no such file"):
        load_environment(name, {}, assets).num_tasks("train")
    for missing, told in (("not_there", "no module 'not_there'; install"), ("", "lacks what")):
        with pytest.raises(ConfigError, match=told):
            load_environment(f"verifiers:{missing}", {}, assets)


def test_the_version_tells_that_of_the_library() -> None:
    assert environment_version(SUMS).startswith("1, verifiers 0.4")


def test_masks_and_logprobs_are_those_of_a_group_that_can_be_sent(
    assets: Path, policy: Any
) -> None:
    environment = load_environment("verifiers:guess_number", {}, assets)
    payload = environment.task("eval", 0)
    rollout = policy.play(environment, payload, ["5", str(data(payload)["secret"])])
    assert rollout.token_ids.dtype == np.int32
    assert (rollout.logprobs[~rollout.loss_mask] == 0.0).all()
