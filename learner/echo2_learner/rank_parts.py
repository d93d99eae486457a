"""What every rank of a learner holds: the policy or its rows of it, and who works on them.

One process alone is the one rank that there is. All ranks build theirs from the same
configuration and run folder, so nothing but orders and batches has to be sent.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from echo2.config import Config
from echo2.errors import ConfigError
from echo2_learner.checkpoint import Checkpoint, CheckpointStore
from echo2_learner.logprob_check import LogprobCheck
from echo2_learner.policy import Policy, choose_device
from echo2_learner.publish import Publisher
from echo2_learner.ranks import ALONE, Ranks
from echo2_learner.sharding import Sharder, keep_gathered
from echo2_learner.trainer import Trainer
from echo2_workers.engines.dtypes import MODEL_DTYPES
from echo2_workers.models import model_folder


@dataclass(slots=True)
class RankParts:
    """`resumed` is the checkpoint that was restored, None at the beginning of a run."""

    config: Config
    run_dir: Path
    ranks: Ranks
    policy: Policy
    trainer: Trainer
    publisher: Publisher
    check: LogprobCheck
    checkpoints: CheckpointStore
    resumed: Checkpoint | None

    @property
    def resume_step(self) -> int:
        return self.resumed.state.step if self.resumed else 0


def build_rank_parts(config: Config, run_dir: Path, *, resume: bool, ranks: Ranks) -> RankParts:
    """Read the model and the newest checkpoint, all ranks together. ConfigError when they do
    not fit."""
    table = config.learner
    checkpoints = CheckpointStore(run_dir, keep=config.checkpoint.keep, ranks=ranks)
    if not resume and checkpoints.exists():
        raise ConfigError(
            f"{run_dir} holds checkpoints of a run that was started before; go on with --resume, "
            "or choose another --run-dir"
        )
    if table.threads:
        torch.set_num_threads(table.threads)
    seed_all(config.run.seed)
    policy, scratch, reference = _policies(config, ranks)
    temperature = config.sampling.temperature
    if table.gradient_checkpointing:
        policy.checkpoint_activations()
    trainer = Trainer(
        policy,
        table,
        temperature=temperature,
        max_tokens=config.sampling.max_tokens,
        reference=reference,
        ranks=ranks,
    )
    if ranks is not ALONE and not table.fsdp.reshard_after_forward:
        keep_gathered(policy, trainer.optimizer)
    publisher = Publisher(
        policy,
        run_dir,
        scratch=scratch,
        run_name=config.run.name,
        origin_timeout_s=config.net.connect_timeout_s,
        ranks=ranks,
        adapters_alone=policy.has_adapters and table.lora.publish == "adapter",
        deltas=table.deltas,
    )
    resumed = checkpoints.newest() if resume else None
    if resumed is not None:
        resumed.restore(policy, trainer)
    return RankParts(
        config=config,
        run_dir=run_dir,
        ranks=ranks,
        policy=policy,
        trainer=trainer,
        publisher=publisher,
        check=LogprobCheck(publisher.versions, scratch, table, temperature=temperature),
        checkpoints=checkpoints,
        resumed=resumed,
    )


def _policies(config: Config, ranks: Ranks) -> tuple[Policy, Policy, Policy | None]:
    """(the trained one, scratch with the published weights, the reference where one is
    needed)."""
    table = config.learner
    folder = model_folder(config.model.path)
    device = ranks.device(choose_device(table.device))
    dtype, published = MODEL_DTYPES[table.dtype], MODEL_DTYPES[config.model.dtype]
    computes = MODEL_DTYPES[config.model.compute_dtype]
    needs_reference = table.loss.kl_coefficient > 0
    if ranks is not ALONE:
        if computes != published:
            raise ConfigError(
                f'model.compute: "{config.model.compute}" with {config.model.dtype} weights needs '
                'one learner process without ranks; set it to "auto"'
            )
        sharder = Sharder(ranks, device, table.fsdp)
        return (
            sharder.load(folder, dtype=torch.float32, compute_dtype=dtype),
            sharder.load(folder, dtype=published),
            sharder.load(folder, dtype=dtype) if needs_reference else None,
        )
    return (
        Policy.load(
            folder,
            dtype=dtype,
            device=device,
            trained=True,
            adapters=table.lora,
            attention=table.attention,
            weights_dtype=None if computes == published else published,
        ),
        Policy.load(folder, dtype=computes, device=device, weights_dtype=published),
        Policy.load(folder, dtype=dtype, device=device) if needs_reference else None,
    )


def seed_all(seed: int) -> None:
    """Seed torch, Python and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
