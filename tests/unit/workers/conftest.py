"""Tiny random models, and the words to build requests and versions with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from echo2.types import Sampling, Version
from echo2_workers.engine import GenerateRequest, Tensors
from echo2_workers.engines.sampler import DTYPE_NAMES, untied_state

torch.set_num_threads(1)


def a_config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def a_model(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> Any:
    """A tiny random Qwen2 whose logits are far from uniform, so that mistakes show."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(a_config()).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.3)
    return model


def tensors_of(model: Any) -> Tensors:
    """The model's state as a stored version gives it."""
    tensors = {}
    for name, tensor in untied_state(model).items():
        flat = tensor.detach().contiguous().view(torch.uint8).reshape(-1)
        content = memoryview(flat.numpy().tobytes())
        tensors[name] = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), content)
    return tensors


def a_request(
    token_ids: list[int], *, seed: int = 0, max_tokens: int = 8, **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(
        token_ids=token_ids, seed=seed, sampling=Sampling(max_tokens=max_tokens, **sampling)
    )


def full_logprobs(model: Any, token_ids: list[int], *, temperature: float = 1.0) -> np.ndarray:
    """Logprob of each token but the first, by one forward over the whole sequence."""
    with torch.inference_mode():
        ids = torch.tensor([token_ids])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float() / temperature
        logprobs = torch.log_softmax(logits, -1).gather(-1, ids[0, 1:, None])[:, 0]
    return np.asarray(logprobs)


V1 = Version(1, 1)
V2 = Version(1, 2)


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    """A folder with the tiny model's configuration."""
    folder = tmp_path / "assets"
    a_config().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_of() -> Callable[[int], Any]:
    """Models by seed, made once: treat them as read-only."""
    made: dict[int, Any] = {}

    def get(seed: int) -> Any:
        if seed not in made:
            made[seed] = a_model(seed)
        return made[seed]

    return get
