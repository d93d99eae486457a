"""Logprobs out of the output layer, a chunk at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config

from echo2_learner.head import ChunkedLogprobs, Rows, has_plain_head
from echo2_learner.layout import choose_layout, packed_difference
from echo2_learner.packing import padded_rows, single_bundles
from echo2_learner.policy import Policy

CPU = torch.device("cpu")


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return made


@given(
    positions=st.integers(1, 9),
    vocabulary=st.integers(2, 17),
    chunk=st.integers(1, 12),
    with_bias=st.booleans(),
    temperature=st.sampled_from([1.0, 0.7]),
    seed=st.integers(0, 999),
)
@settings(max_examples=60, deadline=None)
def test_chunks_give_logprobs_entropy_and_gradients_of_the_whole(
    positions: int, vocabulary: int, chunk: int, with_bias: bool, temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    hidden, weight = draw(positions, 5), draw(vocabulary, 5)
    leaves = [hidden, weight, *([draw(vocabulary)] if with_bias else [])]
    contexts = np.sort(np.random.default_rng(seed).integers(0, positions, 2 * positions))
    context = torch.from_numpy(contexts)
    target = torch.randint(0, vocabulary, (2 * positions,), generator=generator)
    factors = torch.randn(2 * positions, generator=generator, dtype=torch.float64)
    bias = leaves[2] if with_bias else None
    mine, entropy = ChunkedLogprobs.apply(
        hidden, weight, bias, context, target, contexts, temperature, chunk
    )
    found = torch.autograd.grad((mine * factors).sum(), leaves)
    whole = torch.log_softmax((hidden @ weight.T + (bias if with_bias else 0)) / temperature, -1)
    plain = whole[context, target]
    expected = torch.autograd.grad((plain * factors).sum(), leaves)
    torch.testing.assert_close(mine, plain)
    torch.testing.assert_close(entropy, -(whole.exp() * whole).sum(-1)[context].detach())
    assert not entropy.requires_grad
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_token_that_is_ruled_out_makes_no_entropy_nan() -> None:
    weight = torch.eye(3)
    bias = torch.tensor([0.0, 0.0, -torch.inf])
    index = np.zeros(1, dtype=np.int64)
    logprobs, entropy = ChunkedLogprobs.apply(
        torch.zeros(1, 3), weight, bias, torch.zeros(1).long(), torch.zeros(1).long(), index, 1.0, 4
    )
    assert float(logprobs) == float(-entropy) == pytest.approx(-np.log(2))


def rows_of_tokens(num_rows: int, length: int, *, from_token: int) -> Rows:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 32, length).astype(np.int32) for _ in range(num_rows)]
    masks = [np.arange(length) >= from_token for _ in range(num_rows)]
    packed = padded_rows(single_bundles(sequences), sequences, masks)
    return Rows.of(packed, device=CPU, dtype=torch.float32)


def test_no_tensor_of_tokens_times_vocabulary_ever_exists(tmp_path: Path) -> None:
    """Forward and backward, of a model whose vocabulary outweighs everything else."""
    vocabulary, num_rows, length, hidden = 5000, 8, 16, 8
    policy = a_policy(
        tmp_path,
        GPT2Config(
            vocab_size=vocabulary,
            n_embd=hidden,
            n_layer=1,
            n_head=2,
            n_positions=32,
            tie_word_embeddings=False,
        ),
    )
    rows = rows_of_tokens(num_rows, length, from_token=8)
    policy.token_logprobs(rows, temperature=1.0)  # finds out how the head is made
    policy.forward_module.logit_chunk = 10 * vocabulary
    with Largest() as largest:
        policy.token_logprobs(rows, temperature=1.0)[0].sum().backward()
    assert vocabulary * hidden <= largest.elements <= 10 * vocabulary
    policy.forward_module.is_chunked = False
    with Largest() as largest:
        policy.token_logprobs(rows, temperature=1.0)[0].sum().backward()
    assert largest.elements >= num_rows * length * vocabulary


def a_policy(folder: Path, config: Any) -> Policy:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return Policy.load(folder)


def test_a_model_that_caps_its_logits_runs_whole_and_gives_its_own_logprobs(
    tmp_path: Path,
) -> None:
    policy = a_policy(
        tmp_path,
        Gemma2Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            sliding_window=8,
            final_logit_softcapping=0.5,
        ),
    )
    rows = rows_of_tokens(2, 6, from_token=1)
    logprobs, entropy = policy.token_logprobs(rows, temperature=1.0)
    assert policy.forward_module.is_chunked is False
    own = torch.log_softmax(policy.module(rows.token_ids_RL).logits[:, :-1], -1)
    expected = own.gather(2, rows.token_ids_RL[:, 1:, None]).flatten()
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, -(own.exp() * own).sum(-1).flatten().detach())
    assert choose_layout(policy, packing=True) == "padded"  # some layers attend to a window


def test_other_families_are_packed_and_chunked_too(tiny: Policy, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    other = a_policy(tmp_path, config)
    for policy in (tiny, other):
        assert has_plain_head(policy.module, CPU)
        assert choose_layout(policy, packing=True) == "tree"
        assert choose_layout(policy, packing=False) == "padded"
        assert packed_difference(policy, "tree") < 1e-5
