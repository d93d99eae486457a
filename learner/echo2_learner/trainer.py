"""One learner step: a batch in, metrics out, the policy updated in place.

A step holds `learner.updates_per_step` optimizer updates over disjoint parts of the batch.
π_learner(θ_old) of eqs. 23 and 24 is computed once, before the first of them; with a
single update it is the current logprobs, detached.

The state of a step is in the policy, the optimizer and the step number alone: the learning
rate is a function of the step, so a resumed run goes on bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echo2.config import LearnerTable
from echo2.errors import LearnerError
from echo2_learner.batch import MicroBatch, TrainingBatch, micro_batches, split_updates
from echo2_learner.loss import (
    effective_sample_share,
    grpo_loss,
    is_clipped,
    mismatch_kl,
    ratio,
)
from echo2_learner.policy import Policy


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
    """Owns the optimizer of `policy`. `reference` is needed when the KL coefficient is not 0."""

    def __init__(
        self,
        policy: Policy,
        table: LearnerTable,
        *,
        temperature: float,
        reference: Policy | None = None,
    ) -> None:
        if table.loss.kl_coefficient > 0 and reference is None:
            raise ValueError("learner.loss.kl_coefficient is above 0; give a reference policy")
        self.policy = policy
        self.reference = reference
        self._table = table
        self._temperature = temperature
        self._parameters = policy.named_parameters()
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
        )

    def step(self, batch: TrainingBatch) -> StepMetrics:
        """Train on `batch`. LearnerError when loss or gradient are not finite, or when the
        device has too little memory.

        A part without any token in the loss makes no update.
        """
        try:
            return self._step(batch)
        except torch.OutOfMemoryError as error:
            raise LearnerError(
                f"step {batch.step} needs more memory than {self.policy.device} has, with "
                f"learner.micro_batch_tokens = {self._table.micro_batch_tokens}; lower it and "
                f"start again with --resume ({error})"
            ) from error

    def _step(self, batch: TrainingBatch) -> StepMetrics:
        learning_rate = scheduled_learning_rate(batch.step, self._table)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        parts = [
            micro_batches(
                part,
                tokens_max=self._table.micro_batch_tokens,
                aggregate=self._table.loss.aggregate,
                device=self.policy.device,
                dtype=next(self.policy.module.parameters()).dtype,
            )
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
        return seen.metrics(updates, learning_rate)

    @torch.no_grad()
    def _old_logprobs(self, part: Sequence[MicroBatch], seen: _Seen) -> list[Tensor]:
        """π_learner(θ_old) of every micro-batch."""
        found = []
        for micro in part:
            old_BT, entropy_BT = self._logprobs(self.policy, micro)
            seen.add_start(micro, old_BT, entropy_BT)
            found.append(old_BT)
        return found

    def _update(
        self, part: Sequence[MicroBatch], olds: list[Tensor] | None, seen: _Seen, step: int
    ) -> tuple[float, float]:
        """One optimizer update over accumulated gradients; (loss, gradient norm)."""
        table = self._table.loss
        self.optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for index, micro in enumerate(part):
            # Without advantages and KL there is no gradient: a forward pass measures all.
            has_gradient = micro.has_advantages or table.kl_coefficient > 0
            with torch.set_grad_enabled(has_gradient):
                logprobs_BT, entropy_BT = self._logprobs(self.policy, micro)
            if olds is None:
                old_BT = logprobs_BT.detach()
                seen.add_start(micro, old_BT, entropy_BT)
            else:
                old_BT = olds[index]
            seen.add_clipped(
                is_clipped(
                    ratio(logprobs_BT.detach(), old_BT),
                    micro.advantages_B[:, None],
                    clip_low=table.clip_low,
                    clip_high=table.clip_high,
                )[micro.mask_BT]
            )
            loss = grpo_loss(
                logprobs_BT,
                old_BT=old_BT,
                behaviour_BT=micro.behaviour_BT,
                advantages_B=micro.advantages_B,
                mask_BT=micro.mask_BT,
                shares_BT=micro.shares_BT,
                clip_low=table.clip_low,
                clip_high=table.clip_high,
                importance_cap=table.importance_cap,
                kl_coefficient=table.kl_coefficient,
                reference_BT=self._reference_logprobs(micro),
            )
            if has_gradient:
                loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        for parameter in self._parameters.values():
            if parameter.grad is None:  # no trajectory has an advantage: it is zero, not absent
                parameter.grad = torch.zeros_like(parameter)
        norm = float(
            torch.nn.utils.clip_grad_norm_(self._parameters.values(), self._table.grad_norm_max)
        )
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise LearnerError(
                f"step {step}: the loss is {total} and the gradient norm {norm}; both must be "
                "finite. The weights were not updated. Lower learner.learning_rate or "
                "learner.grad_norm_max and start again with --resume"
            )
        self.optimizer.step()
        return total, norm

    @torch.no_grad()
    def _reference_logprobs(self, micro: MicroBatch) -> Tensor | None:
        if self._table.loss.kl_coefficient == 0 or self.reference is None:
            return None
        return self._logprobs(self.reference, micro)[0]

    def _logprobs(self, policy: Policy, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return policy.logprobs(micro.token_ids_BT, micro.lengths_B, temperature=self._temperature)

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Live state of the optimizer by "parameter name/state name", for a checkpoint."""
        return {
            f"{name}/{key}": value
            for name, parameter in self._parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Put back what `optimizer_tensors` gave; of a policy with the same names."""
        unknown = sorted({key.rpartition("/")[0] for key in tensors} - self._parameters.keys())
        if unknown:
            raise LearnerError(
                f"the optimizer state is of another model: it knows {', '.join(unknown[:5])}; use "
                "the model of the run"
            )
        self.optimizer.state.clear()
        for key, value in tensors.items():
            name, _, state = key.rpartition("/")
            parameter = self._parameters[name]
            # AdamW counts its steps on the CPU, whatever the device.
            device = torch.device("cpu") if state == "step" else parameter.device
            self.optimizer.state[parameter][state] = value.to(device, copy=True)


def scheduled_learning_rate(step: int, table: LearnerTable) -> float:
    """Learning rate of the batch trained at version `step` (0 is the first).

    Rises linearly over `warmup_steps`; then constant, or down to 0 at `steps`.
    """
    if step < table.warmup_steps:
        return table.learning_rate * (step + 1) / table.warmup_steps
    progress = min(1.0, (step - table.warmup_steps) / max(1, table.steps - table.warmup_steps))
    if table.schedule == "cosine":
        return table.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
    if table.schedule == "linear":
        return table.learning_rate * (1.0 - progress)
    return table.learning_rate


@dataclass(slots=True)
class _Seen:
    """Per-token values of one step, over the tokens in the loss."""

    old: list[Tensor] = field(default_factory=list)
    behaviour: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)

    def add_start(self, micro: MicroBatch, old_BT: Tensor, entropy_BT: Tensor) -> None:
        self.old.append(old_BT[micro.mask_BT])
        self.behaviour.append(micro.behaviour_BT[micro.mask_BT])
        self.entropy.append(entropy_BT[micro.mask_BT])

    def add_clipped(self, clipped_N: Tensor) -> None:
        self.clipped.append(clipped_N)

    def metrics(self, updates: list[tuple[float, float]], learning_rate: float) -> StepMetrics:
        old_N, behaviour_N = _joined(self.old), _joined(self.behaviour)
        num_updates = len(updates)
        return StepMetrics(
            loss=sum(loss for loss, _ in updates) / max(1, num_updates),
            grad_norm=sum(norm for _, norm in updates) / max(1, num_updates),
            learning_rate=learning_rate,
            entropy=float(_joined(self.entropy).mean()) if self.entropy else 0.0,
            clip_fraction=float(_joined(self.clipped).double().mean()) if self.clipped else 0.0,
            mismatch_kl=mismatch_kl(old_N, behaviour_N),
            ess=effective_sample_share(old_N, behaviour_N),
            tokens=old_N.numel(),
            num_updates=num_updates,
        )


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0)
