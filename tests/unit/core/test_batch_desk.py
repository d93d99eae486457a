"""What the learner trains on: tasks in, batches out, completed steps."""

from __future__ import annotations

import pytest
from core_builders import (
    LEARNER,
    Scene,
    a_granted_batch,
    a_running_scene,
    a_task,
    a_version,
    delivered,
    emitted,
    records,
    sent,
)

from echo2.core.effects import DeliverGroup
from echo2.core.group import GroupState
from echo2.core.records import StepRecorded
from echo2.messages import (
    BatchGranted,
    Goodbye,
    LeaseRevoked,
    StepAcknowledged,
    TasksSubmitted,
)
from echo2.types import GroupId, GroupMismatch

V0, V1, V2 = a_version(0), a_version(1), a_version(2)


# -------------------------------------------------------------------------------- tasks


def test_tasks_become_groups_in_the_order_of_their_index() -> None:
    scene = Scene()
    scene.learner_joins()
    scene.submits(3, payload="abc")
    assert list(scene.state.book.queue) == ["g0", "g1", "g2"]
    assert scene.state.book.queue_bytes == 9


def test_tasks_that_nobody_asked_for_are_ignored() -> None:
    scene = Scene()
    scene.learner_joins()
    scene.receive(LEARNER, TasksSubmitted(incarnation=1, start=5, tasks=(a_task(5),)))
    assert not scene.state.book.groups


def test_tasks_with_a_gap_are_refused() -> None:
    scene = Scene()
    scene.learner_joins()
    with scene.refuses("wrong_tasks", r"numbered from 0 on without a gap, got \[0, 2\]"):
        scene.receive(LEARNER, TasksSubmitted(incarnation=1, start=0, tasks=(a_task(0), a_task(2))))


# ------------------------------------------------------------------------------ batches


def test_a_batch_is_granted_with_its_groups_and_the_numbers_of_the_run() -> None:
    scene = a_running_scene(slots=4)
    for lease in scene.leases():
        scene.delivers(lease)
    effects = scene.wants_batch()
    (granted,) = sent(effects, BatchGranted)
    assert (granted.step, granted.loss_from_step, granted.last) == (0, 0, False)
    assert granted.groups == ("g0", "g1")
    assert (granted.workers_ready, granted.groups_buffered) == (1, 2)
    assert delivered(effects) == ["g0", "g1"]
    assert scene.state_of("g0") is GroupState.TRAINING
    assert scene.state.next_step == 1


def test_a_batch_is_granted_as_soon_as_its_last_group_is_durable() -> None:
    scene = a_running_scene(slots=2)
    assert not sent(scene.wants_batch(), BatchGranted)
    scene.delivers(scene.leases()[0])
    scene.delivers(scene.lease_of("g1"), durable=False)
    assert scene.state.seat.batch is None
    assert sent(scene.becomes_durable(), BatchGranted)


def test_a_batch_that_is_asked_for_again_is_delivered_again() -> None:
    scene = a_running_scene(slots=4)
    for lease in scene.leases():
        scene.delivers(lease)
    scene.wants_batch()
    effects = scene.wants_batch()
    assert delivered(effects) == ["g0", "g1"]
    assert [e.result.lease for e in effects if isinstance(e, DeliverGroup)] == ["l.1", "l.2"]


@pytest.mark.parametrize("step", [1, 7])
def test_a_batch_of_another_step_is_refused(step: int) -> None:
    scene = a_running_scene()
    with scene.refuses("wrong_step", f"a batch was asked for version {step}, v is 0"):
        scene.wants_batch(step)


def test_a_batch_may_not_be_asked_for_while_its_step_becomes_durable() -> None:
    scene = a_running_scene(slots=4)
    for lease in scene.leases():
        scene.delivers(lease)
    scene.wants_batch()
    scene.completes(durable=False)
    with scene.refuses("wrong_order", "the step at version 0 is being completed"):
        scene.wants_batch()


def test_a_batch_takes_the_earliest_expiry_first() -> None:
    scene = a_running_scene(slots=4, groups_per_step=1, staleness_max=2)
    first, second, _ = scene.leases()
    scene.delivers(first)
    scene.trains()
    scene.publishes(1)
    scene.installs("w-1", V1)
    fresh = next(lease for lease in scene.leases() if scene.grants[lease].version == V1)
    scene.delivers(fresh)
    scene.delivers(second)
    (granted,) = sent(scene.wants_batch(), BatchGranted)
    assert granted.groups == (scene.grants[second].group,)


def test_a_batch_waits_while_a_group_is_out_that_expires_with_it() -> None:
    scene = a_running_scene(slots=2, groups_per_step=1, staleness_max=0, tasks=4)
    (lease,) = scene.leases()
    assert not sent(scene.wants_batch(), BatchGranted)
    assert sent(scene.delivers(lease), BatchGranted)


def test_the_hold_ends_when_the_worker_of_the_late_group_is_gone() -> None:
    scene = a_running_scene(
        workers=("w-1", "w-2"), slots=1, groups_per_step=1, staleness_max=1, tasks=2
    )
    scene.delivers(scene.lease_of("g1"))
    scene.trains()
    scene.publishes(1)
    slow = scene.lease_of("g0")
    scene.installs("w-2", V1)
    scene.submits(1)
    scene.delivers(scene.lease_of("g2"))
    assert not sent(scene.wants_batch(), BatchGranted), "g0 expires at version 1"
    effects = scene.receive(scene.grantee[slow], Goodbye(reason="x"))
    (granted,) = sent(effects, BatchGranted)
    assert granted.groups == ("g2",)


def test_with_drop_a_batch_does_not_wait_and_the_late_group_expires() -> None:
    scene = a_running_scene(
        workers=("w-1", "w-2"), slots=1, groups_per_step=1, staleness_max=1, tasks=2, late="drop"
    )
    scene.delivers(scene.lease_of("g1"))
    scene.trains()
    scene.publishes(1)
    slow = scene.lease_of("g0")
    scene.installs("w-2", V1)
    scene.submits(1)
    scene.delivers(scene.lease_of("g2"))
    effects = scene.wants_batch()
    assert [g.groups for g in sent(effects, BatchGranted)] == [("g2",)]
    (ended,) = emitted(effects, "group_ended")
    assert (ended["group_id"], ended["end"]) == ("g0", "expired")
    assert ended["reason"] == (
        "sampled by version 0, window is [1, 2]; raise staleness.max or add workers"
    )
    assert [m.lease for m in sent(effects, LeaseRevoked)] == [slow]


def test_with_mask_a_group_is_trained_while_enough_of_its_tokens_are_inside() -> None:
    scene = a_running_scene(
        slots=1, groups_per_step=1, staleness_max=1, late="mask", mask_min_tokens=2
    )
    (lease,) = scene.leases()
    for step in (1, 2):
        scene.state.step = step
        scene.publishes(step)
    scene.delivers(lease, V0, V1, V2)
    effects = scene.trains()
    (granted,) = sent(effects, BatchGranted)
    assert (granted.groups, granted.loss_from_step) == (("g0",), 1)
    (ended,) = emitted(effects, "group_ended")
    assert (ended["min_version"], ended["max_version"], ended["trained_at"]) == (1, 2, 2)
    assert ended["tokens"] == 6


def test_with_mask_a_buffered_group_expires_when_too_few_tokens_are_left_inside() -> None:
    scene = a_running_scene(
        slots=2, groups_per_step=1, staleness_max=1, late="mask", mask_min_tokens=2
    )
    first, second = scene.leases()
    for step in (1, 2):
        scene.state.step = step
        scene.publishes(step)
    scene.delivers(first, V0, V1)
    scene.delivers(second, V0, V1)
    effects = scene.wants_batch()
    assert [g.groups for g in sent(effects, BatchGranted)] == [("g0",)]
    (ended,) = emitted(effects, "group_ended")
    assert (ended["group_id"], ended["end"], ended["trained_at"]) == ("g1", "expired", None)
    assert ended["reason"].startswith("sampled by version 0, window is [2, 3]")


def test_a_batch_without_enough_admissible_groups_waits() -> None:
    scene = a_running_scene(slots=4, groups_per_step=2, staleness_max=1, late="mask")
    for lease in scene.leases():
        scene.delivers(lease)
    scene.state.step = 2
    assert not sent(scene.wants_batch(), BatchGranted)
    assert scene.state.book.num_buffered == 4


# --------------------------------------------------------------------- the last batch


def the_last_groups(count: int, **changes) -> Scene:
    scene = a_running_scene(slots=4, tasks=0, **changes)
    scene.submits(count, exhausted=True)
    for lease in scene.leases():
        scene.delivers(lease)
    return scene


def test_the_last_full_batch_says_so() -> None:
    scene = the_last_groups(2)
    (granted,) = sent(scene.wants_batch(), BatchGranted)
    assert (granted.groups, granted.last) == (("g0", "g1"), True)


def test_a_full_batch_before_the_last_does_not_say_so() -> None:
    scene = the_last_groups(3)
    (granted,) = sent(scene.wants_batch(), BatchGranted)
    assert not granted.last


def test_a_partial_last_batch_is_trained() -> None:
    scene = the_last_groups(1)
    effects = scene.trains()
    (granted,) = sent(effects, BatchGranted)
    assert (granted.groups, granted.last) == (("g0",), True)
    assert scene.state.step == 1


def test_a_partial_last_batch_is_dropped_when_asked_for() -> None:
    scene = the_last_groups(1, partial_batch="drop")
    effects = scene.wants_batch()
    (granted,) = sent(effects, BatchGranted)
    assert (granted.groups, granted.last) == ((), True)
    (ended,) = emitted(effects, "group_ended")
    assert (ended["end"], ended["reason"]) == ("cancelled", "the last, partial batch is dropped")


def test_when_no_task_is_left_the_batch_is_empty_and_the_last() -> None:
    scene = the_last_groups(0)
    (granted,) = sent(scene.wants_batch(), BatchGranted)
    assert (granted.groups, granted.last) == ((), True)
    assert scene.state.next_step == 0, "an empty batch is not trained"
    with scene.refuses("wrong_order", "step 0 was completed without its batch, v is 0"):
        scene.completes()


def test_the_last_batch_waits_for_groups_that_are_still_out() -> None:
    scene = a_running_scene(slots=4, tasks=0)
    scene.submits(1, exhausted=True)
    assert not sent(scene.wants_batch(), BatchGranted)
    assert sent(scene.delivers(scene.leases()[0]), BatchGranted)


def test_when_the_budget_is_spent_an_empty_last_batch_ends_the_run() -> None:
    scene = a_running_scene(slots=4, budget_usd=1.0, learner_usd_per_h=3600.0)
    for lease in scene.leases():
        scene.delivers(lease)
    scene.tick(after=0.9)
    assert not scene.coordinator.learner.batches.is_over_budget
    scene.tick(after=0.1)
    effects = scene.wants_batch()
    (granted,) = sent(effects, BatchGranted)
    assert (granted.groups, granted.last, granted.cost_usd) == ((), True, pytest.approx(1.0))


# -------------------------------------------------------------------------------- steps


def test_v_advances_when_the_step_is_durable() -> None:
    scene = a_granted_batch()
    effects = scene.completes(durable=False)
    assert records(effects) == [StepRecorded(1, 0, ("g0", "g1"))]
    assert scene.state.step == 0
    scene.now = 2.0
    effects = scene.becomes_durable()
    assert [m.step for m in sent(effects, StepAcknowledged)] == [1]
    assert emitted(effects, "step_completed") == [{"incarnation": 1, "step": 0, "num_groups": 2}]
    assert [(e["end"], e["trained_at"]) for e in emitted(effects, "group_ended")] == [
        ("trained", 0),
        ("trained", 0),
    ]
    assert scene.state.busy_s.mean == 2.0


def test_a_completion_that_is_sent_again_is_acknowledged_again() -> None:
    scene = a_granted_batch()
    scene.completes(durable=False)
    assert scene.completes(0, durable=False) == [], "it becomes durable already"
    scene.becomes_durable()
    effects = scene.completes(0)
    assert [m.step for m in sent(effects, StepAcknowledged)] == [1]
    assert scene.state.step == 1


def test_a_completion_becomes_durable_though_the_learner_left() -> None:
    scene = a_granted_batch()
    scene.completes(durable=False)
    scene.learner_leaves(durable=False)
    effects = scene.becomes_durable()
    assert scene.state.step == 1
    assert not sent(effects, StepAcknowledged)


def test_a_batch_stays_with_a_learner_that_left_until_it_comes_back() -> None:
    scene = a_granted_batch()
    scene.learner_leaves()
    scene.learner_joins(incarnation=1)
    assert delivered(scene.wants_batch()) == ["g0", "g1"]


def test_a_completion_without_its_batch_is_refused() -> None:
    scene = a_granted_batch()
    with scene.refuses("wrong_order", "step 3 was completed without its batch, v is 0"):
        scene.completes(3)


def test_mismatch_is_noted_for_the_worker_that_sampled() -> None:
    scene = a_granted_batch()
    groups = [group.id for group in scene.state.seat.batch.groups]
    told = [GroupMismatch(groups[0], 10, 0.01), GroupMismatch(groups[1], 30, 0.03)]
    effects = scene.completes(mismatch=told)
    assert scene.state.members.get("w-1").mismatch == pytest.approx(0.025)
    assert emitted(effects, "step_completed")


def test_the_mismatch_of_other_groups_or_of_one_twice_is_refused() -> None:
    scene = a_granted_batch()
    group = scene.state.seat.batch.groups[0].id
    for wrong in ([GroupMismatch(GroupId("g99"), 1, 0.0)], [GroupMismatch(group, 1, 0.0)] * 2):
        with scene.refuses("wrong_batch", "must be groups of the batch, each once"):
            scene.completes(mismatch=wrong)


def test_a_completion_that_becomes_durable_after_a_takeover_changes_nothing() -> None:
    scene = a_granted_batch()
    scene.completes(durable=False)
    scene.learner_joins(0, hello_id="b", durable=False)
    effects = scene.becomes_durable()
    assert scene.state.step == 0
    assert not emitted(effects, "step_completed")
    assert scene.state_of("g0") is GroupState.BUFFERED
