"""The versions that a learner would publish, step after step: see deltas.py."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from echo2.config import LearnerTable
from echo2.types import Version
from echo2.weights.snapshot import Manifest
from echo2.weights.store import write_version
from echo2_learner.batch import TrainingBatch, Trajectory
from echo2_learner.policy import Policy
from echo2_learner.publish import DTYPE_NAMES
from echo2_learner.trainer import Trainer
from echo2_workers.engines.dtypes import MODEL_DTYPES
from echo2_workers.models import model_folder

GROUPS, GROUP_SIZE, TOKENS = 2, 4, 8
"""Of a step: few, because the share that changes does not depend on them."""


def training_versions(folder: Path, options: argparse.Namespace) -> Iterator[Manifest]:
    """Manifests of the model itself and of each step, cast to the dtype that is published.

    It computes in float32, which are the masters of a bfloat16 publication.
    """
    torch.set_num_threads(options.threads)
    table = LearnerTable.model_validate(
        {"learning_rate": options.learning_rate, "loss": {"correction": "none"}}
    )
    policy = Policy.load(model_folder(options.train), dtype=torch.float32, trained=True)
    trainer = Trainer(policy, table, temperature=1.0)
    rng = np.random.default_rng(0)
    yield publish(policy, folder, options.publish, step=0)
    for step in range(options.steps):
        trainer.step(sampled_batch(policy, step, rng))
        yield publish(policy, folder, options.publish, step=step + 1)


def publish(policy: Policy, folder: Path, dtype: str, *, step: int) -> Manifest:
    def buffers() -> Iterator[tuple[str, str, tuple[int, ...], memoryview]]:
        for name, tensor in policy.published_tensors().items():
            cast = tensor.detach().to(MODEL_DTYPES[dtype]).contiguous()
            flat = cast.reshape(-1).view(torch.uint8)
            yield name, DTYPE_NAMES[cast.dtype], tuple(cast.shape), flat.numpy().data

    return write_version(folder, buffers(), metadata={"version": str(Version(1, step))})


def sampled_batch(policy: Policy, step: int, rng: np.random.Generator) -> TrainingBatch:
    tokens = policy.sample(GROUPS * GROUP_SIZE, TOKENS, seed=step).numpy().astype(np.int32)
    mask = np.arange(TOKENS) > 0
    groups = []
    for index in range(GROUPS):
        advantages = rng.standard_normal(GROUP_SIZE)
        advantages -= advantages.mean()
        groups.append(
            tuple(
                Trajectory(
                    group=f"g{index}",
                    worker="w",
                    token_ids=tokens[index * GROUP_SIZE + place],
                    logprobs=np.zeros(TOKENS, dtype=np.float32),
                    sampled=mask,
                    loss_mask=mask,
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    reward=0.0,
                    advantage=float(advantages[place]),
                )
                for place in range(GROUP_SIZE)
            )
        )
    return TrainingBatch(step, (Version(1, 0),), tuple(groups))
