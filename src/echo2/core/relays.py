"""The workers' relays as the coordinator knows them: who is reached where, what their links
carry, who is told of whom, and which part of the newest version's plan is whose.

A worker has a relay if it named a key for it (without CURVE: an address). The others get
everything from the origin and forward nothing. One version is planned at a time, when it is
announced to all; whoever comes later gets a part of its own. Whoever a part names is in the
list of relays that its receiver had before (`stale`).

Holds and decides; the desk (`echo2.core.relay_desk`) takes messages and sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from echo2.core.dissemination import (
    DEFAULT_DOWN_MBIT,
    DEFAULT_UP_MBIT,
    Host,
    RelayPlan,
    plan_relays,
)
from echo2.core.membership import Members, Worker, WorkerState
from echo2.core.relay_parts import (
    JOINER_SOURCES_MAX,
    RelayPart,
    followers,
    joiner_part,
    planned_parts,
    planned_shares,
    rate_beside_a_star,
    suppliers,
)
from echo2.core.relay_rates import ORIGIN, RelayRates
from echo2.core.relay_standing import Standing
from echo2.core.settings import CoordinatorSettings
from echo2.core.staleness import ALLOWED, Verdict
from echo2.messages import CHUNK_MAX_BYTES, RELAY_PEERS_MAX, RelayPeers, VersionPublished
from echo2.types import Digest, Name, PeerId, RelayPeer, Version

STANDINGS_MAX: Final = 16_384
PLANNED_WORKERS_MAX: Final = 256
"""Workers in one plan, so that planning takes a tenth of a second; the others join behind."""


@dataclass(slots=True)
class _Planned:
    """`shares`: how many times the version each worker is to send, by all parts together."""

    version: Version
    digest: Digest
    num_chunks: int
    parts: dict[PeerId, RelayPart]
    shares: dict[str, float]


class Relays:
    """`listed`: the present list; `stale`: workers that have not been told of it. `changed`:
    it may have changed."""

    def __init__(self, settings: CoordinatorSettings, members: Members) -> None:
        self.settings = settings
        self.members = members
        self.rates = RelayRates(self._suppliers, self._told_down_mbit)
        self.standings: dict[PeerId, Standing] = {}
        self.changed = False
        self.listed: dict[str, RelayPeer] = {}
        self.stale: set[PeerId] = set()
        self.told_at = float("-inf")
        self._planned: _Planned | None = None

    # --------------------------------------------------------------------- standing

    def has_relay(self, worker: Worker) -> bool:
        if worker.peer == ORIGIN:  # a worker of that name could not be told from the origin
            return False
        return bool(worker.relay_key or (worker.relay_endpoint and not self.settings.curve))

    def standing(self, peer: PeerId) -> Standing:
        """Made when it is not known yet; of workers that left, the oldest are forgotten."""
        found = self.standings.get(peer)
        if found is None:
            found = self.standings[peer] = Standing()
            gone = (p for p in self.standings if p not in self.members.workers and p != peer)
            while len(self.standings) > STANDINGS_MAX and (oldest := next(gone, None)):
                self.rates.forget(oldest)
                del self.standings[oldest]
                gone = (p for p in self.standings if p not in self.members.workers and p != peer)
        return found

    def forward_verdict(self, worker: Worker, now: float) -> Verdict:
        """May others be told to get chunks from this worker?"""
        if not self.has_relay(worker):
            return Verdict(ok=False, reason="it has no relay")
        if worker.suspect or worker.state is WorkerState.DRAINING:
            return Verdict(ok=False, reason=f"it is {worker.state_name}")
        return self.standing(worker.peer).forward_verdict(now)

    def up_mbit(self, worker: Worker) -> float | None:
        """The uplink as measured, at most its cap; the cap where nothing was measured; None
        where neither is known."""
        return _capped(self.rates.host(worker.peer).up.mbit, worker.uplink_mbit)

    def down_mbit(self, worker: Worker) -> float | None:
        """The downlink, likewise."""
        return _capped(self.rates.host(worker.peer).down.mbit, worker.downlink_mbit)

    @property
    def origin_mbit(self) -> float | None:
        return _capped(self.rates.host(ORIGIN).up.mbit, self.settings.origin_uplink_mbit)

    # ------------------------------------------------------------------------ lists

    def renew_list(self) -> None:
        """The list is everybody with a relay, in the order of their coming, and "" for the
        address of those who only dial. All in a list that changed have yet to be told."""
        if not self.changed:
            return
        self.changed = False
        workers = [w for w in self.members.workers.values() if self.has_relay(w)]
        listed = {}
        for worker in workers[:RELAY_PEERS_MAX]:
            endpoint = worker.relay_endpoint if self.standing(worker.peer).accepts else ""
            listed[str(worker.peer)] = RelayPeer(worker.peer, endpoint, worker.relay_key)
        if listed != self.listed:
            self.listed = listed
            self.stale = {PeerId(name) for name in listed}

    def take_list(self, peer: PeerId) -> RelayPeers | None:
        """The list, if this worker has not been told of it; it counts as told then."""
        self.renew_list()
        if peer not in self.stale:
            return None
        self.stale.discard(peer)
        if peer not in self.listed:
            return None
        return RelayPeers(peers=tuple(self.listed.values()))

    # ------------------------------------------------------------------------ plans

    @property
    def planned_version(self) -> Version | None:
        return self._planned.version if self._planned is not None else None

    def plan_verdict(self, now: float) -> Verdict:
        """May a version be planned now? Not while most of those with an address came a moment
        ago, and nobody knows yet who of them is reached: that plan would be a star."""
        standings = [
            self.standing(worker.peer)
            for worker in self.members.workers.values()
            if self.has_relay(worker)
        ]
        addresses = sum(bool(standing.endpoint) for standing in standings)
        awaited = sum(standing.is_awaited(now) for standing in standings)
        if 2 * awaited > addresses:
            return Verdict(ok=False, reason=f"{awaited} of {addresses} relays are being probed")
        return ALLOWED

    def plan(
        self, published: VersionPublished, peers: Sequence[PeerId], now: float
    ) -> RelayPlan | None:
        """Plan for everybody who is told of a version; the parts of the version before are
        forgotten. None when there are no two relays: then all of it comes from the origin."""
        num_chunks = -(-published.num_bytes // CHUNK_MAX_BYTES)
        digest = published.manifest_digest
        self._planned = _Planned(published.version, digest, num_chunks, {}, {})
        self.renew_list()
        workers = [self.members.workers[peer] for peer in peers if peer in self.members.workers]
        relays = [worker for worker in workers if worker.peer in self.listed]
        num_star = len(workers) - len(relays)
        if len(relays) < 2 or num_chunks < 1:
            return None
        if len(relays) > PLANNED_WORKERS_MAX:
            relays.sort(key=lambda worker: self._host(worker, now).up, reverse=True)
            relays.sort(key=lambda worker: not self.standing(worker.peer).accepts)
            del relays[PLANNED_WORKERS_MAX:]
        hosts = [self._host(worker, now) for worker in relays]
        plan = plan_relays(
            self._origin(hosts, num_star=num_star),
            hosts,
            num_bytes=published.num_bytes,
            chunk_bytes=CHUNK_MAX_BYTES,
        )
        accepting = {host.name for host in hosts if host.accepts}
        self._planned.shares = shares = planned_shares(plan)
        mbit = published.num_bytes * 8 / 1e6 / plan.predicted_s
        spare = {host.name: host.up / mbit - shares.get(host.name, 0.0) for host in hosts}
        self._planned.parts = planned_parts(plan, accepting, num_chunks, spare=spare)
        return plan

    def part(self, version: Version, peer: PeerId, now: float) -> RelayPart:
        """What the worker is told of its part in this version: the same each time, but for
        those who left. One that the plan did not know gets its chunks from up to three workers
        that accept connections and serve the version or, if there is none, fetch it: those
        whose uplinks have least to do for it."""
        planned, worker = self._planned, self.members.get(peer)
        if planned is None or planned.version != version or worker is None:
            return RelayPart()
        self.renew_list()
        if peer not in self.listed:  # it may have turned its relay off
            return RelayPart()
        part = planned.parts.get(peer)
        if part is None:
            sources = self._joiner_sources(planned, worker, now)
            part = joiner_part(sources, planned.num_chunks)
            if part.stripes:
                planned.parts[peer] = part
                for name in sources:
                    shares = planned.shares
                    shares[name] = shares.get(name, 0.0) + 1.0 / len(sources)
        return part.among(self.listed)

    def leave(self, peer: PeerId) -> None:
        """The worker is gone. What others were told to get from it they get elsewhere."""
        self.rates.left(peer)
        self.stale.discard(peer)
        self.changed = True
        if peer in self.standings:
            self.standings[peer].leave()
        if self._planned is not None:
            self._planned.parts.pop(peer, None)

    def _suppliers(self, sender: Name, receiver: Name, digest: Digest) -> set[Name] | None:
        planned = self._planned
        if planned is None or planned.digest != digest:
            return None
        one, other = planned.parts.get(PeerId(sender)), planned.parts.get(PeerId(receiver))
        return suppliers(one, other, sender) if one and other else None

    def _told_down_mbit(self, name: Name) -> float | None:
        worker = self.members.get(PeerId(name))
        return None if worker is None else worker.downlink_mbit or None

    def _joiner_sources(self, planned: _Planned, joiner: Worker, now: float) -> list[PeerId]:
        # Whoever was never named as a source has no share, and no followers.
        named = joiner.peer in planned.shares
        behind = followers(planned.parts, joiner.peer) if named else set()
        able = [
            worker
            for worker in self.members.workers.values()
            if worker is not joiner
            and worker.peer in self.listed
            and self.standing(worker.peer).accepts
            and self.forward_verdict(worker, now)
            and worker.peer not in behind
        ]
        serving = [worker for worker in able if worker.installed == planned.version]
        fetching = [worker for worker in able if worker.announced == planned.version]

        def busy_s(worker: Worker) -> tuple[float, float, str]:
            mbit = self.up_mbit(worker)
            mbit = DEFAULT_UP_MBIT if mbit is None else mbit
            return planned.shares.get(worker.peer, 0.0) / mbit, -mbit, worker.peer

        found = sorted(serving or fetching, key=busy_s)
        return [worker.peer for worker in found[:JOINER_SOURCES_MAX]]

    def _host(self, worker: Worker, now: float) -> Host:
        standing = self.standing(worker.peer)
        forwards = self.forward_verdict(worker, now)
        return Host(
            worker.peer,
            up_mbit=self.up_mbit(worker) if forwards else 0.0,
            down_mbit=self.down_mbit(worker),
            rtt_s=standing.rtt_s,
            accepts=standing.accepts,
        )

    def _origin(self, hosts: Sequence[Host], *, num_star: int) -> Host:
        mbit = self.origin_mbit
        if num_star:
            mbit = rate_beside_a_star(
                DEFAULT_UP_MBIT if mbit is None else mbit,
                [host.up for host in hosts],
                [host.down for host in hosts],
                num_star=num_star,
            )
        return Host(ORIGIN, up_mbit=mbit, down_mbit=DEFAULT_DOWN_MBIT, rtt_s=0.0, accepts=True)


def _capped(mbit: float | None, cap_mbit: float) -> float | None:
    if not cap_mbit:
        return mbit
    return cap_mbit if mbit is None else min(mbit, cap_mbit)
