"""The environment process: plays the rollouts of many groups at once.

Started by `environment_pool` through `echo2.net.pipe`; ends with its parent. User code runs
here and nowhere else. Messages (header `op`; frames in brackets):

    to the child    describe {name}                 -> described {version, replays} | failed {text}
                    load {name, settings, assets}   -> loaded | failed {text}
                    run {group, task, size, sampling, seed}
                                   -> played {...} [tokens, logprobs, masks] | broken {text}
                    replay {group, task, sampling, trajectories} [tokens, masks]
                                   -> replayed {group, rewards, problem} | broken {text}
                    cancel {group}                  -> cancelled {group}
                    generated {call, finish, spans} [tokens, logprobs] | {call, error}
                    ping {}                         -> pong {}
    to the parent   generate {call, group, sampling, seed, index, size} [tokens]
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from echo2.errors import ConfigError, EnvironmentError_
from echo2.net.pipe import Pipe, PipeBrokenError, child_pipe
from echo2.types import LeaseId, Sampling, Task, TrajectoryHeader
from echo2_workers.engine import (
    Generated,
    GenerateRequest,
    RequestError,
    spans_from_plain,
    spans_to_plain,
)
from echo2_workers.environment import (
    Environment,
    about_environment,
    add_import_paths,
    load_environment,
)
from echo2_workers.marker import Marker, current_group, mark_tasks
from echo2_workers.playing import GroupJob, GroupPlayed, play_group, told
from echo2_workers.replaying import ReplayJob, replay_group


class EnvironmentHost:
    def __init__(self, pipe: Pipe, marker: Marker) -> None:
        self._pipe = pipe
        self._marker = marker
        self._environment: Environment | None = None
        self._groups: dict[int, asyncio.Task[None]] = {}
        self._calls: dict[int, asyncio.Future[Generated]] = {}
        self._call_ids = itertools.count(1)
        self._telling: set[asyncio.Future[None]] = set()

    async def serve(self) -> None:
        """Until the parent closes the pipe."""
        while (received := await self._pipe.receive()) is not None:
            header, frames = received
            match header["op"]:
                case "generated":
                    self._take_generated(header, frames)
                case "run":
                    self._run(header["group"], self._play(header["group"], header))
                case "replay":
                    job = replay_from_plain(header, frames)
                    self._run(header["group"], self._replay(header["group"], job))
                case "cancel":
                    await self._cancel(header["group"])
                case "ping":
                    await self._pipe.send({"op": "pong"})
                case "describe":
                    await self._describe(header["name"])
                case "load":
                    await self._load(header)

    async def _describe(self, name: str) -> None:
        try:
            about = about_environment(name)
        except ConfigError as error:
            await self._pipe.send({"op": "failed", "text": str(error)})
        else:
            await self._pipe.send(
                {"op": "described", "version": about.version, "replays": about.replays}
            )

    async def _load(self, header: dict[str, Any]) -> None:
        assets = Path(header["assets"]) if header["assets"] else None
        try:
            self._environment = load_environment(
                header["name"], json.loads(header["settings"]), assets
            )
        except ConfigError as error:
            await self._pipe.send({"op": "failed", "text": str(error)})
        else:
            await self._pipe.send({"op": "loaded"})

    def _run(self, group: int, playing: Coroutine[Any, Any, None]) -> None:
        token = current_group.set(group)
        try:
            task = asyncio.get_running_loop().create_task(playing)
        finally:
            current_group.reset(token)
        self._groups[group] = task
        task.add_done_callback(lambda _: self._groups.pop(group, None))

    async def _play(self, group: int, header: dict[str, Any]) -> None:
        index, payload = header["task"]
        job = GroupJob(
            lease=LeaseId("local"),
            task=Task(index, payload),
            group_size=header["size"],
            sampling=Sampling(*header["sampling"]),
            seed=header["seed"],
        )
        assert self._environment is not None
        try:
            played = await play_group(
                self._environment, job, lambda request: self._generate(group, request)
            )
        except EnvironmentError_ as error:
            await self._pipe.send({"op": "broken", "group": group, "text": str(error)})
        except asyncio.CancelledError:
            raise
        except Exception as error:
            await self._pipe.send({"op": "broken", "group": group, "text": told(error)})
        else:
            header, frames = played_to_plain(played)
            await self._pipe.send({"op": "played", "group": group, **header}, frames)

    async def _replay(self, group: int, job: ReplayJob) -> None:
        assert self._environment is not None
        try:
            replayed = await replay_group(self._environment, job)
        except EnvironmentError_ as error:
            await self._pipe.send({"op": "broken", "group": group, "text": str(error)})
        else:
            answer = {"rewards": list(replayed.rewards), "problem": replayed.problem}
            await self._pipe.send({"op": "replayed", "group": group, **answer})

    async def _cancel(self, group: int) -> None:
        """Answered when the group's code has really ended; the parent limits that time."""
        task = self._groups.get(group)
        if task is None:
            await self._pipe.send({"op": "cancelled", "group": group})
            return
        task.cancel()
        task.add_done_callback(lambda _: self._tell_cancelled(group))

    def _tell_cancelled(self, group: int) -> None:
        telling = asyncio.ensure_future(self._pipe.send({"op": "cancelled", "group": group}))
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)

    async def _generate(self, group: int, request: GenerateRequest) -> Generated:
        call = next(self._call_ids)
        future: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self._calls[call] = future
        sampling = request.sampling
        try:
            await self._pipe.send(
                {
                    "op": "generate",
                    "call": call,
                    "group": group,
                    "sampling": [sampling.temperature, sampling.top_p, sampling.max_tokens],
                    "seed": request.seed,
                    "index": request.index,
                },
                [np.asarray(request.token_ids, "<i4").tobytes()],
            )
            return await future
        finally:
            del self._calls[call]

    def _take_generated(self, header: dict[str, Any], frames: list[bytes]) -> None:
        future = self._calls.get(header["call"])
        if future is None or future.done():
            return
        if "error" in header:
            future.set_exception(RequestError(header["error"]))
        else:
            future.set_result(generated_from_plain(header, frames))


def generated_to_plain(generated: Generated) -> tuple[dict[str, Any], list[bytes]]:
    header = {"finish": generated.finish, "spans": spans_to_plain(generated.spans)}
    frames = [
        np.asarray(generated.token_ids, "<i4").tobytes(),
        np.asarray(generated.logprobs, "<f4").tobytes(),
    ]
    return header, frames


def generated_from_plain(header: dict[str, Any], frames: list[bytes]) -> Generated:
    return Generated(
        np.frombuffer(frames[0], "<i4"),
        np.frombuffer(frames[1], "<f4"),
        spans_from_plain(header["spans"]),
        header["finish"],
    )


def played_to_plain(played: GroupPlayed) -> tuple[dict[str, Any], list[bytes]]:
    header = {
        "trajectories": _rows(played.trajectories),
        "generate_s": played.generate_s,
        "environment_s": played.environment_s,
    }
    return header, [played.token_ids, played.logprobs, played.loss_mask]


def played_from_plain(header: dict[str, Any], frames: list[bytes]) -> GroupPlayed:
    return GroupPlayed(
        trajectories=_headers(header["trajectories"]),
        token_ids=frames[0],
        logprobs=frames[1],
        loss_mask=frames[2],
        generate_s=header["generate_s"],
        environment_s=header["environment_s"],
    )


def _rows(trajectories: tuple[TrajectoryHeader, ...]) -> list[list[Any]]:
    return [
        [
            each.length,
            each.prompt_length,
            each.num_sampled,
            each.reward,
            each.finish,
            each.num_turns,
            spans_to_plain(each.spans),
        ]
        for each in trajectories
    ]


def _headers(rows: list[list[Any]]) -> tuple[TrajectoryHeader, ...]:
    return tuple(
        TrajectoryHeader(
            length=length,
            prompt_length=prompt_length,
            num_sampled=num_sampled,
            reward=reward,
            finish=finish,
            num_turns=num_turns,
            spans=spans_from_plain(spans),
        )
        for length, prompt_length, num_sampled, reward, finish, num_turns, spans in rows
    )


def replay_to_plain(job: ReplayJob) -> tuple[dict[str, Any], list[bytes]]:
    header = {
        "task": [job.task.index, job.task.payload],
        "sampling": [job.sampling.temperature, job.sampling.top_p, job.sampling.max_tokens],
        "trajectories": _rows(job.trajectories),
    }
    return header, [job.token_ids, job.loss_mask]


def replay_from_plain(header: dict[str, Any], frames: list[bytes]) -> ReplayJob:
    index, payload = header["task"]
    return ReplayJob(
        task=Task(index, payload),
        sampling=Sampling(*header["sampling"]),
        trajectories=_headers(header["trajectories"]),
        token_ids=frames[0],
        loss_mask=frames[1],
    )


async def _serve(marker_path: Path) -> None:
    marker = Marker(marker_path)
    mark_tasks(asyncio.get_running_loop(), marker)
    await EnvironmentHost(await child_pipe(), marker).serve()


def main(arguments: list[str]) -> None:
    """`python -m echo2.net.child echo2_workers.environment_host MARKER FOLDER...`."""
    marker_path, *folders = arguments
    add_import_paths(*map(Path, folders))
    try:
        uvloop.run(_serve(Path(marker_path)))
    except PipeBrokenError:
        sys.exit("the daemon is gone")


if __name__ == "__main__":
    main(sys.argv[1:])
