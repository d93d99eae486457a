"""float32 masters of weights that compute in a lower precision.

Promise: the compute weights are the masters, rounded to nearest, after every `write_back`;
so a version published in the precision of that rounding, which is the compute precision
unless `rounding` names a lower one, is bit by bit what the learner computes with.
Gradients of micro-batches are added up in float32: each is moved to its master as soon as it
is complete, so that no second set of low-precision gradients lives.

A sharded model has no need of this: its shards are float32, and the sharding rounds what it
gathers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn


class Masters:
    """`values` are leaves with gradients of their own, for the optimizer; by name."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        values: Mapping[str, Tensor],
        *,
        rounding: torch.dtype | None = None,
    ) -> None:
        self._parameters = dict(parameters)
        self._rounding = rounding
        self.values = {
            name: values[name].detach().float().clone().requires_grad_() for name in parameters
        }
        for name, parameter in self._parameters.items():
            hook = self._collector(self.values[name])
            parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.write_back()

    @staticmethod
    def _collector(master: Tensor) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad += parameter.grad
            parameter.grad = None

        return collect

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the compute weights."""
        for name, parameter in self._parameters.items():
            value = self.values[name]
            parameter.copy_(value if self._rounding is None else value.to(self._rounding))
