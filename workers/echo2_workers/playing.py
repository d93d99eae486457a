"""Plays the G rollouts of a group at once and puts them together for the wire.

Promise: one trajectory that fails, fails the group with the reason, and the others are
ended; nothing but EnvironmentError_ or EngineError comes out of the user's code.

Runs in the environment process, and inside the daemon for trusted built-ins.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
from pydantic import TypeAdapter, ValidationError

from echo2.errors import EngineError, EnvironmentError_
from echo2.types import LeaseId, Sampling, Task, TrajectoryHeader
from echo2_workers.engine import Generated, GenerateRequest, RequestError
from echo2_workers.environment import Completion, Environment, Rollout, check_rollout

_TURN: Final = 0x9E3779B97F4A7C15
"""Odd, so that the turns of one trajectory do not meet the seeds of its neighbours."""
TEXT_MAX: Final = 500
_HEADERS: Final = TypeAdapter(TrajectoryHeader)
_SAMPLINGS: Final = TypeAdapter(Sampling)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob:
    """What a lease asks of the environment. `seed` + index is a trajectory's own."""

    lease: LeaseId
    task: Task
    group_size: int
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlayed:
    """A finished group as GroupResult carries it: headers, and the trajectories one after
    the other in each frame. Seconds are means over the trajectories."""

    trajectories: tuple[TrajectoryHeader, ...]
    token_ids: bytes
    logprobs: bytes
    loss_mask: bytes
    generate_s: float
    environment_s: float


GenerateCall = Callable[[GenerateRequest], Awaitable[Generated]]
"""Hands a request to the engine. Raises RequestError or EngineError."""


async def play_group(
    environment: Environment, job: GroupJob, generate: GenerateCall
) -> GroupPlayed:
    """Raises EnvironmentError_ when the environment fails, EngineError when the engine does."""
    clocks = [_Clock() for _ in range(job.group_size)]
    tasks = [
        asyncio.ensure_future(_play(environment, job, index, generate, clock))
        for index, clock in enumerate(clocks)
    ]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            if task.cancelled():
                raise EnvironmentError_("a rollout cancelled itself")
            error = task.exception()
            if error is not None:
                raise error
        rollouts = [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    generate_s = sum(clock.generate_s for clock in clocks) / job.group_size
    total_s = sum(clock.total_s for clock in clocks) / job.group_size
    return assemble(rollouts, generate_s=generate_s, environment_s=max(0.0, total_s - generate_s))


def assemble(
    rollouts: Sequence[Rollout], *, generate_s: float, environment_s: float
) -> GroupPlayed:
    """The G trajectories of a group as headers and frames. Raises EnvironmentError_ when a
    header has a value that no message may hold."""
    return GroupPlayed(
        trajectories=tuple(_header(rollout) for rollout in rollouts),
        token_ids=b"".join(np.asarray(r.token_ids, "<i4").tobytes() for r in rollouts),
        logprobs=b"".join(
            np.where(r.loss_mask, r.logprobs, 0.0).astype("<f4").tobytes() for r in rollouts
        ),
        loss_mask=b"".join(np.asarray(r.loss_mask, np.uint8).tobytes() for r in rollouts),
        generate_s=generate_s,
        environment_s=environment_s,
    )


def _header(rollout: Rollout) -> TrajectoryHeader:
    try:
        return _HEADERS.validate_python(
            {
                "length": len(rollout.token_ids),
                "prompt_length": rollout.prompt_length,
                "num_sampled": int(np.count_nonzero(rollout.loss_mask)),
                "reward": float(rollout.reward),
                "finish": rollout.finish,
                "num_turns": rollout.num_turns,
                "spans": tuple(asdict(span) for span in rollout.spans),
            }
        )
    except ValidationError as error:
        raise EnvironmentError_(
            f"a rollout that no group can hold: {_first_problem(error)}"
        ) from error


@dataclass(slots=True)
class _Clock:
    generate_s: float = 0.0
    total_s: float = 0.0


async def _play(
    environment: Environment, job: GroupJob, index: int, generate: GenerateCall, clock: _Clock
) -> Rollout:
    turn = 0

    async def ask(token_ids: Sequence[int], sampling: Sampling | None = None) -> Completion:
        nonlocal turn
        if sampling is not None:
            try:
                sampling = _SAMPLINGS.validate_python(asdict(sampling))
            except ValidationError as error:
                raise EnvironmentError_(
                    f"trajectory {index}: generate was given a sampling with "
                    f"{_first_problem(error)}"
                ) from error
        request = GenerateRequest(
            token_ids=[int(token_id) for token_id in token_ids],
            sampling=job.sampling if sampling is None else sampling,
            seed=(job.seed + index + turn * _TURN) % 2**63,
            group_seed=job.seed,
            group_size=job.group_size,
            index=index,
        )
        turn += 1
        began = time.monotonic()
        generated = await generate(request)
        clock.generate_s += time.monotonic() - began
        return Completion(
            tuple(generated.token_ids.tolist()),
            generated.logprobs,
            generated.spans,
            generated.finish,
        )

    ask.sampling = job.sampling  # type: ignore[attr-defined]  # for helpers that serve text
    began = time.monotonic()
    try:
        rollout = check_rollout(await environment.rollout(job.task, ask))
    except EnvironmentError_:
        raise
    except RequestError as error:
        raise EnvironmentError_(f"trajectory {index}: {error}") from error
    except EngineError:
        raise
    except Exception as error:
        raise EnvironmentError_(f"trajectory {index}: {told(error)}") from error
    clock.total_s = time.monotonic() - began
    return rollout


def _first_problem(error: ValidationError) -> str:
    """The first of a value's problems in one line, bounded."""
    problem = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    text = f"{place} = {problem['input']!r}: {problem['msg'][:1].lower()}{problem['msg'][1:]}"
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 3] + "..."


def told(error: BaseException) -> str:
    """Type and text of foreign code's error, bounded."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= TEXT_MAX else text[: TEXT_MAX - 3] + "..."
