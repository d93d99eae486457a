"""Which settings of a run its workers share, and how they reach a worker that has no file.

What a worker needs besides comes with its welcome (settings of the environment), as assets
(tokenizer, model configuration) or with each lease (sampling). What belongs to one machine
(its name, price, ports, folders, Python) is never sent: it is set there, by --set. So is the
class of an environment of one's own: a coordinator cannot make a machine import a module that
its owner did not name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from echo2.config import Config, config_from_mapping
from echo2.config_overrides import apply_overrides
from echo2.errors import ConfigError
from echo2.messages import JOIN_SETTINGS_MAX, Enrolled

SHARED: Final = (
    "model.dtype",
    "model.compute",
    "environment.name",
    "environment.processes",
    "environment.hang_timeout_s",
    "environment.rollout_timeout_s",
    "sampling.temperature",
    "sampling.top_p",
    "sampling.max_tokens",
    "sampling.stop",
    "sampling.stop_token_ids",
    "dispatch.group_size",
    "worker.engine",
    "worker.on_update",
    "worker.slots",
    "worker.engine_silence_s",
    "worker.engine_stall_s",
    "worker.canary_max_diff",
    "worker.drain_timeout_s",
    "worker.fetch_timeout_s",
    "worker.relay",
    "worker.transformers.threads",
    "worker.transformers.sequences_max",
    "worker.vllm.tensor_parallel_size",
    "worker.vllm.pipeline_parallel_size",
    "worker.vllm.quantization",
    "worker.vllm.max_model_len",
    "worker.vllm.sequences_max",
    "worker.vllm.gpu_memory_utilization",
    "worker.vllm.kv_cache_gb",
    "worker.vllm.enforce_eager",
    "worker.vllm.enable_prefix_caching",
    "worker.vllm.kv_on_update",
    "worker.vllm.threads",
    "worker.null.tokens_per_s",
    "worker.null.tokens_mean",
    "worker.null.tokens_cv",
    "worker.null.install_s",
    "net.rollout_bytes_in_flight",
)
PREFIXED_ENVIRONMENTS: Final = ("reasoning_gym:", "verifiers:")
"""Names with a colon that are not a class of the user's."""


def shared_settings(config: Config) -> str:
    """The settings in `SHARED` as JSON, "table.key" to value. Raises ConfigError when they are
    longer than a message may be."""
    tables = config.model_dump()
    found = {key: _value(tables, key) for key in SHARED}
    text = json.dumps({key: value for key, value in found.items() if value is not None})
    if len(text) > JOIN_SETTINGS_MAX:
        raise ConfigError(
            f"the settings that workers share have {len(text)} characters as JSON, and a worker "
            f"that joins by token can be told {JOIN_SETTINGS_MAX}; shorten sampling.stop"
        )
    return text


def joined_config(enrolled: Enrolled, overrides: Sequence[str]) -> Config:
    """The configuration of a worker that enrolled: defaults, the run's shared settings, where
    the coordinator is, and last the machine's own `overrides` ("table.key=value").

    Raises ConfigError for settings that no coordinator of this release sends, for overrides
    that cannot be, and for an environment that this machine has to name itself.
    """
    sent = _parsed(enrolled.settings)
    unknown = sorted(sent.keys() - set(SHARED))
    if unknown:
        raise ConfigError(
            f"the coordinator sent settings that a worker does not take: {', '.join(unknown)[:300]}"
            "; install the same echo2 on both machines"
        )
    tables: dict[str, Any] = {}
    for key, value in sent.items():
        _set(tables, key, value)
    tables["net"] = {
        **tables.get("net", {}),
        "coordinator": enrolled.control,
        "coordinator_rollouts": enrolled.rollouts,
        "coordinator_key": enrolled.server_key,
    }
    problems = apply_overrides(tables, overrides)
    if problems:
        raise ConfigError(problems)
    config = config_from_mapping(tables, source="the settings of the run and --set")
    _check_environment(config.environment.name, overrides)
    return config


def _check_environment(name: str, overrides: Sequence[str]) -> None:
    is_own = ":" in name and not name.startswith(PREFIXED_ENVIRONMENTS)
    named_here = any(each.partition("=")[0].strip() == "environment.name" for each in overrides)
    if is_own and not named_here:
        raise ConfigError(
            f"the run's environment is {name!r}, a class that this machine would have to import; "
            f"that is not done at a coordinator's word: install its package here and add --set "
            f"environment.name={name}"
        )


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the coordinator sent settings that are no JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError("the coordinator sent settings that are no table")
    return found


def _value(tables: Mapping[str, Any], key: str) -> Any:
    found: Any = tables
    for part in key.split("."):
        found = found[part]
    return found


def _set(tables: dict[str, Any], key: str, value: Any) -> None:
    *path, last = key.split(".")
    inner = tables
    for part in path:
        inner = inner.setdefault(part, {})
    inner[last] = value
