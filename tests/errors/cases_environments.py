"""Rollouts: prompts that no model can take, rewards that are none, code that raises or hangs."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from bad_input import Bench, Told, case, run
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.errors import ConfigError, Echo2Error
from echo2.types import LeaseId, Sampling, Span, Task, Version
from echo2_learner.tasks import Tasks
from echo2_workers.engine import Generated, GenerateRequest
from echo2_workers.engine_python import engine_python
from echo2_workers.engines.sampler import Sampler
from echo2_workers.environment import Generate, Rollout, RolloutBuilder, Split
from echo2_workers.environment_pool import EnvironmentPool
from echo2_workers.models import model_folder
from echo2_workers.playing import GroupJob, play_group

Play = Callable[[Generate], Awaitable[Any]]
FAILS = "`lease_failed`, stage environment"


class Scripted:
    """An environment whose rollouts are what the case does."""

    name = "scripted"
    version = "1"

    def __init__(self, play: Play, tasks: Callable[[int], Any] = lambda index: "{}") -> None:
        self._play = play
        self._tasks = tasks

    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> str:
        return self._tasks(index)  # type: ignore[no-any-return]

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        return await self._play(generate)  # type: ignore[no-any-return]


A_JOB = GroupJob(
    lease=LeaseId("l1"),
    task=Task(0, "{}"),
    group_size=1,
    sampling=Sampling(max_tokens=2),
    seed=0,
)


@cache
def _sampler() -> Sampler:
    """The engine's, over the model that is shipped: it has 128 positions and 32 tokens."""
    config = AutoConfig.from_pretrained(model_folder("builtin:addition-1m"))
    model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return Sampler(model, eos_ids=[2], sequences_max=1)


async def _sampled(request: GenerateRequest) -> Generated:
    """What is asked of the engine is checked as the engine does; two tokens come of it."""
    sampler = _sampler()
    sampler.remove(sampler.add(request, lambda _: None, lambda _: None))
    spans = (Span(Version(1, 0), 0, 2),)
    return Generated(np.array([3, 2], np.int32), np.array([-1, -1], np.float32), spans, "stop")


def failed(bench: Bench, play: Play) -> Told:
    """Why the group of a rollout fails."""

    async def scenario() -> Told:
        try:
            await play_group(Scripted(play), A_JOB, _sampled)
        except Echo2Error as error:
            return bench.told(FAILS, error)
        raise AssertionError("it was played")

    return run(scenario())


def with_prompt(bench: Bench, token_ids: list[int]) -> Told:
    async def play(generate: Generate) -> Rollout:
        rollout = RolloutBuilder(token_ids)
        rollout.add_completion(await generate(rollout.token_ids))
        return rollout.finish(1.0)

    return failed(bench, play)


@case("a prompt longer than the model")
def _(bench: Bench) -> Told:
    return with_prompt(bench, [1] * 200)


@case("a prompt without tokens")
def _(bench: Bench) -> Told:
    return with_prompt(bench, [])


@case("a prompt with a token that the model does not have")
def _(bench: Bench) -> Told:
    return with_prompt(bench, [1, 151643])


def with_reward(bench: Bench, reward: Any) -> Told:
    async def play(generate: Generate) -> Rollout:
        rollout = RolloutBuilder([1])
        rollout.add_completion(await generate(rollout.token_ids))
        return rollout.finish(reward)

    return failed(bench, play)


@case("a reward that is text")
def _(bench: Bench) -> Told:
    return with_reward(bench, "good")


@case("a reward that is no number")
def _(bench: Bench) -> Told:
    return with_reward(bench, float("nan"))


@case("a reward that is far too large")
def _(bench: Bench) -> Told:
    return with_reward(bench, 1e300)


@case("a sampling that cannot be")
def _(bench: Bench) -> Told:
    async def play(generate: Generate) -> Rollout:
        rollout = RolloutBuilder([1])
        rollout.add_completion(await generate(rollout.token_ids, Sampling(temperature=-1.0)))
        return rollout.finish(1.0)

    return failed(bench, play)


@case("a rollout that raises")
def _(bench: Bench) -> Told:
    async def play(generate: Generate) -> Rollout:
        raise ConnectionError("the judge is down")

    return failed(bench, play)


@case("a rollout that returns something else")
def _(bench: Bench) -> Told:
    async def play(generate: Generate) -> float:
        return 1.0

    return failed(bench, play)


@case("a rollout in which nothing was sampled")
def _(bench: Bench) -> Told:
    async def play(generate: Generate) -> Rollout:
        return RolloutBuilder([1, 3]).finish(1.0)

    return failed(bench, play)


UNRULY = """
import os
import time


class Hangs:
    name, version = "hangs", "1"

    def num_tasks(self, split):
        return None

    def task(self, split, index):
        return "{}"

    async def rollout(self, task, generate):
        time.sleep(3600)


class Exits(Hangs):
    async def rollout(self, task, generate):
        os._exit(7)
"""


def in_a_process(bench: Bench, name: str) -> Told:
    """Why the group fails of an environment in a process of its own."""
    (bench.folder / "unruly.py").write_text(UNRULY)

    async def scenario() -> Told:
        pool = EnvironmentPool(
            name=f"unruly:{name}",
            processes=1,
            hang_timeout_s=0.5,
            folder=bench.folder,
            import_paths=[bench.folder],
            on_fatal=lambda text: None,
        )
        await pool.start("{}", None)
        try:
            await pool.run_group(A_JOB, _sampled)
        except Echo2Error as error:
            return bench.told(FAILS, re.sub(r"blocked for \d+ s", "blocked for N s", str(error)))
        finally:
            await pool.stop()
        raise AssertionError("it was played")

    return run(scenario())


@case("a rollout that hangs")
def _(bench: Bench) -> Told:
    return in_a_process(bench, "Hangs")


@case("a rollout that ends its process")
def _(bench: Bench) -> Told:
    return in_a_process(bench, "Exits")


def failed_task(bench: Bench, tasks: Callable[[int], Any]) -> Told:
    async def nothing(generate: Generate) -> None:
        return None

    made = Tasks(Scripted(nothing, tasks))
    return bench.raised("exit 1", Echo2Error, lambda: made.train(7, 1))


@case("a task index that the environment does not know")
def _(bench: Bench) -> Told:
    return failed_task(bench, lambda index: ["{}", "{}"][index])


@case("a task that is not text")
def _(bench: Bench) -> Told:
    return failed_task(bench, lambda index: {"prompt": index})


@case("a task that is too long")
def _(bench: Bench) -> Told:
    return failed_task(bench, lambda index: "x" * (1 << 21))


@case("evals that no message can hold")
def _(bench: Bench) -> Told:
    async def nothing(generate: Generate) -> None:
        return None

    made = Tasks(Scripted(nothing, lambda index: "x" * (1 << 20)))
    return bench.raised("exit 2", ConfigError, lambda: made.evals(256))


@case("a Python for the engine that is not there")
def _(bench: Bench) -> Told:
    path = Path(bench.folder) / "none" / "bin" / "python"
    return bench.raised("exit 1", ConfigError, lambda: engine_python(str(path), "vllm"))
