"""Relays at the coordinator: who is told of whom, what is planned, whom it stops trusting."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from core_builders import Scene, a_digest, a_version, a_worker_hello, emitted, sent
from relay_builders import (
    CHUNKS,
    VERSION_BYTES,
    a_fleet,
    a_key,
    a_link,
    a_report,
    an_endpoint,
    is_probed,
    probes,
    publishes,
    relay_joins,
)

from echo2.core.effects import Effect, Send
from echo2.core.events import Received
from echo2.core.relays import PLANNED_WORKERS_MAX
from echo2.core.status import status
from echo2.messages import Refused, RelayPeers, RelayReport, VersionAnnounced
from echo2.types import DeltaOffer, LinkReport, PeerId

V0, V1 = a_version(0), a_version(1)


def relay_of(scene: Scene, name: str) -> dict[str, Any]:
    workers = status(scene.state, "")["workers"]
    found: dict[str, Any] = next(w["relay"] for w in workers if w["name"] == name)
    return found


def announced(effects: list[Effect]) -> dict[str, VersionAnnounced]:
    return {
        e.peer: e.message
        for e in effects
        if isinstance(e, Send) and isinstance(e.message, VersionAnnounced)
    }


def forwarders(found: dict[str, VersionAnnounced]) -> set[str]:
    return {name for m in found.values() for stripe in m.stripes for name in stripe.sources}


# ------------------------------------------------------------------------ hellos and probes


def test_a_relay_is_probed_and_counts_as_dial_only_until_the_answer() -> None:
    scene = Scene(host="0.0.0.0")
    effects = scene.worker_joins("a", relay_key=a_key("a"), relay_endpoint=an_endpoint("a"))
    assert probes(effects) == [("a", an_endpoint("a"))]
    assert (relay_of(scene, "a")["accepts"], relay_of(scene, "a")["reason"]) == (
        False,
        "not probed yet",
    )
    (event,) = emitted(is_probed(scene, "a"), "relay_probed")
    assert event == {
        "worker": "a", "endpoint": an_endpoint("a"), "ok": True, "rtt_s": 0.02, "reason": "",
    }  # fmt: skip
    assert relay_of(scene, "a")["accepts"]


def test_a_probe_is_told_in_the_records_on_change_only() -> None:
    scene = a_fleet("a")
    assert emitted(is_probed(scene, "a", ok=True), "relay_probed") == []
    (event,) = emitted(is_probed(scene, "a", ok=False), "relay_probed")
    assert (event["ok"], event["rtt_s"], event["reason"]) == (False, None, "it was not reached")


def test_an_answer_for_an_old_address_says_nothing() -> None:
    scene = a_fleet("a", dials=["a"])
    assert is_probed(scene, "a", "tcp://10.0.0.9:1") == []
    assert not relay_of(scene, "a")["accepts"]
    assert is_probed(scene, "nobody") == []


def test_a_relay_that_stays_reached_is_not_probed_at_the_next_hello_but_a_new_address_is() -> None:
    scene = a_fleet("a")
    again = {"relay_key": a_key("a"), "relay_endpoint": an_endpoint("a")}
    assert probes(scene.worker_joins("a", **again)) == []
    moved = {**again, "relay_endpoint": "tcp://10.9.9.9:7000"}
    assert probes(scene.worker_joins("a", **moved)) == [("a", "tcp://10.9.9.9:7000")]
    assert not relay_of(scene, "a")["accepts"]


def test_a_probe_that_fails_is_repeated_ever_more_rarely() -> None:
    scene = a_fleet("a", dials=["a"])
    times = []
    for _ in range(400):
        for _peer, endpoint in probes(scene.tick(after=1.0)):
            times.append(scene.now)
            is_probed(scene, "a", endpoint, ok=False)
        scene.beats("a")
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert 5 <= len(times) <= 9
    assert waits == sorted(waits)


def test_a_key_of_a_worker_that_is_here_is_refused_to_others() -> None:
    scene = a_fleet("a")
    (refused,) = sent(scene.worker_joins("b", relay_key=a_key("a")), Refused)
    assert (refused.reason, refused.fatal) == ("relay_key", True)
    assert "is that of worker a" in refused.text
    assert scene.worker_joins("a", relay_key=a_key("a"))
    scene.passes(20.0)
    assert sent(scene.worker_joins("b", relay_key=a_key("a")), Refused) == []


def test_a_relay_with_another_key_than_its_worker_came_with_is_refused() -> None:
    scene = a_fleet("a")
    hello = a_worker_hello(name="b", relay_key=a_key("c"), relay_endpoint=an_endpoint("b"))
    (refused,) = sent(scene.handle(Received(PeerId("b"), hello, key=a_key("b"))), Refused)
    assert (refused.reason, refused.fatal) == ("relay_key", True)
    assert "came with the key bbbbbbbb... and names cccccccc..." in refused.text
    assert scene.state.members.get(PeerId("b")) is None
    assert sent(scene.handle(Received(PeerId("b"), hello, key=a_key("c"))), Refused) == []
    without = a_worker_hello(name="d")
    assert sent(scene.handle(Received(PeerId("d"), without, key=a_key("d"))), Refused) == []


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://0.0.0.0:7000", "tcp://[::]:7000", "tcp://[::ffff:0.0.0.0]:7000", "tcp://0:7000",
     "tcp://224.0.0.1:7000", "tcp://10.0.0.1:0", "tcp://10.0.0.1:70000"],
)  # fmt: skip
def test_an_address_that_nobody_can_connect_to_is_refused(endpoint: str) -> None:
    scene = Scene()
    effects = scene.worker_joins("a", relay_key=a_key("a"), relay_endpoint=endpoint)
    (refused,) = sent(effects, Refused)
    assert refused.reason == "relay_endpoint"
    assert endpoint in refused.text
    assert scene.state.members.workers == {}


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_loopback_is_an_address_only_where_the_coordinator_listens_there_too(host: str) -> None:
    hello = {"relay_key": a_key("a"), "relay_endpoint": f"tcp://{host}:7000"}
    assert probes(Scene(host="127.0.0.1").worker_joins("a", **hello))
    away = Scene(host="192.168.1.2")
    assert probes(away.worker_joins("a", **hello)) == []
    assert "its own machine alone" in relay_of(away, "a")["reason"]
    assert relay_of(away, "a")["forwards"]


# ------------------------------------------------------------------------------------ lists


def test_a_fleet_that_joins_at_once_is_told_in_few_lists() -> None:
    scene = a_fleet()
    scene.worker_joins("off")
    lists = []
    for index in range(6):
        relay_joins(scene, f"w{index}")
        lists += sent(scene.tick(after=0.1), RelayPeers, to="w0")
    lists += sent(scene.tick(after=0.5), RelayPeers, to="w0")
    assert [len(message.peers) for message in lists] == [1, 6]
    assert {peer.endpoint for peer in lists[-1].peers} == {an_endpoint(f"w{i}") for i in range(6)}
    assert sent(scene.tick(after=1.0), RelayPeers) == []


def test_lists_go_to_all_who_have_a_relay_and_hold_no_address_of_those_who_only_dial() -> None:
    scene = a_fleet("a", "b", dials=["b"])
    scene.worker_joins("off")
    relay_joins(scene, "c", accepts=None)
    effects = scene.tick(after=1.0)
    told = {e.peer for e in effects if isinstance(e, Send) and isinstance(e.message, RelayPeers)}
    assert told == {"a", "b", "c"}
    (message,) = sent(effects, RelayPeers, to="a")
    assert {peer.name: peer.endpoint for peer in message.peers} == {
        "a": an_endpoint("a"), "b": "", "c": "",
    }  # fmt: skip
    assert {peer.name: peer.key for peer in message.peers}["b"] == a_key("b")


def test_who_leaves_is_taken_off_the_list() -> None:
    scene = a_fleet("a", "b")
    scene.passes(20.0, alive=["a"])
    assert list(scene.state.relays.listed) == ["a"]


def test_without_curve_an_address_is_what_makes_a_relay() -> None:
    scene = Scene(host="0.0.0.0", curve=False)
    scene.worker_joins("a", relay_endpoint=an_endpoint("a"))
    scene.worker_joins("b")
    (message,) = sent(scene.tick(after=1.0), RelayPeers)
    assert [peer.name for peer in message.peers] == ["a"]


# ------------------------------------------------------------------------------------ plans


def test_a_publication_gives_every_worker_its_stripes_of_the_same_trees() -> None:
    uplinks = dict(zip("abcdefgh", [20.0, 50.0, 100.0, 200.0] * 2, strict=True))
    scene = a_fleet(*uplinks, uplinks=uplinks, origin_uplink_mbit=300.0)
    effects = publishes(scene)
    found = announced(effects)
    assert set(found) == set(uplinks)
    (planned,) = emitted(effects, "dissemination_planned")
    ways = {n: [stripe.sources for stripe in m.stripes] for n, m in found.items()}
    sizes = max(([s.num_chunks for s in m.stripes] for m in found.values()), key=len)
    assert planned["trees"] == len(sizes) > 1
    assert sum(sizes) == CHUNKS
    assert planned["predicted_s"] >= planned["bound_s"] > 0
    assert "predicted" in planned["reason"]
    for name, message in found.items():
        assert [stripe.num_chunks for stripe in message.stripes] in (sizes, [])
        assert message.planned_s == planned["predicted_s"]
        for k, way in enumerate(ways[name]):
            # The way up of my parent is the rest of mine; no stripes: all from the origin.
            assert name not in way
            assert not way or (ways[way[0]] or [()] * len(sizes))[k] == way[1:]


def a_fleet_that_just_came(*names: str, known: tuple[str, ...] = ()) -> Scene:
    """Of those that are not `known` no probe has ended."""
    scene = a_fleet(*known)
    for name in names:
        relay_joins(scene, name, accepts=None)
    return scene


def test_a_version_waits_for_the_first_probes_of_a_fleet_that_just_came() -> None:
    scene = a_fleet_that_just_came("a", "b", "c", "d")
    published_at = scene.now
    assert announced(publishes(scene)) == {}
    is_probed(scene, "a")
    assert announced(scene.tick(after=0.1)) == {}  # three of four are still being probed
    is_probed(scene, "b")
    effects = scene.tick(after=0.1)
    assert set(announced(effects)) == {"a", "b", "c", "d"}
    assert forwarders(announced(effects))
    assert emitted(effects, "dissemination_planned")
    assert announced(scene.tick(after=0.1)) == {}
    found = scene.state.broadcasts.broadcasts[V0]
    assert (found.published_at, found.num_workers) == (published_at, 4)


def test_without_an_answer_a_version_is_planned_two_seconds_later() -> None:
    scene = a_fleet_that_just_came("a", "b")
    assert announced(publishes(scene)) == {}
    assert announced(scene.tick(after=1.9)) == {}
    found = announced(scene.tick(after=0.2))
    assert set(found) == {"a", "b"}
    assert not forwarders(found)


def test_a_fleet_that_comes_again_and_again_does_not_hold_a_version_back_for_ever() -> None:
    scene = a_fleet_that_just_came("a", "b")
    assert announced(publishes(scene)) == {}
    told: dict[str, VersionAnnounced] = {}
    for _ in range(3):
        told |= announced(scene.tick(after=1.0))
        for name in "ab":
            is_probed(scene, name, ok=False)
            relay_joins(scene, name, accepts=None)
    assert set(told) == {"a", "b"}


def test_a_few_newcomers_delay_no_version_and_get_a_part_of_it() -> None:
    scene = a_fleet_that_just_came("d", known=("a", "b", "c"))
    assert set(announced(publishes(scene))) == {"a", "b", "c", "d"}


def test_who_comes_while_a_version_waits_is_told_with_the_others() -> None:
    scene = a_fleet_that_just_came("a", "b")
    publishes(scene)
    relay_joins(scene, "c", accepts=None)
    for name in "abc":
        is_probed(scene, name)
    assert set(announced(scene.tick(after=0.1))) == {"a", "b", "c"}


def test_what_a_worker_tells_of_its_downlink_stands_for_it_and_saves_connections() -> None:
    lines = dict.fromkeys("abcdefgh", 100.0)
    told = a_fleet(*lines, uplinks=lines, downlinks=lines, origin_uplink_mbit=300.0)
    (chains,) = emitted(publishes(told), "dissemination_planned")
    assert (chains["trees"], chains["connections"]) == (1, 8)
    assert chains["predicted_s"] < 1.05 * chains["bound_s"]
    assert relay_of(told, "a")["down_mbit"] == 100.0
    untold = a_fleet(*lines, uplinks=lines, origin_uplink_mbit=300.0)
    (trees,) = emitted(publishes(untold), "dissemination_planned")
    assert trees["connections"] > 8
    assert "200 down Mbit/s assumed" in trees["reason"]


def test_an_announcement_that_is_repeated_names_the_same_part() -> None:
    scene = a_fleet("a", "b", "c")
    first = announced(publishes(scene))
    relay_joins(scene, "d")
    again: list[Effect] = []
    for _ in range(40):
        for name in "abcd":
            scene.beats(name)
        again += scene.tick(after=1.0)
    assert {n: m for n, m in announced(again).items() if n != "d"} == first
    assert emitted(again, "dissemination_planned") == []


def test_whoever_a_part_names_is_in_the_list_that_its_worker_had_before() -> None:
    scene = a_fleet("a", "b")
    relay_joins(scene, "c")  # nobody was told of it yet
    listed: dict[str, set[str]] = {}
    for effect in publishes(scene):
        if isinstance(effect, Send) and isinstance(effect.message, RelayPeers):
            listed[effect.peer] = {peer.name for peer in effect.message.peers}
        if isinstance(effect, Send) and isinstance(effect.message, VersionAnnounced):
            assert {n for s in effect.message.stripes for n in s.sources} <= listed.get(
                effect.peer, set()
            )
    assert listed


@pytest.mark.parametrize("names", [(), ("a",)])
def test_without_two_relays_everything_comes_from_the_origin(names: tuple[str, ...]) -> None:
    scene = a_fleet(*names)
    scene.worker_joins("off")
    scene.worker_joins("also-off")
    effects = publishes(scene)
    assert emitted(effects, "dissemination_planned") == []
    assert all(m.stripes == () and m.serves == () for m in announced(effects).values())
    assert len(announced(effects)) == len(names) + 2


def test_a_worker_without_a_relay_is_no_source_and_its_share_of_the_origin_is_kept() -> None:
    uplinks = {"a": 100.0, "b": 100.0}
    alone = publishes(a_fleet(*uplinks, uplinks=uplinks, origin_uplink_mbit=100.0))
    scene = a_fleet(*uplinks, uplinks=uplinks, origin_uplink_mbit=100.0)
    scene.worker_joins("off")
    effects = publishes(scene)
    assert announced(effects)["off"].stripes == ()
    assert "off" not in forwarders(announced(effects))
    (with_it,) = emitted(effects, "dissemination_planned")
    (without,) = emitted(alone, "dissemination_planned")
    assert with_it["bound_s"] == pytest.approx(2 * without["bound_s"])


def test_who_only_dials_is_told_whom_it_has_to_dial() -> None:
    scene = a_fleet("a", "b", "c", dials=["c"], uplinks={"a": 1.0, "b": 1.0, "c": 900.0})
    found = announced(publishes(scene))
    below_c = {n for n, m in found.items() for s in m.stripes if s.sources[:1] == ("c",)}
    assert below_c
    assert set(found["c"].serves) == below_c
    assert found["a"].serves == found["b"].serves == ()


def test_a_version_without_bytes_and_a_worker_named_origin_are_no_trouble() -> None:
    scene = a_fleet("a", "b", "origin")
    assert announced(publishes(scene, num_bytes=0))["a"].stripes == ()
    assert forwarders(announced(publishes(scene, 1))) <= {"a", "b"} != set()
    assert relay_of(scene, "origin") is None


def test_a_fleet_beyond_one_plan_joins_behind_it() -> None:
    names = [f"w{i}" for i in range(PLANNED_WORKERS_MAX + 3)]
    scene = a_fleet(*names)
    found = announced(publishes(scene))
    planned = [name for name, message in found.items() if message.planned_s]
    behind = [message for name, message in found.items() if name not in planned]
    assert len(planned) == PLANNED_WORKERS_MAX
    assert len(behind) == 3
    assert all(len(message.stripes) == 3 for message in behind)


# ------------------------------------------------------------------------------ late joiners


def test_a_late_joiner_gets_equal_stripes_from_the_least_used_that_serve_the_version() -> None:
    scene = a_fleet("a", "b", "c", "d", "e", dials=["e"])
    publishes(scene)
    for name in "abcde":
        scene.installs(name, V0)
    scene.worker_joins("late", relay_key=a_key("late"), relay_endpoint=an_endpoint("late"))
    scene.worker_joins("more", relay_key=a_key("more"), relay_endpoint=an_endpoint("more"))
    parts = {name: scene.state.relays.part(V0, name, scene.now) for name in ("late", "more")}
    for part in parts.values():
        assert [stripe.num_chunks for stripe in part.stripes] == [80, 80, 80]
        firsts = [stripe.sources[0] for stripe in part.stripes]
        assert len(set(firsts)) == 3
        assert all(set(stripe.sources) == set(firsts) for stripe in part.stripes)
        assert part.serves == ()
    assert "e" not in parts["late"].sources | parts["more"].sources  # it could not be dialed
    assert parts["late"].sources | parts["more"].sources == {"a", "b", "c", "d"}


def test_a_worker_that_comes_back_goes_on_from_what_is_on_its_disk() -> None:
    scene = a_fleet("a")
    publishes(scene)
    scene.installs("a", V0)
    deltas = [f"{step:063x}d" for step in (1, 2)]
    for step, delta in enumerate(deltas, start=1):
        offer = DeltaOffer(a_digest(a_version(step - 1)), delta, 1000)
        scene.state.step = step
        scene.publishes(step, num_bytes=VERSION_BYTES, deltas=(offer,))
    ways = {
        "of_run": ("f" * 64, a_digest(V0)),
        "of_another": ("f" * 64,),
        "newest": (a_digest(a_version(1)), a_digest(V0)),
    }
    found = {name: announced(scene.worker_joins(name, stored=ways[name]))[name] for name in ways}
    assert found["of_run"].path == tuple(deltas)
    assert found["of_run"].num_bytes == 1000
    assert found["of_another"].path == ()
    assert found["of_another"].num_bytes == VERSION_BYTES
    assert found["newest"].path == (deltas[1],)


def test_who_installs_an_older_version_is_told_at_once_of_the_deltas_that_lead_on() -> None:
    scene = a_fleet("a")
    publishes(scene)
    scene.installs("a", V0)
    assert announced(scene.worker_joins("late"))["late"].path == ()
    delta = f"{1:063x}d"
    offer = DeltaOffer(a_digest(V0), delta, 1000)
    scene.state.step = 1
    told = announced(scene.publishes(1, num_bytes=VERSION_BYTES, deltas=(offer,)))
    assert {name: message.path for name, message in told.items()} == {"a": (delta,), "late": ()}
    again = announced(scene.installs("late", V0))
    assert {name: message.path for name, message in again.items()} == {"late": (delta,)}
    assert announced(scene.installs("late", a_version(1))) == {}


def test_while_nobody_serves_the_version_a_late_joiner_follows_those_who_fetch_it() -> None:
    scene = a_fleet("a", "b")
    publishes(scene)
    effects = scene.worker_joins("late", relay_key=a_key("l"), relay_endpoint=an_endpoint("l"))
    assert forwarders(announced(effects)) == {"a", "b"}
    listed = sent(effects, RelayPeers, to="late")
    assert {peer.name for peer in listed[0].peers} == {"a", "b", "late"}


def test_two_who_joined_late_never_wait_for_each_other() -> None:
    scene = a_fleet("a", "b")
    publishes(scene)
    for name in ("late", "later"):
        relay_joins(scene, name)
    scene.state.relays.standings["a"].silent = scene.state.relays.standings["b"].silent = True
    relay_joins(scene, "last")
    assert scene.state.relays.part(V0, "last", scene.now).sources == {"late", "later"}
    scene.passes(20.0, alive=["a", "b", "later", "last"])
    relay_joins(scene, "late")  # it comes back, while the others still follow it
    assert scene.state.relays.part(V0, "late", scene.now).sources == set()
    scene.state.relays.standings["a"].silent = False
    assert scene.state.relays.part(V0, "late", scene.now).sources == {"a"}


# ---------------------------------------------------------------------------------- reports


def test_wrong_reports_change_nothing() -> None:
    scene = a_fleet("a", "b")
    with scene.refuses("unknown_peer", "say hello first"):
        scene.receive("x", a_report())
    with scene.refuses("wrong_report", "misses 9 of 8 chunks"):
        scene.receive("a", a_report(missing=9, chunks=8))
    with scene.refuses("unknown_relay", "a link to x, which is no worker"):
        scene.receive("a", a_report(a_link("x")))
    with scene.refuses("wrong_report", "links to itself"):
        scene.receive("a", a_report(a_link("a")))
    with scene.refuses("wrong_report", "links to one peer twice"):
        scene.receive("a", a_report(a_link("b"), a_link("b")))


def test_the_status_shows_links_and_what_is_missing() -> None:
    scene = a_fleet("a", "b")
    scene.receive("a", a_report(a_link("origin", mbit=80), a_link("b", mbit=20), missing=60))
    shown = status(scene.state, "")
    links = [(link["from"], link["to"], link["mbit"]) for link in shown["links"]]
    assert links == [("origin", "a", 80.0), ("b", "a", 20.0)]
    (fetch,) = [w["fetch"] for w in shown["workers"] if w["name"] == "a"]
    assert (fetch["missing"], fetch["chunks"]) == (60, CHUNKS)


def test_more_reports_than_a_few_a_second_are_ignored_and_counted() -> None:
    scene = a_fleet("a")
    for missing in range(100, 0, -1):
        assert scene.receive("a", a_report(missing=missing)) == []
    ignored = relay_of(scene, "a")["reports_ignored"]
    assert 80 < ignored < 100
    assert scene.state.relays.rates.hosts["a"].fetch.num_missing == 1 + ignored
    scene.now += 1.0
    scene.receive("a", a_report(missing=0))
    assert scene.state.relays.rates.hosts["a"].fetch.num_missing == 0


def test_what_was_measured_is_what_the_next_plan_counts_on_up_to_the_caps() -> None:
    scene = a_fleet("a", "b", uplinks={"b": 30.0}, origin_uplink_mbit=400.0)
    publishes(scene)
    for name in "ab":
        scene.receive(name, a_report(a_link("origin", mbit=150.0), missing=1))
    assert relay_of(scene, "b")["up_mbit"] == 30.0
    assert status(scene.state, "")["origin_mbit"] == 300.0
    assert scene.state.relays.rates.hosts["a"].down.mbit is None  # it was not what was slow


def test_what_a_delta_took_is_measured_like_a_version() -> None:
    scene = a_fleet("a", "b")
    publishes(scene)
    for name in "ab":
        scene.installs(name, V0)
    delta = a_digest(a_version(9))
    scene.state.step = 1
    offer = DeltaOffer(a_digest(V0), delta, VERSION_BYTES // 10)
    found = announced(scene.publishes(1, num_bytes=VERSION_BYTES, deltas=(offer,)))
    assert {message.path for message in found.values()} == {(delta,)}
    (below,) = [name for name, m in found.items() if m.stripes]
    above = {"a": "b", "b": "a"}[below]

    def reports(name: str, link: LinkReport, *, missing: int) -> None:
        scene.receive(
            name,
            RelayReport(
                manifest_digest=delta, num_chunks=CHUNKS // 10, num_missing=missing, links=(link,)
            ),
        )

    for seconds in (1.0, 2.0):
        scene.now += 1.0
        reports(above, a_link("origin", mbit=40.0, seconds=seconds), missing=1)
    scene.installs(above, a_version(1))  # its last report was lost
    fetch = scene.state.relays.rates.host(above).fetch
    assert fetch is not None
    assert fetch.done_at == scene.now
    scene.now += 4.0
    reports(below, a_link(above, mbit=12.0, seconds=4.0), missing=0)
    assert relay_of(scene, above)["up_mbit"] == 12.0


def test_the_plan_says_whether_a_relay_had_what_it_owed() -> None:
    scene = a_fleet("a", "b")
    (below,) = [name for name, m in announced(publishes(scene)).items() if m.stripes]
    above = {"a": "b", "b": "a"}[below]
    for _ in range(2):
        scene.now += 4.0
        scene.receive(above, a_report(a_link("origin", mbit=90.0, seconds=4.0), missing=1))
    scene.now += 3.0
    scene.receive(below, a_report(a_link(above, mbit=20.0)))
    assert relay_of(scene, above)["up_mbit"] == 20.0


# ------------------------------------------------------------------------------------ trust


def test_wrong_chunks_reported_by_two_cost_a_relay_its_trust_for_the_rest_of_the_run() -> None:
    scene = a_fleet("a", "b", "c", uplinks={"a": 900.0, "b": 10.0, "c": 10.0})
    assert "a" in forwarders(announced(publishes(scene)))
    assert scene.receive("b", a_report(a_link("a", faults=1))) == []
    effects = scene.receive("c", a_report(a_link("a", faults=1)))
    (event,) = emitted(effects, "relay_distrusted")
    assert (event["worker"], event["receivers"], event["num_faults"]) == ("a", ["b", "c"], 2)
    assert event["reason"].startswith("it sent wrong chunks to b, c;")
    assert scene.receive("b", a_report(a_link("a", faults=2, seconds=11))) == []
    scene.passes(20.0, alive=["b", "c"])
    relay_joins(scene, "a")  # leaving and coming back mends nothing
    assert "a" not in forwarders(announced(publishes(scene, 1)))
    assert (relay_of(scene, "a")["accepts"], relay_of(scene, "a")["forwards"]) == (True, False)


def test_one_receiver_alone_must_repeat_it() -> None:
    scene = a_fleet("a", "b")
    for faults, distrusted in ((1, 0), (1, 0), (2, 0), (3, 1)):
        scene.now += 1.0
        effects = scene.receive("b", a_report(a_link("a", faults=faults, seconds=scene.now)))
        assert len(emitted(effects, "relay_distrusted")) == distrusted


def test_a_relay_called_silent_is_probed_and_does_not_forward_while_that_fails() -> None:
    uplinks = {"a": 900.0, "b": 10.0, "c": 10.0}
    scene = a_fleet(*uplinks, uplinks=uplinks)
    scene.passes(10.0, alive=uplinks)
    scene.receive("b", a_report(a_link("a", silences=1)))
    assert relay_of(scene, "a")["forwards"]
    assert probes(scene.tick()) == [("a", an_endpoint("a"))]
    is_probed(scene, "a", ok=False)
    assert "it fell silent, and it was not reached" in relay_of(scene, "a")["reason"]
    assert "a" not in forwarders(announced(publishes(scene)))
    for name in "abc":
        scene.beats(name)
    assert probes(scene.tick(after=4.0)) == [("a", an_endpoint("a"))]
    is_probed(scene, "a", ok=True)
    assert "a" in forwarders(announced(publishes(scene, 1)))


def test_calling_a_relay_silent_again_and_again_makes_few_probes() -> None:
    scene = a_fleet("a", "b")
    num_probes = 0
    for count in range(1, 200):
        scene.now += 0.5
        scene.receive("b", a_report(a_link("a", silences=count, seconds=10 + count)))
        scene.beats("a")
        for _ in probes(scene.tick()):
            num_probes += 1
            is_probed(scene, "a", ok=True)
    assert 2 <= num_probes <= 8


def test_one_who_only_dials_rests_for_a_while_after_it_was_silent() -> None:
    scene = a_fleet("a", "b", dials=["a"])
    scene.receive("b", a_report(a_link("a", silences=1)))
    assert "60 s until it may again" in relay_of(scene, "a")["reason"]
    scene.passes(61.0, alive=["a", "b"])
    assert relay_of(scene, "a")["forwards"]


# ------------------------------------------------------------------------------- broadcasts


def test_the_last_installation_tells_how_long_the_version_took() -> None:
    scene = a_fleet("a", "b")
    scene.worker_joins("off")
    (planned,) = emitted(publishes(scene), "dissemination_planned")
    effects = []
    for name in ("a", "b", "off"):
        assert emitted(effects, "version_disseminated") == []
        scene.now += 2.0
        effects = scene.installs(name, V0, install_s=0.5, fetch_s=1.0)
    (event,) = emitted(effects, "version_disseminated")
    assert event == {
        "incarnation": 1, "step": 0, "num_workers": 3, "t50_s": 4.0, "t90_s": 6.0, "t100_s": 6.0,
        "predicted_s": planned["predicted_s"], "bound_s": planned["bound_s"],
    }  # fmt: skip
    (shown,) = status(scene.state, "")["broadcasts"]
    assert (shown["version"], shown["workers"], shown["installed"]) == ("1.0", 3, 3)
    assert (shown["t50_s"], shown["fetch_share"], shown["install_share"]) == (4.0, 0.25, 0.125)


def test_a_worker_that_leaves_is_not_waited_for() -> None:
    scene = a_fleet("a", "b")
    publishes(scene, num_bytes=VERSION_BYTES)
    scene.installs("a", V0)
    events = []
    for _ in range(20):
        scene.beats("a")
        events += emitted(scene.tick(after=1.0), "version_disseminated")
    (event,) = events
    assert (event["num_workers"], event["t100_s"]) == (1, 0.0)
