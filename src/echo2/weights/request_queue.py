"""What one peer has asked a relay for and not got yet. Chunk indexes only; no bytes."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

REQUESTS_PER_PEER_MAX: Final = 4096


class RequestQueue:
    """What one peer still wants, by version; versions take turns. Chunks are `ready`, or
    `awaited` while they are not here."""

    def __init__(self) -> None:
        self._ready: OrderedDict[str, dict[int, None]] = OrderedDict()
        self._awaited: dict[str, set[int]] = {}
        self._num_ready = 0

    def __len__(self) -> int:
        """Of what is ready."""
        return self._num_ready

    @property
    def num_all(self) -> int:
        return self._num_ready + sum(map(len, self._awaited.values()))

    def counts(self) -> dict[str, tuple[int, int]]:
        """(ready, awaited) of each version."""
        return {
            digest: (len(self._ready.get(digest, ())), len(self._awaited.get(digest, ())))
            for digest in self._ready.keys() | self._awaited.keys()
        }

    def add(self, manifest_digest: str, index: int, *, here: bool = True) -> bool:
        """False when the queue is full; what waits already counts once."""
        ready = self._ready.get(manifest_digest, {})
        awaited = self._awaited.get(manifest_digest, set())
        if index in ready or (index in awaited and not here):
            return True
        if index not in awaited and self.num_all >= REQUESTS_PER_PEER_MAX:
            return False
        awaited.discard(index)
        if here:
            ready[index] = None
            self._ready[manifest_digest] = ready
            self._num_ready += 1
        else:
            awaited.add(index)
            self._awaited[manifest_digest] = awaited
        return True

    def arrived(self, manifest_digest: str, index: int) -> bool:
        """A chunk is here now; whether it was awaited."""
        awaited = self._awaited.get(manifest_digest)
        if awaited is None or index not in awaited:
            return False
        awaited.remove(index)
        if not awaited:
            del self._awaited[manifest_digest]
        return self.add(manifest_digest, index)

    def awaited(self, manifest_digest: str) -> tuple[int, ...]:
        return tuple(sorted(self._awaited.get(manifest_digest, ())))

    def take(self, at_most: int) -> tuple[str, list[int]]:
        """The next chunks of the version whose turn it is."""
        manifest_digest, indexes = self._ready.popitem(last=False)
        taken = list(itertools.islice(indexes, at_most))
        for index in taken:
            del indexes[index]
        if indexes:
            self._ready[manifest_digest] = indexes
        self._num_ready -= len(taken)
        return manifest_digest, taken

    def drop(self, manifest_digest: str | None = None, indexes: Iterable[int] = ()) -> None:
        """Forget some chunks of a version, without `indexes` all, or all versions."""
        if manifest_digest is None:
            self._ready.clear()
            self._awaited.clear()
            self._num_ready = 0
            return
        ready, awaited = self._ready.get(manifest_digest), self._awaited.get(manifest_digest)
        for index in tuple(indexes) or (*(ready or ()), *(awaited or ())):
            if ready is not None and index in ready:
                del ready[index]
                self._num_ready -= 1
            if awaited is not None:
                awaited.discard(index)
        if ready is not None and not ready:
            del self._ready[manifest_digest]
        if awaited is not None and not awaited:
            del self._awaited[manifest_digest]
