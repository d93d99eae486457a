"""How far an honest worker's logprobs may be from the learner's, by what its engine computes in.

One table for the canary (after an install, on the probe) and for the audit (on sampled text).
"""

from __future__ import annotations

from typing import Final

TOLERANCES: Final = {
    "float32": 1e-4,
    "bfloat16": 5e-2,
    "fp8": 1e-1,
    "int8": 1e-1,
    "int4": 3e-1,
    "none": float("inf"),
}
"""Largest mean |logprob difference| in nats. A stale head or a wrong tensor is off by more
than 1; "none" is an engine without a model."""
