"""One file that only grows, written in whole blocks from a buffer of its own.

    put, put ... -> sync (written, padded to a block, fdatasync)

Where the system allows it the bytes go to the disk without the page cache (O_DIRECT): nobody
reads them again but after a restart, and to copy them into the cache and have them written back
costs more processor time than all the rest of the ledger. Everywhere else the same bytes are
written at the same places, through the cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
from pathlib import Path
from typing import Final

BLOCK_BYTES: Final = 4096
"""Of the disk, or a multiple of it: what O_DIRECT writes begins and ends at one."""
BUFFER_BYTES: Final = 4 << 20
_DIRECT: Final = getattr(os, "O_DIRECT", 0)


class SegmentFile:
    """A new file at `path`. For one thread. OSError as it comes. `end`: where the next byte
    goes."""

    def __init__(self, path: Path) -> None:
        self.end = 0
        self._direct = bool(_DIRECT)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            self._handle = os.open(path, flags | _DIRECT, 0o600)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            with contextlib.suppress(FileNotFoundError):
                path.unlink()  # made all the same by some systems
            self._handle = os.open(path, flags, 0o600)
            self._direct = False
        # Of whole pages, and so aligned.
        self._buffer = memoryview(mmap.mmap(-1, BUFFER_BYTES))
        self._filled = 0
        self._written = 0

    def put(self, piece: bytes) -> None:
        """Take bytes; they are in the file after `sync`, at the latest."""
        left = memoryview(piece)
        while left:
            size = min(len(left), BUFFER_BYTES - self._filled)
            self._buffer[self._filled : self._filled + size] = left[:size]
            self._filled += size
            self.end += size
            left = left[size:]
            if self._filled == BUFFER_BYTES:
                self._write(BUFFER_BYTES)

    def sync(self) -> None:
        """What was put is on the disk. The next byte begins a block, so that none is written
        to twice."""
        if self._filled:
            size = -(-self._filled // BLOCK_BYTES) * BLOCK_BYTES
            self._buffer[self._filled : size] = bytes(size - self._filled)
            self._write(size)
            self.end = self._written
        os.fdatasync(self._handle)

    def close(self) -> None:
        """What was not synced is lost."""
        os.close(self._handle)

    def _write(self, size: int) -> None:
        """The first bytes of the buffer, which are whole blocks; the buffer is empty then."""
        done = 0
        while done < size:
            try:
                written = os.pwrite(self._handle, self._buffer[done:size], self._written + done)
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:
                    raise
                # The disk has larger blocks, or the file system changed its mind.
                flags = fcntl.fcntl(self._handle, fcntl.F_GETFL)
                fcntl.fcntl(self._handle, fcntl.F_SETFL, flags & ~_DIRECT)
                self._direct = False
                continue
            # A disk that fills takes a part, and tells at the next attempt.
            done += written // BLOCK_BYTES * BLOCK_BYTES if self._direct else written
            if self._direct and written < BLOCK_BYTES:
                raise OSError(errno.EIO, "the disk took less than a block")
        self._written += size
        self._filled = 0
