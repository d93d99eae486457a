"""The byte space of a delta: a header, and an entry for each tensor of the target, in order.

    header   length of the target's encoded manifest (8 bytes, little endian), it in zstd
    entry    how (1 byte): 0 as in the base, 1 a difference, 2 in full; of 1 and 2 blocks

An entry has the name of its tensor, the header one that no tensor may have; the metadata of
the delta's manifest name `base` and `target` by their manifests' digests. A tensor that the
base lacks, or has with another dtype or shape, travels in full. Blocks are
`echo2.weights.delta_codec`.

Encoding and decoding go block by block, in threads, with a bounded number of blocks in memory.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from echo2.core.manifest import DELTA_HEADER, TensorSpec
from echo2.errors import WeightsError
from echo2.messages import MANIFEST_MAX_BYTES
from echo2.weights.delta_codec import (
    BLOCK_BYTES,
    SAME_BLOCK,
    block_length,
    block_ranges,
    decode_block,
    encode_block,
)
from echo2.weights.delta_streams import BlockError, pack_frame, unpack_frame
from echo2.weights.snapshot import Manifest
from echo2.weights.versions import StoredVersion, check_stop, named_manifest

KINDS: Final = ("weights", "adapter")
BASE_KEY: Final = "base"
TARGET_KEY: Final = "target"
FORMAT_KEY: Final = "delta"
FORMAT: Final = "1"

_AS_BASE: Final = 0
_DIFFERENCE: Final = 1
_FULL: Final = 2

_HEADER: Final = struct.Struct("<Q")
_AHEAD: Final = 2
"""Blocks in work or waiting for each thread: they bound the memory."""

_In = TypeVar("_In")
_Out = TypeVar("_Out")
_View = tuple[str, tuple[int, ...], memoryview]


class DeltaError(WeightsError):
    """A delta cannot be applied; the version that it leads to can still be fetched in full."""


class CorruptDeltaError(DeltaError):
    """The delta is damaged, or was never one."""


class WrongBaseError(DeltaError):
    """The base is not the version that the delta is against, byte by byte."""


class WrongResultError(DeltaError):
    """What was decoded is not the target, though base and delta are what they should be."""


def read_target(delta: StoredVersion) -> Manifest:
    """The manifest of the version that `delta` leads to; CorruptDeltaError if it is no delta."""
    metadata = delta.manifest.metadata
    try:
        if delta.manifest.kind != "delta" or metadata.get(FORMAT_KEY) != FORMAT:
            raise WeightsError(
                f"it is of kind {delta.manifest.kind} and format "
                f"{metadata.get(FORMAT_KEY, '-')[:32]!r}; this echo2 reads deltas of {FORMAT!r}"
            )
        specs = delta.manifest.tensors
        if not specs or specs[0].name != DELTA_HEADER or BASE_KEY not in metadata:
            raise WeightsError("its header or the digest of its base is missing")
        header = delta.tensors()[DELTA_HEADER][2]
        if len(header) < _HEADER.size:
            raise WeightsError(f"its header has {len(header)} bytes")
        (num_bytes,) = _HEADER.unpack_from(header)
        if num_bytes > MANIFEST_MAX_BYTES:
            raise WeightsError(
                f"its target's manifest has {num_bytes} bytes; at most {MANIFEST_MAX_BYTES} are "
                "allowed"
            )
        encoded = unpack_frame(header[_HEADER.size :], num_bytes)
        target = named_manifest(encoded, metadata.get(TARGET_KEY, ""))
        if target.kind not in KINDS:
            raise WeightsError(f"its target is of kind {target.kind}")
        if [spec.name for spec in specs[1:]] != [spec.name for spec in target.tensors]:
            raise WeightsError("its entries are not those of the tensors of its target")
    except (WeightsError, BlockError) as error:
        raise CorruptDeltaError(
            f"version {delta.manifest.manifest_digest[:12]} is not a delta: {error}"
        ) from error
    return target


def encoded_entries(
    base: StoredVersion, target: StoredVersion, threads: int, stop: threading.Event | None
) -> Generator[tuple[str, bytes], None, None]:
    """(name, bytes) of the header and of every entry; one entry at a time is in memory."""
    encoded = target.manifest.encode()
    yield DELTA_HEADER, _HEADER.pack(len(encoded)) + pack_frame(encoded)
    old = base.tensors()
    with _Workers(threads) as workers:
        for name, (dtype, shape, content) in target.tensors().items():
            before = _same_layout(old.get(name), dtype, shape)
            pairs = (
                (dtype, content[start:end], None if before is None else before[start:end])
                for start, end in block_ranges(len(content))
            )
            blocks = list(workers.map(lambda pair: encode_block(*pair), pairs, stop))
            if before is not None and all(block == SAME_BLOCK for block in blocks):
                yield name, bytes([_AS_BASE])
            else:
                mode = _FULL if before is None else _DIFFERENCE
                yield name, b"".join([bytes([mode]), *blocks])


def decoded_blocks(
    delta: StoredVersion,
    base: StoredVersion,
    target: Manifest,
    threads: int,
    stop: threading.Event | None,
) -> Generator[tuple[TensorSpec, memoryview], None, None]:
    """The bytes of the target's tensors in order, in pieces, each good until the next is asked
    for. BlockError for what is no delta."""
    with _Workers(threads) as workers:
        yield from workers.map(_Block.decoded, _blocks(delta, base, target, threads), stop)


@dataclass(frozen=True, slots=True)
class _Block:
    """A block to decode: part of a tensor, with the base's bytes if it needs them."""

    spec: TensorSpec
    content: memoryview
    base: memoryview | None
    num_bytes: int

    room: npt.NDArray[np.uint8]

    def decoded(self) -> tuple[TensorSpec, memoryview]:
        return self.spec, decode_block(
            self.spec.dtype, self.content, self.base, self.num_bytes, self.room
        )


def _blocks(
    delta: StoredVersion, base: StoredVersion, target: Manifest, threads: int
) -> Iterator[_Block]:
    old, entries = base.tensors(), delta.tensors()
    # As many as are decoded ahead, and one that the consumer reads.
    rooms = itertools.cycle(
        [np.empty(BLOCK_BYTES, dtype=np.uint8) for _ in range(_AHEAD * threads + 1)]
    )
    for spec in target.tensors:
        entry = entries[spec.name][2]
        mode = entry[0] if len(entry) else -1
        before = _same_layout(old.get(spec.name), spec.dtype, spec.shape)
        if mode not in (_AS_BASE, _DIFFERENCE, _FULL):
            raise BlockError(f"the entry of tensor {spec.name!r} begins with {mode}")
        if mode == _FULL:
            before = None
        elif before is None:
            raise BlockError(f"tensor {spec.name!r} needs one like it in the base; there is none")
        rest = entry[1:]
        for start, end in block_ranges(spec.num_bytes):
            if mode == _AS_BASE:
                content = memoryview(SAME_BLOCK)
            else:
                length = block_length(rest)
                content, rest = rest[:length], rest[length:]
            part = None if before is None else before[start:end]
            yield _Block(spec, content, part, end - start, next(rooms))
        if len(rest):
            raise BlockError(f"the entry of tensor {spec.name!r} has {len(rest)} bytes too many")


def _same_layout(old: _View | None, dtype: str, shape: tuple[int, ...]) -> memoryview | None:
    """The bytes of the base's tensor if the new one can be a difference to it."""
    return old[2] if old is not None and old[:2] == (dtype, shape) else None


class _Workers:
    """Threads for blocks; the caller's own when there is one thread. Ends with the context."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "delta") if threads > 1 else None

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def map(
        self, work: Callable[[_In], _Out], given: Iterable[_In], stop: threading.Event | None
    ) -> Iterator[_Out]:
        """Results in order, a bounded number ahead. WeightsError when `stop` is set."""
        waiting: deque[Future[_Out]] = deque()
        for each in given:
            check_stop(stop)
            if self._pool is None:
                yield work(each)
                continue
            waiting.append(self._pool.submit(work, each))
            if len(waiting) > _AHEAD * self._threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
