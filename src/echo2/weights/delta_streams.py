"""Streams of a block: bytes in zstd, each with its length before it.

Reading allocates nothing before the size that a frame claims is the one that is due; whatever
else is wrong is a `BlockError` too. zstd's level 1 is the smallest here but for levels above
15, which cost a hundred times its time (docs/deltas.md).
"""

from __future__ import annotations

import struct
import threading
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import zstandard

Elements = npt.NDArray[Any]
"""One dimension of u1, u2, u4 or u8, little endian."""

_LENGTH: Final = struct.Struct("<I")
_LEVEL: Final = 1
_WINDOW_MAX_BYTES: Final = 2 << 20
"""Most memory of a decoder; what level 1 writes needs a quarter of it."""


class BlockError(ValueError):
    """These bytes are not a block of this tensor."""


class _Local(threading.local):
    """Contexts of zstd may not be shared by threads that use them at once."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_WINDOW_MAX_BYTES)


_local = _Local()


def packed(raw: npt.NDArray[np.uint8]) -> bytes:
    """A stream: its length and its zstd frame; of zeros alone the length 0 and nothing more."""
    if not raw.any():
        return _LENGTH.pack(0)
    frame = _local.compressor.compress(raw.data)
    return _LENGTH.pack(len(frame)) + frame


def packed_planes(values: Elements) -> list[bytes]:
    if values.itemsize == 1:
        return [packed(values)]
    planes = values.view(np.uint8).reshape(-1, values.itemsize)
    return [packed(np.ascontiguousarray(planes[:, index])) for index in range(values.itemsize)]


def set_positions(flags: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """What np.flatnonzero gives, faster where few are set: it looks at eight at a time."""
    if flags.size % 8:
        return np.flatnonzero(flags)
    words = np.flatnonzero(flags.view("<u8") != 0)
    if words.size > flags.size // 16:
        return np.flatnonzero(flags)
    inside = np.flatnonzero(flags.view("<u8").take(words).view(np.bool_))
    found: npt.NDArray[np.intp] = (words[inside >> 3] << 3) + (inside & 7)
    return found


class Streams:
    """Reads the streams of a block in order; each must have just the size that is due."""

    def __init__(self, content: memoryview) -> None:
        self.content = content

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        if len(self.content) < _LENGTH.size:
            raise BlockError("a block ends in the middle of its streams")
        length: int = _LENGTH.unpack_from(self.content)[0]
        frame = self.content[_LENGTH.size : _LENGTH.size + length]
        if len(frame) != length:
            raise BlockError(f"a stream has {length} bytes; its block has {len(frame)} left")
        self.content = self.content[_LENGTH.size + length :]
        if not length:
            return np.zeros(num_bytes, dtype=np.uint8)
        return np.frombuffer(unpack_frame(frame, num_bytes), dtype=np.uint8)

    def planes(self, count: int, width: int, room: npt.NDArray[np.uint8] | None = None) -> Elements:
        """`count` elements; in `room`, if they are to be there."""
        found = np.empty(count * width, dtype=np.uint8) if room is None else room[: count * width]
        split = found.reshape(-1, width)
        for index in range(width):
            split[:, index] = self.take(count)
        return found.view(f"<u{width}")

    def set_bits(self, count: int, num_set: int) -> npt.NDArray[np.intp]:
        """Positions of the set ones of `count` bits, which are `num_set`."""
        bits = np.unpackbits(self.take((count + 7) // 8), count=count)
        found = set_positions(bits.view(np.bool_))
        if found.size != num_set:
            raise BlockError(f"a mask has {found.size} bits set; the block says {num_set}")
        return found

    def check_end(self) -> None:
        if len(self.content):
            raise BlockError(f"a block has {len(self.content)} bytes too many")


def pack_frame(content: bytes) -> bytes:
    return _local.compressor.compress(content)


def unpack_frame(frame: memoryview, num_bytes: int) -> bytes:
    """One zstd frame of just `num_bytes`; BlockError before anything else is allocated."""
    try:
        claimed = zstandard.frame_content_size(frame)
        if claimed != num_bytes:
            raise BlockError(f"a zstd frame claims {claimed} bytes; {num_bytes} are due")
        content = _local.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BlockError(f"a zstd frame is broken: {error}") from error
    if len(content) != num_bytes:
        raise BlockError(f"a zstd frame has {len(content)} bytes; {num_bytes} are due")
    return content
