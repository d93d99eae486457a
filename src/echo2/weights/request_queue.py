"""What one peer has asked a relay for and not got yet. Chunk indexes only; no bytes.

    awaited --is here--> ready --take--> in hand --let go--> sent, or asked for again
       `--------------------'-- drop ------'

Promise: a chunk is in at most one of the three, and all three are owed and bounded together;
`take` gives the lowest chunk of a version, and versions take turns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Final

REQUESTS_PER_PEER_MAX: Final = 4096


class _Ready:
    """Chunks of one version that can be sent; the lowest is at hand."""

    def __init__(self) -> None:
        self.indexes: set[int] = set()
        self._heap: list[int] = []

    def add(self, index: int) -> None:
        self.indexes.add(index)
        heappush(self._heap, index)

    def lowest(self) -> int:
        while self._heap[0] not in self.indexes:
            heappop(self._heap)
        return self._heap[0]


class RequestQueue:
    """At most REQUESTS_PER_PEER_MAX chunks of any versions."""

    def __init__(self) -> None:
        self._ready: OrderedDict[str, _Ready] = OrderedDict()
        self._awaited: dict[str, set[int]] = {}
        self._in_hand: dict[str, set[int]] = {}
        self._num_ready = 0
        self._num_others = 0
        """Awaited or in hand. Counted, not summed up: a peer may ask for as many versions as
        chunks."""

    def __len__(self) -> int:
        """Of what is ready."""
        return self._num_ready

    @property
    def num_all(self) -> int:
        return self._num_ready + self._num_others

    def counts(self) -> dict[str, tuple[int, int]]:
        """(ready or in hand, awaited) of each version."""
        found: dict[str, tuple[int, int]] = {}
        for digest in {**self._ready, **self._in_hand, **self._awaited}:
            ready = len(self._ready[digest].indexes) if digest in self._ready else 0
            in_hand = len(self._in_hand.get(digest, ()))
            found[digest] = (ready + in_hand, len(self._awaited.get(digest, ())))
        return found

    def add(self, manifest_digest: str, index: int, *, here: bool = True) -> bool:
        """False when the queue is full; what waits already counts once."""
        ready = self._ready.get(manifest_digest)
        awaited = self._awaited.get(manifest_digest, set())
        if index in self._in_hand.get(manifest_digest, ()):
            return True
        if (ready is not None and index in ready.indexes) or (index in awaited and not here):
            return True
        if index not in awaited and self.num_all >= REQUESTS_PER_PEER_MAX:
            return False
        if here:
            self._discard(self._awaited, manifest_digest, index)
            self._ready.setdefault(manifest_digest, ready or _Ready()).add(index)
            self._num_ready += 1
        else:
            self._awaited.setdefault(manifest_digest, awaited).add(index)
            self._num_others += 1
        return True

    def arrived(self, manifest_digest: str, index: int) -> bool:
        """A chunk is here now; whether it was awaited."""
        if index not in self._awaited.get(manifest_digest, ()):
            return False
        return self.add(manifest_digest, index)

    def awaited(self, manifest_digest: str) -> tuple[int, ...]:
        return tuple(sorted(self._awaited.get(manifest_digest, ())))

    def lowest(self) -> int:
        """What `take` would give: the lowest of the version whose turn it is."""
        return next(iter(self._ready.values())).lowest()

    def take(self) -> tuple[str, int]:
        """The lowest chunk of the version whose turn it is; it is in hand until let go."""
        manifest_digest, ready = self._ready.popitem(last=False)
        index = ready.lowest()
        ready.indexes.remove(index)
        if ready.indexes:
            self._ready[manifest_digest] = ready
        self._num_ready -= 1
        self._in_hand.setdefault(manifest_digest, set()).add(index)
        self._num_others += 1
        return manifest_digest, index

    def let_go(self, manifest_digest: str, index: int) -> bool:
        """It is in hand no more; False when it was not, because it was dropped."""
        return self._discard(self._in_hand, manifest_digest, index)

    def drop(self, manifest_digest: str | None = None, indexes: Iterable[int] = ()) -> None:
        """Forget some chunks of a version, without `indexes` all, or all versions."""
        if manifest_digest is None:
            for part in (self._ready, self._awaited, self._in_hand):
                part.clear()
            self._num_ready = self._num_others = 0
            return
        ready = self._ready.get(manifest_digest)
        wanted = tuple(indexes)
        if ready is not None:
            before = len(ready.indexes)
            ready.indexes.difference_update(wanted or tuple(ready.indexes))
            self._num_ready -= before - len(ready.indexes)
            if not ready.indexes:
                del self._ready[manifest_digest]
        for part in (self._awaited, self._in_hand):
            for index in wanted or tuple(part.get(manifest_digest, ())):
                self._discard(part, manifest_digest, index)

    def _discard(self, part: dict[str, set[int]], manifest_digest: str, index: int) -> bool:
        indexes = part.get(manifest_digest)
        if indexes is None or index not in indexes:
            return False
        indexes.remove(index)
        self._num_others -= 1
        if not indexes:
            del part[manifest_digest]
        return True
