"""Answers requests for manifests and chunks: in order, fairly, with bounded memory and files.

    request --> ready, or awaited until the chunk is verified here --> read in a thread --> sent

What is held is sent at once; what is still on its way here is sent as soon as it is verified
(cut-through), and until then the peer is told every ALIVE_S that it is not forgotten. One task
serves all peers, a batch at a time: among those with credit, the lowest chunk that anybody
waits for goes first (`weights.send_order`), and one reading serves all who want it. A slow peer
runs out of credit and holds up nobody. Within a peer, versions take turns: a newer one does
not wait until what was asked for before is through. Re-asked chunks count once. A full queue
drops the request, which the peer makes again.

Bytes are not hashed here: the receiver does that for each chunk. What is not held (any
more) is refused with its reason, and its file is let go, so that removed versions free the
disk; a relay holds requests for a version that it knows nothing of yet for `unknown_hold_s`,
since peers may be told of it a moment earlier. Sockets belong to `net.relay` and the origin.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import structlog

from echo2.messages import (
    CHUNK_MAX_BYTES,
    Chunk,
    ChunksCancelled,
    ChunksRefused,
    ChunksRequest,
    ManifestReply,
    ManifestRequest,
    Message,
    RelayAlive,
)
from echo2.net.rate_limit import RateLimit
from echo2.net.tasks import OwnedTasks
from echo2.net.wakeups import Signal
from echo2.types import PeerId
from echo2.weights.assembly import Assembly
from echo2.weights.pace import Pace
from echo2.weights.replies import MANIFEST, Absent, Key, Replies, Reply
from echo2.weights.request_queue import RequestQueue
from echo2.weights.send_order import SendOrder

log = structlog.get_logger(__name__)

PEERS_MAX: Final = 4096
VERSIONS_UNKNOWN_MAX: Final = 64
UNKNOWN_PER_PEER_MAX: Final = 8
"""Versions that nobody knows and that are held for the peer that asked first: one that makes
names up leaves room for the others."""
ALIVE_S: Final = 0.5
BATCH_CHUNKS: Final = 16
"""Most chunks that are read at once, for all peers together."""
BATCH_S: Final = 0.02
"""Where the uplink is capped, a batch takes no longer: what is chosen early is chosen badly."""
CREDIT_STALL_S: Final = 60.0
"""A peer that takes nothing for so long loses its queue."""
SWEEP_INTERVAL_S: Final = 5.0
_LOOK_S: Final = 1.0
_LOGGED_BURST: Final = 100
_LOGGED_INTERVAL_S: Final = 1.0
"""Requests that are refused are all counted, and logged as often as this."""
_HEADER_BYTES: Final = 4096


class ChunkServer:
    """Serves the versions in `folder`, and those on their way there; `send` and `credit` reach
    a peer whose credit is `credit_bytes`, and whoever owns them calls `look` when one has
    more again. `uplink_mbit` caps what leaves here in all."""

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
        self._unknown: dict[str, tuple[float, PeerId]] = {}
        """Until when each is held, and for whom first."""
        self._logged = RateLimit(_LOGGED_BURST, _LOGGED_INTERVAL_S)
        self._replies = Replies(folder)
        self._queues: dict[PeerId, RequestQueue] = {}
        self._order = SendOrder()
        self._blocked: dict[PeerId, tuple[int, float]] = {}
        """Of those that wait for credit: how much they had when, since it changed last."""
        self._sent_last: dict[PeerId, str] = {}
        """The version of which each peer was sent something last, while that may wait."""
        self._news = Signal()
        self._pace = Pace(uplink_mbit)
        self._tasks = OwnedTasks("chunk_server")

    def start(self) -> None:
        self._tasks.start(self._serve(), name="serve")
        self._tasks.start(self._sweep(), name="sweep")
        self._tasks.start(self._tell_alive(), name="alive")

    async def stop(self) -> None:
        """End; raises what crashed before, unless `wait` did."""
        try:
            await self._tasks.stop()
        finally:
            await self._replies.close()

    async def wait(self) -> None:
        """Until stopped; raises the first crash. Its owner awaits this."""
        await self._tasks.wait()

    # -------------------------------------------------------------------- what is here

    def begins(self, assembly: Assembly) -> None:
        """A version is on its way here: serve what it has, as it comes."""
        digest = assembly.manifest.manifest_digest
        self._replies.begins(assembly)
        self._unknown.pop(digest, None)
        for queue in self._queues.values():
            for index in queue.awaited(digest):
                if self._replies.has(digest, index):
                    queue.arrived(digest, index)
        self._news.set()

    def arrived(self, chunk: Chunk) -> None:
        """A chunk was verified: those who await it get it now."""
        key = chunk.manifest_digest, chunk.index
        awaiting = [queue.arrived(*key) for queue in self._queues.values()]
        if any(awaiting):
            self._replies.keep(chunk)
            self._news.set()

    def ends(self, manifest_digest: str, *, complete: bool) -> None:
        """The version is here as a whole, or comes no more: who awaits the rest is told."""
        self._replies.ends(manifest_digest)
        if complete:
            self._unknown.pop(manifest_digest, None)
            self._wake(manifest_digest)
            return
        for peer, queue in self._queues.items():
            awaited = queue.awaited(manifest_digest)
            if awaited:
                queue.drop(manifest_digest, awaited)
                self._refuse(peer, manifest_digest, "its own fetch ended before it was complete")
        self._news.set()

    def _wake(self, manifest_digest: str) -> None:
        for queue in self._queues.values():
            for index in queue.awaited(manifest_digest):
                queue.arrived(manifest_digest, index)
        self._news.set()

    # ------------------------------------------------------------------------ requests

    def handle(self, peer: PeerId, message: Message) -> None:
        """Take a request of `peer`; never waits."""
        match message:
            case ManifestRequest(manifest_digest=manifest_digest):
                wanted: tuple[int, ...] = (MANIFEST,)
            case ChunksRequest(manifest_digest=manifest_digest, indexes=wanted):
                pass
            case ChunksCancelled(manifest_digest=manifest_digest, indexes=indexes):
                if peer in self._queues:
                    self._queues[peer].drop(manifest_digest, indexes)
                    self._forget_idle(peer)
                return
            case _:
                return
        queue = self._queues.get(peer)
        if queue is None:
            if len(self._queues) >= PEERS_MAX:
                self.counters["queue_full"] += 1
                return
            queue = self._queues[peer] = RequestQueue()
        coming = self._replies.coming(manifest_digest)
        if coming is not None and max(wanted) >= coming.num_chunks:
            self._refuse(peer, manifest_digest, f"there is no chunk {max(wanted)}")
            return
        for index in wanted:
            here = self._replies.has(manifest_digest, index)
            here = here and manifest_digest not in self._unknown
            if not queue.add(manifest_digest, index, here=here):
                self.counters["queue_full"] += 1
        self._forget_idle(peer)
        self._news.set()

    def look(self) -> None:
        """Somebody's credit grew."""
        if self._blocked:
            self._news.set()

    def forget(self, peer: PeerId) -> None:
        """The peer is gone: what it wanted is dropped."""
        self._sent_last.pop(peer, None)
        queue = self._queues.get(peer)
        if queue is not None:
            queue.drop()
            self._forget_idle(peer)

    def _forget_idle(self, peer: PeerId) -> None:
        if peer in self._queues and not self._queues[peer].num_all:
            del self._queues[peer]
            self._order.forget(peer)
            self._blocked.pop(peer, None)

    # ------------------------------------------------------------------------- serving

    async def _serve(self) -> None:
        look_s = min(_LOOK_S, self._credit_stall_s / 2)
        while True:
            batch = self._choose()
            if not batch:
                # Who takes nothing for too long brings no news.
                await self._news.wait(look_s if self._blocked else None)
                continue
            replies = await self._replies.find({key: None for _, key in batch})
            for peer, key in batch:
                await self._answer(peer, key, replies[key])
            if len(batch) > 1:
                await asyncio.sleep(0)

    def _choose(self) -> list[tuple[PeerId, Key]]:
        """What to send next, and to whom, as far as their credit goes."""
        room = self._room()
        lowest = {peer: self._queues[peer].lowest() for peer in room}
        most = BATCH_CHUNKS
        if self._pace.bytes_per_s:
            paced = int(self._pace.bytes_per_s * BATCH_S / CHUNK_MAX_BYTES)
            most = max(1, min(most, paced))
        batch: list[tuple[PeerId, Key]] = []
        while lowest and len(batch) < most:
            peer = self._order.next(lowest)
            queue = self._queues[peer]
            batch.append((peer, queue.take()))
            room[peer] -= self._needed(lowest[peer])
            if queue and room[peer] >= self._needed(queue.lowest()):
                lowest[peer] = queue.lowest()
            else:
                del lowest[peer]
        return batch

    def _room(self) -> dict[PeerId, int]:
        """Credit of those that can be sent something now. Whose credit has not changed for too
        long loses its queue."""
        now = asyncio.get_running_loop().time()
        room = {}
        for peer, queue in list(self._queues.items()):
            if not queue:
                self._blocked.pop(peer, None)
                continue
            credit = self._credit(peer)
            if credit >= self._needed(queue.lowest()):
                room[peer] = credit
                self._blocked.pop(peer, None)
                continue
            before, since = self._blocked.get(peer, (-1, now))
            if credit != before:
                self._blocked[peer] = credit, now
            elif now - since > self._credit_stall_s:
                log.warning("peer_stalled", peer=peer, silent_s=self._credit_stall_s)
                self._drop_peer(peer, queue)
        return room

    def _needed(self, index: int) -> int:
        """Credit that a reply may need. An empty queue takes a manifest of any size."""
        if index == MANIFEST:
            return self._credit_bytes
        return min(CHUNK_MAX_BYTES + _HEADER_BYTES, self._credit_bytes)

    async def _answer(self, peer: PeerId, key: Key, reply: Reply | Absent) -> None:
        queue = self._queues.get(peer)
        if queue is None:
            return  # it is gone
        if isinstance(reply, Absent):
            if queue.let_go(*key):
                self._not_found(peer, queue, key, reply)
        else:
            # It is owed, and counted as such, until the pace lets it through.
            await self._pace.take(_payload_bytes(reply))
            if queue.let_go(*key) and not await self._sent(peer, reply):
                self._drop_peer(peer, queue)
        self._forget_idle(peer)

    async def _sent(self, peer: PeerId, reply: Reply) -> bool:
        """Hand a reply over; False when the peer takes nothing any more."""
        if not self._send(peer, reply):
            return False
        match reply:
            case Chunk():
                self.counters["chunks"] += 1
            case ManifestReply():
                self.counters["manifests"] += 1
        self.counters["bytes"] += _payload_bytes(reply)
        self._sent_last[peer] = reply.manifest_digest
        return True

    def _drop_peer(self, peer: PeerId, queue: RequestQueue) -> None:
        self.counters["peers_dropped"] += 1
        queue.drop()
        self._forget_idle(peer)

    def _not_found(self, peer: PeerId, queue: RequestQueue, key: Key, absent: Absent) -> None:
        """Wait a while for news of a version of which nothing is here, or refuse."""
        digest, index = key
        if not absent.is_known and self._replies.coming(digest) is not None:  # it began meanwhile
            queue.add(digest, index, here=self._replies.has(digest, index))
            return
        is_held = digest in self._unknown or self._has_room_for_unknown(peer)
        if absent.is_known or not self._unknown_hold_s or not is_held:
            queue.drop(digest)
            self._refuse(peer, digest, absent.reason)
            return
        until = asyncio.get_running_loop().time() + self._unknown_hold_s
        self._unknown.setdefault(digest, (until, peer))
        queue.add(digest, index, here=False)

    def _has_room_for_unknown(self, peer: PeerId) -> bool:
        of_peer = sum(first == peer for _, first in self._unknown.values())
        return len(self._unknown) < VERSIONS_UNKNOWN_MAX and of_peer < UNKNOWN_PER_PEER_MAX

    def _refuse(self, peer: PeerId, manifest_digest: str, reason: str) -> None:
        if num_since := self._logged.note(asyncio.get_running_loop().time()):
            log.warning(
                "request_refused",
                peer=peer,
                manifest_digest=manifest_digest,
                reason=reason,
                num_since=num_since,
            )
        self._send(peer, ChunksRefused(manifest_digest=manifest_digest, reason=reason[:2048]))
        self.counters["refused"] += 1

    async def _tell_alive(self) -> None:
        """Whoever is owed chunks hears of us; who waits for what is never heard of, in time."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(ALIVE_S)
            for peer in {**self._queues, **self._sent_last}:
                for digest, (num_held, num_awaited) in self._owed(peer).items():
                    alive = RelayAlive(
                        manifest_digest=digest, num_held=num_held, num_awaited=num_awaited
                    )
                    if not self._send(peer, alive):
                        self._sent_last.pop(peer, None)
            for digest in filter(self._replies.is_whole, self._unknown):
                self._wake(digest)  # it came between our reading and our waiting for it
            over = [digest for digest, (until, _) in self._unknown.items() if loop.time() > until]
            for digest in over:
                del self._unknown[digest]
                if self._replies.coming(digest) is None:
                    self.ends(digest, complete=False)

    def _owed(self, peer: PeerId) -> dict[str, tuple[int, int]]:
        """(held, awaited) of each version. What waits for the peer's link is held too."""
        queue = self._queues.get(peer)
        owed = {} if queue is None else queue.counts()
        waiting = self._credit_bytes - self._credit(peer) - _HEADER_BYTES
        digest = self._sent_last.get(peer)
        if digest is not None and waiting > 0:
            held, awaited = owed.get(digest, (0, 0))
            owed[digest] = held + 1 + waiting // CHUNK_MAX_BYTES, awaited
        else:
            self._sent_last.pop(peer, None)
        return owed

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            await asyncio.to_thread(self._replies.sweep)


def _payload_bytes(reply: Reply) -> int:
    return len(reply.payload if isinstance(reply, Chunk) else reply.manifest)
