"""Safetensors files that together hold named tensors, whole or in rows: read by the row.

A rank's file holds its rows of each tensor. Where they begin stands in the file's metadata,
in the words of PyTorch's distributed checkpoint (`DCP_SHARDING_INFO`), whose safetensors
reader reads these files too; a file without it holds whole tensors. So what any number of
ranks wrote is read by any other number, each reading just its own rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from echo2.errors import LearnerError
from echo2_learner.shards import StoredTensor, is_sharded, local, local_rows

_SHARDING: Final = "DCP_SHARDING_INFO"
_INDEX: Final = "model.safetensors.index.json"
_DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class _Piece:
    path: Path
    start: int
    """First row."""
    shape: tuple[int, ...]


class TensorFiles(Mapping[str, StoredTensor]):
    """The tensors of some files by name. LearnerError when rows are missing or there twice,
    OSError or SafetensorError when a file cannot be read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        pieces: dict[str, list[_Piece]] = {}
        dtypes: dict[str, torch.dtype] = {}
        for path in paths:
            with safe_open(path, framework="pt") as file:
                told = (file.metadata() or {}).get(_SHARDING)
                offsets = {} if told is None else json.loads(told)
                for name in file.keys():  # noqa: SIM118  no mapping
                    part = file.get_slice(name)
                    shape = tuple(int(size) for size in part.get_shape())
                    rows = offsets[name]["saved_offsets"] if told is not None else [0]
                    start = int(rows[0]) if shape else 0
                    pieces.setdefault(name, []).append(_Piece(path, start, shape))
                    dtypes[name] = _DTYPES[part.get_dtype()]
        self._tensors = {
            name: _stored(name, sorted(found, key=lambda piece: piece.start), dtypes[name])
            for name, found in pieces.items()
        }

    @classmethod
    def of_folder(cls, folder: Path) -> TensorFiles | None:
        """Those of a Hugging Face folder; None when it has no safetensors files."""
        index = folder / _INDEX
        if index.is_file():
            weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return cls([folder / name for name in sorted(set(weights.values()))])
        paths = sorted(folder.glob("model*.safetensors"))
        return cls(paths) if paths else None

    def __getitem__(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def save_rows(tensors: Mapping[str, Tensor], path: Path, *, is_lead: bool) -> None:
    """Write this rank's rows; what is not sharded is written by the lead alone."""
    rows: dict[str, Tensor] = {}
    offsets: dict[str, dict[str, list[int]]] = {}
    for name, tensor in tensors.items():
        if not is_sharded(tensor):
            if is_lead:
                rows[name] = tensor.detach().cpu().contiguous()
                offsets[name] = {"saved_offsets": [0] * tensor.ndim}
            continue
        start, stop = local_rows(tensor)
        if start < stop:
            rows[name] = local(tensor.detach()).cpu().contiguous()
            offsets[name] = {"saved_offsets": [start, *[0] * (tensor.ndim - 1)]}
    save_file(rows, path, metadata={_SHARDING: json.dumps(offsets), "DCP_VERSION": "1.0"})


def _stored(name: str, pieces: Sequence[_Piece], dtype: torch.dtype) -> StoredTensor:
    first = pieces[0].shape
    end = 0
    for piece in pieces:
        if piece.shape[1:] != first[1:] or piece.start != end or (not first and len(pieces) > 1):
            raise LearnerError(
                f"{piece.path}: the rows of {name} from {piece.start} on, of the shape "
                f"{piece.shape}, do not go on where {end} rows of {first} ended"
            )
        end += piece.shape[0] if piece.shape else 0

    def read(start: int, stop: int) -> Tensor:
        if not first:
            with safe_open(pieces[0].path, framework="pt") as file:
                return file.get_tensor(name)  # type: ignore[no-any-return]
        found = torch.empty((max(0, stop - start), *first[1:]), dtype=dtype)
        for piece in pieces:
            low = max(start, piece.start)
            high = min(stop, piece.start + piece.shape[0])
            if low < high:
                with safe_open(piece.path, framework="pt") as file:
                    part = file.get_slice(name)[low - piece.start : high - piece.start]
                found[low - start : high - start] = part
        return found

    return StoredTensor((end, *first[1:]) if first else (), dtype, read)
