"""The daemon's side of the engine: in a process of its own, or inside for the null engine.

Promise: whoever waits for an engine that dies gets an EngineError, at once; the death is
told once (`on_died`), with its cause. An engine that answers no ping, or is busy without a
step, for too long is ended: nothing waits for it forever.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import structlog

from echo2.errors import ConfigError, Echo2Error, EngineError, WeightsError
from echo2.messages import VersionAnnounced
from echo2.net.pipe import ChildProcess, PipeBrokenError, spawn
from echo2.net.tasks import OwnedTasks
from echo2_workers.canary import read_probe
from echo2_workers.engine import (
    Engine,
    Generated,
    GenerateRequest,
    InstallMode,
    RequestError,
)
from echo2_workers.engine_python import check_python
from echo2_workers.environment_host import generated_from_plain
from echo2_workers.installing import Installed, InstallError, Weights, install

log = structlog.get_logger(__name__)

START_TIMEOUT_S: Final = 600.0
INSTALL_TIMEOUT_S: Final = 1800.0
"""With on_update "finish" an install waits for the longest running generation."""
PING_S: Final = 1.0
_SIGNALS: Final = frozenset(int(number) for number in signal.Signals)
LAST_WORDS_S: Final = 5.0
"""A process that closed its pipe may take so long to end by itself, and tell its code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallOrder:
    """What to install, from which folder of versions, and how."""

    announced: VersionAnnounced
    previous: VersionAnnounced | None
    folder: Path
    mode: InstallMode
    tolerance: float


class EngineHandle(Protocol):
    """What the daemon does with an engine, wherever it runs."""

    async def start(self, assets: Path | None) -> None: ...
    async def install(self, order: InstallOrder) -> Installed: ...
    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[int], None]
    ) -> Generated: ...
    async def stop(self) -> None: ...


class LocalEngine:
    """An engine without weights that runs inside the daemon."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def start(self, assets: Path | None) -> None:
        await self._engine.start(assets)

    async def install(self, order: InstallOrder) -> Installed:
        announced, previous = order.announced, order.previous
        try:
            probe = read_probe(
                announced.probe_length, announced.probe_tokens, announced.probe_logprobs
            )
        except WeightsError as error:
            raise InstallError(str(error), stage="install", restored=True) from error
        return await install(
            self._engine,
            Weights(announced.version, {}),
            mode=order.mode,
            probe=probe,
            tolerance=order.tolerance,
            previous=None if previous is None else Weights(previous.version, {}),
        )

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[int], None]
    ) -> Generated:
        return await self._engine.generate(request, on_tokens)

    async def stop(self) -> None:
        await self._engine.stop()


class EngineProcess:
    """One life of an engine process. `on_died(text)` is called once, unless `stop` ended it.

    `python` runs it; this interpreter when it is "". It is ended when it answers no ping for
    `silence_max_s`, or has work and makes no step for `stall_max_s`.
    """

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        *,
        on_died: Callable[[str], None],
        python: str = "",
        silence_max_s: float = 60.0,
        stall_max_s: float = 300.0,
    ) -> None:
        self._name = name
        self._silence_max_s = silence_max_s
        self._stall_max_s = stall_max_s
        self._settings = settings
        self._on_died = on_died
        self._python = python
        self._ids = itertools.count(1)
        self._child: ChildProcess | None = None
        self._tasks = OwnedTasks("engine")
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], list[bytes]]]] = {}
        self._on_tokens: dict[int, Callable[[int], None]] = {}
        self._death: EngineError | ConfigError | None = None
        self._crash_text = ""
        self._crash_is_fatal = False
        self._is_up = False
        self._pong_at = 0.0
        self._progress_at = 0.0
        self._steps = -1

    async def start(self, assets: Path | None) -> None:
        """Spawn the process and warm the engine up. Raises EngineError, or ConfigError when
        the settings, or what is installed, cannot work."""
        await check_python(self._python, self._name)
        self._child = await spawn(
            "echo2_workers.engine_host", env={"HF_HUB_OFFLINE": "1"}, python=self._python
        )
        self._tasks.start(self._read(self._child), name="read")
        self._tasks.start(self._watch(self._child), name="watch")
        await self._ask(
            {
                "op": "start",
                "engine": self._name,
                "settings": self._settings,
                "assets": "" if assets is None else str(assets),
            },
            timeout_s=START_TIMEOUT_S,
        )
        self._pong_at = self._progress_at = asyncio.get_running_loop().time()
        self._is_up = True

    async def install(self, order: InstallOrder) -> Installed:
        """Raises InstallError, or EngineError when the engine is gone."""
        announced, previous = order.announced, order.previous
        header, _ = await self._ask(
            {
                "op": "install",
                "folder": str(order.folder),
                "digest": announced.manifest_digest,
                "version": [announced.version.incarnation, announced.version.step],
                "mode": order.mode,
                "tolerance": order.tolerance,
                "previous": None
                if previous is None
                else [
                    previous.manifest_digest,
                    [previous.version.incarnation, previous.version.step],
                ],
                "probe": announced.probe_length,
            },
            [announced.probe_tokens, announced.probe_logprobs],
            timeout_s=INSTALL_TIMEOUT_S,
        )
        if "stage" in header:
            raise InstallError(header["text"], stage=header["stage"], restored=header["restored"])
        return Installed(header["install_s"], header["pause_s"], header["canary_diff"])

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[int], None]
    ) -> Generated:
        """Raises RequestError, or EngineError when the engine is gone."""
        sampling = request.sampling
        header, frames = await self._ask(
            {
                "op": "generate",
                "sampling": [sampling.temperature, sampling.top_p, sampling.max_tokens],
                "seed": request.seed,
                "group_seed": request.group_seed,
                "group_size": request.group_size,
                "index": request.index,
            },
            [np.asarray(request.token_ids, "<i4").tobytes()],
            on_tokens=on_tokens,
        )
        if "error" in header:
            raise RequestError(header["error"])
        return generated_from_plain(header, frames)

    async def stop(self) -> None:
        """End the process; who waits for it gets an EngineError."""
        self._die("the engine was stopped", tell=False)
        await self._tasks.stop()
        if self._child is not None:
            self._child.kill()
            await self._child.stop(1.0)

    async def _ask(
        self,
        header: dict[str, Any],
        frames: list[bytes] | None = None,
        *,
        timeout_s: float | None = None,
        on_tokens: Callable[[int], None] | None = None,
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Without `timeout_s` the watch over pings and steps bounds the wait."""
        if self._death is not None or self._child is None:
            raise self._death or EngineError("the engine was not started")
        number = next(self._ids)
        future = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        if on_tokens is not None:
            self._on_tokens[number] = on_tokens
        answered = False
        try:
            async with asyncio.timeout(timeout_s):
                await self._send({**header, "id": number}, frames or [])
                reply: tuple[dict[str, Any], list[bytes]] = await future
            answered = True
            return reply
        except TimeoutError:
            self._die(f"{header['op']} took more than {timeout_s:g} s")
            raise self._death or EngineError("died") from None
        finally:
            self._waiting.pop(number, None)
            self._on_tokens.pop(number, None)
            if not answered and self._death is None:
                self._tasks.start(self._cancel(number), name="cancel")

    async def _cancel(self, number: int) -> None:
        await self._send({"op": "cancel", "id": number})

    async def _send(self, header: dict[str, Any], frames: list[bytes] | None = None) -> None:
        assert self._child is not None
        with contextlib.suppress(PipeBrokenError):  # `_read` meets the end too, and its cause
            await self._child.pipe.send(header, frames or [])

    async def _read(self, child: ChildProcess) -> None:
        try:
            while (received := await child.pipe.receive()) is not None:
                self._take(*received)
            self._crash_text = self._crash_text or await _end_of(child)
        except PipeBrokenError:  # it died while it wrote
            self._crash_text = self._crash_text or await _end_of(child)
        except Echo2Error as error:
            self._crash_text = self._crash_text or str(error)
        finally:
            self._die(self._crash_text or "what it sent could not be read")

    def _take(self, header: dict[str, Any], frames: list[bytes]) -> None:
        now = asyncio.get_running_loop().time()
        match header["op"]:
            case "tokens":
                for number, tokens in header["counts"]:
                    on_tokens = self._on_tokens.get(number)
                    if on_tokens is not None:
                        on_tokens(tokens)
            case "pong":
                self._pong_at = now
                if header["steps"] != self._steps or not header["busy"]:
                    self._steps, self._progress_at = header["steps"], now
            case "crashed":
                self._crash_text = header["text"]
                self._crash_is_fatal = header["fatal"]
            case "reply":
                future = self._waiting.get(header["id"])
                if future is not None and not future.done():
                    future.set_result((header, frames))

    async def _watch(self, child: ChildProcess) -> None:
        loop = asyncio.get_running_loop()
        self._pong_at = self._progress_at = looked_at = loop.time()
        while self._death is None:
            await self._send({"op": "ping"})
            await asyncio.sleep(PING_S)
            now = loop.time()
            if now - looked_at > 10 * PING_S:  # we were stopped, so maybe it was too
                self._pong_at = self._progress_at = now
            looked_at = now
            if not self._is_up:
                continue  # imports answer no ping; START_TIMEOUT_S bounds the start
            if now - self._pong_at > self._silence_max_s:
                self._die(f"the engine process was silent for {self._silence_max_s:g} s")
            elif now - self._progress_at > self._stall_max_s:
                self._die(f"the engine made no step for {self._stall_max_s:g} s with work to do")

    def _die(self, text: str, *, tell: bool = True) -> None:
        """Once: everyone who waits is told, and the process is killed."""
        if self._death is not None:
            return
        kind = ConfigError if self._crash_is_fatal else EngineError
        self._death = kind(text)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(kind(text))
        if self._child is not None:
            self._child.kill()
        if tell and not self._crash_is_fatal:  # else whoever starts it is told
            log.error("engine_process_died", text=text)
            self._on_died(text)


async def _end_of(child: ChildProcess) -> str:
    """How a process ended that closed its pipe without a word."""
    try:
        async with asyncio.timeout(LAST_WORDS_S):
            code = await child.wait()
    except TimeoutError:
        child.kill()
        return "the engine process closed its pipe, and was killed"
    return death_text(code)


def death_text(code: int) -> str:
    """The cause that a return code tells."""
    if code >= 0:
        return f"the engine process ended with code {code}"
    name = signal.Signals(-code).name if -code in _SIGNALS else f"signal {-code}"
    hint = ""
    if -code == signal.SIGKILL:
        hint = ": out of memory? The kernel's log (dmesg) names what it killed for it"
    elif -code in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGABRT):
        hint = ": its log has the stack"
    return f"the engine process was killed by {name}{hint}"
