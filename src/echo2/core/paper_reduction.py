"""What one system saves over another for each learner step (ECHO-2 paper, section 9.1, Fig. 3a).

    cost = c·T/3600, c in $ per hour of all machines, T seconds of a learner step
    reduction = 1 − cost/cost of the baseline

The paper prints T and the prices of hours; what it plots follows from them and from the number of
workers, which it does not print.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """`machines`: workers apart from the learner; 0 of a baseline."""

    name: str
    step_s: float
    usd_per_h: float
    machines: int = 0
    is_baseline: bool = False

    @property
    def usd_per_step(self) -> float:
        return self.usd_per_h * self.step_s / 3600.0


@dataclass(frozen=True, slots=True)
class Reduction:
    """`share`: 0.3: three tenths of the baseline's $ per step are saved."""

    system: str
    baseline: str
    share: float


def reductions(systems: Sequence[System]) -> list[Reduction]:
    """Of each that is no baseline against each baseline, in their order. A baseline that costs
    nothing has none."""
    baselines = [each for each in systems if each.is_baseline and each.usd_per_step > 0]
    return [
        Reduction(own.name, base.name, 1.0 - own.usd_per_step / base.usd_per_step)
        for own in systems
        if not own.is_baseline
        for base in baselines
    ]


def mean_of(found: Sequence[Reduction], baseline: str) -> float:
    """Mean share over the systems compared with `baseline`. ValueError when there is none."""
    shares = [each.share for each in found if each.baseline == baseline]
    if not shares:
        raise ValueError(f"nothing is compared with {baseline}")
    return sum(shares) / len(shares)
