"""Do the installed weights compute what the publisher's did?

The publisher sends logprobs of a few probe sequences; after every install the engine scores
the same tokens, and the mean absolute difference must stay below what the worker's precision
explains. It catches what digests cannot: a stale tied head, a wrong dtype, a broken kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from echo2.core.precision import TOLERANCES
from echo2.errors import WeightsError
from echo2_workers.engine import Logprobs, Tokens


@dataclass(frozen=True, slots=True)
class Probe:
    """Sequences [N, L] and the publisher's logprobs [N, L] of them; column 0 is given."""

    token_ids: Tokens
    logprobs: Logprobs


def read_probe(length: int, tokens: bytes, logprobs: bytes) -> Probe | None:
    """The probe of an announcement; None when it has none. Raises WeightsError when the
    frames do not hold whole sequences of `length` tokens."""
    if length == 0:
        return None
    row_bytes = 4 * length
    if len(tokens) != len(logprobs) or len(tokens) % row_bytes or not tokens:
        raise WeightsError(
            f"a probe of length {length} needs frames of equal size and a multiple of "
            f"{row_bytes} bytes; they have {len(tokens)} and {len(logprobs)}"
        )
    return Probe(
        np.frombuffer(tokens, np.int32).reshape(-1, length),
        np.frombuffer(logprobs, np.float32).reshape(-1, length),
    )


def mean_difference(probe: Probe, scored: Logprobs) -> float | None:
    """Mean |logprob difference| over all but the given first tokens; infinite when either
    side has a value that is no number; None when there is nothing to compare."""
    if probe.logprobs.shape[1] < 2:
        return None
    difference = np.abs(scored[:, 1:].astype(np.float64) - probe.logprobs[:, 1:])
    mean = float(difference.mean())
    return mean if np.isfinite(mean) else float("inf")


def tolerance_of(precision: str, configured: float | None) -> float:
    """What the worker allows: worker.canary_max_diff, or that of its precision class."""
    return configured if configured is not None else TOLERANCES[precision]


def canary_problem(difference: float | None, tolerance: float) -> str:
    """Why a version may not serve; "" when it may."""
    if difference is None or difference <= tolerance:
        return ""
    return (
        f"mean |logprob difference| on the probe is {difference:.3g}; at most {tolerance:g} is "
        "allowed (worker.canary_max_diff). The engine does not compute what the publisher did: "
        "compare model.dtype and the versions of torch and of the engine on both sides"
    )
