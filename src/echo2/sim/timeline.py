"""Virtual time: a heap of things to do, taken in order of time.

Promise: two runs that schedule the same actions see the same order; ties go to the one
that was scheduled first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Timeline:
    """`now` in virtual seconds; it never falls."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def at(self, time_s: float, action: Callable[..., None], *args: Any) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._sequence, action, args))

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay_s, action, *args)

    def run(self, *, until_s: float, stop: Callable[[], bool]) -> bool:
        """Act until `stop()`; False when `until_s` came first or nothing is left to do. What is
        due later stays for the next run."""
        heap = self._heap
        while heap:
            if heap[0][0] > until_s:
                return False
            self.now, _, action, args = heapq.heappop(heap)
            action(*args)
            if stop():
                return True
        return False
