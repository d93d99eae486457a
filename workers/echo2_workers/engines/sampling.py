"""From logits to one token for each row, with its behaviour logprob.

B rows, V vocabulary. All of a row's noise comes from its own seed and position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from echo2.errors import EngineError
from echo2_workers.engine import GenerateRequest
from echo2_workers.engines.noise import uniforms


def sample_tokens(
    logits_BV: torch.Tensor, requests: Sequence[GenerateRequest], counters: Sequence[int]
) -> tuple[list[int], list[float]]:
    """One token for each row, and its logprob after temperature (not after top-p).

    Temperature 0 takes the likeliest token, with its logprob at temperature 1. The noise
    of a row comes from its seed and its counter alone.
    """
    device = logits_BV.device
    temperature = np.asarray([request.sampling.temperature for request in requests], np.float32)
    greedy = temperature == 0.0
    divisor = torch.as_tensor(np.where(greedy, np.float32(1.0), temperature), device=device)
    logprobs_BV = torch.log_softmax(logits_BV / divisor[:, None], -1)
    if greedy.all():
        tokens_B = logprobs_BV.argmax(-1)
    else:
        noise = uniforms(
            np.asarray([request.seed for request in requests], np.uint64),
            np.asarray(counters, np.uint64),
        )
        top_p = torch.as_tensor([request.sampling.top_p for request in requests], device=device)
        tokens_B = _inverse_cdf(logprobs_BV, torch.as_tensor(noise, device=device), top_p)
        if greedy.any():
            chosen = torch.as_tensor(greedy, device=device)
            tokens_B = torch.where(chosen, logprobs_BV.argmax(-1), tokens_B)
    taken_B = logprobs_BV.gather(-1, tokens_B[:, None])[:, 0]
    if not bool(torch.isfinite(taken_B).all()):
        raise EngineError(
            "the model computes logprobs that are no numbers; are the published weights finite?"
        )
    return tokens_B.tolist(), taken_B.tolist()


def _inverse_cdf(
    logprobs_BV: torch.Tensor, noise_B: torch.Tensor, top_p_B: torch.Tensor
) -> torch.Tensor:
    """The token at which the cumulative probability passes the noise. With top-p, tokens
    are ordered by probability and the least likely ones beyond `top_p` are left out."""
    probabilities_BV = logprobs_BV.double().exp()
    order_BV: torch.Tensor | None = None
    if bool((top_p_B < 1.0).any()):
        probabilities_BV, order_BV = probabilities_BV.sort(dim=-1, descending=True, stable=True)
        before_BV = probabilities_BV.cumsum(-1) - probabilities_BV
        outside = before_BV >= top_p_B.double()[:, None]
        outside[:, 0] = False
        probabilities_BV = probabilities_BV.masked_fill(outside, 0.0)
    cumulative_BV = probabilities_BV.cumsum(-1)
    target_B1 = noise_B[:, None] * cumulative_BV[:, -1:]
    index_B1 = torch.searchsorted(cumulative_BV, target_B1, right=True)
    index_B1 = index_B1.clamp(max=probabilities_BV.shape[1] - 1)
    if order_BV is not None:
        index_B1 = order_BV.gather(-1, index_B1)
    return index_B1[:, 0]
