"""Rewards recomputed from tokens: what an honest transcript gives, and how others show."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from echo2.errors import EnvironmentError_
from echo2.types import LeaseId, Sampling, Span, Task, Version
from echo2_workers.engine import Generated, GenerateRequest
from echo2_workers.environment import Generate, Rollout, RolloutBuilder, Split
from echo2_workers.environments.addition import Addition
from echo2_workers.playing import GroupJob, GroupPlayed, play_group
from echo2_workers.replaying import ReplayJob, replay_group
from echo2_workers.tokenizer import EOS, encode

SAMPLING = Sampling(max_tokens=4)


class Guessing:
    """The policy says a number in each of `turns` turns; the reward is the sum of what it said,
    and 100 for a turn that was cut off. An observation repeats the last token."""

    name, version, replays = "guessing", "1", True

    def __init__(self, turns: int = 3) -> None:
        self.turns = turns

    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> str:
        return json.dumps([7, index])

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        rollout = RolloutBuilder(json.loads(task.payload))
        reward = 0.0
        for turn in range(self.turns):
            completion = await generate(rollout.token_ids)
            rollout.add_completion(completion)
            reward += sum(completion.token_ids) + 100.0 * (completion.finish == "length")
            if turn < self.turns - 1:
                rollout.add_observation(completion.token_ids[-1:])
        return rollout.finish(reward)


async def engine(request: GenerateRequest) -> Generated:
    """Says as many tokens as the trajectory's number, at most four."""
    tokens = min(request.index + 1, request.sampling.max_tokens)
    said = np.arange(1, 1 + tokens, dtype=np.int32)
    finish = "length" if tokens == request.sampling.max_tokens else "stop"
    span = Span(Version(1, 0), 0, tokens)
    return Generated(said, np.full(tokens, -1.0, np.float32), (span,), finish)


async def played(environment: Guessing | Addition, size: int = 3) -> GroupPlayed:
    job = GroupJob(
        lease=LeaseId("l"),
        task=Task(5, environment.task("train", 5)),
        group_size=size,
        sampling=SAMPLING,
        seed=1,
    )
    return await play_group(environment, job, engine)


def an_order(environment: Guessing | Addition, group: GroupPlayed) -> ReplayJob:
    return ReplayJob(
        task=Task(5, environment.task("train", 5)),
        sampling=SAMPLING,
        trajectories=group.trajectories,
        token_ids=group.token_ids,
        loss_mask=group.loss_mask,
    )


def with_tokens(order: ReplayJob, place: int, token: int) -> ReplayJob:
    tokens = np.frombuffer(order.token_ids, np.int32).copy()
    tokens[place] = token
    return replace(order, token_ids=tokens.tobytes())


@pytest.mark.parametrize("turns", [1, 2, 5])
async def test_an_honest_group_gets_its_rewards_again(turns: int) -> None:
    environment = Guessing(turns)
    group = await played(environment, size=5)
    replayed = await replay_group(environment, an_order(environment, group))
    assert replayed.problem == ""
    assert replayed.rewards == tuple(header.reward for header in group.trajectories)
    assert max(replayed.rewards) > 100  # one was cut off, and scored so both times


async def test_claimed_rewards_play_no_part() -> None:
    environment = Guessing()
    group = await played(environment)
    order = an_order(environment, group)
    lies = tuple(replace(header, reward=1e6) for header in order.trajectories)
    replayed = await replay_group(environment, replace(order, trajectories=lies))
    assert replayed.rewards == tuple(header.reward for header in group.trajectories)


async def test_addition_is_scored_by_its_tokens() -> None:
    environment = Addition()
    answer = (*encode(json.loads(environment.task("train", 5))["answer"]), EOS)

    async def knows(request: GenerateRequest) -> Generated:
        said = np.asarray(answer if request.index else answer[:2], np.int32)
        span = Span(Version(1, 0), 0, len(said))
        return Generated(said, np.zeros(len(said), np.float32), (span,), "stop")

    job = GroupJob(
        lease=LeaseId("l"),
        task=Task(5, environment.task("train", 5)),
        group_size=2,
        sampling=SAMPLING,
        seed=1,
    )
    group = await play_group(environment, job, knows)
    assert (await replay_group(environment, an_order(environment, group))).rewards == (0.0, 1.0)


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        (0, "trajectory 0: the environment asks for turn 1 after 2 tokens that are not the 2 of"),
        (3, "trajectory 0: the environment asks for turn 2 after 4 tokens that are not the 4 of"),
    ],
)
async def test_a_prompt_or_an_observation_that_was_not_given_shows(
    place: int, problem: str
) -> None:
    environment = Guessing()
    order = with_tokens(an_order(environment, await played(environment)), place, 99)
    replayed = await replay_group(environment, order)
    assert replayed.problem.startswith(problem)
    assert replayed.rewards == ()


async def test_a_turn_too_few_and_a_turn_too_many_show() -> None:
    short, long = Guessing(2), Guessing(3)
    order = an_order(short, await played(short))
    assert (await replay_group(long, order)).problem == (
        "trajectory 0: the environment makes 7 other tokens of it"
    ) or (await replay_group(long, order)).problem.startswith(
        "trajectory 0: the environment asks for turn 3, it has 2"
    )
    order = an_order(long, await played(long))
    assert (await replay_group(short, order)).problem == (
        "trajectory 0: the environment ends after 2 turns, it has 3"
    )


async def test_tokens_that_are_called_sampled_and_were_not_show() -> None:
    environment = Guessing(1)
    group = await played(environment)
    mask = np.frombuffer(group.loss_mask, np.uint8).copy()
    mask[1] = 1  # a token of the prompt
    order = replace(an_order(environment, group), loss_mask=mask.tobytes())
    assert (
        "asks for turn 1 after 2 tokens that are not the 1"
        in (await replay_group(environment, order)).problem
    )


async def test_tokens_after_the_end_show() -> None:
    environment = Guessing(1)
    group = await played(environment, size=1)
    order = an_order(environment, group)
    longer = replace(order.trajectories[0], length=order.trajectories[0].length + 1)
    order = replace(
        order,
        trajectories=(longer,),
        token_ids=order.token_ids + np.int32(3).tobytes(),
        loss_mask=order.loss_mask + b"\0",
    )
    assert (await replay_group(environment, order)).problem == (
        "trajectory 0: the environment makes 3 other tokens of it"
    )


async def test_an_environment_that_swallows_the_difference_is_not_believed() -> None:
    class Swallowing(Guessing):
        async def rollout(self, task: Task, generate: Generate) -> Rollout:
            try:
                return await super().rollout(task, generate)
            except Exception:
                rollout = RolloutBuilder([1])
                rollout.add_completion(await generate([1]))
                return rollout.finish(1.0)

    environment = Guessing()
    order = with_tokens(an_order(environment, await played(environment)), 0, 99)
    assert "asks for turn 1" in (await replay_group(Swallowing(), order)).problem


async def test_what_the_environments_code_raises_says_nothing_about_the_group() -> None:
    class Broken(Guessing):
        async def rollout(self, task: Task, generate: Generate) -> Rollout:
            raise OSError("no disk")

    environment = Guessing()
    order = an_order(environment, await played(environment))
    with pytest.raises(EnvironmentError_, match="trajectory 0: OSError: no disk"):
        await replay_group(Broken(), order)


async def test_frames_of_another_length_are_an_error() -> None:
    environment = Guessing()
    order = an_order(environment, await played(environment))
    with pytest.raises(EnvironmentError_, match="its trajectories have"):
        await replay_group(environment, replace(order, token_ids=order.token_ids[:-4]))
