"""From echo2's settings to vLLM's: one way for CPU and GPU.

Promise: whatever the installed weights need (our transport, our logprobs, tied tensors, one
process) is decided here and cannot be overridden; everything else of vLLM can be set, through
`worker.vllm.engine_args`. Environment variables are set by the engine process itself, before
vLLM is imported.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from echo2.errors import ConfigError

GIB: Final = 1 << 30
CPU_KV_CACHE_GB: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings:
    """The table [worker.vllm], what the model computes in and its weights are published in,
    and what stops a sequence."""

    dtype: str
    weights_dtype: str = ""
    """"": as dtype."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    quantization: str = ""
    max_model_len: int = 0
    sequences_max: int = 256
    gpu_memory_utilization: float = 0.9
    kv_cache_gb: float = 0.0
    enforce_eager: bool | None = None
    enable_prefix_caching: bool = True
    kv_on_update: Literal["keep", "clear"] = "keep"
    threads: int = 1
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    engine_args: dict[str, Any] = field(default_factory=dict)


def set_environment(settings: VllmSettings) -> None:
    """For this process and the ranks that vLLM starts from it. Before vLLM is imported."""
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_DO_NOT_TRACK="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the core runs in the engine process
        VLLM_USE_V2_MODEL_RUNNER="0",  # the sampler that reports our logprobs is the first's
        VLLM_WORKER_MULTIPROC_METHOD="spawn",
        VLLM_CPU_OMP_THREADS_BIND="nobind",  # several workers may share a machine
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_gb
    if settings.threads:
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)


def engine_arguments(settings: VllmSettings, assets: Path) -> Any:
    """vLLM's EngineArgs. Raises ConfigError for an argument that vLLM does not have."""
    from vllm import EngineArgs
    from vllm.config import WeightTransferConfig
    from vllm.platforms import current_platform

    from echo2_workers.engines.vllm_worker import EXTENSION, TRANSFER

    known = {each.name for each in dataclasses.fields(EngineArgs)}
    unknown = sorted(settings.engine_args.keys() - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"worker.vllm.engine_args: vLLM's EngineArgs has no {', '.join(unknown)}{hint}"
        )
    on_cpu = current_platform.is_cpu()
    kv_cache_gb = settings.kv_cache_gb or (CPU_KV_CACHE_GB if on_cpu else 0.0)
    eager = on_cpu if settings.enforce_eager is None else settings.enforce_eager
    arguments = {
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "quantization": settings.quantization or None,
        "max_model_len": settings.max_model_len or None,
        "max_num_seqs": settings.sequences_max,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "kv_cache_memory_bytes": int(kv_cache_gb * GIB) or None,
        "enforce_eager": eager,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "seed": 0,
        **settings.engine_args,
        # Logits in float32, as the learner's: those of bfloat16 are rounded too coarsely.
        "hf_overrides": {"head_dtype": "float32", **settings.engine_args.get("hf_overrides", {})},
        "model": str(assets),
        "dtype": settings.dtype,
        "skip_tokenizer_init": not settings.stop,
        "load_format": "dummy",
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": WeightTransferConfig(backend=TRANSFER),
        "disable_log_stats": True,
    }
    if on_cpu:
        # A prompt that is prefilled in parts has its seeded generator turned back after each
        # part but the last, and a generator on a CPU cannot be: vLLM fails on it.
        arguments["enable_chunked_prefill"] = False
    return EngineArgs(**arguments)


def eos_ids(assets: Path) -> tuple[int, ...]:
    """Tokens that end a sequence: generation_config.json names them, else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = assets / name
        named = None
        if path.exists():
            named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        if named is not None:
            return (named,) if isinstance(named, int) else tuple(named)
    raise ConfigError("neither generation_config.json nor config.json names an eos_token_id")
