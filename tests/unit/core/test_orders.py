"""Orders of events that once broke a promise, each as short as it can be told."""

from __future__ import annotations

from pathlib import Path

import pytest
from core_builders import (
    LEARNER,
    Scene,
    a_publication,
    a_running_scene,
    a_version,
    emitted,
    sent,
)

from echo2.core.group import GroupState
from echo2.ledger.events_log import EventsLog, restore
from echo2.messages import (
    BatchGranted,
    Fenced,
    Goodbye,
    GroupAcknowledged,
    LearnerWelcome,
    LeaseGranted,
    PublishAcknowledged,
    Refused,
)


def test_a_reconnect_is_welcomed_no_earlier_than_its_takeover_is_durable() -> None:
    scene = Scene()
    scene.learner_joins(durable=False)
    assert sent(scene.learner_joins(incarnation=1, durable=False), LearnerWelcome) == []
    assert [w.incarnation for w in sent(scene.becomes_durable(), LearnerWelcome)] == [1]


def test_another_peer_does_not_sit_down_in_the_seat_of_a_learner_that_is_here() -> None:
    scene = a_running_scene()
    (refused,) = sent(scene.learner_joins(peer="learner-2", incarnation=1), Refused)
    assert (refused.reason, refused.fatal) == ("seat", True)
    assert scene.state.seat.peer == LEARNER


def test_the_goodbye_of_an_older_process_of_the_same_name_changes_nothing() -> None:
    scene = a_running_scene()
    scene.learner_joins(hello_id="second")
    assert scene.incarnation == 2
    assert scene.receive(LEARNER, Goodbye(reason="late", finished=True, incarnation=1)) == []
    assert scene.state.seat.peer == LEARNER
    scene.receive(LEARNER, Goodbye(reason="done", finished=True, incarnation=2))
    assert scene.state.finished.finished


def test_a_hello_of_a_process_that_was_replaced_does_not_bring_it_back() -> None:
    scene = Scene()
    scene.learner_joins(hello_id="first", durable=False)
    scene.learner_joins(hello_id="second", peer="learner-2")
    (fenced,) = sent(scene.learner_joins(hello_id="first"), Fenced)
    assert (fenced.incarnation, fenced.by) == (0, 2)
    assert scene.incarnation == 2


def test_the_period_counts_from_a_version_that_is_still_being_stored() -> None:
    scene = a_running_scene(period=2, slots=6, staleness_max=2)
    for _ in range(2):
        for lease in scene.leases()[:2]:
            scene.delivers(lease)
        scene.trains()
    scene.publishes(2, durable=False)
    for lease in scene.leases()[:2]:
        scene.delivers(lease, durable=False)
    scene.state.step = 3
    with scene.refuses("wrong_version", r"version 3 follows 2 by less than the period κ = 2"):
        scene.receive(LEARNER, a_publication(a_version(3)), durable=False)
    acknowledged = sent(scene.becomes_durable(), PublishAcknowledged)
    assert [told.version for told in acknowledged] == [a_version(2)]


def test_an_empty_last_batch_trains_nothing_and_nothing_expires_for_it() -> None:
    scene = a_running_scene(staleness_max=0, budget_usd=1.0)
    scene.delivers(scene.leases()[0])
    scene.state.cost_usd = 2.0
    effects = scene.wants_batch()
    (granted,) = sent(effects, BatchGranted)
    assert (granted.groups, granted.last) == ((), True)
    assert emitted(effects, "group_ended") == emitted(effects, "lease_revoked") == []
    assert scene.state.next_step == 0
    with scene.refuses("wrong_order", "step 0 was completed without its batch"):
        scene.completes()


def test_a_group_goes_back_to_the_only_worker_whose_version_can_be_trained() -> None:
    """The other one has free slots, but what it serves is too old."""
    scene = a_running_scene(
        workers=("w-1", "w-2"), slots=2, staleness_max=0, groups_per_step=1, tasks=2
    )
    scene.delivers(scene.leases()[0])
    scene.trains()
    scene.publishes(1)
    scene.installs("w-1", a_version(1))
    (lease,) = scene.leases()
    assert scene.grantee[lease] == "w-1"
    scene.fails(lease, stage="environment")
    (again,) = scene.leases()
    assert scene.grantee[again] == "w-1"
    assert scene.grants[again].group == scene.grants[lease].group


@pytest.mark.parametrize("late", ["wait", "mask"])
def test_a_late_result_is_taken_only_where_the_batches_have_room(late: str) -> None:
    """Also with mask: or the buffer would grow beyond R(S + 1)."""
    scene = a_running_scene(late=late, staleness_max=1, groups_per_step=1, slots=2, stall_s=5.0)
    first, second = scene.leases()
    scene.worker_joins("w-2", slots=1)
    scene.installs("w-2", a_version(0))
    scene.passes(6.0, alive=("w-1", "w-2"))
    assert [scene.grants[lease].group for lease in scene.leases()] == ["g2", "g1"]
    assert scene.state_of("g0") is GroupState.QUEUED
    (told,) = sent(scene.delivers(first), GroupAcknowledged)
    assert (told.outcome, told.reason) == ("superseded", "no batch has room for it any more")
    assert scene.state.book.num_held == scene.state.settings.buffer_max == 2
    (told,) = sent(scene.delivers(second), GroupAcknowledged)
    assert told.outcome == "accepted"  # it takes the place of its own newer lease
    assert scene.state.book.num_held == 2


def test_a_stored_result_that_a_rewind_kills_costs_its_group_no_attempt() -> None:
    scene = a_running_scene(staleness_max=2, attempts_max=1, slots=6)
    scene.saves(0)
    for lease in scene.leases()[:2]:
        scene.delivers(lease)
    scene.trains()
    scene.publishes(1)
    scene.installs("w-1", a_version(1))
    under_1 = [lease for lease in scene.leases() if scene.grants[lease].version == a_version(1)]
    assert under_1
    scene.delivers(under_1[0])
    group = scene.grants[under_1[0]].group
    assert scene.state_of(group) is GroupState.BUFFERED
    scene.learner_joins(0, hello_id="second", checkpoint_steps=(0,))
    assert scene.state_of(group) in (GroupState.QUEUED, GroupState.LEASED)
    effects = scene.publishes(0)
    effects += scene.installs("w-1", a_version(0, incarnation=2))
    grants = [g for g in sent(effects, LeaseGranted) if g.group == group]
    assert all(granted.attempt == 1 for granted in grants)


def test_a_group_of_which_only_a_lost_lease_is_recorded_is_not_forgotten(tmp_path: Path) -> None:
    log = EventsLog(tmp_path / "events.jsonl")
    log.open()
    log.write("learner_joined", {"incarnation": 1, "resume_step": 0})
    log.write("lease_revoked", {"group_id": "g2", "lease": "l.3"})
    log.close()
    restored = restore(log.path)
    assert restored is not None
    assert (restored.next_index, restored.open_indexes) == (3, (0, 1, 2))
    scene = Scene(restored)
    scene.learner_joins()
    effects = scene.learner_leaves(finished=True)
    ended = {fields["group_id"]: fields["end"] for fields in emitted(effects, "group_ended")}
    assert ended["g2"] == "cancelled"
