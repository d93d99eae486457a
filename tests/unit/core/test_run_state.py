"""The operations that all desks share."""

from __future__ import annotations

from core_builders import (
    LEARNER,
    Scene,
    a_digest,
    a_restored_run,
    a_running_scene,
    a_stored_result,
    a_version,
    emitted,
    finish,
    sent,
)

from echo2.core import run_state
from echo2.core.group import GroupState
from echo2.core.run_state import RunState
from echo2.messages import LeaseGranted, LeaseRevoked, VersionAnnounced
from echo2.types import LeaseId

V0, V1, V2 = a_version(0), a_version(1), a_version(2)


def test_a_restored_state_goes_on_where_the_records_end() -> None:
    scene = Scene(a_restored_run())
    state: RunState = scene.state
    assert (state.step, state.lineage.incarnation, state.lineage.newest) == (3, 1, a_version(3))
    assert (state.stream.next_index, state.stream.again) == (8, [6, 7])
    assert (state.history.kept, state.history.complete_from) == ((1,), 1)
    assert state.ends["trained"] == 6
    assert not state.is_fresh


def test_a_restored_coordinator_announces_only_what_the_learner_publishes_again() -> None:
    scene = Scene(a_restored_run())
    assert not sent(scene.worker_joins("w-1"), VersionAnnounced)
    scene.learner_joins(incarnation=1)
    scene.publishes(3)
    assert [m.version for m in sent(scene.worker_joins("w-1"), VersionAnnounced)] == [a_version(3)]
    assert not sent(scene.tick(), VersionAnnounced)


def test_a_restored_coordinator_leases_with_names_of_its_own_life() -> None:
    scene = Scene(a_restored_run(), life="x7")
    scene.learner_joins(incarnation=1)
    scene.publishes(3)
    scene.worker_joins("w-1", installed=a_version(3))
    effects = scene.submits(2)
    assert [(g.lease, g.group) for g in sent(effects, LeaseGranted)] == [
        ("lx7.1", "g6"),
        ("lx7.2", "g7"),
    ]


# ------------------------------------------------------------------------ admissibility


def test_nothing_is_admissible_without_a_result() -> None:
    scene = a_running_scene()
    assert not scene.state.is_admissible(scene.group("g0"), 0)


def test_a_group_is_admissible_until_its_expiry_and_no_longer() -> None:
    scene = a_running_scene(staleness_max=1)
    group = scene.group("g0")
    group.result = a_stored_result(V0)
    assert scene.state.is_admissible(group, 1)
    assert not scene.state.is_admissible(group, 2)


def test_with_mask_a_group_is_admissible_with_enough_tokens_inside() -> None:
    scene = a_running_scene(staleness_max=1, late="mask", mask_min_tokens=2)
    group = scene.group("g0")
    group.result = a_stored_result(V0, V1)
    assert scene.state.is_admissible(group, 2)
    assert not scene.state.is_admissible(group, 3)


# --------------------------------------------------------------------------- lost leases


def test_a_lease_lost_without_blame_gives_its_attempt_back() -> None:
    scene = a_running_scene(slots=1, tasks=1, attempts_max=1)
    lease = scene.state.book.leases[LeaseId("l.1")]
    scene.state.lose_lease(lease, "expired", counted=False, tell=True)
    group = scene.group("g0")
    assert (group.state, group.attempts, group.avoid) == (GroupState.QUEUED, 0, None)
    effects = scene.tick()
    assert [m.lease for m in sent(effects, LeaseRevoked)] == ["l.1"]
    assert emitted(effects, "lease_revoked")[0]["reason"] == "expired"


def test_with_wait_a_lease_whose_expiry_has_passed_is_queued_again() -> None:
    scene = a_running_scene(slots=1, tasks=1, staleness_max=0)
    scene.state.step = 1
    scene.state.expire_late()
    assert scene.state_of("g0") is GroupState.QUEUED
    assert scene.group("g0").attempts == 0
    assert scene.group("g0").last_reason == (
        "sampled by version 0, window is [1, 1]; raise staleness.max or add workers"
    )


def test_a_lease_at_the_edge_of_its_expiry_stays() -> None:
    scene = a_running_scene(slots=1, tasks=1, staleness_max=1)
    scene.state.step = 1
    scene.state.expire_late()
    assert scene.state_of("g0") is GroupState.LEASED


def test_a_worker_that_is_gone_is_told_nothing() -> None:
    scene = a_running_scene(slots=1, tasks=1)
    lease = scene.state.book.leases[LeaseId("l.1")]
    del scene.state.members.workers["w-1"]
    scene.state.revoke_at_worker(lease, "x")
    assert not sent(scene.tick(), LeaseRevoked)


def test_only_so_many_settled_leases_are_remembered(monkeypatch) -> None:
    monkeypatch.setattr(run_state, "RECENT_LEASES_MAX", 2)
    scene = Scene()
    for name in ("a", "b", "c"):
        scene.state.note_settled(LeaseId(name))
    assert list(scene.state.recent_leases) == ["b", "c"]


def test_leases_and_eval_leases_are_live() -> None:
    scene = a_running_scene(slots=2, tasks=0)
    scene.evaluates(V0)
    scene.submits(1)
    assert scene.state.is_live(LeaseId("l.1"))
    assert scene.state.is_live(LeaseId("l.2"))
    assert not scene.state.is_live(LeaseId("l.3"))


# ----------------------------------------------------------------------------- versions


def test_versions_are_kept_for_the_window_and_for_evals() -> None:
    scene = a_running_scene(staleness_max=1, tasks=0, workers=())
    for step in (1, 2, 3):
        scene.state.step = step
        scene.publishes(step)
    assert scene.state.keep_from == 2
    scene.evaluates(V1)
    assert scene.state.keep_from == 1


def test_nothing_below_the_newest_version_is_dropped_at_the_origin_early() -> None:
    scene = a_running_scene(staleness_max=1, tasks=0)
    scene.state.step = 5
    assert scene.state.keep_from == 0


def test_without_any_version_the_window_alone_decides() -> None:
    scene = Scene(staleness_max=1)
    scene.learner_joins(5)
    assert scene.state.keep_from == 4


def test_old_versions_are_forgotten_unless_something_needs_them() -> None:
    scene = a_running_scene(staleness_max=0, slots=1, tasks=1, workers=("w-1",))
    for step in (1, 2, 3, 4):
        scene.state.step = step
        scene.publishes(step)
    state: RunState = scene.state
    state.history.kept = (4,)
    state.forget_versions()
    assert V0 in state.lineage.published, "a lease began under it"
    scene.fails(scene.leases()[0])
    while scene.leases():
        scene.state.book.end(scene.group("g0"))
    state.forget_versions()
    assert [v.step for v in state.lineage.published] == [3, 4]
    assert [v.step for v in state.announcements] == [3, 4]
    assert [v.step for v in state.published_at] == [3, 4]


def test_an_eval_keeps_its_version_known() -> None:
    scene = a_running_scene(staleness_max=0, tasks=0, workers=())
    scene.evaluates(V0)
    for step in (1, 2, 3, 4):
        scene.state.step = step
        scene.publishes(step)
    scene.state.history.kept = (4,)
    scene.state.forget_versions()
    assert V0 in scene.state.lineage.published


def test_with_mask_the_versions_of_buffered_groups_stay_known() -> None:
    scene = a_running_scene(staleness_max=0, late="mask", slots=1, tasks=1)
    scene.delivers(scene.leases()[0], V0)
    state: RunState = scene.state
    for step in (1, 2, 3, 4):
        state.step = step
        scene.publishes(step)
    state.history.kept = (4,)
    state.forget_versions()
    assert V0 in state.lineage.published


def test_peers_that_are_no_workers_may_be_told_of_a_version_too() -> None:
    scene = a_running_scene(tasks=0)
    scene.state.announce(V0, [LEARNER])
    assert sent(scene.tick(), VersionAnnounced, to=LEARNER)[0].manifest_digest == a_digest(V0)


# ------------------------------------------------------------------------------ the end


def test_a_run_ends_once() -> None:
    scene = a_running_scene()
    scene.operator_stops("first")
    scene.state.finish(ok=False, finished=True, reason="second")
    assert scene.state.finished.reason == "first"
    assert finish(scene.state.effects) is None


def test_tasks_that_nobody_began_do_not_end_with_the_run() -> None:
    scene = a_running_scene(slots=1, tasks=3)
    effects = scene.learner_leaves(finished=True)
    assert [e["group_id"] for e in emitted(effects, "group_ended")] == ["g0"]
