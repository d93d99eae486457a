"""Answers compared by math-verify, in a process that can be killed.

Promise: `equal` answers within `timeout_s` plus the time of a start, whatever the policy wrote.
sympy may loop for ever or eat all memory on a few characters, and math-verify's own limit works
by a signal, which needs a main thread that comes back to Python. So a check runs in a child
(`math_check_host.py`) with limited memory; one that is late is killed, and the next check gets
a new process. A check that was killed counts as "not equal".

One check at a time; more wait in order. The child dies with its parent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from echo2.errors import EnvironmentError_
from echo2.net.pipe import ChildProcess, PipeBrokenError, spawn

HOST: Final = "echo2_workers.environments.math_check_host"
START_TIMEOUT_S: Final = 120.0
ANSWER_CHARACTERS_MAX: Final = 2000
"""A longer answer is wrong without a look."""


class MathChecks:
    """`killed` counts the processes that had to be ended. To be used in one event loop at a
    time; `stop` ends the process. `module` can be another host, for a scorer of one's own."""

    def __init__(self, *, timeout_s: float, module: str = HOST, args: Sequence[str] = ()) -> None:
        if not 0.0 < timeout_s <= 600.0:
            raise ValueError(f"check_timeout_s is {timeout_s}; it must be above 0, at most 600")
        self.killed = 0
        self._timeout_s = timeout_s
        self._module = module
        self._args = args
        self._child: ChildProcess | None = None
        self._turn: asyncio.Lock | None = None

    async def equal(self, said: str, wanted: str) -> bool:
        """Whether both mean the same. EnvironmentError_ when no process can be started."""
        if len(said) > ANSWER_CHARACTERS_MAX:
            return False
        if self._turn is None:
            self._turn = asyncio.Lock()
        async with self._turn:
            child = self._child or await self._start()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await child.pipe.send({"said": said, "wanted": wanted})
                    received = await child.pipe.receive()
            except (TimeoutError, PipeBrokenError):
                received = None
            except asyncio.CancelledError:
                await self._end()  # its answer would be taken for that of the next check
                raise
            if received is None:
                await self._end()
                self.killed += 1
                return False
            return bool(received[0]["equal"])

    async def stop(self) -> None:
        """End the process, if there is one."""
        await self._end()
        self._turn = None

    async def _start(self) -> ChildProcess:
        child = await spawn(self._module, self._args)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                received = await child.pipe.receive()
        except (TimeoutError, PipeBrokenError):
            received = None
        except BaseException:
            child.kill()
            await child.stop(0.0)
            raise
        if received is None or "ready" not in received[0]:
            child.kill()
            await child.stop(0.0)
            raise EnvironmentError_(
                f"the process that compares answers ({self._module}) did not start; see its "
                "output above, and pip install 'echo2[envs]' where a package is missing"
            )
        self._child = child
        return child

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            await child.stop(0.0)
