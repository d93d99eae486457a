"""One thread that owns a model, and an event loop that hands it commands between two steps.

Promise: the loop never blocks on a step; a command meets no half-done one; when the thread
breaks, everyone who waits learns the cause, and so does whoever asks later.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from echo2.errors import Echo2Error, EngineError
from echo2_workers.playing import told

T = TypeVar("T")


class EngineThread:
    """`turn()` does one unit of work in the thread and says whether there is more.
    `memory_hint`: what to lower when memory runs out."""

    def __init__(self, turn: Callable[[], bool], *, name: str, memory_hint: str) -> None:
        self._turn = turn
        self._memory_hint = memory_hint
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._waits: set[asyncio.Future[Any]] = set()
        self._crash: Echo2Error | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    # ------------------------------------------------- called from the event loop

    def command(self, function: Callable[[], None]) -> None:
        """Run `function` in the thread; what it raises ends the engine."""
        self._commands.put(function)

    def future(self) -> asyncio.Future[Any]:
        """One that fails when the thread does. Raises what it failed with before."""
        if self._crash is not None:
            raise self._crash
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waits.add(future)
        future.add_done_callback(self._waits.discard)
        return future

    async def call(self, function: Callable[[], T]) -> T:
        """The result of `function`, run in the thread; what it raises is raised here."""
        future = self.future()

        def run() -> None:
            try:
                self.settle(future, function())
            except Exception as error:
                self.settle(future, explain(error, self._memory_hint))

        self._commands.put(run)
        result: T = await future
        return result

    async def stop(self) -> None:
        self._commands.put(None)
        await self._loop.run_in_executor(None, self._thread.join)
        self._fail_all(EngineError("the engine was stopped"))

    def _fail_all(self, error: Echo2Error) -> None:
        self._crash = error
        for future in list(self._waits):
            if not future.done():
                future.set_exception(error)

    # ------------------------------------------------------ called from the thread

    def settle(self, future: asyncio.Future[Any], result: object) -> None:
        """Hand a result, or an error, to the event loop."""

        def settle() -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        self.post(settle)

    def post(self, function: Callable[[], None]) -> None:
        """Run `function` in the event loop."""
        self._loop.call_soon_threadsafe(function)

    def fail(self, error: Exception) -> None:
        """The engine is of no use any more. From any thread."""
        crash = explain(error, self._memory_hint)
        self.post(lambda: self._fail_all(crash))

    def _run(self) -> None:
        more = False
        try:
            while self._carry_out(wait=not more):
                more = self._turn()
        except Exception as error:
            self.fail(error)

    def _carry_out(self, *, wait: bool) -> bool:
        """Run the commands that are here (wait for one when idle); False to end."""
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False


def explain(error: Exception, memory_hint: str) -> Echo2Error:
    """`error` for whoever waits for the engine; running out of memory is called so."""
    if isinstance(error, Echo2Error):
        return error
    text = told(error)
    if _is_out_of_memory(error):
        text = f"out of memory: {text}; lower {memory_hint}"
    wrapped = EngineError(text)
    wrapped.__cause__ = error
    return wrapped


def _is_out_of_memory(error: BaseException | None) -> bool:
    while error is not None:
        text = str(error)
        if (
            isinstance(error, MemoryError)
            or type(error).__name__ == "OutOfMemoryError"
            or "not enough memory" in text
            or "Cannot allocate memory" in text
            or "out of memory" in text.lower()
        ):
            return True
        error = error.__cause__ or error.__context__
    return False
