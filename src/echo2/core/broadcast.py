"""How a version reaches the fleet: T_bcast, from its publication until the share q of the
workers that were active then has installed it.

A worker that leaves before it has installed the version is taken out of the count. A version
that a newer one overtakes is never complete, and is forgotten with the others of its age.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from echo2.core.dissemination import RelayPlan
from echo2.types import BroadcastWorker, PeerId, Version

BROADCASTS_MAX: Final = 16
QUANTILES: Final = (0.5, 0.9, 1.0)
METRIC_QUANTILE: Final = 0.9
PROBLEMS_TOLD: Final = 64
PROBLEM_CHARACTERS: Final = 500


@dataclass(frozen=True, slots=True)
class Installation:
    """`seconds` after the publication; `fetch_s` and `install_s` are parts of it."""

    seconds: float
    fetch_s: float
    install_s: float


@dataclass(slots=True)
class Broadcast:
    """`waiting`: workers, active at the publication, that have not installed the version.
    `problems`: why some of them have not, also of those that left since. `predicted_s` and
    `bound_s` are the relay plan's; None without one."""

    version: Version
    published_at: float
    waiting: set[PeerId]
    predicted_s: float | None = None
    bound_s: float | None = None
    installations: dict[PeerId, Installation] = field(default_factory=dict)
    problems: dict[PeerId, str] = field(default_factory=dict)

    @property
    def num_workers(self) -> int:
        return len(self.waiting) + len(self.installations)

    @property
    def is_complete(self) -> bool:
        return not self.waiting and bool(self.installations)

    def t_bcast_s(self, share: float) -> float | None:
        """Until `share` of the workers, rounded up, have it; None before that."""
        rank = max(1, math.ceil(share * self.num_workers - 1e-9))
        if len(self.installations) < rank:
            return None
        return sorted(found.seconds for found in self.installations.values())[rank - 1]

    @property
    def fetch_share(self) -> float | None:
        """Part of all the time until installation that was spent fetching."""
        return self._share(sum(found.fetch_s for found in self.installations.values()))

    @property
    def install_share(self) -> float | None:
        """Part of it that was spent installing."""
        return self._share(sum(found.install_s for found in self.installations.values()))

    def _share(self, seconds: float) -> float | None:
        total = sum(found.seconds for found in self.installations.values())
        return min(1.0, seconds / total) if total > 0 else None


class Broadcasts:
    """The newest versions' broadcasts, at most BROADCASTS_MAX."""

    def __init__(self) -> None:
        self.broadcasts: OrderedDict[Version, Broadcast] = OrderedDict()

    def begin(
        self,
        version: Version,
        *,
        active: Iterable[PeerId],
        now: float,
        plan: RelayPlan | None = None,
    ) -> None:
        """The version is published now. Nothing is measured if nobody is there."""
        waiting = set(active)
        if waiting and version not in self.broadcasts:
            planned = (None, None) if plan is None else (plan.predicted_s, plan.bound_s)
            self.broadcasts[version] = Broadcast(version, now, waiting, *planned)
            while len(self.broadcasts) > BROADCASTS_MAX:
                self.broadcasts.popitem(last=False)

    def installed(
        self, version: Version, peer: PeerId, *, fetch_s: float, install_s: float, now: float
    ) -> Broadcast | None:
        """The broadcast, if this completes it."""
        found = self.broadcasts.get(version)
        if found is None or peer not in found.waiting:
            return None
        found.waiting.discard(peer)
        found.problems.pop(peer, None)
        found.installations[peer] = Installation(now - found.published_at, fetch_s, install_s)
        return found if found.is_complete else None

    def failed(self, version: Version, peer: PeerId, text: str) -> None:
        """A try of the worker's failed; it may try again."""
        found = self.broadcasts.get(version)
        if found is not None and peer in found.waiting:
            found.problems[peer] = text

    def leave_out(self, peer: PeerId, version: Version | None = None) -> list[Broadcast]:
        """Wait for this worker no longer: it left, or has `version` since nobody knows when.
        Returns those that are complete with that."""
        done = []
        for found in self.broadcasts.values():
            if peer in found.waiting and version in (None, found.version):
                found.waiting.discard(peer)
                done += [found] if found.is_complete else []
        return done

    def workers(self, version: Version) -> tuple[BroadcastWorker, ...]:
        """How far each is, those that have it first; no more than PROBLEMS_TOLD problems."""
        found = self.broadcasts.get(version)
        if found is None:
            return ()
        told = dict(list(found.problems.items())[:PROBLEMS_TOLD])
        lacking = [*sorted(found.waiting), *sorted(found.problems.keys() - found.waiting)]
        return (
            *(
                BroadcastWorker(peer, at.seconds, at.fetch_s, at.install_s)
                for peer, at in found.installations.items()
            ),
            *(
                BroadcastWorker(
                    peer,
                    problem=told.get(peer, "")[:PROBLEM_CHARACTERS],
                    is_here=peer in found.waiting,
                )
                for peer in lacking
            ),
        )

    def t_bcast_s(self, share: float = METRIC_QUANTILE) -> float | None:
        """T_bcast of the newest version that has it."""
        for found in reversed(self.broadcasts.values()):
            seconds = found.t_bcast_s(share)
            if seconds is not None:
                return seconds
        return None
