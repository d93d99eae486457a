"""Running estimates of times and rates: exponentially weighted, with a mean deviation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Estimate:
    """Mean and mean absolute deviation of what was measured, in its own unit."""

    weight: float = 0.2
    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        weight = max(self.weight, 1.0 / self.count)
        error = value - self.mean
        self.mean += weight * error
        self.deviation += weight * (abs(error) - self.deviation) if self.count > 1 else 0.0

    @property
    def high(self) -> float:
        """A careful upper value: mean plus deviation."""
        return self.mean + self.deviation

    @property
    def known(self) -> bool:
        return self.count > 0
