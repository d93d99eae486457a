"""A version is written whole, named by what it holds, and read in place."""

from __future__ import annotations

import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from echo2.errors import WeightsError
from echo2.weights.store import (
    TornVersionError,
    open_version,
    prune,
    read_assets,
    write_assets,
    write_version,
)
from echo2.weights.versions import NamedTensor

WriteSmall = Callable[..., Any]


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def two_tensors() -> Iterator[NamedTensor]:
    yield "floats", "F32", (2, 2), struct.pack("<4f", 1, 2, 3, 4)
    yield "scalar", "I64", (), struct.pack("<q", -5)
    yield "nothing", "BF16", (0, 3), b""


def test_tensors_come_back_as_they_were_written(tmp_path: Path) -> None:
    manifest = write_version(tmp_path, two_tensors(), metadata={"version": "1.2"}, chunk_bytes=64)
    version = open_version(tmp_path, manifest.manifest_digest)
    assert version is not None
    with version:
        assert version.manifest == manifest
        tensors = version.tensors()
        assert list(tensors) == ["floats", "scalar", "nothing"]
        dtype, shape, view = tensors["floats"]
        assert (dtype, shape) == ("F32", (2, 2))
        assert view.cast("f").tolist() == [1, 2, 3, 4]
        assert view.readonly
        assert tensors["scalar"][2].cast("q")[0] == -5
        assert tensors["nothing"] == ("BF16", (0, 3), memoryview(b""))


def test_digests_are_those_of_the_bytes(tmp_path: Path) -> None:
    manifest = write_version(tmp_path, two_tensors(), chunk_bytes=64)
    content = (tmp_path / f"{manifest.manifest_digest}.bin").read_bytes()
    assert len(content) == manifest.num_bytes == 128
    assert content[16:64] == bytes(48)
    assert manifest.digest == blake3(content).hexdigest()
    assert manifest.chunk_digests == tuple(
        blake3(content[start : start + 64]).digest() for start in (0, 64)
    )


def test_writing_the_same_again_changes_nothing(tmp_path: Path, write_small: WriteSmall) -> None:
    first = write_small(tmp_path)
    before = files_of(tmp_path)
    assert write_small(tmp_path) == first
    assert (
        files_of(tmp_path)
        == before
        == sorted([f"{first.manifest_digest}.bin", f"{first.manifest_digest}.manifest"])
    )


def test_a_version_of_no_bytes_can_be_written_and_read(tmp_path: Path) -> None:
    manifest = write_version(tmp_path, [])
    version = open_version(tmp_path, manifest.manifest_digest)
    assert version is not None
    with version:
        version.verify()
        assert version.tensors() == {}


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (("t", "F32", (3,), b"1234"), "has 4 bytes; F32 .* needs 12"),
        (("t", "F33", (1,), b"1234"), "unknown dtype"),
        (("", "U8", (4,), b"1234"), "0 characters"),
        (("t", "U8", (2,), memoryview(b"1234")[::2]), "not contiguous"),
    ],
)
def test_a_tensor_that_cannot_be_leaves_nothing(
    tmp_path: Path, tensor: NamedTensor, reason: str
) -> None:
    with pytest.raises(WeightsError, match=reason):
        write_version(tmp_path, [tensor])
    assert files_of(tmp_path) == []


def test_an_error_of_the_tensors_passes_and_leaves_nothing(tmp_path: Path) -> None:
    def tensors() -> Iterator[NamedTensor]:
        yield "first", "U8", (1,), b"1"
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        write_version(tmp_path, tensors())
    assert files_of(tmp_path) == []


def test_a_full_disk_is_one_clear_error_and_leaves_what_was_there(
    tmp_path: Path, write_small: WriteSmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_small(tmp_path)
    before = files_of(tmp_path)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WeightsError, match=r"disk of .* is full .* free space") as error:
        write_small(tmp_path, seed=1)
    assert isinstance(error.value.__cause__, OSError)
    assert files_of(tmp_path) == before


def test_a_version_exists_only_with_both_files(tmp_path: Path, write_small: WriteSmall) -> None:
    for suffix in (".bin", ".manifest"):
        name = write_small(tmp_path).manifest_digest
        (tmp_path / (name + suffix)).unlink()
        assert open_version(tmp_path, name) is None


def test_torn_files_are_noticed(tmp_path: Path, write_small: WriteSmall) -> None:
    name = write_small(tmp_path).manifest_digest
    os.truncate(tmp_path / f"{name}.bin", 999)
    with pytest.raises(TornVersionError, match=r"has 999 bytes .* says 1000"):
        open_version(tmp_path, name)
    (tmp_path / f"{name}.manifest").write_bytes(b"something else")
    with pytest.raises(TornVersionError, match="are not manifest"):
        open_version(tmp_path, name)


def test_verify_finds_one_changed_byte(tmp_path: Path, write_small: WriteSmall) -> None:
    manifest = write_small(tmp_path)
    version = open_version(tmp_path, manifest.manifest_digest)
    assert version is not None
    with version:
        version.verify()
        content = bytearray(version.path.read_bytes())
        content[500] ^= 1
        version.path.write_bytes(content)
        with pytest.raises(TornVersionError, match="as a whole"):
            version.verify()


def test_verify_can_be_stopped(tmp_path: Path, write_small: WriteSmall) -> None:
    stop = threading.Event()
    stop.set()
    version = open_version(tmp_path, write_small(tmp_path).manifest_digest)
    assert version is not None
    with version, pytest.raises(WeightsError, match="stopped"):
        version.verify(stop=stop)


def test_a_closed_version_reads_nothing_and_its_views_live_on(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    closed = []
    name = write_small(tmp_path).manifest_digest
    version = open_version(tmp_path, name, on_close=lambda: closed.append(name))
    assert version is not None
    first = version.read(0)
    view = version.tensors()["weight"][2]
    version.close()
    version.close()
    assert closed == [name]
    assert view[:256] == first
    with pytest.raises(WeightsError, match="was closed"):
        version.read(0)
    with pytest.raises(WeightsError, match="was closed"):
        version.tensors()


def test_an_open_version_outlives_its_removal(tmp_path: Path, write_small: WriteSmall) -> None:
    version = open_version(tmp_path, write_small(tmp_path).manifest_digest)
    assert version is not None
    prune(tmp_path, keep=set())
    assert files_of(tmp_path) == []
    with version:
        version.verify()


def test_prune_keeps_what_it_is_told_to_and_what_is_not_ours(
    tmp_path: Path, write_small: WriteSmall
) -> None:
    old, new = (write_small(tmp_path, seed=seed).manifest_digest for seed in (1, 2))
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / ".aside-999999999-0").write_bytes(b"left by a killed writer")
    (tmp_path / f".aside-{os.getpid()}-0").write_bytes(b"being written")
    assert prune(tmp_path, keep={new}) == [old]
    assert files_of(tmp_path) == sorted(
        [f".aside-{os.getpid()}-0", f"{new}.bin", f"{new}.manifest", "notes.txt"]
    )
    assert prune(tmp_path / "missing", keep=set()) == []


def test_assets_are_files_that_come_back(tmp_path: Path) -> None:
    given = {"config.json": b"{}", "tokenizer.json": b"\x00\xff" * 300, "empty": b""}
    for name, content in given.items():
        (tmp_path / f"source of {name}").write_bytes(content)
    manifest = write_assets(
        tmp_path / "versions", {name: tmp_path / f"source of {name}" for name in given}
    )
    assert manifest.kind == "assets"
    version = open_version(tmp_path / "versions", manifest.manifest_digest)
    assert version is not None
    with version:
        paths = read_assets(version, tmp_path / "out")
    assert {path.name: path.read_bytes() for path in paths} == given
    assert files_of(tmp_path / "out") == sorted(given)


def test_weights_are_not_files(tmp_path: Path, write_small: WriteSmall) -> None:
    version = open_version(tmp_path, write_small(tmp_path).manifest_digest)
    assert version is not None
    with version, pytest.raises(WeightsError, match="only assets are files"):
        read_assets(version, tmp_path / "out")


def test_an_asset_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"missing\.json"):
        write_assets(tmp_path / "versions", {"config.json": tmp_path / "missing.json"})
