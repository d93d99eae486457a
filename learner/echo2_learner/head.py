"""From tokens to logprobs without a whole [tokens, vocabulary] tensor.

Promise: no more than `LOGIT_CHUNK` logits exist at once, forward and backward, and none for a
token whose successor is not in the loss. The decoder's body runs to its hidden states; then
for one chunk of positions after the other: output layer, log-softmax, the chosen tokens and
the entropy. The way back computes the logits of a chunk again, unless one chunk holds all.

That is possible where the logits are the output layer's product with the body's last hidden
state, and nothing else (`has_plain_head` tries it out). For models that scale or cap their
logits the whole forward runs, and only then the positions are chosen.

Letters: N tokens in the loss, U positions whose logits give them, H hidden size, V vocabulary,
R rows, L tokens of a row.
"""

# ruff: noqa: N815  shape letters in field names
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from echo2_learner.packing import Ints, PackedRows

LOGIT_CHUNK: Final = 1 << 25
"""Logits of one chunk: 128 MiB in float32."""

_PROBE: Final = (0, 1, 1, 0)


@dataclass(frozen=True, slots=True)
class Rows:
    """`PackedRows` as tensors on the model's device; `attention_R1LL` is what is added to
    attention scores. `contexts` is `context_N` on the host, for cutting chunks."""

    token_ids_RL: Tensor
    position_ids_RL: Tensor
    attention_R1LL: Tensor | None
    context_U: Tensor
    context_N: Tensor
    target_N: Tensor
    contexts: Ints

    @classmethod
    def of(cls, rows: PackedRows, *, device: torch.device, dtype: torch.dtype) -> Rows:
        def tensor(values: Ints) -> Tensor:
            return torch.from_numpy(values).to(device, non_blocking=True)

        attention = None
        if rows.attention_RLL is not None:
            seen = torch.from_numpy(rows.attention_RLL).to(device, non_blocking=True)[:, None]
            attention = torch.zeros(seen.shape, dtype=dtype, device=device)
            attention.masked_fill_(~seen, torch.finfo(dtype).min)
        return cls(
            token_ids_RL=tensor(rows.token_ids_RL),
            position_ids_RL=tensor(rows.position_ids_RL),
            attention_R1LL=attention,
            context_U=tensor(rows.context_U),
            context_N=tensor(rows.context_N),
            target_N=tensor(rows.target_N),
            contexts=rows.context_N,
        )


class TokenLogprobs(nn.Module):
    """All forward passes of a policy go through this module, so that it can be the root of a
    sharded model: embedding, last norm and output layer are used within its forward."""

    def __init__(self, causal_lm: nn.Module) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.is_chunked: bool | None = None
        """Whether the head is a plain one; found out in the first forward pass."""
        self.logit_chunk = LOGIT_CHUNK

    def forward(
        self, rows: Rows, *, temperature: float, noise_UV: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """([N] logprob of each token in the loss, [N] entropy in nats of what it was drawn
        from), in the order of `rows.target_N`. The entropy carries no gradient.

        With Gumbel noise `noise_UV`: ([U] tokens drawn with it at `temperature`, [U] their
        logprobs) instead; for a few positions only, as their logits are there all at once.
        """
        asked = {
            "input_ids": rows.token_ids_RL,
            "attention_mask": rows.attention_R1LL,
            "position_ids": rows.position_ids_RL,
            "use_cache": False,
        }
        if self.is_chunked is None:
            self.is_chunked = has_plain_head(self.causal_lm, rows.token_ids_RL.device)
        if not self.is_chunked:
            logits_RLV: Tensor = self.causal_lm(**asked).logits
            if noise_UV is not None:
                logits_UV = logits_RLV.flatten(0, 1)[rows.context_U]
                logits_UV = logits_UV.to(_at_least_float(logits_UV)) / temperature
                return _drawn(torch.log_softmax(logits_UV, dim=-1), noise_UV)
            return _chosen(logits_RLV.flatten(0, 1)[rows.context_U], rows, temperature)
        body, head = _parts(self.causal_lm)
        hidden_RLH: Tensor = body(**asked)[0]
        hidden_UH = hidden_RLH.flatten(0, 1)[rows.context_U]
        if noise_UV is not None:
            return _drawn(_log_softmax(hidden_UH, head.weight, head.bias, temperature), noise_UV)
        found: tuple[Tensor, Tensor] = ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
            hidden_UH,
            head.weight,
            head.bias,
            rows.context_N,
            rows.target_N,
            rows.contexts,
            temperature,
            max(1, self.logit_chunk // head.weight.shape[0]),
        )
        return found


class ChunkedLogprobs(torch.autograd.Function):
    """log_softmax((h W^T + b) / temperature)[target], and the entropy, a chunk at a time.

    With p the softmax and g_n the gradient of token n, which was drawn at position u:
    d logits_u = Σ_n∈u g_n (onehot(target_n) - p_u) / temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_UH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        context_N: Tensor,
        target_N: Tensor,
        contexts: Ints,
        temperature: float,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        num_positions = hidden_UH.shape[0]
        dtype = _at_least_float(hidden_UH)
        logprobs_N = torch.empty(len(contexts), dtype=dtype, device=hidden_UH.device)
        entropy_N = torch.empty_like(logprobs_N)
        kept: list[Tensor] = []
        for (low, high), (first, last) in _chunks(num_positions, contexts, chunk):
            logits_cV = _log_softmax(hidden_UH[low:high], weight_VH, bias_V, temperature)
            own_n = context_N[first:last] - low
            logprobs_N[first:last] = logits_cV[own_n, target_N[first:last]]
            p_cV = logits_cV.exp()
            # Where a model rules a token out, 0 * -inf would be nan.
            logits_cV.clamp_(min=torch.finfo(dtype).min)
            entropy_c = -torch.linalg.vecdot(p_cV, logits_cV)
            entropy_N[first:last] = entropy_c[own_n]
            if num_positions <= chunk:
                kept = [p_cV]
        ctx.save_for_backward(hidden_UH, weight_VH, bias_V, context_N, target_N, *kept)
        ctx.contexts, ctx.temperature, ctx.chunk = contexts, temperature, chunk
        ctx.mark_non_differentiable(entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden_UH, weight_VH, bias_V, context_N, target_N, *kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_N = grad_N / ctx.temperature
        grad_UH = torch.empty_like(hidden_UH) if needs_hidden else None
        # Sums over chunks are kept in the precision of the logits.
        grad_VH = torch.zeros_like(weight_VH, dtype=grad_N.dtype) if needs_weight else None
        grad_V = torch.zeros_like(bias_V, dtype=grad_N.dtype) if needs_bias else None
        num_positions = hidden_UH.shape[0]
        for (low, high), (first, last) in _chunks(num_positions, ctx.contexts, ctx.chunk):
            p_cV = (
                kept[0]
                if kept
                else _log_softmax(hidden_UH[low:high], weight_VH, bias_V, ctx.temperature).exp_()
            )
            own_n = context_N[first:last] - low
            sums_c = grad_N.new_zeros(high - low).index_add_(0, own_n, grad_N[first:last])
            grad_cV = p_cV * -sums_c[:, None]
            # Flat, because that adds in a fixed order: a resumed run goes on bit by bit.
            chosen_n = own_n * grad_cV.shape[1] + target_N[first:last]
            grad_cV.view(-1).index_add_(0, chosen_n, grad_N[first:last])
            if grad_V is not None:
                grad_V += grad_cV.sum(0)
            grad_cV = grad_cV.to(weight_VH.dtype)
            if grad_UH is not None:
                torch.mm(grad_cV, weight_VH, out=grad_UH[low:high])
            if grad_VH is not None:
                if grad_VH.dtype == grad_cV.dtype:
                    grad_VH.addmm_(grad_cV.T, hidden_UH[low:high])
                else:
                    grad_VH += grad_cV.T @ hidden_UH[low:high]
        return (
            grad_UH,
            None if grad_VH is None else grad_VH.to(weight_VH.dtype),
            None if grad_V is None or bias_V is None else grad_V.to(bias_V.dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _log_softmax(
    hidden_cH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, temperature: float
) -> Tensor:
    logits_cV = _exact_logits(hidden_cH, weight_VH, bias_V)
    if temperature != 1.0:
        logits_cV.div_(temperature)
    return torch.log_softmax(logits_cV, dim=-1)


def _exact_logits(hidden_cH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    """In float32 at least, whatever the layers compute in, as the engines do: a bfloat16 logit
    of 20 is rounded to a sixteenth, which alone would make 0.02 nats of mismatch."""
    dtype = _at_least_float(hidden_cH)
    if hidden_cH.dtype == dtype:
        return nn.functional.linear(hidden_cH, weight_VH, bias_V)
    if hidden_cH.is_cuda:  # no float32 copy of the weight
        logits_cV = torch.mm(hidden_cH, weight_VH.t(), out_dtype=dtype)
    else:
        logits_cV = nn.functional.linear(hidden_cH.to(dtype), weight_VH.to(dtype))
    return logits_cV if bias_V is None else logits_cV.add_(bias_V)


def _drawn(logprobs_UV: Tensor, noise_UV: Tensor) -> tuple[Tensor, Tensor]:
    """The Gumbel-max trick: argmax(log p + noise) is drawn from p."""
    tokens_U = (logprobs_UV + noise_UV).argmax(-1)
    return tokens_U, logprobs_UV.gather(-1, tokens_U[:, None])[:, 0]


def _chosen(logits_UV: Tensor, rows: Rows, temperature: float) -> tuple[Tensor, Tensor]:
    """What `ChunkedLogprobs` gives, from logits that are there."""
    logits_UV = logits_UV.to(_at_least_float(logits_UV)) / temperature
    all_UV = torch.log_softmax(logits_UV, dim=-1)
    with torch.no_grad():
        # entr is 0 at 0, also where a model rules a token out with a logit of -inf.
        entropy_U = torch.special.entr(all_UV.exp()).sum(-1)
    return all_UV[rows.context_N, rows.target_N], entropy_U[rows.context_N]


def _chunks(
    num_positions: int, contexts: Ints, chunk: int
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(positions from, to), (tokens in the loss from, to) of each chunk."""
    found = []
    for low in range(0, num_positions, chunk):
        high = min(low + chunk, num_positions)
        first, last = np.searchsorted(contexts, [low, high])
        found.append(((low, high), (int(first), int(last))))
    return found


def _parts(causal_lm: nn.Module) -> tuple[nn.Module, nn.Linear]:
    """Body and output layer of a causal language model."""
    model: Any = causal_lm
    return model.get_decoder(), model.get_output_embeddings()


@torch.no_grad()
def has_plain_head(causal_lm: nn.Module, device: torch.device) -> bool:
    """Whether the output layer's product with the body's last hidden state is the logits, to
    the last bit, on a few tokens."""
    try:
        body, head = _parts(causal_lm)
    except (AttributeError, NotImplementedError):
        return False
    if body is causal_lm or type(head) is not nn.Linear:
        return False
    token_ids_RL = torch.tensor([_PROBE], device=device)
    hidden_RLH = body(input_ids=token_ids_RL, use_cache=False)[0]
    if not isinstance(hidden_RLH, Tensor) or hidden_RLH.shape[-1] != head.weight.shape[1]:
        return False
    return torch.equal(head(hidden_RLH), causal_lm(input_ids=token_ids_RL, use_cache=False).logits)


def _at_least_float(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
