"""Who is here: workers by peer, their state, what they have installed, their rates.

joining -> syncing -> ready -> draining
             \\__________|________/
                  suspect (silent)  -> gone (forgotten; its leases are given to others)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

from echo2.core.estimates import Estimate
from echo2.types import PeerId, Version

RELAY_ENGINE: Final = "none"
"""The engine of a node that fetches and forwards versions and samples nothing."""


class WorkerState(enum.Enum):
    SYNCING = "syncing"
    READY = "ready"
    DRAINING = "draining"


@dataclass(slots=True)
class Worker:
    """`latency_s` of a lease from grant to result; `slowest_rate` in tokens/s of a lease;
    `announced_times`: how often the worker was told of the version `announced`;
    `rests_until`: no lease before, since it refused one; `relay_endpoint`, `relay_key`,
    `uplink_mbit` and `downlink_mbit` as it named them (0: no cap)."""

    peer: PeerId
    engine: str
    precision: str
    on_update: str
    slots: int
    price_usd_per_h: float
    environment_version: str
    joined_at: float
    heard_at: float
    state: WorkerState = WorkerState.SYNCING
    suspect: bool = False
    active: bool = True
    """Not so, it stands by: it gets no lease, and installs versions."""
    installed: Version | None = None
    announced: Version | None = None
    announced_at: float = 0.0
    announced_times: int = 0
    tokens_per_s: float = 0.0
    mismatch: float | None = None
    latency_s: Estimate = field(default_factory=Estimate)
    install_s: Estimate = field(default_factory=Estimate)
    slowest_rate: float | None = None
    leased_at: float = 0.0
    standby_usd_per_h: float | None = None
    """While it stands by; None: it did not say."""
    cost_usd: float = 0.0
    num_trajectories: int = 0
    """What it has cost and delivered since it came."""
    fetched: dict[str, int] = field(default_factory=dict)
    """Bytes of each artifact of the newest version that were paid for."""
    rests_until: float = 0.0
    relay_endpoint: str = ""
    relay_key: str = ""
    uplink_mbit: float = 0.0
    downlink_mbit: float = 0.0
    stored: tuple[str, ...] = ()
    """Manifests of versions on its disk when it came."""
    replays: bool = False
    """Its environment can play a transcript again."""

    @property
    def state_name(self) -> str:
        return "suspect" if self.suspect else self.state.value

    @property
    def may_lease(self) -> bool:
        return self.active and self.could_lease

    @property
    def could_lease(self) -> bool:
        """It could if it were active."""
        is_ready = self.state is WorkerState.READY and not self.suspect
        return is_ready and self.installed is not None and self.engine != RELAY_ENGINE


class Members:
    """All workers that are here. Bounded by `workers_max`."""

    def __init__(self, *, workers_max: int = 10_000) -> None:
        self.workers_max = workers_max
        self.workers: dict[PeerId, Worker] = {}

    def get(self, peer: PeerId) -> Worker | None:
        return self.workers.get(peer)

    def heard(self, peer: PeerId, now: float) -> Worker | None:
        """Note a sign of life; a suspect is trusted again."""
        worker = self.workers.get(peer)
        if worker is not None:
            worker.heard_at = max(worker.heard_at, now)
            worker.suspect = False
        return worker

    def ready(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.may_lease]

    def active(self, peers: list[PeerId]) -> list[PeerId]:
        """Of these, the ones that are here to work: neither standing by, silent nor draining."""
        found = [w for p in peers if (w := self.workers.get(p)) is not None and w.active]
        return [w.peer for w in found if not w.suspect and w.state is not WorkerState.DRAINING]

    def silent(self, now: float, *, longer_than_s: float) -> list[Worker]:
        return [w for w in self.workers.values() if now - w.heard_at > longer_than_s]
