"""One version on its way here: its manifest, then its chunks from several sources at once.

    manifest --> assembly (resumed) --> asked for --> verified --> written --> the whole verified
                                                         `-- handed on (cut-through)

Promise: `run` ends with the whole version, verified, or with the cause: nobody has the version;
the origin sent a wrong chunk `faults_max` times; no verified chunk for `stall_timeout_s`; the
disk does not take it; cancelled. In all but the first, what was verified stays in the store
for the next fetch.

From whom a chunk comes decides `core.relay_fetch`; this module carries that out: it sends the
requests over `net.relay_links`. A chunk is verified where it comes in, on the event loop: its
digest takes 0.1 ms, less than to hand it to a thread and back. Several at once are written in
a thread. What is sent to others, and in which order, is `weights.serving`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import structlog

from echo2.core.dissemination import stripes as stripe_of_chunks
from echo2.core.relay_fetch import ORIGIN, Ask, Cancel, Dial, Limits, RelayFetch
from echo2.errors import WeightsError
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
from echo2.net.relay_links import RelayLinks
from echo2.net.wakeups import Signal
from echo2.types import LinkReport, Stripe
from echo2.weights.assembly import Assembly, WrongChunkError
from echo2.weights.request_queue import REQUESTS_PER_PEER_MAX
from echo2.weights.serving import ChunkServer
from echo2.weights.snapshot import Manifest
from echo2.weights.store import ChunkStore
from echo2.weights.threads import in_thread
from echo2.weights.versions import StoredVersion, named_manifest

log = structlog.get_logger(__name__)

INDEXES_PER_REQUEST_MAX: Final = 256
WRITE_CHUNKS: Final = 8
"""So many verified chunks, or those of TURN_S, are written at once."""
TURN_S: Final = 0.25
"""A fetch looks after its sources at least so often."""
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


class VersionFetch:
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
        self._news = Signal()
        self._manifests: deque[tuple[str, bytes]] = deque()
        self._assembly: Assembly | None = None
        self._state: RelayFetch | None = None
        self._refusals: dict[str, str] = {}
        self._down_reasons: dict[str, str] = {}
        self._progress_at = self._began = self._now()
        self._num_unexpected = 0
        self._broken: WeightsError | None = None
        """Why it cannot go on."""
        self._is_over = False

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
            case Chunk():
                self._chunk(name, message)
                return
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

    def _chunk(self, name: str, chunk: Chunk) -> None:
        """Verify it and hand it on, if it was asked for."""
        state, assembly, now = self._state, self._assembly, self._now()
        cancels = None
        if state is not None and name in state.sources and not self._is_over:
            cancels = state.arrived(name, chunk.index, len(chunk.payload), now)
        if state is None or assembly is None or cancels is None:
            self._num_unexpected += 1
            return
        self._refusals.pop(name, None)
        for cancel in cancels:
            self._cancel(cancel)
        try:
            assembly.accept(chunk.index, chunk.payload)
        except WrongChunkError as error:
            log.warning("chunk_wrong", peer=name, reason=str(error))
            if not state.wrong(chunk.index, now):
                self._broken = WeightsError(
                    f"{self._named(ORIGIN)} sent a wrong chunk {self._limits.faults_max} times: "
                    f"{error}"
                )
            self._news.set()
            return
        state.verified(chunk.index)
        self._progress_at = now
        self._server.arrived(chunk)
        if cancels or state.can_ask(name) or assembly.num_unwritten >= WRITE_CHUNKS:
            self._news.set()

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
            self._is_over = True
            await in_thread(self._stop, assembly.close)
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
        lots = self._lots(assembly)
        self._state = state = RelayFetch(
            [(stripe.sources, chunks) for stripe, chunks in lots],
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
            helpers=[stripe.helpers for stripe, _ in lots],
        )
        for name in state.sources:
            if self._links.is_up(name):
                state.connected(name, self._now())
        self._progress_at = self._now()
        while not state.is_done:
            self._carry_out(state)
            waited_since = self._now()
            if assembly.num_unwritten < WRITE_CHUNKS:
                await self._wait(TURN_S)
                self._check_sources(state)
            is_quiet = self._now() - waited_since >= TURN_S
            if assembly.num_unwritten >= (1 if is_quiet else WRITE_CHUNKS):
                await in_thread(self._stop, assembly.write)

    def _lots(self, assembly: Assembly) -> list[tuple[Stripe, list[int]]]:
        """What is missing, by the stripe that the plan has for it."""
        missing = assembly.missing()
        if not self._stripes:
            return [(Stripe(max(1, len(missing))), missing)]
        of_chunk = stripe_of_chunks(
            assembly.manifest.num_chunks, [float(stripe.num_chunks) for stripe in self._stripes]
        )
        lots: list[list[int]] = [[] for _ in self._stripes]
        for index in missing:
            lots[of_chunk[index]].append(index)
        return [pair for pair in zip(self._stripes, lots, strict=True) if pair[1]]

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

    def _check_sources(self, state: RelayFetch) -> None:
        alone = all(
            name == ORIGIN or name in self._refusals or not source.up
            for name, source in state.sources.items()
        )
        if self._broken is not None:
            raise self._broken
        if ORIGIN in self._refusals and alone:
            raise WeightsError(
                f"{self._named(ORIGIN)} refuses version {self._short}: {self._refusals[ORIGIN]}"
            )

    async def _wait(self, most_s: float) -> None:
        """Until there is news, at most so long; WeightsError when it cannot go on."""
        began = self._now()
        stalled_at = self._progress_at + self._limits.stall_timeout_s
        await self._news.wait(min(most_s, max(0.0, stalled_at - began)))
        overslept_s = self._now() - began - most_s
        if overslept_s > 1.0:  # we were stopped: nobody else is to blame for that time
            self._progress_at += overslept_s
        stalled_at = self._progress_at + self._limits.stall_timeout_s
        if self._now() >= stalled_at and not self._manifests:
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
