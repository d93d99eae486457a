"""events.jsonl: one JSON object for each thing that happened, appended and never changed.

Lines are written before the messages that follow from them are sent, so what a peer was
told is in the file. The ledger forces them to the disk with its own commits, before anything is
acknowledged. A line that a crash tore is cut off at the next start, and all that follows it.
`restore` reads the file of an earlier coordinator of the same run: incarnations, v, how each
group ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, Final

import structlog

from echo2.core.restored import Restored
from echo2.core.task_queue import index_of
from echo2.errors import ConfigError, Echo2Error
from echo2.types import GroupId, Version

log = structlog.get_logger(__name__)
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))


class EventsLog:
    """Appends to `path`; `write` then `flush`. Lines that are flushed together are in the file
    together or not at all, whenever the process is killed. `clock` gives the seconds that stand in
    the lines."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._file: FileIO | None = None
        self._end = 0
        self._lines: list[bytes] = []

    def open(self) -> None:
        """Append to whole lines. ConfigError when it cannot be written."""
        with _writable(self.path):
            self._file = self.path.open("a+b", buffering=0)
        cut_torn_lines(self.path, start=None)
        self._end = self._file.seek(0, 2)

    def write(self, event: str, fields: dict[str, Any]) -> int:
        """Append a line; where in the file it ends."""
        assert self._file is not None, "open it first"
        line = {"time": round(self._clock(), 6), "event": event, **fields}
        encoded = _ENCODER.encode(line).encode() + b"\n"
        self._lines.append(encoded)
        self._end += len(encoded)
        return self._end

    def flush(self) -> None:
        """Echo2Error when the disk does not take it: then no peer may be told."""
        if self._file is not None and self._lines:
            content = memoryview(b"".join(self._lines))
            self._lines.clear()
            with self._disk_errors():
                while content:  # a disk that fills takes a part, and tells at the next attempt
                    content = content[self._file.write(content) :]

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(Echo2Error):  # of a disk that is full, which `flush` told
                self.flush()
            self._file.close()
            self._file = None

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise Echo2Error(
                f"{self.path} cannot be written ({error.strerror}); free space there, then start "
                "the coordinator again: what was told to anyone is in the file"
            ) from error


@contextlib.contextmanager
def _writable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}); free space or give another --run-dir"
        ) from error


def cut_torn_lines(path: Path, *, start: int | None) -> int:
    """Cut off the file at the first line from byte `start` on that is no whole JSON object; with
    None only a last line that does not end. What is left is on the disk. Returns where it ends, 0
    for a file that is not there. ConfigError when it cannot be written."""
    if not path.exists():
        return 0
    with _writable(path), path.open("r+b") as file:
        size = file.seek(0, 2)
        keep = _end_of_last_line(file) if start is None else _end_of_whole_lines(file, start)
        if keep < size:
            log.warning("events_cut_off", file=str(path), at=keep, num_bytes=size - keep)
            file.truncate(keep)
        if size:
            os.fdatasync(file.fileno())
        return keep


def _end_of_whole_lines(file: BinaryIO, start: int) -> int:
    end = min(start, file.seek(0, 2))
    file.seek(end)
    for line in file:
        try:
            whole = line.endswith(b"\n") and isinstance(json.loads(line), dict)
        except ValueError:
            whole = False
        if not whole:
            break
        end += len(line)
    return end


def _end_of_last_line(file: BinaryIO) -> int:
    keep = file.seek(0, 2)
    while keep > 0:
        start = max(0, keep - 65536)
        file.seek(start)
        newline = file.read(keep - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        keep = start
    return 0


def read_events(path: Path, *, start: int = 0) -> Iterator[dict[str, Any]]:
    """The whole lines of an events file, from byte `start` on. ConfigError for one that is
    not JSON."""
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(
                    f"{path} line {number} is not JSON ({error}); move the file away to begin "
                    "anew, or restore it from a copy"
                ) from error


def restore(path: Path) -> Restored | None:
    """What an earlier coordinator recorded, or None when there was none."""
    if not path.exists():
        return None
    ended: dict[int, tuple[str, int]] = {}
    starts: list[tuple[int, int]] = []
    step, highest = 0, -1
    kept: tuple[int, ...] = (0,)
    published: dict[Version, str] = {}
    for line in read_events(path):
        match line.get("event"):
            case "group_ended":
                index = index_of(GroupId(line["group_id"]))
                highest = max(highest, index)
                trained_at = line["trained_at"]
                ended[index] = (line["end"], -1 if trained_at is None else trained_at)
            case "group_returned":
                ended.pop(index_of(GroupId(line["group_id"])), None)
            case "lease_granted" | "lease_revoked" | "lease_failed":
                highest = max(highest, index_of(GroupId(line["group_id"])))
            case "learner_joined":
                starts.append((line["incarnation"], line["resume_step"]))
                step = line["resume_step"]
                if not any(s <= step for s in kept):
                    kept = (step,)
            case "step_completed":
                step = line["step"] + 1
            case "version_published":
                version = Version(line["incarnation"], line["step"])
                published[version] = line["manifest_digest"]
            case "checkpoint_saved":
                kept = tuple(line["kept"])
    if not starts:
        return None
    low = min(kept)
    return Restored(
        incarnation=starts[-1][0],
        step=step,
        told_step=step,
        starts=tuple(starts),
        next_index=highest + 1,
        open_indexes=tuple(i for i in range(highest + 1) if i not in ended),
        trained=tuple(
            (GroupId(f"g{index}"), trained_at)
            for index, (end, trained_at) in sorted(ended.items())
            if end == "trained" and trained_at >= low
        ),
        kept=kept,
        published=tuple(published.items()),
        ends=dict(Counter(end for end, _ in ended.values())),
    )
