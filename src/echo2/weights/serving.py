"""Answers requests for manifests and chunks, fairly, with bounded memory and open files.

    request --> ready, or awaited until the chunk is verified here --> read in a thread --> sent

What is held is sent at once; what is still on its way here is sent as soon as it is verified
(cut-through), and until then the peer is told every ALIVE_S that it is not forgotten. Each peer
has a queue of its own, served by a task of its own that waits for that peer's credit, so a
slow peer holds up nobody and has at most one batch of bytes here. Within a peer, versions
take turns: a newer one does not wait until what was asked for before is through. Re-asked
chunks count once. A full queue drops the request, which the peer makes again.

Bytes are not hashed here: the receiver does that for each chunk. What is not held (any
more) is refused with its reason, and its file is let go, so that removed versions free the
disk; a relay holds requests for a version that it knows nothing of yet for `unknown_hold_s`,
since peers may be told of it a moment earlier. Sockets belong to `net.relay` and the origin.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import structlog

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
from echo2.net.tasks import OwnedTasks
from echo2.types import PeerId
from echo2.weights.assembly import Assembly
from echo2.weights.open_versions import OpenVersions
from echo2.weights.request_queue import RequestQueue
from echo2.weights.snapshot import Manifest

log = structlog.get_logger(__name__)

PEERS_MAX: Final = 4096
VERSIONS_UNKNOWN_MAX: Final = 64
ALIVE_S: Final = 0.5
THREADS: Final = 4
BATCH_CHUNKS: Final = 8
CREDIT_STALL_S: Final = 60.0
"""A peer that takes nothing for so long loses its queue."""
SWEEP_INTERVAL_S: Final = 5.0
_CREDIT_POLL_S: Final = 0.005
_MANIFEST: Final = -1
"""Stands for the manifest among a version's chunk indexes."""


class ChunkServer:
    """Serves the versions in `folder`, and those on their way there; `send` and `credit` reach
    a peer whose credit is `credit_bytes`. `uplink_mbit` caps what leaves here in all."""

    def __init__(
        self,
        folder: Path,
        *,
        send: Callable[[PeerId, Message], bool],
        credit: Callable[[PeerId], int],
        credit_bytes: int,
        credit_stall_s: float = CREDIT_STALL_S,
        unknown_hold_s: float = 0.0,
        uplink_mbit: float = 0.0,
    ) -> None:
        self.counters: Counter[str] = Counter()
        """manifests, chunks, bytes (sent); refused, queue_full, peers_dropped."""
        self._send = send
        self._credit = credit
        self._credit_bytes = credit_bytes
        self._credit_stall_s = credit_stall_s
        self._unknown_hold_s = unknown_hold_s
        self._unknown: dict[str, float] = {}
        self._versions = OpenVersions(folder)
        self._assemblies: dict[str, Assembly] = {}
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="chunks")
        self._queues: dict[PeerId, RequestQueue] = {}
        self._serving: set[PeerId] = set()
        self._pace = Pace(uplink_mbit * 1e6 / 8)
        self._tasks = OwnedTasks("chunk_server")

    def start(self) -> None:
        self._tasks.start(self._sweep(), name="sweep")
        self._tasks.start(self._tell_alive(), name="alive")

    async def stop(self) -> None:
        """End; raises what crashed before, unless `wait` did."""
        try:
            await self._tasks.stop()
        finally:
            await asyncio.to_thread(self._pool.shutdown, cancel_futures=True)
            self._versions.close()

    async def wait(self) -> None:
        """Until stopped; raises the first crash. Its owner awaits this."""
        await self._tasks.wait()

    # -------------------------------------------------------------------- what is here

    def begins(self, assembly: Assembly) -> None:
        """A version is on its way here: serve what it has, as it comes."""
        digest = assembly.manifest.manifest_digest
        self._assemblies[digest] = assembly
        self._unknown.pop(digest, None)
        for peer, queue in self._queues.items():
            for index in queue.awaited(digest):
                if index == _MANIFEST or assembly.has(index):
                    queue.arrived(digest, index)
            self._serve_soon(peer, queue)

    def arrived(self, manifest_digest: str, index: int) -> None:
        """A chunk was verified: those who await it get it now."""
        for peer, queue in self._queues.items():
            if queue.arrived(manifest_digest, index):
                self._serve_soon(peer, queue)

    def ends(self, manifest_digest: str, *, complete: bool) -> None:
        """The version is here as a whole, or comes no more: who awaits the rest is told."""
        self._assemblies.pop(manifest_digest, None)
        for peer, queue in self._queues.items():
            awaited = queue.awaited(manifest_digest)
            if complete:
                for index in awaited:
                    queue.arrived(manifest_digest, index)
                self._serve_soon(peer, queue)
            elif awaited:
                queue.drop(manifest_digest, awaited)
                self._refuse(peer, manifest_digest, "its own fetch ended before it was complete")

    # ------------------------------------------------------------------------ requests

    def handle(self, peer: PeerId, message: Message) -> None:
        """Take a request of `peer`; never waits."""
        match message:
            case ManifestRequest(manifest_digest=manifest_digest):
                wanted: tuple[int, ...] = (_MANIFEST,)
            case ChunksRequest(manifest_digest=manifest_digest, indexes=wanted):
                pass
            case ChunksCancelled(manifest_digest=manifest_digest, indexes=indexes):
                if peer in self._queues:
                    self._queues[peer].drop(manifest_digest, indexes)
                return
            case _:
                return
        queue = self._queues.get(peer)
        if queue is None:
            if len(self._queues) >= PEERS_MAX:
                self.counters["queue_full"] += 1
                return
            queue = self._queues[peer] = RequestQueue()
        assembly = self._assemblies.get(manifest_digest)
        if assembly is not None and max(wanted) >= assembly.manifest.num_chunks:
            self._refuse(peer, manifest_digest, f"there is no chunk {max(wanted)}")
            return
        for index in wanted:
            here = assembly is None or index == _MANIFEST or assembly.has(index)
            here = here and manifest_digest not in self._unknown
            if not queue.add(manifest_digest, index, here=here):
                self.counters["queue_full"] += 1
        self._serve_soon(peer, queue)

    def forget(self, peer: PeerId) -> None:
        """The peer is gone: what it wanted is dropped."""
        queue = self._queues.get(peer)
        if queue is not None:
            queue.drop()
            if peer not in self._serving:
                del self._queues[peer]

    def _serve_soon(self, peer: PeerId, queue: RequestQueue) -> None:
        if queue and peer not in self._serving:
            self._serving.add(peer)
            self._tasks.start(self._serve(peer, queue), name=f"serve.{peer}")

    async def _serve(self, peer: PeerId, queue: RequestQueue) -> None:
        """Until nothing is ready; nothing is awaited between that and the end."""
        loop = asyncio.get_running_loop()
        try:
            while queue:
                manifest_digest, indexes = queue.take(BATCH_CHUNKS)
                replies, refusal, is_known = await loop.run_in_executor(
                    self._pool, self._read, manifest_digest, indexes
                )
                if refusal and is_known:
                    queue.drop(manifest_digest)
                    self._refuse(peer, manifest_digest, refusal)
                elif refusal:
                    self._hold(peer, queue, manifest_digest, indexes, refusal)
                for reply in replies:
                    if not await self._sent(peer, reply):
                        self.counters["peers_dropped"] += 1
                        queue.drop()
                        break
        finally:
            self._serving.discard(peer)
            if not queue.num_all:
                self._queues.pop(peer, None)

    def _hold(
        self, peer: PeerId, queue: RequestQueue, digest: str, indexes: list[int], reason: str
    ) -> None:
        """Nothing of this version is here: wait a while for news of it, or refuse at once."""
        if digest in self._assemblies:  # it began meanwhile
            for index in indexes:
                queue.add(digest, index, here=self._has(digest, index))
            return
        is_full = digest not in self._unknown and len(self._unknown) >= VERSIONS_UNKNOWN_MAX
        if not self._unknown_hold_s or is_full:
            queue.drop(digest)
            self._refuse(peer, digest, reason)
            return
        until = asyncio.get_running_loop().time() + self._unknown_hold_s
        self._unknown.setdefault(digest, until)
        for index in indexes:
            queue.add(digest, index, here=False)

    def _has(self, digest: str, index: int) -> bool:
        assembly = self._assemblies.get(digest)
        return assembly is None or index == _MANIFEST or assembly.has(index)

    def _refuse(self, peer: PeerId, manifest_digest: str, reason: str) -> None:
        log.warning("request_refused", peer=peer, manifest_digest=manifest_digest, reason=reason)
        self._send(peer, ChunksRefused(manifest_digest=manifest_digest, reason=reason[:2048]))
        self.counters["refused"] += 1

    def _read(self, manifest_digest: str, indexes: list[int]) -> tuple[list[Message], str, bool]:
        """Replies to requests for one version, in order; why there are none ("" else); whether
        the version is here. In a thread."""
        assembly = self._assemblies.get(manifest_digest)
        is_known = False
        try:
            if assembly is not None:
                try:
                    replies = [_reply(assembly.manifest, i, assembly.read) for i in indexes]
                    return replies, "", True
                except WeightsError:  # it has just become complete, and the file is renamed
                    log.debug("assembly_ended", manifest_digest=manifest_digest)
            with self._versions.use(manifest_digest) as version:
                is_known = True
                return [_reply(version.manifest, i, version.read) for i in indexes], "", True
        except (WeightsError, OSError) as error:
            return [], str(error) or type(error).__name__, is_known

    async def _sent(self, peer: PeerId, reply: Message) -> bool:
        """Hand a reply over when the peer has credit; False when it takes nothing any more."""
        num_bytes = _payload_bytes(reply)
        await self._pace.take(num_bytes)
        if not await self._has_credit(peer, num_bytes) or not self._send(peer, reply):
            return False
        match reply:
            case Chunk():
                self.counters["chunks"] += 1
            case ManifestReply():
                self.counters["manifests"] += 1
        self.counters["bytes"] += num_bytes
        return True

    async def _has_credit(self, peer: PeerId, num_bytes: int) -> bool:
        """Wait until the peer may be sent so much (or has nothing under way)."""
        loop = asyncio.get_running_loop()
        # The header comes on top; an empty queue takes a message of any size.
        needed = min(num_bytes + 4096, self._credit_bytes)
        before, since = -1, loop.time()
        while (credit := self._credit(peer)) < needed:
            if credit != before:
                before, since = credit, loop.time()
            elif loop.time() - since > self._credit_stall_s:
                log.warning("peer_stalled", peer=peer, silent_s=self._credit_stall_s)
                return False
            # A socket does not tell when a queue gets shorter.
            await asyncio.sleep(_CREDIT_POLL_S)
        return True

    async def _tell_alive(self) -> None:
        """Whoever is owed chunks hears of us; who waits for what is never heard of, in time."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(ALIVE_S)
            for peer, queue in list(self._queues.items()):
                for digest, (num_held, num_awaited) in queue.counts().items():
                    alive = RelayAlive(
                        manifest_digest=digest, num_held=num_held, num_awaited=num_awaited
                    )
                    self._send(peer, alive)
            over = [digest for digest, until in self._unknown.items() if loop.time() > until]
            for digest in over:
                del self._unknown[digest]
                if digest not in self._assemblies:
                    self.ends(digest, complete=False)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            await asyncio.to_thread(self._versions.sweep)


class Pace:
    """Lets `bytes_per_s` through, in bursts of a tenth of a second; 0: everything."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0

    async def take(self, num_bytes: int) -> None:
        """Wait for one's turn; turns are given in the order of the calls."""
        if not self._bytes_per_s:
            return
        now = asyncio.get_running_loop().time()
        self._free_at = max(self._free_at, now - 0.1) + num_bytes / self._bytes_per_s
        if self._free_at > now:
            await asyncio.sleep(self._free_at - now)


def _reply(manifest: Manifest, index: int, read: Callable[[int], bytes]) -> Message:
    digest = manifest.manifest_digest
    if index == _MANIFEST:
        return ManifestReply(manifest_digest=digest, manifest=manifest.encode())
    return Chunk(manifest_digest=digest, index=index, payload=read(index))


def _payload_bytes(message: Message) -> int:
    match message:
        case Chunk(payload=payload):
            return len(payload)
        case ManifestReply(manifest=manifest):
            return len(manifest)
        case _:
            return 0
