"""Safetensors files, read and written without the library, so that the base needs no more.

A file is 8 bytes (length of the header, little endian), the header (JSON: name -> dtype,
shape, [start, end) in the data; `__metadata__` maps text to text), then the data. Reading
is strict: bounded header, no name twice, known dtypes, the data covered exactly once and to
the end. What is read is mapped, not copied. What is written is whole or not there.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from echo2.core.manifest import (
    DTYPE_BYTES,
    NUM_BYTES_MAX,
    TENSORS_MAX,
    TensorSpec,
    tensor_problem,
)
from echo2.errors import WeightsError
from echo2.weights.files import aside, disk_errors, flush, sync_folder
from echo2.weights.versions import NamedTensor, StoredVersion, check_stop

HEADER_MAX_BYTES: Final = 100_000_000
"""The bound of the reference implementation."""
INDEX_NAME: Final = "model.safetensors.index.json"
_METADATA: Final = "__metadata__"
_PIECE_BYTES: Final = 8 << 20


def read_safetensors_folder(folder: Path) -> Iterator[NamedTensor]:
    """Tensors of a model folder, as `write_version` takes them, one mapped view at a time.

    Reads the files that `model.safetensors.index.json` names, and without one every
    `*.safetensors` file, in order of name, each in order of its data. WeightsError when a
    file is not strictly valid, a tensor is in two files, or the index names one that is
    in none.
    """
    placed = _weight_map(folder)
    paths = (
        sorted({folder / name for name in placed.values()})
        if placed is not None
        else sorted(folder.glob("*.safetensors"))
    )
    if not paths:
        raise WeightsError(
            f"{folder} has no *.safetensors file: save the model with safetensors first"
        )
    seen: dict[str, Path] = {}
    for path in paths:
        for tensor in read_safetensors(path):
            name = tensor[0]
            if name in seen:
                raise WeightsError(f"tensor {name!r} is in {seen[name]} and in {path}")
            seen[name] = path
            if placed is not None and placed.get(name) != path.name:
                raise WeightsError(
                    f"tensor {name!r} is in {path}; {INDEX_NAME} says {placed.get(name)}"
                )
            yield tensor
    lost = sorted(set(placed or ()) - seen.keys())
    if lost:
        raise WeightsError(
            f"{INDEX_NAME} of {folder} names {len(lost)} tensors that no file has: {lost[0]!r}"
        )


def read_safetensors(path: Path) -> Iterator[NamedTensor]:
    """Tensors of one file in order of its data; the views keep it mapped while they live."""
    with disk_errors(f"reading {path.name}", path.parent):
        handle = os.open(path, os.O_RDONLY)
        try:
            num_bytes = os.fstat(handle).st_size
            if num_bytes < 8:
                raise WeightsError(f"{path} has {num_bytes} bytes; a safetensors file has a header")
            content = memoryview(mmap.mmap(handle, 0, access=mmap.ACCESS_READ))
        finally:
            os.close(handle)
    (header_bytes,) = struct.unpack("<Q", content[:8])
    if header_bytes > min(HEADER_MAX_BYTES, num_bytes - 8):
        raise WeightsError(
            f"{path} says that its header has {header_bytes} bytes; the file has {num_bytes} "
            f"and at most {HEADER_MAX_BYTES} are allowed"
        )
    specs = _read_header(path, bytes(content[8 : 8 + header_bytes]), num_bytes - 8 - header_bytes)
    for spec in specs:
        start = 8 + header_bytes + spec.offset
        yield spec.name, spec.dtype, spec.shape, content[start : start + spec.num_bytes]


def write_safetensors(
    version: StoredVersion,
    path: Path,
    *,
    metadata: Mapping[str, str] | None = None,
    stop: threading.Event | None = None,
) -> None:
    """Write a version as one safetensors file, with its metadata and `metadata` over it.
    `stop` ends it with a WeightsError.

    Tensors with larger elements come first, so that each is aligned in the file (the
    format has no padding). Metadata gets "format": "pt", without which transformers
    refuses a file.
    """
    tensors = sorted(
        version.tensors().items(), key=lambda item: DTYPE_BYTES[item[1][0]], reverse=True
    )
    header: dict[str, Any] = {
        _METADATA: {"format": "pt", **version.manifest.metadata, **(metadata or {})}
    }
    end = 0
    for name, (dtype, shape, view) in tensors:
        header[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [end, end + len(view)],
        }
        end += len(view)
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    with disk_errors(f"writing {path.name}", path.parent), aside(path.parent) as (written, file):
        file.write(struct.pack("<Q", len(encoded)))
        file.write(encoded)
        for _, (_, _, view) in tensors:
            for start in range(0, len(view), _PIECE_BYTES):
                check_stop(stop)
                file.write(view[start : start + _PIECE_BYTES])
        flush(file)
        os.replace(written, path)
        sync_folder(path.parent)


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Tensor -> file name of a folder's index; None when it has none."""
    path = folder / INDEX_NAME
    if not path.exists():
        return None
    with disk_errors(f"reading {INDEX_NAME}", folder):
        index = _parse_json(path, path.read_bytes())
    placed = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(v, str) for v in placed.values()):
        raise WeightsError(f"{path} has no weight_map of names to files")
    for name in placed.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise WeightsError(
                f"{path} names the file {name[:200]!r}; "
                "only *.safetensors in its folder are allowed"
            )
    return placed


def _read_header(path: Path, encoded: bytes, data_bytes: int) -> list[TensorSpec]:
    """Tensors in order of their data, which they cover without overlap, gap or rest."""
    header = _parse_json(path, encoded)
    if not encoded.startswith(b"{") or not isinstance(header, dict):
        raise WeightsError(f"{path}: the header is not a JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise WeightsError(f"{path}: {_METADATA} does not map text to text")
    if len(header) > TENSORS_MAX:
        raise WeightsError(f"{path} has {len(header)} tensors; at most {TENSORS_MAX} are allowed")
    specs = [_spec(path, name, entry) for name, entry in header.items()]
    specs.sort(key=lambda spec: (spec.offset, spec.num_bytes))
    end = 0
    for spec in specs:
        if spec.offset != end:
            raise WeightsError(
                f"{path}: tensor {spec.name!r} begins at {spec.offset}; the one before it ends "
                f"at {end}"
            )
        end = spec.offset + spec.num_bytes
    if end != data_bytes:
        raise WeightsError(f"{path}: the tensors have {end} bytes; the file has {data_bytes}")
    return specs


def _spec(path: Path, name: str, entry: Any) -> TensorSpec:
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise WeightsError(f"{path}: tensor {name[:200]!r} must have dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not _are_sizes(shape) or not _are_sizes(offsets):
        raise WeightsError(f"{path}: tensor {name[:200]!r} has fields of wrong types")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightsError(f"{path}: tensor {name[:200]!r} has data_offsets {offsets[:3]}")
    spec = TensorSpec(name, dtype, tuple(shape), offsets[0], offsets[1] - offsets[0])
    problem = tensor_problem("weights", spec)
    if problem is not None:
        raise WeightsError(f"{path}: {problem}")
    return spec


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size <= NUM_BYTES_MAX for size in value
    )


def _parse_json(path: Path, encoded: bytes) -> Any:
    """JSON without a key twice (the last would win silently)."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(items)
        if len(found) != len(items):
            raise ValueError("a key is there twice")
        return found

    try:
        return json.loads(encoded, object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: not valid JSON: {error}") from error
