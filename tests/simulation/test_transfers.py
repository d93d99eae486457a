"""Versions on simulated links, against the simulation of relays chunk by chunk."""

from __future__ import annotations

from random import Random

import pytest

from echo2.core.dissemination import Host, plan_relays
from echo2.core.relay_parts import planned_parts
from echo2.core.worker_events import Fetch
from echo2.sim.relay_fleet import RelayFleet
from echo2.sim.timeline import Timeline
from echo2.sim.virtual.transfers import REPAIR_S, Transfers
from echo2.types import PeerId, Stripe, Version

ORIGIN = Host("origin", up_mbit=200.0, down_mbit=200.0, rtt_s=0.0, accepts=True)
CHUNK_BYTES = 256 << 10


def some_hosts(seed: int, count: int) -> list[Host]:
    rng = Random(f"hosts {seed}")
    return [
        Host(
            f"w-{place}",
            up_mbit=rng.choice((50.0, 100.0, 200.0)),
            down_mbit=rng.choice((200.0, 400.0)),
            rtt_s=0.05,
            accepts=rng.random() < 0.8,
        )
        for place in range(count)
    ]


def a_fetch(digest: str, stripes: tuple[Stripe, ...] = (), planned_s: float = 0.0) -> Fetch:
    return Fetch(digest, "tcp://o:1", "", Version(1, 1), stripes=stripes, planned_s=planned_s)


def transferred_s(hosts: list[Host], *, num_chunks: int) -> dict[str, float]:
    """When each has it, with the parts that a coordinator tells."""
    num_bytes = num_chunks * CHUNK_BYTES
    plan = plan_relays(ORIGIN, hosts, num_bytes=num_bytes, chunk_bytes=CHUNK_BYTES)
    accepting = {host.name for host in hosts if host.accepts}
    parts = planned_parts(plan, accepting, num_chunks)
    timeline = Timeline()
    transfers = Transfers(timeline, ORIGIN)
    transfers.hosts |= {host.name: host for host in hosts}
    found: dict[str, float] = {}
    for host in hosts:
        part = parts[PeerId(host.name)]
        transfers.begin(
            PeerId(host.name),
            a_fetch("d", part.stripes, part.planned_s),
            num_bytes,
            lambda seconds, name=host.name: found.update({name: seconds}),  # type: ignore[misc]
        )
    timeline.run(until_s=10_000.0, stop=lambda: len(found) == len(hosts))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_it_takes_as_long_as_relays_take_that_send_chunk_by_chunk(seed: int) -> None:
    hosts = some_hosts(seed, 10)
    found = transferred_s(hosts, num_chunks=256)
    fleet = RelayFleet(ORIGIN, hosts, num_chunks=256, chunk_bytes=CHUNK_BYTES, seed=seed)
    fleet.timeline.at(2.0, fleet.publish)
    assert fleet.settles(until_s=1000.0, after_s=2.0)
    seen = {
        name: at - fleet.published_at[version] for (name, version), at in fleet.completed_at.items()
    }
    assert seen.keys() == found.keys()
    assert max(found.values()) == pytest.approx(max(seen.values()), rel=0.15)


def test_one_that_joins_late_shares_its_sources_and_waits_for_what_they_lack() -> None:
    timeline = Timeline()
    transfers = Transfers(timeline, ORIGIN)
    for name in ("a", "b", "c"):
        transfers.hosts[name] = Host(name, up_mbit=100.0, down_mbit=400.0, rtt_s=0.0, accepts=True)
    found: dict[str, float] = {}

    def begin(name: str, *sources: str) -> None:
        stripes = (Stripe(10, sources),) if sources else ()  # type: ignore[arg-type]
        transfers.begin(
            PeerId(name),
            a_fetch("d", stripes),
            25_000_000,  # 200 Mbit
            lambda _: found.update({name: timeline.now}),
        )

    begin("a")  # alone, from the origin with 200 Mbit/s: 1 s
    timeline.at(0.5, begin, "b", "a")  # over a's uplink of 100 Mbit/s: 2 s
    timeline.at(1.5, begin, "c", "a")  # a's uplink has half of b's left, 100 Mbit: 1 + 2 s
    assert timeline.run(until_s=100.0, stop=lambda: len(found) == 3)
    assert found["a"] == pytest.approx(1.0)
    assert found["b"] == pytest.approx(2.5)
    assert found["c"] == pytest.approx(4.5)


def test_a_source_that_is_lost_costs_everybody_behind_it_a_repair() -> None:
    hosts = [
        Host(f"w-{k}", up_mbit=100.0, down_mbit=400.0, rtt_s=0.0, accepts=True) for k in range(3)
    ]
    found: dict[bool, dict[str, float]] = {}
    for loses in (False, True):
        timeline = Timeline()
        transfers = Transfers(timeline, ORIGIN)
        transfers.hosts |= {host.name: host for host in hosts}
        ways = {"w-0": (), "w-1": ("w-0",), "w-2": ("w-1", "w-0")}
        ended = found[loses] = {}
        for name, sources in ways.items():
            transfers.begin(
                PeerId(name),
                a_fetch("d", (Stripe(10, sources),), 5.0),  # type: ignore[arg-type]
                25_000_000,
                lambda seconds, name=name, ended=ended: ended.update({name: seconds}),  # type: ignore[misc]
            )
        if loses:
            timeline.at(0.5, transfers.lose, PeerId("w-0"))
        timeline.run(until_s=100.0, stop=lambda: False)
    assert found[True].keys() == {"w-1", "w-2"}
    for name in ("w-1", "w-2"):
        assert found[True][name] == pytest.approx(found[False][name] + REPAIR_S)
