"""The frames of a group result, checked where they arrive: the learner trains on them as
they are, so one that lies about its mask or holds a number that is none would end the learner.

Pure; what follows from a problem is decided by the caller.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from echo2.messages import GroupResult

LOGPROB_MIN: Final = -700.0
"""A token of a lower logprob is never sampled, and exp of its negative would overflow."""
LOGPROB_MAX: Final = 0.01
"""Above 0 by rounding only."""
_NEGATIVE: Final = 1 << 31
"""As unsigned numbers negative token ids begin here."""


def frames_problem(result: GroupResult, *, vocab_size: int = 0) -> str:
    """Why the group cannot be trained, whatever its versions and rewards; "" when it can.

    The mask must be 0 or 1, 1 only within the spans and as often as the header says;
    behaviour logprobs finite numbers that a sampled token can have; token ids in
    [0, vocab_size), where that is known (not 0).
    """
    mask = np.frombuffer(result.loss_mask, np.uint8)
    logprobs = np.frombuffer(result.logprobs, np.dtype("<f4"))
    if mask.max() > 1:
        return f"loss_mask holds {mask.max()}; it is 1 where the policy sampled, else 0"
    if not (logprobs.min() >= LOGPROB_MIN and logprobs.max() <= LOGPROB_MAX):  # or one is NaN
        in_range = (logprobs >= LOGPROB_MIN) & (logprobs <= LOGPROB_MAX)
        wrong = logprobs[int(np.argmin(in_range))]
        return f"a behaviour logprob is {wrong}; {LOGPROB_MIN:g} to {LOGPROB_MAX:g} are allowed"
    token_ids = np.frombuffer(result.token_ids, np.dtype("<i4"))
    if token_ids.view("<u4").max() >= (vocab_size or _NEGATIVE):  # in one pass
        if token_ids.min() < 0:
            return "a token id is negative"
        return f"a token id is {token_ids.max()}; the policy's vocabulary has {vocab_size}"
    is_sampled = mask.view(np.bool_)
    if _agrees(result, is_sampled):
        return ""
    start = 0
    for index, header in enumerate(result.trajectories):
        own = is_sampled[start : start + header.length]
        sampled = int(own.sum())
        named = sum(int(own[span.start : span.end].sum()) for span in header.spans)
        if sampled != header.num_sampled or named != sampled:
            return (
                f"trajectory {index}: the mask has {sampled} sampled tokens, {named} of them in "
                f"spans, and the header says {header.num_sampled}"
            )
        start += header.length
    raise AssertionError("some trajectory disagrees with its header")


def _agrees(result: GroupResult, is_sampled: npt.NDArray[np.bool_]) -> bool:
    """Whether the mask and all headers say the same. Spans do not overlap (the message was
    checked), so that what they hold in all is all that was sampled only if none is outside."""
    count, find_from = np.count_nonzero, result.loss_mask.find
    start = num_named = 0
    for header in result.trajectories:
        named = 0
        for span in header.spans:
            first, last = start + span.start, start + span.end
            if find_from(0, first, last) < 0:  # all of it, mostly; to count costs more
                named += last - first
            else:
                named += int(count(is_sampled[first:last]))
        if named != header.num_sampled:
            return False
        num_named += named
        start += header.length
    return num_named == int(count(is_sampled))
