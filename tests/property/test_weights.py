"""Weights are exact: whatever tensors, whatever order, whatever arrives damaged."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.core.manifest import DTYPE_BYTES, tensor_bytes
from echo2.errors import WeightsError
from echo2.weights.snapshot import Manifest
from echo2.weights.store import (
    Assembly,
    ChunkStore,
    StoredVersion,
    WrongChunkError,
    open_version,
    read_safetensors_folder,
    write_safetensors,
    write_version,
)

STORE_BYTES_MAX = 1 << 20

names = st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"]), min_size=1).filter(
    lambda name: name != "__metadata__"
)


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    """Up to six tensors of any dtype with up to 1.3 KB each, some of them empty."""
    found = []
    for name in draw(st.lists(names, max_size=6, unique=True)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))
        shape = tuple(draw(st.lists(st.integers(0, 13), max_size=2)))
        content = random.Random(draw(st.integers(0, 99))).randbytes(tensor_bytes(dtype, shape))
        found.append((name, dtype, shape, content))
    return found


chunk_sizes = st.sampled_from([64, 65, 100, 128, 1000, 262144])


def plain(version: StoredVersion) -> list[tuple[str, str, tuple[int, ...], bytes]]:
    return [
        (name, dtype, shape, bytes(view))
        for name, (dtype, shape, view) in version.tensors().items()
    ]


def opened(folder: Path, manifest: Manifest) -> StoredVersion:
    version = open_version(folder, manifest.manifest_digest)
    assert version is not None
    return version


@given(given_tensors=tensors(), chunk_bytes=chunk_sizes)
@settings(deadline=None, max_examples=60)
def test_tensors_round_trip_through_files(
    given_tensors: list[tuple[str, str, tuple[int, ...], bytes]], chunk_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = write_version(folder, given_tensors, chunk_bytes=chunk_bytes)
        assert Manifest.decode(manifest.encode()) == manifest
        with opened(folder, manifest) as version:
            version.verify()
            assert plain(version) == given_tensors
            write_safetensors(version, folder / "out" / "model.safetensors")
        read = {n: (d, s, bytes(v)) for n, d, s, v in read_safetensors_folder(folder / "out")}
        assert read == {n: (d, s, c) for n, d, s, c in given_tensors}


@given(
    given_tensors=tensors(),
    chunk_bytes=chunk_sizes,
    seed=st.integers(0, 2**32),
    damage=st.lists(st.sampled_from(["flip", "cut", "longer", "other", "twice", "reopen"])),
)
@settings(deadline=None, max_examples=60)
def test_a_version_arrives_bit_identical_in_any_order_with_damage(
    given_tensors: list[tuple[str, str, tuple[int, ...], bytes]],
    chunk_bytes: int,
    seed: int,
    damage: list[str],
) -> None:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        published, folder = Path(name) / "versions", Path(name) / "store"
        manifest = write_version(published, given_tensors, chunk_bytes=chunk_bytes)
        with opened(published, manifest) as version:
            chunks = [version.read(index) for index in range(manifest.num_chunks)]
        arrivals: list[tuple[int, str]] = [(index, "good") for index in range(len(chunks))]
        if chunks:
            arrivals += [(rng.randrange(len(chunks)), kind) for kind in damage]
        rng.shuffle(arrivals)
        assembly = ChunkStore(folder, STORE_BYTES_MAX).begin(manifest)
        for index, kind in arrivals:
            if kind == "reopen":  # killed: nothing was closed
                before = assembly.missing()
                assembly = ChunkStore(folder, STORE_BYTES_MAX).begin(manifest)
                assert assembly.missing() == before
                continue
            _arrive(assembly, index, chunks, kind, rng)
        with assembly.finish() as received, opened(published, manifest) as version:
            assert plain(received) == given_tensors
            assert received.path.read_bytes() == version.path.read_bytes()
            assert received.manifest == version.manifest


def _arrive(
    assembly: Assembly, index: int, chunks: list[bytes], kind: str, rng: random.Random
) -> None:
    payload = chunks[index]
    damaged = bytearray(payload)
    if kind == "flip":
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del damaged[-1]
    elif kind == "longer":
        damaged.append(0)
    elif kind == "other":
        damaged = bytearray(chunks[rng.randrange(len(chunks))])
    if damaged == payload:
        new = not assembly.has(index)
        assert assembly.add(index, payload) is new
        assert assembly.read(index) == payload
        return
    had = assembly.num_have
    try:
        assembly.add(index, bytes(damaged))
    except WrongChunkError:
        assert assembly.num_have == had
    else:
        raise AssertionError(f"a {kind} chunk was taken")


def _encoded_manifest() -> bytes:
    with tempfile.TemporaryDirectory() as name:
        return write_version(
            Path(name),
            [("one", "F32", (3, 5), bytes(60)), ("two", "BF16", (), b"ab")],
            metadata={"version": "1.3", "model_type": "qwen2"},
            chunk_bytes=64,
        ).encode()


ENCODED = _encoded_manifest()


@given(
    edits=st.lists(
        st.tuples(
            st.sampled_from(["set", "insert", "delete"]),
            st.integers(0, len(ENCODED) - 1),
            st.integers(0, 255),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=500)
def test_a_mutated_manifest_is_refused_or_is_another_valid_one(
    edits: list[tuple[str, int, int]],
) -> None:
    mutated = bytearray(ENCODED)
    for kind, place, value in edits:
        if kind == "set":
            mutated[place % len(mutated)] = value
        elif kind == "insert":
            mutated.insert(place, value)
        else:
            del mutated[place % len(mutated)]
    try:
        manifest = Manifest.decode(bytes(mutated))
    except WeightsError:
        return
    # A digest or a letter of a name may change: then it is a manifest of another name.
    assert manifest.encode() == bytes(mutated)
    original = Manifest.decode(ENCODED)
    assert (manifest == original) is (bytes(mutated) == ENCODED)
    assert (manifest.manifest_digest == original.manifest_digest) is (manifest == original)


@given(st.binary(max_size=300))
def test_random_bytes_are_no_manifest(content: bytes) -> None:
    try:
        Manifest.decode(content)
    except WeightsError:
        return
    raise AssertionError("decoded")
