"""Blocks of a tensor as their difference to the same bytes of another version: lossless.

A tensor is seen as little-endian unsigned integers of its element's width. What changed is
written as positions and values:

    value     zigzag of target - base, modulo 2^bits, in the order of the base's exponents;
              byte planes, each a zstd frame
    position  of an element whose magnitude in the base is below a limit: a bit, one for each
              such element; of the others: gaps between those that changed, a byte each

Both sides know the base, so order and limit cost next to nothing: AdamW moves every weight by
about the learning rate, hence tiny weights nearly all change in a step, by many units of their
last place, and large ones hardly ever, and by one. A limit of nothing leaves gaps alone, a limit
of everything a plain bit mask.

A block that has no base, or is not smaller so, travels in full: byte planes in zstd, or raw.
Which is smallest is measured in docs/deltas.md. Decoding allocates nothing whose size is not
bounded by the block's; `BlockError` says why bytes are no block. Wrong content is found by
the digests of the target, not here.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from echo2.core.manifest import DTYPE_BYTES
from echo2.weights.delta_streams import (
    BlockError,
    Elements,
    Streams,
    packed,
    packed_planes,
    set_positions,
)

BLOCK_BYTES: Final = 2 << 20
"""Bytes of a tensor that are coded as one: a few temporaries of it fit into the caches."""

_SAME: Final = 0
_CHANGES: Final = 1
_EVERY: Final = 2
_PLANES: Final = 3
_RAW: Final = 4

_HEAD: Final = struct.Struct("<IBBIII")
"""length of the whole block, mode, limit, changes below it, changes above, bytes of gaps"""

SAME_BLOCK: Final = _HEAD.pack(_HEAD.size, _SAME, 0, 0, 0, 0)
"""A block without any change."""

_WIDTHS: Final = {**DTYPE_BYTES, "C64": 4}
_EXPONENT_SHIFTS: Final = {"F16": (10, 5), "BF16": (7, 8), "F32": (23, 8), "F64": (52, 11)}
"""Bits below the exponent, and bits of the exponent (of which the lower 8 bound a limit)."""
_LIMIT_ALL: Final = 255
_GAP_MAX: Final = 255
"""A byte of this value adds itself to the next gap."""

_MASK_DENSITY: Final = 0.15
"""From this share of changed elements on a bit mask of all is as small as gaps, and faster."""
_EVERY_DENSITY: Final = 0.98
"""From this share on the values of all elements, zeros among them, need no positions."""
_LIMIT_GAIN_BITS: Final = 512.0
_LIMIT_GAIN_SHARE: Final = 0.05
"""A limit has to save so many bits, and this share of those of all gaps, to be used."""
_SAMPLE_STRIDE: Final = 32
_PLANES_SHARE: Final = 0.7
"""A difference above this share of the block is compared with the block in full."""


class _Local(threading.local):
    """Room for temporaries of a thread, whose pages the system would otherwise take away and
    clear again for every block."""

    def __init__(self) -> None:
        self.room = np.empty(BLOCK_BYTES, dtype=np.uint8)
        self.flags = np.empty(BLOCK_BYTES, dtype=np.bool_)


_local = _Local()


def elements(dtype: str, content: memoryview) -> Elements:
    """The bytes of a tensor as unsigned integers, without a copy."""
    return np.frombuffer(content, dtype=f"<u{_WIDTHS[dtype]}")


def block_ranges(num_bytes: int) -> Iterator[tuple[int, int]]:
    """[start, end) of the blocks of a tensor, in bytes."""
    for start in range(0, num_bytes, BLOCK_BYTES):
        yield start, min(start + BLOCK_BYTES, num_bytes)


def encode_block(dtype: str, target: memoryview, base: memoryview | None) -> bytes:
    """One block; `base` has the length of `target`, None when there is nothing like it."""
    new = elements(dtype, target)
    if base is not None:
        old = elements(dtype, base)
        block = _encode_changes(dtype, new, old)
        if len(block) <= _PLANES_SHARE * len(target):
            return block
        return min(block, _encode_full(new), key=len)
    return _encode_full(new)


def block_length(content: memoryview) -> int:
    """Bytes of the block at the start of `content`; BlockError when there is none."""
    if len(content) < _HEAD.size:
        raise BlockError(f"{len(content)} bytes are left; the head of a block has {_HEAD.size}")
    length: int = _HEAD.unpack_from(content)[0]
    if not _HEAD.size <= length <= len(content):
        raise BlockError(f"a block has {length} bytes; {len(content)} are left")
    return length


def decode_block(
    dtype: str,
    block: memoryview,
    base: memoryview | None,
    num_bytes: int,
    room: npt.NDArray[np.uint8] | None = None,
) -> memoryview:
    """The `num_bytes` bytes that `encode_block` was given; BlockError for what it never wrote.

    The result may lie in `room` (BLOCK_BYTES of u1), in `base` or in `block`, not copied.
    """
    _, mode, limit, num_below, num_above, num_gaps = _HEAD.unpack_from(block)
    streams = Streams(block[_HEAD.size :])
    width = _WIDTHS[dtype]
    if room is None:
        room = np.empty(num_bytes, dtype=np.uint8)
    if mode == _RAW:
        if len(streams.content) != num_bytes:
            raise BlockError(f"a raw block has {len(streams.content)} bytes; {num_bytes} are due")
        return streams.content
    if mode == _PLANES:
        found = streams.planes(num_bytes // width, width, room)
    elif base is None:
        raise BlockError(f"a block of mode {mode} needs a base, and its tensor has none")
    elif mode == _SAME:
        found = elements(dtype, base)
    elif mode == _EVERY:
        found = room[:num_bytes].view(f"<u{width}")
        np.copyto(found, elements(dtype, base))
        _add_values(dtype, found, None, streams)
    elif mode == _CHANGES:
        found = room[:num_bytes].view(f"<u{width}")
        np.copyto(found, elements(dtype, base))
        _add_changes(dtype, found, streams, limit, (num_below, num_above, num_gaps))
    else:
        raise BlockError(f"the mode of a block is {mode}; known are {_SAME} to {_RAW}")
    streams.check_end()
    return found.view(np.uint8).data


def _encode_changes(dtype: str, new: Elements, old: Elements) -> bytes:
    flags = np.not_equal(new, old, out=_local.flags[: new.size])
    positions = set_positions(flags)
    if not positions.size:
        return SAME_BLOCK
    if positions.size >= _EVERY_DENSITY * new.size:
        return _block(_EVERY, packed_planes(_difference(dtype, new, old, None)))
    if positions.size >= _MASK_DENSITY * new.size:
        mask = np.packbits(flags)
        return _block(
            _CHANGES,
            [packed(mask), *packed_planes(_difference(dtype, new, old, positions))],
            limit=_LIMIT_ALL,
            num_below=positions.size,
        )
    limit = _choose_limit(dtype, old, positions)
    streams: list[bytes] = []
    num_below = 0
    if limit:
        below = _below(dtype, old, limit)
        mask = new.take(below) != old.take(below)
        changed = below[mask]
        num_below = changed.size
        streams = [
            packed(np.packbits(mask)),
            *packed_planes(_difference(dtype, new, old, changed)),
        ]
        positions = positions[_magnitudes(old.take(positions)) >= _bound(dtype, limit)]
    gaps = _gap_bytes(positions)
    streams += [packed(gaps), *packed_planes(_difference(dtype, new, old, positions))]
    return _block(
        _CHANGES,
        streams,
        limit=limit,
        num_below=num_below,
        num_above=positions.size,
        num_gaps=gaps.size,
    )


def _add_changes(
    dtype: str, found: Elements, streams: Streams, limit: int, counts: tuple[int, int, int]
) -> None:
    """Turn the base's elements into the target's."""
    num_below, num_above, num_gaps = counts
    if num_below + num_above > found.size or num_gaps > num_above + found.size // _GAP_MAX:
        raise BlockError(
            f"a block of {found.size} elements claims {num_below} and {num_above} changes and "
            f"{num_gaps} gaps"
        )
    if limit == _LIMIT_ALL:
        _add_values(dtype, found, streams.set_bits(found.size, num_below), streams)
        return
    if limit:
        if dtype not in _EXPONENT_SHIFTS or _bound(dtype, limit) > 1 << (8 * found.itemsize - 1):
            raise BlockError(f"a block of {dtype} has the limit {limit}; there is none such")
        below = _below(dtype, found, limit)
        changed = below.take(streams.set_bits(below.size, num_below))
        _add_values(dtype, found, changed, streams)
    elif num_below:
        raise BlockError(f"a block without a limit claims {num_below} changes below it")
    # Gaps lead to elements above the limit alone, so these are still those of the base.
    positions = _gap_positions(streams.take(num_gaps), num_above, found.size)
    _add_values(dtype, found, positions, streams)


def _add_values(
    dtype: str, found: Elements, positions: npt.NDArray[np.intp] | None, streams: Streams
) -> None:
    """Add the values of the next streams; no position is there twice."""
    ordered = _by_exponent(dtype, found, positions)
    count = found.size if ordered is None else ordered.size
    values = _unzigzag(streams.planes(count, found.itemsize))
    if ordered is None:
        found += values
    else:
        found[ordered] += values


def _encode_full(new: Elements) -> bytes:
    planes = _block(_PLANES, packed_planes(new))
    if len(planes) < _HEAD.size + new.nbytes:
        return planes
    return _block(_RAW, [new.tobytes()])


def _block(
    mode: int,
    streams: list[bytes],
    *,
    limit: int = 0,
    num_below: int = 0,
    num_above: int = 0,
    num_gaps: int = 0,
) -> bytes:
    length = _HEAD.size + sum(map(len, streams))
    head = _HEAD.pack(length, mode, limit, num_below, num_above, num_gaps)
    return b"".join([head, *streams])


def _difference(
    dtype: str, new: Elements, old: Elements, positions: npt.NDArray[np.intp] | None
) -> Elements:
    """The values of what changed (None: of all), in their order."""
    ordered = _by_exponent(dtype, old, positions)
    return _zigzag(new - old if ordered is None else new.take(ordered) - old.take(ordered))


def _by_exponent(
    dtype: str, old: Elements, positions: npt.NDArray[np.intp] | None
) -> npt.NDArray[np.intp] | None:
    """Positions with weights of one size together, so that their values look alike; None: all.

    All elements of 32 bits stay as they are: ordering them costs more time than it saves bytes.
    """
    if dtype not in _EXPONENT_SHIFTS or (positions is None and old.itemsize > 2):
        return positions
    chosen = old if positions is None else old.take(positions)
    order = np.argsort(_exponents(dtype, chosen), kind="stable")
    return order if positions is None else positions.take(order)


def _choose_limit(dtype: str, old: Elements, positions: npt.NDArray[np.intp]) -> int:
    """The exponent below which a bit for each element is cheaper than gaps; 0: none is.

    A change costs about log2(e / density) bits as a gap; elements with the share p of them
    changed cost the entropy of p each as bits. Elements are counted in a sample.
    """
    if dtype not in _EXPONENT_SHIFTS:
        return 0
    exponents = _exponents(dtype, old[::_SAMPLE_STRIDE])
    num_all = np.bincount(exponents, minlength=_LIMIT_ALL + 1) * float(_SAMPLE_STRIDE)
    num_changed = np.bincount(_exponents(dtype, old[positions]), minlength=_LIMIT_ALL + 1)
    num_all = np.maximum(num_all, num_changed)
    share = np.clip(num_changed / np.maximum(num_all, 1.0), 1e-9, 1 - 1e-9)
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share)
    gap_bits = np.log2(np.e * old.size / positions.size)
    gain = np.cumsum(num_changed * gap_bits - num_all * entropy)[: _LIMIT_ALL - 1]
    best = int(gain.argmax())
    is_worth_it = gain[best] > max(_LIMIT_GAIN_BITS, _LIMIT_GAIN_SHARE * positions.size * gap_bits)
    return best + 1 if is_worth_it else 0


def _magnitudes(old: Elements, out: Elements | None = None) -> Elements:
    found: Elements = np.bitwise_and(
        old, old.dtype.type((1 << (8 * old.itemsize - 1)) - 1), out=out
    )
    return found


def _exponents(dtype: str, old: Elements) -> npt.NDArray[np.uint8]:
    """The upper bits of the exponent, as many as fit into 0 to 255."""
    shift, bits = _EXPONENT_SHIFTS[dtype]
    upper = _magnitudes(old) >> old.dtype.type(shift + max(0, bits - 8))
    found: npt.NDArray[np.uint8] = upper.astype(np.uint8)
    return found


def _bound(dtype: str, limit: int) -> int:
    shift, bits = _EXPONENT_SHIFTS[dtype]
    return limit << (shift + max(0, bits - 8))


def _below(dtype: str, old: Elements, limit: int) -> npt.NDArray[np.intp]:
    magnitudes = _magnitudes(old, out=_local.room[: old.nbytes].view(old.dtype))
    bound = old.dtype.type(_bound(dtype, limit))
    return set_positions(np.less(magnitudes, bound, out=_local.flags[: old.size]))


def _zigzag(difference: Elements) -> Elements:
    """0, -1, 1, -2 ... as 0, 1, 2, 3 ...: small differences have small codes."""
    signed = difference.view(f"<i{difference.itemsize}")
    found: Elements = ((signed << 1) ^ (signed >> (8 * signed.itemsize - 1))).view(difference.dtype)
    return found


def _unzigzag(values: Elements) -> Elements:
    one = values.dtype.type(1)
    found: Elements = (values >> one) ^ np.negative(values & one)
    return found


def _gap_bytes(positions: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
    gaps = np.diff(positions, prepend=-1) - 1
    large = np.flatnonzero(gaps >= _GAP_MAX)
    if not large.size:
        return gaps.astype(np.uint8)
    repeats = np.ones(gaps.size, dtype=np.intp)
    times, gaps[large] = np.divmod(gaps[large], _GAP_MAX)
    repeats[large] += times
    found = np.full(int(repeats.sum()), _GAP_MAX, dtype=np.uint8)
    found[np.cumsum(repeats) - 1] = gaps
    return found


def _gap_positions(
    gaps: npt.NDArray[np.uint8], num_positions: int, num_elements: int
) -> npt.NDArray[np.intp]:
    ends = np.flatnonzero(gaps != _GAP_MAX)
    if ends.size != num_positions:
        raise BlockError(f"gaps end {ends.size} times; the block has {num_positions} changes")
    found = np.cumsum(gaps, dtype=np.intp)[ends]
    found += np.arange(num_positions)
    if num_positions and found[-1] >= num_elements:
        raise BlockError(f"a change is at {found[-1]}; the block has {num_elements} elements")
    return found
