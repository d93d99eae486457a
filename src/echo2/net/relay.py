"""The relay: brings versions here from whoever has them, and hands on what has arrived.

    fetch(version, stripes) --> `net.version_fetch`, chunk by chunk, each verified
                                    |-- forwarded to those who await it (cut-through)
                                    `-- all here: the whole verified --> StoredVersion

Promise: a fetch ends with the version or with the cause, and leaves its connections, its
report and what it had verified behind for the next one; whatever is here, whole or in part,
is served meanwhile. Messages find the fetch or the server that they are for. What is sent to
whom, and in which order, decides `weights.serving`; connections are `net.relay_links`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType
from typing import Final, Self

import zmq.asyncio

from echo2.errors import ConfigError, WeightsError
from echo2.messages import Chunk, ChunksRefused, ManifestReply, Message, RelayAlive
from echo2.net.keys import KeyPair
from echo2.net.relay_links import CREDIT_BYTES, RelayLinks
from echo2.net.tasks import OwnedTasks
from echo2.net.version_fetch import FetchLimits, Progress, VersionFetch
from echo2.types import LinkReport, PeerId, RelayPeer, Stripe
from echo2.weights.serving import ChunkServer
from echo2.weights.store import ChunkStore
from echo2.weights.threads import in_thread
from echo2.weights.versions import StoredVersion

UNKNOWN_HOLD_S: Final = 5.0
REPORTS_MAX: Final = 16
"""Versions of which it is remembered what came from whom."""


class Relay:
    """Fetches into `store` and serves out of it. `keys` and `name` are those of this worker:
    `keys` None without CURVE (loopback only). `bind` "" only dials. A context, or `start` and
    `close` it."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        store: ChunkStore,
        *,
        keys: KeyPair | None,
        name: str,
        bind: str = "",
        uplink_mbit: float = 0.0,
        limits: FetchLimits | None = None,
    ) -> None:
        self._store = store
        self._limits = limits or FetchLimits()
        self._fetches: dict[str, VersionFetch] = {}
        self._reports: dict[str, tuple[LinkReport, ...]] = {}
        self._links = RelayLinks(
            context,
            name=name,
            keys=keys,
            bind=bind,
            on_message=self._take,
            on_up=self._up,
            on_down=self._down,
            on_void=lambda name: self.server.forget(PeerId(name)),
            on_room=lambda: self.server.look(),
        )
        self.server = ChunkServer(
            store.folder,
            send=lambda peer, message: self._links.send(str(peer), message),
            credit=lambda peer: self._links.credit(str(peer)),
            credit_bytes=CREDIT_BYTES,
            unknown_hold_s=UNKNOWN_HOLD_S,
            uplink_mbit=uplink_mbit,
        )
        self._tasks = OwnedTasks("relay")

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def endpoint(self) -> str:
        """Where it listens; "" if it does not."""
        return self._links.endpoint

    @property
    def progress(self) -> dict[str, Progress]:
        """Of the fetches under way, by manifest digest."""
        return {digest: fetch.progress for digest, fetch in self._fetches.items()}

    def links(self, manifest_digest: str) -> tuple[LinkReport, ...]:
        """What came from whom, in a fetch under way or the last one of this version."""
        fetch = self._fetches.get(manifest_digest)
        return self._reports.get(manifest_digest, ()) if fetch is None else fetch.links()

    async def start(self) -> None:
        """ConfigError when it cannot listen."""
        await self._links.start()
        self.server.start()

    async def wait(self) -> None:
        """Until closed; raises what crashed."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._links.wait())
            group.create_task(self.server.wait())

    async def close(self) -> None:
        """Fetches must have ended, or been cancelled, before."""
        try:
            await self._links.stop()
        finally:
            await self.server.stop()

    def set_peers(self, peers: Iterable[RelayPeer]) -> None:
        """Whom it may talk to from now on, beside the origin."""
        self._links.set_peers(peers)

    def made(self, manifest_digest: str) -> None:
        """A version was made here without a fetch, of deltas: those who asked for it and wait
        get it now."""
        self.server.ends(manifest_digest, complete=True)

    def serve(self, names: Iterable[str]) -> None:
        """Dial these peers, who cannot dial us, so that they can ask us."""
        for name in names:
            if self._links.can_dial(name):
                self._links.dial(name)

    async def fetch(
        self,
        manifest_digest: str,
        origin: str,
        origin_key: str,
        *,
        timeout_s: float,
        stripes: Sequence[Stripe] = (),
        planned_s: float = 0.0,
    ) -> StoredVersion:
        """The complete version, open; WeightsError with the cause if it cannot be had, within
        `timeout_s`. One fetch of a version at a time. What is in the store already is not
        fetched."""
        stop = threading.Event()
        stored = await in_thread(
            stop, partial(self._store.open, manifest_digest, verify=True, stop=stop)
        )
        if stored is not None:
            return stored
        if manifest_digest in self._fetches:
            raise WeightsError(f"version {manifest_digest[:12]} is being fetched already")
        fetch = VersionFetch(
            manifest_digest,
            links=self._links,
            server=self.server,
            store=self._store,
            limits=self._limits,
            stripes=stripes,
            planned_s=planned_s,
            origin=origin,
        )
        try:
            self._links.dial_origin(origin, origin_key)
        except ConfigError as error:
            raise WeightsError(f"the origin {origin!r} cannot be reached: {error}") from error
        self._fetches[manifest_digest] = fetch
        complete = False
        try:
            async with asyncio.timeout(timeout_s):
                version = await fetch.run()
            complete = True
            return version
        except TimeoutError:
            raise WeightsError(
                f"version {manifest_digest[:12]} did not arrive from the origin {origin} within "
                f"{timeout_s:g} s: {fetch.status()}"
            ) from None
        finally:
            fetch.let_go()
            self._reports[manifest_digest] = fetch.links()
            while len(self._reports) > REPORTS_MAX:
                del self._reports[next(iter(self._reports))]
            del self._fetches[manifest_digest]
            self.server.ends(manifest_digest, complete=complete)

    def _take(self, name: str, message: Message) -> None:
        match message:
            case ManifestReply() | Chunk() | ChunksRefused() | RelayAlive():
                fetch = self._fetches.get(message.manifest_digest)
                if fetch is not None:
                    fetch.take(name, message)
            case _:
                self.server.handle(PeerId(name), message)

    def _up(self, name: str) -> None:
        for fetch in self._fetches.values():
            fetch.up(name)

    def _down(self, name: str, reason: str) -> None:
        for fetch in self._fetches.values():
            fetch.down(name, reason)
