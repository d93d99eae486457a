"""A relay on a virtual clock: the production fetch, and a model of serving.

Fetching is `core.relay_fetch` as production runs it; a payload is a flag that says whether it
is the chunk. Serving is as in `weights.serving`, without its queues' bounds: requests wait
until the chunk is here, the lowest chunk goes first over an uplink that sends one at a time,
whoever is owed something hears so every `ALIVE_S`, a version that nobody spoke of yet is
held for, and one that comes no more is refused. Every decision is checked when it is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random
from typing import Final

from echo2.core.relay_fetch import ORIGIN, Ask, Cancel, Dial, Limits, RelayFetch
from echo2.sim.relay_network import RelayNetwork

ALIVE_S: Final = 0.5
UNKNOWN_HOLD_S: Final = 5.0
REDIAL_S: Final = 1.0
Version = int
Way = tuple[Sequence[str], Iterable[int]]


@dataclass(slots=True)
class _Owed:
    """What one peer waits for, of one version."""

    ready: set[int] = field(default_factory=set)
    awaited: set[int] = field(default_factory=set)


class RelayHost:
    """`have`: verified chunks by version; it survives whoever takes it over. `is_liar`: decides
    for each payload whether it is spoiled. `on_complete(host, version)`."""

    def __init__(
        self,
        name: str,
        network: RelayNetwork,
        have: dict[Version, set[int]],
        *,
        num_chunks: int,
        chunk_bytes: int,
        limits: Limits,
        on_complete: Callable[[RelayHost, Version], None],
        is_liar: Callable[[], bool] = lambda: False,
    ) -> None:
        self.name = name
        self.have = have
        self.fetch: RelayFetch | None = None
        self.version: Version = -1
        self.is_liar = is_liar
        self.counters: Counter[str] = Counter()
        self._network = network
        self._num_chunks = num_chunks
        self._chunk_bytes = chunk_bytes
        self._limits = limits
        self._on_complete = on_complete
        self._owed: dict[tuple[str, Version], _Owed] = {}
        self._heaps: dict[str, list[tuple[int, int, Version]]] = {}
        """What each peer may be sent, lowest first."""
        self._num_ready = 0
        self._held_until: dict[Version, float] = {}
        self._ticking = False
        self._wakes: set[float] = set()

    @property
    def now(self) -> float:
        return self._network.timeline.now

    def is_complete(self, version: Version) -> bool:
        return len(self.have.get(version, ())) == self._num_chunks

    # ---------------------------------------------------------------------- fetching

    def begin(
        self,
        version: Version,
        ways: Sequence[Way],
        planned_s: float,
        helpers: Sequence[Sequence[str]],
    ) -> None:
        """Fetch a version; one under way is given up."""
        self._give_up()
        self.version = version
        here = self.have.setdefault(version, set())
        self._held_until.pop(version, None)
        if self.is_complete(version):
            self._on_complete(self, version)
            return
        lots = [(way, [i for i in chunks if i not in here]) for way, chunks in ways]
        self.fetch = RelayFetch(
            lots,
            chunk_bytes=self._chunk_bytes,
            limits=self._limits,
            now=self.now,
            planned_s=planned_s,
            helpers=helpers,
        )
        for name in self.fetch.sources:
            if self._network.is_up(self.name, name):
                self.fetch.connected(name, self.now)
        self._network.dial(self.name, ORIGIN)
        self.turn()
        for index in sorted(here):
            self._serve_awaited(version, index)

    def _give_up(self) -> None:
        if self.fetch is None:
            return
        for source in self.fetch.sources.values():
            if source.asked:
                self._network.send(self.name, source.name, "cancelled", self.version, ())
        self.fetch = None
        self._refuse_awaited(self.version)

    def turn(self) -> None:
        """What the shell does after every event."""
        fetch = self.fetch
        if fetch is None:
            return
        for effect in fetch.advance(self.now):
            match effect:
                case Ask(source, indexes):
                    self._check(fetch, source, indexes)
                    if not self._network.send(
                        self.name, source, "requested", self.version, indexes
                    ):
                        fetch.disconnected(source, self.now)
                case Cancel(source, indexes):
                    self._network.send(self.name, source, "cancelled", self.version, indexes)
                case Dial(source):
                    if source != ORIGIN and self._network.lines[source].accepts:
                        self._network.dial(self.name, source)
        due = fetch.next_at()
        if due is not None and due not in self._wakes:
            assert due > self.now, f"{self.name} is to look again at {due}, which is now"
            self._wakes.add(due)
            line = self._network.lines[self.name]
            self._network.timeline.at(due, self._wake, due, line.born)

    def _wake(self, due: float, born: int) -> None:
        self._wakes.discard(due)
        line = self._network.lines[self.name]
        if line.born == born and line.listener is self:
            self._network._soon(line, self.turn)

    def _check(self, fetch: RelayFetch, source: str, indexes: Sequence[int]) -> None:
        here = self.have[self.version]
        assert not here.intersection(indexes), f"{self.name} asks for what is here"
        assert len(fetch.sources[source].asked) <= self._limits.window_chunks
        asked = sum(len(other.asked) for other in fetch.sources.values())
        assert asked == fetch.num_asked, f"{self.name} asks two sources for one chunk"
        assert asked + len(here) <= self._num_chunks
        self.counters["asked"] += len(indexes)

    # -------------------------------------------------------------------- its links

    def link_up(self, other: str) -> None:
        if self.fetch is not None:
            self.fetch.connected(other, self.now)
            self.turn()

    def link_down(self, other: str) -> None:
        for owed in [key for key in self._owed if key[0] == other]:
            del self._owed[owed]
        if self.fetch is not None:
            self.fetch.disconnected(other, self.now)
            self.turn()
        if other == ORIGIN:
            self._redial()

    def dial_failed(self, other: str) -> None:
        if self.fetch is not None:
            self.fetch.unreachable(other, self.now)
            self.turn()
        if other == ORIGIN:
            self._network.timeline.after(REDIAL_S, self._redial)

    def _redial(self) -> None:
        if self._network.lines[self.name].listener is self:
            self._network.dial(self.name, ORIGIN)

    # -------------------------------------------------------------------- its sources

    def alive(self, sender: str, version: Version, num_held: int) -> None:
        if self.fetch is not None and version == self.version:
            self.fetch.alive(sender, num_held, self.now)
            self.turn()

    def refused(self, sender: str, version: Version) -> None:
        if self.fetch is not None and version == self.version:
            self.fetch.refused(sender, self.now)
            self.turn()

    def chunk(self, sender: str, version: Version, index: int, good: bool) -> None:
        fetch = self.fetch
        self.counters["received"] += 1
        if fetch is None or version != self.version:
            return
        here = self.have[version]
        cancels = fetch.arrived(sender, index, self._chunk_bytes, self.now)
        if cancels is None:
            self.counters["useless"] += 1
            self.turn()
            return
        assert index not in here, f"{self.name} takes a chunk twice"
        for cancel in cancels:
            self._network.send(self.name, cancel.source, "cancelled", version, cancel.indexes)
        if good:
            fetch.verified(index)
            here.add(index)
            self._serve_awaited(version, index)
        else:
            self.counters["wrong"] += 1
            assert fetch.wrong(index, self.now), "the origin is honest"
        assert fetch.num_missing == self._num_chunks - len(here)
        if fetch.is_done:
            self.fetch = None
            self._on_complete(self, version)
        else:
            self.turn()

    # ------------------------------------------------------------------- its receivers

    def requested(self, sender: str, version: Version, indexes: Sequence[int]) -> None:
        here = self.have.get(version)
        if here is None and version not in self._held_until:
            self._held_until[version] = self.now + UNKNOWN_HOLD_S
        elif here is not None and version != self.version and not self.is_complete(version):
            self._network.send(self.name, sender, "refused", version)
            return
        owed = self._owed.setdefault((sender, version), _Owed())
        for index in indexes:
            if here is not None and index in here:
                owed.awaited.discard(index)
                if index not in owed.ready:
                    owed.ready.add(index)
                    self._is_ready(sender, version, index)
            else:
                owed.awaited.add(index)
        self._serve()
        if not self._ticking:
            self._ticking = True
            self._tick_later()

    def cancelled(self, sender: str, version: Version, indexes: Sequence[int]) -> None:
        owed = self._owed.get((sender, version))
        if owed is not None and indexes:
            owed.ready.difference_update(indexes)
            owed.awaited.difference_update(indexes)
        if owed is not None and (not indexes or not (owed.ready or owed.awaited)):
            del self._owed[sender, version]

    def _serve_awaited(self, version: Version, index: int) -> None:
        for (peer, wanted), owed in self._owed.items():
            if wanted == version and index in owed.awaited:
                owed.awaited.remove(index)
                owed.ready.add(index)
                self._is_ready(peer, version, index)
        self._serve()

    def _serve(self) -> None:
        """The lowest chunk first, of those whose link has room."""
        while True:
            heaps = [
                (h[0], p) for p, h in self._heaps.items() if self._network.has_room(self.name, p)
            ]
            if not heaps:
                return
            (index, _, version), peer = min(heaps)
            heappop(self._heaps[peer])
            if not self._heaps[peer]:
                del self._heaps[peer]
            owed = self._owed.get((peer, version))
            if owed is None or index not in owed.ready:
                continue
            owed.ready.remove(index)
            if not owed.ready and not owed.awaited:
                del self._owed[peer, version]
            good = not self.is_liar()
            self.counters["sent"] += 1
            self._network.send_payload(
                self.name, peer, self._chunk_bytes, self._serve, "chunk", version, index, good
            )

    def _is_ready(self, peer: str, version: Version, index: int) -> None:
        self._num_ready += 1
        heappush(self._heaps.setdefault(peer, []), (index, self._num_ready, version))

    def _refuse_awaited(self, version: Version) -> None:
        for (peer, wanted), owed in list(self._owed.items()):
            if wanted == version and owed.awaited:
                owed.awaited.clear()
                if not owed.ready:
                    del self._owed[peer, wanted]
                self._network.send(self.name, peer, "refused", version)

    def _tick_later(self) -> None:
        line = self._network.lines[self.name]
        self._network.timeline.after(ALIVE_S, self._tick, line.born)

    def _tick(self, born: int) -> None:
        line = self._network.lines[self.name]
        if line.born != born or line.listener is not self:
            return
        if not line.paused:
            for version in [v for v, until in self._held_until.items() if self.now > until]:
                del self._held_until[version]
                self._refuse_awaited(version)
            for (peer, version), owed in self._owed.items():
                self._network.send(self.name, peer, "alive", version, len(owed.ready))
        if self._owed:
            self._tick_later()
        else:
            self._ticking = False


def now_and_then(rng: Random, share: float) -> Callable[[], bool]:
    """A liar that spoils this share of what it sends."""
    return lambda: rng.random() < share
