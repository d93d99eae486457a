"""The tables [learner.loss] and [learner.lora].

The name of a loss sets the defaults of the other settings (`LOSS_DEFAULTS`), the name of a
correction those of its bounds (`CORRECTION_BOUNDS`). They are filled in when the table is
read, so the resolved configuration shows the values that count. docs/losses.md has formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from echo2.config_table import Table

LOSS_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "grpo": {},
    "dr_grpo": {"aggregate": "constant", "scale_advantages": False},
    "dapo": {"clip_high": 0.28, "aggregate": "token_mean", "overlong_share": 0.2},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"clip_low": 1.0, "clip_high": 4.0, "aggregate": "token_mean"},
}
"""Those of a loss of the user's own are grpo's."""

CORRECTION_BOUNDS: Final[Mapping[str, tuple[float, float]]] = {
    "icepop": (0.5, 5.0),
    "sequence_mask": (0.5, 2.0),
    "geometric_mask": (0.9, 1.1),
}


class LossTable(Table):
    name: (
        Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo"]
        | Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")]
    ) = "grpo"
    """The objective: a built-in one, or "package.module:function" of yours. The name also sets
    the defaults of the other settings here."""
    correction: Literal["tis", "icepop", "sequence_mask", "geometric_mask", "none"] = "tis"
    """How tokens are weighed for what staleness and the engine changed: truncated importance
    weights, or those with tokens or whole trajectories masked, or not at all."""
    clip_low: Annotated[float, Field(ge=0, le=1)] = 0.2
    clip_high: Annotated[float, Field(ge=0, le=100)] = 0.2
    """PPO clip of the ratio to the learner's own logprobs at the start of the step:
    [1 - clip_low, 1 + clip_high] (papers, Appendix D, eq. 25)."""
    importance_cap: Annotated[float, Field(gt=0, le=1e6)] = 2.0
    """C of eq. 24: truncated importance sampling against the behaviour logprobs."""
    correction_low: Annotated[float, Field(ge=0, le=1)] = 0.0
    correction_high: Annotated[float, Field(ge=1, le=1e6)] = 1e6
    """α and β of icepop (per token), or the bounds of a trajectory's ratio for the two masks;
    no part of the others."""
    kl_coefficient: Annotated[float, Field(ge=0, le=100)] = 0.0
    """β of eq. 25: KL to the reference (the first version); 0 needs no reference model."""
    aggregate: Literal["trajectory_mean", "token_mean", "constant"] = "trajectory_mean"
    """Mean per trajectory first (eq. 25), or over all tokens of the update, or the sum over a
    trajectory's tokens divided by sampling.max_tokens, then the mean of trajectories."""
    scale_advantages: bool = True
    """Divide by the standard deviation of the group's rewards (eq. 21); false only centres."""
    advantage_epsilon: Annotated[float, Field(gt=0, le=1)] = 1e-6
    """ε of eq. 21."""
    overlong_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The last share of sampling.max_tokens over which the reward falls by 1 in all (DAPO,
    eq. 13); 0 leaves rewards as they are."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Free settings of a loss of your own."""

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_names(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        name, correction = values.get("name"), values.get("correction")
        filled = dict(LOSS_DEFAULTS.get(name, {})) if isinstance(name, str) else {}
        if isinstance(correction, str) and correction in CORRECTION_BOUNDS:
            low, high = CORRECTION_BOUNDS[correction]
            filled |= {"correction_low": low, "correction_high": high}
        return filled | dict(values)


class LoraTable(Table):
    """Adapters of low rank are trained instead of the weights; rank 0: none."""

    rank: Annotated[int, Field(ge=0, le=4096)] = 0
    """r of the adapters; 0 trains all weights."""
    alpha: Annotated[int, Field(ge=1, le=10**6)] = 32
    """Adapters are scaled by alpha / rank."""
    targets: list[str] = Field(default_factory=lambda: ["all-linear"])
    """Names of the linear layers that get an adapter ("q_proj"), or "all-linear" alone."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of the adapters' input, while gradients are computed."""
    publish: Literal["adapter", "merged"] = "adapter"
    """A version holds the adapters alone, and workers, who fetch the model beneath once, add
    them to it; or the whole model with them in it. The weights are the same."""
