"""A group's rollouts together: seeds, frames, failures, and the marker of whose code runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo2.core.worker_events import GroupDone, GroupFailed
from echo2.errors import EngineError, EnvironmentError_
from echo2.messages import LeaseGranted
from echo2.types import GroupId, LeaseId, Sampling, Span, Task, Version
from echo2_workers.engine import Generated, GenerateRequest, RequestError
from echo2_workers.environment import Generate, Rollout, RolloutBuilder, Split
from echo2_workers.groups import Groups
from echo2_workers.marker import Marker, current_group, mark_tasks
from echo2_workers.playing import GroupJob, GroupPlayed, play_group

V1 = Version(1, 1)
Play = Callable[[Generate], Coroutine[Any, Any, Rollout]]


class Scripted:
    """An environment whose rollouts are given by a function of the test."""

    name = "scripted"
    version = "1"

    def __init__(self, play: Play) -> None:
        self._play = play

    def num_tasks(self, split: Split) -> int | None:
        return None

    def task(self, split: Split, index: int) -> str:
        return "{}"

    async def rollout(self, task: Task, generate: Generate) -> Rollout:
        return await self._play(generate)


async def two_turns(generate: Generate) -> Rollout:
    rollout = RolloutBuilder([1, 4])
    rollout.add_completion(await generate(rollout.token_ids))
    rollout.add_observation([9])
    rollout.add_completion(await generate(rollout.token_ids, Sampling(max_tokens=3)))
    return rollout.finish(float(sum(rollout.token_ids)))


def a_job(*, group_size: int = 3, seed: int = 100) -> GroupJob:
    return GroupJob(
        lease=LeaseId("l1"),
        task=Task(0, "{}"),
        group_size=group_size,
        sampling=Sampling(max_tokens=7),
        seed=seed,
    )


def an_answer(request: GenerateRequest) -> Generated:
    return Generated(
        np.asarray([5, 6 + request.index], np.int32),
        np.asarray([-0.5, -0.25], np.float32),
        (Span(V1, 0, 2),),
        "stop",
    )


def test_a_group_becomes_headers_and_frames_in_the_order_of_its_trajectories() -> None:
    requests: list[GenerateRequest] = []

    async def generate(request: GenerateRequest) -> Generated:
        requests.append(request)
        for _ in range(3 - request.index):  # so that they end in another order
            await asyncio.sleep(0)
        return an_answer(request)

    played = asyncio.run(play_group(Scripted(two_turns), a_job(), generate))
    ids = np.frombuffer(played.token_ids, np.int32).reshape(3, 7)
    assert ids.tolist() == [[1, 4, 5, 6 + i, 9, 5, 6 + i] for i in range(3)]
    mask = np.frombuffer(played.loss_mask, np.uint8).reshape(3, 7)
    assert mask.tolist() == [[0, 0, 1, 1, 0, 1, 1]] * 3
    logprobs = np.frombuffer(played.logprobs, np.float32).reshape(3, 7)
    assert logprobs[0].tolist() == [0, 0, -0.5, -0.25, 0, -0.5, -0.25]
    header = played.trajectories[1]
    assert (header.length, header.prompt_length, header.num_sampled) == (7, 2, 4)
    assert header.spans == (Span(V1, 2, 4), Span(V1, 5, 7))
    assert (header.num_turns, header.reward) == (2, float(1 + 4 + 5 + 7 + 9 + 5 + 7))
    first = [request for request in requests if request.sampling.max_tokens == 7]
    assert sorted(request.seed for request in first) == [100, 101, 102]
    assert len({request.seed for request in requests}) == 6, "each turn has noise of its own"
    assert {(r.group_seed, r.group_size) for r in requests} == {(100, 3)}


async def raises(generate: Generate) -> Rollout:
    await generate([1])
    raise KeyError("answer")


async def cancels_itself(generate: Generate) -> Rollout:
    raise asyncio.CancelledError


async def asks_for_nothing(generate: Generate) -> Rollout:
    await generate([1], Sampling(max_tokens=0))
    raise AssertionError


async def ends_strangely(generate: Generate) -> Rollout:
    rollout = RolloutBuilder([1])
    rollout.add_completion(await generate([1]))
    return rollout.finish(1.0, finish="gave up")  # type: ignore[arg-type]


async def returns_nothing(generate: Generate) -> Rollout:
    return None  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("play", "said"),
    [
        (raises, "KeyError: 'answer'"),
        (cancels_itself, "cancelled itself"),
        (returns_nothing, "NoneType"),
        (asks_for_nothing, "max_tokens"),
        (ends_strangely, "finish"),
    ],
)
def test_an_environment_that_fails_fails_its_group_with_the_reason(play: Play, said: str) -> None:
    async def generate(request: GenerateRequest) -> Generated:
        return an_answer(request)

    with pytest.raises(EnvironmentError_, match=said):
        asyncio.run(play_group(Scripted(play), a_job(), generate))


@pytest.mark.parametrize(
    ("error", "raised"),
    [(RequestError("too long"), EnvironmentError_), (EngineError("died"), EngineError)],
)
def test_a_bad_request_is_the_environments_fault_and_a_dead_engine_is_not(
    error: Exception, raised: type[Exception]
) -> None:
    async def generate(request: GenerateRequest) -> Generated:
        raise error

    with pytest.raises(raised, match=str(error)):
        asyncio.run(play_group(Scripted(two_turns), a_job(), generate))


def test_one_failure_ends_the_other_rollouts_of_the_group() -> None:
    ended: list[int] = []

    async def scenario() -> None:
        async def generate(request: GenerateRequest) -> Generated:
            if request.index == 2:
                raise EngineError("died")
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(request.index)
            raise AssertionError

        with pytest.raises(EngineError):
            await play_group(Scripted(two_turns), a_job(), generate)

    asyncio.run(scenario())
    assert sorted(ended) == [0, 1]


# -------------------------------------------------------------------------- the marker


def test_the_marker_names_the_group_of_every_task_that_it_started(tmp_path: Path) -> None:
    marker = Marker(tmp_path / "marker")
    seen: list[int] = []

    async def look() -> None:
        seen.append(marker.read()[0])
        await asyncio.sleep(0)
        seen.append(marker.read()[0])

    async def group() -> None:
        await asyncio.gather(look(), asyncio.create_task(look()))

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        mark_tasks(loop, marker)
        tasks = []
        for number in (1, 2):
            token = current_group.set(number)
            tasks.append(loop.create_task(group()))
            current_group.reset(token)
        await asyncio.gather(*tasks)
        await loop.create_task(look())

    asyncio.run(scenario())
    assert sorted(seen) == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert Marker(tmp_path / "marker").read()[0] == 0


def test_an_exit_in_a_marked_task_stays_inside(tmp_path: Path) -> None:
    async def leaves() -> None:
        raise SystemExit(4)

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        mark_tasks(loop, Marker(tmp_path / "marker"))
        token = current_group.set(1)
        task = loop.create_task(leaves())
        current_group.reset(token)
        with pytest.raises(EnvironmentError_, match="SystemExit 4"):
            await task

    asyncio.run(scenario())


# ------------------------------------------------------------------- groups of a daemon


class ScriptedEnvironments:
    """Plays each group by a function of the test."""

    def __init__(self, play: Callable[[GroupJob, Any], Coroutine[Any, Any, GroupPlayed]]) -> None:
        self.run_group = play

    async def start(self, settings: str, assets: Path | None) -> None: ...
    async def stop(self) -> None: ...


class ScriptedEngine:
    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[int], None]
    ) -> Generated:
        on_tokens(2)
        return an_answer(request)


def a_lease() -> LeaseGranted:
    return LeaseGranted(
        lease=LeaseId("l1"),
        group=GroupId("g1"),
        attempt=2,
        kind="train",
        version=V1,
        task=Task(0, "{}"),
        group_size=3,
        sampling=Sampling(),
        seed=5,
        revoke_after_s=10.0,
    )


def outcome_of(play: Any, *, abort: bool = False, timeout_s: float = 60.0) -> list[Any]:
    """What a lease comes to."""
    posted: list[Any] = []

    async def scenario() -> None:
        ended = asyncio.Event()

        def post(event: Any) -> None:
            posted.append(event)
            ended.set()

        groups = Groups(
            ScriptedEnvironments(play),
            engine=lambda: ScriptedEngine(),  # type: ignore[arg-type,return-value]
            rollout_timeout_s=timeout_s,
            post=post,
        )
        groups.start(a_lease())
        assert groups.tokens == {"l1": 0}
        if abort:
            await asyncio.sleep(0)
            groups.abort(LeaseId("l1"))
        else:
            await ended.wait()
        assert groups.tokens == {}
        await groups.stop()

    asyncio.run(scenario())
    return posted


def test_a_finished_group_is_a_result_of_its_lease() -> None:
    async def play(job: GroupJob, generate: Any) -> GroupPlayed:
        return await play_group(Scripted(two_turns), job, generate)

    (done,) = outcome_of(play)
    assert isinstance(done, GroupDone)
    assert (done.result.lease, done.result.group, done.result.attempt) == ("l1", "g1", 2)
    assert len(done.result.trajectories) == 3


FAULTS: list[tuple[Exception, str, str]] = [
    (EnvironmentError_("ValueError: x"), "environment", "ValueError: x"),
    (EngineError("signal 9"), "engine", "signal 9"),
    (RuntimeError("our bug"), "lost", "our bug"),
]


@pytest.mark.parametrize(("error", "stage", "said"), FAULTS)
def test_a_failed_group_says_whose_fault_it_is(error: Exception, stage: str, said: str) -> None:
    async def play(job: GroupJob, generate: Any) -> GroupPlayed:
        raise error

    (failed,) = outcome_of(play)
    assert isinstance(failed, GroupFailed)
    assert (failed.lease, failed.stage) == ("l1", stage)
    assert said in failed.text


def test_a_group_that_takes_too_long_fails_and_an_aborted_one_says_nothing() -> None:
    async def play(job: GroupJob, generate: Any) -> GroupPlayed:
        await asyncio.Event().wait()
        raise AssertionError

    (failed,) = outcome_of(play, timeout_s=0.01)
    assert (failed.stage, "rollout_timeout_s" in failed.text) == ("environment", True)
    assert outcome_of(play, abort=True) == []
