"""The tensors of a version on this machine's disk, as an engine process reads them.

Those of a version that stands alone are views of the mapped file. Those of an adapter are the
base's, and each adapted one is computed when it is asked for, so that no second copy of the
model is ever in memory (`echo2.weights.adapter` has the formula).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from echo2.errors import WeightsError
from echo2.weights.adapter import LORA_A, LORA_B, adapted_layers, adapter_base
from echo2.weights.versions import StoredVersion, open_version
from echo2_workers.engine import StoredTensors, TensorBytes
from echo2_workers.engines.dtypes import DTYPES


def stored_tensors(folder: Path, manifest_digest: str) -> StoredTensors:
    """Views that outlive the opened files; a removal on disk does not disturb them.
    WeightsError when a file is not there, or an adapter does not fit its base."""
    with _opened(folder, manifest_digest) as stored:
        base = adapter_base(stored.manifest)
        tensors: dict[str, TensorBytes] = stored.tensors()
    if base is None:
        return StoredTensors(tensors, folder=folder, digest=manifest_digest)
    with _opened(folder, base.manifest_digest) as beneath:
        plain: dict[str, TensorBytes] = beneath.tensors()
    computed: dict[str, Callable[[], TensorBytes]] = {}
    for layer in adapted_layers(tensors):
        name = f"{layer}.weight"
        pair = tensors[layer + LORA_A], tensors[layer + LORA_B]
        problem = _pair_problem(plain.get(name), *pair)
        if problem:
            raise WeightsError(
                f"version {manifest_digest[:12]} does not fit its base "
                f"{base.manifest_digest[:12]}: {name} {problem}"
            )
        computed[name] = _Merged(plain[name], *pair, base.scale)
    return StoredTensors(plain, folder=folder, digest=manifest_digest, computed=computed)


@torch.no_grad()
def merged_weight(
    base_OI: torch.Tensor, a_RI: torch.Tensor, b_OR: torch.Tensor, scale: float
) -> torch.Tensor:
    """[O, I] base + scale * B A, computed in float32, in the base's dtype. Publisher and
    workers call this same function."""
    delta_OI = b_OR.float() @ a_RI.float()
    return (base_OI.float() + scale * delta_OI).to(base_OI.dtype)


def views(tensors: StoredTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors, read only; those that lie in the file as such without a copy."""
    for name in tensors:
        yield name, view(tensors[name])


def view(tensor: TensorBytes) -> torch.Tensor:
    dtype, shape, content = tensor
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        if not len(content):
            return torch.empty(shape, dtype=DTYPES[dtype])
        return torch.frombuffer(content, dtype=DTYPES[dtype]).view(shape)


class _Merged:
    def __init__(self, base: TensorBytes, a: TensorBytes, b: TensorBytes, scale: float) -> None:
        self._parts = base, a, b
        self._scale = scale

    def __call__(self) -> TensorBytes:
        base, a, b = (view(part) for part in self._parts)
        merged = merged_weight(base, a, b, self._scale).contiguous()
        content: Any = merged.reshape(-1).view(torch.uint8).numpy().data
        dtype, shape, _ = self._parts[0]
        return dtype, shape, content


def _pair_problem(base: TensorBytes | None, a: TensorBytes, b: TensorBytes) -> str:
    """Why A and B are no adapter of this tensor; "" if they are."""
    if base is None:
        return "is not in the base"
    shape, inner, outer = base[1], a[1], b[1]
    if len(shape) != 2 or len(inner) != 2 or len(outer) != 2:
        return f"has the shape {shape}, its adapter {inner} and {outer}; all need two dimensions"
    if (outer[0], inner[1]) != shape or outer[1] != inner[0]:
        return f"has the shape {shape}; its adapter's {outer} times {inner} is another"
    unknown = {part[0] for part in (base, a, b)} - set(DTYPES)
    return f"has a dtype that cannot be added to: {', '.join(sorted(unknown))}" if unknown else ""


def _opened(folder: Path, manifest_digest: str) -> StoredVersion:
    stored = open_version(folder, manifest_digest)
    if stored is None:
        raise WeightsError(f"version {manifest_digest[:12]} is not in {folder}: fetch it again")
    return stored
