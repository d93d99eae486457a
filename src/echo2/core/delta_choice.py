"""Which way each worker gets a version: deltas from the one that it has, or all of it.

The publisher offers deltas beside its versions; those of the last OFFERS_MAX are remembered.
A worker k versions behind gets the chain that leads to the new one, where that costs fewer
bytes than the version itself (`echo2.core.delta_paths`). Who gets the same last artifact is
planned together, since only they can forward it to each other.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from echo2.core.delta_paths import Artifact, cheapest_path
from echo2.messages import VersionPublished
from echo2.types import PeerId

OFFERS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Way:
    """`path`: deltas to fetch and apply, () for the whole version. `num_bytes`: those of its
    last part, `total_bytes` those of all."""

    path: tuple[str, ...]
    num_bytes: int
    total_bytes: int

    @property
    def last(self) -> str:
        """The artifact that ends it; "" for the whole version."""
        return self.path[-1] if self.path else ""


class DeltaOffers:
    """What leads from one version to another, by the digest of the delta."""

    def __init__(self) -> None:
        self._offers: OrderedDict[str, Artifact] = OrderedDict()

    def add(self, published: VersionPublished) -> None:
        for offer in published.deltas:
            self._offers[offer.manifest_digest] = Artifact(
                digest=offer.manifest_digest,
                target=published.manifest_digest,
                num_bytes=offer.num_bytes,
                base=offer.base,
            )
        while len(self._offers) > OFFERS_MAX:
            self._offers.popitem(last=False)

    def leading_to(self, target: str) -> Iterator[str]:
        """The deltas that make the version with this manifest."""
        return (digest for digest, found in self._offers.items() if found.target == target)

    def way(self, published: VersionPublished, have: str | None) -> Way:
        """The cheapest for a worker that has the version `have` (a manifest's digest)."""
        whole = Way((), published.num_bytes, published.num_bytes)
        if have is None or have == published.manifest_digest:
            return whole
        want = published.manifest_digest
        full = Artifact(digest=want, target=want, num_bytes=published.num_bytes)
        found = cheapest_path(have, want, [full, *self._offers.values()])
        if not found or any(artifact.base is None for artifact in found):
            return whole
        total_bytes = sum(artifact.num_bytes for artifact in found)
        return Way(tuple(artifact.digest for artifact in found), found[-1].num_bytes, total_bytes)


def main_group(ways: Mapping[PeerId, Way]) -> list[PeerId]:
    """The largest set of workers with the same last artifact, in order; of equal ones that
    which comes first."""
    if not ways:
        return []
    last, _ = Counter(way.last for way in ways.values()).most_common(1)[0]
    return [peer for peer, way in ways.items() if way.last == last]
