"""Answers requests for manifests and chunks, fairly, with bounded memory and open files.

    request --> queue of its peer (indexes only) --> read in a thread --> sent

Each peer has a queue of its own, served by a task of its own that waits for that peer's
credit, so a slow peer holds up nobody and has at most one batch of bytes here. Within a
peer, versions take turns: a newer one does not wait until what was asked for before is
through. Re-asked chunks that still wait count once. A full queue drops the request, which
the peer makes again.

Bytes are not hashed here: the receiver does that for each chunk. What is not held (any
more) is refused with its reason, and its file is let go, so that removed versions free the
disk. Receiving and sending belong to `echo2.weights.origin`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

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
from echo2.net.tasks import OwnedTasks
from echo2.types import PeerId
from echo2.weights.versions import StoredVersion, open_version

log = structlog.get_logger(__name__)

REQUESTS_PER_PEER_MAX: Final = 4096
PEERS_MAX: Final = 4096
VERSIONS_OPEN_MAX: Final = 8
THREADS: Final = 4
BATCH_CHUNKS: Final = 8
CREDIT_STALL_S: Final = 60.0
"""A peer that takes nothing for so long loses its queue."""
SWEEP_INTERVAL_S: Final = 5.0
_CREDIT_POLL_S: Final = 0.005
_MANIFEST: Final = -1
"""Stands for the manifest among a version's chunk indexes."""


class OpenVersions:
    """Versions of `folder`, kept open while they are used: at most `versions_max`."""

    def __init__(self, folder: Path, *, versions_max: int = VERSIONS_OPEN_MAX) -> None:
        self.folder = folder
        self._versions_max = versions_max
        self._lock = threading.Lock()
        self._versions: OrderedDict[str, StoredVersion] = OrderedDict()

    def __len__(self) -> int:
        return len(self._versions)

    @contextlib.contextmanager
    def use(self, manifest_digest: str) -> Iterator[StoredVersion]:
        """An open version; WeightsError when it is not there (any more), or torn."""
        with contextlib.ExitStack() as stack:
            with self._lock:
                version = self._get(manifest_digest)
                stack.enter_context(version.held())
            yield version

    def sweep(self) -> None:
        """Let go of versions that were removed, so that their disk space is free."""
        with self._lock:
            for manifest_digest, version in list(self._versions.items()):
                if not version.path.exists():
                    self._versions.pop(manifest_digest).close()

    def close(self) -> None:
        with self._lock:
            while self._versions:
                self._versions.popitem()[1].close()

    def _get(self, manifest_digest: str) -> StoredVersion:
        version = self._versions.get(manifest_digest)
        if version is not None and not version.path.exists():
            self._versions.pop(manifest_digest).close()
            version = None
        if version is None:
            version = open_version(self.folder, manifest_digest)
            if version is None:
                raise WeightsError(
                    f"version {manifest_digest[:12]} is not here (any more): it was removed, "
                    "or never published from here"
                )
            self._versions[manifest_digest] = version
            log.info(
                "version_opened",
                manifest_digest=manifest_digest,
                num_bytes=version.manifest.num_bytes,
            )
        self._versions.move_to_end(manifest_digest)
        while len(self._versions) > self._versions_max:
            self._versions.popitem(last=False)[1].close()
        return version


class RequestQueue:
    """What one peer still wants, by version; versions take turns."""

    def __init__(self) -> None:
        self._wanted: OrderedDict[str, dict[int, None]] = OrderedDict()
        self._num_wanted = 0

    def __len__(self) -> int:
        return self._num_wanted

    def add(self, manifest_digest: str, index: int) -> bool:
        """False when the queue is full; what waits already counts once."""
        indexes = self._wanted.get(manifest_digest, {})
        if index in indexes:
            return True
        if self._num_wanted >= REQUESTS_PER_PEER_MAX:
            return False
        indexes[index] = None
        self._wanted[manifest_digest] = indexes
        self._num_wanted += 1
        return True

    def take(self, at_most: int) -> tuple[str, list[int]]:
        """The next chunks of the version whose turn it is."""
        manifest_digest, indexes = self._wanted.popitem(last=False)
        taken = list(itertools.islice(indexes, at_most))
        for index in taken:
            del indexes[index]
        if indexes:
            self._wanted[manifest_digest] = indexes
        self._num_wanted -= len(taken)
        return manifest_digest, taken

    def drop(self, manifest_digest: str | None = None) -> None:
        """Forget what is wanted of one version, or everything."""
        if manifest_digest is None:
            self._wanted.clear()
            self._num_wanted = 0
        else:
            self._num_wanted -= len(self._wanted.pop(manifest_digest, {}))


class ChunkServer:
    """Serves the versions in `folder`; `send` and `credit` are those of a Router whose
    credit per peer is `credit_bytes`."""

    def __init__(
        self,
        folder: Path,
        *,
        send: Callable[[PeerId, Message], bool],
        credit: Callable[[PeerId], int],
        credit_bytes: int,
        credit_stall_s: float = CREDIT_STALL_S,
    ) -> None:
        self.counters: Counter[str] = Counter()
        """manifests, chunks, bytes (sent); refused, queue_full, peers_dropped."""
        self._send = send
        self._credit = credit
        self._credit_bytes = credit_bytes
        self._credit_stall_s = credit_stall_s
        self._versions = OpenVersions(folder)
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="chunks")
        self._queues: dict[PeerId, RequestQueue] = {}
        self._tasks = OwnedTasks("chunk_server")

    def start(self) -> None:
        self._tasks.start(self._sweep(), name="sweep")

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

    def handle(self, peer: PeerId, message: Message) -> None:
        """Take a request of `peer`; never waits."""
        match message:
            case ManifestRequest(manifest_digest=manifest_digest):
                wanted: tuple[int, ...] = (_MANIFEST,)
            case ChunksRequest(manifest_digest=manifest_digest, indexes=wanted):
                pass
            case _:
                return
        queue = self._queues.get(peer)
        if queue is None:
            if len(self._queues) >= PEERS_MAX:
                self.counters["queue_full"] += 1
                return
            queue = self._queues[peer] = RequestQueue()
            self._tasks.start(self._serve(peer, queue), name=f"serve.{peer}")
        for index in wanted:
            if not queue.add(manifest_digest, index):
                self.counters["queue_full"] += 1

    async def _serve(self, peer: PeerId, queue: RequestQueue) -> None:
        """Until the peer wants no more; nothing is awaited between that and the end."""
        loop = asyncio.get_running_loop()
        try:
            while queue:
                manifest_digest, indexes = queue.take(BATCH_CHUNKS)
                replies = await loop.run_in_executor(
                    self._pool, self._read, manifest_digest, indexes
                )
                for reply in replies:
                    if isinstance(reply, ChunksRefused):
                        queue.drop(manifest_digest)
                    if not await self._sent(peer, reply):
                        self.counters["peers_dropped"] += 1
                        queue.drop()
                        break
        finally:
            del self._queues[peer]

    def _read(self, manifest_digest: str, indexes: list[int]) -> list[Message]:
        """Replies to requests for one version, in order; a refusal ends them. In a thread."""
        replies: list[Message] = []
        try:
            with self._versions.use(manifest_digest) as version:
                for index in indexes:
                    if index == _MANIFEST:
                        reply: Message = ManifestReply(
                            manifest_digest=manifest_digest, manifest=version.manifest.encode()
                        )
                    else:
                        reply = Chunk(
                            manifest_digest=manifest_digest,
                            index=index,
                            payload=version.read(index),
                        )
                    replies.append(reply)
        except (WeightsError, OSError) as error:
            log.warning("request_refused", manifest_digest=manifest_digest, reason=str(error))
            replies.append(ChunksRefused(manifest_digest=manifest_digest, reason=str(error)[:2048]))
        return replies

    async def _sent(self, peer: PeerId, reply: Message) -> bool:
        """Hand a reply over when the peer has credit; False when it takes nothing any more."""
        num_bytes = _payload_bytes(reply)
        if not await self._has_credit(peer, num_bytes) or not self._send(peer, reply):
            return False
        match reply:
            case Chunk():
                self.counters["chunks"] += 1
            case ManifestReply():
                self.counters["manifests"] += 1
            case _:
                self.counters["refused"] += 1
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
            # A Router does not tell when a queue gets shorter.
            await asyncio.sleep(_CREDIT_POLL_S)
        return True

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            await asyncio.to_thread(self._versions.sweep)


def _payload_bytes(message: Message) -> int:
    match message:
        case Chunk(payload=payload):
            return len(payload)
        case ManifestReply(manifest=manifest):
            return len(manifest)
        case _:
            return 0
