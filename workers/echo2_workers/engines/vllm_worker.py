"""What echo2 adds inside vLLM's own worker, on each rank: weights in, and honest logprobs.

Promise: a version's tensors reach the layers in place, each rank taking its shard through
the model's own weight loaders; after that no layer computes with an older copy of a weight;
the logprobs that sampling reports are those of softmax(logits / temperature) over the whole
vocabulary.

Loaded by vLLM by name (`worker_extension_cls`), so that it is there in every process that
holds a part of the model. A version is named by (folder, digest): each rank maps the stored
file itself, so that no tensor is copied between processes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from echo2.net.child import die_with_parent
from echo2_workers.engines.stored import stored_tensors, views

TRANSFER: Final = "echo2"
"""Name of the transport in vLLM's registry."""
EXTENSION: Final = f"{__name__}.WorkerExtension"
_GREEDY_BELOW: Final = 1e-5


@dataclass
class NoInit(WeightTransferInitInfo):
    """There is nobody to connect to."""


@dataclass
class StoredVersionInfo(WeightTransferUpdateInfo):
    """A version on this machine's disk."""

    folder: str
    digest: str


class StoredVersionTransfer(WeightTransferEngine[NoInit, StoredVersionInfo]):
    """Weights out of a version file: start -> update (all of it) -> finish.

    Left to the caller: that the names, shapes and dtypes are the model's (`vllm_tensors`),
    which has to be known before `start`.
    """

    init_info_cls = NoInit
    update_info_cls = StoredVersionInfo

    def init_transfer_engine(self, init_info: NoInit) -> None:
        return

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: StoredVersionInfo) -> None:
        tensors = stored_tensors(Path(update_info.folder), update_info.digest)
        with torch.no_grad():
            try:
                self.model.load_weights(views(tensors))
            except BaseException:
                # What some layers have so far would be counted into the next load.
                finalize_layerwise_reload(self.model, self.model_config)
                raise

    def finish_weight_update(self) -> None:
        with torch.no_grad():
            finalize_layerwise_reload(self.model, self.model_config)
            refresh_heads(self.model)

    def shutdown(self) -> None:
        return


def refresh_heads(model: torch.nn.Module) -> None:
    """Pack the weights of embeddings and heads again where they are kept packed.

    On a CPU a linear layer computes with a packed copy of its weight. The layerwise reload
    refreshes it for a layer that got weights; a head that is tied to the embedding gets none,
    and would go on with the old ones without a word.
    """
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


class FullVocabularySampler(Sampler):
    """Reports log softmax(logits / T) of the sampled token, before any truncation.

    vLLM offers the logprobs before temperature ("raw"), and those after top-p, renormalised
    over what top-p left ("processed"). The learner computes neither. Greedy rows (T = 0) get
    the logprob at T = 1.
    """

    def __init__(self) -> None:
        # "processed_logits" has the base class compute no logprobs of its own.
        super().__init__(logprobs_mode="processed_logits")

    def sample(
        self,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        logprobs_mode_override: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logprobs = None
        if sampling_metadata.max_num_logprobs is not None:
            logprobs = self.compute_logprobs(self._tempered(logits, sampling_metadata))
        sampled, _ = super().sample(logits, sampling_metadata, logprobs_mode_override)
        return sampled, logprobs

    @staticmethod
    def gather_logprobs(
        logprobs: torch.Tensor, num_logprobs: int, token_ids: torch.Tensor
    ) -> LogprobsTensors:
        """Of the given tokens alone, as nobody here asks for more: no search for the best
        ones and no ranks (their kernel would be compiled first, for many seconds)."""
        if num_logprobs != 0:
            return Sampler.gather_logprobs(logprobs, num_logprobs, token_ids)
        index = token_ids.unsqueeze(-1)
        ranks = torch.zeros_like(token_ids)
        return LogprobsTensors(index.to(torch.int32), logprobs.gather(-1, index), ranks)

    @staticmethod
    def _tempered(logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        if metadata.all_greedy or metadata.temperature is None:
            return logits
        temperature = metadata.temperature
        divisor = torch.where(temperature < _GREEDY_BELOW, 1.0, temperature)
        return logits / divisor[:, None]


class WorkerExtension:
    """Methods that vLLM's worker gets, called by name through `collective_rpc`."""

    def echo2_prepare(self, engine_process: int) -> None:
        """Once, before the first request."""
        runner = self.model_runner  # type: ignore[attr-defined]
        if type(runner.sampler) not in (Sampler, FullVocabularySampler):
            raise RuntimeError(
                f"the model runner samples with {type(runner.sampler).__name__}; its logprobs "
                "cannot be made those that the learner computes"
            )
        runner.sampler = FullVocabularySampler()
        if os.getpid() != engine_process:
            die_with_parent(engine_process)


if TRANSFER not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(TRANSFER, StoredVersionTransfer)
