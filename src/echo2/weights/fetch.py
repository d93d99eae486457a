"""Fetches versions by their manifest's digest: the interface of dissemination.

Whoever needs a version says which, and where its origin is; how the bytes come is decided
here (today: from the origin, in a bounded window of requests) and may be replaced without
the caller noticing. What is in the store already is not fetched.

Concurrent fetches of one version share one transfer; it ends when the last of them is
cancelled, and what it verified stays for the next. Fetches from one origin share one
connection, since a peer has one route there; one idle connection is kept.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self

import structlog
import zmq.asyncio

from echo2.errors import ConfigError, WeightsError
from echo2.messages import Chunk, ChunksRefused, Lane, ManifestReply, Message, Role
from echo2.net.dealer import Connection, Dealer
from echo2.net.keys import KeyPair
from echo2.weights.store import ChunkStore
from echo2.weights.transfer import FetchLimits, Progress, Transfer, in_thread
from echo2.weights.versions import StoredVersion

__all__ = ["FetchLimits", "Fetcher", "Progress"]

log = structlog.get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Flight:
    """One transfer and those who wait for it."""

    task: asyncio.Task[StoredVersion] = field(init=False)
    transfer: Transfer | None = None
    num_waiting: int = 0
    version: StoredVersion | None = None
    """The result, until the first who waits takes it."""

    def landed(self, task: asyncio.Task[StoredVersion]) -> None:
        if task.cancelled() or task.exception() is not None:
            return
        self.version = task.result()
        if not self.num_waiting:
            self.let_go()

    def let_go(self) -> None:
        if self.version is not None:
            self.version.close()
            self.version = None


class Fetcher:
    """Fetches into `store`. `keys` and `name` are those of this worker: None and its name
    without CURVE (loopback only). End it with `close`, or use it as a context."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        store: ChunkStore,
        *,
        keys: KeyPair | None,
        name: str,
        limits: FetchLimits | None = None,
    ) -> None:
        self._context = context
        self._store = store
        self._keys = keys
        self._name = name
        self._limits = limits or FetchLimits()
        self._flights: dict[str, _Flight] = {}
        self._links: dict[tuple[str, str], _Link] = {}
        self._linking = asyncio.Lock()
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def progress(self) -> dict[str, Progress]:
        """manifest_digest -> chunks that are here, of all, for each fetch under way."""
        return {
            manifest_digest: flight.transfer.progress
            for manifest_digest, flight in self._flights.items()
            if flight.transfer is not None
        }

    async def fetch(
        self, manifest_digest: str, origin: str, origin_key: str, *, timeout_s: float
    ) -> StoredVersion:
        """The complete version, verified and open; the caller closes it.

        `origin` is "tcp://HOST:PORT", `origin_key` its public key ("" without CURVE). A
        fetch of the same version that is under way is joined, whatever its origin.
        WeightsError with the cause when it cannot be had, or not within `timeout_s`.
        Cancelling it keeps what was verified.
        """
        flight: _Flight | None = None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    flight = await self._join(manifest_digest, origin, origin_key)
                    version = await self._result(manifest_digest, flight)
                    if version is not None:
                        return version
        except TimeoutError:
            transfer = flight.transfer if flight is not None else None
            status = transfer.status() if transfer is not None else "the store was being read"
            raise WeightsError(
                f"version {manifest_digest[:12]} did not arrive from the origin {origin} within "
                f"{timeout_s:g} s: {status}"
            ) from None

    async def close(self) -> None:
        """Cancel what is under way, and close the connections."""
        self._is_closed = True
        tasks = [flight.task for flight in self._flights.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for key in list(self._links):
            await self._links.pop(key).close()

    async def _join(self, manifest_digest: str, origin: str, origin_key: str) -> _Flight:
        """The flight of this version, started if there is none."""
        while (flight := self._flights.get(manifest_digest)) is not None:
            if flight.num_waiting:
                return flight
            await asyncio.wait({flight.task})  # it was cancelled, and is about to end
        if self._is_closed:
            raise WeightsError("this Fetcher was closed: make another one")
        flight = _Flight()
        flight.task = asyncio.create_task(
            self._fly(flight, manifest_digest, origin, origin_key),
            name=f"fetch.{manifest_digest[:12]}",
        )
        self._flights[manifest_digest] = flight
        flight.task.add_done_callback(flight.landed)
        flight.task.add_done_callback(lambda _: self._flights.pop(manifest_digest))
        return flight

    async def _result(self, manifest_digest: str, flight: _Flight) -> StoredVersion | None:
        """Wait for the flight's end; None when its version is gone again already."""
        flight.num_waiting += 1
        try:
            await asyncio.wait({flight.task})
        except asyncio.CancelledError:
            flight.num_waiting -= 1
            if not flight.num_waiting:
                flight.task.cancel()
                await asyncio.wait({flight.task})
                flight.let_go()
            raise
        flight.num_waiting -= 1
        if flight.task.cancelled():
            raise WeightsError(
                f"the fetch of version {manifest_digest[:12]} was ended: this Fetcher was closed"
            )
        error = flight.task.exception()
        if isinstance(error, WeightsError):
            # Each who waits raises one of its own.
            raise WeightsError(str(error)) from error
        if error is not None:
            raise error
        version, flight.version = flight.version, None
        if version is not None:
            return version
        return await in_thread(threading.Event(), partial(self._store.open, manifest_digest))

    async def _fly(
        self, flight: _Flight, manifest_digest: str, origin: str, origin_key: str
    ) -> StoredVersion:
        stop = threading.Event()
        version = await in_thread(
            stop, partial(self._store.open, manifest_digest, verify=True, stop=stop)
        )
        if version is not None:
            return version
        link = await self._link(origin, origin_key)
        transfer = Transfer(manifest_digest, line=link, store=self._store, limits=self._limits)
        flight.transfer = link.transfers[manifest_digest] = transfer
        try:
            return await transfer.run()
        finally:
            del link.transfers[manifest_digest]
            await self._close_idle_links()

    async def _link(self, origin: str, origin_key: str) -> _Link:
        """A connection to this origin; the one that was used last is last in order."""
        key = (origin, origin_key)
        async with self._linking:
            link = self._links.pop(key, None)
            if link is not None and link.is_broken:
                await link.close()
                link = None
            if link is None:
                link = _Link(self._context, origin, origin_key, keys=self._keys, name=self._name)
                await link.start()
            self._links[key] = link
            return link

    async def _close_idle_links(self) -> None:
        """All but the one that was used last."""
        async with self._linking:
            idle = [key for key, link in self._links.items() if not link.transfers]
            for key in idle[:-1]:
                await self._links.pop(key).close()


class _Link:
    """One connection to an origin; messages go to the transfer of their version."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        origin: str,
        origin_key: str,
        *,
        keys: KeyPair | None,
        name: str,
    ) -> None:
        """WeightsError when origin or key cannot be right."""
        self.origin = origin
        self.transfers: dict[str, Transfer] = {}
        self._was_up = False
        self._crash: Exception | None = None
        self.counters: Counter[str] = Counter()
        """unexpected: messages about versions that nobody fetches (any more)."""
        try:
            self._dealer = Dealer(
                context,
                lane=Lane.CHUNKS,
                role=Role.WORKER,
                endpoint=origin,
                server_key=origin_key,
                keys=keys,
                name=name,
                on_state=self._state_changed,
            )
        except ConfigError as error:
            raise WeightsError(f"the origin {origin!r} cannot be reached: {error}") from error
        self._reader: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        return self._dealer.state is Connection.CONNECTED

    @property
    def is_broken(self) -> bool:
        return self._reader is not None and self._reader.done()

    @property
    def reason(self) -> str:
        return self._dealer.reason

    async def start(self) -> None:
        try:
            await self._dealer.start()
        except ConfigError as error:
            raise WeightsError(f"the origin {self.origin!r} cannot be reached: {error}") from error
        self._reader = asyncio.create_task(self._read(), name=f"origin.{self.origin}")

    def send(self, message: Message) -> bool:
        return self._dealer.send(message)

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait({self._reader})
        try:
            await self._dealer.stop(flush_s=0.0)
        except Exception as error:
            if error is not self._crash:  # that one was logged, and raised by each transfer
                raise

    async def _read(self) -> None:
        try:
            while True:
                self._deliver(await self._dealer.receive())
        except Exception as error:
            self._crash = error
            for transfer in self.transfers.values():
                transfer.fail(error)

    def _deliver(self, message: Message) -> None:
        if isinstance(message, ManifestReply | Chunk | ChunksRefused):
            transfer = self.transfers.get(message.manifest_digest)
            if transfer is not None:
                transfer.take(message)
                return
        self.counters["unexpected"] += 1

    def _state_changed(self, state: Connection, reason: str) -> None:
        if state is Connection.REFUSED:
            log.warning("origin_refused_us", origin=self.origin, reason=reason)
        elif state is Connection.CONNECTING and self._was_up:
            log.info("origin_lost", origin=self.origin, reason=reason)
        self._was_up = state is Connection.CONNECTED
        for transfer in self.transfers.values():
            transfer.line_changed()
