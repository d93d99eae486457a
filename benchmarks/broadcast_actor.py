"""A process on a host of a Wan that is told lines and answers lines.

Both sides tell time by the monotonic clock, which all processes of a machine share, so a moment
that an actor reports is one that the benchmark can subtract.
"""

from __future__ import annotations

import select
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from wan import Wan

LOG_TAIL: Final = 2000


class Actor:
    """Its stderr goes to FOLDER/HOST.log, whose end is told when it fails."""

    def __init__(self, wan: Wan, host: str, argv: Sequence[str], folder: Path) -> None:
        self.host = host
        self._log = folder / f"{host}.log"
        with self._log.open("wb") as log:
            self.process = wan.popen(
                host, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, bufsize=0
            )

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())

    def hear(self, word: str, *, deadline: float) -> str:
        """What follows `word` on the next line, which must be there at `deadline`."""
        stdout = self.process.stdout
        assert stdout is not None
        if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise RuntimeError(f"{self.host} did not say {word!r} in time{self._said()}")
        line = bytes(stdout.readline()).decode()  # unbuffered: select sees what is left
        if line.split()[:1] != [word]:
            raise RuntimeError(f"{self.host} said {line!r} instead of {word!r}{self._said()}")
        return line.strip().removeprefix(word).strip()

    def check(self) -> None:
        """Raises RuntimeError when the process has ended."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.host} ended too early{self._said()}")

    def _said(self) -> str:
        code = self.process.poll()
        state = "it runs" if code is None else f"it ended with code {code}"
        tail = self._log.read_text(errors="replace")[-LOG_TAIL:].strip()
        return f"; {state}" + (f", and its log ends:\n{tail}" if tail else "")
