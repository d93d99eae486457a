"""What a simulated run is made of: its configuration, its seed, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo2.config import Config
from echo2.config_simulation import SimulatedWorkersTable
from echo2.core.settings import CoordinatorSettings
from echo2.core.worker_settings import WorkerSettings
from echo2.types import PeerId

PORT = 5700
TICK_MAX_S: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """`settings` are the core's out of `config`. The learner ends after `steps`, or with the step
    that it trains after `hours` of virtual time. `tick_max_s`: the coordinator looks at its clock
    at least so often; 1 s in production."""

    config: Config
    settings: CoordinatorSettings
    seed: int
    hours: float
    steps: int
    tick_max_s: float = TICK_MAX_S

    @property
    def seconds(self) -> float:
        return 3600.0 * self.hours

    @property
    def version_bytes(self) -> int:
        """0: a version is there at once."""
        return round(1e6 * self.config.simulation.version_mb)

    @property
    def delta_bytes(self) -> int:
        """0: there are no deltas."""
        share = self.config.simulation.delta_share
        if share >= 1.0 or not self.config.learner.deltas or not self.version_bytes:
            return 0
        return max(1, round(share * self.version_bytes))

    def worker_settings(
        self, peer: PeerId, kind: SimulatedWorkersTable, number: int
    ) -> WorkerSettings:
        """`number`: of this worker among all, from which its address and its key follow."""
        config = self.config
        address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
        return WorkerSettings(
            name=peer,
            echo2_version="simulated",
            engine="null",
            precision="none",
            environment=config.environment.name,
            on_update=config.worker.on_update,
            relay_endpoint=f"tcp://{address}:{PORT}" if kind.reachable else "",
            relay_key=f"{number:040d}",
            uplink_mbit=kind.uplink_mbit,
            downlink_mbit=kind.downlink_mbit,
            slots=kind.slots,
            price_usd_per_h=kind.price_usd_per_h,
            needs_weights=False,
            drain_timeout_s=config.worker.drain_timeout_s,
            connect_timeout_s=config.net.connect_timeout_s,
            bytes_in_flight_max=config.net.rollout_bytes_in_flight,
        )
