"""Plays a group again from its tokens, to recompute its rewards: what an auditor does.

The environment runs as it did, on the same task; each time it asks the policy, the answer is the
next run of sampled tokens of the transcript. So the reward follows from task and tokens alone,
and a transcript that the environment would not make shows: another prompt, another observation,
a turn too many. No engine takes part.

Needs an environment with `replays = True`: its rollout is a function of task and sampled tokens,
and between two turns it adds at least one token. Runs in the environment process, and inside the
daemon for trusted built-ins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from echo2.errors import EnvironmentError_
from echo2.types import Sampling, Span, Task, TrajectoryHeader, Version
from echo2_workers.environment import (
    Completion,
    Environment,
    Finish,
    Rollout,
    check_rollout,
)
from echo2_workers.playing import told

_NOBODY: Final = Version(0, 0)
"""Spans of replayed completions: nothing was sampled, and nobody reads them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """A group as a worker delivered it: frames hold the trajectories one after the other."""

    task: Task
    sampling: Sampling
    trajectories: tuple[TrajectoryHeader, ...]
    token_ids: bytes
    loss_mask: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReplayed:
    """`rewards` of all trajectories, or a `problem`: the environment makes no such transcript."""

    rewards: tuple[float, ...] = ()
    problem: str = ""


async def replay_group(environment: Environment, job: ReplayJob) -> GroupReplayed:
    """Raises EnvironmentError_ when the environment's code fails: then nothing is known."""
    transcripts = _transcripts(job)
    tasks = [
        asyncio.ensure_future(_replay(environment, job, transcript)) for transcript in transcripts
    ]
    try:
        rewards = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for index, transcript in enumerate(transcripts):
        if transcript.problem:
            return GroupReplayed(problem=f"trajectory {index}: {transcript.problem}"[:2048])
    for index, reward in enumerate(rewards):
        if isinstance(reward, BaseException):
            raise EnvironmentError_(f"trajectory {index}: {told(reward)}") from reward
    return GroupReplayed(rewards=tuple(float(reward) for reward in rewards))  # type: ignore[arg-type]


@dataclass(slots=True)
class _Transcript:
    """`turns`: where each run of sampled tokens starts and ends; `problem`: the first thing that
    the environment did otherwise."""

    token_ids: list[int]
    mask: np.ndarray[tuple[int], np.dtype[np.bool_]]
    finish: str
    turns: list[tuple[int, int]] = field(default_factory=list)
    num_played: int = 0
    problem: str = ""

    def __post_init__(self) -> None:
        edges = np.flatnonzero(np.diff(np.concatenate(([False], self.mask, [False])).astype(int)))
        self.turns = [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]

    def differs(self, text: str) -> None:
        self.problem = self.problem or text


class _DiffersError(EnvironmentError_):
    """The environment asked for something that the transcript does not have."""


async def _replay(environment: Environment, job: ReplayJob, transcript: _Transcript) -> float:
    async def ask(token_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        return _answer(transcript, list(token_ids), sampling or job.sampling)

    ask.sampling = job.sampling  # type: ignore[attr-defined]  # for helpers that serve text
    rollout = check_rollout(await environment.rollout(job.task, ask))
    _compare(transcript, rollout)
    return rollout.reward


def _answer(transcript: _Transcript, asked: list[int], sampling: Sampling) -> Completion:
    number = transcript.num_played
    if number == len(transcript.turns):
        transcript.differs(f"the environment asks for turn {number + 1}, it has {number}")
        raise _DiffersError(transcript.problem)
    start, end = transcript.turns[number]
    if asked != transcript.token_ids[:start]:
        transcript.differs(
            f"the environment asks for turn {number + 1} after {len(asked)} tokens that are not "
            f"the {start} of the transcript"
        )
        raise _DiffersError(transcript.problem)
    transcript.num_played += 1
    said = transcript.token_ids[start:end]
    return Completion(
        tuple(said),
        np.zeros(len(said), np.float32),
        (Span(_NOBODY, 0, len(said)),),
        _finish(transcript, len(said), sampling, is_last=number == len(transcript.turns) - 1),
    )


def _finish(
    transcript: _Transcript, num_tokens: int, sampling: Sampling, *, is_last: bool
) -> Finish:
    """How the turn ended: of the last one it is told, of others the length says it."""
    if is_last and transcript.finish in ("stop", "length"):
        return "length" if transcript.finish == "length" else "stop"
    return "length" if num_tokens >= sampling.max_tokens else "stop"


def _compare(transcript: _Transcript, rollout: Rollout) -> None:
    if transcript.num_played < len(transcript.turns):
        transcript.differs(
            f"the environment ends after {transcript.num_played} turns, it has "
            f"{len(transcript.turns)}"
        )
    elif rollout.token_ids.tolist() != transcript.token_ids:
        transcript.differs(f"the environment makes {len(rollout.token_ids)} other tokens of it")
    elif not np.array_equal(rollout.loss_mask, transcript.mask):
        transcript.differs("the environment says otherwise which tokens the policy sampled")


def _transcripts(job: ReplayJob) -> list[_Transcript]:
    token_ids = np.frombuffer(job.token_ids, "<i4")
    mask = np.frombuffer(job.loss_mask, np.uint8).astype(np.bool_)
    total = sum(header.length for header in job.trajectories)
    if len(token_ids) != total or len(mask) != total:
        raise EnvironmentError_(
            f"the order's frames have {len(token_ids)} tokens and {len(mask)} of mask; its "
            f"trajectories have {total}"
        )
    found, start = [], 0
    for header in job.trajectories:
        end = start + header.length
        found.append(_Transcript(token_ids[start:end].tolist(), mask[start:end], header.finish))
        start = end
    return found
