"""Versions that hold an adapter of low rank alone, and name the version that it goes onto.

    weights of W = base W + scale * (lora_B.weight @ lora_A.weight), in float32, then W's dtype

The base is a version of kind weights: published once, fetched once, kept while any adapter
that names it is. Whoever installs an adapter computes W tensor by tensor; whoever only carries
versions needs to know nothing of it. Tensors are named as in the plain model, with
`.lora_A.weight` [rank, inputs] and `.lora_B.weight` [outputs, rank] in place of `.weight`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from echo2.errors import WeightsError
from echo2.weights.snapshot import Manifest

BASE_KEY: Final = "base"
SCALE_KEY: Final = "scale"
LORA_A: Final = ".lora_A.weight"
LORA_B: Final = ".lora_B.weight"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class AdapterBase:
    """`manifest_digest` names the version beneath; `scale` is alpha / rank."""

    manifest_digest: str
    scale: float

    def metadata(self) -> dict[str, str]:
        return {BASE_KEY: self.manifest_digest, SCALE_KEY: repr(self.scale)}


def adapter_base(manifest: Manifest) -> AdapterBase | None:
    """What the version goes onto; None when it stands alone. WeightsError when an adapter does
    not say it."""
    if manifest.kind != "adapter":
        return None
    name = manifest.manifest_digest[:12]
    digest = manifest.metadata.get(BASE_KEY, "")
    if not _DIGEST.fullmatch(digest):
        raise WeightsError(
            f"version {name} is an adapter and names no base ({digest[:80]!r}; expected are 64 "
            "hexadecimal digits); publish it again"
        )
    text = manifest.metadata.get(SCALE_KEY, "")
    try:
        scale = float(text)
    except ValueError:
        scale = math.nan
    if not math.isfinite(scale):
        raise WeightsError(
            f"version {name} is an adapter with the scale {text[:80]!r}; a finite number is "
            "allowed; publish it again"
        )
    return AdapterBase(digest, scale)


def adapted_layers(names: Mapping[str, object]) -> list[str]:
    """Names of the layers that the tensors `names` of an adapter change, in order. WeightsError
    when they are no pairs."""
    layers = [name.removesuffix(LORA_A) for name in names if name.endswith(LORA_A)]
    expected = {layer + suffix for layer in layers for suffix in (LORA_A, LORA_B)}
    odd = sorted(expected ^ set(names))
    if odd:
        raise WeightsError(
            f"an adapter holds pairs of {LORA_A[1:]} and {LORA_B[1:]}; without a partner, or of "
            f"another kind: {', '.join(odd[:4])}"
        )
    return layers
