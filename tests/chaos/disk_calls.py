"""What a process asked the kernel to do with its files, in order, as strace saw it.

    Recorder(root).run(argv)  ->  Call, Call, ...

One line of strace is one call, or two where another thread came between: then it begins with the
first and ends with the second. A call of a thread that follows from the end of another thread's
call is after it in the list, since one tracer stops both.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACED = (
    "openat,open,creat,close,dup,dup2,dup3,fcntl,write,pwrite64,writev,pwritev,pwritev2,"
    "ftruncate,truncate,fallocate,lseek,fsync,fdatasync,sync_file_range,rename,renameat,renameat2,"
    "unlink,unlinkat,mkdir,mkdirat,rmdir,link,linkat,symlink,symlinkat,mmap,sendfile,"
    "copy_file_range"
)
_BEGUN = re.compile(r"(\w+)\((.*?)(?:, )?(?: <unfinished \.\.\.>)$", re.DOTALL)
_RESUMED = re.compile(r"<\.\.\. (\w+) resumed>(.*)\) += (-?\d+|0x[0-9a-f]+|\?)", re.DOTALL)
_WHOLE = re.compile(r"(\w+)\((.*)\) += (-?\d+|0x[0-9a-f]+|\?)", re.DOTALL)
_ARGUMENT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"(\.\.\.)?|\[[^]]*\]|\{[^}]*\}|[^,\s][^,]*')


def absent() -> str:
    """Why no process can be recorded here; "" if one can."""
    if shutil.which("strace") is None:
        return "there is no program strace"
    argv = ["strace", "-f", "-e", "trace=openat", "-o", "/dev/null", sys.executable, "-c", ""]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    return f"strace cannot trace here: {done.stderr.strip()[:200]}" if done.returncode else ""


@dataclass(slots=True)
class Call:
    """`arguments`: bytes where it is a string. `result` is None at its beginning."""

    name: str
    arguments: tuple[bytes | str, ...]
    result: int | None
    thread: int

    def path(self, place: int) -> str:
        found = self.arguments[place]
        assert isinstance(found, bytes), self
        return found.decode()

    def content(self, place: int) -> bytes:
        found = self.arguments[place]
        assert isinstance(found, bytes), self
        return found

    def number(self, place: int) -> int:
        found = self.arguments[place]
        assert isinstance(found, str), self
        return int(found, 0)

    def words(self, place: int) -> set[str]:
        found = self.arguments[place]
        assert isinstance(found, str), self
        return set(found.split("|"))


def record(argv: Sequence[str], log: Path, *, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, and write what it asked for to `log`."""
    command = ["strace", "-f", "-xx", "-s", str(1 << 24), "-e", f"trace={TRACED}"]
    command += ["-e", "signal=none", "-o", str(log), *argv]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=log.parent
    )


def calls(log: Path) -> Iterator[Call]:
    """Every call twice: at its beginning, without a result, and at its end."""
    begun: dict[int, Call] = {}
    with log.open(encoding="ascii") as lines:
        for line in lines:
            number, _, text = line.strip().partition(" ")
            thread, text = int(number), text.strip()
            if text.startswith("<... "):
                found = _RESUMED.match(text)
                call = begun.pop(thread)
                if found is None:  # "= ?": the process ended inside
                    continue
                assert found[1] == call.name, line
                rest = _arguments(found[2])
                yield Call(call.name, (*call.arguments, *rest), _result(found[3]), thread)
            elif (found := _BEGUN.match(text)) is not None:
                call = Call(found[1], _arguments(found[2]), None, thread)
                begun[thread] = call
                yield call
            elif (found := _WHOLE.match(text)) is not None:
                arguments = _arguments(found[2])
                yield Call(found[1], arguments, None, thread)
                yield Call(found[1], arguments, _result(found[3]), thread)


def _arguments(text: str) -> tuple[bytes | str, ...]:
    found: list[bytes | str] = []
    for match in _ARGUMENT.finditer(text):
        if match[1] is not None:
            assert not match[2], "strace cut a string off"
            found.append(bytes.fromhex(match[1].replace("\\x", "")))
        else:
            found.append(match[0].strip())
    return tuple(found)


def _result(text: str) -> int | None:
    return None if text == "?" else int(text, 0)
