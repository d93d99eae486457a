"""Deltas are lossless, and nothing but the target comes of them: whatever the tensors are,
whatever is damaged, whatever a publisher makes up."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.core.manifest import DTYPE_BYTES, tensor_bytes
from echo2.weights.delta import (
    CorruptDeltaError,
    DeltaError,
    WrongResultError,
    apply_delta,
    write_delta,
)
from echo2.weights.delta_codec import decode_block, elements, encode_block
from echo2.weights.delta_streams import BlockError
from echo2.weights.snapshot import Manifest
from echo2.weights.store import ChunkStore, StoredVersion, write_version

STORE_BYTES_MAX = 1 << 24
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]

dtypes = st.sampled_from(sorted(DTYPE_BYTES))
shapes = st.lists(st.integers(0, 40), max_size=2).map(tuple)
densities = st.sampled_from([0.0, 0.001, 0.02, 0.1, 0.3, 1.0])
seeds = st.integers(0, 2**32 - 1)


def random_bytes(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Like weights (few exponents), or any bits at all: NaN with every payload among them."""
    num_bytes = tensor_bytes(dtype, shape)
    if dtype in ("F32", "BF16") and rng.random() < 0.7:
        values = (0.02 * rng.standard_normal(max(1, num_bytes))).astype("<f4").view("<u4")
        bits = values if dtype == "F32" else (values >> 16).astype("<u2")
        return bits.tobytes()[:num_bytes]
    return rng.bytes(num_bytes)


def changed(rng: np.random.Generator, dtype: str, content: bytes, density: float) -> bytes:
    """Some elements a few units off, some any bits at all."""
    bits = elements(dtype, memoryview(content)).copy()
    chosen = np.flatnonzero(rng.random(bits.size) < density)
    steps = rng.integers(-3, 4, chosen.size).astype(f"<i{bits.itemsize}").view(bits.dtype)
    if rng.random() < 0.3:
        steps = np.frombuffer(rng.bytes(steps.nbytes), bits.dtype)
    bits[chosen] += steps
    return bits.tobytes()


@st.composite
def versions(draw: st.DrawFn) -> tuple[Tensors, Tensors]:
    """Two versions: tensors changed a little, replaced, reshaped, gone and new."""
    rng = np.random.default_rng(draw(seeds))
    old: Tensors = {}
    new: Tensors = {}
    for name in draw(st.lists(st.sampled_from("abcdefg"), max_size=5, unique=True)):
        dtype, shape = draw(dtypes), draw(shapes)
        content = random_bytes(rng, dtype, shape)
        fate = draw(st.sampled_from(["changed", "changed", "changed", "other", "gone", "new"]))
        if fate != "new":
            old[name] = (dtype, shape, content)
        if fate == "changed":
            new[name] = (dtype, shape, changed(rng, dtype, content, draw(densities)))
        elif fate == "other":
            dtype, shape = draw(dtypes), draw(shapes)
            new[name] = (dtype, shape, random_bytes(rng, dtype, shape))
        elif fate == "new":
            new[name] = (dtype, shape, content)
    return old, new


def write(folder: Path, tensors: Tensors, *, version: str, chunk_bytes: int = 4096) -> Manifest:
    return write_version(
        folder,
        [(name, *rest) for name, rest in tensors.items()],
        metadata={"version": version},
        chunk_bytes=chunk_bytes,
    )


def opened(store: ChunkStore, manifest: Manifest) -> StoredVersion:
    version = store.open(manifest.manifest_digest, verify=True)
    assert version is not None
    return version


def plain(version: StoredVersion) -> Tensors:
    return {name: (d, s, bytes(view)) for name, (d, s, view) in version.tensors().items()}


def delta_in(store: ChunkStore, base: Manifest, target: Manifest) -> Manifest:
    """Writes the delta; the target is not in the store any more."""
    with opened(store, base) as old, opened(store, target) as new:
        delta = write_delta(store.folder, old, new, share_max=1e9)
    assert delta is not None or not target.num_bytes
    if delta is None:
        delta = target
    else:
        store.remove(target.manifest_digest)
    return delta


@given(pair=versions(), chunk_bytes=st.sampled_from([64, 100, 4096]), threads=st.integers(1, 2))
@settings(deadline=None, max_examples=60)
def test_any_two_versions_give_a_delta_that_gives_the_second(
    pair: tuple[Tensors, Tensors], chunk_bytes: int, threads: int
) -> None:
    with tempfile.TemporaryDirectory() as name:
        store = ChunkStore(Path(name), STORE_BYTES_MAX)
        base = write(store.folder, pair[0], version="1.0")
        target = write(store.folder, pair[1], version="1.1", chunk_bytes=chunk_bytes)
        delta = delta_in(store, base, target)
        if delta is target:  # without any bytes nothing is smaller
            return
        with opened(store, delta) as encoded, opened(store, base) as old:
            with apply_delta(store, encoded, old, threads=threads) as made:
                made.verify()
                assert plain(made) == pair[1]
                assert made.manifest == target
            old.verify()


@given(
    dtype=dtypes,
    num=st.integers(1, 3000),
    density=densities,
    has_base=st.booleans(),
    seed=seeds,
)
@settings(deadline=None, max_examples=150)
def test_blocks_are_lossless_and_never_larger_than_raw(
    dtype: str, num: int, density: float, has_base: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    old = memoryview(random_bytes(rng, dtype, (num,)))
    new = memoryview(changed(rng, dtype, bytes(old), density))
    block = encode_block(dtype, new, old if has_base else None)
    assert len(block) <= len(new) + 18
    assert decode_block(dtype, memoryview(block), old if has_base else None, len(new)) == new


@given(
    dtype=st.sampled_from(["BF16", "F16", "F32", "I8", "F64"]),
    density=densities,
    seed=seeds,
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(1, 255)), min_size=1, max_size=4),
    cut=st.integers(0, 9),
)
@settings(deadline=None, max_examples=300)
def test_a_mutated_block_is_refused_or_gives_bytes_of_the_size_that_is_due(
    dtype: str, density: float, seed: int, edits: list[tuple[float, int]], cut: int
) -> None:
    rng = np.random.default_rng(seed)
    old = memoryview(random_bytes(rng, dtype, (256,)))
    block = bytearray(
        encode_block(dtype, memoryview(changed(rng, dtype, bytes(old), density)), old)
    )
    for place, flip in edits:
        block[4 + int(place * (len(block) - 5))] ^= flip  # the length is checked before
    mutated = memoryview(bytes(block[: max(18, len(block) - cut)]))
    try:
        found = decode_block(dtype, mutated, old, len(old))
    except BlockError:
        return
    assert len(found) == len(old)


def small_pair() -> tuple[Tensors, Tensors]:
    rng = np.random.default_rng(0)
    old: Tensors = {
        "a": ("BF16", (600,), random_bytes(rng, "BF16", (600,))),
        "b": ("F32", (7, 3), random_bytes(rng, "F32", (7, 3))),
        "c": ("U8", (3,), b"abc"),
    }
    new: Tensors = {n: (d, s, changed(rng, d, c, 0.2)) for n, (d, s, c) in old.items()}
    return old, new


@given(place=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255), is_manifest=st.booleans())
@settings(deadline=None, max_examples=40)
def test_a_flipped_byte_anywhere_in_a_delta_is_refused(
    place: float, flip: int, is_manifest: bool
) -> None:
    before, after = small_pair()
    with tempfile.TemporaryDirectory() as name:
        store = ChunkStore(Path(name), STORE_BYTES_MAX)
        base = write(store.folder, before, version="1.0")
        target = write(store.folder, after, version="1.1")
        delta = delta_in(store, base, target)
        suffix = ".manifest" if is_manifest else ".bin"
        path = store.folder / (delta.manifest_digest + suffix)
        with opened(store, base) as old:
            damaged = bytearray(path.read_bytes())
            damaged[int(place * len(damaged))] ^= flip
            encoded = opened(store, delta)
            path.write_bytes(damaged)  # in place: it is open and mapped
            if is_manifest:
                encoded.close()
                assert store.open(delta.manifest_digest, verify=True) is None
            else:
                with encoded, pytest.raises(CorruptDeltaError):
                    apply_delta(store, encoded, old)
        assert store.open(target.manifest_digest) is None
        assert not [p for p in store.folder.iterdir() if p.name.startswith(target.manifest_digest)]


def applied(
    store: ChunkStore, delta: StoredVersion, base: StoredVersion
) -> Tensors | type[DeltaError]:
    """What the delta gave, or which error."""
    try:
        with apply_delta(store, delta, base) as made:
            return plain(made)
    except DeltaError as error:
        return type(error)


@given(name=st.sampled_from("abc"), place=st.integers(0, 4000), flip=st.integers(1, 255))
@settings(deadline=None, max_examples=40)
def test_a_made_up_delta_with_right_digests_gives_the_target_or_nothing(
    name: str, place: int, flip: int
) -> None:
    before, after = small_pair()
    with tempfile.TemporaryDirectory() as folder:
        store = ChunkStore(Path(folder), STORE_BYTES_MAX)
        base = write(store.folder, before, version="1.0")
        target = write(store.folder, after, version="1.1")
        delta = delta_in(store, base, target)
        with opened(store, delta) as encoded:
            entries = {n: bytearray(view) for n, (_, _, view) in encoded.tensors().items()}
        entries[name][place % len(entries[name])] ^= flip
        forged = write_version(
            store.folder,
            [(n, "U8", (len(content),), content) for n, content in entries.items()],
            kind="delta",
            metadata=delta.metadata,
        )
        with opened(store, forged) as encoded, opened(store, base) as old:
            outcome = applied(store, encoded, old)
        if outcome == after:  # a byte that means nothing
            return
        assert outcome in (CorruptDeltaError, WrongResultError)
        assert store.open(target.manifest_digest) is None
