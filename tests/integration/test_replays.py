"""Audits in a real environment process: replayed beside rollouts, and not trusted either."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo2.core.worker_events import AuditEnded, Event
from echo2.errors import EnvironmentError_
from echo2.messages import AuditDone, AuditFailed, AuditOrdered
from echo2.types import GroupId, LeaseId, Sampling, Span, Task, TrajectoryHeader, Version
from echo2_workers.audits import Audits
from echo2_workers.environment import About
from echo2_workers.environment_pool import EnvironmentPool, describe_environment
from echo2_workers.environments.addition import Addition
from echo2_workers.replaying import ReplayJob
from echo2_workers.tokenizer import BOS, EOS, encode

MODULE = """
import time
from echo2_workers.environments.addition import Addition

class Hanging(Addition):
    name, version, replays = "hanging", "1", True

    async def rollout(self, task, generate):
        completion = await generate([1])
        if completion.token_ids == (7,):
            time.sleep(1e6)
        raise RuntimeError("no reward today")
"""
DEADLINE_S = 120.0


@asynccontextmanager
async def a_pool(tmp_path: Path, name: str = "addition") -> AsyncIterator[EnvironmentPool]:
    (tmp_path / "replayed_here.py").write_text(MODULE, encoding="utf-8")
    pool = EnvironmentPool(
        name=name,
        processes=1,
        hang_timeout_s=2.0,
        folder=tmp_path,
        import_paths=[tmp_path],
        on_fatal=pytest.fail,
    )
    async with asyncio.timeout(DEADLINE_S):
        await pool.start("{}", None)
        try:
            yield pool
        finally:
            await pool.stop()


def a_job(prompt: list[int], *answers: tuple[int, ...], payload: str = "{}") -> ReplayJob:
    headers = tuple(
        TrajectoryHeader(
            length=len(prompt) + len(answer),
            prompt_length=len(prompt),
            num_sampled=len(answer),
            reward=1.0,
            finish="stop",
            num_turns=1,
            spans=(Span(Version(1, 0), len(prompt), len(prompt) + len(answer)),),
        )
        for answer in answers
    )
    tokens = [token for answer in answers for token in (*prompt, *answer)]
    mask = [flag for answer in answers for flag in [0] * len(prompt) + [1] * len(answer)]
    return ReplayJob(
        task=Task(0, payload),
        sampling=Sampling(),
        trajectories=headers,
        token_ids=np.asarray(tokens, "<i4").tobytes(),
        loss_mask=bytes(mask),
    )


def a_sum(*, right: bool, prompt: bool = True) -> ReplayJob:
    payload = Addition().task("train", 0)
    task = json.loads(payload)
    answer = (*encode(task["answer"]), EOS)
    asked = [BOS, *encode(task["prompt"])] if prompt else [BOS]
    return a_job(asked, answer, answer if right else answer[:1], payload=payload)


async def test_rewards_are_recomputed_in_the_environment_s_process(tmp_path: Path) -> None:
    async with a_pool(tmp_path) as pool:
        assert (await pool.replay_group(a_sum(right=True))).rewards == (1.0, 1.0)
        assert (await pool.replay_group(a_sum(right=False))).rewards == (1.0, 0.0)
        replayed = await pool.replay_group(a_sum(right=True, prompt=False))
        assert "asks for turn 1 after" in replayed.problem


async def test_what_hangs_or_raises_in_a_replay_costs_that_audit_alone(tmp_path: Path) -> None:
    async with a_pool(tmp_path, "replayed_here:Hanging") as pool:
        hanging = asyncio.create_task(pool.replay_group(a_job([1], (7,))))
        with pytest.raises(EnvironmentError_, match="blocked for"):
            await hanging
        with pytest.raises(EnvironmentError_, match="no reward today"):
            await pool.replay_group(a_job([1], (8,)))


async def test_an_auditor_answers_every_order(tmp_path: Path) -> None:
    def an_order(job: ReplayJob, lease: str) -> AuditOrdered:
        return AuditOrdered(
            lease=LeaseId(lease),
            group=GroupId("g0"),
            task=job.task,
            sampling=job.sampling,
            trajectories=job.trajectories,
            token_ids=job.token_ids,
            loss_mask=job.loss_mask,
        )

    answers: asyncio.Queue[Any] = asyncio.Queue()

    def post(event: Event) -> None:
        assert isinstance(event, AuditEnded)
        answers.put_nowait(event.answer)

    async with a_pool(tmp_path) as pool:
        audits = Audits(pool, rollout_timeout_s=60.0, post=post)
        audits.start(an_order(a_sum(right=False), "l1"))
        assert await answers.get() == AuditDone(
            lease=LeaseId("l1"), group=GroupId("g0"), rewards=(1.0, 0.0)
        )
        audits.start(an_order(a_job([BOS], (5,), payload="no JSON"), "l2"))
        failed = await answers.get()
        assert isinstance(failed, AuditFailed)
        assert "JSONDecodeError" in failed.text
        await audits.stop()


async def test_what_an_environment_s_class_says_is_read_in_a_process(tmp_path: Path) -> None:
    (tmp_path / "replayed_here.py").write_text(MODULE, encoding="utf-8")
    found = await describe_environment(
        "replayed_here:Hanging", folder=tmp_path, import_paths=[tmp_path]
    )
    assert found == About("1", replays=True)
