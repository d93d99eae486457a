from __future__ import annotations

import pytest

from echo2.core.dissemination import (
    DEFAULT_DOWN_MBIT,
    DEFAULT_RTT_S,
    DEFAULT_UP_MBIT,
    Host,
    edge_rtt_s,
    fluid_bound,
    reach_bound,
)
from echo2.core.dissemination_hosts import can_send

VERSION_BYTES = 64_000_000  # 512 megabits


def a_host(name: str, up: float = 100.0, down: float = 100.0, *, accepts: bool = True) -> Host:
    return Host(name, up, down, 0.01, accepts)


def fleet(num: int, up: float = 100.0, down: float = 100.0, *, accepting: int = 99) -> list[Host]:
    return [a_host(f"w{i}", up, down, accepts=i < accepting) for i in range(num)]


@pytest.mark.parametrize(
    ("origin_up", "up", "down", "seconds", "words"),
    [
        (80.0, 100.0, 400.0, 512 / 80, "the origin's uplink of 80 Mbit/s"),
        (300.0, 400.0, 100.0, 512 / 100, "the downlink of w0, 100 Mbit/s"),
        (300.0, 50.0, 400.0, 8 * 512 / 700, "the uplinks of all, 700 Mbit/s for 8 copies"),
    ],
)
def test_each_term_of_the_fluid_bound_binds_where_it_is_largest(
    origin_up: float, up: float, down: float, seconds: float, words: str
) -> None:
    bound = fluid_bound(a_host("origin", origin_up), fleet(8, up, down), VERSION_BYTES)
    assert bound == (pytest.approx(seconds), words)


def test_the_bound_of_no_workers_is_zero() -> None:
    assert fluid_bound(a_host("origin"), [], 1)[0] == 0.0


def test_dial_only_workers_raise_the_bound_to_what_can_serve_them() -> None:
    origin, workers = a_host("origin", 300.0), fleet(8, accepting=1)
    seconds, words = reach_bound(origin, workers, VERSION_BYTES)
    assert seconds == pytest.approx(7 * 512 / 400)
    assert words == (
        "7 dial-only workers receive from the origin and 1 worker at most, 400 Mbit/s in all"
    )


def test_where_everybody_accepts_the_bound_is_the_fluid_one() -> None:
    origin, workers = a_host("origin", 300.0), fleet(8)
    assert reach_bound(origin, workers, VERSION_BYTES) == fluid_bound(
        origin, workers, VERSION_BYTES
    )


def test_a_worker_with_one_slow_sender_raises_the_bound() -> None:
    workers = [a_host("w0", 20.0), a_host("w1"), a_host("w2")]
    blocked = frozenset({("origin", "w2"), ("w2", "w1")})
    seconds, words = reach_bound(a_host("origin", 300.0), workers, VERSION_BYTES, blocked=blocked)
    assert seconds == pytest.approx(512 / 20)
    assert words == "w2 receives from 1 worker at most, 20 Mbit/s in all"


@pytest.mark.parametrize(
    ("parent_accepts", "child_accepts", "works"),
    [(True, True, True), (True, False, True), (False, True, True), (False, False, False)],
)
def test_two_hosts_connect_if_one_of_them_accepts(
    parent_accepts: bool, child_accepts: bool, works: bool
) -> None:
    parent, child = a_host("p", accepts=parent_accepts), a_host("c", accepts=child_accepts)
    assert can_send(parent, child, is_origin=False, blocked=frozenset()) is works


def test_the_origin_sends_to_whoever_dials() -> None:
    origin, child = a_host("origin", accepts=False), a_host("c", accepts=False)
    assert can_send(origin, child, is_origin=True, blocked=frozenset())


@pytest.mark.parametrize("pair", [("p", "c"), ("c", "p")])
def test_a_blocked_pair_works_in_neither_direction(pair: tuple[str, str]) -> None:
    blocked = frozenset({pair})
    assert not can_send(a_host("p"), a_host("c"), is_origin=False, blocked=blocked)


def test_a_host_without_an_uplink_sends_nothing() -> None:
    assert not can_send(a_host("p", 0.0), a_host("c"), is_origin=False, blocked=frozenset())


def test_what_was_never_measured_has_a_default() -> None:
    host = Host("w0")
    assert (host.up, host.down, host.rtt) == (DEFAULT_UP_MBIT, DEFAULT_DOWN_MBIT, DEFAULT_RTT_S)
    assert not host.measured
    assert a_host("w1").measured


def test_the_round_trip_between_workers_is_the_larger_of_theirs() -> None:
    assert edge_rtt_s(Host("a", rtt_s=0.02), Host("b", rtt_s=0.1)) == 0.1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("up_mbit", -1.0),
        ("down_mbit", 0.0),
        ("rtt_s", float("nan")),
        ("up_mbit", float("inf")),
    ],
)
def test_a_host_with_an_impossible_rate_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{field} of w0 is {value}"):
        Host("w0", **{field: value})


def test_a_host_needs_a_name() -> None:
    with pytest.raises(ValueError, match="needs a name"):
        Host("")
