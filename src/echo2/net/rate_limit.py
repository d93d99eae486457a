"""How often something is told that others may bring about as often as they like."""

from __future__ import annotations


class RateLimit:
    """`burst` at once, then one each `interval_s`; what is passed over is counted."""

    def __init__(self, burst: int, interval_s: float) -> None:
        self._burst = float(burst)
        self._interval_s = interval_s
        self._left = float(burst)
        self._noted_at: float | None = None
        self._num_since = 0

    def pass_over(self) -> None:
        """It happened once more, and is not worth telling."""
        self._num_since += 1

    def note(self, now: float) -> int:
        """It happened once more, at `now`. 0: do not tell; N: tell, it is the Nth since it was
        told last."""
        if self._noted_at is not None:
            gained = max(0.0, now - self._noted_at) / self._interval_s
            self._left = min(self._burst, self._left + gained)
        self._noted_at = now
        self._num_since += 1
        if self._left < 1.0:
            return 0
        self._left -= 1.0
        num_since, self._num_since = self._num_since, 0
        return num_since
