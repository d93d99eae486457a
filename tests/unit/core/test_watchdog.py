"""The watchdog tells of a wait that lasts, of another cause, and of its end: once each."""

from __future__ import annotations

from core_builders import Scene, a_running_scene

from echo2.core.effects import Emit
from echo2.core.waits import Wait
from echo2.core.watchdog import TELL_AFTER_S, TELL_EACH_S, Watchdog


def a_wait(text: str = "w-1 is silent", *, key: str = "worker w-1", since: float = 0.0) -> Wait:
    return Wait(key, "coordinator", text, since, since + 60.0, "its leases are given to others")


def told(found: object) -> list[tuple[str, bool]]:
    return [(fields["text"], fields["over"]) for fields in found]  # type: ignore[attr-defined]


def test_what_is_over_soon_is_not_told() -> None:
    watchdog = Watchdog()
    for second in range(int(TELL_AFTER_S)):
        assert told(watchdog.look([a_wait()], float(second))) == []
    assert told(watchdog.look([], TELL_AFTER_S)) == []


def test_a_wait_that_lasts_is_told_once_with_its_age_its_owner_and_its_deadline() -> None:
    watchdog = Watchdog()
    (fields,) = watchdog.look([a_wait()], TELL_AFTER_S)
    assert fields == {
        "wait": "worker w-1",
        "owner": "coordinator",
        "text": "w-1 is silent",
        "since_s": TELL_AFTER_S,
        "ends_in_s": 60.0 - TELL_AFTER_S,
        "then": "its leases are given to others",
        "over": False,
    }
    for later in range(1, 100):
        assert told(watchdog.look([a_wait()], TELL_AFTER_S + later)) == []


def test_another_cause_is_told_but_not_at_every_change() -> None:
    watchdog = Watchdog()
    assert told(watchdog.look([a_wait("0 of 2")], TELL_AFTER_S)) == [("0 of 2", False)]
    assert told(watchdog.look([a_wait("1 of 2")], TELL_AFTER_S + 1)) == []
    later = TELL_AFTER_S + TELL_EACH_S
    assert told(watchdog.look([a_wait("1 of 2")], later)) == [("1 of 2", False)]
    assert told(watchdog.look([a_wait("1 of 2")], later + TELL_EACH_S)) == []


def test_the_end_of_a_wait_that_was_told_is_told() -> None:
    watchdog = Watchdog()
    list(watchdog.look([a_wait(), a_wait(key="batch", since=9.0)], TELL_AFTER_S))
    (fields,) = watchdog.look([], 25.0)
    assert (fields["wait"], fields["over"], fields["since_s"]) == ("worker w-1", True, 25.0)
    assert told(watchdog.look([], 26.0)) == []


def changes(effects: list[object]) -> list[dict[str, object]]:
    return [e.fields for e in effects if isinstance(e, Emit) and e.event == "wait_changed"]


def test_the_coordinator_tells_who_waits_for_what() -> None:
    scene = Scene()
    found = []
    for _ in range(30):
        found += changes(list(scene.tick(after=1.0)))
    (only,) = found
    assert (only["text"], only["over"]) == ("the run waits for a learner", False)
    scene.learner_joins()
    ended = changes(list(scene.tick(after=1.0)))
    assert [(e["wait"], e["over"]) for e in ended] == [("learner", True)]


def test_a_disk_that_takes_nothing_ends_the_run_with_the_cause() -> None:
    scene = a_running_scene(disk_timeout_s=50.0)
    scene.delivers(scene.leases()[0], durable=False)
    scene.undurable.clear()  # the disk hangs
    scene.passes(49.0, alive=("w-1",))
    assert scene.state.finished is None
    scene.passes(3.0, alive=("w-1",))
    end = scene.state.finished
    assert end is not None
    assert not end.ok
    assert end.reason.startswith("the disk of the run folder took no record for 51 s, and 1 wait")
