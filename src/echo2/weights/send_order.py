"""To whom the next chunk goes: the lowest chunk first, and nobody is starved of it.

Relay plans count on the order (docs/dissemination.md, Stripes): the chunks of every stripe then
leave at the rate that the plan gives it, whatever the number of children. The order alone
would let a peer that begins at chunk 0 hold up those that are nearly done, so whoever can be
sent to is given at least half of an equal share:

    lap      grows by 1/(2 k) with each chunk that is sent while k peers could be sent to
    deficit  of a peer: the growth of the lap since it came, less the chunks it got; at most 2,
             at least -1

A peer with a deficit of 1 goes first; otherwise the lowest chunk does, and of equal ones that
of the peer with the largest deficit. Who can be sent to, and what each is owed, is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from echo2.types import PeerId

SHARE_MIN: Final = 0.5
"""Of an equal share, what everybody gets who takes it."""
_OWED: Final = 1.0 - 1e-9
"""A deficit that has grown to 1, whatever the rounding."""


class SendOrder:
    """Remembers what each peer got; O(peers) for a decision."""

    def __init__(self) -> None:
        self._lap = 0.0
        self._marks: dict[PeerId, float] = {}
        """lap - deficit."""

    def next(self, lowest: Mapping[PeerId, int]) -> PeerId:
        """Of `lowest`, the lowest chunk that each of those who can be sent to waits for (at
        least one), whose goes next. It counts as sent."""
        lap, marks = self._lap, self._marks

        def rank(peer: PeerId) -> tuple[bool, int, float]:
            mark = marks.get(peer, lap)
            return lap - mark < _OWED, lowest[peer], mark

        first = min(lowest, key=rank)
        mark = min(max(marks.get(first, lap), lap - 2.0) + 1.0, lap + 1.0)
        for peer in lowest:
            marks.setdefault(peer, lap)
        marks[first] = mark
        self._lap += SHARE_MIN / len(lowest)
        return first

    def forget(self, peer: PeerId) -> None:
        """It wants nothing more, or is gone."""
        self._marks.pop(peer, None)
