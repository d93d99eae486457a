"""What a coordinator that was started again does with what its ledger gave it."""

from __future__ import annotations

from typing import Any

from core_builders import (
    Scene,
    a_restored_run,
    a_stored_result,
    a_version,
    delivered,
    emitted,
    sent,
)

from echo2.core.events import KeyRevoked
from echo2.core.group import GroupState
from echo2.core.restored import Restored, RestoredGroup, RestoredLease
from echo2.messages import (
    BatchGranted,
    GroupAcknowledged,
    LeaseGranted,
    LeaseRevoked,
    Refused,
    StepAcknowledged,
    TasksWanted,
    WorkerWelcome,
)
from echo2.types import GroupId, LeaseId, PeerId, Task, Version

V3 = a_version(3)


def a_restored_group(
    index: int, *, trained_at: int | None = None, told: bool = True
) -> RestoredGroup:
    version = V3 if trained_at is None else a_version(trained_at - 1)
    result = a_stored_result(version, lease=f"l.{index}")
    return RestoredGroup(
        GroupId(f"g{index}"), Task(index, "{}"), result, 2, trained_at=trained_at, told=told
    )


def a_restored_lease(
    index: int = 6, *, version: Version = V3, attempt: int = 1, revoke_after_s: float = 500.0
) -> RestoredLease:
    return RestoredLease(
        LeaseId(f"l.{index}"),
        GroupId(f"g{index}"),
        PeerId("w-1"),
        version,
        attempt,
        revoke_after_s,
    )


def with_groups(*groups: RestoredGroup, **changes: Any) -> Restored:
    return a_restored_run(next_index=10, open_indexes=(6, 7, 8, 9), **changes).with_groups(groups)


def test_what_the_run_has_cost_is_not_forgotten_and_the_budget_stands() -> None:
    scene = Scene(a_restored_run(cost_usd=2.0), budget_usd=1.5)
    scene.learner_joins(incarnation=1)
    (granted,) = sent(scene.wants_batch(), BatchGranted)
    assert (granted.cost_usd, granted.groups, granted.last) == (2.0, (), True)


# -------------------------------------------------------------------------- the batch


def a_restart_in_training(**changes: Any) -> Scene:
    """g6, g7 and g8 wait; the learner trains some of them."""
    scene = Scene(with_groups(*map(a_restored_group, (6, 7, 8))), **changes)
    scene.learner_joins(incarnation=1)
    return scene


def test_a_step_whose_batch_an_earlier_coordinator_granted_is_completed() -> None:
    scene = a_restart_in_training()
    effects = scene.completes(groups=("g7", "g8"))
    assert [(e["group_id"], e["trained_at"]) for e in emitted(effects, "group_ended")] == [
        ("g7", 3),
        ("g8", 3),
    ]
    assert [m.step for m in sent(effects, StepAcknowledged)] == [4]
    assert scene.state_of("g6") is GroupState.BUFFERED


def test_what_the_learner_trained_counts_and_not_what_it_was_granted_since() -> None:
    """The last groups of the earlier batch came after it had asked again."""
    scene = a_restart_in_training()
    assert delivered(scene.wants_batch()) == ["g6", "g7"]
    effects = scene.completes(groups=("g7", "g8"))
    assert [e["group_id"] for e in emitted(effects, "group_ended")] == ["g7", "g8"]
    assert scene.state_of("g6") is GroupState.BUFFERED


def test_a_lease_that_has_no_place_after_that_batch_is_given_up_with_it() -> None:
    """Its result, by a newer version, came before the kill and is not in the ledger."""
    lease = a_restored_lease(9, version=a_version(2))
    restored = with_groups(*map(a_restored_group, (6, 7, 8)), leases=(lease,))
    scene = Scene(restored, staleness_max=1)
    scene.learner_joins(incarnation=1)
    assert lease.id in scene.state.book.leases
    effects = scene.completes(groups=("g7", "g8"), durable=False)
    (lost,) = emitted(effects, "lease_revoked")
    assert (lost["group_id"], lost["lease"]) == ("g9", lease.id)
    assert not scene.state.book.leases


def test_a_step_of_groups_that_are_not_here_asks_the_learner_to_resume() -> None:
    scene = a_restart_in_training()
    before = scene.snapshot()
    (refused,) = sent(scene.completes(groups=("g6", "g9")), Refused)
    assert (refused.reason, refused.fatal) == ("batch_lost", True)
    assert "the learner trained g9 at version 3, which the coordinator does not" in refused.text
    assert scene.snapshot() == before


def test_a_step_of_more_groups_than_a_batch_has_or_of_one_twice_is_not_believed() -> None:
    scene = a_restart_in_training()
    with scene.refuses("wrong_batch", "with 3 groups, 3 of them different; a batch has at most 2"):
        scene.completes(groups=("g6", "g7", "g8"))
    with scene.refuses("wrong_batch", "with 2 groups, 1 of them different"):
        scene.completes(groups=("g6", "g6"))


def test_a_learner_that_resumes_gets_what_was_trained_after_its_checkpoint() -> None:
    trained = [a_restored_group(index, trained_at=index // 2) for index in range(2, 6)]
    scene = Scene(with_groups(*trained, kept=(1, 2)), staleness_max=2)
    effects = scene.learner_joins(2, checkpoint_steps=(1, 2))
    assert [(e["group_id"], e["to"]) for e in emitted(effects, "group_returned")] == [
        ("g5", "buffer"),
        ("g4", "buffer"),
    ]
    assert delivered(scene.wants_batch()) == ["g5", "g4"]
    assert [entry.group.id for entry in scene.state.history.trained] == ["g2", "g3"]


# --------------------------------------------------- what was recorded and not yet told


def test_a_step_that_was_recorded_and_not_told_is_told_first() -> None:
    trained = [a_restored_group(index, trained_at=2, told=index == 4) for index in (4, 5)]
    scene = Scene(with_groups(*trained, told_step=2))
    effects = scene.tick()
    (ended,) = emitted(effects, "group_ended")
    assert (ended["group_id"], ended["end"], ended["trained_at"]) == ("g5", "trained", 2)
    assert (ended["worker"], ended["min_version"], ended["attempts"]) == ("w-1", 1, 2)
    assert emitted(effects, "step_completed") == [{"incarnation": 1, "step": 2, "num_groups": 2}]
    assert scene.state.ends["trained"] == 6, "it was counted when it was recorded"
    scene.learner_joins(incarnation=1)
    effects = scene.completes(2, groups=("g4", "g5"))
    assert [m.step for m in sent(effects, StepAcknowledged)] == [3]
    assert not emitted(effects, "step_completed")


def test_a_version_that_was_recorded_and_not_told_is_told_when_it_is_published_again() -> None:
    scene = Scene(a_restored_run(untold=(V3,)))
    scene.learner_joins(incarnation=1)
    assert [e["step"] for e in emitted(scene.publishes(3), "version_published")] == [3]
    assert not emitted(scene.publishes(3), "version_published")


# -------------------------------------------------------------------------- the leases


def a_restart_in_sampling(**changes: Any) -> Scene:
    """w-1 has g6 in work, under the newest version."""
    restored = a_restored_run(leases=(a_restored_lease(),), open_indexes=(6,), next_index=7)
    scene = Scene(restored, **changes)
    scene.grants[LeaseId("l.6")] = LeaseGranted(
        lease=LeaseId("l.6"),
        group=GroupId("g6"),
        attempt=1,
        kind="train",
        version=V3,
        task=Task(6, "{}"),
        group_size=scene.state.settings.group_size,
        sampling=scene.state.settings.sampling,
        seed=0,
        revoke_after_s=500.0,
    )
    scene.grantee[LeaseId("l.6")] = PeerId("w-1")
    return scene


def comes_back(scene: Scene, *held: str) -> WorkerWelcome:
    (welcome,) = sent(scene.worker_joins("w-1", installed=V3, held=held), WorkerWelcome)
    return welcome


def test_a_worker_goes_on_with_what_an_earlier_coordinator_had_leased() -> None:
    scene = a_restart_in_sampling()
    assert comes_back(scene, "l.6").alive == ("l.6",)
    effects = scene.learner_joins(incarnation=1)
    assert [(m.start, m.count) for m in sent(effects, TasksWanted)] == [(6, 1)]
    assert not sent(scene.submits(1), LeaseGranted), "it is in work already"
    effects = scene.delivers("l.6")
    assert [m.outcome for m in sent(effects, GroupAcknowledged)] == ["accepted"]
    assert scene.group("g6").task == Task(6, "{}")


def test_a_result_that_comes_before_its_task_waits_for_it() -> None:
    scene = a_restart_in_sampling()
    comes_back(scene, "l.6")
    assert not sent(scene.delivers("l.6"), GroupAcknowledged)
    scene.passes(400.0, alive=["w-1"], learner=False)
    assert scene.state_of("g6") is GroupState.LEASED, "what is done does not stall"
    scene.learner_joins(incarnation=1)
    effects = scene.submits(1)
    assert [m.outcome for m in sent(effects, GroupAcknowledged)] == ["accepted"]
    assert scene.state_of("g6") is GroupState.BUFFERED


def test_tasks_of_groups_in_work_are_asked_for_first_and_need_no_room() -> None:
    """A result that has come waits for nothing else, and nothing else may end before it does."""
    leases = tuple(a_restored_lease(index) for index in (40, 41, 43))
    restored = a_restored_run(next_index=50, open_indexes=tuple(range(6, 50)), leases=leases)
    scene = Scene(restored, tasks_ahead=1, groups_per_step=1)
    asked = [sent(scene.learner_joins(incarnation=1), TasksWanted)]
    asked += [sent(scene.submits(), TasksWanted) for _ in range(2)]
    assert [(m.start, m.count) for found in asked for m in found] == [(40, 2), (43, 1), (6, 1)]
    assert not scene.state.book.awaiting
    assert not sent(scene.submits(), TasksWanted), "the queue is full"


def test_a_lease_that_its_worker_does_not_know_any_more_is_granted_to_another() -> None:
    scene = a_restart_in_sampling()
    assert comes_back(scene).alive == ()
    assert "g6" not in scene.state.book.groups
    scene.learner_joins(incarnation=1)
    scene.publishes(3)
    assert [m.group for m in sent(scene.submits(1), LeaseGranted)] == ["g6"]


def test_a_lease_whose_worker_does_not_come_back_is_given_up() -> None:
    scene = a_restart_in_sampling(gone_s=10.0)
    scene.tick()
    assert not emitted(scene.tick(after=9.0), "lease_revoked")
    (lost,) = emitted(scene.tick(after=2.0), "lease_revoked")
    assert (lost["group_id"], lost["reason"]) == ("g6", "w-1 did not come back within 10 s")
    assert scene.state.stream.again == [6]


def test_a_lease_whose_worker_is_revoked_before_it_came_back_is_given_up_at_once() -> None:
    scene = a_restart_in_sampling()
    scene.tick()
    (lost,) = emitted(scene.handle(KeyRevoked(PeerId("w-1"))), "lease_revoked")
    assert (lost["group_id"], lost["reason"]) == ("g6", "its key was revoked")


def test_a_group_that_failed_too_often_before_is_not_tried_for_ever() -> None:
    restored = a_restored_run(leases=(a_restored_lease(attempt=3),), open_indexes=(6,))
    scene = Scene(restored, attempts_max=3, gone_s=10.0)
    scene.tick()
    (ended,) = emitted(scene.tick(after=11.0), "group_ended")
    assert (ended["group_id"], ended["end"]) == ("g6", "failed")
    assert scene.state.stream.again == [], "an ended group needs no task"


def test_a_task_that_was_asked_for_and_whose_group_has_ended_is_not_queued() -> None:
    restored = a_restored_run(leases=(a_restored_lease(attempt=3),), open_indexes=(6,))
    scene = Scene(restored, attempts_max=3, gone_s=10.0)
    scene.learner_joins(incarnation=1)
    scene.tick(after=11.0)
    scene.submits(1)
    assert "g6" not in scene.state.book.groups


def test_a_lease_that_is_too_old_is_not_gone_on_with() -> None:
    lease = a_restored_lease(version=a_version(1))
    scene = Scene(a_restored_run(leases=(lease,), open_indexes=(6,)), staleness_max=1)
    scene.tick()
    assert not scene.state.book.leases


def test_a_lease_of_a_version_that_leads_nowhere_is_not_gone_on_with() -> None:
    lease = a_restored_lease(version=V3)
    restored = a_restored_run(
        leases=(lease,), open_indexes=(6,), incarnation=2, step=2, starts=((1, 0), (2, 2))
    )
    scene = Scene(restored)
    assert not scene.state.book.leases
    assert comes_back(scene, "l.6").alive == ()


def test_a_stream_that_ends_earlier_now_cancels_what_is_in_work_beyond_it() -> None:
    scene = a_restart_in_sampling()
    comes_back(scene, "l.6")
    scene.learner_joins(incarnation=1)
    effects = scene.submits(0, exhausted=True)
    (ended,) = emitted(effects, "group_ended")
    assert (ended["end"], ended["reason"]) == (
        "cancelled",
        "the stream of tasks ends before it",
    )
    assert [m.lease for m in sent(effects, LeaseRevoked)] == ["l.6"]


def test_how_long_it_took_is_not_known_of_what_an_earlier_coordinator_leased() -> None:
    scene = a_restart_in_sampling()
    comes_back(scene, "l.6")
    scene.learner_joins(incarnation=1)
    scene.submits(1)
    scene.delivers("l.6")
    assert not scene.state.members.get("w-1").latency_s.known


def test_what_is_in_work_counts_for_pacing_before_its_task_is_here() -> None:
    scene = a_restart_in_sampling()
    assert scene.state.book.num_held == 1
    assert scene.state.book.leased_by_expiry == {4: 1}


def test_a_run_that_is_over_ends_what_was_in_work_once() -> None:
    scene = a_restart_in_sampling()
    scene.learner_joins(incarnation=1)
    effects = scene.learner_leaves(finished=True)
    assert [e["group_id"] for e in emitted(effects, "group_ended")] == ["g6"]
