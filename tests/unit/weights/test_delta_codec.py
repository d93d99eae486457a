from __future__ import annotations

import random
import struct

import numpy as np
import pytest
import zstandard

from echo2.weights.delta_codec import BLOCK_BYTES, block_length, decode_block, encode_block
from echo2.weights.delta_streams import BlockError

HEAD = struct.Struct("<IBBIII")


def a_block(mode: int, *streams: bytes, limit: int = 0, counts: tuple[int, int, int]) -> bytes:
    packed = b"".join(struct.pack("<I", len(stream)) + stream for stream in streams)
    return HEAD.pack(HEAD.size + len(packed), mode, limit, *counts) + packed


def bomb(num_bytes: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(num_bytes))


BASE = bytes(800)
HOSTILE = {
    "a zstd frame of another size": a_block(3, bomb(1 << 30), counts=(0, 0, 0)),
    "a gap frame of another size": a_block(1, bomb(1 << 28), counts=(0, 3, 3)),
    "more changes than elements": a_block(1, counts=(0, 401, 401)),
    "counts of four billion": a_block(1, counts=(2**32 - 1, 2**32 - 1, 2**32 - 1)),
    "more gaps than there can be": a_block(1, counts=(0, 1, 1000)),
    "gaps that lead out of the tensor": a_block(
        1, zstandard.ZstdCompressor().compress(b"\xfe\xfe"), b"", b"", counts=(0, 2, 2)
    ),
    "gaps of another number": a_block(
        1, zstandard.ZstdCompressor().compress(b"\xff\x01"), b"", b"", counts=(0, 2, 2)
    ),
    "a mask of another number": a_block(1, b"", b"", b"", limit=255, counts=(7, 0, 0)),
    "changes below no limit": a_block(1, counts=(7, 0, 0)),
    "an unknown mode": a_block(9, counts=(0, 0, 0)),
    "bytes behind the streams": a_block(0, b"", counts=(0, 0, 0)),
    "values of every element in another size": a_block(2, bomb(401), b"", counts=(0, 0, 0)),
    "no frame": a_block(3, b"junk", b"", counts=(0, 0, 0)),
    "a stream beyond the end": HEAD.pack(HEAD.size + 4, 3, 0, 0, 0, 0) + b"\xff\xff\xff\x7f",
    "no streams": a_block(3, counts=(0, 0, 0)),
    "a raw block of another size": a_block(4, counts=(0, 0, 0)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_block_is_refused_before_it_costs_anything(name: str) -> None:
    with pytest.raises(BlockError):
        decode_block("BF16", memoryview(HOSTILE[name]), memoryview(BASE), len(BASE))


def test_a_limit_of_magnitude_is_for_floats_only() -> None:
    block = a_block(1, b"", b"", limit=3, counts=(0, 0, 0))
    with pytest.raises(BlockError, match="limit 3"):
        decode_block("I16", memoryview(block), memoryview(BASE), len(BASE))
    block = a_block(1, b"", b"", limit=33, counts=(0, 0, 0))
    with pytest.raises(BlockError, match="limit 33"):
        decode_block("F16", memoryview(block), memoryview(BASE), len(BASE))


def test_tiny_weights_that_all_change_cost_no_positions() -> None:
    """As AdamW does it: it moves each by the learning rate, whatever its size."""
    rng = np.random.default_rng(0)
    bits = rng.integers(0x3C00, 0x3D00, 200_000).astype("<u2")
    tiny = rng.random(bits.size) < 0.01
    bits[tiny] = 0x3200
    after, anywhere = bits.copy(), bits.copy()
    after[tiny] += 1
    anywhere[rng.permutation(tiny)] += 1
    old = memoryview(bits.tobytes())
    known, unknown = (
        encode_block("BF16", memoryview(new.tobytes()), old) for new in (after, anywhere)
    )
    assert decode_block("BF16", memoryview(known), old, len(old)) == after.tobytes()
    assert decode_block("BF16", memoryview(unknown), old, len(old)) == anywhere.tobytes()
    assert len(known) < len(unknown) / 4


def test_a_block_never_travels_in_more_than_its_bytes_and_a_head() -> None:
    rng = random.Random(0)
    old, new = rng.randbytes(5000), rng.randbytes(5000)
    for base in (None, memoryview(old)):
        assert len(encode_block("U8", memoryview(new), base)) <= 5000 + HEAD.size


def test_every_way_of_coding_is_used_where_it_is_meant_to_be() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0x3C00, 0x3D00, 20_000).astype("<u2")
    old = memoryview(bits.tobytes())
    found = []
    for density in (0.0, 0.01, 0.3, 1.0):
        new = bits.copy()
        new[rng.random(bits.size) < density] += 1
        found.append(encode_block("BF16", memoryview(new.tobytes()), old)[4:6])
    found.append(encode_block("BF16", old, None)[4:6])
    found.append(encode_block("U8", memoryview(rng.bytes(999)), None)[4:6])
    same, gaps, mask, every, planes, raw = (tuple(mode_and_limit) for mode_and_limit in found)
    assert (same, gaps, mask) == ((0, 0), (1, 0), (1, 255))
    assert (every, planes, raw) == ((2, 0), (3, 0), (4, 0))


def test_the_length_of_a_block_is_checked_against_what_is_there() -> None:
    block = encode_block("U8", memoryview(bytes(99)), None)
    assert block_length(memoryview(block + b"next")) == len(block)
    for content in (block[:-1], block[:17], b"", b"\1" + bytes(30)):
        with pytest.raises(BlockError):
            block_length(memoryview(content))


def test_a_decoded_block_may_lie_in_a_room_that_is_used_again() -> None:
    room = np.empty(BLOCK_BYTES, dtype=np.uint8)
    old = memoryview(bytes(64))
    for value in (b"\1", b"\2"):
        block = encode_block("U8", memoryview(value * 64), old)
        found = decode_block("U8", memoryview(block), old, 64, room)
        assert found == value * 64
        assert np.shares_memory(np.frombuffer(found, dtype=np.uint8), room)
