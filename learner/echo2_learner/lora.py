"""Adapters of low rank (LoRA, arXiv 2106.09685): W + (alpha / rank) B A, A and B are trained.

peft puts them into the model's linear layers and freezes everything else. They are float32
whatever the model computes in, so they need no masters. What is published is the base once
and then the adapters alone, which workers add to it, or each version merged
(`learner.lora.publish`); either way the weights are the same.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from echo2.config_loss import LoraTable
from echo2.errors import ConfigError
from echo2.weights.adapter import LORA_A, LORA_B
from echo2_workers.engines.stored import merged_weight

ADAPTER = "default"
_BASE = ".base_layer"
_PEFT_PREFIX = "base_model.model."


def add_adapters(module: nn.Module, table: LoraTable) -> None:
    """Put adapters in, B = 0, so that the model is at first what it was. ConfigError if peft
    is absent or no layer has one of the names."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ConfigError(
            "learner.lora.rank is above 0, which needs the library peft: pip install "
            '"echo2[lora]", or set learner.lora.rank = 0'
        ) from error
    targets: Any = "all-linear" if table.targets == ["all-linear"] else table.targets
    config = LoraConfig(
        r=table.rank, lora_alpha=table.alpha, target_modules=targets, lora_dropout=table.dropout
    )
    try:
        inject_adapter_in_model(config, module, ADAPTER)
    except ValueError as error:
        raise ConfigError(
            f"learner.lora.targets {table.targets} fit no layer of this model: {error}"
        ) from error
    for name, layer in adapter_layers(module).items():
        if not isinstance(layer.get_base_layer(), nn.Linear):
            raise ConfigError(
                f"learner.lora.targets {table.targets} name {name}, which is a "
                f"{type(layer.get_base_layer()).__name__}; adapters go onto linear layers alone"
            )


def adapter_layers(module: nn.Module) -> dict[str, Any]:
    """Layers with an adapter, by the name that they have in the plain model."""
    from peft.tuners.lora import LoraLayer

    return {name: each for name, each in module.named_modules() if isinstance(each, LoraLayer)}


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name in the state dict belongs to an adapter."""
    return f".lora_A.{ADAPTER}." in name or f".lora_B.{ADAPTER}." in name


def plain_name(name: str) -> str:
    """Name of a tensor in the model without adapters."""
    return name.replace(_BASE, "")


def adapter_pairs(module: nn.Module) -> dict[str, Tensor]:
    """The adapters' tensors, live, under the names of a published version (float32)."""
    pairs = {}
    for name, layer in adapter_layers(module).items():
        pairs[name + LORA_A] = layer.lora_A[ADAPTER].weight.detach()
        pairs[name + LORA_B] = layer.lora_B[ADAPTER].weight.detach()
    return pairs


def scale(module: nn.Module) -> float:
    """alpha / rank, the same for all layers."""
    (found,) = {float(layer.scaling[ADAPTER]) for layer in adapter_layers(module).values()}
    return found


def base(tensors: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    """`tensors` of the state dict under their plain names without adapters; those of floating
    point in `dtype`, if one is given."""
    return {
        plain_name(name): tensor
        if dtype is None or not tensor.is_floating_point()
        else tensor.to(dtype)
        for name, tensor in tensors.items()
        if not is_adapter(name)
    }


def merged(
    module: nn.Module, tensors: dict[str, Tensor], dtype: torch.dtype | None
) -> dict[str, Tensor]:
    """As `base`, with W + (alpha / rank) B A in the adapted layers: bit by bit what a worker
    makes of a published base and adapter."""
    found = base(tensors, dtype)
    pairs = adapter_pairs(module)
    for name in adapter_layers(module):
        key = f"{name}.weight"
        a, b = pairs[name + LORA_A], pairs[name + LORA_B]
        found[key] = merged_weight(found[key], a, b, scale(module))
    return found


def save_adapters(module: nn.Module, folder: Path, *, base_folder: Path) -> None:
    """Write the adapters as peft keeps them, so that `PeftModel.from_pretrained` takes them."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = {f"{_PEFT_PREFIX}{name}": t.cpu() for name, t in adapter_pairs(module).items()}
    save_file(pairs, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config: Any = copy(module.peft_config[ADAPTER])  # type: ignore[index]
    config.base_model_name_or_path = str(base_folder)
    config.inference_mode = True
    config.save_pretrained(folder)


def set_dropout(module: nn.Module, *, active: bool) -> None:
    """Of the adapters; everything else stays in eval mode."""
    for layer in adapter_layers(module).values():
        for dropout in layer.lora_dropout.values():
            dropout.train(active)
