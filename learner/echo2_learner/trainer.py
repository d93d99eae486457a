"""One learner step: a batch in, metrics out, the policy updated in place.

A step holds `learner.updates_per_step` optimizer updates over disjoint parts of the batch.
π_learner(θ_old) of eqs. 23 and 24 is computed once, before the first of them; with a
single update it is the current logprobs, detached.

Every rank is given the same batch and takes its own micro-batches; gradients are summed over
the ranks by the sharding, and what is measured by `ranks`.

The state of a step is in the policy, the optimizer and the step number alone: the learning
rate is a function of the step, so a resumed run goes on bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo2.config import LearnerTable
from echo2.errors import LearnerError
from echo2_learner import lora, shards
from echo2_learner.batch import TrainingBatch, Trajectory, split_updates
from echo2_learner.layout import choose_layout, pair_cost
from echo2_learner.losses import LossInputs, objective_named, total_loss
from echo2_learner.losses.terms import effective_sample_share, mismatch_kl
from echo2_learner.micro_batch import Cut, MicroBatch, micro_batches
from echo2_learner.policy import Policy
from echo2_learner.ranks import ALONE, Ranks
from echo2_learner.schedule import scheduled_learning_rate


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """What a learner step measured, over the tokens in the loss.

    `loss` and `grad_norm` (before clipping) are means over the updates; `entropy`,
    `mismatch_kl` and `ess` describe the policy at the start of the step.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    entropy: float
    clip_fraction: float
    mismatch_kl: float
    ess: float
    tokens: int
    num_updates: int


class Trainer:
    """Owns the optimizer of `policy`. `reference` is needed when the KL coefficient is not 0,
    `max_tokens` (sampling.max_tokens) for aggregate = "constant"."""

    def __init__(
        self,
        policy: Policy,
        table: LearnerTable,
        *,
        temperature: float,
        max_tokens: int = 1,
        reference: Policy | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        if table.loss.kl_coefficient > 0 and reference is None:
            raise ValueError("learner.loss.kl_coefficient is above 0; give a reference policy")
        self.policy = policy
        self.reference = reference
        self._table = table
        self._temperature = temperature
        self._ranks = ranks
        self._objective = objective_named(table.loss.name)
        self.start_logprobs: list[tuple[Trajectory, npt.NDArray[np.float32]]] = []
        """[T] π_learner(θ_old) of this rank's trajectories in the last step; 0.0 out of the loss"""
        self._parameters = policy.trained_parameters()
        self._drops = policy.has_adapters and table.lora.dropout > 0
        self._cut = Cut(
            tokens_max=table.micro_batch_tokens,
            layout=choose_layout(policy, packing=table.packing),
            pair_cost=pair_cost(policy.module),
            length=max_tokens,
            rank=ranks.rank,
            num_ranks=ranks.size,
            device=policy.device,
            dtype=torch.float64 if policy.dtype == torch.float64 else torch.float32,
            compute_dtype=policy.dtype,
        )
        # As is usual, gains and biases (vectors) are not decayed.
        decayed = [p for p in self._parameters.values() if p.ndim >= 2]
        others = [p for p in self._parameters.values() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": table.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=table.learning_rate,
            betas=(table.beta1, table.beta2),
            fused=not policy.is_sharded,
        )

    def step(self, batch: TrainingBatch) -> StepMetrics:
        """Train on `batch` at version `batch.step`. LearnerError when a loss is not finite."""
        learning_rate = scheduled_learning_rate(batch.step, self._table)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        parts = [
            micro_batches(part, self._cut, self._table.loss)
            for part in split_updates(batch, self._table.updates_per_step)
        ]
        parts = [part for part in parts if part]
        seen = _Seen()
        olds: list[list[Tensor] | None] = [None for _ in parts]
        if len(parts) > 1:
            olds = [self._old_logprobs(part, seen) for part in parts]
        updates = [
            self._update(part, old, seen, batch.step) for part, old in zip(parts, olds, strict=True)
        ]
        self.start_logprobs = seen.start_logprobs()
        return seen.metrics(updates, learning_rate, self._ranks)

    @torch.no_grad()
    def _old_logprobs(self, part: Sequence[MicroBatch], seen: _Seen) -> list[Tensor]:
        """π_learner(θ_old) of every micro-batch."""
        found = []
        for micro in part:
            old_N, entropy_N = self._logprobs(self.policy, micro)
            found.append(micro.spread(old_N))
            seen.add_start(micro, found[-1], entropy_N)
        return found

    def _update(
        self, part: Sequence[MicroBatch], olds: list[Tensor] | None, seen: _Seen, step: int
    ) -> tuple[float, float]:
        """One optimizer update over accumulated gradients; (loss, gradient norm)."""
        self.optimizer.zero_grad(set_to_none=True)
        losses = [
            self._accumulate(micro, None if olds is None else olds[index], seen)
            for index, micro in enumerate(part)
        ]
        for parameter in self._parameters.values():
            if parameter.grad is None:  # no trajectory has an advantage: it is zero, not absent
                parameter.grad = torch.zeros_like(parameter)
        norm_tensor = torch.nn.utils.clip_grad_norm_(
            self._parameters.values(), self._table.grad_norm_max
        )
        norm = float(shards.full(norm_tensor))
        (total,) = self._ranks.sum_floats([float(torch.stack(losses).sum())])
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise LearnerError(
                f"step {step}: the loss is {total} and the gradient norm {norm}; both must be "
                "finite. The weights were not updated. Lower learner.learning_rate or "
                "learner.grad_norm_max and start again with --resume"
            )
        self.optimizer.step()
        self.policy.after_update()
        return total, norm

    def _accumulate(self, micro: MicroBatch, old_BT: Tensor | None, seen: _Seen) -> Tensor:
        """Add the gradients of one micro-batch to those that are there; its loss."""
        # Without advantages and KL there is no gradient: a forward pass measures all.
        if self._drops and micro.has_gradient:
            lora.set_dropout(self.policy.module, active=True)
        with torch.set_grad_enabled(micro.has_gradient):
            logprobs_N, entropy_N = self._logprobs(self.policy, micro)
            if self._drops:
                lora.set_dropout(self.policy.module, active=False)
            logprobs_BT = micro.spread(logprobs_N)
            if old_BT is None:
                old_BT = logprobs_BT.detach()
                seen.add_start(micro, old_BT, entropy_N)
            inputs = LossInputs(
                logprobs_BT=logprobs_BT,
                old_BT=old_BT,
                behaviour_BT=micro.behaviour_BT,
                advantages_B=micro.advantages_B,
                mask_BT=micro.mask_BT,
                shares_BT=micro.shares_BT,
                reference_BT=self._reference_logprobs(micro),
            )
            loss, clipped_BT = total_loss(inputs, self._table.loss, objective=self._objective)
        seen.add_clipped(micro.gather(clipped_BT))
        if micro.has_gradient:
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        if self._table.loss.kl_coefficient == 0 or self.reference is None:
            return None
        return micro.spread(self._logprobs(self.reference, micro)[0])

    def _logprobs(self, policy: Policy, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return policy.token_logprobs(micro.rows, temperature=self._temperature)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Live state of the optimizer by "parameter name/state name", for a checkpoint."""
        return {
            f"{name}/{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Put back what `optimizer_tensors` gave; of a policy with the same names."""
        unknown = sorted({key.rpartition("/")[0] for key in tensors} - self._parameters.keys())
        if unknown:
            raise LearnerError(
                f"the optimizer state is of another model: it knows {', '.join(unknown[:5])}; use "
                "the model of the run"
            )
        self.optimizer.state.clear()
        is_fused = self.optimizer.defaults["fused"]
        for key, value in tensors.items():
            name, _, state = key.rpartition("/")
            parameter = self._parameters[name]
            # AdamW counts its steps on the CPU, whatever the device, unless it is fused.
            on_cpu = state == "step" and not is_fused
            device = torch.device("cpu") if on_cpu else parameter.device
            self.optimizer.state[parameter][state] = value.to(device, copy=True)


@dataclass(slots=True)
class _Seen:
    """Per-token values of one step, over the tokens in the loss of this rank."""

    old: list[Tensor] = field(default_factory=list)
    behaviour: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    starts: list[tuple[MicroBatch, Tensor]] = field(default_factory=list)

    def add_start(self, micro: MicroBatch, old_BT: Tensor, entropy_N: Tensor) -> None:
        self.starts.append((micro, old_BT))
        self.old.append(micro.gather(old_BT))
        self.behaviour.append(micro.gather(micro.behaviour_BT))
        self.entropy.append(entropy_N)

    def add_clipped(self, clipped_N: Tensor) -> None:
        self.clipped.append(clipped_N)

    def start_logprobs(self) -> list[tuple[Trajectory, npt.NDArray[np.float32]]]:
        return [
            (trajectory, row[: trajectory.length])
            for micro, old_BT in self.starts
            for trajectory, row in zip(
                micro.trajectories, old_BT.float().cpu().numpy(), strict=False
            )
        ]

    def metrics(
        self, updates: list[tuple[float, float]], learning_rate: float, ranks: Ranks
    ) -> StepMetrics:
        old_N, behaviour_N, entropy_N, clipped_N = (
            ranks.joined(torch.cat(parts) if parts else torch.zeros(0))
            for parts in (self.old, self.behaviour, self.entropy, self.clipped)
        )
        num_updates = len(updates)
        return StepMetrics(
            loss=sum(loss for loss, _ in updates) / max(1, num_updates),
            grad_norm=sum(norm for _, norm in updates) / max(1, num_updates),
            learning_rate=learning_rate,
            entropy=float(entropy_N.mean()) if entropy_N.numel() else 0.0,
            clip_fraction=float(clipped_N.double().mean()) if clipped_N.numel() else 0.0,
            mismatch_kl=mismatch_kl(old_N, behaviour_N),
            ess=effective_sample_share(old_N, behaviour_N),
            tokens=old_N.numel(),
            num_updates=num_updates,
        )
