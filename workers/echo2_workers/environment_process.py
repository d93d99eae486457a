"""One environment process after the other, and what happens when the code in it misbehaves.

Guilt is read from the process's marker (`echo2_workers.marker`): the guilty group fails, the
others are played again. When it names nobody, all are, each at most RESTARTS_MAX times.

    spawn -> load -> (run, cancel, generate, ping ...) -> ended, hanging or silent -> spawn
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import structlog

from echo2.errors import ConfigError, Echo2Error, EngineError, EnvironmentError_
from echo2.net.pipe import ChildProcess, PipeBrokenError, spawn
from echo2.types import Sampling
from echo2_workers.engine import Generated, GenerateRequest, RequestError
from echo2_workers.environment_host import (
    generated_to_plain,
    played_from_plain,
    replay_to_plain,
)
from echo2_workers.marker import Marker
from echo2_workers.playing import GenerateCall, GroupJob, GroupPlayed
from echo2_workers.replaying import GroupReplayed, ReplayJob

log = structlog.get_logger(__name__)

HOST: Final = "echo2_workers.environment_host"
RESTARTS_MAX: Final = 2
STARTS_MAX: Final = 3
"""Processes in a row that end before they are ready."""
START_TIMEOUT_S: Final = 120.0
WATCH_S: Final = 0.25
PING_S: Final = 1.0
CANCEL_GRACE_S: Final = 5.0
"""A cancelled group's code must end in this time, or its process is killed."""
SILENCE_MARGIN_S: Final = 5.0


@dataclass(slots=True, eq=False)
class HostedGroup:
    """A group in a process; it stays there until the process answered or is gone."""

    number: int
    job: GroupJob | ReplayJob
    generate: GenerateCall
    result: asyncio.Future[GroupPlayed | GroupReplayed] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    calls: set[asyncio.Task[None]] = field(default_factory=set)
    restarts: int = 0
    cancelled_at: float | None = None

    def fail(self, error: Exception) -> None:
        if not self.result.done():
            self.result.set_exception(error)

    def cancel_calls(self) -> None:
        for call in self.calls:
            call.cancel()


async def no_engine(request: GenerateRequest) -> Generated:
    """The engine of a replay, which answers from the transcript."""
    raise EngineError("a replay asks no engine")


class _EndedError(Exception):
    """The process is of no use any more. `guilty`: number of the group, or 0."""

    def __init__(self, text: str, *, guilty: int) -> None:
        self.guilty = guilty
        super().__init__(text)


class EnvironmentSlot:
    """One process after the other, and the groups that run in the present one."""

    def __init__(
        self,
        *,
        name: str,
        hang_timeout_s: float,
        marker_path: Path,
        import_paths: Sequence[Path],
        on_fatal: Callable[[str], None],
    ) -> None:
        self.groups: dict[int, HostedGroup] = {}
        self._name = name
        self._hang_timeout_s = hang_timeout_s
        self._marker_path = marker_path
        self._import_paths = import_paths
        self._on_fatal = on_fatal
        self._child: ChildProcess | None = None
        """The present process, once it is loaded."""
        self._ready = asyncio.Event()
        self._fatal: ConfigError | None = None
        self._reply: asyncio.Future[dict[str, Any]] | None = None
        self._pong_at = 0.0
        self._pinged = False
        self._sends: set[asyncio.Task[None]] = set()

    async def wait_ready(self) -> None:
        await self._ready.wait()
        if self._fatal is not None:
            raise self._fatal

    async def run(self, group: HostedGroup) -> GroupPlayed | GroupReplayed:
        self.groups[group.number] = group
        if self._child is not None:
            self._send_run(self._child, group)
        try:
            return await group.result
        finally:
            group.cancel_calls()
            if group.number in self.groups:  # it is still played there
                group.cancelled_at = asyncio.get_running_loop().time()
                if self._child is not None:
                    self._send(self._child, {"op": "cancel", "group": group.number})

    async def keep(self, settings: str, assets: Path | None) -> None:
        """Until cancelled, or until no process can be made to work."""
        failures = 0
        while True:
            try:
                await self._live(settings, assets)
            except _EndedError as ended:
                log.warning("environment_ended", reason=str(ended), groups=len(self.groups))
                failures = failures + 1 if self._child is None else 0
                self._child = None
                self._settle(str(ended), ended.guilty)
                if failures < STARTS_MAX:
                    continue
                self._give_up(f"environment {self._name!r} does not start: {ended}")
                return
            except ConfigError as error:
                self._give_up(str(error))
                return

    async def _live(self, settings: str, assets: Path | None) -> None:
        """One process from start to end; always leaves with an exception."""
        marker = Marker(self._marker_path)
        marker.leave()
        folders = map(str, self._import_paths)
        child = await spawn(HOST, [str(self._marker_path), *folders])
        reader = asyncio.create_task(self._read(child))
        try:
            await self._load(child, reader, settings, assets)
            self._child = child
            for group in self.groups.values():
                self._send_run(child, group)
            self._ready.set()
            await self._watch(child, reader, marker)
        finally:
            child.kill()
            await child.wait()
            reader.cancel()
            for send in self._sends:
                send.cancel()
            await asyncio.gather(reader, *self._sends, return_exceptions=True)
            await child.pipe.close()
            marker.close()

    async def _load(
        self,
        child: ChildProcess,
        reader: asyncio.Task[None],
        settings: str,
        assets: Path | None,
    ) -> None:
        reply = self._reply = asyncio.get_running_loop().create_future()
        self._send(
            child,
            {
                "op": "load",
                "name": self._name,
                "settings": settings,
                "assets": "" if assets is None else str(assets),
            },
        )
        await asyncio.wait(
            {reply, reader}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED
        )
        if reply.done():
            if reply.result()["op"] == "failed":
                raise ConfigError(reply.result()["text"])
            return
        if reader.done():
            raise _EndedError(f"it ended while it was loaded ({await _how(child)})", guilty=0)
        raise _EndedError(f"loading took more than {START_TIMEOUT_S:g} s", guilty=0)

    async def _watch(self, child: ChildProcess, reader: asyncio.Task[None], marker: Marker) -> None:
        """Raises _EndedError when the process ended or must be ended."""
        loop = asyncio.get_running_loop()
        self._pong_at = looked_at = trusted_from = loop.time()
        self._pinged = False
        ping_at = 0.0
        while True:
            await asyncio.wait({reader}, timeout=WATCH_S)
            now = loop.time()
            if now - looked_at > PING_S + 10 * WATCH_S:  # we were stopped, so maybe it was too
                self._pong_at = trusted_from = now
            looked_at = now
            guilty, entered = marker.read()
            if reader.done():
                how = await _how(child)
                raise _EndedError(
                    f"environment code ended its process ({how}); what ends it fails this group "
                    "alone, and an exception would say why",
                    guilty=guilty,
                )
            blocked_s = now - max(entered, trusted_from)
            if guilty and blocked_s >= self._hang_timeout_s:
                raise _EndedError(
                    f"environment code blocked for {blocked_s:.0f} s (at most "
                    f"{self._hang_timeout_s:g} s, environment.hang_timeout_s): its process was "
                    "killed; let it await, or run long work in a thread",
                    guilty=guilty,
                )
            if now - self._pong_at >= self._hang_timeout_s + SILENCE_MARGIN_S:
                silent_s = now - self._pong_at
                raise _EndedError(f"the process was silent for {silent_s:.0f} s", guilty=guilty)
            for group in self.groups.values():
                if group.cancelled_at is not None and now >= group.cancelled_at + CANCEL_GRACE_S:
                    text = f"its code did not end {CANCEL_GRACE_S:g} s after it was cancelled"
                    raise _EndedError(text, guilty=group.number)
            if not self._pinged and now >= ping_at:
                self._pinged, ping_at = True, now + PING_S
                self._send(child, {"op": "ping"})

    def _settle(self, text: str, guilty: int) -> None:
        """The process is gone: its guilty group fails, the others wait for the next one."""
        for group in list(self.groups.values()):
            group.cancel_calls()
            if group.cancelled_at is not None:
                del self.groups[group.number]
            elif group.number == guilty:
                del self.groups[group.number]
                group.fail(EnvironmentError_(text))
            elif not guilty and group.restarts >= RESTARTS_MAX:
                del self.groups[group.number]
                times = group.restarts + 1
                group.fail(
                    EnvironmentError_(f"its process ended {times} times under it; now: {text}")
                )
            else:
                group.restarts += not guilty

    def _give_up(self, text: str) -> None:
        self._fatal = ConfigError(text)
        for group in list(self.groups.values()):
            group.fail(EnvironmentError_(text))
        self.groups.clear()
        if self._ready.is_set():
            self._on_fatal(text)
        self._ready.set()

    # ------------------------------------------------------------------- messages

    async def _read(self, child: ChildProcess) -> None:
        """Until the stream ends. A broken one is its end too."""
        try:
            while (received := await child.pipe.receive()) is not None:
                self._take(child, *received)
        except Echo2Error as error:
            log.warning("environment_pipe_broken", reason=str(error))

    def _take(self, child: ChildProcess, header: dict[str, Any], frames: list[bytes]) -> None:
        self._pong_at = asyncio.get_running_loop().time()
        op = header["op"]
        if op == "pong":
            self._pinged = False
        elif op in ("loaded", "failed"):
            if self._reply is not None and not self._reply.done():
                self._reply.set_result(header)
        elif op == "generate":
            group = self.groups.get(header["group"])
            if group is not None and not group.result.done():
                call = asyncio.create_task(self._answer(child, group, header, frames))
                group.calls.add(call)
                call.add_done_callback(group.calls.discard)
        else:
            group = self.groups.pop(header["group"], None)
            if group is None or group.result.done():
                return
            if op == "played":
                group.result.set_result(played_from_plain(header, frames))
            elif op == "replayed":
                group.result.set_result(
                    GroupReplayed(rewards=tuple(header["rewards"]), problem=header["problem"])
                )
            elif op == "broken":
                group.fail(EnvironmentError_(header["text"]))

    async def _answer(
        self, child: ChildProcess, group: HostedGroup, header: dict[str, Any], frames: list[bytes]
    ) -> None:
        assert isinstance(group.job, GroupJob), "a replay asks no engine"
        request = GenerateRequest(
            token_ids=np.frombuffer(frames[0], "<i4").tolist(),
            sampling=Sampling(*header["sampling"]),
            seed=header["seed"],
            group_seed=group.job.seed,
            group_size=group.job.group_size,
            index=header["index"],
        )
        try:
            generated = await group.generate(request)
        except RequestError as error:
            reply, reply_frames = {"error": str(error)}, list[bytes]()
        except EngineError as error:
            group.fail(error)
            return
        else:
            reply, reply_frames = generated_to_plain(generated)
        await self._deliver(
            child, {"op": "generated", "call": header["call"], **reply}, reply_frames
        )

    def _send_run(self, child: ChildProcess, group: HostedGroup) -> None:
        job = group.job
        if isinstance(job, ReplayJob):
            header, frames = replay_to_plain(job)
            self._send(child, {"op": "replay", "group": group.number, **header}, frames)
            return
        self._send(
            child,
            {
                "op": "run",
                "group": group.number,
                "task": [job.task.index, job.task.payload],
                "size": job.group_size,
                "sampling": [
                    job.sampling.temperature,
                    job.sampling.top_p,
                    job.sampling.max_tokens,
                ],
                "seed": job.seed,
            },
        )

    def _send(
        self, child: ChildProcess, header: dict[str, Any], frames: Sequence[bytes] = ()
    ) -> None:
        """In a task: a process that hangs does not empty its pipe."""
        self._own(self._deliver(child, header, list(frames)))

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _deliver(
        self, child: ChildProcess, header: dict[str, Any], frames: list[bytes]
    ) -> None:
        try:
            await child.pipe.send(header, frames)
        except PipeBrokenError as error:
            log.debug("environment_pipe_broken", reason=str(error))  # `_watch` sees the end


async def _how(child: ChildProcess) -> str:
    """How a process ended, or will in a moment; one that lingers is killed."""
    try:
        async with asyncio.timeout(SILENCE_MARGIN_S):
            code = await child.wait()
    except TimeoutError:
        child.kill()
        code = await child.wait()
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
