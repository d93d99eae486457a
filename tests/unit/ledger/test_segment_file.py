"""A file that only grows: whole blocks, with the page cache or without."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from echo2.ledger import segment_file
from echo2.ledger.segment_file import BLOCK_BYTES, BUFFER_BYTES, SegmentFile


@pytest.fixture(params=["as the system has it", "no O_DIRECT", "O_DIRECT refused at the opening"])
def system(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no O_DIRECT":
        monkeypatch.setattr(segment_file, "_DIRECT", 0)
    if request.param == "O_DIRECT refused at the opening":
        if not segment_file._DIRECT:
            pytest.skip("this system has no O_DIRECT")
        os_open = os.open

        def refusing(path: Path, flags: int, mode: int) -> int:
            if flags & segment_file._DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return os_open(path, flags, mode)

        monkeypatch.setattr(os, "open", refusing)


@pytest.mark.usefixtures("system")
def test_bytes_lie_where_it_says_and_a_sync_ends_a_block(tmp_path: Path) -> None:
    file = SegmentFile(tmp_path / "file")
    sizes = [1, 3 * BLOCK_BYTES, BLOCK_BYTES - 1, BUFFER_BYTES + 5, 2 * BUFFER_BYTES, 7]
    places = []
    for number, size in enumerate(sizes):
        places.append(file.end)
        file.put(bytes([number + 1]) * size)
        if number % 2:
            file.sync()
            assert file.end % BLOCK_BYTES == 0
    file.close()
    content = (tmp_path / "file").read_bytes()
    assert len(content) == file.end
    for number, (place, size) in enumerate(zip(places, sizes, strict=True)):
        assert content[place : place + size] == bytes([number + 1]) * size
    assert len(content) - content.count(0) == sum(sizes)


@pytest.mark.usefixtures("system")
def test_a_sync_of_nothing_new_adds_nothing(tmp_path: Path) -> None:
    file = SegmentFile(tmp_path / "file")
    file.put(b"once")
    file.sync()
    file.sync()
    file.close()
    assert (tmp_path / "file").stat().st_size == file.end == BLOCK_BYTES


@pytest.mark.usefixtures("system")
def test_a_system_that_takes_a_part_at_a_time_gets_the_rest_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def a_part(handle: int, piece: memoryview, offset: int) -> int:
        return pwrite(handle, piece[:BLOCK_BYTES], offset)

    monkeypatch.setattr(os, "pwrite", a_part)
    content = bytes(range(1, 256)) * 100
    file = SegmentFile(tmp_path / "file")
    file.put(content)
    file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes().rstrip(b"\0") == content


def test_a_disk_with_larger_blocks_is_written_to_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not segment_file._DIRECT:
        pytest.skip("this system has no O_DIRECT")
    pwrite = os.pwrite
    refused = []

    def refusing(handle: int, piece: memoryview, offset: int) -> int:
        if not refused:
            refused.append(offset)
            raise OSError(errno.EINVAL, "Invalid argument")
        return pwrite(handle, piece, offset)

    monkeypatch.setattr(os, "pwrite", refusing)
    file = SegmentFile(tmp_path / "file")
    for _ in range(2):
        file.put(b"all of it")
        file.sync()
    file.close()
    assert (tmp_path / "file").read_bytes().replace(b"\0", b"") == b"all of it" * 2
