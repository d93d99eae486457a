"""Chunks of one version that follow the same sources.

A lot is a stripe, or what is left of one that a slow source has lost. Whom to ask for what
decides `core.relay_fetch`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Lot:
    """`sources` in the order in which they are asked; `wanted` are asked of nobody now, in
    order; `num_left` are not verified yet."""

    sources: tuple[str, ...]
    wanted: deque[int]
    num_left: int

    def split(self, source: str, asked: Sequence[int], share: float) -> Lot | None:
        """Take `share` of what is left, from its end, into a lot of its own, in which the
        sources after `source` come first and itself last. `asked`: chunks of this lot that are
        asked of it; those that go stand in the new lot's `wanted`. None: nothing goes."""
        left = [*asked, *self.wanted]
        num_moved = int(len(left) * share + 0.5)
        if not num_moved:
            return None
        kept, moved = left[: len(left) - num_moved], left[len(left) - num_moved :]
        self.wanted = deque(kept[len(asked) :])
        self.num_left -= num_moved
        place = self.sources.index(source) + 1
        sources = self.sources[place:] + self.sources[:place]
        return Lot(sources, deque(moved), num_moved)
