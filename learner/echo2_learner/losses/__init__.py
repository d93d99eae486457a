"""Losses and corrections by name, and the sum that is minimised.

    loss = - Σ share · weight · (objective - β k3)

over the tokens in the loss (papers, Appendix D, eqs. 24 and 25): the objective is
`learner.loss.name`, the weight `learner.loss.correction`, the share `learner.loss.aggregate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from torch import Tensor

from echo2.config_loss import LossTable
from echo2.errors import ConfigError
from echo2_learner.losses import corrections, objectives
from echo2_learner.losses.inputs import Correction, LossInputs, Objective
from echo2_learner.losses.terms import kl_k3

OBJECTIVES: Final[Mapping[str, Objective]] = {
    "grpo": objectives.grpo,
    "dr_grpo": objectives.grpo,
    "dapo": objectives.grpo,
    "gspo": objectives.gspo,
    "cispo": objectives.cispo,
}

CORRECTIONS: Final[Mapping[str, Correction]] = {
    "tis": corrections.tis,
    "icepop": corrections.icepop,
    "sequence_mask": corrections.sequence_mask,
    "geometric_mask": corrections.geometric_mask,
    "none": corrections.no_correction,
}

__all__ = ["CORRECTIONS", "OBJECTIVES", "LossInputs", "Objective", "objective_named", "total_loss"]


def objective_named(name: str) -> Objective:
    """A built-in objective, or the user's function of "package.module:function"."""
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    module_name, _, function_name = name.partition(":")
    try:
        found: Any = getattr(import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"learner.loss.name: {name} cannot be imported ({error}); install its package where "
            f"the learner runs, or use one of {', '.join(OBJECTIVES)}"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"learner.loss.name: {name} is {type(found).__name__}; it must be a function of "
            "(LossInputs, LossTable), as docs/losses.md shows"
        )
    return found  # type: ignore[no-any-return]


def total_loss(
    inputs: LossInputs, table: LossTable, *, objective: Objective
) -> tuple[Tensor, Tensor]:
    """(-J of eq. 24 over this micro-batch, to be minimised; [B, T] where a clip cut).

    As eq. 24 has it, the weight multiplies the KL term too. `reference_BT` is needed when
    `kl_coefficient` is not 0. ValueError if a user's objective has another shape.
    """
    inputs = inputs.masked()
    objective_BT, clipped_BT = objective(inputs, table)
    if objective_BT.shape != inputs.mask_BT.shape or clipped_BT.shape != inputs.mask_BT.shape:
        raise ValueError(
            f"learner.loss.name {table.name}: it gave an objective of shape "
            f"{tuple(objective_BT.shape)} and clipped of {tuple(clipped_BT.shape)}; both must be "
            f"[B, T] = {tuple(inputs.mask_BT.shape)}"
        )
    if table.kl_coefficient > 0:
        if inputs.reference_BT is None:
            raise ValueError(f"kl_coefficient is {table.kl_coefficient}; give reference logprobs")
        kl_BT = kl_k3(inputs.logprobs_BT, inputs.reference_BT)
        objective_BT = objective_BT - table.kl_coefficient * kl_BT
    weights_BT = CORRECTIONS[table.correction](inputs, table)
    return -(inputs.shares_BT * weights_BT * objective_BT).sum(), clipped_BT
