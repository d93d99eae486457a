"""Deltas: what one version of weights is more than another, as a version of its own.

    base, target -- write_delta --> delta        (published, fetched and stored as any version)
    base, delta  -- apply_delta --> target       (a complete version of the store, or an error)

Promise: what `apply_delta` makes is the target bit by bit, or it is not there. It decodes
into the chunks of a new version, of which each must have the digest that the target's
manifest says, as must the whole, and never touches the base. What goes wrong is told apart:

    CorruptDeltaError   the delta is not one, or not that of its manifest: fetch it again
    WrongBaseError      it is against another version, or the base is damaged
    WrongResultError    sound base, sound delta, wrong result: who made it was wrong
    WeightsError        neither: the disk is full, the store too small, nobody waits

After each of them the full version can be fetched; chunks that were right are used for it.

The bytes of a delta are `echo2.weights.delta_layout`. Call all this in threads; it reads and
writes whole versions.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from echo2.errors import WeightsError
from echo2.weights.assembly import Assembly, WrongChunkError
from echo2.weights.delta_layout import (
    BASE_KEY,
    FORMAT,
    FORMAT_KEY,
    KINDS,
    TARGET_KEY,
    CorruptDeltaError,
    DeltaError,
    WrongBaseError,
    WrongResultError,
    decoded_blocks,
    encoded_entries,
    read_target,
)
from echo2.weights.delta_streams import BlockError
from echo2.weights.snapshot import Manifest
from echo2.weights.store import ChunkStore
from echo2.weights.versions import NamedTensor, StoredVersion, TornVersionError, write_version

__all__ = [
    "BASE_KEY",
    "TARGET_KEY",
    "CorruptDeltaError",
    "DeltaError",
    "WrongBaseError",
    "WrongResultError",
    "apply_delta",
    "read_target",
    "write_delta",
]

SHARE_MAX: Final = 0.9
"""A delta above this share of the full version saves too little for what it costs to apply."""


class _NotSmallerError(Exception):
    """Leaves the writing of a delta that is not worth it."""


def write_delta(
    folder: Path,
    base: StoredVersion,
    target: StoredVersion,
    *,
    share_max: float = SHARE_MAX,
    threads: int = 1,
    stop: threading.Event | None = None,
) -> Manifest | None:
    """Write the delta that makes `target` out of `base`, as a version in `folder`.

    None, and nothing new is there, when it has more than `share_max` of the target's bytes.
    The same two versions give the same delta. In memory is one tensor's encoded bytes and
    some blocks per thread. WeightsError as from `write_version`, or when `stop` is set.
    """
    for version in (base, target):
        if version.manifest.kind not in KINDS:
            raise WeightsError(
                f"version {_short(version)} is of kind {version.manifest.kind}; deltas are made "
                f"of {' and '.join(KINDS)} only"
            )
    bytes_max = share_max * target.manifest.num_bytes

    entries = encoded_entries(base, target, threads, stop)

    def small_enough() -> Iterator[NamedTensor]:
        num_bytes = 0
        for name, content in entries:
            num_bytes += len(content)
            if num_bytes > bytes_max:
                raise _NotSmallerError
            yield name, "U8", (len(content),), content

    try:
        return write_version(
            folder,
            small_enough(),
            kind="delta",
            metadata={
                FORMAT_KEY: FORMAT,
                BASE_KEY: base.manifest.manifest_digest,
                TARGET_KEY: target.manifest.manifest_digest,
            },
            chunk_bytes=target.manifest.chunk_bytes,
        )
    except _NotSmallerError:
        return None
    finally:
        entries.close()  # its threads end here, whatever happened


def apply_delta(
    store: ChunkStore,
    delta: StoredVersion,
    base: StoredVersion,
    *,
    threads: int = 1,
    stop: threading.Event | None = None,
) -> StoredVersion:
    """Make the target of `delta` a complete version of `store`, open for the caller.

    `delta` and `base` stay open and unchanged; open them from `store`, or they may be
    evicted to make room, and with `verify`. Errors as above; `stop` ends it with a
    WeightsError. What has no use for a later fetch is removed.
    """
    try:
        delta.verify(stop=stop)
    except TornVersionError as error:
        raise CorruptDeltaError(f"{error}: remove it and fetch it again") from error
    target = read_target(delta)
    if delta.manifest.metadata[BASE_KEY] != base.manifest.manifest_digest:
        raise WrongBaseError(
            f"delta {_short(delta)} is against version {delta.manifest.metadata[BASE_KEY][:12]}; "
            f"the base given is {_short(base)}: use that version, or fetch "
            f"{target.manifest_digest[:12]} in full"
        )
    complete = store.open(target.manifest_digest, verify=True, stop=stop)
    if complete is not None:
        return complete
    assembly = store.begin(target, stop=stop)
    num_before = assembly.num_have
    try:
        _decode_into(assembly, delta, base, threads, stop)
        return assembly.finish(stop=stop)
    except BlockError as error:
        raise CorruptDeltaError(
            f"delta {_short(delta)} cannot be decoded: {error}; fetch "
            f"{target.manifest_digest[:12]} in full"
        ) from error
    except (WrongChunkError, TornVersionError) as error:
        raise _culprit(delta, base, target, error, stop) from error
    except WeightsError as error:
        if isinstance(error.__cause__, OSError) and not num_before:
            assembly.discard()  # of a disk that is full nothing is kept
        raise
    finally:
        # Chunks that were right serve a fetch in full; an empty file would only take room.
        if assembly.num_have:
            assembly.close()
        else:
            assembly.discard()


def _decode_into(
    assembly: Assembly,
    delta: StoredVersion,
    base: StoredVersion,
    threads: int,
    stop: threading.Event | None,
) -> None:
    """All chunks of the target. BlockError, or WrongChunkError where one comes out wrong."""
    chunks = _Chunks(assembly)
    pieces = decoded_blocks(delta, base, assembly.manifest, threads, stop)
    with contextlib.closing(pieces):  # its threads end here, whatever happens
        for spec, content in pieces:
            chunks.pad(spec.offset)
            chunks.append(content)
    chunks.end()


class _Chunks:
    """Cuts the target's bytes, as they come, into the chunks of its assembly."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._chunk_bytes = assembly.manifest.chunk_bytes
        self._index = 0
        self._num_bytes = 0
        self._waiting = bytearray()

    def pad(self, offset: int) -> None:
        """Zeros up to where a tensor begins; none within a tensor."""
        if offset > self._num_bytes:
            self.append(memoryview(bytes(offset - self._num_bytes)))

    def append(self, content: memoryview) -> None:
        """The next bytes. WrongChunkError when they are not those of the target."""
        self._num_bytes += len(content)
        if self._waiting:
            taken = self._chunk_bytes - len(self._waiting)
            self._waiting += content[:taken]
            content = content[taken:]
            if len(self._waiting) < self._chunk_bytes:
                return
            self._add(self._waiting)
            self._waiting = bytearray()
        whole = len(content) - len(content) % self._chunk_bytes
        for start in range(0, whole, self._chunk_bytes):
            self._add(content[start : start + self._chunk_bytes])
        self._waiting += content[whole:]

    def end(self) -> None:
        """The last chunk, which may be shorter."""
        self.pad(self._assembly.manifest.num_bytes)
        if self._waiting:
            self._add(self._waiting)

    def _add(self, chunk: bytearray | memoryview) -> None:
        if not self._assembly.has(self._index):
            self._assembly.add(self._index, memoryview(chunk))
        self._index += 1


def _culprit(
    delta: StoredVersion,
    base: StoredVersion,
    target: Manifest,
    error: WeightsError,
    stop: threading.Event | None,
) -> DeltaError:
    """Why sound chunks did not come out, told after a look at the base."""
    advice = f"fetch {target.manifest_digest[:12]} in full"
    try:
        base.verify(stop=stop)
    except TornVersionError as torn:
        return WrongBaseError(f"{torn}; so delta {_short(delta)} led to other bytes: {advice}")
    return WrongResultError(
        f"delta {_short(delta)} is sound, and so is its base {_short(base)}, but its publisher "
        f"made it wrong: {error}; {advice}"
    )


def _short(version: StoredVersion) -> str:
    return version.manifest.manifest_digest[:12]
