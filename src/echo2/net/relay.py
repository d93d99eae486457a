"""The relay: brings versions here from whoever has them, and hands on what has arrived.

    fetch(version, stripes) --> manifest --> assembly (resumed) --> chunks, each verified
                                              |-- forwarded to those who await it (cut-through)
                                              `-- all here: the whole verified --> StoredVersion

It ends in one of these ways, each with its cause: complete; nobody has the version; the origin
sent a wrong chunk `faults_max` times; no verified chunk for `stall_timeout_s`; the disk does
not take it; cancelled. In all but the first, what was verified stays in the store for the next
fetch. From whom a chunk comes decides `core.relay_fetch`; what is sent to whom, and in which
order, `weights.serving`; connections are `net.relay_links`. Hashing and disk are in threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Final, Self, TypeVar

import structlog
import zmq.asyncio

from echo2.core.dissemination import stripes as stripe_of_chunks
from echo2.core.relay_fetch import ORIGIN, Ask, Cancel, Dial, Limits, RelayFetch
from echo2.errors import ConfigError, WeightsError
from echo2.messages import (
    Chunk,
    ChunksCancelled,
    ChunksRefused,
    ChunksRequest,
    ManifestReply,
    ManifestRequest,
    Message,
    RelayAlive,
)
from echo2.net.keys import KeyPair
from echo2.net.relay_links import CREDIT_BYTES, RelayLinks
from echo2.net.tasks import OwnedTasks
from echo2.types import LinkReport, PeerId, RelayPeer, Stripe
from echo2.weights.assembly import Assembly, WrongChunkError
from echo2.weights.request_queue import REQUESTS_PER_PEER_MAX
from echo2.weights.serving import ChunkServer
from echo2.weights.snapshot import Manifest
from echo2.weights.store import ChunkStore
from echo2.weights.versions import StoredVersion, named_manifest

log = structlog.get_logger(__name__)

T = TypeVar("T")

INDEXES_PER_REQUEST_MAX: Final = 256
BATCH_CHUNKS: Final = 32
TURN_S: Final = 0.25
"""A fetch looks after its sources at least so often."""
UNKNOWN_HOLD_S: Final = 5.0
MANIFEST_RETRY_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Bounds of every fetch."""

    window_bytes: int = 8 << 20
    """Most bytes asked of one source and not here yet: the credit that it is given."""
    silence_s: float = 1.5
    """A relay that says nothing for so long while it owes chunks is passed over."""
    request_timeout_s: float = 10.0
    """Silence of the origin after which what it owes is asked for again."""
    stall_timeout_s: float = 60.0
    """Time without a verified chunk after which the fetch fails."""
    faults_max: int = 3
    """Wrong payloads after which a relay is asked no more; from the origin, the fetch fails."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Verified chunks of a version, of all (0 until its manifest is here)."""

    num_have: int
    num_chunks: int


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
        self._fetches: dict[str, _Fetch] = {}
        self._reports: dict[str, tuple[LinkReport, ...]] = {}
        self._links = RelayLinks(
            context,
            name=name,
            keys=keys,
            bind=bind,
            on_message=self._take,
            on_up=self._up,
            on_down=self._down,
            on_accepted=lambda name: self.server.forget(PeerId(name)),
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
        fetch = _Fetch(
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
            while len(self._reports) > 16:
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
        self.server.forget(PeerId(name))
        for fetch in self._fetches.values():
            fetch.down(name, reason)


class _Fetch:
    """One version on its way here; `run` once."""

    def __init__(
        self,
        manifest_digest: str,
        *,
        links: RelayLinks,
        server: ChunkServer,
        store: ChunkStore,
        limits: FetchLimits,
        stripes: Sequence[Stripe],
        planned_s: float,
        origin: str,
    ) -> None:
        self._origin = origin
        self._digest = manifest_digest
        self._links = links
        self._server = server
        self._store = store
        self._limits = limits
        self._stripes = stripes
        self._planned_s = planned_s
        self._stop = threading.Event()
        self._news = asyncio.Event()
        self._arrivals: deque[tuple[str, Chunk]] = deque()
        self._manifests: deque[tuple[str, bytes]] = deque()
        self._assembly: Assembly | None = None
        self._state: RelayFetch | None = None
        self._refusals: dict[str, str] = {}
        self._down_reasons: dict[str, str] = {}
        self._progress_at = self._began = self._now()
        self._num_unexpected = 0

    @property
    def progress(self) -> Progress:
        if self._assembly is None:
            return Progress(0, 0)
        return Progress(self._assembly.num_have, self._assembly.manifest.num_chunks)

    def links(self) -> tuple[LinkReport, ...]:
        if self._state is None:
            return ()
        now = self._now()
        return tuple(
            LinkReport(
                peer=source.name,
                num_bytes=source.num_bytes,
                seconds=source.busy_until(now),
                num_faults=source.num_faults,
                silences=source.silences,
            )
            for source in self._state.sources.values()
            if source.num_bytes or source.num_faults or source.silences
        )

    # --------------------------------------------------------------- from the links

    def take(self, name: str, message: Message) -> None:
        """Never waits."""
        match message:
            case ManifestReply(manifest=encoded):
                self._manifests.append((name, encoded))
            case ChunksRefused(reason=reason):
                self._refusals[name] = reason
                if self._state is not None:
                    self._state.refused(name, self._now())
            case RelayAlive(num_held=num_held):
                if self._state is not None:
                    self._state.alive(name, num_held, self._now())
                return
            case Chunk(index=index, payload=payload):
                self._chunk(name, index, len(payload), message)
        self._news.set()

    def up(self, name: str) -> None:
        self._down_reasons.pop(name, None)
        self._refusals.pop(name, None)
        if self._state is not None:
            self._state.connected(name, self._now())
        self._news.set()

    def down(self, name: str, reason: str) -> None:
        self._down_reasons[name] = reason
        if self._state is not None and name in self._state.sources:
            source = self._state.sources[name]
            if source.up:
                self._state.disconnected(name, self._now())
            else:
                self._state.unreachable(name, self._now())
        self._news.set()

    def _chunk(self, name: str, index: int, num_bytes: int, message: Chunk) -> None:
        state = self._state
        cancels = None
        if state is not None and name in state.sources:
            cancels = state.arrived(name, index, num_bytes, self._now())
        if cancels is None:
            self._num_unexpected += 1
            return
        self._refusals.pop(name, None)
        for cancel in cancels:
            self._cancel(cancel)
        self._arrivals.append((name, message))

    def let_go(self) -> None:
        """Nothing more is wanted of anybody."""
        for name, source in ({} if self._state is None else self._state.sources).items():
            if source.asked:
                self._links.send(name, ChunksCancelled(manifest_digest=self._digest))

    # ------------------------------------------------------------------- the fetch

    async def run(self) -> StoredVersion:
        manifest = await self._manifest()
        assembly = await in_thread(
            self._stop, partial(self._store.begin, manifest, stop=self._stop)
        )
        self._assembly = assembly
        num_resumed = assembly.num_have
        try:
            self._server.begins(assembly)
            await self._chunks(assembly)
            version = await in_thread(self._stop, partial(assembly.finish, stop=self._stop))
        finally:
            assembly.close()
        log.info(
            "version_fetched",
            manifest_digest=self._digest,
            num_bytes=manifest.num_bytes,
            chunks=manifest.num_chunks,
            chunks_resumed=num_resumed,
            chunks_unexpected=self._num_unexpected,
            sources={link.peer: link.num_bytes for link in self.links()},
            fetch_s=round(self._now() - self._began, 3),
        )
        return version

    async def _manifest(self) -> Manifest:
        """From the store if it is there, or from the origin, or else from the sources in turn."""
        kept = await in_thread(self._stop, partial(self._store.manifest, self._digest))
        if kept is not None:
            return kept
        names = [ORIGIN, *dict.fromkeys(n for stripe in self._stripes for n in stripe.sources)]
        asked: dict[str, float] = {}
        num_faults = 0
        while True:
            self._ask_manifest(names, asked)
            await self._wait(TURN_S)
            while self._manifests:
                name, encoded = self._manifests.popleft()
                try:
                    found = await in_thread(
                        self._stop, partial(named_manifest, encoded, self._digest)
                    )
                except WeightsError as error:
                    num_faults += 1
                    log.warning("manifest_wrong", peer=name, reason=str(error))
                    asked.pop(name, None)
                    if num_faults >= self._limits.faults_max:
                        raise WeightsError(
                            f"{self._named(name)} sent a wrong manifest for version "
                            f"{self._short} {num_faults} times: {error}"
                        ) from error
                else:
                    self._progress_at = self._now()
                    return found
            self._check_refused(names)

    def _ask_manifest(self, names: Sequence[str], asked: dict[str, float]) -> None:
        """The origin first; who did not answer within MANIFEST_RETRY_S is asked once more, and
        the next beside it."""
        now = self._now()
        for place, name in enumerate(names):
            if place and now - self._began < place * MANIFEST_RETRY_S:
                return
            if not self._links.is_up(name):
                if name != ORIGIN and self._links.can_dial(name):
                    self._links.dial(name)
                continue
            # One message, however long it takes: a short deadline would only send it twice.
            patience_s = max(MANIFEST_RETRY_S, self._limits.stall_timeout_s / 3)
            if name in self._refusals:
                patience_s = MANIFEST_RETRY_S
            request = ManifestRequest(manifest_digest=self._digest)
            if now - asked.get(name, float("-inf")) >= patience_s and self._links.send(
                name, request
            ):
                asked[name] = now
            if name == ORIGIN and name not in self._refusals:
                return

    def _check_refused(self, names: Sequence[str]) -> None:
        """WeightsError when the origin has it no more and no other source is left."""
        others = [n for n in names if n != ORIGIN]
        alone = all(n in self._refusals or not self._links.is_up(n) for n in others)
        patient = self._now() - self._began < MANIFEST_RETRY_S * (1 + len(others))
        if ORIGIN in self._refusals and alone and not (others and patient):
            raise WeightsError(
                f"{self._named(ORIGIN)} refuses version {self._short}: {self._refusals[ORIGIN]}"
            )

    async def _chunks(self, assembly: Assembly) -> None:
        """Until every chunk is in the assembly."""
        manifest = assembly.manifest
        self._state = state = RelayFetch(
            self._lots(assembly),
            chunk_bytes=manifest.chunk_bytes,
            limits=Limits(
                window_chunks=min(
                    REQUESTS_PER_PEER_MAX, max(2, self._limits.window_bytes // manifest.chunk_bytes)
                ),
                silence_s=self._limits.silence_s,
                origin_silence_s=self._limits.request_timeout_s,
                faults_max=self._limits.faults_max,
            ),
            now=self._now(),
            planned_s=self._planned_s,
        )
        for name in state.sources:
            if self._links.is_up(name):
                state.connected(name, self._now())
        self._progress_at = self._now()
        while not state.is_done:
            self._carry_out(state)
            if self._arrivals:
                await self._settle(assembly, state)
                continue
            await self._wait(TURN_S)
            self._check_sources(state)

    def _lots(self, assembly: Assembly) -> list[tuple[tuple[str, ...], list[int]]]:
        """What is missing, by the sources that the plan names for it."""
        missing = assembly.missing()
        if not self._stripes:
            return [((), missing)]
        of_chunk = stripe_of_chunks(
            assembly.manifest.num_chunks, [float(stripe.num_chunks) for stripe in self._stripes]
        )
        lots: list[list[int]] = [[] for _ in self._stripes]
        for index in missing:
            lots[of_chunk[index]].append(index)
        return [
            (stripe.sources, chunks)
            for stripe, chunks in zip(self._stripes, lots, strict=True)
            if chunks
        ]

    def _carry_out(self, state: RelayFetch) -> None:
        for effect in state.advance(self._now()):
            match effect:
                case Ask(source, indexes):
                    for start in range(0, len(indexes), INDEXES_PER_REQUEST_MAX):
                        part = indexes[start : start + INDEXES_PER_REQUEST_MAX]
                        request = ChunksRequest(manifest_digest=self._digest, indexes=part)
                        if not self._links.send(source, request):
                            state.disconnected(source, self._now())
                            if self._links.is_up(source):  # its queue was full
                                state.connected(source, self._now())
                            break
                case Cancel():
                    self._cancel(effect)
                case Dial(source):
                    if self._links.is_up(source):
                        state.connected(source, self._now())
                    elif self._links.can_dial(source):
                        self._links.dial(source)

    def _cancel(self, cancel: Cancel) -> None:
        for start in range(0, len(cancel.indexes), INDEXES_PER_REQUEST_MAX):
            part = cancel.indexes[start : start + INDEXES_PER_REQUEST_MAX]
            self._links.send(
                cancel.source, ChunksCancelled(manifest_digest=self._digest, indexes=part)
            )

    async def _settle(self, assembly: Assembly, state: RelayFetch) -> None:
        """Verify and place what arrived, and hand it on."""
        count = min(len(self._arrivals), BATCH_CHUNKS)
        batch = [self._arrivals.popleft() for _ in range(count)]
        wrong = await in_thread(self._stop, partial(_add_all, assembly, [c for _, c in batch]))
        for name, chunk in batch:
            error = wrong.get(id(chunk))
            if error is None:
                state.verified(chunk.index)
                self._progress_at = self._now()
                self._server.arrived(self._digest, chunk.index)
                continue
            log.warning("chunk_wrong", peer=name, reason=str(error))
            if not state.wrong(chunk.index, self._now()):
                raise WeightsError(
                    f"{self._named(ORIGIN)} sent a wrong chunk {self._limits.faults_max} times: "
                    f"{error}"
                ) from error

    def _check_sources(self, state: RelayFetch) -> None:
        alone = all(
            name == ORIGIN or name in self._refusals or not source.up
            for name, source in state.sources.items()
        )
        if ORIGIN in self._refusals and alone:
            raise WeightsError(
                f"{self._named(ORIGIN)} refuses version {self._short}: {self._refusals[ORIGIN]}"
            )

    async def _wait(self, most_s: float) -> None:
        """Until there is news, at most so long; WeightsError when it cannot go on."""
        began = self._now()
        stalled_at = self._progress_at + self._limits.stall_timeout_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(most_s, max(0.0, stalled_at - began))):
                await self._news.wait()
        self._news.clear()
        overslept_s = self._now() - began - most_s
        if overslept_s > 1.0:  # we were stopped: nobody else is to blame for that time
            self._progress_at += overslept_s
            stalled_at += overslept_s
        if self._now() >= stalled_at and not self._arrivals and not self._manifests:
            raise WeightsError(
                f"no new chunk of version {self._short} came from {self._named(ORIGIN)} or a relay "
                f"for {self._limits.stall_timeout_s:g} s: {self.status()}; check that the origin "
                "runs and that its port is reachable"
            )

    def _named(self, name: str) -> str:
        return f"the origin {self._origin}" if name == ORIGIN else f"the relay {name}"

    def status(self) -> str:
        """Where it stands, in words."""
        if self._assembly is None:
            here = "its manifest is not here yet"
        else:
            here = f"{self.progress.num_have} of {self.progress.num_chunks} chunks are here"
        reasons = "; ".join(f"{name}: {why}" for name, why in list(self._down_reasons.items())[:4])
        return f"{here}; {reasons}" if reasons else here

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def _short(self) -> str:
        return self._digest[:12]


async def in_thread(stop: threading.Event, work: Callable[[], T]) -> T:
    """Run `work` in a thread. When cancelled, set `stop`, wait for its end, and close what
    it made."""
    future = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.set()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        if future.exception() is None:
            made = future.result()
            if isinstance(made, Assembly | StoredVersion):
                made.close()
        raise


def _add_all(assembly: Assembly, chunks: list[Chunk]) -> dict[int, WrongChunkError]:
    """id(chunk) -> error of those that were wrong. In a thread."""
    wrong = {}
    for chunk in chunks:
        try:
            assembly.add(chunk.index, chunk.payload)
        except WrongChunkError as error:
            wrong[id(chunk)] = error
    return wrong
