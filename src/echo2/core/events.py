"""What happens to the coordinator: the inputs of `CoordinatorState.handle(event, now)`."""

from __future__ import annotations

from dataclasses import dataclass

from echo2.messages import Message
from echo2.types import PeerId


@dataclass(frozen=True, slots=True)
class Received:
    """A decoded, validated message from a peer whose key was verified: `key`, None without
    CURVE."""

    peer: PeerId
    message: Message
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Persisted:
    """The record that a `Persist` effect named is durable now."""

    record_id: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; deadlines are looked at."""


@dataclass(frozen=True, slots=True)
class RelayProbed:
    """What a `ProbeRelay` effect found out. `rtt_s`: how long it took to connect; None, with
    the reason, if that or the greeting failed."""

    peer: PeerId
    endpoint: str
    ok: bool
    rtt_s: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KeyRevoked:
    """The key of `peer` is no longer that of its name: nothing more will come from it, and
    nothing reaches it."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class PardonRequested:
    """The operator lifts the quarantine of `peer`."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class MachineFound:
    """`is_on`: it was started and is not to be stopped."""

    worker: PeerId
    offer: str
    is_on: bool


@dataclass(frozen=True, slots=True)
class MachinesFound:
    """All machines that are written down in the run folder; there are no others."""

    machines: tuple[MachineFound, ...]


@dataclass(frozen=True, slots=True)
class MachineChanged:
    """What became of a machine that was to be started or stopped. `state`: "running", "stopping",
    or "gone": it is written down no more; `text` says what went wrong."""

    worker: PeerId
    state: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The operator ends the coordinator (not the run: it may be resumed)."""

    reason: str


Event = (
    Received
    | Persisted
    | Tick
    | RelayProbed
    | KeyRevoked
    | PardonRequested
    | MachinesFound
    | MachineChanged
    | StopRequested
)
