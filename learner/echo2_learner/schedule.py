"""The learning rate as a function of the step alone, so that a resumed run goes on with it."""

from __future__ import annotations

import math

from echo2.config import LearnerTable


def scheduled_learning_rate(step: int, table: LearnerTable) -> float:
    """Learning rate of the batch trained at version `step` (0 is the first).

    Rises linearly over `warmup_steps`; then constant, or down to `learning_rate_min` at `steps`.
    """
    if step < table.warmup_steps:
        return table.learning_rate * (step + 1) / table.warmup_steps
    progress = min(1.0, (step - table.warmup_steps) / max(1, table.steps - table.warmup_steps))
    falls = table.learning_rate - table.learning_rate_min
    match table.schedule:
        case "cosine":
            return table.learning_rate_min + falls * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "linear":
            return table.learning_rate_min + falls * (1.0 - progress)
        case _:
            return table.learning_rate
