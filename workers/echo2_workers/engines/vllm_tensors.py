"""Which tensors a version of this model has, told from its configuration alone.

vLLM joins and shards weights, so its own parameters do not say what a published version
holds. The published names are those of transformers' model of the same configuration; it is
built without memory ("meta" tensors).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.errors import EngineError
from echo2_workers.engine import Tensors, described
from echo2_workers.engines.dtypes import DTYPE_NAMES, DTYPES

SHOWN_MAX: Final = 4

Expected = dict[str, tuple[str, tuple[int, ...]]]
"""name -> (dtype in safetensors' names, shape)."""


def expected_tensors(assets: Path, dtype: torch.dtype) -> Expected:
    """The tensors of a version; tied ones appear once, as they are published."""
    config = AutoConfig.from_pretrained(assets, local_files_only=True)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.tie_weights()
    expected: Expected = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            expected[name] = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
    return expected


def check_tensors(tensors: Tensors, expected: Expected) -> None:
    """Raises EngineError unless `tensors` are exactly those that the model needs."""
    problems = []
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - expected.keys())
    if missing:
        problems.append(f"missing are {_some(missing)}")
    if unexpected:
        problems.append(f"unexpected are {_some(unexpected)} (tied tensors are not published)")
    for name in sorted(expected.keys() & tensors.keys()):
        dtype, shape, content = described(tensors, name)
        if (dtype, tuple(shape)) != expected[name]:
            wanted = expected[name]
            problems.append(
                f"{name} is {dtype} {tuple(shape)}, the model has {wanted[0]} {wanted[1]}"
            )
        elif memoryview(content).nbytes != DTYPES[dtype].itemsize * _count(shape):
            problems.append(f"{name} has {memoryview(content).nbytes} bytes, too few or too many")
    if problems:
        raise EngineError(
            f"the version does not fit the model: {_some(problems)}; is model.dtype the same at "
            "the publisher and here, and the model too?"
        )


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:SHOWN_MAX])
    more = len(names) - SHOWN_MAX
    return shown if more <= 0 else f"{shown} and {more} more"
