"""The store is bounded, survives its process, and completes nothing that is wrong."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from echo2.core.manifest import TensorSpec
from echo2.errors import WeightsError
from echo2.weights.snapshot import Manifest
from echo2.weights.store import (
    Assembly,
    ChunkStore,
    StoredVersion,
    TornVersionError,
    WrongChunkError,
    open_version,
)

WriteSmall = Callable[..., Manifest]
Chunks = Callable[[Path, Manifest], list[bytes]]
PLENTY = 1 << 30


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return tmp_path / "versions"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def fill(published: Path, chunks_of: Chunks) -> Callable[[Assembly], Assembly]:
    def add_all(assembly: Assembly) -> Assembly:
        for index, payload in enumerate(chunks_of(published, assembly.manifest)):
            assembly.add(index, payload)
        return assembly

    return add_all


@pytest.fixture
def install(
    fill: Callable[[Assembly], Assembly],
) -> Callable[[ChunkStore, Manifest], StoredVersion]:
    return lambda store, manifest: fill(store.begin(manifest)).finish()


def suffixes(folder: Path, manifest: Manifest) -> set[str]:
    return {path.suffix for path in folder.glob(f"{manifest.manifest_digest}.*")}


def test_chunks_in_any_order_become_the_version(
    folder: Path, published: Path, write_small: WriteSmall, chunks_of: Chunks
) -> None:
    manifest = write_small(published)
    chunks = chunks_of(published, manifest)
    store = ChunkStore(folder, PLENTY)
    assembly = store.begin(manifest)
    assert assembly.missing() == [0, 1, 2, 3]
    for index in (3, 1, 0):
        assert not assembly.has(index)
        assert assembly.add(index, chunks[index])
        assert assembly.has(index)
        assert assembly.read(index) == chunks[index]
    assert not assembly.add(1, chunks[1])
    assert assembly.missing() == [2]
    assert assembly.num_have == 3
    assert store.open(manifest.manifest_digest) is None
    assembly.add(2, chunks[2])
    with assembly.finish() as version:
        assert version.path.read_bytes() == b"".join(chunks)
    assert suffixes(folder, manifest) == {".bin", ".manifest"}


def test_a_wrong_chunk_changes_nothing(
    folder: Path, published: Path, write_small: WriteSmall, chunks_of: Chunks
) -> None:
    manifest = write_small(published)
    chunks = chunks_of(published, manifest)
    assembly = ChunkStore(folder, PLENTY).begin(manifest)
    wrong = [
        (0, chunks[1], "does not have the digest"),
        (0, chunks[0][:-1], "has 255 bytes; its manifest says 256"),
        (3, chunks[3] + b"\0", "has 233 bytes; its manifest says 232"),
        (4, b"", "chunk 4 does not exist"),
        (-1, chunks[3], "chunk -1 does not exist"),
    ]
    for index, payload, reason in wrong:
        with pytest.raises(WrongChunkError, match=reason):
            assembly.add(index, payload)
    assert assembly.missing() == [0, 1, 2, 3]
    assert not assembly.has(4)
    with pytest.raises(WeightsError, match="not here yet"):
        assembly.read(0)
    with pytest.raises(WeightsError, match="not complete: 0 of 4"):
        assembly.finish()


def test_the_next_process_goes_on_from_what_was_verified(
    folder: Path, published: Path, write_small: WriteSmall, chunks_of: Chunks
) -> None:
    manifest = write_small(published, num_bytes=20 * 256)
    chunks = chunks_of(published, manifest)
    abandoned = ChunkStore(folder, PLENTY).begin(manifest)  # never closed, as after kill -9
    for index in (0, 7, 8, 19):
        abandoned.add(index, chunks[index])
    store = ChunkStore(folder, PLENTY)
    assert store.manifest(manifest.manifest_digest) == manifest
    assembly = store.begin(manifest)
    assert assembly.num_have == 4
    for index in assembly.missing():
        assert index not in (0, 7, 8, 19)
        assembly.add(index, chunks[index])
    with assembly.finish() as version:
        version.verify()


def test_what_a_crash_tore_is_fetched_again(
    folder: Path, published: Path, write_small: WriteSmall, chunks_of: Chunks
) -> None:
    manifest = write_small(published)
    assembly = ChunkStore(folder, PLENTY).begin(manifest)
    for index, payload in enumerate(chunks_of(published, manifest)):
        assembly.add(index, payload)
    assembly.close()
    with open(folder / f"{manifest.manifest_digest}.partial", "r+b") as file:
        file.seek(300)
        file.write(bytes(20))
    assert ChunkStore(folder, PLENTY).begin(manifest).missing() == [1]


@pytest.mark.parametrize("num_bytes", [0, 500, 5000])
def test_a_partial_file_of_a_wrong_size_is_mended(
    folder: Path, published: Path, write_small: WriteSmall, chunks_of: Chunks, num_bytes: int
) -> None:
    manifest = write_small(published)
    first = ChunkStore(folder, PLENTY).begin(manifest)
    for index, payload in enumerate(chunks_of(published, manifest)):
        first.add(index, payload)
    first.close()
    os.truncate(folder / f"{manifest.manifest_digest}.partial", num_bytes)
    assembly = ChunkStore(folder, PLENTY).begin(manifest)
    assert assembly.missing() == [i for i in range(4) if manifest.chunk_range(i)[1] > num_bytes]
    for index, payload in enumerate(chunks_of(published, manifest)):
        assembly.add(index, payload)
    assembly.finish().close()


def test_resuming_can_be_stopped_and_tried_again(
    folder: Path, published: Path, write_small: WriteSmall, fill: Callable[[Assembly], Assembly]
) -> None:
    manifest = write_small(published)
    store = ChunkStore(folder, PLENTY)
    fill(store.begin(manifest)).close()
    stop = threading.Event()
    stop.set()
    with pytest.raises(WeightsError, match="stopped"):
        store.begin(manifest, stop=stop)
    assert store.begin(manifest).missing() == []


def test_one_assembly_of_a_version_at_a_time(
    folder: Path, published: Path, write_small: WriteSmall
) -> None:
    manifest = write_small(published)
    store = ChunkStore(folder, PLENTY)
    first = store.begin(manifest)
    with pytest.raises(WeightsError, match="being assembled already"):
        store.begin(manifest)
    with pytest.raises(WeightsError, match="in use"):
        store.remove(manifest.manifest_digest)
    first.close()
    second = store.begin(manifest)
    first.close()
    with pytest.raises(WeightsError, match="being assembled already"):
        store.begin(manifest)
    second.discard()
    assert suffixes(folder, manifest) == set()


def test_what_is_complete_is_told_the_last_opened_first(
    folder: Path,
    published: Path,
    write_small: WriteSmall,
    install: Callable[[ChunkStore, Manifest], StoredVersion],
) -> None:
    store = ChunkStore(folder, PLENTY)
    manifests = [write_small(published, seed=seed) for seed in (1, 2, 3)]
    for when, manifest in enumerate(manifests):
        with install(store, manifest) as stored:
            os.utime(stored.path, (when, when))
    store.begin(write_small(published, seed=4)).close()  # it is not complete
    digests = tuple(manifest.manifest_digest for manifest in reversed(manifests))
    assert store.complete(["weights"], most=2) == digests[:2]
    assert store.complete(["weights"], most=8) == digests
    assert store.complete(["adapter"], most=8) == ()


def test_a_complete_version_is_opened_and_not_begun(
    folder: Path,
    published: Path,
    write_small: WriteSmall,
    install: Callable[[ChunkStore, Manifest], StoredVersion],
) -> None:
    manifest = write_small(published)
    store = ChunkStore(folder, PLENTY)
    install(store, manifest).close()
    with pytest.raises(WeightsError, match="is complete: open it"):
        store.begin(manifest)


def test_a_closed_assembly_takes_and_gives_nothing(
    folder: Path, published: Path, write_small: WriteSmall, chunks_of: Chunks
) -> None:
    manifest = write_small(published)
    assembly = ChunkStore(folder, PLENTY).begin(manifest)
    assembly.close()
    payload = chunks_of(published, manifest)[0]
    for use in (lambda: assembly.add(0, payload), lambda: assembly.read(0), assembly.finish):
        with pytest.raises(WeightsError, match="was closed"):
            use()


@pytest.mark.parametrize("order", ["rising", "falling", "far"])
def test_the_whole_is_hashed_while_chunks_come_in_any_order(
    folder: Path, published: Path, write_small: WriteSmall, chunks_of: Chunks, order: str
) -> None:
    manifest = write_small(published, num_bytes=256 * 40)
    payloads = chunks_of(published, manifest)
    indexes = list(range(len(payloads)))
    if order == "falling":
        indexes.reverse()
    if order == "far":
        indexes = [*indexes[20:], *indexes[:20]]
    store = ChunkStore(folder, PLENTY)
    begun = store.begin(manifest)
    for index in indexes[:30]:
        begun.add(index, payloads[index])
    begun.close()
    assembly = store.begin(manifest)  # hashes what is here anew
    for index in indexes[30:]:
        assembly.add(index, payloads[index])
    stop = threading.Event()
    stop.set()
    try:
        stored = assembly.finish(stop=stop)
    except WeightsError:  # something was left to hash
        stored = assembly.finish()
    with stored:
        stored.verify()


def test_a_manifest_whose_whole_is_wrong_is_never_complete(
    folder: Path, published: Path, write_small: WriteSmall, fill: Callable[[Assembly], Assembly]
) -> None:
    manifest = write_small(published)
    lying = dataclasses.replace(manifest, digest="0" * 64)
    assembly = ChunkStore(folder, PLENTY).begin(lying)
    for index in range(4):
        with open_version(published, manifest.manifest_digest) as version:  # type: ignore[union-attr]
            assembly.add(index, version.read(index))
    with pytest.raises(TornVersionError, match="its manifest says 000000000000"):
        assembly.finish()
    assert suffixes(folder, lying) == set()


def test_bytes_between_tensors_must_be_zero(
    folder: Path, published: Path, write_small: WriteSmall, fill: Callable[[Assembly], Assembly]
) -> None:
    manifest = write_small(published)  # one tensor of 1000 random bytes
    specs = (TensorSpec("a", "U8", (10,), 0, 10), TensorSpec("b", "U8", (936,), 64, 936))
    hiding = dataclasses.replace(manifest, tensors=specs)
    assembly = ChunkStore(folder, PLENTY).begin(hiding)
    with open_version(published, manifest.manifest_digest) as version:  # type: ignore[union-attr]
        for index in range(4):
            assembly.add(index, version.read(index))
    with pytest.raises(TornVersionError, match=r"other than zero .* at 10 to 64"):
        assembly.finish()


def test_a_broken_complete_version_is_removed_when_it_is_opened_with_care(
    folder: Path,
    published: Path,
    write_small: WriteSmall,
    install: Callable[[ChunkStore, Manifest], StoredVersion],
) -> None:
    manifest = write_small(published)
    install(ChunkStore(folder, PLENTY), manifest).close()
    path = folder / f"{manifest.manifest_digest}.bin"
    path.write_bytes(bytes(1000))
    store = ChunkStore(folder, PLENTY)
    assert store.open(manifest.manifest_digest, verify=True) is None
    assert suffixes(folder, manifest) == set()
    install(store, manifest).close()
    with store.open(manifest.manifest_digest, verify=True) as version:  # type: ignore[union-attr]
        version.verify()


def test_a_stopped_verification_removes_nothing(
    folder: Path,
    published: Path,
    write_small: WriteSmall,
    install: Callable[[ChunkStore, Manifest], StoredVersion],
) -> None:
    manifest = write_small(published)
    install(ChunkStore(folder, PLENTY), manifest).close()
    store = ChunkStore(folder, PLENTY)
    stop = threading.Event()
    stop.set()
    with pytest.raises(WeightsError, match="stopped"):
        store.open(manifest.manifest_digest, verify=True, stop=stop)
    store.open(manifest.manifest_digest, verify=True).close()  # type: ignore[union-attr]


def test_the_version_that_was_not_opened_for_longest_makes_room(
    folder: Path,
    published: Path,
    write_small: WriteSmall,
    install: Callable[[ChunkStore, Manifest], StoredVersion],
) -> None:
    store = ChunkStore(folder, 3000)
    first, second, third, fourth = (write_small(published, seed=seed) for seed in range(4))
    for place, manifest in enumerate((first, second, third)):
        version = install(store, manifest)
        version.close()
        os.utime(version.path, ns=(place, place))
    store.open(first.manifest_digest).close()  # type: ignore[union-attr]
    assert store.bytes_used == 3000
    install(store, fourth).close()
    assert suffixes(folder, second) == set()
    assert [suffixes(folder, m) for m in (first, third, fourth)] == [{".bin", ".manifest"}] * 3


def test_partial_versions_that_nobody_works_on_go_first(
    folder: Path,
    published: Path,
    write_small: WriteSmall,
    install: Callable[[ChunkStore, Manifest], StoredVersion],
) -> None:
    store = ChunkStore(folder, 2000)
    complete, superseded, newest = (write_small(published, seed=seed) for seed in range(3))
    install(store, complete).close()
    store.begin(superseded).close()
    store.begin(newest).close()
    assert suffixes(folder, complete) == {".bin", ".manifest"}
    assert suffixes(folder, superseded) == set()


def test_what_is_in_use_is_never_evicted(
    folder: Path,
    published: Path,
    write_small: WriteSmall,
    install: Callable[[ChunkStore, Manifest], StoredVersion],
) -> None:
    store = ChunkStore(folder, 2500)
    opened, begun, third = (write_small(published, seed=seed) for seed in range(3))
    version = install(store, opened)
    assembly = store.begin(begun)
    with pytest.raises(WeightsError, match=r"needs 1000 more .* 2500, and 2000 are in use: raise"):
        store.begin(third)
    with pytest.raises(WeightsError, match="in use"):
        store.remove(opened.manifest_digest)
    version.close()
    store.begin(third).close()
    assembly.close()
    assert suffixes(folder, opened) == set()
    store.remove(begun.manifest_digest)
    assert store.bytes_used == 1000


def test_a_version_larger_than_the_store_is_refused_before_anything_is_written(
    folder: Path, published: Path, write_small: WriteSmall
) -> None:
    with pytest.raises(WeightsError, match=r"raise worker\.store_bytes_max"):
        ChunkStore(folder, 999).begin(write_small(published))
    assert list(folder.iterdir()) == []


def test_a_full_disk_at_the_start_leaves_what_was_there(
    folder: Path, published: Path, write_small: WriteSmall, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = write_small(published)
    store = ChunkStore(folder, PLENTY)

    def full(handle: int, start: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(WeightsError, match=r"reserving 1000 bytes .* is full"):
            store.begin(manifest)
    assert list(folder.iterdir()) == []
    store.begin(manifest).close()


def test_a_full_disk_at_a_chunk_keeps_the_others(
    folder: Path,
    published: Path,
    write_small: WriteSmall,
    chunks_of: Chunks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = write_small(published)
    chunks = chunks_of(published, manifest)

    def cannot(handle: int, start: int, num_bytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    assembly = ChunkStore(folder, PLENTY).begin(manifest)
    assembly.add(0, chunks[0])

    def full(handle: int, content: memoryview, start: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(WeightsError, match=r"storing chunk 1 .* is full"):
            assembly.add(1, chunks[1])
    assert assembly.missing() == [1, 2, 3]
    for index in assembly.missing():
        assembly.add(index, chunks[index])
    assembly.finish().close()


def test_the_bitmap_tells_only_of_what_is_written(
    folder: Path,
    published: Path,
    write_small: WriteSmall,
    chunks_of: Chunks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = write_small(published)
    assembly = ChunkStore(folder, PLENTY).begin(manifest)
    for index, chunk in enumerate(chunks_of(published, manifest)):
        assembly.accept(index, chunk)
    bitmap = folder / f"{manifest.manifest_digest}.have"
    told = [bitmap.read_bytes()]
    write = os.pwrite

    def watched(handle: int, content: memoryview, start: int) -> int:
        num_bytes = write(handle, content, start)
        told.append(bitmap.read_bytes())
        return num_bytes

    monkeypatch.setattr(os, "pwrite", watched)
    assembly.write()
    # Each chunk, and then its bit.
    assert told == [bytes([bits]) for bits in (0, 0, 1, 1, 3, 3, 7, 7, 15)]
    assembly.finish().close()


def test_leftovers_that_are_no_version_are_removed_at_the_start(
    folder: Path, published: Path, write_small: WriteSmall
) -> None:
    manifest = write_small(published)
    name = manifest.manifest_digest
    folder.mkdir()
    (folder / f"{name}.bin").write_bytes(b"without a manifest")
    other = "f" * 64
    (folder / f"{other}.manifest").write_bytes(b"without bytes")
    (folder / f"{other}.have").write_bytes(b"\xff")
    (folder / "notes.txt").write_text("mine")
    store = ChunkStore(folder, PLENTY)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    assert store.manifest(name) is None


def test_a_torn_manifest_counts_as_none(
    folder: Path, published: Path, write_small: WriteSmall
) -> None:
    manifest = write_small(published)
    store = ChunkStore(folder, PLENTY)
    store.begin(manifest).close()
    (folder / f"{manifest.manifest_digest}.manifest").write_bytes(b"torn")
    assert store.manifest(manifest.manifest_digest) is None
    store.begin(manifest).close()
    assert store.manifest(manifest.manifest_digest) == manifest


def test_threads_may_add_while_another_closes(
    folder: Path, published: Path, write_small: WriteSmall, chunks_of: Chunks
) -> None:
    manifest = write_small(published, num_bytes=64 * 256)
    chunks = chunks_of(published, manifest)
    assembly = ChunkStore(folder, PLENTY).begin(manifest)
    refused = []

    def add(indexes: list[int]) -> None:
        for index in indexes:
            try:
                assembly.add(index, chunks[index])
            except WeightsError as error:
                refused.append(str(error))
            if index == 40:
                assembly.close()

    order = list(range(64))
    random.Random(1).shuffle(order)
    threads = [threading.Thread(target=add, args=(order[start::4],)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert all("was closed" in text for text in refused)
    again = ChunkStore(folder, PLENTY).begin(manifest)
    assert again.num_have == 64 - len(refused)
