"""A network from a seed: delay, loss, duplication, reordering, and links that are cut.

Without reordering each link (one peer, one direction, one lane) delivers in order, as a
connection does. Probabilities and delays apply to each message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, Final, Literal

from echo2.sim.scenario import NetworkModel
from echo2.sim.timeline import Timeline

Direction = Literal["in", "out"]
DIRECTIONS: Final[tuple[Direction, ...]] = ("in", "out")
Link = tuple[str, Direction, str]
"""A peer, the direction as the coordinator sees it, and the lane."""


class Network:
    """`cut` holds the peers that nothing reaches ("out" of the coordinator), or from which
    nothing comes ("in")."""

    def __init__(self, timeline: Timeline, rng: Random, model: NetworkModel) -> None:
        self.timeline = timeline
        self.model = model
        self.cut: set[tuple[str, Direction]] = set()
        self.faults: Counter[str] = Counter()
        self._rng = rng
        self._last: dict[Link, float] = {}

    def heal(self) -> None:
        """From now on nothing is lost, doubled or reordered."""
        self.model = NetworkModel(delay_s=self.model.delay_s, jitter_s=self.model.jitter_s)
        self.cut.clear()

    def carry(self, link: Link, deliver: Callable[..., None], *args: Any) -> None:
        """Call `deliver(*args)` when the message arrives, if it does."""
        model, rng = self.model, self._rng
        if link[:2] in self.cut or (model.loss and rng.random() < model.loss):
            self.faults["messages_lost"] += 1
            return
        copies = 1
        if model.duplication and rng.random() < model.duplication:
            copies = 2
            self.faults["messages_doubled"] += 1
        for _ in range(copies):
            arrival = self.timeline.now + model.delay_s + model.jitter_s * rng.random()
            if model.reordering and rng.random() < model.reordering:
                arrival += model.reordering_s * rng.random()
                self.faults["messages_reordered"] += 1
            else:
                arrival = max(arrival, self._last.get(link, 0.0))
                self._last[link] = arrival
            self.timeline.at(arrival, self._arrive, link, deliver, args)

    def _arrive(self, link: Link, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        if link[:2] in self.cut:
            self.faults["messages_lost"] += 1
            return
        deliver(*args)
