"""How a policy's rows are laid out: what its attention allows, tried out before it is trusted.

Promise: a layout other than "padded" is chosen only where each token's logprob is that of its
trajectory alone. Whether the architecture allows it is read from its configuration (a layer
that attends to a window, or has a state, knows nothing of rows that are shared), and then
tried on a few tokens.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import numpy as np
import structlog
import torch

from echo2_learner.head import Rows
from echo2_learner.micro_batch import Layout
from echo2_learner.packing import PackedRows, bundles_of, flat_rows, rows_of, single_bundles
from echo2_learner.policy import Policy

log = structlog.get_logger(__name__)

PAIR_COST_SLOWNESS: Final = 2.0
"""A multiplication of attention takes about so many times one of a linear layer."""
_DIFFERENCE_MAX: Final = {torch.bfloat16: 0.25}
"""By dtype of what computes; 1e-3 for the others. Tokens that see too much or stand elsewhere
differ by far more in a model that has learnt anything."""


def choose_layout(policy: Policy, *, packing: bool) -> Layout:
    """The layout of `policy`'s rows. Runs forward passes: all ranks call it alike."""
    if not packing:
        return "padded"
    reason = _obstacle(policy.module)
    if reason is None:
        layout: Layout = "flat" if "flash" in _attention(policy.module) else "tree"
        difference = packed_difference(policy, layout)
        if difference <= _DIFFERENCE_MAX.get(policy.dtype, 1e-3):
            return layout
        reason = f"logprobs of packed tokens differ by up to {difference:.2g}"
    log.info("packing_off", model=type(policy.module).__name__, reason=reason)
    return "padded"


def pair_cost(module: Any) -> float:
    """What attention between two tokens of a row costs, as a share of what the linear layers
    cost for one: 4 H layers operations against 2 for each of their weights."""
    config = module.config.get_text_config()
    embeddings = {id(p) for p in module.get_input_embeddings().parameters()}
    head = module.get_output_embeddings()
    if head is not None:
        embeddings |= {id(p) for p in head.parameters()}
    weights = sum(int(p.numel()) for p in module.parameters() if id(p) not in embeddings)
    operations = 4 * int(config.hidden_size) * int(config.num_hidden_layers)
    return PAIR_COST_SLOWNESS * operations / (2 * max(weights, 1))


def _obstacle(module: Any) -> str | None:
    """Why the architecture does not allow packed rows; None if it seems to."""
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        return f"it has layers of the kinds {', '.join(sorted(kinds))}"
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        return f"it attends to a window of {window} tokens"
    attention = _attention(module)
    if attention not in ("sdpa", "eager") and "flash" not in attention:
        return f"its attention is {attention}"
    try:
        known = inspect.signature(module.get_decoder().forward).parameters
    except AttributeError:
        return "it has no decoder"
    if "position_ids" not in known or getattr(config, "alibi", False):
        return "it takes no positions"
    return None


def _attention(module: Any) -> str:
    return str(module.config._attn_implementation)


@torch.no_grad()
def packed_difference(policy: Policy, layout: Layout) -> float:
    """Largest |logprob packed - logprob alone| of a few tokens."""
    rng = np.random.default_rng(5)
    draws = [rng.integers(0, policy.vocab_size, 6).astype(np.int32) for _ in range(4)]
    sequences = [draws[0], np.concatenate([draws[0][:4], draws[1][:3]]), draws[2], draws[3][:3]]
    masks = [np.arange(len(sequence)) > 0 for sequence in sequences]
    if layout == "tree":
        bundles = bundles_of(sequences, pair_cost=1e-9, nodes_max=1000)
        packed = rows_of(bundles, sequences, masks, pair_cost=1e-9)
    else:
        packed = flat_rows(single_bundles(sequences), sequences, masks)
    length = max(len(sequence) for sequence in sequences)
    together = np.zeros((len(sequences), length))
    together.flat[packed.place_N] = _logprobs(policy, packed)
    worst = 0.0
    for index, sequence in enumerate(sequences):
        own = flat_rows(single_bundles([sequence]), [sequence], [masks[index]])
        alone = _logprobs(policy, own)
        worst = max(worst, float(np.abs(together[index, 1 : len(sequence)] - alone).max()))
    return worst


def _logprobs(policy: Policy, packed: PackedRows) -> np.ndarray[Any, np.dtype[np.float64]]:
    rows = Rows.of(packed, device=policy.device, dtype=policy.dtype)
    logprobs_N, _ = policy.token_logprobs(rows, temperature=1.0)
    return logprobs_N.double().cpu().numpy()
