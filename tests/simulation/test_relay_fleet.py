"""Fleets of relays on a virtual clock: what breaks costs time, and little of it, and no more.

A seed that fails prints what broke before it, who lacks what, and the command that plays it
again.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from echo2.core.dissemination import Host, RelayPlan
from echo2.core.relay_fetch import ORIGIN, Limits
from echo2.sim.relay_fleet import TOLD_S, RelayFleet, Trouble, most_needed
from echo2.sim.relay_host import now_and_then

CHUNK_BYTES = 256 * 1024
NUM_CHUNKS = 160
LIMITS = Limits(window_chunks=16)
BUFFER_BYTES = 2 << 20
SETTLES_S = 60.0
EVENTS_PER_CHUNK_MAX = 20


def a_worker(place: int, *, up: float = 100.0, down: float = 100.0, accepts: bool = True) -> Host:
    return Host(f"w-{place:02}", up, down, 0.04, accepts=accepts)


def an_origin(up: float = 100.0) -> Host:
    return Host(ORIGIN, up, 1000.0, 0.0, accepts=True)


def a_fleet(
    workers: list[Host],
    *,
    up: float = 100.0,
    num_chunks: int = NUM_CHUNKS,
    buffer_bytes: int = 0,
    seed: int = 0,
) -> RelayFleet:
    return RelayFleet(
        an_origin(up),
        workers,
        num_chunks=num_chunks,
        chunk_bytes=CHUNK_BYTES,
        limits=LIMITS,
        buffer_bytes=buffer_bytes,
        seed=seed,
    )


def a_varied_fleet(seed: int) -> RelayFleet:
    """Of 3 to 9 workers with lines of all kinds; some only dial. Two of three fleets have
    buffers below, as kernels do: what is in them is neither seen nor taken back."""
    buffer_bytes = (0, 1 << 20, 4 << 20)[seed % 3]
    fleet = a_fleet([a_worker(0)], seed=seed)
    rng = fleet.rng
    workers = [
        a_worker(
            place,
            up=rng.choice((20.0, 50.0, 100.0, 400.0)),
            down=rng.choice((100.0, 200.0, 1000.0)),
            accepts=rng.random() < 0.8,
        )
        for place in range(rng.randint(3, 9))
    ]
    up = rng.choice((50.0, 100.0, 300.0))
    return a_fleet(workers, up=up, num_chunks=60, buffer_bytes=buffer_bytes, seed=seed)


def published(fleet: RelayFleet) -> tuple[float, RelayPlan]:
    """Everybody is connected to the origin; then a version comes. When, and its plan."""
    fleet.timeline.at(2.0, fleet.publish)
    assert fleet.plays(lambda: fleet.newest == 0, 3.0)
    assert fleet.plan is not None
    return fleet.timeline.now, fleet.plan


def seconds(fleet: RelayFleet, began: float, *, after_s: float = 0.0) -> float:
    """Until the last live worker has the version."""
    assert fleet.settles(after_s=after_s, until_s=began + SETTLES_S), fleet.state()
    return max(s for (name, _), s in fleet.completed_at.items() if name in fleet.relays) - began


def counted(fleet: RelayFleet) -> Counter[str]:
    return sum((relay.counters for relay in fleet.relays.values()), fleet.counters)


def sent_by_origin(fleet: RelayFleet) -> float:
    """Copies of the version."""
    return fleet.relays[ORIGIN].counters["sent"] / NUM_CHUNKS


WORKERS = {
    "two trees of chains": [a_worker(place) for place in range(8)],
    "one deep chain": [a_worker(place, down=1000.0) for place in range(6)],
    "some only dial": [a_worker(place, down=200.0, accepts=place % 2 == 0) for place in range(8)],
}


@functools.cache
def undisturbed_s(kind: str) -> float:
    fleet = a_fleet(WORKERS[kind])
    return seconds(fleet, published(fleet)[0])


@pytest.mark.parametrize("kind", WORKERS)
def test_when_nothing_breaks_all_goes_as_planned_and_is_sent_once(kind: str) -> None:
    fleet = a_fleet(WORKERS[kind])
    began, plan = published(fleet)
    assert seconds(fleet, began) <= 1.05 * plan.predicted_s + TOLD_S + 0.2
    assert sent_by_origin(fleet) == 1.0
    assert counted(fleet)["asked"] == counted(fleet)["received"] == NUM_CHUNKS * len(fleet.live)


def test_a_fleet_that_has_yet_to_connect_does_not_run_to_the_origin() -> None:
    """Each knows its sources' names when the version comes, and has no connection to them."""
    fleet = a_fleet([a_worker(place, down=1000.0) for place in range(24)])
    began, plan = published(fleet)
    assert seconds(fleet, began) <= 1.05 * plan.predicted_s + TOLD_S + 0.5
    copies = sum(tree.weight * len(tree.children()[ORIGIN]) for tree in plan.trees)
    assert sent_by_origin(fleet) == pytest.approx(copies, abs=1 / NUM_CHUNKS)


@pytest.mark.parametrize("quietly", [False, True])
@pytest.mark.parametrize("share", [0.02, 0.4, 0.8])
@pytest.mark.parametrize("kind", WORKERS)
def test_the_death_of_the_most_needed_relay_costs_little(
    kind: str, share: float, quietly: bool
) -> None:
    fleet = a_fleet(WORKERS[kind])
    began, plan = published(fleet)
    dies_at = began + share * plan.predicted_s
    fleet.timeline.at(dies_at, functools.partial(fleet.stop, most_needed(plan), quietly=quietly))
    assert seconds(fleet, began, after_s=dies_at) <= 1.1 * undisturbed_s(kind) + 3.0
    assert sent_by_origin(fleet) <= 1.6


@pytest.mark.parametrize("kind", WORKERS)
def test_a_relay_whose_uplink_falls_to_a_tenth_is_helped(kind: str) -> None:
    fleet = a_fleet(WORKERS[kind])
    began, plan = published(fleet)
    line = fleet.network.lines[most_needed(plan)]
    slow_at = began + 0.2 * plan.predicted_s
    fleet.timeline.at(slow_at, setattr, line, "up_per_s", line.up_per_s / 10)
    assert seconds(fleet, began, after_s=slow_at) <= 1.1 * undisturbed_s(kind) + 5.0


@pytest.mark.parametrize("kind", WORKERS)
def test_a_slow_relay_is_helped_also_where_much_of_what_it_owes_is_in_its_kernel(kind: str) -> None:
    whole = a_fleet(WORKERS[kind], buffer_bytes=BUFFER_BYTES)
    undisturbed = seconds(whole, published(whole)[0])
    fleet = a_fleet(WORKERS[kind], buffer_bytes=BUFFER_BYTES)
    began, plan = published(fleet)
    line = fleet.network.lines[most_needed(plan)]
    slow_at = began + 0.2 * plan.predicted_s
    fleet.timeline.at(slow_at, setattr, line, "up_per_s", line.up_per_s / 10)
    assert seconds(fleet, began, after_s=slow_at) <= 1.1 * undisturbed + 7.0


def test_a_late_joiner_is_helped_by_its_other_sources_before_the_origin() -> None:
    fleet = a_fleet([a_worker(place, down=1000.0) for place in range(4)])
    began, _ = published(fleet)
    fleet.stop("w-03")
    seconds(fleet, began)
    copies = sent_by_origin(fleet)
    slow = fleet.network.lines["w-00"]
    slow.up_per_s /= 10
    joins_at = fleet.timeline.now
    fleet.join("w-03", keeps_store=False)
    assert fleet.settles(after_s=joins_at, until_s=joins_at + SETTLES_S), fleet.state()
    assert sent_by_origin(fleet) == copies


@pytest.mark.parametrize("share", [0.05, 1.0])
@pytest.mark.parametrize("kind", WORKERS)
def test_a_liar_is_left_out_and_nothing_wrong_counts(kind: str, share: float) -> None:
    fleet = a_fleet(WORKERS[kind])
    began, plan = published(fleet)
    liar = most_needed(plan)
    fleet.relays[liar].is_liar = now_and_then(fleet.rng, share)
    assert seconds(fleet, began) <= 2.1 * plan.predicted_s + 1.0
    receivers = sum(liar in tree.parents.values() for tree in plan.trees) * len(fleet.live)
    assert 0 < counted(fleet)["wrong"] <= receivers * LIMITS.faults_max


@pytest.mark.parametrize("seed", range(25))
def test_whatever_breaks_every_live_worker_has_the_newest_version_in_the_end(seed: int) -> None:
    fleet = a_varied_fleet(seed)
    fleet.network.duplication = 0.02
    fleet.publish()
    every_s, until_s = (60.0, 7200.0) if seed % 5 == 0 else (3.0, 120.0)
    trouble = Trouble(fleet, every_s=every_s, until_s=until_s)
    try:
        assert fleet.settles(after_s=until_s, until_s=until_s + SETTLES_S), fleet.state()
        assert fleet.num_events < EVENTS_PER_CHUNK_MAX * counted(fleet)["received"]
    except AssertionError as error:
        broke = "\n".join(trouble.told[-30:])
        pytest.fail(
            f"{broke}\n{type(error).__name__}: {error}\nagain: pytest 'tests/simulation/"
            "test_relay_fleet.py::test_whatever_breaks_every_live_worker_has_the_newest_version"
            f"_in_the_end[{seed}]'",
            pytrace=False,
        )


def test_the_same_seed_is_the_same_run() -> None:
    runs = []
    for _ in range(2):
        fleet = a_varied_fleet(3)
        fleet.publish()
        trouble = Trouble(fleet, every_s=3.0, until_s=60.0)
        assert fleet.settles(after_s=60.0, until_s=60.0 + SETTLES_S), fleet.state()
        runs.append((trouble.told, fleet.num_events, fleet.completed_at))
    assert runs[0] == runs[1]
