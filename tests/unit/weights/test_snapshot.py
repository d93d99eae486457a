"""A manifest is valid or it does not exist, and the error says why."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from echo2 import wire
from echo2.core.manifest import TensorSpec, aligned, chunk_range, num_chunks, padding_ranges
from echo2.errors import WeightsError
from echo2.weights.snapshot import Manifest, hex_digest


def a_manifest(**changes: Any) -> Manifest:
    """Two tensors with 44 zero bytes between them, in chunks of 64."""
    fields: dict[str, Any] = {
        "kind": "weights",
        "tensors": (
            TensorSpec("first", "F32", (5,), 0, 20),
            TensorSpec("second", "BF16", (3, 2), 64, 12),
        ),
        "chunk_bytes": 64,
        "chunk_digests": (b"a" * 32, b"b" * 32),
        "num_bytes": 76,
        "digest": "0" * 64,
        "metadata": {"version": "1.3"},
    }
    return Manifest(**{**fields, **changes})


def one_tensor(**changes: Any) -> Manifest:
    spec = dataclasses.replace(TensorSpec("t", "U8", (10,), 0, 10), **changes)
    return a_manifest(tensors=(spec,), num_bytes=10, chunk_digests=(b"a" * 32,))


def test_what_was_encoded_is_decoded_and_named_by_its_bytes() -> None:
    manifest = a_manifest()
    decoded = Manifest.decode(manifest.encode())
    assert decoded == manifest
    assert decoded.manifest_digest == manifest.manifest_digest == hex_digest(manifest.encode())


def test_the_order_of_metadata_does_not_change_the_name() -> None:
    one = a_manifest(metadata={"a": "1", "b": "2"})
    other = a_manifest(metadata={"b": "2", "a": "1"})
    assert one.manifest_digest == other.manifest_digest


def test_metadata_changes_the_name_of_the_version_and_not_the_digest_of_its_bytes() -> None:
    one, other = a_manifest(metadata={"step": "1"}), a_manifest(metadata={"step": "2"})
    assert one.digest == other.digest
    assert one.manifest_digest != other.manifest_digest


def test_a_version_without_bytes_is_a_version() -> None:
    empty = a_manifest(tensors=(), num_bytes=0, chunk_digests=())
    assert empty.num_chunks == 0
    assert Manifest.decode(empty.encode()) == empty


def test_chunk_ranges_cover_the_bytes_and_no_others() -> None:
    manifest = a_manifest()
    assert [manifest.chunk_range(index) for index in range(2)] == [(0, 64), (64, 76)]
    for index in (-1, 2):
        with pytest.raises(WeightsError, match=f"no chunk {index}"):
            manifest.chunk_range(index)


def test_the_arithmetic_of_the_layout() -> None:
    assert [aligned(offset) for offset in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert [num_chunks(size, 10) for size in (0, 1, 10, 11)] == [0, 1, 1, 2]
    assert chunk_range(1, num_bytes=15, chunk_bytes=10) == (10, 15)
    assert padding_ranges(a_manifest().tensors) == [(20, 64)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kind": "patch"}, "kind 'patch' is unknown"),
        ({"num_bytes": 77}, "num_bytes is 77; the tensors end at 76"),
        ({"num_bytes": -1}, "num_bytes is -1"),
        ({"num_bytes": 1 << 60}, "num_bytes is"),
        ({"num_bytes": 76.0}, "must be integers"),
        ({"chunk_bytes": True}, "must be integers"),
        ({"chunk_bytes": 63}, "chunk_bytes is 63"),
        ({"chunk_bytes": (256 << 10) + 1}, "chunk_bytes is 262145"),
        ({"chunk_digests": (b"a" * 32,)}, "76 bytes need 2"),
        ({"chunk_digests": (b"a" * 32,) * 3}, "3 chunk digests"),
        ({"chunk_digests": (b"a" * 32, b"b" * 31)}, "a chunk digest does not have 32 bytes"),
        ({"chunk_digests": (b"a" * 32, "b" * 32)}, "not bytes"),
        ({"digest": "0" * 63}, "64 hexadecimal digits"),
        ({"digest": "A" * 64}, "64 hexadecimal digits"),
        ({"digest": b"0" * 64}, "must be text"),
        ({"metadata": {"key": 1}}, "text to text"),
        ({"metadata": {"key": "\ud800"}}, "not Unicode"),
        ({"metadata": {"k" * 257: ""}}, "too long"),
        ({"metadata": {"k": "v" * 65537}}, "too long"),
        ({"metadata": {str(n): "" for n in range(257)}}, "257 entries"),
    ],
)
def test_a_manifest_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(WeightsError, match=reason):
        a_manifest(**changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"name": ""}, "0 characters"),
        ({"name": "n" * 513}, "513 characters"),
        ({"name": "a\0b"}, "do not print"),
        ({"name": "__metadata__"}, "reserved"),
        ({"name": 1}, "must be text"),
        ({"dtype": "F31"}, "unknown dtype 'F31'"),
        ({"shape": (5, 3)}, "has 10 bytes; U8 .* needs 15"),
        ({"shape": (-10, -1)}, "out of bounds"),
        ({"shape": (1 << 50, 0)}, "out of bounds"),
        ({"shape": (10.0,)}, "must be integers"),
        ({"shape": (True, 10)}, "must be integers"),
        ({"shape": (1,) * 17}, "17 dimensions"),
        ({"num_bytes": 9}, "has 9 bytes"),
        ({"offset": 64}, "begins at 64; the one before it ends at 0"),
        ({"offset": -64}, "begins at -64"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(WeightsError, match=reason):
        one_tensor(**changes)


def test_tensors_neither_overlap_nor_leave_gaps_nor_share_a_name() -> None:
    first = TensorSpec("first", "U8", (20,), 0, 20)
    for offset in (16, 20, 128):
        second = TensorSpec("second", "U8", (12,), offset, 12)
        with pytest.raises(WeightsError, match="must begin at 64"):
            a_manifest(tensors=(first, second), num_bytes=offset + 12)
    with pytest.raises(WeightsError, match="listed twice"):
        a_manifest(tensors=(first, TensorSpec("first", "U8", (12,), 64, 12)))


@pytest.mark.parametrize(
    "name", ["../up", "a/b", "a\\b", "..", ".hidden", "a\0", "n" * 241, "é" * 121]
)
def test_an_asset_is_a_plain_file_name(name: str) -> None:
    spec = TensorSpec(name, "U8", (10,), 0, 10)
    with pytest.raises(WeightsError, match=r"file name|do not print|240 bytes"):
        a_manifest(kind="assets", tensors=(spec,), num_bytes=10, chunk_digests=(b"a" * 32,))


def test_an_asset_is_bytes() -> None:
    spec = TensorSpec("tokenizer.json", "U8", (5, 2), 0, 10)
    with pytest.raises(WeightsError, match="U8 with one dimension"):
        a_manifest(kind="assets", tensors=(spec,), num_bytes=10, chunk_digests=(b"a" * 32,))


def test_another_encoding_of_the_same_manifest_is_refused() -> None:
    encoded = a_manifest().encode()
    plain = wire.unpack(encoded, max_bytes=len(encoded))
    moved = {key: plain[key] for key in reversed(plain)}
    for other in (wire.pack(moved), wire.pack({**plain, "more": 1}), encoded + b"\0"):
        with pytest.raises(WeightsError, match="not a manifest"):
            Manifest.decode(other)
    longer_integer = encoded.replace(b"\xabchunk_bytes\x40", b"\xabchunk_bytes\xcd\x00\x40")
    assert longer_integer != encoded
    with pytest.raises(WeightsError, match="canonical form"):
        Manifest.decode(longer_integer)


def test_a_later_format_says_so() -> None:
    encoded = a_manifest().encode()
    plain = wire.unpack(encoded, max_bytes=len(encoded))
    with pytest.raises(WeightsError, match="format 2 is unknown; this echo2 reads 1"):
        Manifest.decode(wire.pack({**plain, "format": 2}))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensors", {}),
        ("tensors", [1]),
        ("tensors", [["a", "U8", 1, 0, 1]]),
        ("tensors", [["a", "U8", [1], 0]]),
        ("chunk_digests", []),
        ("chunk_digests", b"a" * 33),
        ("metadata", []),
        ("metadata", {b"a": "b"}),
        ("kind", []),
        ("digest", None),
    ],
)
def test_fields_of_wrong_types_are_refused(field: str, value: Any) -> None:
    encoded = a_manifest().encode()
    plain = wire.unpack(encoded, max_bytes=len(encoded))
    with pytest.raises(WeightsError, match="not a manifest"):
        Manifest.decode(wire.pack({**plain, field: value}))
