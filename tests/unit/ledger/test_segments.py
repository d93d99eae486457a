"""Payload files: what was synced is read as it was written, what is torn is told."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from echo2.ledger.segments import Segments, TornRecordError


def opened(folder: Path, *, segment_bytes: int = 1000) -> Segments:
    segments = Segments(folder, segment_bytes=segment_bytes)
    segments.open()
    return segments


def test_records_are_read_as_they_were_written_also_by_another_process(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    records = [[b"a", b"", b"c" * n] for n in range(0, 900, 90)]
    places = [segments.append(record) for record in records]
    segments.sync()
    segments.close()
    again = opened(tmp_path)
    assert [again.read(place) for place in places] == records
    assert len(again.numbers()) > 1
    assert all(place.offset < 1000 for place in places)


def test_a_segment_of_an_earlier_process_is_not_written_to(tmp_path: Path) -> None:
    segments = opened(tmp_path)
    before = segments.append([b"before"])
    segments.sync()
    segments.close()
    again = opened(tmp_path)
    after = again.append([b"after"])
    assert after.segment == before.segment + 1
    assert again.read(before) == [b"before"]


def test_a_segment_that_is_not_needed_goes_and_the_one_written_to_stays(tmp_path: Path) -> None:
    segments = opened(tmp_path, segment_bytes=1)
    places = [segments.append([b"x"]) for _ in range(3)]
    for place in places:
        segments.remove(place.segment)
        segments.remove(place.segment)
    assert segments.numbers() == [places[-1].segment]


def test_the_end_of_a_segment_is_on_the_disk_before_a_batch_goes_on_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[int, int] = {}  # inode: bytes that were there when the disk was waited for

    def fdatasync(handle: int) -> None:
        found = os.fstat(handle)
        synced[found.st_ino] = found.st_size

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    segments = opened(tmp_path, segment_bytes=2500)
    places = [segments.append([b"x" * 1000]) for _ in range(10)]
    segments.sync()
    sizes = {path.stat().st_ino: path.stat().st_size for path in tmp_path.iterdir()}
    assert len({place.segment for place in places}) == len(sizes) == 4
    assert synced == sizes


@pytest.mark.parametrize("how", ["cut off", "changed", "removed", "another place"])
def test_a_record_that_is_not_what_was_written_is_one_clear_error(tmp_path: Path, how: str) -> None:
    segments = opened(tmp_path)
    segments.append([b"first"])
    place = segments.append([b"payload"])
    segments.sync()
    path = tmp_path / f"{place.segment:08}.seg"
    content = path.read_bytes()[: place.offset + place.num_bytes]  # without the block's end
    match how:
        case "cut off":
            path.write_bytes(content[:-1])
        case "changed":
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "removed":
            path.unlink()
        case _:
            place = replace(place, offset=place.offset - 1)
    with pytest.raises(TornRecordError, match="does not hold what was written"):
        segments.read(place)
