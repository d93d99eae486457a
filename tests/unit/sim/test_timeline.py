"""Virtual time: everything that was scheduled happens, once and in order."""

from __future__ import annotations

from echo2.sim.timeline import Timeline


def a_timeline(*times_s: float) -> tuple[Timeline, list[float]]:
    """Something is to be done at each of these times; what was done, by its time."""
    timeline, done = Timeline(), list[float]()
    for time_s in times_s:
        timeline.at(time_s, done.append, time_s)
    return timeline, done


def test_what_is_due_after_a_run_happens_in_the_next() -> None:
    timeline, done = a_timeline(3.0, 1.0, 2.0)
    assert not timeline.run(until_s=1.5, stop=lambda: False)
    assert (done, timeline.now) == ([1.0], 1.0)
    assert not timeline.run(until_s=2.0, stop=lambda: False)
    assert not timeline.run(until_s=9.0, stop=lambda: False)
    assert (done, timeline.now) == ([1.0, 2.0, 3.0], 3.0)


def test_a_run_that_is_stopped_goes_on_behind_what_stopped_it() -> None:
    timeline, done = a_timeline(1.0, 1.0, 2.0)
    assert timeline.run(until_s=9.0, stop=lambda: len(done) == 1)
    assert timeline.run(until_s=9.0, stop=lambda: len(done) == 3)
    assert done == [1.0, 1.0, 2.0]


def test_nothing_is_scheduled_before_now_and_ties_go_to_the_first() -> None:
    timeline, done = a_timeline(5.0)
    timeline.run(until_s=9.0, stop=lambda: False)
    timeline.at(1.0, done.append, 1.0)
    timeline.after(0.0, done.append, 2.0)
    timeline.run(until_s=9.0, stop=lambda: False)
    assert (done, timeline.now) == ([5.0, 1.0, 2.0], 5.0)
