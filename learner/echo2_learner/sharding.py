"""FSDP2 over the ranks of a learner: who holds which rows of the policy, and when it is whole.

Each decoder layer is one unit and the rest (embedding, norm, head) another: a unit's weights
are gathered before its forward, freed after it, gathered again for its backward, and its
gradient is summed over the ranks, each of which keeps its rows. The sum, not the mean: the
shares in the loss are normalised by the whole update (docs/learner_scaling.md).

The shards are float32 where the policy is trained: they are the masters, and what a unit
computes with is a cast of them. `load_sharded` builds a model without memory first, so no
rank ever holds it whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.config import FsdpTable
from echo2.errors import ConfigError
from echo2_learner.policy import Policy
from echo2_learner.ranks import Ranks
from echo2_learner.tensor_files import TensorFiles


class Sharder:
    """Makes sharded policies, all over the same ranks and devices. All ranks call it alike."""

    def __init__(self, ranks: Ranks, device: torch.device, table: FsdpTable) -> None:
        self._device = device
        self._table = table
        self._mesh: DeviceMesh = init_device_mesh(device.type, (ranks.size,))

    def load(
        self, folder: Path, *, dtype: torch.dtype, compute_dtype: torch.dtype | None = None
    ) -> Policy:
        """The policy of a Hugging Face folder: shards of `dtype`, computing in
        `compute_dtype` (by default the same). ConfigError as `Policy.load`.

        Each rank reads just its rows from the safetensors files. A folder whose tensors have
        other names than the model's (an older layout that transformers converts) is read
        whole by every rank first.
        """
        files = TensorFiles.of_folder(folder)
        policy = _without_memory(folder, dtype)
        names = policy.tensors()
        if files is None or not names.keys() <= files.keys():
            policy = Policy.load(folder, dtype=dtype, device="cpu")
            self._shard(policy, dtype, compute_dtype)
            self._materialise(policy, compute_dtype)
            return policy
        self._shard(policy, dtype, compute_dtype)
        self._materialise(policy, compute_dtype)
        policy.load_tensors({name: files[name] for name in names})
        return policy

    def _shard(self, policy: Policy, dtype: torch.dtype, compute_dtype: torch.dtype | None) -> None:
        offload = OffloadPolicy()
        if self._table.cpu_offload and self._device.type != "cpu":
            offload = CPUOffloadPolicy()
        options: dict[str, Any] = {
            "mesh": self._mesh,
            "reshard_after_forward": True,
            "offload_policy": offload,
        }
        if compute_dtype not in (None, dtype):
            options["mp_policy"] = MixedPrecisionPolicy(
                param_dtype=compute_dtype, reduce_dtype=torch.float32
            )
        for layer in decoder_layers(policy.module):
            fully_shard(layer, **options)
        fully_shard(policy.forward_module, **options)
        for unit in policy.forward_module.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(1.0)
                # With a factor FSDP scales within the reduction, which gloo cannot.
                unit.set_force_sum_reduction_for_comms(True)

    def _materialise(self, policy: Policy, compute_dtype: torch.dtype | None) -> None:
        """Give the shards memory and put everything where it belongs."""
        shards = torch.device("cpu") if self._table.cpu_offload else self._device

        def placed(tensor: Tensor) -> Tensor:
            where = shards if isinstance(tensor, nn.Parameter) else self._device
            if tensor.is_meta:
                return torch.empty_like(tensor, device=where)
            return tensor.to(where)

        policy.forward_module._apply(placed)  # type: ignore[no-untyped-call]
        policy.use_device(self._device, compute_dtype)


def keep_gathered(policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """From now on units stay gathered from their forward to their backward, or, where none
    comes, to the next step of `optimizer`, which changes the shards (`[learner.fsdp]
    reshard_after_forward = false`)."""
    units = [unit for unit in policy.forward_module.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)

    def reshard(*_: Any) -> None:
        for unit in units:
            unit.reshard()

    optimizer.register_step_pre_hook(reshard)


def decoder_layers(module: nn.Module) -> list[nn.Module]:
    """The layers that repeat: the longest list of modules of one class."""
    lists = [
        list(found)
        for found in module.modules()
        if isinstance(found, nn.ModuleList) and len({type(layer) for layer in found}) == 1
    ]
    return max(lists, key=len, default=[])


def _without_memory(folder: Path, dtype: torch.dtype) -> Policy:
    """The model of a folder with parameters on the meta device and real buffers."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with _parameters_on_meta():
            module = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(
            f"model.path: {folder} could not be loaded as a causal language model: {error}"
        ) from error
    return Policy(module, folder)


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters lose their memory when a module takes them up; buffers, such as the
    frequencies of rotary embeddings, which no file holds, are computed as ever."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = registered  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
