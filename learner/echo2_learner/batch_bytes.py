"""A training batch as bytes and back, for the other ranks: MessagePack and raw arrays.

Every rank gets the whole batch, so that each plans the same micro-batches and takes its own.
"""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any, Final

import numpy as np

from echo2 import wire
from echo2.errors import LearnerError
from echo2.types import Version
from echo2_learner.batch import TrainingBatch, Trajectory

HEADER_BYTES_MAX: Final = 1 << 30
_LENGTH: Final = struct.Struct("<Q")


def batch_to_bytes(batch: TrainingBatch) -> bytearray:
    """8 bytes (length of the header), the header, then the arrays one after the other."""
    arrays: list[Any] = []

    def plain(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(np.ascontiguousarray(value))
            return [value.dtype.str, list(value.shape)]
        return value

    header = wire.pack(
        [
            _plain_fields(batch),
            [[version.incarnation, version.step] for version in batch.versions],
            [
                [{f.name: plain(getattr(t, f.name)) for f in fields(t)} for t in group]
                for group in batch.groups
            ],
        ]
    )
    data = bytearray(_LENGTH.pack(len(header)))
    data += header
    for array in arrays:
        data += array.tobytes()
    return data


def batch_from_bytes(data: bytes | bytearray) -> TrainingBatch:
    """What `batch_to_bytes` made; the arrays are views of `data`."""
    (length,) = _LENGTH.unpack_from(data)
    header = bytes(data[_LENGTH.size : _LENGTH.size + length])
    plain, versions, groups = wire.unpack(header, max_bytes=HEADER_BYTES_MAX)
    position = _LENGTH.size + length

    def value(packed: Any) -> Any:
        nonlocal position
        if not isinstance(packed, list):
            return packed
        dtype, shape = np.dtype(packed[0]), tuple(packed[1])
        count = int(np.prod(shape))
        array = np.frombuffer(data, dtype, count, position).reshape(shape)
        position += count * dtype.itemsize
        return array

    made = TrainingBatch(
        versions=tuple(Version(*version) for version in versions),
        groups=tuple(
            tuple(Trajectory(**{name: value(item) for name, item in t.items()}) for t in group)
            for group in groups
        ),
        **plain,
    )
    if position != len(data):
        raise LearnerError(
            f"a batch from rank 0 has {len(data)} bytes, and its header tells of {position}; all "
            "ranks must run the same echo2"
        )
    return made


def _plain_fields(batch: TrainingBatch) -> dict[str, Any]:
    names = {f.name for f in fields(batch)} - {"versions", "groups"}
    return {name: getattr(batch, name) for name in sorted(names)}
