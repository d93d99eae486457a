"""Safetensors files: ours are theirs, theirs are ours, and broken ones are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from echo2.errors import WeightsError
from echo2.weights.store import (
    open_version,
    read_safetensors_folder,
    write_safetensors,
    write_version,
)


def a_file(path: Path, header: Any, content: bytes = b"", *, claimed: int | None = None) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    length = struct.pack("<Q", len(encoded) if claimed is None else claimed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(length + encoded + content)
    return path


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def tensors_of(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: (dtype, shape, bytes(view))
        for name, dtype, shape, view in read_safetensors_folder(folder)
    }


TENSORS = {
    "small": ("U8", (3,), b"abc"),
    "empty": ("F32", (0, 4), b""),
    "half": ("BF16", (2, 2), bytes(range(8))),
    "scalar": ("F64", (), struct.pack("<d", 0.5)),
}


def a_written_folder(tmp_path: Path) -> Path:
    manifest = write_version(
        tmp_path / "versions",
        [(name, *rest) for name, rest in TENSORS.items()],
        metadata={"version": "1.3"},
    )
    version = open_version(tmp_path / "versions", manifest.manifest_digest)
    assert version is not None
    with version:
        write_safetensors(version, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    assert tensors_of(a_written_folder(tmp_path)) == TENSORS


def test_the_reference_library_reads_what_we_write(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    path = a_written_folder(tmp_path) / "model.safetensors"
    read = dict(safetensors.deserialize(path.read_bytes()))
    assert {
        name: (tensor["dtype"], tuple(tensor["shape"]), bytes(tensor["data"]))
        for name, tensor in read.items()
    } == TENSORS
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "version": "1.3"}


def test_we_read_what_the_reference_library_writes(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    np = pytest.importorskip("numpy")
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([True, False])}
    numpy.save_file(arrays, tmp_path / "x.safetensors", metadata={"made": "there"})
    assert tensors_of(tmp_path) == {
        "a": ("F32", (2, 3), arrays["a"].tobytes()),
        "b": ("BOOL", (2,), b"\x01\x00"),
    }


def test_every_tensor_is_aligned_in_the_file(tmp_path: Path) -> None:
    content = (a_written_folder(tmp_path) / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert [header[name]["data_offsets"][0] for name in ("scalar", "empty", "half", "small")] == [
        0,
        8,
        8,
        16,
    ]


def test_a_folder_of_shards_is_read_by_its_index(tmp_path: Path) -> None:
    a_file(tmp_path / "model-1.safetensors", {"a": entry("U8", [1], 0, 1)}, b"a")
    a_file(tmp_path / "model-2.safetensors", {"b": entry("U8", [1], 0, 1)}, b"b")
    a_file(tmp_path / "other.safetensors", {"a": entry("U8", [1], 0, 1)}, b"x")
    index = {"weight_map": {"b": "model-2.safetensors", "a": "model-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tensors_of(tmp_path) == {"a": ("U8", (1,), b"a"), "b": ("U8", (1,), b"b")}


@pytest.mark.parametrize(
    ("weight_map", "reason"),
    [
        ({"a": "m.safetensors", "lost": "m.safetensors"}, "names 1 tensors .* 'lost'"),
        ({"b": "m.safetensors"}, r"says None"),
        ({"a": "../m.safetensors"}, "only .* in its folder"),
        ({"a": "m.bin"}, "only .* in its folder"),
        ({"a": 1}, "no weight_map"),
        ([], "no weight_map"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, weight_map: Any, reason: str) -> None:
    a_file(tmp_path / "m.safetensors", {"a": entry("U8", [1], 0, 1)}, b"a")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(WeightsError, match=reason):
        tensors_of(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("1", "2"):
        a_file(tmp_path / f"{name}.safetensors", {"a": entry("U8", [1], 0, 1)}, b"a")
    with pytest.raises(WeightsError, match=r"'a' is in .*1\.safetensors and in .*2\.safetensors"):
        tensors_of(tmp_path)


def test_a_folder_without_safetensors_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="save the model with safetensors"):
        tensors_of(tmp_path)


@pytest.mark.parametrize(
    ("header", "content", "reason"),
    [
        (b"[]", b"", "not a JSON object"),
        (b" {}", b"", "not a JSON object"),
        (b"{", b"", "not valid JSON"),
        (b"\xff", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        (b'{"a":{},"a":{}}', b"", "a key is there twice"),
        ({"a": 1}, b"", "must have dtype, shape, data_offsets"),
        ({"a": {**entry("U8", [1], 0, 1), "more": 1}}, b"a", "must have dtype"),
        ({"a": entry("U9", [1], 0, 1)}, b"a", "unknown dtype"),
        ({"a": entry("U8", [2], 0, 1)}, b"a", "has 1 bytes; U8 .* needs 2"),
        ({"a": entry("U8", [1], 1, 0)}, b"a", "data_offsets"),
        ({"a": entry("U8", [1], 0, 2**70)}, b"a", "wrong types"),
        ({"a": entry("U8", [-1], 0, 1)}, b"a", "wrong types"),
        ({"a": entry("U8", [1.0], 0, 1)}, b"a", "wrong types"),  # type: ignore[list-item]
        ({"a": entry("U8", [1], 0, 1)}, b"", "have 1 bytes; the file has 0"),
        ({"a": entry("U8", [1], 0, 1)}, b"ab", "have 1 bytes; the file has 2"),
        ({"a": entry("U8", [1], 1, 2)}, b"ab", "begins at 1; .* ends at 0"),
        (
            {"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)},
            b"abc",
            "'b' begins at 1; .* ends at 2",
        ),
        ({"__metadata__": {"a": 1}}, b"", "does not map text to text"),
        ({"": entry("U8", [1], 0, 1)}, b"a", "0 characters"),
    ],
)
def test_a_file_that_is_not_strictly_valid_is_refused(
    tmp_path: Path, header: Any, content: bytes, reason: str
) -> None:
    a_file(tmp_path / "m.safetensors", header, content)
    with pytest.raises(WeightsError, match=reason):
        tensors_of(tmp_path)


@pytest.mark.parametrize("claimed", [3, 1 << 40, 2**64 - 1])
def test_a_header_that_is_longer_than_the_file_is_refused(tmp_path: Path, claimed: int) -> None:
    a_file(tmp_path / "m.safetensors", b"{}", claimed=claimed)
    with pytest.raises(WeightsError, match=f"its header has {claimed} bytes"):
        tensors_of(tmp_path)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_without_a_header_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="a safetensors file has a header"):
        tensors_of(tmp_path)


def test_an_old_file_stays_when_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    folder = a_written_folder(tmp_path)
    before = (folder / "model.safetensors").read_bytes()
    manifest = write_version(tmp_path / "versions", [("t", "U8", (1,), b"t")])
    version = open_version(tmp_path / "versions", manifest.manifest_digest)
    assert version is not None
    version.close()
    with pytest.raises(WeightsError, match="was closed"):
        write_safetensors(version, folder / "model.safetensors")
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
