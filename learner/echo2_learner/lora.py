"""Adapters of low rank (LoRA, arXiv 2106.09685): W + (alpha / rank) B A, A and B are trained.

peft puts them into the model's linear layers and freezes everything else. They are float32
whatever the model computes in, so they need no masters. A version is published merged, as
tensors of the plain model, so that every engine can take it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from echo2.config_loss import LoraTable
from echo2.errors import ConfigError

ADAPTER = "default"
_BASE = ".base_layer"


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


@torch.no_grad()
def merged(module: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """`tensors` of the state dict under their plain names, without adapters, and those of
    adapted layers with W + (alpha / rank) B A in float32."""
    deltas = {
        f"{name}.weight": layer.get_delta_weight(ADAPTER)
        for name, layer in adapter_layers(module).items()
    }
    found = {}
    for name, tensor in tensors.items():
        if is_adapter(name):
            continue
        plain = plain_name(name)
        found[plain] = tensor.float() + deltas[plain] if plain in deltas else tensor
    return found


def set_dropout(module: nn.Module, *, active: bool) -> None:
    """Of the adapters; everything else stays in eval mode."""
    for layer in adapter_layers(module).values():
        for dropout in layer.lora_dropout.values():
            dropout.train(active)
