"""Fleets of relays from a seed: versions are planned as production plans them, and much breaks.

`RelayFleet` holds the origin and the workers and does what a coordinator does for relays: it
plans each version over who is here, tells every worker its part, and gives one that joins late
the sources that have the version. `Trouble` breaks one thing or another at random times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Final

from echo2.core.dissemination import Host, RelayPlan, plan_relays, stripes
from echo2.core.relay_fetch import ORIGIN, Limits
from echo2.core.relay_parts import RelayPart, joiner_part, planned_parts
from echo2.sim.relay_host import RelayHost, Version, now_and_then
from echo2.sim.relay_network import Line, RelayNetwork
from echo2.sim.timeline import Timeline
from echo2.types import PeerId

BYTES_PER_S_OF_MBIT: Final = 125_000.0
TOLD_S: Final = 0.2
"""A worker hears of a version within so long."""


class RelayFleet:
    """`hosts`: the workers, as the plans know them; all are started. `limits` of every fetch.
    `buffer_bytes`: what each link takes before the uplink does."""

    def __init__(
        self,
        origin: Host,
        hosts: Sequence[Host],
        *,
        num_chunks: int,
        chunk_bytes: int,
        limits: Limits | None = None,
        buffer_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        self.rng = Random(seed)
        self.timeline = Timeline()
        self.network = RelayNetwork(self.timeline, self.rng)
        self.hosts = {host.name: host for host in hosts}
        self.relays: dict[str, RelayHost] = {}
        self.newest: Version = -1
        self.plan: RelayPlan | None = None
        self.completed_at: dict[tuple[str, Version], float] = {}
        self.published_at: dict[Version, float] = {}
        self.counters: Counter[str] = Counter()
        self.num_events = 0
        self._origin = origin
        self._num_chunks = num_chunks
        self._chunk_bytes = chunk_bytes
        self._buffer_bytes = buffer_bytes
        self._limits = limits or Limits(window_chunks=16)
        self._stores: dict[str, dict[Version, set[int]]] = {ORIGIN: {}}
        for host in (origin, *hosts):
            self._add_line(host)
        self.start_origin()
        for host in hosts:
            self._start(host.name)

    # ---------------------------------------------------------------------- the fleet

    @property
    def live(self) -> list[str]:
        return [name for name in self.hosts if name in self.relays]

    def start_origin(self) -> None:
        self._start(ORIGIN)

    def join(self, name: str, *, keeps_store: bool = True) -> None:
        """A worker starts, and fetches the newest version."""
        if not keeps_store:
            self._stores.pop(name, None)
        self._start(name)
        if self.newest >= 0:
            having = [
                PeerId(other)
                for other in self.live
                if (other, self.newest) in self.completed_at and self.hosts[other].accepts
            ]
            sources = self.rng.sample(having, min(3, len(having)))
            self._tell(name, self.newest, joiner_part(sources, self._num_chunks))

    def stop(self, name: str, *, quietly: bool = False) -> None:
        relay = self.relays.pop(name)
        relay.fetch = None
        self.counters += relay.counters
        for version in [v for n, v in self.completed_at if n == name]:
            del self.completed_at[name, version]
        self.network.stop(name, quietly=quietly)

    def publish(self) -> Version:
        """A new version, planned for who is here."""
        self.newest += 1
        version = self.newest
        self.published_at[version] = self.timeline.now
        self._stores[ORIGIN][version] = set(range(self._num_chunks))
        hosts = [self.hosts[name] for name in self.live]
        self.plan = plan_relays(
            self._origin,
            hosts,
            num_bytes=self._num_chunks * self._chunk_bytes,
            chunk_bytes=self._chunk_bytes,
        )
        accepting = {host.name for host in hosts if host.accepts}
        parts: Mapping[PeerId, RelayPart] = planned_parts(self.plan, accepting, self._num_chunks)
        for name in self.live:
            part = parts.get(PeerId(name), RelayPart())
            late_s = self.rng.random() * TOLD_S
            self.timeline.after(late_s, self._tell, name, version, part)
        return version

    def settles(self, *, until_s: float, after_s: float = 0.0) -> bool:
        """Play on until everybody has the newest version, later than `after_s`; False when
        that is not by `until_s`."""
        return self.plays(lambda: self.timeline.now > after_s and self.is_settled, until_s)

    def plays(self, stop: Callable[[], bool], until_s: float) -> bool:
        """Play on until `stop()`; False when that is not by `until_s`."""

        def counted() -> bool:
            self.num_events += 1
            return stop()

        return self.timeline.run(until_s=until_s, stop=counted)

    @property
    def is_settled(self) -> bool:
        return all((name, self.newest) in self.completed_at for name in self.live)

    def state(self) -> str:
        """Who lacks what of the newest version, in words."""
        lines = [f"{self.timeline.now:.2f} s, version {self.newest}:"]
        for name in self.live:
            relay = self.relays[name]
            if (name, self.newest) in self.completed_at:
                continue
            lines.append(f"  {name} (version {relay.version})")
            if relay.fetch is None:
                continue
            lines.append(f"    lacks {relay.fetch.num_missing}")
            for source in relay.fetch.sources.values():
                lines.append(
                    f"    {source.name} {'up' if source.up else 'down'}, asked {len(source.asked)}"
                    f", faults {source.num_faults}, failures {source.failures}, rests until "
                    f"{source.rests_until:.1f}"
                )
        return "\n".join(lines)

    def _add_line(self, host: Host) -> None:
        self.network.lines[host.name] = Line(
            host.name,
            up_per_s=host.up * BYTES_PER_S_OF_MBIT,
            down_per_s=host.down * BYTES_PER_S_OF_MBIT,
            delay_s=host.rtt / 2,
            accepts=host.name == ORIGIN or host.accepts,
            buffer_bytes=self._buffer_bytes,
        )

    def _start(self, name: str) -> None:
        relay = RelayHost(
            name,
            self.network,
            self._stores.setdefault(name, {}),
            num_chunks=self._num_chunks,
            chunk_bytes=self._chunk_bytes,
            limits=self._limits,
            on_complete=self._completed,
        )
        self.relays[name] = relay
        self.network.start(name, relay)
        if name != ORIGIN:
            self.network.dial(name, ORIGIN)

    def _tell(self, name: str, version: Version, part: RelayPart) -> None:
        relay = self.relays.get(name)
        if relay is None or version < relay.version or version < self.newest:
            return
        if not part.stripes:
            ways: list[tuple[Sequence[str], list[int]]] = [((), list(range(self._num_chunks)))]
        else:
            of_chunk = stripes(self._num_chunks, [float(s.num_chunks) for s in part.stripes])
            ways = [(stripe.sources, []) for stripe in part.stripes]
            for index, place in enumerate(of_chunk):
                ways[place][1].append(index)
        for child in part.serves:
            self.network.dial(name, child)
        helpers = [stripe.helpers for stripe in part.stripes]
        relay.begin(version, ways, part.planned_s, helpers)

    def _completed(self, relay: RelayHost, version: Version) -> None:
        self.completed_at[relay.name, version] = self.timeline.now


class Trouble:
    """Breaks something every `every_s` seconds on the average, until `until_s`; `num_min`
    workers stay. Everything is whole again a while after that."""

    KINDS = (
        "dies",
        "dies_quietly",
        "most_needed_dies",
        "joins",
        "joins",
        "joins",
        "pauses",
        "is_slow",
        "loses_links",
        "lies",
        "origin_dies",
        "origin_pauses",
        "publishes",
        "publishes",
    )

    def __init__(
        self, fleet: RelayFleet, *, every_s: float, until_s: float, num_min: int = 2
    ) -> None:
        self.fleet = fleet
        self.told: list[str] = []
        self.until_s = until_s
        self._every_s = every_s
        self._num_min = num_min
        self._later()

    def _later(self) -> None:
        delay_s = self.fleet.rng.expovariate(1.0 / self._every_s)
        if self.fleet.timeline.now + delay_s < self.until_s:
            self.fleet.timeline.after(delay_s, self._strike)
        else:
            self.fleet.timeline.at(self.until_s, self._mend)

    def _mend(self) -> None:
        if ORIGIN not in self.fleet.relays:
            self.fleet.start_origin()
        for relay in self.fleet.relays.values():
            relay.is_liar = lambda: False
        self.fleet.publish()
        self._tell("publishes, and all is whole")

    def _strike(self) -> None:
        kind = self.fleet.rng.choice(self.KINDS)
        getattr(self, f"_{kind}")()
        self._later()

    def _tell(self, what: str) -> None:
        self.told.append(f"{self.fleet.timeline.now:9.3f} {what}")

    def _any(self) -> str:
        return self.fleet.rng.choice(self.fleet.live)

    def _dies(self, name: str = "", *, quietly: bool = False) -> None:
        if len(self.fleet.live) <= self._num_min:
            return
        name = name or self._any()
        self.fleet.stop(name, quietly=quietly)
        self._tell(f"{name} dies{' quietly' if quietly else ''}")

    def _dies_quietly(self) -> None:
        self._dies(quietly=True)

    def _most_needed_dies(self) -> None:
        needed = most_needed(self.fleet.plan)
        if needed in self.fleet.relays:
            self._dies(needed)

    def _joins(self) -> None:
        gone = [name for name in self.fleet.hosts if name not in self.fleet.relays]
        if gone:
            name, keeps = self.fleet.rng.choice(gone), self.fleet.rng.random() < 0.5
            self.fleet.join(name, keeps_store=keeps)
            self._tell(f"{name} joins {'with' if keeps else 'without'} its store")

    def _pauses(self, name: str = "") -> None:
        name, seconds = name or self._any(), self.fleet.rng.uniform(0.5, 20.0)
        self.fleet.network.pause(name, seconds)
        self._tell(f"{name} pauses for {seconds:.1f} s")

    def _is_slow(self) -> None:
        name, seconds = self._any(), self.fleet.rng.uniform(1.0, 40.0)
        line = self.fleet.network.lines[name]
        whole = self.fleet.hosts[name].up * BYTES_PER_S_OF_MBIT
        line.up_per_s = whole / 10.0
        self.fleet.timeline.after(seconds, setattr, line, "up_per_s", whole)
        self._tell(f"{name} is slow for {seconds:.1f} s")

    def _loses_links(self) -> None:
        name = self._any()
        lost = [n for n in self.fleet.network.links_of(name) if self.fleet.rng.random() < 0.5]
        for other in lost:
            self.fleet.network.cut(name, other)
        self._tell(f"{name} loses its links to {', '.join(lost)}")

    def _lies(self) -> None:
        name, share = self._any(), self.fleet.rng.choice((0.02, 0.3, 1.0))
        self.fleet.relays[name].is_liar = now_and_then(self.fleet.rng, share)
        self._tell(f"{name} lies, {share}")

    def _origin_dies(self) -> None:
        if ORIGIN in self.fleet.relays:
            seconds = self.fleet.rng.uniform(0.5, 60.0)
            self.fleet.stop(ORIGIN)
            self.fleet.timeline.after(seconds, self._origin_is_back)
            self._tell(f"the origin dies for {seconds:.1f} s")

    def _origin_is_back(self) -> None:
        if ORIGIN not in self.fleet.relays:
            self.fleet.start_origin()
            self._tell("the origin is back")

    def _origin_pauses(self) -> None:
        self._pauses(ORIGIN)

    def _publishes(self) -> None:
        self.fleet.publish()
        self._tell(f"publishes {self.fleet.newest}")


def most_needed(plan: RelayPlan | None) -> str:
    """The worker with the most descendants, over all trees by weight."""
    below: Counter[str] = Counter()
    for tree in plan.trees if plan else ():
        for name in tree.parents:
            above = tree.parents[name]
            while above != ORIGIN:
                below[above] += round(1e6 * tree.weight)
                above = tree.parents[above]
    return max(sorted(below), key=lambda name: below[name], default="")
