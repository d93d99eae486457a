"""One version on its way in: chunks are verified, placed, and survive the process.

    open -- accept, write, accept ... --> all here -- finish --> complete (renamed, read-only)
      `-- close: what is here stays on the disk for the next one

A chunk counts only after its digest was checked, so `has` and `read` may serve others at
once (a relay forwards what it verified). `accept` checks and keeps in memory, and waits for
nobody; `write` brings what was accepted to the disk; `add` does both. Safe to use from
threads: `close` waits for a `write` in progress, and ends the others with an error.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog
from blake3 import blake3

from echo2.errors import WeightsError
from echo2.weights.files import BIN, BITMAP, MANIFEST, PARTIAL, disk_errors
from echo2.weights.snapshot import Manifest
from echo2.weights.versions import (
    StoredVersion,
    TornVersionError,
    check_stop,
    read_range,
    verify_whole,
)

log = structlog.get_logger(__name__)

AHEAD_CHUNKS: Final = 8
_CANNOT_RESERVE: Final = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class WrongChunkError(WeightsError):
    """A chunk is not the one that the manifest names; nothing was changed by it."""


class Assembly:
    """The chunks of `manifest` in a file of full size. Made by `ChunkStore.begin`."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        on_close: Callable[[], None],
        on_finish: Callable[[], StoredVersion],
        stop: threading.Event | None = None,
    ) -> None:
        """Takes up what is on the disk, hashing it again. `on_close` is called once, when
        the assembly ends either way; `on_finish` just before it, to open the result."""
        self.manifest = manifest
        self._folder = folder
        self._on_close = on_close
        self._on_finish = on_finish
        self._lock = threading.Lock()
        """Held while files are written, read or closed."""
        self._accepting = threading.Lock()
        """Held for a moment."""
        self._unwritten: dict[int, bytes | memoryview] = {}
        self._whole = blake3()
        self._num_hashed = 0
        """Leading chunks that the digest of the whole has taken in."""
        self._have = bytearray(manifest.num_chunks)
        self._num_have = 0
        self._handle = -1
        self._bitmap = -1
        try:
            self._take_up(stop)
        except BaseException:
            self._close_handles()
            raise

    @property
    def num_have(self) -> int:
        """Chunks that are verified and in place."""
        return self._num_have

    @property
    def num_unwritten(self) -> int:
        """Chunks that were accepted and are not on the disk yet."""
        return len(self._unwritten)

    def has(self, index: int) -> bool:
        return 0 <= index < len(self._have) and bool(self._have[index])

    def missing(self) -> list[int]:
        """Indexes still to come, in order."""
        return [index for index, have in enumerate(self._have) if not have]

    def add(self, index: int, payload: bytes | memoryview) -> bool:
        """`accept` a chunk and `write` it; False when it is here already. When it cannot be
        written nothing was changed."""
        if not self.accept(index, payload):
            return False
        try:
            self.write()
        except WeightsError:
            self._retract([index])
            if not self._have[index]:
                raise
            # `close` has written it in the meantime.
        return True

    def accept(self, index: int, payload: bytes | memoryview) -> bool:
        """Take a chunk, which must not change any more; False when it is here already.

        WrongChunkError when it is not the chunk of the manifest, WeightsError when the
        assembly is closed; neither changes anything.
        """
        if not 0 <= index < self.manifest.num_chunks:
            raise WrongChunkError(
                f"chunk {index} does not exist; version {self._short} has chunks 0 to "
                f"{self.manifest.num_chunks - 1}"
            )
        start, end = self.manifest.chunk_range(index)
        if len(payload) != end - start:
            raise WrongChunkError(
                f"chunk {index} of version {self._short} has {len(payload)} bytes; "
                f"its manifest says {end - start}"
            )
        if blake3(payload).digest() != self.manifest.chunk_digests[index]:
            raise WrongChunkError(
                f"chunk {index} of version {self._short} does not have the digest that its "
                "manifest says"
            )
        with self._accepting:
            self._check_open()
            if self._have[index]:
                return False
            self._unwritten[index] = payload
            self._have[index] = 1
            self._num_have += 1
        return True

    def write(self) -> None:
        """Bring what was accepted to the disk. WeightsError when it is full, or the assembly
        closed: what could not be written stays in memory."""
        with self._lock:
            self._check_open()
            self._write_accepted()

    def _write_accepted(self) -> None:
        for index, payload in list(self._unwritten.items()):
            with disk_errors(f"storing chunk {index} of version {self._short}", self._folder):
                _write_range(self._handle, payload, self.manifest.chunk_range(index)[0])
                _write_range(self._bitmap, self._written_bits(index), index // 8)
            if index == self._num_hashed:
                self._whole.update(payload)
                self._num_hashed += 1
            del self._unwritten[index]
            self._hash_ahead()

    def _written_bits(self, index: int) -> bytes:
        """The byte of the bitmap that tells of `index`, which has just been written."""
        first = index - index % 8
        have = self._have[first : first + 8]  # copied before `_unwritten` is read: see `accept`
        for near in range(first, first + len(have)):
            if near != index and near in self._unwritten:
                have[near - first] = 0
        return _bits(have)

    def _retract(self, indexes: list[int]) -> None:
        """Those that are not written are not here."""
        with self._accepting:
            for index in indexes:
                if self._unwritten.pop(index, None) is not None:
                    self._have[index] = 0
                    self._num_have -= 1

    def _hash_ahead(self) -> None:
        """Take in a few chunks that came before their turn, while others are on their way: at
        the end little is left to hash."""
        for _ in range(AHEAD_CHUNKS):
            if not self.has(self._num_hashed) or self._num_hashed in self._unwritten:
                return
            try:
                content = read_range(self._handle, *self.manifest.chunk_range(self._num_hashed))
            except (OSError, WeightsError):
                return  # `finish` reads it again, and tells
            self._whole.update(content)
            self._num_hashed += 1

    def read(self, index: int) -> bytes:
        """A chunk that is here; WeightsError when it is not."""
        start, end = self.manifest.chunk_range(index)
        payload = self._unwritten.get(index)
        if payload is not None:
            return bytes(payload)
        with self._lock:
            self._check_open()
            if not self._have[index]:
                raise WeightsError(f"chunk {index} of version {self._short} is not here yet")
            return read_range(self._handle, start, end)

    def finish(self, *, stop: threading.Event | None = None) -> StoredVersion:
        """Verify the whole and make it a complete version, open for the caller.

        Nothing waits for the disk: what a power cut takes of it, `ChunkStore.open` finds out by
        the digests, and it is fetched again.

        WeightsError when chunks are missing or the assembly was closed meanwhile. When
        the whole is not what the manifest says, though every chunk is, the manifest is
        wrong: everything is removed.
        """
        with self._lock:
            self._check_open()
            if self._num_have < self.manifest.num_chunks:
                raise WeightsError(
                    f"version {self._short} is not complete: {self._num_have} of "
                    f"{self.manifest.num_chunks} chunks are here"
                )
            self._write_accepted()
            # Hashing must not keep `close` waiting, nor read a descriptor that it closed.
            handle = os.dup(self._handle)
            whole, num_hashed = self._whole, self._num_hashed
            # A second call, after this one was stopped, begins anew.
            self._whole, self._num_hashed = blake3(), 0
        try:
            num_bytes = self.manifest.chunk_range(num_hashed - 1)[1] if num_hashed else 0
            verify_whole(handle, self.manifest, whole=whole, num_hashed=num_bytes, stop=stop)
            with disk_errors(f"completing version {self._short}", self._folder), self._lock:
                self._check_open()
                os.replace(self._path(PARTIAL), self._path(BIN))
                self._path(BITMAP).unlink(missing_ok=True)
                version = self._on_finish()
        except TornVersionError:
            self.discard()
            raise
        finally:
            os.close(handle)
        self.close()
        return version

    def close(self) -> None:
        """Let go; what is here stays for the next `begin`. A second call does nothing."""
        with self._lock:
            was_open = self._handle >= 0
            if was_open:
                try:
                    self._write_accepted()
                except WeightsError as error:
                    log.warning("chunks_not_stored", chunks=self.num_unwritten, reason=str(error))
            self._retract(list(self._unwritten))
            with self._accepting:
                self._close_handles()
        if was_open:
            self._on_close()

    def discard(self) -> None:
        """Remove what is here, and close."""
        with self._lock:
            self._retract(list(self._unwritten))
            if self._handle >= 0:
                for suffix in (MANIFEST, BITMAP, PARTIAL):
                    self._path(suffix).unlink(missing_ok=True)
        self.close()

    def _take_up(self, stop: threading.Event | None) -> None:
        flags = os.O_RDWR | os.O_CREAT
        existed = self._path(PARTIAL).exists()
        self._handle = os.open(self._path(PARTIAL), flags, 0o644)
        self._bitmap = os.open(self._path(BITMAP), flags, 0o644)
        try:
            _reserve(self._handle, self.manifest.num_bytes)
        except OSError:
            if not existed:
                for suffix in (MANIFEST, BITMAP, PARTIAL):
                    self._path(suffix).unlink(missing_ok=True)
            raise
        claimed = os.pread(self._bitmap, (self.manifest.num_chunks + 7) // 8, 0)
        for index in range(min(8 * len(claimed), self.manifest.num_chunks)):
            if not claimed[index // 8] >> index % 8 & 1:
                continue
            check_stop(stop)
            content = read_range(self._handle, *self.manifest.chunk_range(index))
            if blake3(content).digest() == self.manifest.chunk_digests[index]:
                self._have[index] = 1
                self._num_have += 1
        os.ftruncate(self._bitmap, 0)
        _write_range(self._bitmap, _bits(self._have), 0)
        if self._num_have:
            log.info(
                "assembly_resumed",
                manifest_digest=self.manifest.manifest_digest,
                chunks_here=self._num_have,
                chunks=self.manifest.num_chunks,
            )

    def _check_open(self) -> None:
        if self._handle < 0:
            raise WeightsError(f"the assembly of version {self._short} was closed: begin it again")

    def _close_handles(self) -> None:
        for handle in (self._handle, self._bitmap):
            if handle >= 0:
                os.close(handle)
        self._handle = self._bitmap = -1

    def _path(self, suffix: str) -> Path:
        return self._folder / (self.manifest.manifest_digest + suffix)

    @property
    def _short(self) -> str:
        return self.manifest.manifest_digest[:12]


def _reserve(handle: int, num_bytes: int) -> None:
    """Give the file its full size on the disk, so that a full disk shows now."""
    if os.fstat(handle).st_size > num_bytes:
        os.ftruncate(handle, num_bytes)
    if not num_bytes:
        return
    try:
        os.posix_fallocate(handle, 0, num_bytes)
    except OSError as error:
        if error.errno not in _CANNOT_RESERVE:
            raise
        # Some network file systems cannot; a full disk then shows at a chunk.
        os.ftruncate(handle, num_bytes)


def _write_range(handle: int, content: bytes | memoryview, start: int) -> None:
    view = memoryview(content)
    while view:
        written = os.pwrite(handle, view, start)
        view = view[written:]
        start += written


def _bits(have: bytearray) -> bytes:
    """One bit per chunk, the lowest first."""
    bits = bytearray((len(have) + 7) // 8)
    for index, value in enumerate(have):
        bits[index // 8] |= value << index % 8
    return bytes(bits)
