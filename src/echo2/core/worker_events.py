"""What happens to a worker, and what it wants done: inputs and outputs of `WorkerState`.

Messages of the coordinator are events as they are (`echo2.messages`). `epoch` counts the
lives of the engine: what a dead one still says is told apart from what the present one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from echo2 import messages
from echo2.messages import Lane
from echo2.types import LeaseId, LinkReport, RelayPeer, Stripe, Version

# ---------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Started:
    """The daemon runs; nothing is connected yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed. `lease_tokens`: tokens sampled so far per lease (it never falls)."""

    lease_tokens: Mapping[LeaseId, int] = field(default_factory=dict)
    tokens_per_s: float = 0.0
    loop_lag_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ConnectionRestored:
    """Fresh sockets are up, and nothing has been sent through them."""


@dataclass(frozen=True, slots=True)
class ConnectionLost:
    """The shell knows that the present sockets are of no use any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    """No sockets could be made yet; the shell goes on trying."""

    reason: str


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """`num_missing` of `num_chunks` are not here yet; `links` is what came from whom."""

    manifest_digest: str
    num_chunks: int
    num_missing: int
    links: tuple[LinkReport, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchDone:
    """All bytes are here and verified against the manifest."""

    manifest_digest: str
    fetch_s: float
    artifact: str = ""
    """Of which `num_chunks` and `links` tell: the version, or the delta that led to it."""
    num_chunks: int = 0
    links: tuple[LinkReport, ...] = ()


@dataclass(frozen=True, slots=True)
class FetchFailed:
    manifest_digest: str
    text: str


@dataclass(frozen=True, slots=True)
class EngineReady:
    """Engine and environment are started (no version is installed)."""

    epoch: int


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine of `epoch` is gone, or did not start; whatever it held is lost."""

    epoch: int
    text: str


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Engine or environment cannot work as configured; trying again would not help."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallDone:
    """`version` serves, checked against its probe. `pause_s`: no token was sampled so long."""

    epoch: int
    version: Version
    install_s: float
    pause_s: float
    canary_diff: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallFailed:
    """`version` does not serve. `restored`: the engine serves what it did before."""

    epoch: int
    version: Version
    stage: Literal["install", "canary"]
    text: str
    restored: bool


@dataclass(frozen=True, slots=True)
class GroupDone:
    result: messages.GroupResult


@dataclass(frozen=True, slots=True)
class GroupFailed:
    lease: LeaseId
    stage: Literal["environment", "engine", "lost"]
    text: str


@dataclass(frozen=True, slots=True)
class AuditEnded:
    """A group was played again, or could not be."""

    answer: messages.AuditDone | messages.AuditFailed


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Leave soon; asked a second time, leave now."""

    reason: str


Event = (
    Started
    | Tick
    | ConnectionRestored
    | ConnectionLost
    | ConnectFailed
    | FetchProgress
    | FetchDone
    | FetchFailed
    | EngineReady
    | EngineDied
    | StartFailed
    | InstallDone
    | InstallFailed
    | GroupDone
    | GroupFailed
    | AuditEnded
    | DrainRequested
    | messages.Message
)

# --------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Send:
    message: messages.Message

    @property
    def lane(self) -> Lane:
        return self.message.LANE


@dataclass(frozen=True, slots=True)
class Reconnect:
    """Drop the sockets and make fresh ones; wait longer as `attempt` (from 0) grows."""

    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring a manifest and its chunks here, as `stripes` say. `version` None: the run's
    assets. `path`: deltas that lead to it. `serves`: peers that cannot dial us and are to be
    dialed for it."""

    manifest_digest: str
    origin: str
    origin_key: str
    version: Version | None
    path: tuple[str, ...] = ()
    stripes: tuple[Stripe, ...] = ()
    serves: tuple[str, ...] = ()
    planned_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SetPeers:
    """These relays may be talked to from now on, and no others."""

    peers: tuple[RelayPeer, ...]


@dataclass(frozen=True, slots=True)
class CancelFetch:
    """Stop it and report nothing more of it; verified chunks stay."""

    manifest_digest: str


@dataclass(frozen=True, slots=True)
class StartEngine:
    """End the engine of the epoch before, if any; start engine and environment.

    `assets_digest` "" means that the run has none. `settings` is the environment's JSON.
    """

    epoch: int
    assets_digest: str
    settings: str


@dataclass(frozen=True, slots=True)
class Install:
    """Put `announced` into the engine, check the probe, serve it: all or nothing.

    On failure `previous` must serve again, bit for bit.
    """

    epoch: int
    announced: messages.VersionAnnounced
    previous: messages.VersionAnnounced | None


@dataclass(frozen=True, slots=True)
class Keep:
    """Only these manifests are needed from now on; the store may drop all others."""

    manifest_digests: frozenset[str]


@dataclass(frozen=True, slots=True)
class StartGroup:
    lease: messages.LeaseGranted


@dataclass(frozen=True, slots=True)
class StartAudit:
    """Play a group of another worker again."""

    order: messages.AuditOrdered


@dataclass(frozen=True, slots=True)
class AbortGroup:
    """Stop working on a lease; nothing more of it is reported."""

    lease: LeaseId
    reason: str


@dataclass(frozen=True, slots=True)
class Exit:
    """The daemon ends: `code` 0 is a clean end, 1 an error that `reason` explains."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Log:
    level: Literal["debug", "info", "warning", "error"]
    event: str
    fields: Mapping[str, object] = field(default_factory=dict)


Effect = (
    Send
    | Reconnect
    | Fetch
    | CancelFetch
    | SetPeers
    | StartEngine
    | Install
    | Keep
    | StartGroup
    | StartAudit
    | AbortGroup
    | Exit
    | Log
)
