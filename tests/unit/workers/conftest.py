"""Tiny random models, and the words to build requests and versions with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from echo2.types import Sampling
from echo2_workers.engine import GenerateRequest, Tensors
from echo2_workers.engines.dtypes import DTYPE_NAMES
from echo2_workers.engines.sampler import Sampler, untied_state

torch.set_num_threads(1)


class Tiny:
    """A tiny Qwen2 by seed, whose logits are far from uniform, so that mistakes show."""

    def __init__(self) -> None:
        self._models: dict[tuple[int, torch.dtype], Any] = {}

    def config(self) -> Qwen2Config:
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

    def fresh(self, seed: int, *, dtype: torch.dtype = torch.float32) -> Any:
        torch.manual_seed(seed)
        model: Any = Qwen2ForCausalLM(self.config())  # type: ignore[no-untyped-call]
        model.eval().requires_grad_(False)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.3)
        return model.to(dtype)

    def model(self, seed: int, *, dtype: torch.dtype = torch.float32) -> Any:
        """One to read only: made once."""
        key = (seed, dtype)
        if key not in self._models:
            self._models[key] = self.fresh(seed, dtype=dtype)
        return self._models[key]

    def tensors(self, seed: int, *, dtype: torch.dtype = torch.float32) -> Tensors:
        """The model's state as a stored version gives it."""
        tensors = {}
        for name, tensor in untied_state(self.model(seed, dtype=dtype)).items():
            content = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
            tensors[name] = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), memoryview(content))
        return tensors

    def sampler(self, *, eos_ids: Sequence[int] = (2,), sequences_max: int = 64) -> Sampler:
        """A sampler over a model of its own, with nothing loaded."""
        return Sampler(self.fresh(99), eos_ids=eos_ids, sequences_max=sequences_max)

    def logprobs(
        self, seed: int, token_ids: list[int], *, temperature: float = 1.0
    ) -> npt.NDArray[np.float32]:
        """Logprob of each token but the first, by one forward over the whole sequence."""
        with torch.inference_mode():
            ids = torch.tensor([token_ids])
            logits = self.model(seed)(input_ids=ids, use_cache=False).logits[0, :-1]
            logprobs = torch.log_softmax(logits.float() / temperature, -1)
            return np.asarray(logprobs.gather(-1, ids[0, 1:, None])[:, 0])

    def request(
        self, token_ids: list[int], *, seed: int = 0, max_tokens: int = 8, **sampling: Any
    ) -> GenerateRequest:
        return GenerateRequest(
            token_ids=token_ids, seed=seed, sampling=Sampling(max_tokens=max_tokens, **sampling)
        )


@pytest.fixture(scope="session")
def tiny() -> Tiny:
    return Tiny()


@pytest.fixture
def assets(tmp_path: Path, tiny: Tiny) -> Path:
    """A folder with the tiny model's configuration."""
    folder = tmp_path / "assets"
    tiny.config().save_pretrained(folder)
    return folder
