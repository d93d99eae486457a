"""Child processes of `echo2 run`: each with its log, and none outlives its parent.

A child runs in a session of its own, so that Ctrl-C reaches the parent alone, which then
ends its children in order. When the parent dies without doing so (kill -9), the kernel
kills each child (`net.child`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

from echo2.net.child import PARENT_VARIABLE

_LOG_TAIL_BYTES: Final = 64 << 10


def command_line(command: str, *arguments: str) -> list[str]:
    """This interpreter running one command of echo2."""
    return [sys.executable, "-m", "echo2.cli", command, *arguments]


class LocalProcess:
    """One child: started, waited for, started again. Its output goes to `log`, appended.
    It finds modules in `import_path` too."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, *, import_path: Path | None = None
    ) -> None:
        self.name = name
        self._import_path = import_path
        self.command = list(command)
        self.log = log
        self.restarts = 0
        self.given_up = False
        self._process: asyncio.subprocess.Process | None = None
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def started(self) -> bool:
        return self._process is not None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    @property
    def code(self) -> int | None:
        """Exit code of its last life; -N when signal N ended it, None while it runs."""
        return None if self._process is None else self._process.returncode

    async def start(self) -> None:
        with open_log(self.log) as file:
            self._log_start = file.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self.command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self._environment(),
            )

    async def wait(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return await self._process.wait()

    async def ended_within(self, timeout_s: float) -> bool:
        """Whether it has ended, at the latest after `timeout_s`."""
        if not self.running:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.wait()
        return not self.running

    def send(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    def last_lines(self, count: int = 12) -> list[str]:
        """The end of what its last life wrote."""
        return last_lines(self.log, count, start=self._log_start)

    def _environment(self) -> dict[str, str]:
        found = {**os.environ, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
        found.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a log is no terminal
        if self._import_path is not None:
            paths = [str(self._import_path), os.environ.get("PYTHONPATH", "")]
            found["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return found


def open_log(path: Path) -> BinaryIO:
    """The log at its end, ready to be given to a child."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("ab")
    file.seek(0, os.SEEK_END)
    return file


def last_lines(path: Path, count: int, *, start: int = 0) -> list[str]:
    """Up to `count` last lines of a file, none from before byte `start`."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(start, end - _LOG_TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    return [line for line in text.splitlines() if line.strip()][-count:]


def ended_how(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
