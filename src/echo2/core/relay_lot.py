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
    order; `num_left` are not verified yet. `helpers` come before all others when a slow source
    loses a part; `helped`: so many of `sources` are such, and worth a moment until they are
    connected."""

    sources: tuple[str, ...]
    wanted: deque[int]
    num_left: int
    helpers: tuple[str, ...] = ()
    helped: int = 0

    def split(self, source: str, asked: Sequence[int], share: float) -> Lot | None:
        """Take `share` of what is left into a lot of its own, in which the helpers and the
        sources after `source` come first and itself last. `asked`: chunks of this lot that are
        asked of it, which it keeps, as far as it keeps so many: they may be on their way; those
        that go stand in the new lot's `wanted`. None: nothing goes.

        What goes is spread evenly over the rest, since whoever gets these chunks from us asks
        for the lowest first: if the slow source kept the lowest, those windows would be full
        of what comes last."""
        left = [*asked, *self.wanted]
        num_moved = int(len(left) * share + 0.5)
        if not num_moved:
            return None
        rest = left[min(len(asked), len(left) - num_moved) :]
        places = {(2 * k + 1) * len(rest) // (2 * num_moved) for k in range(num_moved)}
        moved = [rest[place] for place in sorted(places)]
        gone = set(moved)
        self.wanted = deque(index for index in self.wanted if index not in gone)
        self.num_left -= num_moved
        place = self.sources.index(source) + 1
        sources = self.helpers + self.sources[place:] + self.sources[:place]
        return Lot(sources, deque(moved), num_moved, helped=len(self.helpers))
