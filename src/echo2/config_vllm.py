"""The table [worker.vllm] and the rules over it.

Named settings are those that nearly everyone sets, and those whose meaning differs between
CPU and GPU; all others of vLLM's EngineArgs go through `engine_args`.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field

from echo2.config_table import NonNegative, Positive, Table

if TYPE_CHECKING:
    from echo2.config import Config

OWNED_ARGUMENTS: Final = {
    "model": "the run's assets name it",
    "dtype": "set model.dtype",
    "tokenizer": "it comes with the run's assets",
    "skip_tokenizer_init": "it follows from sampling.stop",
    "load_format": "weights come as versions",
    "worker_extension_cls": "echo2 loads weights through its own",
    "weight_transfer_config": "echo2 loads weights through its own",
    "logprobs_mode": "behaviour logprobs are those that the learner computes",
    "speculative_config": "its logprobs are not those that the learner computes",
    "enable_lora": "versions are whole models",
    "data_parallel_size": "start more workers instead",
}
"""Arguments that cannot be set, and why."""
NAMED_ARGUMENTS: Final = {
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "quantization": "quantization",
    "max_model_len": "max_model_len",
    "max_num_seqs": "sequences_max",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_gb",
    "enforce_eager": "enforce_eager",
    "enable_prefix_caching": "enable_prefix_caching",
}
"""Arguments that have a setting of their own."""


class VllmTable(Table):
    tensor_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks that share each layer."""
    pipeline_parallel_size: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks that share the layers one after the other."""
    quantization: Annotated[str, Field(pattern=r"^[\w.-]{0,64}$")] = ""
    """vLLM's name of a quantization that is made while loading, for example "fp8"; the worker
    declares its precision class."""
    max_model_len: NonNegative = 0
    """Most tokens of a sequence, prompt included; 0: the model's positions."""
    sequences_max: Positive = 256
    """Sequences sampled in one batch."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of the GPU's memory that weights and KV cache may fill together."""
    kv_cache_gb: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    """GiB of KV cache; 0: 1 GiB on a CPU, what gpu_memory_utilization leaves on a GPU."""
    enforce_eager: bool | None = None
    """Run without compilation and CUDA graphs; by default so on a CPU only."""
    enable_prefix_caching: bool = True
    """Compute a prompt that several sequences of one version share once."""
    kv_on_update: Literal["keep", "clear"] = "keep"
    """With on_update "continue": running sequences keep the KV cache that the version before
    computed, or it is computed again with the new weights."""
    threads: NonNegative = 1
    """Threads of one rank on a CPU; 0 leaves the default."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Any other argument of vLLM's EngineArgs, passed on as it is."""


def precision_class(quantization: str) -> str:
    """In which class of precision a quantized engine computes: "fp8", "int8" or "int4"."""
    name = quantization.lower()
    if "fp8" in name or "mxfp8" in name:
        return "fp8"
    return "int8" if "int8" in name or "w8a8" in name else "int4"


def precision_of(config: Config) -> str:
    """The precision class in which this configuration's workers can be compared."""
    worker = config.worker
    if worker.engine in ("null", "none"):
        return "none"
    if worker.engine == "vllm" and worker.vllm.quantization:
        return precision_class(worker.vllm.quantization)
    return config.model.compute_dtype


def engine_args_problem(c: Config) -> str | None:
    """The rule over worker.vllm.engine_args."""
    for name in c.worker.vllm.engine_args:
        if name in OWNED_ARGUMENTS:
            return f"{name} cannot be set: {OWNED_ARGUMENTS[name]}"
        if name in NAMED_ARGUMENTS:
            return f"{name} has a setting of its own: worker.vllm.{NAMED_ARGUMENTS[name]}"
        if not re.fullmatch(r"\w+", name):
            return f'"{name}" is no name of an argument; for example block_size'
    return None


def stop_problem(c: Config) -> str | None:
    """The rule over sampling.stop and sampling.stop_token_ids."""
    engine = c.worker.engine
    if engine != "transformers" or not (c.sampling.stop or c.sampling.stop_token_ids):
        return None
    return (
        'stop strings and further stop tokens need worker.engine = "vllm"; with "transformers" '
        "a sequence ends at the model's own end token"
    )
