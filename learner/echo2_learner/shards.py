"""Tensors of which each rank holds some rows: read whole, filled from whole ones.

A sharded tensor is a DTensor with one placement, Shard(0) or Replicate, over all ranks, as
FSDP2 makes them: rank r holds rows [r·c, (r + 1)·c) with c = ⌈rows / ranks⌉, the last ranks
fewer or none. A plain tensor is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file, of which one reads the rows that one needs.

    `read(start, stop)` gives rows of the first dimension as a tensor of its own; of a tensor
    without dimensions it gives all.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[int, int], Tensor]

    def whole(self) -> Tensor:
        return self.read(0, self.shape[0] if self.shape else 0)


Source = Tensor | StoredTensor
Tensors = Mapping[str, Tensor] | Mapping[str, StoredTensor] | Mapping[str, Source]


def is_sharded(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """The rows that this rank holds; shares memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor. Of a sharded one all ranks must call this at once."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_rows(tensor: Tensor) -> tuple[int, int]:
    """[start, stop) of the rows that this rank holds of a tensor with dimensions."""
    if not isinstance(tensor, DTensor) or not tensor.placements[0].is_shard():
        return 0, tensor.shape[0]
    each = -(-tensor.shape[0] // tensor.device_mesh.size())
    start = min(each * tensor.device_mesh.get_local_rank(), tensor.shape[0])
    stop = min(start + each, tensor.shape[0])
    assert stop - start == tensor.to_local().shape[0], "a placement other than FSDP2's"
    return start, stop


@torch.no_grad()
def copy_in(own: Tensor, source: Source) -> None:
    """Copy `source` into `own`, cast to its dtype: of a whole source a sharded tensor takes
    its own rows. Shapes are equal."""
    if isinstance(source, DTensor):
        if not isinstance(own, DTensor) or own.placements != source.placements:
            raise ValueError(f"{source.placements} cannot be copied into {type(own).__name__}")
        own.to_local().copy_(source.to_local())
    elif own.ndim == 0:
        own.copy_(source.whole() if isinstance(source, StoredTensor) else source)
    else:
        start, stop = local_rows(own)
        rows = source.read(start, stop) if isinstance(source, StoredTensor) else source[start:stop]
        local(own).copy_(rows)


def like(parameter: Tensor, source: StoredTensor) -> Tensor:
    """`source` on the device of `parameter`, sharded as that is when the shapes are equal."""
    device = local(parameter).device
    if not isinstance(parameter, DTensor) or tuple(parameter.shape) != source.shape:
        return source.whole().to(device)
    rows = source.read(*local_rows(parameter)).to(device)
    return DTensor.from_local(
        rows,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
