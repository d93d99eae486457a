"""torch's dtypes by the names that versions use (safetensors'), and those of settings."""

from __future__ import annotations

from typing import Final

import torch

DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
MODEL_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
"""By the names of model.dtype, model.compute and learner.dtype."""
DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
