"""Events that come together: each is taken by itself, and what follows is settled once."""

from __future__ import annotations

import pytest
from core_builders import LEARNER, Scene, a_running_scene, a_version, emitted, records, sent

from echo2.core.dispatch import GRANTS_AT_ONCE
from echo2.core.effects import Effect
from echo2.core.events import Event, Persisted, Received
from echo2.core.group import GroupState
from echo2.errors import RemoteProtocolError
from echo2.messages import (
    BatchGranted,
    BatchRequest,
    GroupAcknowledged,
    Heartbeat,
    LeaseGranted,
    VersionInstalled,
)
from echo2.types import PeerId


def taken(scene: Scene, *events: Event) -> list[Effect]:
    return [effect for event in events for effect in scene.coordinator.take(event, scene.now)]


def a_delivery(scene: Scene, lease: str) -> Received:
    return Received(PeerId(scene.grantee[lease]), scene.result(lease))


def test_two_results_of_one_turn_are_stored_each_and_followed_by_leases_at_its_end() -> None:
    scene = a_running_scene(lead_steps=2)
    first, second = scene.leases()
    effects = taken(scene, a_delivery(scene, first), a_delivery(scene, second))
    assert len(records(effects)) == 2
    assert not sent(effects, LeaseGranted)
    settled = scene.coordinator.settle()
    assert len(sent(settled, LeaseGranted)) == 2
    assert [fields["lease"] for fields in emitted(settled, "lease_granted")] == scene.leases()


def test_records_of_one_commit_are_acknowledged_each_and_make_one_batch() -> None:
    scene = a_running_scene()
    scene.receive(LEARNER, BatchRequest(incarnation=scene.incarnation, step=0))
    for lease in scene.leases():
        scene.delivers(lease, durable=False)
    events = [Persisted(record_id) for record_id in scene.undurable]
    effects = taken(scene, *events)
    assert [told.outcome for told in sent(effects, GroupAcknowledged)] == ["accepted", "accepted"]
    assert not sent(effects, BatchGranted)
    (granted,) = sent(scene.coordinator.settle(), BatchGranted)
    assert len(granted.groups) == 2


def test_a_message_that_is_refused_leaves_the_others_of_its_turn_alone() -> None:
    scene = a_running_scene(lead_steps=2)
    first, second = scene.leases()
    effects = taken(scene, a_delivery(scene, first))
    before = scene.snapshot()
    stranger = Received(PeerId("w-9"), Heartbeat(sequence=1, state="ready", lease_tokens={}))
    with pytest.raises(RemoteProtocolError, match="say hello first"):
        scene.coordinator.take(stranger, scene.now)
    assert scene.snapshot() == before
    effects += taken(scene, a_delivery(scene, second))
    assert len(records(effects)) == 2
    assert len(sent(scene.coordinator.settle(), LeaseGranted)) == 2


def test_many_leases_are_granted_a_part_at_a_time() -> None:
    scene = a_running_scene(workers=[], groups_per_step=40, lead_steps=2)
    scene.worker_joins("w-1", slots=3 * GRANTS_AT_ONCE)
    coordinator = scene.coordinator
    installed = VersionInstalled(
        version=a_version(0),
        manifest_digest=scene.state.lineage.published[a_version(0)],
        fetch_s=0.1,
        install_s=0.1,
        pause_s=0.0,
    )
    taken(scene, Received(PeerId("w-1"), installed))
    assert not sent(coordinator.settle(grants=False), LeaseGranted)
    parts = []
    while not coordinator.is_settled:
        parts.append(len(sent(coordinator.settle(), LeaseGranted)))
    assert parts == [GRANTS_AT_ONCE, GRANTS_AT_ONCE, 80 - 2 * GRANTS_AT_ONCE]
    assert coordinator.settle() == []


def test_leases_follow_a_batch_in_the_next_part() -> None:
    scene = a_running_scene(lead_steps=0)
    for lease in scene.leases():
        scene.delivers(lease)
    taken(
        scene,
        Received(PeerId(LEARNER), BatchRequest(incarnation=scene.incarnation, step=0)),
    )
    first = scene.coordinator.settle()
    assert sent(first, BatchGranted)
    assert not sent(first, LeaseGranted)
    assert not scene.coordinator.is_settled
    assert sent(scene.coordinator.settle(), LeaseGranted)
    assert scene.coordinator.is_settled


def test_what_was_settled_is_not_settled_again() -> None:
    scene = a_running_scene(lead_steps=2)
    taken(scene, a_delivery(scene, scene.leases()[0]))
    assert scene.coordinator.settle()
    assert scene.coordinator.settle() == []


def test_a_turn_of_heartbeats_alone_is_not_settled() -> None:
    scene = a_running_scene(lead_steps=2)
    group = scene.state.book.groups[scene.state.book.queue[0]]
    scene.state.members.workers["w-1"].slots += 1  # which only a settling would see
    beat = Heartbeat(sequence=1, state="ready", lease_tokens={})
    taken(scene, Received(PeerId("w-1"), beat), Received(PeerId("w-1"), beat))
    assert scene.coordinator.settle() == []
    assert group.state is GroupState.QUEUED
