"""What the worker's state machine needs to know of a configuration, in plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Names and units as in the TOML schema (`echo2.config`), which documents them.

    `needs_weights`: the engine samples from a model, so it needs assets and an origin.
    `takes_leases` False: a node that never generates (engine "none").
    """

    name: str
    echo2_version: str
    engine: str
    precision: str
    environment: str
    environment_version: str = ""
    replays: bool = False
    """The environment can play a transcript again."""
    on_update: Literal["continue", "finish", "abort"] = "continue"
    relay_endpoint: str = ""
    relay_key: str = ""
    uplink_mbit: float = 0.0
    downlink_mbit: float = 0.0
    stored: tuple[str, ...] = ()
    """Manifests of versions that were on the disk at the start."""
    slots: int = 1
    price_usd_per_h: float = 0.0
    standby_usd_per_h: float | None = None
    needs_weights: bool = True
    takes_leases: bool = True
    drain_timeout_s: float = 30.0
    connect_timeout_s: float = 120.0
    welcome_timeout_s: float = 10.0
    """A hello without an answer for so long is sent again, through fresh sockets."""
    bytes_in_flight_max: int = 256 << 20
    attempts_max: int = 5
    """Tries in a row of a version, or of the assets, before the daemon gives up."""
    engine_restarts_max: int = 3
    """Restarts of the engine without a finished group in between."""
