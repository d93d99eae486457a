"""The layout of a version's bytes: what a manifest may say, decided without any I/O.

A version is one flat byte space. Tensors lie in it in order, each at the first multiple of
`ALIGNMENT_BYTES` after the one before it, with zero bytes between, so that a mapped file
can be viewed as tensors in place. The space is cut into chunks of `chunk_bytes`; only the
last one may be shorter. Nothing else is left open: a list of (name, dtype, shape) has
exactly one layout, and `layout_problem` compares a manifest that came from elsewhere with
it before anything is allocated.

Digests and encoding belong to `echo2.weights.snapshot`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["weights", "assets", "adapter", "delta"]
KINDS: Final = ("weights", "assets", "adapter", "delta")

DELTA_HEADER: Final = "__metadata__"
"""The first tensor of a delta: a name that no tensor of weights may have."""

ALIGNMENT_BYTES: Final = 64
"""A cache line; at least the size of every dtype, as views of a mapped file need."""
CHUNK_MIN_BYTES: Final = 64
NUM_BYTES_MAX: Final = 1 << 44
TENSORS_MAX: Final = 1 << 18
NAME_MAX_CHARACTERS: Final = 512
FILE_NAME_MAX_BYTES: Final = 240
DIMENSIONS_MAX: Final = 16

DTYPE_BYTES: Final[dict[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
"""Size of one element by the name that the safetensors format gives its dtype."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a version: bytes [offset, offset + num_bytes) of its byte space."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


def aligned(offset: int) -> int:
    """The first place at or after `offset` where a tensor may begin."""
    return -(-offset // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a dense tensor; KeyError for an unknown dtype."""
    return math.prod(shape) * DTYPE_BYTES[dtype]


def num_chunks(num_bytes: int, chunk_bytes: int) -> int:
    return -(-num_bytes // chunk_bytes)


def chunk_range(index: int, *, num_bytes: int, chunk_bytes: int) -> tuple[int, int]:
    """[start, end) of a chunk in the byte space."""
    start = index * chunk_bytes
    return start, min(start + chunk_bytes, num_bytes)


def padding_ranges(tensors: Iterable[TensorSpec]) -> list[tuple[int, int]]:
    """The [start, end) between tensors, which must hold zeros."""
    found = []
    end = 0
    for tensor in tensors:
        if tensor.offset > end:
            found.append((end, tensor.offset))
        end = tensor.offset + tensor.num_bytes
    return found


def layout_problem(
    kind: str, tensors: Sequence[TensorSpec], *, num_bytes: int, chunk_bytes: int, num_digests: int
) -> str | None:
    """Why this is not the layout of a version; None if it is."""
    if kind not in KINDS:
        return f"kind {kind[:32]!r} is unknown; allowed are {', '.join(KINDS)}"
    if len(tensors) > TENSORS_MAX:
        return f"{len(tensors)} tensors are listed; at most {TENSORS_MAX} are allowed"
    names: set[str] = set()
    end = 0
    for tensor in tensors:
        problem = tensor_problem(kind, tensor)
        if problem is not None:
            return problem
        if tensor.name in names:
            return f"tensor {tensor.name!r} is listed twice"
        names.add(tensor.name)
        if tensor.offset != aligned(end):
            return (
                f"tensor {tensor.name!r} begins at {tensor.offset}; the one before it ends at "
                f"{end}, so it must begin at {aligned(end)}"
            )
        end = tensor.offset + tensor.num_bytes
        if end > NUM_BYTES_MAX:
            return f"tensor {tensor.name!r} ends at {end}; at most {NUM_BYTES_MAX} are allowed"
    if num_bytes != end:
        return f"num_bytes is {num_bytes}; the tensors end at {end}"
    expected = num_chunks(num_bytes, chunk_bytes)
    if num_digests != expected:
        return f"{num_digests} chunk digests are listed; {num_bytes} bytes need {expected}"
    return None


def tensor_problem(kind: str, tensor: TensorSpec) -> str | None:
    """Why this tensor cannot be, wherever it begins; None if it can."""
    problem = name_problem(kind, tensor.name)
    if problem is not None:
        return problem
    if tensor.dtype not in DTYPE_BYTES:
        allowed = ", ".join(DTYPE_BYTES)
        return f"tensor {tensor.name!r} has unknown dtype {tensor.dtype[:32]!r}; allowed: {allowed}"
    if len(tensor.shape) > DIMENSIONS_MAX:
        return (
            f"tensor {tensor.name!r} has {len(tensor.shape)} dimensions; "
            f"at most {DIMENSIONS_MAX} are allowed"
        )
    if any(not 0 <= size <= NUM_BYTES_MAX for size in tensor.shape):
        return f"tensor {tensor.name!r} has shape {list(tensor.shape)}; a size is out of bounds"
    if kind == "assets" and (tensor.dtype != "U8" or len(tensor.shape) != 1):
        return (
            f"asset {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}; "
            "a file is U8 with one dimension"
        )
    if kind == "delta" and (tensor.dtype != "U8" or len(tensor.shape) != 1):
        return (
            f"delta of {tensor.name!r} is {tensor.dtype} {list(tensor.shape)}; "
            "what is encoded is U8 with one dimension"
        )
    needed = tensor_bytes(tensor.dtype, tensor.shape)
    if tensor.num_bytes != needed:
        return (
            f"tensor {tensor.name!r} has {tensor.num_bytes} bytes; {tensor.dtype} "
            f"{list(tensor.shape)} needs {needed}"
        )
    return None


def name_problem(kind: str, name: str) -> str | None:
    """Why a tensor (or, for assets, a file) may not be called so; None if it may."""
    if not 1 <= len(name) <= NAME_MAX_CHARACTERS:
        return (
            f"a tensor's name has {len(name)} characters; "
            f"1 to {NAME_MAX_CHARACTERS} are allowed: {name[:64]!r}"
        )
    if not name.isprintable():
        return f"tensor name {name!r} has characters that do not print"
    if kind != "assets":
        # The safetensors header keeps its own metadata under this key.
        is_reserved = name == DELTA_HEADER and kind != "delta"
        return f"tensor name {name!r} is reserved" if is_reserved else None
    if "/" in name or "\\" in name or name.startswith("."):
        return f"asset {name!r} is not a plain file name: no slash, no leading dot"
    if len(name.encode()) > FILE_NAME_MAX_BYTES:
        return f"asset {name!r} has a name above {FILE_NAME_MAX_BYTES} bytes"
    return None
