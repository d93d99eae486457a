"""Who gets the next group, and the sentence that says why nobody does."""

from __future__ import annotations

import pytest
from core_builders import (
    LEARNER,
    Scene,
    a_running_scene,
    a_version,
    sent,
)

from echo2.core.dispatch import (
    PACE_AGE_S,
    PROBE_LATENCIES,
    TASKS_PATIENCE_S,
    lease_seed,
)
from echo2.core.membership import Worker
from echo2.core.worker_desk import REST_S
from echo2.messages import BatchGranted, Draining, LeaseGranted, TasksWanted
from echo2.types import PeerId, Sampling

V0, V1 = a_version(0), a_version(1)


def measured(scene: Scene, *, step_s: float) -> None:
    """The learner's own step takes `step_s`."""
    scene.state.busy_s.add(step_s)


def the_worker(scene: Scene, name: str = "w-1", *, latency_s: float | None = None) -> Worker:
    worker: Worker = scene.state.members.get(PeerId(name))
    if latency_s is not None:
        worker.latency_s.add(latency_s)
    return worker


# ------------------------------------------------------------------------------- leases


def test_a_lease_says_everything_that_a_worker_needs() -> None:
    sampling = Sampling(temperature=0.7, max_tokens=8)
    scene = a_running_scene(slots=1, group_size=4, sampling=sampling, life="b", seed=3)
    (granted,) = scene.grants.values()
    assert (granted.lease, granted.group, granted.attempt, granted.kind) == (
        "lb.1",
        "g0",
        1,
        "train",
    )
    assert (granted.version, granted.group_size, granted.sampling) == (V0, 4, sampling)
    assert granted.seed == lease_seed(3, 0, 1)
    assert (granted.revoke_after_s, granted.hold_s) == (3600.0, 0.0)


def test_seeds_differ_between_tasks_and_attempts_and_repeat_in_the_same_run() -> None:
    seeds = {lease_seed(1, task, attempt) for task in range(20) for attempt in range(5)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert lease_seed(1, 3, 2) == lease_seed(1, 3, 2) != lease_seed(2, 3, 2)


def test_a_worker_never_gets_more_than_its_slots() -> None:
    scene = a_running_scene(slots=1, groups_per_step=4)
    assert len(scene.leases("w-1")) == 1
    assert scene.reason() == "no ready worker has a free slot"
    scene.delivers(scene.leases()[0])
    assert len(scene.leases("w-1")) == 1


def test_groups_go_round_the_workers_one_by_one() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=4, tasks=0)
    scene.submits(4)
    assert len(scene.leases("w-1")) == len(scene.leases("w-2")) == 2


def test_nothing_is_granted_before_a_version_is_published() -> None:
    scene = Scene()
    scene.learner_joins()
    scene.worker_joins("w-1")
    scene.submits()
    assert scene.leases() == []
    assert scene.reason() == "no version is published yet"


def test_nothing_is_granted_without_tasks() -> None:
    scene = a_running_scene(tasks=0)
    assert scene.reason() == "no task is ready"


def test_a_silent_worker_gets_nothing() -> None:
    scene = a_running_scene(slots=1, tasks=0)
    scene.passes(6.0)
    assert the_worker(scene).state_name == "suspect"
    scene.submits(1)
    assert scene.leases() == []
    scene.beats("w-1")
    scene.tick()
    assert len(scene.leases()) == 1


def test_a_lost_group_goes_to_another_worker_first() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=2, tasks=0)
    scene.submits(1)
    lease = scene.lease_of("g0")
    owner = scene.grantee[lease]
    scene.fails(lease)
    assert scene.grantee[scene.lease_of("g0")] != owner


def test_a_lost_group_goes_back_to_the_same_worker_when_there_is_no_other() -> None:
    scene = a_running_scene(slots=2, tasks=1)
    scene.fails(scene.lease_of("g0"))
    assert scene.grantee[scene.lease_of("g0")] == "w-1"
    assert scene.grants[scene.lease_of("g0")].attempt == 2


def test_a_worker_that_lost_a_group_takes_the_next_one_instead() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=1, tasks=0, groups_per_step=3)
    scene.submits(4)
    lease = scene.lease_of("g0")
    owner = scene.grantee[lease]
    other = PeerId("w-2" if owner == "w-1" else "w-1")
    scene.state.members.get(other).slots = 2
    scene.state.members.get(other).rests_until = 0.0
    scene.fails(lease)
    assert scene.grantee[scene.lease_of("g0")] == other
    assert len(scene.leases(owner)) == 1


def test_a_worker_that_cannot_take_an_eval_now_is_not_asked_again_at_once() -> None:
    scene = a_running_scene(slots=2, tasks=0)
    scene.evaluates(V0)
    (refused,) = scene.state.evals.lease_eval
    assert not sent(scene.fails(refused, stage="lost"), LeaseGranted)
    assert not sent(scene.tick(REST_S / 2), LeaseGranted)
    assert [m.kind for m in sent(scene.tick(REST_S), LeaseGranted)] == ["eval"]


# ------------------------------------------------------------------------------- pacing


def test_with_no_staleness_one_batch_is_leased_and_no_more() -> None:
    scene = a_running_scene(slots=8, staleness_max=0)
    assert len(scene.leases()) == 2
    scene.tick()
    assert scene.reason() == "2 groups are held, 2 is far enough ahead"


def test_with_staleness_the_batches_until_expiry_are_filled() -> None:
    scene = a_running_scene(slots=8, staleness_max=2)
    assert len(scene.leases()) == 6
    scene.tick()
    assert scene.reason() == "6 groups are held, 6 is far enough ahead"


def test_pacing_names_its_reason() -> None:
    scene = a_running_scene(slots=4, groups_per_step=1, staleness_max=1, tasks=3)
    scene.delivers(scene.leases()[0])
    scene.wants_batch()
    assert scene.state.book.num_held == 1
    assert scene.reason() == ("2 groups would expire by version 1, and the batches 1 to 1 train 1")


def test_the_place_of_a_lease_is_given_to_another_only_when_its_result_is_durable() -> None:
    """A coordinator that is killed before brings the lease back."""
    scene = a_running_scene(slots=3, groups_per_step=1, staleness_max=2, tasks=3)
    scene.delivers(scene.leases()[0])
    scene.trains()
    scene.publishes(1)
    scene.worker_joins("w-2", slots=1)
    scene.installs("w-2", V0)
    scene.installs("w-1", V1)
    lease, other = scene.leases("w-1")
    scene.receive("w-1", Draining(reason="leaves"))
    scene.tick(1.0)  # nobody waits for w-2's install any more
    scene.submits(1)
    assert scene.reason() == "3 groups would expire by version 2, and the batches 1 to 2 train 2"
    scene.delivers(lease, V1, durable=False)
    assert scene.leases() == [other]
    scene.becomes_durable()
    assert len(scene.leases("w-2")) == 1


def test_a_version_whose_groups_would_come_too_late_gets_no_lease() -> None:
    scene = a_running_scene(slots=4, staleness_max=0, groups_per_step=1, tasks=3)
    scene.delivers(scene.leases()[0])
    scene.trains()
    assert scene.leases() == []
    assert scene.reason() == "expiry 0 is before the next batch, trained at 1"


def test_an_older_version_gets_no_lease_when_only_newer_ones_fit() -> None:
    scene = a_running_scene(
        workers=("w-1", "w-2"), slots=4, staleness_max=1, groups_per_step=1, tasks=1
    )
    scene.delivers(scene.leases()[0])
    scene.trains()
    scene.state.step = 2
    scene.publishes(2)
    scene.installs("w-2", a_version(2))
    scene.submits(2)
    assert scene.leases("w-1") == []
    assert len(scene.leases("w-2")) == 2


# -------------------------------------------------------------------------------- lead


def test_the_lead_is_capped_by_the_staleness() -> None:
    scene = a_running_scene(staleness_max=3, lead_steps=100.0)
    assert scene.coordinator.dispatcher.target == 8


def test_a_configured_lead_holds_so_many_batches_ahead() -> None:
    scene = a_running_scene(slots=8, staleness_max=3, lead_steps=0.5, groups_per_step=4)
    assert scene.coordinator.dispatcher.target == 6
    assert len(scene.leases()) == 6


def test_without_measurements_the_automatic_lead_is_none() -> None:
    scene = a_running_scene(slots=8, staleness_max=3, lead_steps=None)
    assert scene.coordinator.dispatcher.lead_steps_auto == 0.0
    assert scene.coordinator.dispatcher.target == 2


def test_the_automatic_lead_hides_latency_and_install() -> None:
    scene = a_running_scene(slots=8, staleness_max=3, lead_steps=None, tasks=0)
    measured(scene, step_s=2.0)
    the_worker(scene, latency_s=3.5)
    # pool: 2 groups per step at 8 / 3.5 groups/s is faster than the learner's 2 s
    assert scene.coordinator.dispatcher.lead_steps_auto == pytest.approx((3.5 + 0.5) / 2.0)
    assert scene.coordinator.dispatcher.target == 6


def test_the_step_time_is_the_pools_when_the_pool_is_slower() -> None:
    scene = a_running_scene(slots=1, staleness_max=3, lead_steps=None, tasks=0)
    measured(scene, step_s=0.1)
    the_worker(scene, latency_s=5.0)
    assert scene.coordinator.dispatcher.lead_steps_auto == pytest.approx(5.5 / 10.0)


def test_measurements_are_looked_at_again_after_a_while_only() -> None:
    scene = a_running_scene(slots=1, staleness_max=3, lead_steps=None, tasks=0)
    measured(scene, step_s=2.0)
    dispatcher = scene.coordinator.dispatcher
    before = dispatcher.lead_steps_auto
    the_worker(scene, latency_s=5.0)
    assert dispatcher.lead_steps_auto == before == 0.0
    scene.tick(after=PACE_AGE_S)
    assert dispatcher.lead_steps_auto > before


def test_workers_of_a_dead_or_expired_version_do_not_count_for_the_lead() -> None:
    scene = a_running_scene(slots=1, staleness_max=0, lead_steps=None, tasks=0)
    measured(scene, step_s=2.0)
    the_worker(scene, latency_s=5.0)
    scene.state.step = 1
    scene.tick(after=1.0)
    assert scene.coordinator.dispatcher.lead_steps_auto == 0.0


# ------------------------------------------------------------------ fresh and slow ones


def test_the_newest_version_comes_first() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=1, staleness_max=2, tasks=0)
    scene.state.step = 1
    scene.publishes(1)
    scene.installs("w-2", V1)
    scene.tick(after=1.0)
    scene.submits(1)
    assert scene.grantee[scene.lease_of("g0")] == "w-2"


def test_the_faster_of_two_workers_comes_first() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=1, tasks=0)
    the_worker(scene, "w-1", latency_s=2.0)
    the_worker(scene, "w-2", latency_s=1.0)
    scene.submits(1)
    assert scene.grantee[scene.lease_of("g0")] == "w-2"


def about_to_install(
    *,
    usual_s: float = 1.0,
    step_s: float = 10.0,
    latency_s: float = 2.0,
    staleness_max: int = 3,
    asks: bool = False,
    groups_per_step: int = 1,
) -> Scene:
    """One worker with one free slot under version 0, while version 1 is on its way; the learner
    trains version 1's first batch, or `asks` for it."""
    scene = a_running_scene(
        slots=1, staleness_max=staleness_max, groups_per_step=groups_per_step, tasks=0
    )
    measured(scene, step_s=step_s)
    the_worker(scene, latency_s=latency_s)
    scene.state.bcast_s.add(usual_s)
    scene.state.step = 1
    scene.state.seat.wanted_step = 1 if asks else None
    scene.publishes(1)
    scene.tick(after=PACE_AGE_S)
    scene.submits(1)
    return scene


def test_a_worker_that_is_about_to_install_is_given_a_moment() -> None:
    scene = about_to_install(usual_s=2.0)
    assert scene.leases() == []
    scene.tick(after=2.4)
    assert scene.leases() == [], "so long it may take"
    scene.tick(after=0.2)
    assert len(scene.leases()) == 1


def test_the_moment_ends_with_the_installation() -> None:
    scene = about_to_install(usual_s=2.0)
    scene.installs("w-1", V1)
    assert scene.grants[scene.leases()[0]].version == V1


def test_an_install_that_takes_long_is_not_waited_for() -> None:
    scene = about_to_install(usual_s=6.0)
    assert len(scene.leases()) == 1


def test_a_pool_without_time_to_spare_waits_for_no_install() -> None:
    scene = about_to_install(usual_s=2.0, latency_s=9.9)
    assert len(scene.leases()) == 1, "a group of 9.9 s each 10 s: nothing may be missed"


def test_a_learner_that_waits_is_not_kept_waiting_for_an_install() -> None:
    scene = about_to_install(usual_s=2.0, asks=True)
    assert len(scene.leases()) == 1


def test_a_group_that_could_outlast_its_expiry_waits_for_the_install() -> None:
    # Under version 0 and S = 1 it would be trained at version 1 or never: the learner waits for it.
    scene = about_to_install(usual_s=2.0, latency_s=9.9, staleness_max=1, asks=True)
    assert scene.leases() == []
    scene.installs("w-1", V1)
    assert scene.grants[scene.leases()[0]].version == V1


def cap(scene: Scene, name: str = "w-1") -> int:
    return scene.coordinator.dispatcher._cap(the_worker(scene, name))


def test_a_worker_that_finishes_before_expiry_may_fill_its_slots() -> None:
    scene = a_running_scene(slots=4, staleness_max=1, tasks=0)
    measured(scene, step_s=10.0)
    the_worker(scene, latency_s=20.0)
    scene.tick(after=0.5)
    assert cap(scene) == 4


def test_a_worker_that_misses_expiry_gets_fewer_groups_at_once() -> None:
    scene = a_running_scene(slots=4, staleness_max=1, groups_per_step=1, tasks=0)
    measured(scene, step_s=10.0)
    the_worker(scene, latency_s=40.0)
    scene.tick(after=0.5)
    assert cap(scene) == 2
    scene.submits()
    assert len(scene.leases()) == 2


def test_a_worker_that_misses_expiry_gets_at_least_one_group() -> None:
    scene = a_running_scene(
        workers=("w-1", "w-2"), slots=1, staleness_max=1, groups_per_step=1, tasks=0
    )
    measured(scene, step_s=0.1)
    the_worker(scene, "w-1", latency_s=4.0)
    the_worker(scene, "w-2", latency_s=1.0)
    scene.tick(after=0.5)
    assert cap(scene) == 1


def test_a_worker_without_measurements_may_fill_its_slots() -> None:
    scene = a_running_scene(slots=4, tasks=0)
    measured(scene, step_s=0.001)
    assert cap(scene) == 4


def test_a_straggler_gets_only_a_probe_now_and_then() -> None:
    scene = a_running_scene(
        workers=("w-1", "w-2"), slots=4, staleness_max=1, groups_per_step=1, tasks=0
    )
    measured(scene, step_s=1.0)
    slow = the_worker(scene, "w-1", latency_s=5.0)
    the_worker(scene, "w-2", latency_s=1.0)
    slow.leased_at = scene.now
    scene.tick(after=0.5)
    assert cap(scene) == 0
    assert cap(scene, "w-2") == 4
    scene.now = PROBE_LATENCIES * 5.0
    scene.coordinator.state.now = scene.now
    assert cap(scene) == 0
    scene.coordinator.state.now = scene.now + 0.1
    assert cap(scene) == 1


def test_a_worker_not_so_much_slower_than_the_fastest_is_no_straggler() -> None:
    scene = a_running_scene(
        workers=("w-1", "w-2"), slots=4, staleness_max=1, groups_per_step=1, tasks=0
    )
    measured(scene, step_s=1.0)
    the_worker(scene, "w-1", latency_s=4.0)
    the_worker(scene, "w-2", latency_s=1.0)
    scene.tick(after=0.5)
    assert cap(scene) == 2


def test_the_cap_of_a_lease_comes_from_the_slowest_rate_that_was_measured() -> None:
    scene = a_running_scene(slots=1, stall_s=1.0, tasks=0)
    the_worker(scene).slowest_rate = 4.0
    scene.submits(1)
    assert scene.grants["l.1"].revoke_after_s == 4.0


def test_the_cap_of_a_lease_stays_between_the_stall_and_the_longest_allowed() -> None:
    for rate, cap_s in ((1000.0, 60.0), (0.001, 3600.0)):
        scene = a_running_scene(slots=1, tasks=0)
        the_worker(scene).slowest_rate = rate
        scene.submits(1)
        assert scene.grants["l.1"].revoke_after_s == cap_s


# -------------------------------------------------------------------------------- tasks


def test_tasks_are_asked_for_so_many_batches_ahead() -> None:
    scene = Scene(tasks_ahead=3, groups_per_step=5)
    (wanted,) = sent(scene.learner_joins(), TasksWanted, to=LEARNER)
    assert (wanted.incarnation, wanted.start, wanted.count) == (1, 0, 15)
    effects = scene.submits(10)
    assert [(w.start, w.count) for w in sent(effects, TasksWanted)] == [(10, 5)]
    assert not sent(scene.submits(5), TasksWanted)


def test_tasks_are_not_asked_for_beyond_the_bound_on_their_bytes() -> None:
    scene = Scene(tasks_ahead=4, tasks_bytes_max=10)
    scene.learner_joins()
    assert not sent(scene.submits(2, payload="12345"), TasksWanted)
    scene = Scene(tasks_ahead=4, tasks_bytes_max=11)
    scene.learner_joins()
    assert sent(scene.submits(2, payload="12345"), TasksWanted)


def test_tasks_that_do_not_come_are_asked_for_again() -> None:
    scene = Scene()
    scene.learner_joins()
    assert not sent(scene.tick(after=TASKS_PATIENCE_S), TasksWanted)
    scene.learner_beats()
    (wanted,) = sent(scene.tick(after=0.1), TasksWanted)
    assert (wanted.start, wanted.count) == (0, 8)


def test_a_silent_learner_is_not_asked_for_tasks() -> None:
    scene = Scene()
    scene.learner_joins()
    assert not sent(scene.tick(after=20.0), TasksWanted)
    assert scene.state.seat.silent


# -------------------------------------------------------------------------------- evals


def test_evals_go_first_and_take_free_slots_only() -> None:
    scene = a_running_scene(slots=3, tasks=0)
    scene.evaluates(V0, tasks=5, group_size=2)
    assert scene.state.evals.num_leases(PeerId("w-1")) == 3
    scene.submits(2)
    assert scene.leases() == []
    granted = scene.grants["l.1"]
    assert (granted.kind, granted.group, granted.group_size) == ("eval", "ee-0", 2)
    assert (granted.version, granted.hold_s, granted.attempt) == (V0, 30.0, 1)
    assert granted.sampling.temperature == 0.0


def test_an_eval_is_pinned_to_workers_that_serve_its_version() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=2, tasks=0, staleness_max=2)
    scene.state.step = 1
    scene.publishes(1)
    scene.installs("w-2", V1)
    effects = scene.evaluates(V1, tasks=3)
    granted = sent(effects, LeaseGranted)
    assert len(granted) == 2
    assert {scene.grantee[g.lease] for g in granted} == {PeerId("w-2")}
    effects = scene.installs("w-1", V1)
    assert len(sent(effects, LeaseGranted, to="w-1")) == 1


def test_an_eval_attempt_counts_from_one() -> None:
    scene = a_running_scene(slots=1, tasks=0)
    scene.evaluates(V0)
    effects = scene.fails("l.1")
    assert [g.attempt for g in sent(effects, LeaseGranted)] == [2]


def test_an_eval_whose_tasks_are_all_out_leaves_the_slots_to_training() -> None:
    scene = a_running_scene(slots=3, tasks=0)
    scene.evaluates(V0, tasks=1)
    scene.submits(4)
    assert len(scene.leases()) == 2


# ------------------------------------------------------------------------- can progress


def test_a_run_can_progress_while_something_is_out_or_a_worker_is_of_use() -> None:
    scene = Scene(staleness_max=0)
    scene.learner_joins()
    scene.publishes(0)
    dispatcher = scene.coordinator.dispatcher
    assert not dispatcher.can_progress
    scene.worker_joins("w-1")
    assert not dispatcher.can_progress
    scene.installs("w-1", V0)
    assert dispatcher.can_progress
    scene.submits()
    scene.state.step = 1
    assert dispatcher.can_progress, "leases are out"


def test_a_worker_whose_version_can_not_be_trained_any_more_is_of_no_use() -> None:
    scene = a_running_scene(staleness_max=0, tasks=0)
    assert scene.coordinator.dispatcher.is_usable(V0)
    scene.state.step = 1
    assert not scene.coordinator.dispatcher.is_usable(V0)
    assert not scene.coordinator.dispatcher.can_progress


def test_an_eval_under_way_is_progress() -> None:
    scene = a_running_scene(staleness_max=0, tasks=0)
    scene.evaluates(V0)
    scene.state.step = 1
    assert scene.coordinator.dispatcher.can_progress


def test_a_dead_version_is_of_no_use() -> None:
    scene = a_running_scene(staleness_max=4, tasks=0)
    scene.state.step = 1
    scene.publishes(1)
    scene.learner_joins(0, hello_id="b")
    assert not scene.coordinator.dispatcher.is_usable(V1)
    assert scene.coordinator.dispatcher.is_usable(V0)


def test_when_the_budget_is_spent_nothing_more_is_granted() -> None:
    scene = a_running_scene(slots=4, tasks=0, budget_usd=1.0, learner_usd_per_h=3600.0)
    scene.tick(after=1.0)
    effects = scene.submits()
    assert not sent(effects, LeaseGranted)
    assert not sent(effects, TasksWanted)
    assert sent(scene.wants_batch(), BatchGranted)[0].last
