"""Payloads of acknowledged groups in append-only files, each on the disk before it is named.

    append, append ... -> sync (fdatasync) -> the places may be committed to the index

A segment ends at SEGMENT_BYTES and is removed when nothing in it is needed any more, so that
the disk holds what a surviving checkpoint may need and little else. A record carries its own
digest: what a power cut tore is told from what was written, and a place that was never
committed is never read. After a crash a new segment is begun; none is written to twice.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blake3 import blake3

from echo2.errors import Echo2Error
from echo2.ledger.segment_file import SegmentFile

SEGMENT_BYTES: Final = 64 << 20
FRAMES_MAX: Final = 8
RECORD_MAX_BYTES: Final = 1 << 30
_NAME = re.compile(r"(\d{8})\.seg")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a record lies: `num_bytes` from `offset` of a segment; `digest` is BLAKE3 of them."""

    segment: int
    offset: int
    num_bytes: int
    digest: bytes


class TornRecordError(Echo2Error):
    """A record is not what was written."""


class Segments:
    """Files NNNNNNNN.seg in `folder`. For one thread. OSError as it comes: the caller knows
    what is lost by it."""

    def __init__(self, folder: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._number = -1
        self._file: SegmentFile | None = None

    def open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._number = max(self.numbers(), default=0)

    def numbers(self) -> list[int]:
        """Of the segments on the disk, in order."""
        found = (_NAME.fullmatch(entry.name) for entry in self._folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def append(self, frames: Sequence[bytes]) -> Place:
        """Take a record; it is on the disk after `sync`."""
        file = self._file
        if file is None or file.end >= self._segment_bytes:
            file = self._begin()
        sizes = b"".join(len(frame).to_bytes(4, "little") for frame in frames)
        record = b"".join((bytes([len(frames)]), sizes, *frames))
        # In one piece: each call that takes long lets Python's other threads in.
        place = Place(self._number, file.end, len(record), blake3(record).digest())
        file.put(record)
        return place

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def read(self, place: Place) -> list[bytes]:
        """The frames of a record; TornRecordError if it is not what was written."""
        path = self._path(place.segment)
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                record = file.read(min(place.num_bytes, RECORD_MAX_BYTES))
        except FileNotFoundError:
            record = b""
        if len(record) != place.num_bytes or blake3(record).digest() != place.digest:
            raise TornRecordError(
                f"{path} does not hold what was written at byte {place.offset}: it was changed, "
                "cut off or removed; restore the run's folder from a copy, or begin a new run"
            )
        return _frames(record)

    def remove(self, number: int) -> None:
        """Nothing in it is needed. The one that is written to stays."""
        if self._file is None or number != self._number:
            with contextlib.suppress(FileNotFoundError):
                self._path(number).unlink()

    def close(self) -> None:
        """What was not synced is lost."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self) -> SegmentFile:
        self.sync()  # what it holds of a batch that goes on in the next one
        self.close()
        self._file = SegmentFile(self._path(self._number + 1))
        self._number += 1
        folder = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(folder)  # its name, too, must outlive a power cut
        finally:
            os.close(folder)
        return self._file

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08}.seg"


def _frames(record: bytes) -> list[bytes]:
    count = record[0]
    start = 1 + 4 * count
    frames = []
    for place in range(count):
        size = int.from_bytes(record[1 + 4 * place : 5 + 4 * place], "little")
        frames.append(record[start : start + size])
        start += size
    return frames
