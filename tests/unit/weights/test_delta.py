from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from echo2.errors import WeightsError
from echo2.weights import delta_codec
from echo2.weights.delta import (
    BASE_KEY,
    TARGET_KEY,
    CorruptDeltaError,
    WrongBaseError,
    WrongResultError,
    apply_delta,
    read_target,
    write_delta,
)
from echo2.weights.delta_codec import BLOCK_BYTES
from echo2.weights.snapshot import Manifest
from echo2.weights.store import ChunkStore, StoredVersion, write_version

STORE_BYTES_MAX = 64 << 20
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def weights(*, seed: int = 0, num: int = 3000) -> Tensors:
    """Tensors as a model has them: a large one, a norm, a scalar, an empty one."""
    rng = np.random.default_rng(seed)
    large = (0.02 * rng.standard_normal(num)).astype("<f4")
    return {
        "large": ("F32", (num,), large.tobytes()),
        "half": ("BF16", (num,), (large.view("<u4") >> 16).astype("<u2").tobytes()),
        "norm": ("F32", (7,), np.ones(7, "<f4").tobytes()),
        "scalar": ("I64", (), bytes(8)),
        "none": ("BF16", (0, 5), b""),
    }


def nudged(tensors: Tensors, *, share: float, seed: int = 1) -> Tensors:
    """The same, with `share` of the elements of each tensor one unit up or down."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, (dtype, shape, content) in tensors.items():
        bits = delta_codec.elements(dtype, memoryview(content)).copy()
        chosen = rng.random(bits.size) < share
        bits[chosen] += rng.choice(np.array([1, -1]).astype(bits.dtype), int(chosen.sum()))
        found[name] = (dtype, shape, bits.tobytes())
    return found


class Bench:
    """A publisher's folder and a worker's store."""

    def __init__(self, folder: Path) -> None:
        self.published = folder / "versions"
        self.store = ChunkStore(folder / "store", STORE_BYTES_MAX)

    def write(self, tensors: Tensors, **options: object) -> Manifest:
        named = [(name, *rest) for name, rest in tensors.items()]
        return write_version(self.store.folder, named, chunk_bytes=1024, **options)  # type: ignore[arg-type]

    def open(self, manifest: Manifest) -> StoredVersion:
        version = self.store.open(manifest.manifest_digest, verify=True)
        assert version is not None
        return version

    def delta(self, base: Manifest, target: Manifest, *, forget: bool = True) -> Manifest:
        """The delta in the store; the target is not there any more, unless it is to stay."""
        with self.open(base) as old, self.open(target) as new:
            manifest = write_delta(self.store.folder, old, new, share_max=10.0)
        assert manifest is not None
        if forget:
            self.store.remove(target.manifest_digest)
        return manifest

    def apply(self, delta: Manifest, base: Manifest, **options: int) -> StoredVersion:
        with self.open(delta) as encoded, self.open(base) as old:
            return apply_delta(self.store, encoded, old, **options)

    def names(self) -> set[str]:
        return {path.name for path in self.store.folder.iterdir()}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def plain(version: StoredVersion) -> Tensors:
    return {name: (d, s, bytes(view)) for name, (d, s, view) in version.tensors().items()}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
def test_base_and_delta_give_the_target_bit_by_bit(
    bench: Bench, share: float, threads: int
) -> None:
    after = nudged(weights(), share=share)
    base, target = bench.write(weights()), bench.write(after, metadata={"version": "1.2"})
    delta = bench.delta(base, target)
    with bench.apply(delta, base, threads=threads) as made:
        made.verify()
        assert plain(made) == after
        assert made.manifest == target
        assert made.manifest.metadata == {"version": "1.2"}


def test_a_delta_names_its_base_and_target_and_holds_an_entry_for_each_tensor(
    bench: Bench,
) -> None:
    base, target = bench.write(weights()), bench.write(nudged(weights(), share=0.1))
    delta = bench.delta(base, target)
    assert delta.kind == "delta"
    assert delta.metadata[BASE_KEY] == base.manifest_digest
    assert delta.metadata[TARGET_KEY] == target.manifest_digest
    assert [spec.name for spec in delta.tensors] == ["__metadata__", *weights()]
    with bench.open(delta) as version:
        assert read_target(version) == target


def test_the_same_versions_give_the_same_delta_on_any_number_of_threads(bench: Bench) -> None:
    base, target = bench.write(weights()), bench.write(nudged(weights(), share=0.1))
    with bench.open(base) as old, bench.open(target) as new:
        made = {
            write_delta(bench.published, old, new, share_max=2.0, threads=threads)
            for threads in (1, 2, 4)
        }
    assert len(made) == 1


def test_tensors_may_come_go_and_change_their_layout(bench: Bench) -> None:
    before, after = weights(), nudged(weights(), share=0.1)
    del after["norm"]
    dtype, _, content = after["half"]
    after["half"] = (dtype, (3, 1000), content)
    after["large"] = ("I32", (3000,), after["large"][2])
    after["new"] = ("U8", (900,), random.Random(3).randbytes(900))
    base, target = bench.write(before), bench.write(after)
    with bench.apply(bench.delta(base, target), base) as made:
        assert plain(made) == after


def test_a_tensor_of_several_blocks_is_coded_block_by_block(bench: Bench) -> None:
    num = BLOCK_BYTES // 2 + 7
    before = {"w": ("BF16", (num,), bytes(2 * num))}
    content = bytearray(2 * num)
    content[-1] = content[5] = 255
    after = {"w": ("BF16", (num,), bytes(content))}
    base, target = bench.write(before), bench.write(after)
    delta = bench.delta(base, target)
    assert delta.tensors[1].num_bytes < 200
    with bench.apply(delta, base) as made:
        assert plain(made) == after


@pytest.mark.parametrize("threads", [1, 2])
def test_blocks_decoded_ahead_do_not_overwrite_each_other(bench: Bench, threads: int) -> None:
    before: Tensors = {f"t{n}": ("U8", (500,), bytes([n]) * 500) for n in range(60)}
    after: Tensors = {f"t{n}": ("U8", (500,), bytes([n + 1]) * 499 + b"x") for n in range(60)}
    base, target = bench.write(before), bench.write(after)
    with bench.apply(bench.delta(base, target), base, threads=threads) as made:
        assert plain(made) == after


def test_a_delta_that_saves_too_little_is_not_written(bench: Bench) -> None:
    base, target = bench.write(weights(seed=1)), bench.write(weights(seed=2))
    before = bench.names()
    with bench.open(base) as old, bench.open(target) as new:
        assert write_delta(bench.store.folder, old, new, share_max=0.5) is None
        assert bench.names() == before
        assert write_delta(bench.store.folder, old, new, share_max=1.5) is not None


def test_only_weights_and_adapters_have_deltas(bench: Bench) -> None:
    text: Tensors = {"a.txt": ("U8", (2,), b"ab")}
    base, target = bench.write(text, kind="assets"), bench.write(weights())
    with (
        bench.open(base) as old,
        bench.open(target) as new,
        pytest.raises(WeightsError, match="kind assets"),
    ):
        write_delta(bench.published, new, old)


def test_another_base_is_refused(bench: Bench) -> None:
    base, target = bench.write(weights()), bench.write(nudged(weights(), share=0.1))
    other = bench.write(nudged(weights(), share=0.1, seed=9))
    delta = bench.delta(base, target)
    before = bench.names()
    with pytest.raises(WrongBaseError, match="is against version"):
        bench.apply(delta, other)
    assert bench.names() == before


def test_a_damaged_base_is_named_and_nothing_comes_of_it(bench: Bench) -> None:
    base, target = bench.write(weights()), bench.write(nudged(weights(), share=0.1))
    delta = bench.delta(base, target)
    with bench.open(base) as old, bench.open(delta) as encoded:
        damaged = bytearray(old.path.read_bytes())
        damaged[100] ^= 4
        old.path.write_bytes(damaged)  # in place: what is mapped changes too
        with pytest.raises(WrongBaseError, match="led to other bytes"):
            apply_delta(bench.store, encoded, old)
    assert bench.store.open(target.manifest_digest) is None


def test_a_version_that_is_no_delta_is_refused(bench: Bench) -> None:
    base, target = bench.write(weights()), bench.write(nudged(weights(), share=0.1))
    with pytest.raises(CorruptDeltaError, match="kind weights"):
        bench.apply(target, base)


Forge = Callable[[dict[str, bytes]], None]


def forged(bench: Bench, made: Manifest, change: Forge, **metadata: str) -> Manifest:
    """The delta with its entries changed, as a publisher might write it: its digests are right."""
    with bench.open(made) as version:
        entries = {name: bytes(view) for name, (_, _, view) in version.tensors().items()}
    change(entries)
    return write_version(
        bench.store.folder,
        [(name, "U8", (len(content),), content) for name, content in entries.items()],
        kind="delta",
        metadata={**made.metadata, **metadata},
    )


def test_a_wrong_delta_with_right_digests_is_found_by_the_targets_digests(bench: Bench) -> None:
    base, target = bench.write(weights()), bench.write(nudged(weights(), share=0.1))
    wrong = forged(bench, bench.delta(base, target), lambda e: e.update(large=b"\0"))
    with pytest.raises(WrongResultError, match="made it wrong"):
        bench.apply(wrong, base)
    assert bench.store.open(target.manifest_digest) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda e: e.update(large=b""), "begins with -1"),
        (lambda e: e.update(large=b"\7"), "begins with 7"),
        (lambda e: e.update(large=b"\1"), "the head of a block"),
        (lambda e: e.update(large=e["large"] + b"x"), "too many"),
        (lambda e: e.update(large=e["large"][:-1]), "are left"),
        (lambda e: e.update(large=b"\2" + e["large"][1:]), "needs a base"),
        (lambda e: e.update(__metadata__=b"short"), "header has 5 bytes"),
        (lambda e: e.update(__metadata__=b"\xff" * 99), "at most"),
        (lambda e: e.update(__metadata__=bytes(8) + b"frame"), "zstd"),
        (lambda e: e.pop("norm"), "entries are not those"),
    ],
)
def test_a_delta_that_nobody_wrote_is_refused_with_the_reason(
    bench: Bench, change: Forge, text: str
) -> None:
    base, target = bench.write(weights()), bench.write(nudged(weights(), share=0.1))
    wrong = forged(bench, bench.delta(base, target), change)
    with pytest.raises(CorruptDeltaError, match=text):
        bench.apply(wrong, base)
    assert bench.store.open(target.manifest_digest) is None


def test_a_delta_of_another_format_or_target_is_refused(bench: Bench) -> None:
    base, target = bench.write(weights()), bench.write(nudged(weights(), share=0.1))
    delta = bench.delta(base, target)
    for key, value, text in (("delta", "2", "format '2'"), ("target", "0" * 64, "not manifest")):
        with pytest.raises(CorruptDeltaError, match=text):
            bench.apply(forged(bench, delta, lambda e: None, **{key: value}), base)


def test_right_chunks_of_a_failed_delta_serve_the_fetch_in_full(bench: Bench) -> None:
    after = nudged(weights(), share=0.1)
    base, target = bench.write(weights()), bench.write(after)
    with bench.open(target) as whole:
        chunks = [whole.read(index) for index in range(target.num_chunks)]
    wrong = forged(bench, bench.delta(base, target), lambda e: e.update(half=b"\0"))
    with pytest.raises(WrongResultError):
        bench.apply(wrong, base)
    fetch = bench.store.begin(target)
    assert 0 < fetch.num_have < target.num_chunks
    for index in fetch.missing():
        fetch.add(index, chunks[index])
    with fetch.finish() as made:
        assert plain(made) == after


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, target = bench.write(weights()), bench.write(nudged(weights(), share=0.1))
    delta = bench.delta(base, target)
    before = bench.names()
    calls = []
    pwrite = os.pwrite

    def full(handle: int, content: bytes, start: int) -> int:
        calls.append(start)
        if len(calls) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(handle, content, start)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(WeightsError, match="is full"):
            bench.apply(delta, base)
    assert bench.names() == before
    bench.apply(delta, base).close()


def test_a_store_without_room_says_so(bench: Bench) -> None:
    base, target = bench.write(weights()), bench.write(nudged(weights(), share=0.1))
    delta = bench.delta(base, target)
    small = ChunkStore(bench.store.folder, bench.store.bytes_used + 10)
    with bench.open(delta) as encoded, bench.open(base) as old:
        kept = small.open(base.manifest_digest), small.open(delta.manifest_digest)
        with pytest.raises(WeightsError, match=r"raise worker\.store_bytes_max"):
            apply_delta(small, encoded, old)
        for version in kept:
            assert version is not None
            version.close()


def test_both_ways_stop_when_nobody_waits(bench: Bench) -> None:
    base, target = bench.write(weights()), bench.write(nudged(weights(), share=0.1))
    delta = bench.delta(base, target, forget=False)
    stop = threading.Event()
    stop.set()
    before = bench.names()
    with bench.open(base) as old, bench.open(target) as new, bench.open(delta) as encoded:
        with pytest.raises(WeightsError, match="stopped"):
            write_delta(bench.published, old, new, stop=stop)
        with pytest.raises(WeightsError, match="stopped"):
            apply_delta(bench.store, encoded, old, stop=stop)
    assert bench.names() == before


def test_a_target_that_is_here_is_not_decoded_again(bench: Bench) -> None:
    base, target = bench.write(weights()), bench.write(nudged(weights(), share=0.1))
    delta = bench.delta(base, target, forget=False)
    with bench.apply(delta, base) as made, bench.open(target) as new:
        assert made.path == new.path
