"""One version from one origin: its manifest, then its chunks, each verified before it counts.

    manifest (kept from before, or asked for) -> assembly (resumed) -> window of requests
    -> every chunk verified -> the whole verified -> complete

It ends in one of these ways, each with its cause: complete; the origin refuses; a chunk (or
the manifest) was wrong `faults_max` times; no verified chunk for `stall_timeout_s`; the disk
does not take it; cancelled. In all but the first, what was verified stays in the store for
the next transfer. Hashing and disk are in threads; when a transfer is cancelled, they are
stopped and waited for, so that nothing goes on behind its back.

Connections belong to `echo2.weights.fetch`, the choice of requests to `echo2.weights.window`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

import structlog

from echo2.errors import WeightsError
from echo2.messages import (
    Chunk,
    ChunksRefused,
    ChunksRequest,
    ManifestReply,
    ManifestRequest,
    Message,
)
from echo2.weights.assembly import Assembly, WrongChunkError
from echo2.weights.snapshot import Manifest
from echo2.weights.store import ChunkStore
from echo2.weights.versions import StoredVersion, named_manifest
from echo2.weights.window import ChunkWindow

log = structlog.get_logger(__name__)

T = TypeVar("T")

REQUESTS_MAX: Final = 2048
"""Chunks asked for at once, however small they are (an origin keeps 4096 per peer)."""
INDEXES_PER_REQUEST_MAX: Final = 256
BATCH_CHUNKS: Final = 32
_SEND_RETRY_S: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchLimits:
    """Bounds of every transfer of a Fetcher."""

    window_bytes: int = 16 << 20
    """Most bytes asked for and not here yet: the credit given to the origin."""
    request_timeout_s: float = 10.0
    """Silence after which a chunk is asked for again."""
    stall_timeout_s: float = 60.0
    """Time without a verified chunk after which the transfer fails."""
    faults_max: int = 3
    """Wrong payloads of the same chunk after which the transfer fails."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Verified chunks of a version, of all (0 until its manifest is here)."""

    num_have: int
    num_chunks: int


class Line(Protocol):
    """What a transfer needs of a connection to its origin."""

    origin: str

    @property
    def is_up(self) -> bool: ...
    @property
    def reason(self) -> str:
        """Why it is not up."""

    def send(self, message: Message) -> bool: ...


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


class Transfer:
    """Brings `manifest_digest` over `line` into `store`; `run` once."""

    def __init__(
        self, manifest_digest: str, *, line: Line, store: ChunkStore, limits: FetchLimits
    ) -> None:
        self.manifest_digest = manifest_digest
        self.num_unexpected = 0
        """Chunks dropped since they were not (or no longer) asked for."""
        self._line = line
        self._store = store
        self._limits = limits
        self._stop = threading.Event()
        self._news = asyncio.Event()
        self._manifest_reply: bytes | None = None
        self._manifest_asked_at: float | None = None
        self._arrivals: deque[Chunk] = deque()
        self._window: ChunkWindow | None = None
        self._assembly: Assembly | None = None
        self._failure: BaseException | None = None
        self._progress_at = 0.0

    @property
    def progress(self) -> Progress:
        if self._assembly is None:
            return Progress(0, 0)
        return Progress(self._assembly.num_have, self._assembly.manifest.num_chunks)

    def status(self) -> str:
        """Where it stands, in words."""
        if self._assembly is None:
            here = "its manifest is not here yet"
        else:
            here = f"{self.progress.num_have} of {self.progress.num_chunks} chunks are here"
        return here if self._line.is_up else f"{here}; {self._line.reason}"

    async def run(self) -> StoredVersion:
        """The complete version, open; WeightsError with the cause if it cannot be had."""
        began = self._progress_at = self._now()
        manifest = await self._manifest()
        self._progress_at = self._now()
        assembly = await in_thread(
            self._stop, partial(self._store.begin, manifest, stop=self._stop)
        )
        self._assembly = assembly
        num_resumed = assembly.num_have
        try:
            window = await self._chunks(assembly)
            version = await in_thread(self._stop, partial(assembly.finish, stop=self._stop))
        finally:
            assembly.close()
        log.info(
            "version_fetched",
            manifest_digest=self.manifest_digest,
            origin=self._line.origin,
            num_bytes=manifest.num_bytes,
            chunks=manifest.num_chunks,
            chunks_resumed=num_resumed,
            chunks_reasked=window.num_reasked,
            chunks_wrong=window.num_faults,
            chunks_unexpected=self.num_unexpected,
            fetch_s=round(self._now() - began, 3),
        )
        return version

    def take(self, message: Message) -> None:
        """A message of the origin about this version; never waits."""
        match message:
            case ManifestReply(manifest=encoded):
                self._manifest_reply = encoded
            case ChunksRefused(reason=reason):
                self._failure = WeightsError(
                    f"the origin {self._line.origin} refuses version {self._short}: {reason}"
                )
            case Chunk(index=index):
                if self._window is None or not self._window.arrived(index, self._now()):
                    self.num_unexpected += 1
                    return
                self._arrivals.append(message)
        self._news.set()

    def line_changed(self) -> None:
        """The line went up or down: what was asked for on the one before is lost."""
        self._manifest_asked_at = None
        if self._window is not None:
            self._window.disconnected()
        self._news.set()

    def fail(self, error: BaseException) -> None:
        """The line broke for good."""
        self._failure = error
        self._news.set()

    async def _manifest(self) -> Manifest:
        """From the store if it is there, or else from the origin."""
        kept = await in_thread(self._stop, partial(self._store.manifest, self.manifest_digest))
        if kept is not None:
            return kept
        num_faults = 0
        # One message, however long it takes: a short deadline would only send it twice.
        request_timeout_s = max(self._limits.request_timeout_s, self._limits.stall_timeout_s / 3)
        while True:
            if self._line.is_up and self._manifest_asked_at is None:
                request = ManifestRequest(manifest_digest=self.manifest_digest)
                if self._line.send(request):
                    self._manifest_asked_at = self._now()
            asked_at = self._manifest_asked_at
            await self._wait(_SEND_RETRY_S if asked_at is None else request_timeout_s)
            encoded, self._manifest_reply = self._manifest_reply, None
            if encoded is None:
                if asked_at is not None and self._now() - asked_at >= request_timeout_s:
                    self._manifest_asked_at = None
                continue
            try:
                return await in_thread(
                    self._stop, partial(named_manifest, encoded, self.manifest_digest)
                )
            except WeightsError as error:
                num_faults += 1
                self._manifest_asked_at = None
                log.warning("manifest_wrong", origin=self._line.origin, reason=str(error))
                if num_faults >= self._limits.faults_max:
                    raise WeightsError(
                        f"the origin {self._line.origin} sent a wrong manifest for version "
                        f"{self._short} {num_faults} times: {error}"
                    ) from error

    async def _chunks(self, assembly: Assembly) -> ChunkWindow:
        """Until every chunk is in the assembly."""
        chunk_bytes = assembly.manifest.chunk_bytes
        window = self._window = ChunkWindow(
            assembly.missing(),
            requests_max=max(1, min(self._limits.window_bytes // chunk_bytes, REQUESTS_MAX)),
            request_timeout_s=self._limits.request_timeout_s,
            faults_max=self._limits.faults_max,
            now=self._now(),
        )
        while not window.is_done:
            window.expire(self._now())
            all_sent = self._ask(window)
            if self._arrivals:
                await self._settle(assembly, window)
                continue
            expiry = window.next_expiry()
            wait_s = None if expiry is None else max(0.0, expiry - self._now())
            await self._wait(wait_s if all_sent else _SEND_RETRY_S)
        return window

    def _ask(self, window: ChunkWindow) -> bool:
        """Fill the window; False when the line did not take a request."""
        while self._line.is_up:
            taken = window.take(self._now(), at_most=INDEXES_PER_REQUEST_MAX)
            if not taken:
                break
            request = ChunksRequest(manifest_digest=self.manifest_digest, indexes=taken)
            if not self._line.send(request):
                window.give_back(taken)
                return False
        return True

    async def _settle(self, assembly: Assembly, window: ChunkWindow) -> None:
        """Verify and place what arrived."""
        count = min(len(self._arrivals), BATCH_CHUNKS)
        batch = [self._arrivals.popleft() for _ in range(count)]
        wrong = await in_thread(self._stop, partial(_add_all, assembly, batch))
        for chunk in batch:
            error = wrong.get(chunk.index)
            if error is None:
                window.verified(chunk.index)
                self._progress_at = self._now()
                continue
            log.warning("chunk_wrong", origin=self._line.origin, reason=str(error))
            if not window.wrong(chunk.index):
                raise WeightsError(
                    f"the origin {self._line.origin} sent a wrong chunk "
                    f"{self._limits.faults_max} times: {error}"
                ) from error

    async def _wait(self, most_s: float | None) -> None:
        """Until there is news, at most so long; WeightsError when it cannot go on."""
        stalled_at = self._progress_at + self._limits.stall_timeout_s
        left_s = stalled_at - self._now()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s if most_s is None else min(most_s, left_s)):
                await self._news.wait()
        self._news.clear()
        if self._failure is not None:
            raise self._failure
        if self._now() >= stalled_at and not self._arrivals and self._manifest_reply is None:
            raise WeightsError(
                f"no new chunk of version {self._short} came from the origin "
                f"{self._line.origin} for {self._limits.stall_timeout_s:g} s: {self.status()}; "
                "check that it runs and that its port is reachable"
            )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @property
    def _short(self) -> str:
        return self.manifest_digest[:12]


def _add_all(assembly: Assembly, chunks: list[Chunk]) -> dict[int, WrongChunkError]:
    """Index -> error of those that were wrong. In a thread."""
    wrong = {}
    for chunk in chunks:
        try:
            assembly.add(chunk.index, chunk.payload)
        except WrongChunkError as error:
            wrong[chunk.index] = error
    return wrong
