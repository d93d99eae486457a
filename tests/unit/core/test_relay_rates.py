"""Rates out of reports: what is a measurement, what a lower bound, what is forgotten."""

from __future__ import annotations

import pytest
from core_builders import a_version
from relay_builders import a_link, a_report

from echo2.core.relay_rates import FORGET, ORIGIN, Rate, RelayRates
from echo2.types import Digest, LinkReport, Version

TOLD: dict[str, float] = {"t": 100.0}
"""Downlinks that workers told of."""
V0, V1, V2 = a_version(0), a_version(1), a_version(2)


def a_book(**suppliers: set[str]) -> RelayRates:
    """`suppliers` by sender: from whom the plan has it get what it forwards."""
    return RelayRates(lambda sender, receiver, digest: suppliers.get(sender), TOLD.get)


def reports(
    rates: RelayRates,
    name: str,
    *links: LinkReport,
    now: float = 10.0,
    version: Version = V0,
    missing: int = 0,
    holders: tuple[str, ...] = (),
) -> list[tuple[str, int, int]]:
    report = a_report(*links, version=version, missing=missing)
    return rates.report(name, report, holders=holders, now=now)


def up(rates: RelayRates, name: str) -> float | None:
    return rates.host(name).up.mbit


def down(rates: RelayRates, name: str) -> float | None:
    return rates.host(name).down.mbit


def measured_up(rates: RelayRates, name: str, mbit: float) -> None:
    """An earlier version measured the sender's uplink: it had all, and was what was slow."""
    reports(rates, "z", a_link(name, mbit=mbit), version=a_version(99), holders=(name,))


def test_the_origin_has_all_it_owes_so_its_busy_links_are_its_uplink() -> None:
    rates = a_book()
    reports(rates, "a", a_link(ORIGIN, mbit=10.0), missing=100)
    assert up(rates, ORIGIN) == pytest.approx(10.0)
    reports(rates, "b", a_link(ORIGIN, mbit=15.0), missing=100)
    assert up(rates, ORIGIN) == pytest.approx(25.0)
    assert down(rates, "a") is None  # in doubt it was the sender


def test_a_relay_that_waits_for_its_own_parent_says_nothing_about_its_uplink() -> None:
    rates = a_book()
    measured_up(rates, "a", 100.0)
    reports(rates, "a", a_link(ORIGIN, mbit=20.0))
    reports(rates, "b", a_link("a", mbit=20.0), now=10.1)
    assert up(rates, "a") == pytest.approx(100.0)


def test_a_relay_that_was_done_long_before_its_child_was_what_was_slow() -> None:
    rates = a_book()
    measured_up(rates, "a", 100.0)
    reports(rates, "a", a_link(ORIGIN, mbit=80.0, seconds=5.0), now=5.0)
    for now in (7.0, 8.0, 9.0, 10.0):  # as often as it is told, it counts once
        reports(rates, "b", a_link("a", mbit=20.0, seconds=now), now=now, missing=1)
    assert up(rates, "a") == pytest.approx(100.0 + FORGET * (20.0 - 100.0))
    reports(rates, "c", a_link("a", mbit=20.0), version=V1, holders=("a",), now=30.0)
    assert up(rates, "a") == pytest.approx(40.0)


def test_a_slow_relay_is_not_blamed_for_a_receiver_whose_downlink_is_full() -> None:
    rates = a_book()
    measured_up(rates, "a", 100.0)
    measured_up(rates, "c", 100.0)
    links = a_link("a", mbit=10.0), a_link("c", mbit=10.0)
    reports(rates, "b", *links, version=V0, holders=("a", "c"))
    assert down(rates, "b") == pytest.approx(20.0)  # both had it, and could have sent more
    reports(rates, "b", *links, version=V1, holders=("a", "c"), now=30.0)
    assert up(rates, "a") == pytest.approx(55.0)
    reports(rates, "b", *links, version=V2, holders=("a", "c"), now=50.0)
    assert up(rates, "a") == pytest.approx(55.0)


def test_a_receiver_that_told_of_its_downlink_and_fills_it_shows_nothing_of_the_sender() -> None:
    rates = a_book()
    measured_up(rates, ORIGIN, 300.0)
    reports(rates, "t", a_link(ORIGIN, mbit=95.0))
    assert up(rates, ORIGIN) == pytest.approx(300.0)
    reports(rates, "a", a_link(ORIGIN, mbit=95.0), version=V1, now=30.0)
    assert up(rates, ORIGIN) == pytest.approx(300.0 + FORGET * (95.0 - 300.0))


def test_a_link_that_was_mostly_idle_never_lowers_what_is_known() -> None:
    rates = a_book()
    slow, idle = a_link(ORIGIN, mbit=10.0), a_link("a", mbit=100.0, seconds=1.0)
    reports(rates, "b", slow, idle, holders=("a",))
    assert up(rates, "a") == pytest.approx(100.0)  # it was carried for a second
    idle = a_link("a", mbit=20.0, seconds=1.0)
    reports(rates, "b", slow, idle, version=V1, holders=("a",), now=30.0)
    assert up(rates, "a") == pytest.approx(100.0)


def test_links_one_after_the_other_are_not_taken_for_links_at_once() -> None:
    rates = a_book()
    reports(rates, "a", a_link(ORIGIN, mbit=40.0, seconds=10.0), now=10.0)
    late = a_link(ORIGIN, mbit=40.0, seconds=10.0)
    reports(rates, "b", late, now=19.0)  # it began when the other had a second left
    assert up(rates, ORIGIN) == pytest.approx(800 / 19)


def test_who_did_all_that_was_counted_on_is_counted_with_more_until_it_is_measured() -> None:
    rates = a_book()
    for version, expected in ((V0, 75.0), (V1, 112.5), (V2, 112.5)):
        now = 10.0 + 100 * version.step
        known = up(rates, "a") or 50.0
        mbit = known if version != V2 else 60.0
        reports(rates, "a", a_link(ORIGIN, mbit=mbit), version=version, now=now)
        reports(rates, "b", a_link("a", mbit=mbit), version=version, now=now + 0.1)
        assert up(rates, "a") == pytest.approx(expected)
    measured = a_version(5)
    reports(rates, "b", a_link("a", mbit=100.0), version=measured, holders=("a",), now=500.0)
    assert up(rates, "a") == pytest.approx(106.25)
    reports(rates, "c", a_link("a", mbit=100.0), version=a_version(6), now=600.0)
    assert up(rates, "a") == pytest.approx(106.25)


def test_a_relay_that_had_the_tree_it_forwards_was_what_was_slow_whatever_else_it_missed() -> None:
    rates = a_book(a={ORIGIN})
    fast, slow = a_link(ORIGIN, mbit=90.0, seconds=4.0), a_link("c", mbit=10.0)
    reports(rates, "a", fast, slow)
    reports(rates, "b", a_link("a", mbit=20.0), now=10.1)
    assert up(rates, "a") == pytest.approx(20.0)
    other = a_book(a={ORIGIN, "c"})
    reports(other, "a", fast, slow)
    reports(other, "b", a_link("a", mbit=20.0), now=10.1)
    assert up(other, "a") is None  # it waited for c


def test_what_is_done_with_a_fetch_after_its_last_byte_is_no_part_of_it() -> None:
    rates = a_book()
    measured_up(rates, "a", 100.0)
    reports(rates, "b", a_link("a", mbit=20.0, seconds=4.0), now=4.0, missing=1, holders=("a",))
    reports(rates, "b", a_link("a", mbit=20.0, seconds=5.0), now=25.0, holders=("a",))
    assert rates.host("b").fetch is not None
    assert rates.host("b").fetch.seconds == pytest.approx(5.0)
    assert down(rates, "b") == pytest.approx(20.0)
    assert up(rates, "a") == pytest.approx(100.0 + FORGET * (20.0 - 100.0))


def test_a_lower_bound_below_the_default_leaves_a_rate_unknown() -> None:
    rates = a_book()
    reports(rates, "b", a_link("a", mbit=20.0))
    assert up(rates, "a") is None
    assert down(rates, "b") is None


def test_what_was_carried_can_be_carried() -> None:
    rates = a_book()
    measured_up(rates, "a", 20.0)
    reports(rates, "b", a_link("a", mbit=70.0))
    assert up(rates, "a") == pytest.approx(70.0)


def test_links_of_another_time_are_not_added() -> None:
    rates = a_book()
    reports(rates, "a", a_link(ORIGIN, mbit=90.0), now=10.0)
    reports(rates, "late", a_link(ORIGIN, mbit=80.0), now=1000.0)
    assert up(rates, ORIGIN) == pytest.approx(80.0)


def test_a_moment_of_a_fetch_says_nothing() -> None:
    rates = a_book()
    reports(rates, "a", a_link(ORIGIN, mbit=9000.0, seconds=0.1))
    assert up(rates, ORIGIN) is None


def test_what_comes_of_a_version_that_others_followed_comes_too_late() -> None:
    rate = Rate(50.0)
    rate.read(Digest("1" * 64), 10.0, measured=True)
    rate.read(Digest("2" * 64), 20.0, measured=True)
    rate.read(Digest("1" * 64), 90.0, measured=True)
    assert (rate.before, rate.mbit) == (10.0, 20.0)


def test_faults_and_silences_are_told_once_each_and_anew_after_a_fresh_start() -> None:
    rates = a_book()
    assert reports(rates, "b", a_link("a", faults=1, silences=2)) == [("a", 1, 2)]
    assert reports(rates, "b", a_link("a", faults=1, silences=2)) == []
    assert reports(rates, "b", a_link("a", faults=2, silences=2)) == [("a", 1, 0)]
    again = a_link("a", faults=1, seconds=1.0)
    assert reports(rates, "b", again, now=20.0) == [("a", 1, 0)]
    fetch = rates.hosts["b"].fetch
    assert fetch is not None
    assert fetch.began_at == 19.0


def test_rates_outlive_the_worker_and_its_fetch_does_not() -> None:
    rates = a_book()
    reports(rates, "b", a_link("a", mbit=20.0), holders=("a",))
    rates.left("b")
    assert rates.hosts["b"].fetch is None
    assert up(rates, "a") == pytest.approx(20.0)
    reports(rates, "c", a_link("a", mbit=30.0), holders=("a",))
    assert up(rates, "a") == pytest.approx(30.0)
    rates.forget("a")
    assert up(rates, "a") is None
