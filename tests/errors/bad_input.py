"""Cases of bad input: each makes its own, and gives back what the user is told.

A case is registered under the words of its row in docs/errors.md, and returns `Told`: by whom,
and the text. What differs from run to run (paths, ports, keys) is replaced by capitals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from echo2 import cli

DEADLINE_S = 120.0


@dataclass(frozen=True)
class Told:
    """`by`: "exit 2" of a command, or what carries the text."""

    by: str
    text: str


Case = Callable[["Bench"], Told]
CASES: dict[str, Case] = {}


def case(words: str) -> Callable[[Case], Case]:
    def register(made: Case) -> Case:
        assert words not in CASES, f"two cases are called {words!r}"
        CASES[words] = made
        return made

    return register


class Bench:
    """A folder to make bad input in, and the command line to try it on."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.config_path = folder / "run.toml"
        self.monkeypatch = monkeypatch
        self._capsys = capsys
        self._hidden = {
            str(self.config_path): "CONFIG",
            str(self.run_dir): "RUN",
            str(folder): "DIR",
        }

    def hide(self, text: object, name: str) -> None:
        """`text` differs from run to run; the page says `name`."""
        self._hidden[str(text)] = name

    def config(self, *lines: str) -> Path:
        """A configuration without sockets and engines to wait for, and `lines` more."""
        self.config_path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return self.config_path

    def command(self, *arguments: object) -> Told:
        """The last words of a command of echo2 that failed, run in this process."""
        code, out, err = self._run(*arguments)
        assert "Traceback" not in err, err
        found = list(re.finditer(r"^echo2: ", err, re.MULTILINE))
        assert found, f"echo2 {arguments} said nothing (code {code}):\n{out}\n{err}"
        return Told(f"exit {code}", self.plain(err[found[-1].end() :]))

    def output(self, line_with: str, *arguments: object) -> Told:
        """The line of a command's output that holds `line_with`."""
        code, out, err = self._run(*arguments)
        assert "Traceback" not in err, err
        found = [line.strip() for line in out.splitlines() if line_with in line]
        assert found, f"echo2 {arguments} (code {code}):\n{out}\n{err}"
        return Told(f"exit {code}", self.plain(found[0]))

    def _run(self, *arguments: object) -> tuple[int, str, str]:
        self.monkeypatch.setattr(sys, "argv", ["echo2", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = self._capsys.readouterr()
        return code, captured.out, captured.err

    def told(self, by: str, text: object) -> Told:
        return Told(by, self.plain(str(text)))

    def raised(self, by: str, error: type[Exception], call: Callable[[], object]) -> Told:
        """The text of the error that `call` raises."""
        with pytest.raises(error) as caught:
            call()
        return self.told(by, caught.value)

    def plain(self, text: str) -> str:
        for hidden in sorted(self._hidden, key=len, reverse=True):
            text = text.replace(hidden, self._hidden[hidden])
        text = re.sub(r"127\.0\.0\.1:(?!5700)\d+", "127.0.0.1:PORT", text)  # not an example's
        text = re.sub(r"\b(pid|process) \d+", r"\1 PID", text)
        text = re.sub(r"\bheard \d+\.\d s ago", "heard N s ago", text)
        return text.strip()


def run(coroutine: Coroutine[Any, Any, Told]) -> Told:
    async def within_deadline() -> Told:
        async with asyncio.timeout(DEADLINE_S):
            return await coroutine

    return asyncio.run(within_deadline())


@contextlib.contextmanager
def a_taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield int(listener.getsockname()[1])


def a_free_port() -> int:
    """One on which nobody listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def a_place_without_rights(bench: Bench, *, readable: bool = True) -> Iterator[Path]:
    """A folder that this process may not write to, with a run.toml in it, which is empty; root
    takes another user's place meanwhile."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        bench.hide(folder, "DIR")
        bench.hide(folder / "run", "RUN")
        bench.hide(folder / "run.toml", "CONFIG")
        is_root = os.geteuid() == 0
        (folder / "run.toml").touch()
        (folder / "run.toml").chmod(0o444 if readable else 0)
        folder.chmod(0o555)
        if is_root:
            try:
                os.seteuid(65534)
            except OSError:
                pytest.skip("root may not give its rights away here")
        try:
            yield folder
        finally:
            if is_root:
                os.seteuid(0)
            folder.chmod(0o755)
