"""A network from a seed: delay, loss, duplication, reordering, and links that are cut.

Without reordering each link (one peer, one direction, one lane) delivers in order, as a
connection does. Probabilities and delays apply to each message.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from echo2.sim.scenario import NetworkModel
from echo2.sim.timeline import Timeline


class Network:
    """`cut` holds the peers that nothing reaches and nothing leaves."""

    def __init__(self, timeline: Timeline, rng: Random, model: NetworkModel) -> None:
        self.timeline = timeline
        self.model = model
        self.cut: set[str] = set()
        self.num_lost = 0
        self.num_doubled = 0
        self._rng = rng
        self._last: dict[tuple[str, ...], float] = {}

    def heal(self) -> None:
        """From now on nothing is lost, doubled or reordered."""
        self.model = NetworkModel(delay_s=self.model.delay_s, jitter_s=self.model.jitter_s)
        self.cut.clear()

    def carry(
        self, peer: str, link: tuple[str, ...], deliver: Callable[..., None], *args: Any
    ) -> None:
        """Call `deliver(*args)` when the message arrives, if it does."""
        model, rng = self.model, self._rng
        if peer in self.cut or (model.loss and rng.random() < model.loss):
            self.num_lost += 1
            return
        copies = 1
        if model.duplication and rng.random() < model.duplication:
            copies = 2
            self.num_doubled += 1
        for _ in range(copies):
            arrival = self.timeline.now + model.delay_s + model.jitter_s * rng.random()
            if model.reordering and rng.random() < model.reordering:
                arrival += model.reordering_s * rng.random()
            else:
                arrival = max(arrival, self._last.get(link, 0.0))
                self._last[link] = arrival
            self.timeline.at(arrival, self._arrive, peer, deliver, args)

    def _arrive(self, peer: str, deliver: Callable[..., None], args: tuple[Any, ...]) -> None:
        if peer in self.cut:
            self.num_lost += 1
            return
        deliver(*args)
