"""Builders for the learner's tests: a tiny model, groups with words, a session in memory."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from echo2.config_loss import LossTable
from echo2.core.lineage import Lineage
from echo2.messages import BatchGroup
from echo2.types import Span, Task, TrajectoryHeader, Version
from echo2_learner.batch import TrainingBatch, read_batch
from echo2_learner.policy import Policy
from echo2_learner.warm_start import make_tokenizer

torch.set_num_threads(1)


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def fake() -> ModuleType:
    """The module fake_session.py."""
    return _load("fake_session")


@pytest.fixture(scope="session")
def plain_losses() -> ModuleType:
    """The module plain_losses.py."""
    return _load("plain_losses")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder of 20,000 random weights over 32 tokens."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("model") / "tiny"
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            max_position_embeddings=64,
            tie_word_embeddings=True,
            initializer_range=0.3,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tiny_folder: Path) -> Policy:
    return Policy.load(tiny_folder)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with an origin that says where it is."""
    folder = tmp_path / "run"
    folder.mkdir()
    origin = {"endpoint": "tcp://127.0.0.1:5555", "public_key": "k" * 40, "pid": 1}
    (folder / "origin.json").write_text(json.dumps(origin))
    return folder


@pytest.fixture(scope="session")
def a_group() -> Callable[..., BatchGroup]:
    return make_group


@pytest.fixture(scope="session")
def a_batch() -> Callable[..., TrainingBatch]:
    return make_batch


@pytest.fixture(scope="session")
def granted() -> Callable[..., Any]:
    return make_granted


def make_group(
    *,
    name: str = "g1",
    step: int = 5,
    rewards: Sequence[float] = (0.0, 1.0),
    versions: Sequence[tuple[int, int]] = ((1, 5),),
    lengths: Sequence[int] | None = None,
    prompt: int = 3,
    worker: str = "w-1",
    seed: int = 0,
    **changes: Any,
) -> BatchGroup:
    """Random tokens; the sampled ones are divided evenly among `versions` (incarnation, step)."""
    rng = np.random.default_rng(seed)
    lengths = lengths or [prompt + 4] * len(rewards)
    headers, token_ids, logprobs, masks = [], [], [], []
    for reward, length in zip(rewards, lengths, strict=True):
        bounds = np.linspace(prompt, length, len(versions) + 1).astype(int)
        spans = tuple(
            Span(Version(*version), int(low), int(high))
            for version, low, high in zip(versions, bounds, bounds[1:], strict=False)
        )
        headers.append(TrajectoryHeader(length, prompt, length - prompt, reward, "stop", 1, spans))
        mask = np.arange(length) >= prompt
        token_ids.append(rng.integers(3, 21, length))
        logprobs.append(np.where(mask, rng.uniform(-3.0, -0.1, length), 0.0))
        masks.append(mask)
    made = {
        "incarnation": 1,
        "step": step,
        "group": name,
        "worker": worker,
        "task": Task(0, "{}"),
        "trajectories": tuple(headers),
        "token_ids": np.concatenate(token_ids).astype("<i4").tobytes(),
        "logprobs": np.concatenate(logprobs).astype("<f4").tobytes(),
        "loss_mask": np.concatenate(masks).astype(np.uint8).tobytes(),
    }
    return BatchGroup(**{**made, **changes})


def make_granted(
    groups: Sequence[BatchGroup], *, step: int = 5, loss_from_step: int = 0
) -> SimpleNamespace:
    return SimpleNamespace(
        step=step, loss_from_step=loss_from_step, groups=groups, granted=None, last=False
    )


def make_batch(
    groups: Sequence[BatchGroup],
    *,
    step: int = 5,
    loss_from_step: int = 0,
    staleness_max: int = 2,
    lineage: Sequence[tuple[int, int]] = ((1, 0),),
    loss: LossTable | None = None,
) -> TrainingBatch:
    return read_batch(
        make_granted(groups, step=step, loss_from_step=loss_from_step),
        staleness_max=staleness_max,
        lineage=Lineage(starts=list(lineage)),
        loss=loss or LossTable(),
        max_tokens=4,
        vocab_size=32,
    )
