"""The random states of a learner process, for a checkpoint: as tensors and JSON, never pickled."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Random states of torch (tensors), Python and numpy (JSON)."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        for index, cuda_state in enumerate(torch.cuda.get_rng_state_all()):
            tensors[f"cuda/{index}"] = cuda_state
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return tensors, {
        "python": [version, list(internal), gauss],
        "numpy": [
            str(name),
            np.asarray(keys).tolist(),
            int(position),
            int(has_gauss),
            float(cached),
        ],
    }


def restore_random_state(tensors: dict[str, Tensor], rng: dict[str, Any]) -> None:
    torch.set_rng_state(tensors["torch"])
    cuda = [value for key, value in sorted(tensors.items()) if key.startswith("cuda/")]
    if cuda and torch.cuda.is_available() and len(cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(cuda)
    version, internal, gauss = rng["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = rng["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
