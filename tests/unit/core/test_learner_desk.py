"""What the learner tells the coordinator: takeovers and rewinds, versions, checkpoints, evals."""

from __future__ import annotations

import re

import pytest
from core_builders import (
    LEARNER,
    Scene,
    a_digest,
    a_granted_batch,
    a_publication,
    a_restored_run,
    a_running_scene,
    a_task,
    a_version,
    emitted,
    finish,
    records,
    sent,
)

from echo2.core.evals import EVALS_MAX
from echo2.core.group import GroupState
from echo2.core.records import CheckpointRecorded, LearnerRecorded, VersionRecorded
from echo2.messages import (
    BatchRequest,
    BroadcastRequest,
    BroadcastStatus,
    CheckpointSaved,
    EvalRequest,
    EvalResult,
    Fenced,
    Goodbye,
    HeartbeatEcho,
    LearnerHeartbeat,
    LearnerWelcome,
    LeaseRevoked,
    Message,
    PublishAcknowledged,
    Refused,
    StepCompleted,
    TasksSubmitted,
    TasksWanted,
    VersionAnnounced,
)
from echo2.types import Sampling

V0, V1, V2 = a_version(0), a_version(1), a_version(2)


# ------------------------------------------------------------------------ coming, going


def test_a_learner_is_welcomed_when_its_takeover_is_durable() -> None:
    scene = Scene()
    effects = scene.learner_joins(digest="ab", durable=False)
    assert records(effects) == [LearnerRecorded(1, 0)]
    assert emitted(effects, "learner_joined") == [
        {"incarnation": 1, "resume_step": 0, "digest": "ab"}
    ]
    assert not sent(effects, LearnerWelcome)
    assert not sent(effects, TasksWanted)
    effects = scene.becomes_durable()
    (welcome,) = sent(effects, LearnerWelcome)
    assert (welcome.incarnation, welcome.step, welcome.run_id) == (1, 0, "run")
    assert sent(effects, TasksWanted)


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        (
            {"protocol": 9},
            "protocol",
            r"speaks protocol \d+, the learner \(echo2 0.1\) speaks 9",
        ),
        ({"run_id": "other"}, "run", "this is run run, the learner's is other"),
        ({"incarnation": 4}, "incarnation", r"incarnation 4 is unknown here \(newest: 1\)"),
        ({"resume_step": 0}, "resume_step", "of step 0 is older than the oldest .* of step 1"),
        ({"resume_step": 7}, "resume_step", "of step 7 is ahead of this run, whose v is 3"),
    ],
)
def test_a_learner_that_does_not_fit_is_refused_for_good(changes, reason, text) -> None:
    scene = Scene(a_restored_run())
    scene.tick()
    before = scene.snapshot()
    effects = scene.learner_joins(**({"resume_step": 2} | changes))
    (refused,) = sent(effects, Refused, to=LEARNER)
    assert refused.fatal
    assert refused.reason == reason
    assert re.search(text, refused.text)
    assert scene.snapshot() == before


def test_a_run_that_is_fresh_may_begin_at_any_step() -> None:
    scene = Scene()
    scene.learner_joins(5, checkpoint_steps=(5,))
    assert (scene.state.step, scene.state.history.kept) == (5, (5,))
    (refused,) = sent(scene.learner_joins(6, hello_id="b"), Refused)
    assert refused.reason == "resume_step"


def test_only_checkpoints_at_or_below_the_resumed_step_count_as_kept() -> None:
    scene = Scene(a_restored_run())
    scene.learner_joins(2, checkpoint_steps=(0, 1, 2, 3))
    assert scene.state.history.kept == (1, 2)


def test_a_guest_takes_the_seat_from_nobody_and_changes_no_step() -> None:
    scene = Scene(a_restored_run())
    scene.tick()
    (welcome,) = sent(scene.learner_joins(0, guest=True), LearnerWelcome)
    assert (welcome.incarnation, welcome.step) == (2, 3)
    assert (scene.state.step, scene.state.history.kept) == (3, (1,))
    assert list(scene.state.stream.again) == [6, 7], "nothing that was trained is given back"
    assert sent(scene.publishes(3), PublishAcknowledged)
    scene.receive(LEARNER, Goodbye(reason="published", incarnation=2))
    (welcome,) = sent(scene.learner_joins(1, checkpoint_steps=(1,)), LearnerWelcome)
    assert (welcome.incarnation, welcome.step) == (3, 1), "a learner resumes as before"


@pytest.mark.parametrize("silent", [False, True])
def test_a_guest_is_refused_while_a_learner_is_heard(silent: bool) -> None:
    scene = Scene()
    scene.learner_joins()
    if silent:
        scene.passes(scene.state.settings.gone_s + 1.0, learner=False)
    effects = scene.learner_joins(guest=True, peer="learner-2", hello_id="g")
    refused = sent(effects, Refused, to="learner-2")
    assert [r.reason for r in refused] == ([] if silent else ["seat"])
    assert bool(sent(effects, Fenced, to=LEARNER)) is silent
    if not silent:
        assert "learner is the learner of this run and was heard 0.0 s ago" in refused[0].text


def test_a_guest_learns_how_far_its_version_is() -> None:
    scene = Scene()
    scene.learner_joins(guest=True)
    ask = BroadcastRequest(incarnation=1)
    (status,) = sent(scene.receive(LEARNER, ask), BroadcastStatus)
    assert (status.version, status.num_active, status.workers) == (None, 0, ())
    for name in ("w-1", "w-2"):
        scene.worker_joins(name, engine="none")
    scene.publishes(0)
    scene.now += 2.0
    scene.installs("w-1", V0)
    (status,) = sent(scene.receive(LEARNER, ask), BroadcastStatus)
    assert (status.version, status.num_active) == (V0, 2)
    assert [(w.name, w.seconds) for w in status.workers] == [("w-1", 2.0), ("w-2", None)]
    assert sent(scene.receive(LEARNER, BroadcastRequest(incarnation=0)), Fenced)


def test_a_hello_that_is_repeated_before_the_takeover_is_durable_is_ignored() -> None:
    scene = Scene()
    scene.learner_joins(hello_id="a", durable=False)
    assert scene.learner_joins(hello_id="a", durable=False) == []
    assert len(sent(scene.becomes_durable(), LearnerWelcome)) == 1


def test_a_hello_that_is_repeated_after_its_welcome_is_welcomed_again() -> None:
    scene = Scene()
    scene.learner_joins(hello_id="a")
    effects = scene.learner_joins(hello_id="a")
    assert [w.incarnation for w in sent(effects, LearnerWelcome)] == [1]
    assert not records(effects)
    assert sent(effects, TasksWanted), "the earlier answer may be lost"


def test_a_hello_of_a_learner_that_was_replaced_is_fenced() -> None:
    scene = Scene()
    scene.learner_joins(hello_id="a")
    effects = scene.learner_joins(hello_id="b", peer="learner-2")
    assert [(f.incarnation, f.by) for f in sent(effects, Fenced, to=LEARNER)] == [(1, 2)]
    assert emitted(effects, "learner_fenced") == [{"incarnation": 1, "by": 2}]
    before = scene.snapshot()
    effects = scene.learner_joins(hello_id="a")
    assert [(f.incarnation, f.by) for f in sent(effects, Fenced, to=LEARNER)] == [(0, 2)]
    assert scene.snapshot() == before


def test_the_same_peer_that_starts_anew_is_not_told_that_it_is_fenced() -> None:
    scene = Scene()
    scene.learner_joins(hello_id="a")
    effects = scene.learner_joins(hello_id="b")
    assert not sent(effects, Fenced)
    assert not emitted(effects, "learner_fenced")
    assert scene.incarnation == 2


def test_a_reconnect_with_its_incarnation_is_welcomed_at_v() -> None:
    scene = a_running_scene(slots=4)
    for lease in scene.leases()[:2]:
        scene.delivers(lease)
    scene.trains()
    scene.learner_leaves()
    effects = scene.learner_joins(incarnation=1)
    (welcome,) = sent(effects, LearnerWelcome)
    assert (welcome.incarnation, welcome.step) == (1, 1)
    assert not emitted(effects, "learner_joined")


def test_a_reconnect_with_an_older_incarnation_is_fenced() -> None:
    scene = Scene()
    scene.learner_joins(hello_id="a")
    scene.learner_joins(hello_id="b", peer="learner-2")
    effects = scene.learner_joins(incarnation=1)
    assert [(f.incarnation, f.by) for f in sent(effects, Fenced)] == [(1, 2)]
    assert scene.state.seat.peer == "learner-2"


def test_a_takeover_that_was_overtaken_by_another_is_not_welcomed() -> None:
    scene = Scene()
    scene.learner_joins(hello_id="a", durable=False)
    scene.learner_joins(hello_id="b", peer="learner-2", durable=False)
    assert [w.incarnation for w in sent(scene.becomes_durable(), LearnerWelcome)] == [2]


def test_workers_with_another_version_of_the_environment_must_leave() -> None:
    scene = Scene()
    scene.worker_joins("w-1", environment_version="1")
    scene.worker_joins("w-2", environment_version="2")
    scene.worker_joins("w-3")
    effects = scene.learner_joins(environment_version="2")
    assert [m.reason for m in sent(effects, Refused, to="w-1")] == ["environment_version"]
    assert sorted(scene.state.members.workers) == ["w-2", "w-3"]
    (gone,) = emitted(effects, "worker_gone")
    assert gone["reason"].startswith("environment 'null': the learner has version 2, the worker 1")


def test_a_heartbeat_is_echoed_and_its_text_is_shown() -> None:
    scene = Scene()
    scene.learner_joins()
    effects = scene.learner_beats("trains step 3")
    assert [m.sequence for m in sent(effects, HeartbeatEcho)] == [1]
    assert scene.state.seat.text == "trains step 3"


def test_a_learner_that_leaves_may_come_back() -> None:
    scene = a_running_scene()
    scene.now = 4.0
    effects = scene.learner_leaves()
    assert emitted(effects, "learner_left") == [{"incarnation": 1, "reason": "bye"}]
    assert (scene.state.seat.peer, scene.state.seat.vacant_since) == (None, 4.0)
    assert finish(effects) is None


def test_the_goodbye_of_a_stranger_changes_nothing() -> None:
    scene = a_running_scene()
    scene.tick()  # more tasks are asked for
    before = scene.snapshot()
    scene.receive("learner-9", Goodbye(reason="bye", finished=True))
    assert scene.snapshot()["status"] == before["status"]
    assert scene.state.finished is None


def test_a_finished_learner_ends_the_run_and_what_was_begun() -> None:
    scene = a_running_scene(slots=2)
    scene.delivers(scene.leases()[0])
    effects = scene.learner_leaves(finished=True)
    ended = emitted(effects, "group_ended")
    assert {(e["end"], e["reason"]) for e in ended} == {("cancelled", "the run is over")}
    assert sorted(e["group_id"] for e in ended) == ["g0", "g1", "g2"]
    done = finish(effects)
    assert done is not None
    assert (done.ok, done.finished, done.reason) == (True, True, "bye")


# ------------------------------------------------------------------------------ fencing


def messages_of_a_learner(incarnation: int) -> list[Message]:
    version = a_version(0, incarnation=incarnation)
    return [
        LearnerHeartbeat(incarnation=incarnation, sequence=1, state="x"),
        TasksSubmitted(incarnation=incarnation, start=0, tasks=(a_task(0),)),
        BatchRequest(incarnation=incarnation, step=0),
        StepCompleted(
            incarnation=incarnation, step=0, groups=("g0",), train_s=1.0, wait_s=0.0, mismatch=()
        ),
        a_publication(version),
        CheckpointSaved(incarnation=incarnation, step=0, kept=(0,)),
        EvalRequest(
            incarnation=incarnation,
            eval_id="e",
            version=version,
            tasks=(a_task(0),),
            sampling=Sampling(),
        ),
    ]


@pytest.mark.parametrize("message", messages_of_a_learner(1), ids=lambda m: type(m).__name__)
def test_whatever_a_fenced_learner_sends_changes_nothing(message: Message) -> None:
    scene = a_running_scene()
    scene.learner_joins(hello_id="b", peer="learner-2")
    scene.tick()
    before = scene.snapshot()
    effects = scene.receive(LEARNER, message)
    assert [(f.incarnation, f.by) for f in sent(effects, Fenced, to=LEARNER)] == [(1, 2)]
    assert scene.snapshot() == before


@pytest.mark.parametrize("message", messages_of_a_learner(1), ids=lambda m: type(m).__name__)
def test_a_learner_that_was_not_welcomed_is_refused(message: Message) -> None:
    scene = Scene()
    scene.learner_joins(durable=False)
    with scene.refuses("unknown_peer", "learner is not the learner here: say hello first"):
        scene.receive(LEARNER, message)


@pytest.mark.parametrize("message", messages_of_a_learner(1), ids=lambda m: type(m).__name__)
def test_another_peer_may_not_speak_for_the_learner(message: Message) -> None:
    scene = a_running_scene()
    with scene.refuses("unknown_peer", "w-1 is not the learner here"):
        scene.receive("w-1", message)


@pytest.mark.parametrize("message", messages_of_a_learner(2), ids=lambda m: type(m).__name__)
def test_an_incarnation_that_does_not_exist_yet_is_refused(message: Message) -> None:
    scene = a_running_scene()
    with scene.refuses("unknown_peer", "learner is not the learner here"):
        scene.receive(LEARNER, message)


# ------------------------------------------------------------------------------ rewinds


def test_a_batch_that_was_training_comes_back_to_the_buffer() -> None:
    scene = a_granted_batch()
    effects = scene.learner_joins(0, hello_id="b")
    assert scene.state_of("g0") is GroupState.BUFFERED
    assert not emitted(effects, "group_returned"), "it had not ended"
    assert scene.state.next_step == 0


def a_rewound_scene() -> tuple[Scene, list]:
    """v = 1 with a group in every state, then the learner resumes at 0.

    g0 ended; g1 is in training; of version 1: g2 buffered, g3 storing, g4 leased.
    """
    scene = a_running_scene(slots=2, groups_per_step=1, staleness_max=4, tasks=2)
    scene.delivers(scene.lease_of("g0"))
    scene.trains()
    scene.publishes(1)
    scene.installs("w-1", V1)
    scene.delivers(scene.lease_of("g1"))
    scene.submits(2)
    scene.wants_batch()
    scene.delivers(scene.lease_of("g2"))
    scene.submits(1)
    scene.delivers(scene.lease_of("g3"), durable=False)
    states = [scene.state_of(f"g{i}") for i in range(5)]
    assert states == [
        None,
        GroupState.TRAINING,
        GroupState.BUFFERED,
        GroupState.STORING,
        GroupState.LEASED,
    ]
    return scene, scene.learner_joins(0, hello_id="b", durable=False)


def test_a_rewind_gives_every_group_its_place() -> None:
    scene, effects = a_rewound_scene()
    assert scene.state.step == 0
    assert scene.state_of("g0") is GroupState.BUFFERED
    assert scene.state_of("g1") is GroupState.BUFFERED
    for name in ("g2", "g3", "g4"):
        assert scene.state_of(name) is GroupState.QUEUED
        assert scene.group(name).attempts == 0
        assert scene.group(name).last_reason == "sampled after the checkpoint that was resumed"
    assert emitted(effects, "group_returned") == [
        {
            "group_id": "g0",
            "incarnation": 2,
            "reason": "the learner resumed from a checkpoint before it",
            "to": "buffer",
        }
    ]
    assert [m.reason for m in sent(effects, LeaseRevoked)] == [
        "sampled after the checkpoint that was resumed"
    ]
    assert scene.state.ends["trained"] == 0


def test_a_result_that_is_alive_becomes_durable_across_a_takeover() -> None:
    scene = a_running_scene(slots=1, groups_per_step=1, tasks=1)
    scene.delivers(scene.leases()[0], durable=False)
    scene.learner_joins(0, hello_id="b", durable=False)
    assert scene.state_of("g0") is GroupState.STORING
    scene.becomes_durable()
    assert scene.state_of("g0") is GroupState.BUFFERED


def test_a_lease_that_is_alive_goes_on_across_a_takeover() -> None:
    scene = a_running_scene(slots=1, groups_per_step=1, tasks=1)
    (lease,) = scene.leases()
    assert not sent(scene.learner_joins(0, hello_id="b"), LeaseRevoked)
    assert scene.leases() == [lease]


def test_a_returned_group_ends_once_more() -> None:
    scene, _ = a_rewound_scene()
    scene.becomes_durable()
    effects = scene.trains()
    assert [e["end"] for e in emitted(effects, "group_ended")] == ["trained"]
    assert scene.state.ends["trained"] == 1


def test_a_group_trained_from_a_dead_version_is_queued_again() -> None:
    scene = a_running_scene(slots=1, groups_per_step=1, staleness_max=4, tasks=1)
    scene.delivers(scene.leases()[0])
    scene.trains()
    scene.publishes(1)
    scene.installs("w-1", V1)
    scene.submits(1)
    scene.delivers(scene.leases()[0])
    scene.trains()
    effects = scene.learner_joins(0, hello_id="b")
    assert [(e["group_id"], e["to"]) for e in emitted(effects, "group_returned")] == [
        ("g1", "queue"),
        ("g0", "buffer"),
    ]


def test_a_group_whose_result_was_forgotten_is_queued_again() -> None:
    scene = a_running_scene(slots=1, groups_per_step=1, staleness_max=1, tasks=1)
    scene.delivers(scene.leases()[0])
    scene.trains()
    scene.state.history.trained[0].has_result = False
    effects = scene.learner_joins(0, hello_id="b")
    assert [e["to"] for e in emitted(effects, "group_returned")] == ["queue"]
    assert scene.group("g0").result is None


def test_a_group_that_is_not_admissible_at_the_resumed_step_is_queued_again() -> None:
    scene = a_running_scene(slots=1, groups_per_step=1, staleness_max=2, tasks=1)
    scene.delivers(scene.leases()[0])
    scene.trains()
    (entry,) = scene.state.history.trained
    scene.state.step = 5
    entry.step = 5
    effects = scene.learner_joins(4, hello_id="b")
    assert [e["to"] for e in emitted(effects, "group_returned")] == ["queue"]


def test_a_rewind_to_v_returns_nothing() -> None:
    scene = a_running_scene(slots=1, groups_per_step=1, tasks=1)
    scene.delivers(scene.leases()[0])
    scene.trains()
    effects = scene.learner_joins(1, hello_id="b")
    assert not emitted(effects, "group_returned")
    assert scene.state.step == 1


def test_a_restored_coordinator_queues_what_was_trained_after_the_checkpoint() -> None:
    scene = Scene(a_restored_run())
    effects = scene.learner_joins(2)
    assert [(e["group_id"], e["to"]) for e in emitted(effects, "group_returned")] == [
        ("g4", "queue"),
        ("g5", "queue"),
    ]
    assert scene.state.stream.again == [4, 5, 6, 7]
    assert scene.state.restored_trained == [("g2", 1), ("g3", 1)]
    assert scene.state.ends["trained"] == 4
    (wanted,) = sent(effects, TasksWanted)
    assert (wanted.start, wanted.count) == (4, 4)


def test_a_takeover_ends_the_evals_of_the_learner_before() -> None:
    scene = a_running_scene(tasks=0)
    scene.evaluates(V0)
    effects = scene.learner_joins(0, hello_id="b")
    (ended,) = emitted(effects, "eval_ended")
    assert ended["reason"] == "1 of 1 not done: a new learner took over"
    assert [m.reason for m in sent(effects, LeaseRevoked)] == ["a new learner took over"]
    assert not scene.state.evals.evals


# ----------------------------------------------------------------------------- versions


def test_a_version_is_announced_when_it_is_durable() -> None:
    scene = Scene()
    scene.learner_joins()
    scene.worker_joins("w-1")
    effects = scene.publishes(0, durable=False)
    assert records(effects) == [VersionRecorded(V0, a_digest(V0))]
    assert scene.publishes(0, durable=False) == [], "it becomes durable already"
    effects = scene.becomes_durable()
    assert [m.version for m in sent(effects, VersionAnnounced, to="w-1")] == [V0]
    assert [(m.version, m.keep_from) for m in sent(effects, PublishAcknowledged)] == [(V0, 0)]
    assert emitted(effects, "version_published") == [
        {"incarnation": 1, "step": 0, "manifest_digest": a_digest(V0), "num_bytes": 10}
    ]


def test_a_version_that_is_published_again_is_announced_from_its_new_origin() -> None:
    scene = Scene()
    scene.learner_joins()
    scene.worker_joins("w-1")
    scene.publishes(0)
    effects = scene.publishes(0, origin="tcp://127.0.0.1:6000")
    assert [m.origin for m in sent(effects, VersionAnnounced)] == ["tcp://127.0.0.1:6000"]
    assert sent(effects, PublishAcknowledged)
    assert not records(effects)


def test_a_version_above_v_is_refused() -> None:
    scene = a_running_scene()
    with scene.refuses("wrong_version", "version 1.1 was published, v is only 0"):
        scene.publishes(1)


def test_a_version_with_other_bytes_is_refused() -> None:
    scene = a_running_scene()
    with scene.refuses("wrong_digest", "version 1.0 is 0{16} already, not f{16}"):
        scene.publishes(0, manifest_digest="f" * 64)


def test_a_version_before_its_period_is_refused_unless_it_is_the_last() -> None:
    scene = a_running_scene(period=2, staleness_max=2)
    scene.state.step = 1
    with scene.refuses("wrong_version", "follows 0 by less than the period κ = 2"):
        scene.publishes(1)
    assert sent(scene.publishes(1, final=True), PublishAcknowledged)


def test_a_version_that_becomes_durable_after_a_takeover_is_not_announced() -> None:
    scene = Scene()
    scene.learner_joins()
    scene.publishes(0, durable=False)
    scene.learner_joins(0, hello_id="b", durable=False)
    effects = scene.becomes_durable()
    assert not emitted(effects, "version_published")
    assert V0 not in scene.state.lineage.published


def test_a_version_becomes_durable_though_the_learner_left() -> None:
    scene = Scene()
    scene.learner_joins()
    scene.publishes(0, durable=False)
    scene.learner_leaves(durable=False)
    effects = scene.becomes_durable()
    assert emitted(effects, "version_published")
    assert not sent(effects, PublishAcknowledged)


def test_an_older_version_that_is_published_again_is_not_announced() -> None:
    scene = a_running_scene(tasks=0)
    scene.state.step = 1
    scene.publishes(1)
    effects = scene.publishes(0)
    assert not sent(effects, VersionAnnounced)
    assert sent(effects, PublishAcknowledged)


# -------------------------------------------------------------------------- checkpoints


def test_a_checkpoint_is_recorded_and_what_came_before_it_is_forgotten() -> None:
    scene = a_granted_batch()
    scene.completes()
    effects = scene.saves(1)
    assert records(effects) == [CheckpointRecorded(1, (1,))]
    assert emitted(effects, "checkpoint_saved") == [{"incarnation": 1, "step": 1, "kept": [1]}]
    assert scene.state.history.trained == []
    (refused,) = sent(scene.learner_joins(0, hello_id="b"), Refused)
    assert refused.reason == "resume_step"


def test_a_checkpoint_that_was_overtaken_is_ignored() -> None:
    scene = a_granted_batch()
    scene.completes()
    scene.saves(1)
    before = scene.snapshot()
    assert not records(scene.saves(0))
    assert scene.snapshot() == before


@pytest.mark.parametrize(("step", "kept"), [(5, (5,)), (0, ())])
def test_a_checkpoint_above_v_or_of_nothing_is_refused(step: int, kept: tuple) -> None:
    scene = a_running_scene()
    with scene.refuses("wrong_step", "checkpoints of steps .* were kept, v is 0"):
        scene.receive(LEARNER, CheckpointSaved(incarnation=1, step=step, kept=kept))


def test_a_checkpoint_forgets_what_a_restored_run_could_have_returned() -> None:
    scene = Scene(a_restored_run())
    scene.learner_joins(3, checkpoint_steps=(1,))
    scene.saves(3, 2, 3)
    assert scene.state.restored_trained == [("g4", 2), ("g5", 2)]


# -------------------------------------------------------------------------------- evals


def test_an_eval_of_an_unpublished_version_is_refused() -> None:
    scene = a_running_scene()
    with scene.refuses("wrong_version", "an eval of version 1.1 was asked for, which is not"):
        scene.evaluates(V1)


def test_one_eval_more_than_the_most_allowed_is_refused() -> None:
    scene = a_running_scene(tasks=0, workers=())
    for i in range(EVALS_MAX):
        scene.evaluates(V0, eval_id=f"e{i}")
    with scene.refuses("too_many", f"{EVALS_MAX} evals are under way, the most allowed"):
        scene.evaluates(V0, eval_id="one-more")


def test_an_eval_that_is_asked_for_again_goes_on() -> None:
    scene = a_running_scene(tasks=0, workers=())
    scene.evaluates(V0)
    before = scene.snapshot()
    scene.evaluates(V0)
    assert scene.snapshot() == before


def test_an_eval_that_has_ended_is_answered_again() -> None:
    scene = a_running_scene(tasks=0)
    scene.evaluates(V0)
    effects = scene.delivers(next(iter(scene.state.evals.lease_eval)), reward=0.25)
    (first,) = sent(effects, EvalResult)
    effects = scene.evaluates(V0)
    assert sent(effects, EvalResult) == [first]
    assert not emitted(effects, "eval_ended")
