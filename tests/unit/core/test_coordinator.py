"""The whole coordinator: deadlines, silence, the ends of a run, and what it may not be sent."""

from __future__ import annotations

import pytest
from core_builders import (
    LEARNER,
    Scene,
    a_learner_hello,
    a_restored_run,
    a_running_scene,
    a_version,
    emitted,
    finish,
    sent,
)

from echo2.core.coordinator import FAILED_IN_ROW_MIN, CoordinatorState
from echo2.core.effects import Send
from echo2.core.events import KeyRevoked, Persisted, Tick
from echo2.core.group import GroupState
from echo2.core.settings import CoordinatorSettings
from echo2.errors import RemoteProtocolError
from echo2.messages import (
    BatchGranted,
    BatchWaiting,
    Draining,
    HeartbeatEcho,
    LeaseGranted,
    LeaseRevoked,
    Shutdown,
    TasksWanted,
    VersionAnnounced,
)
from echo2.types import PeerId

V0, V1 = a_version(0), a_version(1)


def test_the_first_event_opens_the_run() -> None:
    scene = Scene(staleness_max=3, period=2, late="drop", group_size=4)
    assert emitted(scene.tick(after=5.0), "run_started") == [
        {
            "run_id": "run",
            "staleness_max": 3,
            "groups_per_step": 2,
            "group_size": 4,
            "late": "drop",
            "period": 2,
        }
    ]
    assert scene.coordinator.started_at == 5.0
    assert not emitted(scene.tick(), "run_started")


def test_a_clock_that_steps_back_stands_still() -> None:
    coordinator = CoordinatorState(CoordinatorSettings(run_id="run", staleness_max=0))
    coordinator.handle(Tick(), 10.0)
    coordinator.handle(Tick(), 4.0)
    assert coordinator.state.now == 10.0


def test_a_message_that_no_coordinator_takes_is_refused() -> None:
    scene = a_running_scene()
    with scene.refuses("wrong_receiver", "a coordinator does not take HeartbeatEcho"):
        scene.receive("w-1", HeartbeatEcho(sequence=1))


def test_a_record_that_nobody_waits_for_is_ignored() -> None:
    scene = a_running_scene()
    scene.tick()
    before = scene.snapshot()
    scene.handle(Persisted(999))
    assert scene.snapshot() == before


def test_a_draining_learner_stays_in_its_seat() -> None:
    scene = a_running_scene()
    scene.tick()
    before = scene.snapshot()
    scene.receive(LEARNER, Draining(reason="stops soon"))
    assert scene.snapshot() == before


def test_heartbeats_grant_nothing() -> None:
    scene = a_running_scene(slots=1, tasks=0)
    scene.submits(1)
    scene.state.members.get("w-1").slots = 2
    assert not sent(scene.beats("w-1"), LeaseGranted)


def test_the_same_events_give_the_same_effects() -> None:
    def played() -> list:
        scene = a_running_scene(workers=("w-1", "w-2"), slots=2, seed=5)
        effects = []
        for lease in scene.leases():
            effects += scene.delivers(lease)
        return effects + scene.trains()

    assert played() == played()


# -------------------------------------------------------------------- silent workers


def test_a_silent_worker_is_suspect_then_gone() -> None:
    scene = a_running_scene(slots=1, tasks=1)
    assert not emitted(scene.tick(after=5.0), "worker_suspect")
    assert emitted(scene.tick(after=0.1), "worker_suspect") == [{"worker": "w-1"}]
    assert not emitted(scene.tick(), "worker_suspect"), "said once"
    assert not emitted(scene.tick(after=9.9), "worker_gone")
    effects = scene.tick(after=0.1)
    assert emitted(effects, "worker_gone") == [{"worker": "w-1", "reason": "silent for 15.1 s"}]
    assert emitted(effects, "lease_revoked")[0]["reason"] == "w-1 is gone: silent for 15.1 s"
    assert scene.state_of("g0") is GroupState.QUEUED


def test_a_worker_whose_key_was_revoked_is_gone_at_once() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=1, tasks=1)
    (lease,) = scene.leases()
    holder = scene.grantee[lease]
    effects = scene.handle(KeyRevoked(holder))
    assert emitted(effects, "worker_gone") == [{"worker": holder, "reason": "its key was revoked"}]
    assert [e["worker"] for e in emitted(effects, "lease_revoked")] == [holder]
    other = "w-2" if holder == "w-1" else "w-1"
    assert [m.group for m in sent(effects, LeaseGranted, to=other)] == ["g0"]
    assert not [e for e in effects if isinstance(e, Send) and e.peer == holder]
    assert not emitted(scene.handle(KeyRevoked(holder)), "worker_gone"), "said once"


def test_a_learner_whose_key_was_revoked_has_left_and_another_may_sit_down() -> None:
    scene = a_running_scene()
    effects = scene.handle(KeyRevoked(PeerId(LEARNER)))
    assert emitted(effects, "learner_left") == [{"incarnation": 1, "reason": "its key was revoked"}]
    assert scene.state.seat.silent
    scene.receive("learner-2", a_learner_hello(hello_id="other"))
    assert scene.state.seat.peer == "learner-2"


def test_a_key_that_nobody_here_had_changes_nothing() -> None:
    scene = a_running_scene()
    scene.tick()
    before = scene.snapshot()
    scene.handle(KeyRevoked(PeerId("w-99")))
    assert scene.snapshot() == before


def test_a_worker_that_speaks_is_trusted_again() -> None:
    scene = a_running_scene(slots=1)
    scene.tick(after=6.0)
    scene.beats("w-1")
    assert scene.state.members.get("w-1").state_name == "ready"
    scene.tick(after=5.0)
    assert not scene.state.members.get("w-1").suspect


def test_a_version_that_a_worker_does_not_install_is_announced_again_more_and_more_rarely() -> None:
    scene = Scene(gone_s=10.0)
    scene.learner_joins()
    scene.publishes(0)
    scene.worker_joins("w-1")
    told = []
    for _ in range(150):
        scene.now += 1.0
        scene.beats("w-1")
        scene.learner_beats()
        if sent(scene.tick(), VersionAnnounced, to="w-1"):
            told.append(scene.now)
    assert told == [21.0, 62.0, 143.0]


def test_a_worker_that_was_never_told_is_told_at_the_next_tick() -> None:
    scene = a_running_scene(tasks=0)
    scene.state.step = 1
    scene.publishes(1)
    scene.state.members.get("w-1").announced = None
    scene.state.members.get("w-1").announced_at = 0.0
    assert [m.version for m in sent(scene.tick(after=1.0), VersionAnnounced)] == [V1]


# ----------------------------------------------------------------------- stalled leases


def test_a_lease_without_a_new_token_is_revoked() -> None:
    scene = a_running_scene(workers=("w-1",), slots=1, tasks=1, stall_s=3.0)
    (lease,) = scene.leases()
    assert not sent(scene.tick(after=3.0), LeaseRevoked)
    scene.beats("w-1")
    effects = scene.tick(after=0.1)
    assert [(m.lease, m.reason) for m in sent(effects, LeaseRevoked)] == [
        (lease, "no new token for 3.1 s, dispatch.stall_s is 3.0")
    ]
    assert emitted(effects, "lease_revoked") == [
        {
            "group_id": "g0",
            "lease": lease,
            "worker": "w-1",
            "reason": "no new token for 3.1 s, dispatch.stall_s is 3.0",
            "held_s": 3.1,
        }
    ]


def test_a_lease_past_its_cap_is_revoked_though_tokens_come() -> None:
    scene = a_running_scene(slots=1, tasks=1, lease_max_s=4.0)
    for tokens in range(1, 5):
        scene.now += 1.0
        scene.beats("w-1", l_1=tokens)
        assert not sent(scene.tick(), LeaseRevoked)
    scene.beats("w-1", l_1=9)
    (revoked,) = sent(scene.tick(after=0.1), LeaseRevoked)
    assert revoked.reason == "not done after 4.1 s, its cap is 4.0 s"


def test_a_group_that_stalls_too_often_fails_with_the_tokens_it_had() -> None:
    scene = a_running_scene(slots=1, tasks=1, attempts_max=1, stall_s=3.0)
    scene.beats("w-1", l_1=5)
    effects = scene.tick(after=3.1)
    (ended,) = emitted(effects, "group_ended")
    assert (ended["end"], ended["tokens"], ended["worker"]) == ("failed", 5, "w-1")
    assert sent(effects, LeaseRevoked)


# -------------------------------------------------------------------------------- evals


def test_an_eval_that_stalls_is_given_to_another() -> None:
    scene = a_running_scene(slots=1, tasks=0, stall_s=3.0)
    scene.evaluates(V0)
    effects = scene.tick(after=3.1)
    (revoked,) = sent(effects, LeaseRevoked)
    assert revoked.reason == "stalled on w-1: no new token for 3.1 s"
    assert len(scene.state.evals.lease_eval) == 1


def test_an_eval_that_takes_too_long_is_given_to_another() -> None:
    scene = a_running_scene(slots=1, tasks=0, lease_max_s=2.0)
    scene.evaluates(V0)
    assert not sent(scene.tick(after=2.0), LeaseRevoked)
    assert sent(scene.tick(after=0.1), LeaseRevoked)


def test_an_eval_that_no_worker_serves_any_more_is_cancelled_with_n_of_n() -> None:
    scene = a_running_scene(slots=1, tasks=0)
    scene.evaluates(V0, tasks=2)
    scene.delivers("l.1", reward=1.0)
    scene.state.step = 1
    scene.publishes(1)
    scene.installs("w-1", V1)
    (ended,) = emitted(scene.tick(), "eval_ended")
    assert (ended["num_asked"], ended["num_done"], ended["reward_mean"]) == (2, 1, 1.0)
    assert ended["reason"] == "1 of 2 not done: no worker serves 1.0 any more"


def test_an_eval_of_the_newest_version_waits_for_a_worker() -> None:
    scene = a_running_scene(workers=(), tasks=0)
    scene.evaluates(V0)
    assert not emitted(scene.tick(), "eval_ended")


def test_an_eval_is_cancelled_when_the_budget_is_spent() -> None:
    scene = a_running_scene(slots=1, tasks=0, budget_usd=1.0, learner_usd_per_h=3600.0)
    scene.evaluates(V0)
    effects = scene.tick(after=1.0)
    (ended,) = emitted(effects, "eval_ended")
    assert ended["reason"] == "1 of 1 not done: the budget is spent"
    assert [m.reason for m in sent(effects, LeaseRevoked)] == ["the budget is spent"]


# --------------------------------------------------------------------------------- cost


def test_money_is_counted_for_workers_and_the_learner_that_are_here() -> None:
    scene = Scene(learner_usd_per_h=2.0)
    scene.tick()
    scene.tick(after=3600.0 * 0.1)
    assert scene.state.cost_usd == 0.0
    scene.learner_joins()
    scene.worker_joins("w-1", price_usd_per_h=1.0)
    scene.tick(after=360.0)
    assert scene.state.cost_usd == pytest.approx(0.3)


# ----------------------------------------------------------------------- silent learner


def test_a_silent_learner_has_left_and_is_welcome_again() -> None:
    scene = a_running_scene(tasks=0)
    assert not emitted(scene.tick(after=15.0), "learner_left")
    effects = scene.tick(after=0.1)
    assert emitted(effects, "learner_left") == [{"incarnation": 1, "reason": "silent for 15.1 s"}]
    assert not emitted(scene.tick(), "learner_left"), "said once"
    effects = scene.learner_beats()
    assert emitted(effects, "learner_returned") == [{"incarnation": 1}]
    assert sent(scene.tick(), TasksWanted), "its answer may be lost"


def test_a_run_without_a_learner_ends_with_what_to_do() -> None:
    scene = Scene(learner_timeout_s=60.0)
    scene.tick()
    assert finish(scene.tick(after=60.0)) is None
    ended = finish(scene.tick(after=1.0))
    assert ended is not None
    assert (ended.ok, ended.finished) == (False, False)
    assert ended.reason == (
        "no learner for 61 s (run.learner_timeout_s = 60); start it with: echo2 learner --resume"
    )


def test_a_run_whose_learner_is_silent_ends_too_counted_from_its_last_word() -> None:
    scene = a_running_scene(learner_timeout_s=60.0, tasks=0)
    assert finish(scene.tick(after=20.0)) is None
    assert finish(scene.tick(after=40.0)) is None
    assert finish(scene.tick(after=0.1)) is not None


def test_a_learner_that_left_in_peace_is_waited_for_as_long() -> None:
    scene = a_running_scene(learner_timeout_s=60.0, tasks=0)
    scene.now = 100.0
    scene.learner_leaves()
    assert finish(scene.tick(after=60.0)) is None
    assert finish(scene.tick(after=0.1)) is not None


# ------------------------------------------------------------------- no progress at all


def test_a_run_without_a_worker_that_could_sample_ends_with_the_cause() -> None:
    scene = a_running_scene(workers=(), no_worker_timeout_s=10.0)
    scene.wants_batch()
    scene.tick(after=1.0)
    assert finish(scene.tick(after=10.0)) is None
    ended = finish(scene.tick(after=0.1))
    assert ended is not None
    assert not ended.ok
    assert ended.reason == (
        "no worker could sample for 10 s (run.no_worker_timeout_s) while step 0 waits for "
        "groups: 0 of 2 admissible; 0 in flight at 0 workers; no ready worker has a free slot"
    )


def test_a_worker_that_comes_in_time_saves_the_run() -> None:
    scene = a_running_scene(workers=(), no_worker_timeout_s=10.0)
    scene.wants_batch()
    scene.tick(after=1.0)
    scene.worker_joins("w-1")
    scene.installs("w-1", V0)
    scene.tick(after=1.0)
    assert scene.state.no_worker_since is None


def test_an_eval_that_nobody_can_run_ends_the_run_too() -> None:
    scene = a_running_scene(workers=(), no_worker_timeout_s=5.0, tasks=0)
    scene.evaluates(V0)
    scene.tick(after=1.0)
    assert finish(scene.tick(after=5.1)) is not None


def test_a_run_that_nobody_waits_for_does_not_end() -> None:
    scene = a_running_scene(workers=(), no_worker_timeout_s=1.0)
    scene.tick(after=1.0)
    assert finish(scene.tick(after=10.0)) is None


def test_a_run_whose_groups_all_fail_ends() -> None:
    scene = a_running_scene(slots=1, attempts_max=1, tasks=0)
    effects: list = []
    for number in range(FAILED_IN_ROW_MIN):
        assert finish(scene.tick()) is None, number
        if not scene.leases():
            scene.submits()
        effects = scene.fails(scene.leases()[0])
    assert finish(effects) is None
    ended = finish(scene.tick())
    assert ended is not None
    assert not ended.ok
    assert ended.reason == "32 groups failed one after the other; see reason in events.jsonl"


def test_one_good_group_forgives_the_failed_ones() -> None:
    scene = a_running_scene(slots=1, attempts_max=1)
    scene.fails(scene.leases()[0])
    assert scene.state.failed_in_row == 1
    scene.delivers(scene.leases()[0])
    assert scene.state.failed_in_row == 0


# -------------------------------------------------------------------------- being told


def test_the_learner_is_told_what_it_waits_for_on_change_once_a_second() -> None:
    scene = a_running_scene(slots=2)
    scene.wants_batch()
    scene.now = 1.0
    (told,) = sent(scene.tick(), BatchWaiting)
    assert (told.step, told.text) == (
        0,
        "step 0 waits for groups: 0 of 2 admissible; 2 in flight at 1 workers; "
        "slowest lease 1 s on w-1",
    )
    assert not sent(scene.tick(), BatchWaiting), "nothing changed"
    scene.delivers(scene.leases()[0])
    scene.tick(after=0.5)
    assert not sent(scene.tick(), BatchWaiting), "so soon"
    (told,) = sent(scene.tick(after=0.5), BatchWaiting)
    assert "1 of 2 admissible" in told.text


def test_a_learner_that_waits_for_nothing_is_told_nothing() -> None:
    scene = a_running_scene(slots=2)
    assert not sent(scene.tick(after=2.0), BatchWaiting)


# ------------------------------------------------------------------------------ the end


def test_the_operator_stops_the_coordinator_but_not_the_run() -> None:
    scene = a_running_scene(slots=2)
    effects = scene.operator_stops("interrupt")
    assert {e.peer for e in effects if isinstance(e, Send) and isinstance(e.message, Shutdown)} == {
        "w-1",
        LEARNER,
    }
    assert [m.finished for m in sent(effects, Shutdown)] == [False, False]
    assert not emitted(effects, "group_ended"), "they may be resumed"
    assert emitted(effects, "run_finished") == [{"reason": "interrupt", "finished": False}]
    ended = finish(effects)
    assert ended is not None
    assert (ended.ok, ended.finished) == (True, False)


def test_after_its_end_a_coordinator_does_nothing_more() -> None:
    scene = a_running_scene(slots=2)
    scene.operator_stops()
    assert scene.delivers(scene.leases()[0]) == []
    assert scene.tick(after=100.0) == []
    assert scene.operator_stops() == []


def test_evals_under_way_end_with_the_run() -> None:
    scene = a_running_scene(tasks=0)
    scene.evaluates(V0)
    (ended,) = emitted(scene.learner_leaves(finished=True), "eval_ended")
    assert ended["reason"] == "1 of 1 not done: the run is over"


def test_a_restored_run_that_finishes_ends_what_an_earlier_coordinator_had_begun() -> None:
    scene = Scene(a_restored_run())
    scene.learner_joins(3)
    scene.submits(1)
    effects = scene.learner_leaves(finished=True)
    assert sorted(e["group_id"] for e in emitted(effects, "group_ended")) == ["g6", "g7"]


def test_an_illegal_first_event_still_opens_the_run_once() -> None:
    scene = Scene()
    with pytest.raises(RemoteProtocolError):
        scene.beats("w-1")
    assert len(emitted(scene.tick(), "run_started")) == 1


def test_a_whole_run_of_three_steps() -> None:
    scene = Scene(tasks_ahead=3)
    scene.learner_joins()
    scene.publishes(0)
    scene.worker_joins("w-1", slots=2)
    scene.installs("w-1", V0)
    scene.submits(6, exhausted=True)
    steps = []
    for step in range(3):
        effects = scene.wants_batch()
        while not sent(effects, BatchGranted):
            effects = scene.delivers(scene.leases()[0])
        (granted,) = sent(effects, BatchGranted)
        steps.append((granted.step, len(granted.groups), granted.last))
        scene.completes()
        scene.publishes(step + 1)
        scene.installs("w-1", a_version(step + 1))
    assert steps == [(0, 2, False), (1, 2, False), (2, 2, True)]
    assert scene.state.ends == {"trained": 6}
