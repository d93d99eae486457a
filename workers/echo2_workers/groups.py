"""Groups in work: each lease is a task that plays its group and reports one outcome.

Counts the tokens of each lease, thrown-away ones included, so that the count never falls.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

import structlog

from echo2 import wire
from echo2.core.worker_events import Event, GroupDone, GroupFailed
from echo2.errors import EngineError, EnvironmentError_, LocalProtocolError
from echo2.frames import frames_problem
from echo2.messages import GroupResult, LeaseGranted
from echo2.types import LeaseId
from echo2_workers.engine import Generated, GenerateRequest
from echo2_workers.engine_process import EngineHandle
from echo2_workers.environment import Environment, load_environment
from echo2_workers.playing import GenerateCall, GroupJob, GroupPlayed, play_group, told
from echo2_workers.replaying import GroupReplayed, ReplayJob, replay_group

log = structlog.get_logger(__name__)

RATE_WINDOW_S: Final = 10.0


class Environments(Protocol):
    """Where rollouts are played: `EnvironmentPool`, or `LocalEnvironments`."""

    async def start(self, settings: str, assets: Path | None) -> None: ...
    async def run_group(self, job: GroupJob, generate: GenerateCall) -> GroupPlayed: ...
    async def replay_group(self, job: ReplayJob) -> GroupReplayed: ...
    async def stop(self) -> None: ...


class LocalEnvironments:
    """A trusted built-in environment inside the daemon: no process, no protection."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._environment: Environment | None = None

    async def start(self, settings: str, assets: Path | None) -> None:
        self._environment = load_environment(self._name, json.loads(settings), assets)

    async def run_group(self, job: GroupJob, generate: GenerateCall) -> GroupPlayed:
        assert self._environment is not None
        return await play_group(self._environment, job, generate)

    async def replay_group(self, job: ReplayJob) -> GroupReplayed:
        assert self._environment is not None
        return await replay_group(self._environment, job)

    async def stop(self) -> None:
        self._environment = None


class Groups:
    """`engine()` gives the engine that lives now. `post` takes the outcome's event."""

    def __init__(
        self,
        environments: Environments,
        *,
        engine: Callable[[], EngineHandle],
        rollout_timeout_s: float,
        post: Callable[[Event], None],
    ) -> None:
        self._environments = environments
        self._engine = engine
        self._rollout_timeout_s = rollout_timeout_s
        self._post = post
        self._tasks: dict[LeaseId, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._tokens: dict[LeaseId, int] = {}
        self._tokens_total = 0
        self._history: deque[tuple[float, int]] = deque()

    @property
    def tokens(self) -> Mapping[LeaseId, int]:
        """Tokens sampled so far for each group in work."""
        return self._tokens

    def tokens_per_s(self, now: float) -> float:
        """Mean rate over the last RATE_WINDOW_S; to be called regularly."""
        self._history.append((now, self._tokens_total))
        while len(self._history) > 1 and self._history[1][0] <= now - RATE_WINDOW_S:
            self._history.popleft()
        began, tokens = self._history[0]
        return (self._tokens_total - tokens) / (now - began) if now > began else 0.0

    def start(self, granted: LeaseGranted) -> None:
        lease = granted.lease
        self._tokens[lease] = 0
        task = asyncio.create_task(self._play(granted), name=f"group.{lease}")
        self._tasks[lease] = task
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def abort(self, lease: LeaseId) -> None:
        """End a group; it reports nothing any more."""
        self._tokens.pop(lease, None)
        task = self._tasks.pop(lease, None)
        if task is not None:
            task.cancel()

    async def stop(self) -> None:
        for lease in list(self._tasks):
            self.abort(lease)
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _play(self, granted: LeaseGranted) -> None:
        outcome = await self._outcome(granted)
        if self._tasks.get(granted.lease) is asyncio.current_task():
            del self._tasks[granted.lease]
            self._tokens.pop(granted.lease, None)
            self._post(outcome)

    async def _outcome(self, granted: LeaseGranted) -> Event:
        lease = granted.lease
        job = GroupJob(
            lease=lease,
            task=granted.task,
            group_size=granted.group_size,
            sampling=granted.sampling,
            seed=granted.seed,
        )
        try:
            engine = self._engine()

            async def generate(request: GenerateRequest) -> Generated:
                return await engine.generate(request, lambda n: self._count(lease, n))

            async with asyncio.timeout(self._rollout_timeout_s):
                played = await self._environments.run_group(job, generate)
            return GroupDone(_result(granted, played))
        except TimeoutError:
            return GroupFailed(
                lease,
                "environment",
                f"the group took more than {self._rollout_timeout_s:g} s "
                "(environment.rollout_timeout_s)",
            )
        except EnvironmentError_ as error:
            return GroupFailed(lease, "environment", str(error))
        except EngineError as error:
            return GroupFailed(lease, "engine", str(error))
        except (ValueError, LocalProtocolError) as error:  # what no message may hold
            return GroupFailed(lease, "environment", told(error))
        except Exception as error:
            log.exception("group_crashed", lease=lease)
            return GroupFailed(lease, "lost", told(error))

    def _count(self, lease: LeaseId, tokens: int) -> None:
        self._tokens_total += tokens
        if lease in self._tokens:
            self._tokens[lease] += tokens


def _result(granted: LeaseGranted, played: GroupPlayed) -> GroupResult:
    """Raises ValueError or LocalProtocolError when the group does not fit a message: better
    here, where its lease fails, than at each try to send it."""
    result = GroupResult(
        lease=granted.lease,
        group=granted.group,
        attempt=granted.attempt,
        trajectories=played.trajectories,
        generate_s=played.generate_s,
        environment_s=played.environment_s,
        token_ids=played.token_ids,
        logprobs=played.logprobs,
        loss_mask=played.loss_mask,
    )
    wire.encode(result)
    problem = frames_problem(result)
    if problem:
        raise ValueError(problem)
    return result
