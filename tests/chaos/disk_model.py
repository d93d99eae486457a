"""A disk that remembers what was forced to it, and what a power cut may leave of the rest.

    for moment in Disk(root).moments(calls):     after every change, sync and word of the process
        disk.leave(folder, Luck(rng, "torn"))    the files as they may be after a cut at that moment

What is certain of a file is what it held at its last fsync or fdatasync, and of a folder the names
that it held at its last fsync. Each later write may be there in whole, in part (in sectors of 512
or 4096 bytes), or not at all, in any order among writes and files; a file may have grown
without the bytes that made it grow, which are zeros then. Names come and go by themselves: a
file's bytes may be safe and its name lost, with all that lies below it. A rename leaves the
old name or the new one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .disk_calls import Call

Mode = Literal["nothing", "everything", "torn", "rarely", "mostly", "newest", "oldest", "sizes"]
MODES: tuple[Mode, ...] = (
    *("nothing", "everything", "torn", "rarely", "mostly", "newest", "oldest", "sizes"),
)
_NAMING = frozenset(
    {
        *("rename", "renameat", "renameat2", "link", "linkat"),
        *("unlink", "unlinkat", "mkdir", "mkdirat"),
    }
)
_SHARES = {"nothing": 0.0, "everything": 1.0, "torn": 0.5, "rarely": 0.1, "mostly": 0.9}


class Luck:
    """Which of the changes that were not forced to the disk are on it."""

    def __init__(self, rng: random.Random, mode: Mode) -> None:
        self.mode = mode
        self.sector = rng.choice((512, 4096))
        self._rng = rng
        self._border = rng.random()

    def keeps(self, age: float) -> bool:
        """`age`: 0.0 for the first of its file's changes, 1.0 for the last."""
        match self.mode:
            case "newest":
                return age > self._border
            case "oldest":
                return age < self._border
            case "sizes":
                return False
            case mode:
                return self._rng.random() < _SHARES[mode]

    def grows(self) -> bool:
        """Is the file as long as if it had been written?"""
        return self.mode == "sizes" or (self.mode == "torn" and self._rng.random() < 0.25)


@dataclass(frozen=True, slots=True)
class Write:
    offset: int
    content: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    size: int


@dataclass(slots=True)
class File:
    """`now`: what a reader sees; `certain` plus some of `pending` is what a cut leaves."""

    now: bytearray = field(default_factory=bytearray)
    certain: bytearray = field(default_factory=bytearray)
    pending: list[Write | Resize] = field(default_factory=list)
    num_safe: int = 0
    """Changes that were ever taken out of `pending`."""

    def change(self, change: Write | Resize) -> None:
        _apply(self.now, change)
        self.pending.append(change)

    @property
    def num_changes(self) -> int:
        return self.num_safe + len(self.pending)

    def forced(self, num_changes: int) -> None:
        """The first `num_changes` ever made are on the disk."""
        count = max(0, num_changes - self.num_safe)
        for change in self.pending[:count]:
            _apply(self.certain, change)
        del self.pending[:count]
        self.num_safe += count

    def left(self, luck: Luck) -> bytes:
        content = bytearray(self.certain)
        for place, change in enumerate(self.pending):
            age = place / max(1, len(self.pending) - 1)
            for piece in _pieces(change, luck.sector):
                if luck.keeps(age):
                    _apply(content, piece)
                elif isinstance(piece, Write) and luck.grows():
                    _apply(content, Write(piece.offset + len(piece.content), b""))
        return bytes(content)


@dataclass(frozen=True, slots=True)
class Name:
    """A name comes (`node`) or goes (None); `old`: the name that goes with it in one step."""

    name: str
    node: File | Folder | None
    old: str = ""


@dataclass(slots=True)
class Folder:
    now: dict[str, File | Folder] = field(default_factory=dict)
    certain: dict[str, File | Folder] = field(default_factory=dict)
    pending: list[Name] = field(default_factory=list)
    num_safe: int = 0

    def change(self, change: Name) -> None:
        _name(self.now, change)
        self.pending.append(change)

    @property
    def num_changes(self) -> int:
        return self.num_safe + len(self.pending)

    def forced(self, num_changes: int) -> None:
        count = max(0, num_changes - self.num_safe)
        for change in self.pending[:count]:
            _name(self.certain, change)
        del self.pending[:count]
        self.num_safe += count

    def left(self, luck: Luck) -> dict[str, File | Folder]:
        names = dict(self.certain)
        for place, change in enumerate(self.pending):
            if luck.keeps(place / max(1, len(self.pending) - 1)):
                _name(names, change)
        return names


@dataclass(slots=True)
class _Open:
    node: File | Folder
    appends: bool = False
    position: int = 0
    path: str = ""


class Disk:
    """All below `root`, which is there, with its content on the disk, when the process begins."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = _read(root)
        self.said = ""
        """What the process wrote to its standard output until now."""
        self._open: dict[int, _Open] = {}
        self._forcing: dict[int, tuple[File | Folder, int]] = {}

    def moments(self, calls: Iterable[Call]) -> Iterator[Call]:
        """After every call that changed, forced or said something."""
        for call in calls:
            if call.result is None:
                if self._begin(call):
                    yield call
            elif call.result >= 0 and self._end(call, call.result):
                yield call

    def leave(self, target: Path, luck: Luck) -> None:
        """What a cut now may leave, as files below `target`, which is made."""
        _write(self.top, target, luck)

    # ------------------------------------------------------------------ the calls

    def _begin(self, call: Call) -> bool:
        if call.name in ("fsync", "fdatasync"):
            opened = self._open.get(call.number(0))
            if opened is not None:
                self._forcing[call.thread] = opened.node, opened.node.num_changes
        elif call.name == "write" and call.number(0) == 1:
            self.said += call.content(1).decode()  # whoever reads it may count on it from now on
            return True
        return False

    def _end(self, call: Call, result: int) -> bool:
        match call.name:
            case "openat":
                return self._opened(call, result)
            case "close":
                self._open.pop(call.number(0), None)
            case "fsync" | "fdatasync":
                forced = self._forcing.pop(call.thread, None)
                if forced is not None:
                    forced[0].forced(forced[1])
                return forced is not None
            case "lseek":
                if (opened := self._open.get(call.number(0))) is not None:
                    opened.position = result
            case "mmap":
                self._mapped(call)
            case "write" | "pwrite64" | "ftruncate":
                return self._changed(call, result)
            case "fcntl":
                if call.number(0) in self._open and call.arguments[1].startswith("F_DUPFD"):
                    raise NotImplementedError(call)
            case name if name in _NAMING:
                return self._named(call)
            case _ if self._is_ours(call):
                raise NotImplementedError(call)
        return False

    def _opened(self, call: Call, handle: int) -> bool:
        path, flags = call.path(1), call.words(2)
        self._open.pop(handle, None)
        folder, name = self._place(path)
        if folder is None:
            return False
        node = folder.now.get(name) if name else folder
        made = node is None
        if node is None:
            assert "O_CREAT" in flags, call
            node = File()
            folder.change(Name(name, node))
        if isinstance(node, File) and "O_TRUNC" in flags and node.now:
            node.change(Resize(0))
            made = True
        self._open[handle] = _Open(node, appends="O_APPEND" in flags, path=path)
        return made

    def _changed(self, call: Call, result: int) -> bool:
        opened = self._open.get(call.number(0))
        if opened is None:
            return False
        file = opened.node
        assert isinstance(file, File)
        if call.name == "ftruncate":
            file.change(Resize(call.number(1)))
            return True
        if call.name == "pwrite64":
            offset = call.number(3)
        else:
            offset = len(file.now) if opened.appends else opened.position
            opened.position = offset + result
        file.change(Write(offset, call.content(1)[:result]))
        return True

    def _mapped(self, call: Call) -> None:
        if call.arguments[4] == "-1" or "PROT_WRITE" not in call.words(2):
            return
        opened = self._open.get(call.number(4))
        if opened is not None and "MAP_SHARED" in call.words(3):
            # SQLite's index of its log is memory that it makes anew after a crash.
            assert opened.path.endswith("-shm"), call

    def _named(self, call: Call) -> bool:
        at = 0 if call.name in ("rename", "unlink", "mkdir", "link") else 1
        folder, name = self._place(call.path(at))
        if folder is None:
            return False
        if call.name.startswith(("rename", "link")):
            to, new = self._place(call.path(2 * at + 1))
            assert to is folder, call
            old = name if call.name.startswith("rename") else ""
            folder.change(Name(new, folder.now[name], old=old))
        elif call.name.startswith("mkdir"):
            folder.change(Name(name, Folder()))
        else:
            folder.change(Name(name, None))
        return True

    def _place(self, path: str) -> tuple[Folder | None, str]:
        """The folder that holds `path` and its name there; (root, "") for the root itself."""
        whole = Path(os.path.normpath(path))
        if not whole.is_absolute() or not whole.is_relative_to(self.root):
            return None, ""
        folder = self.top
        parts = whole.relative_to(self.root).parts
        for part in parts[:-1]:
            below = folder.now[part]
            assert isinstance(below, Folder), path
            folder = below
        if not parts:
            return folder, ""
        found = folder.now.get(parts[-1])
        return (found, "") if isinstance(found, Folder) else (folder, parts[-1])

    def _is_ours(self, call: Call) -> bool:
        root = str(self.root).encode()
        if any(isinstance(part, bytes) and part.startswith(root) for part in call.arguments):
            return True
        first = call.arguments[0]
        return isinstance(first, str) and first.isdigit() and int(first) in self._open


def _pieces(change: Write | Resize, sector: int) -> Iterator[Write | Resize]:
    if isinstance(change, Resize):
        yield change
        return
    start, end = change.offset, change.offset + len(change.content)
    while start < end:
        stop = min(end, (start // sector + 1) * sector)
        yield Write(start, change.content[start - change.offset : stop - change.offset])
        start = stop


def _apply(content: bytearray, change: Write | Resize) -> None:
    size = change.size if isinstance(change, Resize) else change.offset
    if len(content) < size:
        content.extend(bytes(size - len(content)))
    if isinstance(change, Resize):
        del content[size:]
    else:
        content[size : size + len(change.content)] = change.content


def _name(names: dict[str, File | Folder], change: Name) -> None:
    if change.old:
        names.pop(change.old, None)
    if change.node is None:
        names.pop(change.name, None)
    else:
        names[change.name] = change.node


def _read(folder: Path) -> Folder:
    found = Folder()
    for entry in folder.iterdir():
        if entry.is_dir():
            node: File | Folder = _read(entry)
        else:
            content = entry.read_bytes()
            node = File(now=bytearray(content), certain=bytearray(content))
        found.now[entry.name] = found.certain[entry.name] = node
    return found


def _write(folder: Folder, target: Path, luck: Luck) -> None:
    target.mkdir(mode=0o700)  # keys lie in them
    for name, node in folder.left(luck).items():
        if isinstance(node, Folder):
            _write(node, target / name, luck)
        else:
            (target / name).touch(mode=0o600)
            (target / name).write_bytes(node.left(luck))
