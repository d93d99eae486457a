"""Reads the JSON-lines records of a run folder while they are still being written.

Only whole lines count: the last one may be half written, and one that a crash tore is
passed over (`echo2 verify` reports it).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class RecordTail:
    """The lines that are new since the last look."""

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        self._path = path
        self._offset = offset

    def skip(self) -> None:
        """Leave out what is there already."""
        self._offset = size_of(self._path)

    def read(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for raw in file:
                if not raw.endswith(b"\n"):
                    return
                self._offset += len(raw)
                line = _object(raw)
                if line is not None:
                    yield line


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def surviving_lines(metrics: Path) -> list[dict[str, Any]]:
    """One line per step, ordered: a learner that resumed at step t (its incarnation is
    higher) writes t + 1 first, and what older ones wrote from there on is dead."""
    lines: list[dict[str, Any]] = []
    for line in RecordTail(metrics).read():
        if isinstance(line.get("step"), int):
            while lines and lines[-1]["step"] >= line["step"]:
                lines.pop()
            lines.append(line)
    return lines


def read_ends(events: Path, *, since: int) -> tuple[Counter[str], dict[str, Any]]:
    """(how many groups ended how, the run_finished event): of the whole file, and the
    last one after byte `since` ({} if there is none). An end that `group_returned`
    reverted does not count."""
    ends: dict[str, str] = {}
    for event in RecordTail(events).read():
        if event.get("event") == "group_ended":
            ends[str(event.get("group_id"))] = str(event.get("end"))
        elif event.get("event") == "group_returned":
            ends.pop(str(event.get("group_id")), None)
    finished: dict[str, Any] = {}
    for event in RecordTail(events, offset=since).read():
        if event.get("event") == "run_finished":
            finished = event
    return Counter(ends.values()), finished


def _object(raw: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None
