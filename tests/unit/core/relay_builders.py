"""Words for relays in tests: workers that have one, what probes find, what fetches report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from core_builders import Scene, a_digest, a_version

from echo2.core.effects import Effect, ProbeRelay
from echo2.core.events import RelayProbed
from echo2.messages import CHUNK_MAX_BYTES, RelayReport
from echo2.types import LinkReport, PeerId, Version

CHUNKS = 240
VERSION_BYTES = CHUNKS * CHUNK_MAX_BYTES


def a_key(name: str) -> str:
    """A relay key of 40 characters that differs by worker."""
    return (name * 40)[:40]


def an_endpoint(name: str) -> str:
    return f"tcp://10.0.0.{1 + sum(name.encode()) % 250}:7000"


def a_link(
    peer: str, *, mbit: float = 8.0, seconds: float = 10.0, faults: int = 0, silences: int = 0
) -> LinkReport:
    """`mbit` megabits per second while something was owed, for `seconds`."""
    return LinkReport(peer, int(mbit * seconds * 1e6 / 8), seconds, faults, silences)


def a_report(
    *links: LinkReport, version: Version | None = None, missing: int = 0, chunks: int = CHUNKS
) -> RelayReport:
    digest = a_digest(version or a_version(0))
    return RelayReport(manifest_digest=digest, num_chunks=chunks, num_missing=missing, links=links)


def probes(effects: Iterable[Effect]) -> list[tuple[str, str]]:
    return [(e.peer, e.endpoint) for e in effects if isinstance(e, ProbeRelay)]


def relay_joins(scene: Scene, name: str, *, accepts: bool | None = True, **changes: Any) -> None:
    """A worker with a relay comes; its probe has succeeded or failed (None: is under way)."""
    values = {"relay_key": a_key(name), "relay_endpoint": an_endpoint(name), **changes}
    effects = scene.worker_joins(name, **values)
    for peer, endpoint in probes(effects) if accepts is not None else []:
        is_probed(scene, peer, endpoint, ok=bool(accepts))


def is_probed(
    scene: Scene, name: str, endpoint: str | None = None, *, ok: bool = True, rtt_s: float = 0.02
) -> list[Effect]:
    found = endpoint or an_endpoint(name)
    reason = "" if ok else "it was not reached"
    return scene.handle(RelayProbed(PeerId(name), found, ok, rtt_s if ok else None, reason))


def a_fleet(
    *names: str,
    dials: Iterable[str] = (),
    uplinks: dict[str, float] | None = None,
    downlinks: dict[str, float] | None = None,
    **changes: Any,
) -> Scene:
    """A learner, no version yet, and workers with relays; those in `dials` accept nothing.
    `uplinks`, `downlinks`: what they tell of their lines."""
    scene = Scene(**{"host": "0.0.0.0", **changes})
    scene.learner_joins()
    for name in names:
        up, down = (uplinks or {}).get(name, 0.0), (downlinks or {}).get(name, 0.0)
        accepts = name not in dials
        relay_joins(scene, name, accepts=accepts, uplink_mbit=up, downlink_mbit=down)
    scene.tick(after=1.0)
    return scene


def publishes(scene: Scene, step: int = 0, *, num_bytes: int = VERSION_BYTES) -> list[Effect]:
    scene.state.step = step
    return scene.publishes(step, num_bytes=num_bytes)
