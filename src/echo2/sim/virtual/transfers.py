"""Versions on their way to workers, over links of set rates.

Who gets which stripe from whom is what the coordinator announced: its own plan. How long that takes
over the links of the configuration is the planner's arithmetic (`core.dissemination_prediction`),
applied to those who begin a version at the same moment. Whoever begins later shares the uplinks of
its sources with what they are sending already, and has nothing before they have it. A source that
is lost costs everybody behind it REPAIR_S, in which they turn to others.

What that leaves out: chunks one by one, TCP, and rollouts on the same lines.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from echo2.core.dissemination import Host
from echo2.core.dissemination_graph import PackedTree, RelayGraph
from echo2.core.dissemination_hosts import megabits
from echo2.core.dissemination_prediction import predict_arrivals_s, uplink_loads_s
from echo2.core.relay_rates import ORIGIN
from echo2.core.worker_events import Fetch
from echo2.messages import CHUNK_MAX_BYTES
from echo2.sim.timeline import Timeline
from echo2.types import PeerId

REPAIR_S: Final = 3.0


@dataclass(slots=True, eq=False)
class Transfer:
    """`shares`: which part of the bytes comes from whom. `turn` counts plans of its end."""

    peer: PeerId
    fetch: Fetch
    num_bytes: int
    on_done: Callable[[float], None]
    began: float
    shares: dict[str, float] = field(default_factory=dict)
    ends_at: float = float("inf")
    turn: int = 0

    @property
    def mbit(self) -> float:
        return megabits(self.num_bytes)


class Transfers:
    """`origin` and the workers' `hosts` as they are, whatever the coordinator knows."""

    def __init__(self, timeline: Timeline, origin: Host) -> None:
        self.hosts: dict[str, Host] = {ORIGIN: origin}
        self._timeline = timeline
        self._under_way: dict[PeerId, Transfer] = {}
        self._having: dict[str, set[PeerId]] = defaultdict(set)
        """By manifest: who has all of it."""
        self._beginning: dict[str, list[Transfer]] = {}

    # ------------------------------------------------------------------- one worker's

    def begin(
        self, peer: PeerId, fetch: Fetch, num_bytes: int, on_done: Callable[[float], None]
    ) -> None:
        """`on_done(fetch_s)` when all of it is there; one under way is given up."""
        self.cancel(peer)
        transfer = Transfer(peer, fetch, num_bytes, on_done, self._timeline.now)
        self._under_way[peer] = transfer
        digest = fetch.manifest_digest
        if digest not in self._beginning:
            self._beginning[digest] = []
            self._timeline.after(0.0, self._begun, digest)
        self._beginning[digest].append(transfer)

    def cancel(self, peer: PeerId) -> None:
        transfer = self._under_way.pop(peer, None)
        if transfer is not None:
            transfer.turn += 1

    def lose(self, peer: PeerId) -> None:
        """The machine is gone, and its disk."""
        self.cancel(peer)
        for having in self._having.values():
            having.discard(peer)
        behind = {peer}
        for transfer in sorted(self._under_way.values(), key=lambda each: each.ends_at):
            if not behind.isdisjoint(transfer.shares):
                behind.add(transfer.peer)
                self._end_at(transfer, transfer.ends_at + REPAIR_S)

    def share(self, peer: PeerId) -> tuple[str, float] | None:
        """(manifest, part of it that is there) of what is under way."""
        transfer = self._under_way.get(peer)
        if transfer is None:
            return None
        whole_s = transfer.ends_at - transfer.began
        part = (self._timeline.now - transfer.began) / whole_s if whole_s > 0 else 1.0
        return transfer.fetch.manifest_digest, min(1.0, part)

    def forget(self, digests: set[str]) -> None:
        """Versions that nobody fetches any more."""
        for digest in digests:
            self._having.pop(digest, None)

    # ------------------------------------------------------------------ how long it takes

    def _begun(self, digest: str) -> None:
        """All who begin now are here."""
        found = [t for t in self._beginning.pop(digest) if self._under_way.get(t.peer) is t]
        planned = [t for t in found if t.fetch.planned_s > 0 or not t.fetch.stripes]
        if len(planned) > 1:
            self._follow_trees(planned)
        else:
            planned = []
        for transfer in found:
            if transfer not in planned:
                self._join(transfer)

    def _follow_trees(self, transfers: list[Transfer]) -> None:
        """Together, as the plan has it."""
        place = {transfer.peer: number for number, transfer in enumerate(transfers, 1)}
        hosts = [self.hosts[ORIGIN], *(self.hosts[transfer.peer] for transfer in transfers)]
        first = next((t for t in transfers if t.fetch.stripes), transfers[0])
        sizes = [stripe.num_chunks for stripe in first.fetch.stripes]
        if not sizes:
            sizes = [-(-first.num_bytes // CHUNK_MAX_BYTES)]
        chunk_mbit = first.mbit / sum(sizes)
        graph = _graph(hosts)
        trees = []
        for index, size in enumerate(sizes):
            parents = [-1]
            for transfer in transfers:
                source = self._parent(transfer, index, place)
                parents.append(place.get(PeerId(source), 0))
                share = size / sum(sizes)
                transfer.shares[source] = transfer.shares.get(source, 0.0) + share
            rate = size * chunk_mbit
            trees.append(PackedTree.of(graph, parents, rate=rate, chunk_mbit=chunk_mbit))
        order = sorted(range(len(trees)), key=lambda index: -sizes[index])
        ordered, chunks = [trees[i] for i in order], [sizes[i] for i in order]
        loads = uplink_loads_s(graph, ordered, chunks, chunk_mbit=chunk_mbit)
        arrivals = predict_arrivals_s(graph, ordered, chunks, loads, chunk_mbit=chunk_mbit)
        now = self._timeline.now
        for transfer, seconds in zip(transfers, arrivals, strict=True):
            self._end_at(transfer, now + seconds)

    def _parent(self, transfer: Transfer, index: int, place: Mapping[PeerId, int]) -> str:
        """The nearest on the way up that fetches it too; the origin behind all."""
        stripes = transfer.fetch.stripes
        ways = stripes[index].sources if index < len(stripes) else ()
        return next((name for name in ways if PeerId(name) in place), ORIGIN)

    def _join(self, transfer: Transfer) -> None:
        """By itself, from those that have it or get it."""
        now, digest = self._timeline.now, transfer.fetch.manifest_digest
        having = self._having[digest]
        fetching = {
            t.peer: t.ends_at
            for t in self._under_way.values()
            if t.fetch.manifest_digest == digest and t.shares and t is not transfer
        }
        stripes = transfer.fetch.stripes
        total = sum(stripe.num_chunks for stripe in stripes)
        for stripe in stripes:
            names = (n for n in stripe.sources if n in having or n in fetching)
            source = next(names, ORIGIN)
            share = stripe.num_chunks / total
            transfer.shares[source] = transfer.shares.get(source, 0.0) + share
        if not stripes:
            transfer.shares[ORIGIN] = 1.0
        host = self.hosts[transfer.peer]
        seconds = transfer.mbit / host.down
        ends_at = now
        for source in transfer.shares:
            up = max(self.hosts[source].up, 1e-6)
            seconds = max(seconds, sum(self._mbit_from(source)) / up)
            ends_at = max(ends_at, fetching.get(PeerId(source), now))
        hop_s = max(host.rtt, *(self.hosts[s].rtt for s in transfer.shares)) / 2
        self._end_at(transfer, max(now + seconds, ends_at) + hop_s)

    def _mbit_from(self, source: str) -> Iterator[float]:
        """What it still has to send to each, about."""
        now = self._timeline.now
        for transfer in self._under_way.values():
            share = transfer.shares.get(source)
            if share is not None:
                whole_s = transfer.ends_at - transfer.began
                left = (transfer.ends_at - now) / whole_s if 0 < whole_s < float("inf") else 1.0
                yield share * transfer.mbit * min(1.0, max(0.0, left))

    def _end_at(self, transfer: Transfer, when: float) -> None:
        transfer.turn += 1
        transfer.ends_at = when
        self._timeline.at(when, self._ended, transfer, transfer.turn)

    def _ended(self, transfer: Transfer, turn: int) -> None:
        if transfer.turn != turn:
            return
        del self._under_way[transfer.peer]
        self._having[transfer.fetch.manifest_digest].add(transfer.peer)
        transfer.on_done(self._timeline.now - transfer.began)


def _graph(hosts: list[Host]) -> RelayGraph:
    """Rates alone: who can send to whom was the planner's to ask."""
    return RelayGraph(
        hosts=tuple(hosts),
        up=tuple(max(host.up, 1e-6) for host in hosts),
        down=tuple(host.down for host in hosts),
        rtt=tuple(host.rtt for host in hosts),
        accepts=(True,) * len(hosts),
        sends=(),
        senders=(),
        has_blocked=False,
    )
