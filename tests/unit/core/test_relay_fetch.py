"""The rules of one fetch, one by one: whom to ask, whom to pass over, and for how long."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from echo2.core.relay_fetch import ORIGIN, Ask, Cancel, Dial, Limits, RelayFetch
from echo2.core.relay_source import RATE_WINDOW_S, Source

CHUNK_BYTES = 1000
WINDOW = 4


def a_fetch(
    *lots: tuple[str, Iterable[int]], up: str | None = None, began: float = 0.0, **changes: Any
) -> RelayFetch:
    """`lots`: ("w-1 w-2", chunks), the origin behind them; `up`: who is connected (None: all)."""
    planned_s = changes.pop("planned_s", 0.0)
    helpers = changes.pop("helpers", "").split()
    fetch = RelayFetch(
        [(names.split(), chunks) for names, chunks in lots],
        chunk_bytes=CHUNK_BYTES,
        limits=Limits(**{"window_chunks": WINDOW, **changes}),
        now=began,
        planned_s=planned_s,
        helpers=[helpers] * len(lots),
    )
    for name in fetch.sources if up is None else up.split():
        fetch.connected(name, began)
    return fetch


def ask(source: str, *indexes: int) -> Ask:
    return Ask(source, indexes)


def cancel(source: str, *indexes: int) -> Cancel:
    return Cancel(source, indexes)


def comes(fetch: RelayFetch, name: str, *indexes: int, now: float = 0.0) -> None:
    for index in indexes:
        assert fetch.arrived(name, index, CHUNK_BYTES, now) is not None
        fetch.verified(index)


def is_wrong(fetch: RelayFetch, name: str, index: int, now: float = 0.0) -> bool:
    assert fetch.arrived(name, index, CHUNK_BYTES, now) is not None
    return fetch.wrong(index, now)


# ---------------------------------------------------------------------------- the way of a chunk


def test_a_parent_is_asked_for_a_window_and_for_more_as_chunks_come() -> None:
    fetch = a_fetch(("w-1 w-2", range(7)))
    assert fetch.advance(0.0) == [ask("w-1", 0, 1, 2, 3)]
    assert fetch.advance(0.1) == []
    comes(fetch, "w-1", 1, 0, now=0.2)
    assert fetch.num_missing == 5
    assert fetch.num_asked == 2
    assert fetch.advance(0.2) == [ask("w-1", 4, 5)]


def test_who_owes_chunks_is_asked_for_a_quarter_of_its_window_at_once() -> None:
    fetch = a_fetch(("w-1", range(18)), window_chunks=8)
    assert fetch.advance(0.0) == [ask("w-1", *range(8))]
    comes(fetch, "w-1", 0, now=0.1)
    assert fetch.advance(0.1) == []
    comes(fetch, "w-1", 1, now=0.2)
    assert fetch.advance(0.2) == [ask("w-1", 8, 9)]
    comes(fetch, "w-1", *range(2, 10), now=0.3)
    assert fetch.advance(0.3) == [ask("w-1", *range(10, 18))]


def test_a_fetch_of_nothing_is_done() -> None:
    fetch = a_fetch(("w-1", ()))
    assert fetch.is_done
    assert fetch.advance(0.0) == []
    assert fetch.next_at() is None


def test_without_stripes_all_comes_from_the_origin() -> None:
    fetch = a_fetch(("", range(2)))
    assert fetch.advance(0.0) == [ask(ORIGIN, 0, 1)]
    comes(fetch, ORIGIN, 0, 1)
    assert fetch.is_done
    assert fetch.next_at() is None


def test_stripes_of_one_source_are_asked_for_in_the_order_of_their_chunks() -> None:
    fetch = a_fetch(("w-1", [0, 3, 5]), ("w-2", [1]), ("w-1 w-2", [2, 4]))
    assert fetch.advance(0.0) == [ask("w-1", 0, 2, 3, 4), ask("w-2", 1)]


def test_a_chunk_in_two_lots_is_an_error() -> None:
    with pytest.raises(ValueError, match="chunk 1 is in two lots"):
        a_fetch(("w-1", [0, 1]), ("w-2", [1, 2]))


def test_a_chunk_that_is_here_or_being_checked_is_of_no_use_again() -> None:
    fetch = a_fetch(("w-1", range(3)))
    fetch.advance(0.0)
    assert fetch.arrived("w-1", 0, CHUNK_BYTES, 0.1) == []
    assert fetch.arrived("w-1", 0, CHUNK_BYTES, 0.1) is None
    fetch.verified(0)
    assert fetch.arrived(ORIGIN, 0, CHUNK_BYTES, 0.2) is None
    assert fetch.arrived("w-1", 9, CHUNK_BYTES, 0.2) is None
    assert fetch.num_missing == 2
    assert fetch.advance(0.3) == []


def test_peers_that_are_no_sources_change_nothing() -> None:
    fetch = a_fetch(("w-1", range(2)))
    fetch.connected("w-9", 0.0)
    fetch.alive("w-9", 1, 0.0)
    fetch.refused("w-9", 0.0)
    fetch.disconnected("w-9", 0.0)
    fetch.unreachable("w-9", 0.0)
    assert fetch.arrived("w-9", 0, CHUNK_BYTES, 0.0) is None
    assert set(fetch.sources) == {"w-1", ORIGIN}


# -------------------------------------------------------------------------- who comes when


def test_a_fetch_that_begins_dials_the_parent_alone_and_waits_for_it() -> None:
    fetch = a_fetch(("w-1 w-2", range(3)), up=ORIGIN)
    assert fetch.advance(0.0) == [Dial("w-1")]
    assert fetch.next_at() == 1.5
    fetch.connected("w-1", 0.2)
    assert fetch.advance(0.2) == [ask("w-1", 0, 1, 2)]


def test_a_parent_that_does_not_come_up_is_waited_for_no_longer_than_its_silence() -> None:
    fetch = a_fetch(("w-1 w-2 w-3", range(3)), up=ORIGIN)
    fetch.advance(0.0)
    assert fetch.advance(1.0) == []
    assert fetch.advance(1.5) == [Dial("w-2")]
    assert fetch.advance(2.9) == []
    assert fetch.advance(3.0) == [Dial("w-3"), ask(ORIGIN, 0, 1, 2)]


def test_behind_a_parent_that_is_up_nobody_is_dialed() -> None:
    fetch = a_fetch(("w-1 w-2", range(9)), up="w-1")
    assert fetch.advance(0.0) == [ask("w-1", 0, 1, 2, 3)]


def test_when_a_parent_is_lost_the_next_is_asked_at_once_and_it_is_dialed_again() -> None:
    fetch = a_fetch(("w-1 w-2", range(3)))
    fetch.advance(5.0)
    fetch.disconnected("w-1", 5.1)
    assert fetch.num_asked == 0
    assert fetch.advance(5.1) == [Dial("w-1"), ask("w-2", 0, 1, 2)]


def test_an_unreachable_source_is_dialed_again_after_a_rest_that_doubles() -> None:
    fetch = a_fetch(("w-1", range(20)), up=ORIGIN, window_chunks=1)
    now, rests = 100.0, []
    fetch.advance(now)
    for _ in range(8):
        fetch.unreachable("w-1", now)
        assert Dial("w-1") not in fetch.advance(now)
        rested = now
        while Dial("w-1") not in fetch.advance(now):
            now += 0.5
        rests.append(now - rested)
    assert rests == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0]
    assert fetch.sources["w-1"].silences == 8


def test_a_handshake_ends_every_rest() -> None:
    fetch = a_fetch(("w-1", range(9)), up=ORIGIN)
    for _ in range(6):
        fetch.unreachable("w-1", 10.0)
    fetch.connected("w-1", 10.5)
    assert fetch.advance(10.5) == [ask("w-1", 0, 1, 2, 3)]


def test_news_of_a_connection_that_is_there_ends_no_rest() -> None:
    fetch = a_fetch(("w-1", range(2)))
    fetch.advance(0.0)
    fetch.advance(1.5)
    fetch.connected("w-1", 1.6)
    assert fetch.sources["w-1"].rests_until == 2.5
    assert fetch.advance(1.6) == []


def test_an_origin_that_was_down_for_long_is_asked_as_soon_as_it_is_back() -> None:
    fetch = a_fetch(("", range(2)), up="")
    for _ in range(20):
        fetch.unreachable(ORIGIN, 100.0)
    fetch.connected(ORIGIN, 100.1)
    assert fetch.advance(100.1) == [ask(ORIGIN, 0, 1)]


# ----------------------------------------------------------------------- silent and stuck


def test_a_source_that_is_silent_is_passed_over_and_told_so() -> None:
    fetch = a_fetch(("w-1 w-2", range(3)))
    fetch.advance(0.0)
    fetch.alive("w-1", 0, 1.0)
    assert fetch.next_at() == 2.5
    assert fetch.advance(2.4) == []
    assert fetch.advance(2.5) == [cancel("w-1", 0, 1, 2), ask("w-2", 0, 1, 2)]
    assert fetch.sources["w-1"].silences == 1


def test_silence_counts_from_the_request() -> None:
    fetch = a_fetch(("w-1", range(1)))
    fetch.advance(100.0)
    assert fetch.advance(101.0) == []
    assert fetch.next_at() == 101.5


def test_a_fetch_that_began_at_time_zero_hears_silence_too() -> None:
    fetch = a_fetch(("w-1", range(1)), began=0.0)
    assert fetch.advance(0.0) == [ask("w-1", 0)]
    assert fetch.advance(1.5) == [cancel("w-1", 0), ask(ORIGIN, 0)]


def test_signs_of_life_keep_what_a_source_was_asked_for() -> None:
    fetch = a_fetch(("w-1", range(1)))
    fetch.advance(0.0)
    for now in range(1, 30):
        fetch.alive("w-1", 0, float(now))
        assert fetch.advance(float(now)) == []


@pytest.mark.parametrize(("num_held", "patience_s"), [(1, 10.0), (0, 30.0)])
def test_a_source_that_lives_and_never_delivers_is_passed_over(
    num_held: int, patience_s: float
) -> None:
    fetch = a_fetch(("w-1", range(1)))
    fetch.advance(0.0)
    now = 0.0
    while now < patience_s:
        fetch.alive("w-1", num_held, now)
        assert fetch.advance(now) == []
        now += 0.5
    fetch.alive("w-1", num_held, now)
    assert fetch.advance(now) == [cancel("w-1", 0), ask(ORIGIN, 0)]


def test_a_source_that_delivers_now_and_then_is_not_stuck() -> None:
    fetch = a_fetch(("w-1", range(20)))
    fetch.advance(0.0)
    for half_s in range(1, 80):
        fetch.alive("w-1", 3, half_s / 2)
        if half_s % 16 == 0:
            comes(fetch, "w-1", min(fetch.sources["w-1"].asked), now=half_s / 2)
        assert all(isinstance(effect, Ask) for effect in fetch.advance(half_s / 2))
    assert fetch.sources[ORIGIN].num_bytes == 0


def test_on_probation_a_source_gets_one_chunk_and_the_next_one_the_others() -> None:
    fetch = a_fetch(("w-1 w-2", range(20)))
    fetch.advance(0.0)
    assert fetch.advance(1.5) == [cancel("w-1", 0, 1, 2, 3), ask("w-2", 0, 1, 2, 3)]
    comes(fetch, "w-2", 0, 1, now=2.5)
    assert fetch.advance(2.5) == [ask("w-1", 4), ask("w-2", 5, 6)]
    comes(fetch, "w-2", 2, now=2.6)
    assert fetch.advance(2.6) == [ask("w-2", 7)]


def test_a_chunk_delivered_ends_the_probation() -> None:
    fetch = a_fetch(("w-1", range(20)))
    fetch.advance(0.0)
    fetch.advance(1.5)
    comes(fetch, ORIGIN, 0, now=2.5)
    assert fetch.advance(2.5) == [ask("w-1", 4), ask(ORIGIN, 5)]
    comes(fetch, "w-1", 4, now=2.6)
    assert fetch.advance(2.6) == [ask("w-1", 6, 7, 8, 9)]
    assert fetch.sources["w-1"].silences == 1, "the count is for the report"


@pytest.mark.parametrize("comes_at", [1.6, 4.1])
def test_a_late_chunk_does_not_end_the_probation(comes_at: float) -> None:
    """Of one that was passed over, or asked on probation more than 1.5 s ago."""
    fetch = a_fetch(("w-1", range(40)))
    fetch.advance(0.0)
    fetch.advance(1.5)
    if comes_at > 2.5:
        comes(fetch, ORIGIN, 0, now=2.5)
        assert fetch.advance(2.5) == [ask("w-1", 4), ask(ORIGIN, 5)]
        fetch.alive("w-1", 0, 3.5)
    assert fetch.arrived("w-1", 4 if comes_at > 2.5 else 0, CHUNK_BYTES, comes_at) is not None
    assert fetch.sources["w-1"].on_probation
    comes(fetch, ORIGIN, 1, 2, now=comes_at)
    asks = [e for e in fetch.advance(max(comes_at, 2.5)) if isinstance(e, Ask)]
    assert [len(e.indexes) for e in asks if e.source == "w-1"] == [1]


def test_a_source_on_probation_that_has_nothing_is_soon_passed_over_again() -> None:
    fetch = a_fetch(("w-1", range(20)))
    fetch.advance(0.0)
    fetch.advance(1.5)
    comes(fetch, ORIGIN, 0, now=2.5)
    fetch.advance(2.5)
    for now in (3.5, 4.5, 5.4):
        fetch.alive("w-1", 0, now)
        fetch.alive(ORIGIN, 4, now)
    assert fetch.advance(5.4) == []
    assert fetch.advance(5.5)[0] == cancel("w-1", 4)


def test_a_source_on_probation_gets_none_of_the_last_chunks() -> None:
    fetch = a_fetch(("w-1", range(6)))
    fetch.advance(0.0)
    fetch.advance(1.5)
    comes(fetch, ORIGIN, 0, 1, now=2.5)
    assert fetch.advance(2.5) == [ask(ORIGIN, 4, 5)]
    fetch = a_fetch(("w-1", range(6)))
    fetch.advance(0.0)
    fetch.disconnected(ORIGIN, 1.0)
    fetch.advance(1.5)
    assert fetch.advance(2.5) == [ask("w-1", 0)], "nobody else works"


def test_each_failure_in_a_row_doubles_the_rest() -> None:
    fetch = a_fetch(("w-1", range(1)), up="w-1")
    now, asked_at = 100.0, []
    while len(asked_at) < 5:
        asked_at += [now] * (ask("w-1", 0) in fetch.advance(now))
        now += 0.5
    rests = [b - a - 1.5 for a, b in itertools.pairwise(asked_at)]
    assert rests == [1.0, 2.0, 4.0, 8.0]


def test_a_link_on_which_chunks_take_long_is_not_silent_between_them() -> None:
    fetch = a_fetch(("w-1", range(9)))
    fetch.advance(0.0)
    comes(fetch, "w-1", 0, now=1.4)
    fetch.advance(1.4)
    for now in (2.9, 3.4, 4.1):
        assert fetch.advance(now) == []
    comes(fetch, "w-1", 1, now=4.15)
    assert fetch.sources["w-1"].silences == 0


def test_a_slow_plan_gives_more_time_before_a_source_is_silent() -> None:
    fetch = a_fetch(("w-1", range(10)), planned_s=20.0)
    fetch.advance(0.0)
    assert fetch.next_at() == 4.0


def test_who_slept_blames_nobody_for_it() -> None:
    fetch = a_fetch(("w-1", range(1)))
    fetch.advance(0.0)
    assert fetch.advance(60.0) == []
    assert fetch.advance(60.75) == [cancel("w-1", 0), ask(ORIGIN, 0)]


def test_what_a_silent_origin_owes_is_asked_of_it_again() -> None:
    fetch = a_fetch(("", range(2)))
    fetch.advance(0.0)
    assert fetch.next_at() == 10.0
    assert fetch.advance(10.0) == [cancel(ORIGIN, 0, 1), ask(ORIGIN, 0, 1)]
    assert fetch.sources[ORIGIN].failures == 0


def test_a_source_that_refuses_rests_and_the_longer_the_more_often() -> None:
    fetch = a_fetch(("w-1", range(9)), up="w-1")
    assert fetch.advance(10.0) == [ask("w-1", 0, 1, 2, 3)]
    for refused_at, rest_s in ((11.0, 1.0), (12.0, 2.0), (14.0, 4.0)):
        fetch.refused("w-1", refused_at)
        assert ask("w-1", 0) not in fetch.advance(refused_at + rest_s - 0.1)
        assert fetch.next_at() == refused_at + rest_s
        assert fetch.advance(refused_at + rest_s) == [ask("w-1", 0)]
    assert fetch.sources["w-1"].silences == 0


def test_who_refuses_holds_up_one_chunk_at_most() -> None:
    fetch = a_fetch(("w-1", range(9)))
    fetch.advance(0.0)
    fetch.refused("w-1", 0.1)
    assert fetch.advance(0.1) == [ask(ORIGIN, 0, 1, 2, 3)]
    comes(fetch, ORIGIN, 0, 1, now=1.1)
    assert fetch.advance(1.1) == [ask("w-1", 4), ask(ORIGIN, 5, 6)]


def test_a_late_chunk_counts_and_who_was_asked_meanwhile_is_let_off() -> None:
    fetch = a_fetch(("w-1 w-2", range(2)))
    fetch.advance(0.0)
    fetch.advance(1.5)
    assert fetch.arrived("w-1", 1, CHUNK_BYTES, 1.6) == [cancel("w-2", 1)]
    fetch.verified(1)
    assert fetch.num_missing == 1
    assert fetch.num_asked == 1


# ------------------------------------------------------------------------- wrong payloads


def test_a_wrong_chunk_is_asked_of_the_next_source() -> None:
    fetch = a_fetch(("w-1 w-2", range(2)))
    fetch.advance(0.0)
    assert is_wrong(fetch, "w-1", 0)
    assert fetch.advance(0.1) == [ask("w-2", 0)]
    assert fetch.sources["w-1"].num_faults == 1


def test_a_wrong_chunk_that_the_next_source_loses_goes_not_back_to_the_first() -> None:
    fetch = a_fetch(("w-1 w-2", range(2)))
    fetch.advance(5.0)
    is_wrong(fetch, "w-1", 0, 5.0)
    assert fetch.advance(5.0) == [ask("w-2", 0)]
    fetch.disconnected("w-2", 5.1)
    assert fetch.advance(5.1) == [Dial("w-2"), ask(ORIGIN, 0)]


def test_a_wrong_chunk_holds_up_none_of_its_stripe() -> None:
    fetch = a_fetch(("w-1", range(9)), up="w-1")
    fetch.advance(0.0)
    is_wrong(fetch, "w-1", 0)
    assert fetch.advance(0.1) == [Dial(ORIGIN), ask("w-1", 4)]
    fetch.connected(ORIGIN, 0.2)
    assert fetch.advance(0.2) == [ask(ORIGIN, 0)]


def test_what_a_source_sent_wrong_is_not_taken_from_it_again() -> None:
    fetch = a_fetch(("w-1", range(2)))
    fetch.advance(0.0)
    is_wrong(fetch, "w-1", 0)
    assert fetch.arrived("w-1", 0, CHUNK_BYTES, 0.1) is None
    assert fetch.sources["w-1"].num_faults == 1


def test_a_source_with_too_many_wrong_chunks_is_asked_no_more_and_not_believed() -> None:
    fetch = a_fetch(("w-1", range(9)))
    fetch.advance(0.0)
    assert all(is_wrong(fetch, "w-1", index) for index in range(3))
    assert fetch.advance(0.1) == [cancel("w-1", 3), ask(ORIGIN, 0, 1, 2, 3)]
    assert fetch.arrived("w-1", 4, CHUNK_BYTES, 0.2) is None
    fetch.disconnected("w-1", 0.3)
    fetch.connected("w-1", 0.4)
    assert fetch.advance(99.0) == []


def test_a_wrong_chunk_of_the_origin_is_asked_of_it_again_until_it_is_too_much() -> None:
    fetch = a_fetch(("", range(1)))
    for now in (0.0, 1.0):
        assert fetch.advance(now) == [ask(ORIGIN, 0)]
        assert is_wrong(fetch, ORIGIN, 0, now)
    fetch.advance(2.0)
    assert not is_wrong(fetch, ORIGIN, 0, 2.0)


def test_nothing_is_remembered_of_a_wrong_chunk_that_came_right() -> None:
    fetch = a_fetch(("w-1", range(3)))
    fetch.advance(0.0)
    is_wrong(fetch, "w-1", 0)
    fetch.advance(0.1)
    comes(fetch, ORIGIN, 0)
    assert fetch._avoid == {}
    assert fetch._again == set()


# --------------------------------------------------------------------------- slow sources


def deliver(
    fetch: RelayFetch, name: str, *, per_s: float, until: float, now: float = 0.0, held: int = 1
) -> list[Ask | Cancel | Dial]:
    """Chunks at this rate, signs of life beside them; what was decided, but for asks."""
    effects: list[Ask | Cancel | Dial] = []
    count = 0.0
    while now < until and not fetch.is_done:
        effects += [e for e in fetch.advance(now) if not isinstance(e, Ask)]
        now += 0.25
        count += per_s / 4
        for source in fetch.sources.values():
            if source.asked:
                fetch.alive(source.name, held, now)
        while count >= 1 and fetch.sources[name].asked:
            count -= 1
            comes(fetch, name, min(fetch.sources[name].asked), now=now)
    return effects


def test_a_source_that_delivers_less_than_its_plan_loses_that_part_of_what_is_left() -> None:
    fetch = a_fetch(("w-1 w-2", range(100)), planned_s=10.0)
    assert deliver(fetch, "w-1", per_s=4.0, until=4.0) == []
    deliver(fetch, "w-1", per_s=4.0, now=4.0, until=4.25)
    assert [lot.sources for lot in fetch._lots] == [
        ("w-1", "w-2", ORIGIN),
        ("w-2", ORIGIN, "w-1"),
    ]
    one, other = fetch._lots
    assert one.num_left + other.num_left == fetch.num_missing
    assert other.num_left == pytest.approx(0.55 * fetch.num_missing, abs=3)
    assert min(other.wanted) < max(one.wanted)  # those below ask for the lowest first
    assert fetch.sources["w-2"].asked


def test_what_a_slow_source_loses_of_its_window_is_taken_back() -> None:
    fetch = a_fetch(("w-1 w-2", range(40)), planned_s=4.0)
    effects = deliver(fetch, "w-1", per_s=0.5, until=4.75)
    (taken,) = (effect for effect in effects if isinstance(effect, Cancel))
    assert taken.source == "w-1"
    assert set(taken.indexes) <= fetch.sources["w-2"].asked
    assert not fetch.sources["w-1"].asked.intersection(taken.indexes)


def test_a_slow_source_that_lost_its_part_keeps_what_it_can_deliver() -> None:
    fetch = a_fetch(("w-1 w-2", range(200)), planned_s=20.0)
    deliver(fetch, "w-1", per_s=4.0, until=20.0)
    assert len(fetch._lots) == 2
    assert fetch._lot_of[max(fetch.sources["w-1"].asked)] is fetch._lots[0]


def test_a_helper_is_dialed_and_waited_for_when_a_source_is_slow_and_not_before() -> None:
    names = f"w-1 w-2 {ORIGIN}"
    fetch = a_fetch(("w-1 w-2", range(100)), planned_s=10.0, helpers="w-9", up=names)
    effects = deliver(fetch, "w-1", per_s=1.0, until=4.25)
    assert [e for e in effects if isinstance(e, Dial)] == [Dial("w-9")]
    assert fetch._lots[-1].sources == ("w-9", "w-2", ORIGIN, "w-1")
    assert not fetch.sources["w-2"].asked
    fetch.connected("w-9", 4.3)
    fetch.advance(4.3)
    assert len(fetch.sources["w-9"].asked) == WINDOW
    assert not fetch.sources["w-2"].asked


def test_a_helper_that_does_not_come_up_is_waited_for_no_longer_than_its_silence() -> None:
    names = f"w-1 w-2 {ORIGIN}"
    fetch = a_fetch(("w-1 w-2", range(100)), planned_s=10.0, helpers="w-9", up=names)
    deliver(fetch, "w-1", per_s=1.0, until=4.25)
    deliver(fetch, "w-1", per_s=1.0, now=4.25, until=4.25 + Limits(WINDOW).silence_s + 0.5)
    assert len(fetch.sources["w-2"].asked) == WINDOW


def test_a_helper_that_has_nothing_is_soon_passed_over() -> None:
    """It may wait, through others, for us."""
    fetch = a_fetch(("w-1 w-2", range(100)), planned_s=10.0, helpers="w-9")
    deliver(fetch, "w-1", per_s=1.0, until=4.25)
    assert fetch.sources["w-9"].asked
    for step in range(1, 16):
        for name, num_held in (("w-9", 0), ("w-1", 1), ("w-2", 1)):
            fetch.alive(name, num_held, 4.25 + step / 4)
        fetch.advance(4.25 + step / 4)
    assert fetch.sources["w-9"].on_probation
    assert len(fetch.sources["w-2"].asked) == WINDOW


def test_what_a_slow_source_lost_comes_back_to_it_when_nobody_else_works() -> None:
    fetch = a_fetch(("w-1", range(60)), planned_s=10.0)
    deliver(fetch, "w-1", per_s=2.0, until=5.0)
    assert fetch.sources[ORIGIN].asked
    fetch.disconnected(ORIGIN, 5.0)
    deliver(fetch, "w-1", per_s=50.0, now=5.0, until=9.0)
    assert fetch.is_done


def test_a_source_whose_chunks_have_yet_to_reach_it_is_not_slow() -> None:
    fetch = a_fetch(("w-1 w-2", range(100)), planned_s=10.0)
    deliver(fetch, "w-1", per_s=1.0, until=9.0, held=0)
    assert len(fetch._lots) == 1


def test_a_source_that_delivers_next_to_nothing_loses_all() -> None:
    fetch = a_fetch(("w-1 w-2", range(100)), planned_s=10.0)
    effects = deliver(fetch, "w-1", per_s=2.0, until=4.25)
    assert [lot.sources for lot in fetch._lots] == [("w-2", ORIGIN, "w-1")]
    assert [e.source for e in effects if isinstance(e, Cancel)] == ["w-1"]
    assert not fetch.sources["w-1"].asked


@pytest.mark.parametrize(("each_s", "is_slow"), [(0.5, False), (1.25, True), (100.0, True)])
def test_late_signs_of_life_show_that_the_link_is_what_a_source_waits_for(
    each_s: float, is_slow: bool
) -> None:
    """They say that nothing is held, but stood behind chunks themselves."""
    fetch = a_fetch(("w-1 w-2", range(100)), planned_s=10.0)
    told_at, asked = 0.0, set()
    for now in (step / 4 for step in range(32)):
        asked |= {effect.source for effect in fetch.advance(now) if isinstance(effect, Ask)}
        if now - told_at >= each_s:
            told_at = now
            fetch.alive("w-1", 0, now)
        if now % 0.5 == 0 and fetch.sources["w-1"].asked:
            comes(fetch, "w-1", min(fetch.sources["w-1"].asked), now=now)
    assert ("w-2" in asked) is is_slow


def test_a_source_that_keeps_to_its_plan_keeps_its_chunks() -> None:
    fetch = a_fetch(("w-1 w-2", range(100)), planned_s=10.0)
    assert deliver(fetch, "w-1", per_s=8.0, until=10.0) == []
    assert len(fetch._lots) == 1


def test_a_slow_source_keeps_its_chunks_while_no_other_works() -> None:
    fetch = a_fetch(("w-1 w-2", range(100)), planned_s=10.0, up="w-1")
    deliver(fetch, "w-1", per_s=2.0, until=9.0)
    assert len(fetch._lots) == 1


def test_the_last_source_is_helped_by_one_that_has_nothing_to_do() -> None:
    fetch = a_fetch(("w-1", range(4)), ("w-2", range(4, 40)))
    fetch.advance(0.0)
    deliver(fetch, "w-2", per_s=2.0, until=5.0)
    assert not fetch.sources[ORIGIN].asked, "w-1 is not done yet"
    comes(fetch, "w-1", 0, 1, 2, 3, now=5.0)
    deliver(fetch, "w-2", per_s=2.0, now=5.0, until=8.0)
    assert fetch.sources[ORIGIN].asked
    assert fetch._lot_of[39].sources == (ORIGIN, "w-2")


def test_the_last_source_is_not_helped_by_one_that_has_enough_to_do() -> None:
    fetch = a_fetch(("w-1", range(4)), ("w-2", range(4, 40)), ("", range(40, 80)))
    fetch.advance(0.0)
    comes(fetch, "w-1", 0, 1, 2, 3)
    deliver(fetch, "w-2", per_s=2.0, until=8.0)
    assert len(fetch._lots) == 2


def test_a_source_that_is_nearly_done_is_not_helped() -> None:
    fetch = a_fetch(("w-1", range(4)), ("w-2", range(4, 16)))
    fetch.advance(0.0)
    comes(fetch, "w-1", 0, 1, 2, 3)
    deliver(fetch, "w-2", per_s=2.0, until=8.0)
    assert fetch.is_done
    assert fetch.sources[ORIGIN].num_bytes == 0


# ------------------------------------------------------------------------------ accounts


def test_a_source_s_rate_is_that_of_the_last_two_seconds() -> None:
    source = Source("w-1")
    for now in range(10):
        source.arrived(500, float(now))
    assert source.bytes_per_s(9.0) == 3 * 500 / RATE_WINDOW_S
    assert source.bytes_per_s(20.0) == 0.0
    assert source.num_bytes == 5000


def test_a_source_s_busy_time_is_that_in_which_it_owes_something() -> None:
    fetch = a_fetch(("w-1", range(2)))
    fetch.advance(10.0)
    source = fetch.sources["w-1"]
    assert source.busy_until(11.0) == 1.0
    comes(fetch, "w-1", 0, 1, now=13.0)
    assert source.busy_until(99.0) == source.busy_s == 3.0


def test_useless_payloads_count_as_bytes_and_do_not_make_a_source_deliver() -> None:
    fetch = a_fetch(("w-1", range(2)))
    fetch.advance(0.0)
    comes(fetch, "w-1", 0, now=0.5)
    for half_s in range(2, 21):
        assert fetch.arrived("w-1", 0, CHUNK_BYTES, half_s / 2) is None
    fetch.alive("w-1", 1, 10.5)
    assert fetch.advance(10.5) == [cancel("w-1", 1), ask(ORIGIN, 1)]
    assert fetch.sources["w-1"].num_bytes == 20 * CHUNK_BYTES
