"""What workers tell the coordinator, and each refusal with its reason."""

from __future__ import annotations

import re

import pytest
from core_builders import (
    LEARNER,
    Scene,
    a_digest,
    a_granted_batch,
    a_header,
    a_restored_run,
    a_running_scene,
    a_version,
    emitted,
    sent,
)

from echo2.core.group import GroupState
from echo2.core.worker_desk import REVOKED_PER_HEARTBEAT_MAX
from echo2.messages import (
    LEASES_PER_PEER_MAX,
    Draining,
    Goodbye,
    GroupAcknowledged,
    HeartbeatEcho,
    LeaseGranted,
    LeaseRevoked,
    Refused,
    VersionAnnounced,
    WorkerWelcome,
)

V0, V1, V2 = a_version(0), a_version(1), a_version(2)


def the_acknowledgement(effects: list) -> GroupAcknowledged:
    (acknowledged,) = sent(effects, GroupAcknowledged)
    return acknowledged


# ------------------------------------------------------------------------ coming, going


def test_a_worker_is_welcomed_with_what_it_needs_to_start() -> None:
    scene = Scene(environment_settings='{"digits": 2}')
    scene.learner_joins()
    scene.publishes(0, assets_digest="ab" * 32)
    effects = scene.worker_joins("w-1", slots=3)
    (welcome,) = sent(effects, WorkerWelcome)
    assert (welcome.run_id, welcome.worker, welcome.settings) == ("run", "w-1", '{"digits": 2}')
    assert (welcome.assets_digest, welcome.origin) == ("ab" * 32, "tcp://127.0.0.1:5000")
    assert welcome.alive == ()
    assert sent(effects, VersionAnnounced)[0].version == V0
    assert emitted(effects, "worker_joined") == [
        {"worker": "w-1", "engine": "null", "precision": "f32", "slots": 3}
    ]


def test_a_worker_that_joins_before_the_first_version_is_told_of_it_later() -> None:
    scene = Scene()
    scene.learner_joins()
    effects = scene.worker_joins("w-1")
    assert sent(effects, WorkerWelcome)[0].origin == ""
    assert not sent(effects, VersionAnnounced)
    assert [m.version for m in sent(scene.publishes(0), VersionAnnounced, to="w-1")] == [V0]


@pytest.mark.parametrize(
    ("changes", "reason", "text"),
    [
        (
            {"protocol": 99},
            "protocol",
            r"speaks protocol \d+, the worker \(echo2 0.1\) speaks 99",
        ),
        ({"run_id": "other"}, "run", "this is run run, the worker belongs to other"),
        ({"environment": "maze"}, "environment", "environment is 'null', the worker has 'maze'"),
        (
            {"environment_version": "2"},
            "environment_version",
            "the learner has version 1, the worker 2; pip install the package at 1",
        ),
    ],
)
def test_a_worker_that_does_not_fit_is_refused_for_good(changes, reason, text) -> None:
    scene = Scene()
    scene.learner_joins(environment_version="1")
    before = scene.snapshot()
    effects = scene.worker_joins("w-1", **changes)
    (refused,) = sent(effects, Refused, to="w-1")
    assert refused.fatal
    assert refused.reason == reason
    assert emitted(effects, "peer_refused")[0]["reason"] == reason
    assert re.search(text, refused.text)
    assert scene.snapshot() == before


def test_a_worker_without_a_version_of_its_environment_is_taken() -> None:
    scene = Scene()
    scene.learner_joins(environment_version="1")
    assert sent(scene.worker_joins("w-1"), WorkerWelcome)
    assert sent(scene.worker_joins("w-2", environment_version="1", run_id="run"), WorkerWelcome)


def test_one_worker_more_than_the_most_allowed_is_refused_but_a_known_one_may_return() -> None:
    scene = Scene()
    scene.state.members.workers_max = 1
    scene.worker_joins("w-1")
    (refused,) = sent(scene.worker_joins("w-2"), Refused, to="w-2")
    assert (refused.reason, refused.text) == ("full", "1 workers are here, the most allowed")
    assert sent(scene.worker_joins("w-1"), WorkerWelcome)


def test_a_worker_that_comes_back_keeps_the_leases_that_it_still_holds() -> None:
    scene = a_running_scene(slots=2)
    kept, lost = scene.leases()
    scene.now = 5.0
    effects = scene.worker_joins("w-1", slots=1, held=(kept, "l.99"), installed=V0)
    assert sent(effects, WorkerWelcome)[0].alive == (kept,)
    assert not emitted(effects, "worker_joined")
    assert scene.leases() == [kept]
    assert scene.state.book.leases[kept].progressed_at == 5.0
    assert scene.group("g1").last_reason == "w-1 came back without it"
    assert scene.state_of("g1") is GroupState.QUEUED
    assert not sent(effects, LeaseRevoked), "it no longer works on it"
    assert lost not in scene.leases()


def test_a_worker_that_comes_back_without_its_version_loses_all_leases() -> None:
    scene = a_running_scene(slots=2)
    effects = scene.worker_joins("w-1", held=tuple(scene.leases()))
    assert sent(effects, WorkerWelcome)[0].alive == ()
    assert scene.leases() == []
    assert sent(effects, VersionAnnounced)[0].version == V0
    assert scene.state.members.get("w-1").state_name == "syncing"


def test_an_install_of_the_past_is_recorded_and_changes_nothing() -> None:
    scene = a_granted_batch()
    scene.completes()
    scene.publishes(1)
    scene.worker_joins("w-1", installed=a_version(1))
    effects = scene.installs("w-1", V0, past=True)
    (installed,) = emitted(effects, "version_installed")
    assert (installed["worker"], installed["step"]) == ("w-1", 0)
    assert scene.state.members.get("w-1").installed == a_version(1)
    assert not scene.installs("w-1", a_version(9), past=True), "nothing is known of it any more"


def test_a_version_that_was_never_published_is_not_counted_as_installed() -> None:
    scene = a_running_scene()
    effects = scene.worker_joins("w-2", installed=a_version(7))
    assert scene.state.members.get("w-2").installed is None
    assert sent(effects, VersionAnnounced, to="w-2")


def test_a_worker_that_comes_back_keeps_its_measured_rates() -> None:
    scene = a_running_scene(slots=1)
    scene.now = 2.0
    scene.delivers(scene.leases()[0])
    scene.worker_joins("w-1", slots=1, installed=V0)
    worker = scene.state.members.get("w-1")
    assert worker.latency_s.mean == 2.0
    assert worker.slowest_rate == 1.0
    assert worker.install_s.mean == 0.5


def test_a_worker_that_comes_back_keeps_or_returns_its_eval_leases() -> None:
    scene = a_running_scene(slots=2, tasks=0)
    scene.evaluates(V0, tasks=2)
    kept, lost = scene.state.evals.lease_eval
    effects = scene.worker_joins("w-1", slots=1, held=(kept,), installed=V0)
    assert sent(effects, WorkerWelcome)[0].alive == (kept,)
    assert list(scene.state.evals.lease_eval) == [kept]
    found = scene.state.evals.evals["e"]
    assert found.last_reason == "w-1 came back without it"
    assert [task.index for task in found.pending] == [1]
    assert lost not in found.leases


def test_a_draining_worker_gets_no_new_leases_and_may_still_deliver() -> None:
    scene = a_running_scene(slots=1)
    (lease,) = scene.leases()
    effects = scene.receive("w-1", Draining(reason="spot"))
    assert emitted(effects, "worker_draining") == [{"worker": "w-1", "reason": "spot"}]
    effects = scene.delivers(lease)
    assert the_acknowledgement(effects).outcome == "accepted"
    assert scene.leases() == []
    assert scene.reason() == "no ready worker has a free slot"


def test_a_worker_that_says_goodbye_loses_its_leases_to_others() -> None:
    scene = a_running_scene(slots=1)
    (lease,) = scene.leases()
    effects = scene.receive("w-1", Goodbye(reason="done"))
    assert emitted(effects, "lease_revoked") == [
        {
            "group_id": "g0",
            "lease": lease,
            "worker": "w-1",
            "reason": "w-1 is gone: done",
            "held_s": 0.0,
        }
    ]
    assert emitted(effects, "worker_gone") == [{"worker": "w-1", "reason": "done"}]
    assert scene.state.members.get("w-1") is None
    assert scene.group("g0").attempts == 1


def test_a_worker_that_leaves_gives_its_eval_leases_back() -> None:
    scene = a_running_scene(slots=1, tasks=0)
    scene.evaluates(V0)
    scene.receive("w-1", Goodbye(reason="done"))
    assert scene.state.evals.evals["e"].last_reason == "w-1 is gone: done"
    assert not scene.state.evals.lease_eval


@pytest.mark.parametrize("name", ["draining", "heartbeat", "installed", "failed install"])
def test_a_stranger_must_say_hello_first(name: str) -> None:
    scene = a_running_scene()
    with scene.refuses("unknown_peer", "w-9 is not known here: say hello first"):
        match name:
            case "draining":
                scene.receive("w-9", Draining(reason="x"))
            case "heartbeat":
                scene.beats("w-9")
            case "installed":
                scene.installs("w-9", V0)
            case _:
                scene.install_fails("w-9", V0)


@pytest.mark.parametrize("name", ["result", "failure"])
def test_a_stranger_must_say_hello_before_it_settles_a_lease(name: str) -> None:
    scene = a_running_scene()
    lease = scene.leases()[0]
    with scene.refuses("unknown_peer", "w-9 is not known here"):
        if name == "result":
            scene.delivers(lease, by="w-9")
        else:
            scene.fails(lease, by="w-9")


# --------------------------------------------------------------------------- heartbeats


def test_a_heartbeat_is_echoed_and_its_tokens_are_progress() -> None:
    scene = a_running_scene(slots=1)
    scene.now = 3.0
    effects = scene.beats("w-1", l_1=4)
    assert [echo.sequence for echo in sent(effects, HeartbeatEcho)] == [7]
    lease = scene.state.book.leases["l.1"]
    assert (lease.tokens, lease.progressed_at) == (4, 3.0)
    scene.now = 4.0
    scene.beats("w-1", l_1=4)
    assert lease.progressed_at == 3.0, "no new token is no progress"
    assert scene.state.members.get("w-1").tokens_per_s == 10.0


def test_tokens_of_an_eval_are_progress_too() -> None:
    scene = a_running_scene(slots=1, tasks=0)
    scene.evaluates(V0)
    (lease,) = scene.state.evals.leases_of("w-1")
    scene.now = 3.0
    assert not sent(scene.beats("w-1", l_1=4), LeaseRevoked)
    assert (lease.tokens, lease.progressed_at) == (4, 3.0)
    scene.now = 4.0
    scene.beats("w-1", l_1=3)
    assert lease.progressed_at == 3.0


def test_a_worker_that_works_on_a_dead_lease_is_told_again() -> None:
    scene = a_running_scene(slots=1)
    effects = scene.beats("w-1", l_1=1, l_77=3)
    assert [(m.lease, m.reason) for m in sent(effects, LeaseRevoked)] == [
        ("l.77", "it was given up here")
    ]


def test_one_heartbeat_of_thousands_of_dead_leases_is_answered_with_a_bounded_number() -> None:
    scene = a_running_scene(slots=1)
    dead = {f"l_{number}": 1 for number in range(1000, 1000 + LEASES_PER_PEER_MAX)}
    effects = scene.beats("w-1", **dead)
    assert len(sent(effects, LeaseRevoked)) == REVOKED_PER_HEARTBEAT_MAX
    assert len(sent(effects, HeartbeatEcho)) == 1
    rest = dict(list(dead.items())[REVOKED_PER_HEARTBEAT_MAX:])
    assert sent(scene.beats("w-1", **rest), LeaseRevoked)[0].lease not in {
        message.lease for message in sent(effects, LeaseRevoked)
    }, "the next heartbeat tells of more"


# ----------------------------------------------------------------------------- installs


def test_the_first_install_makes_a_worker_ready() -> None:
    scene = Scene()
    scene.learner_joins()
    scene.publishes(0)
    scene.worker_joins("w-1")
    effects = scene.installs("w-1", V0, canary_diff=0.01)
    assert emitted(effects, "worker_ready") == [{"worker": "w-1"}]
    (installed,) = emitted(effects, "version_installed")
    assert (installed["incarnation"], installed["step"]) == (1, 0)
    assert (installed["manifest_digest"], installed["canary_diff"]) == (a_digest(V0), 0.01)
    assert not scene.state.bcast_s.known, "a first install waited for the worker, not the version"


def test_a_later_install_measures_how_long_a_version_takes_to_arrive() -> None:
    scene = a_running_scene(tasks=0)
    scene.now = 1.0
    scene.state.step = 1
    scene.publishes(1)
    scene.now = 3.5
    effects = scene.installs("w-1", V1)
    assert scene.state.bcast_s.mean == 2.5
    assert not emitted(effects, "worker_ready")


def test_an_install_of_an_unknown_version_is_refused() -> None:
    scene = a_running_scene()
    with scene.refuses("unknown_version", "w-1 installed version 1.9, which was never published"):
        scene.installs("w-1", a_version(9))


def test_an_install_of_other_bytes_is_refused() -> None:
    scene = a_running_scene()
    with scene.refuses("wrong_digest", "w-1 installed f{16} as version 1.0, which is 0{16}"):
        scene.installs("w-1", V0, manifest_digest="f" * 64)


def test_a_draining_worker_stays_so_when_it_installs() -> None:
    scene = a_running_scene()
    scene.receive("w-1", Draining(reason="spot"))
    scene.installs("w-1", V0)
    assert scene.state.members.get("w-1").state_name == "draining"


def test_an_install_takes_evals_of_another_version_back() -> None:
    scene = a_running_scene(slots=1, tasks=0)
    scene.evaluates(V0)
    (lease,) = scene.state.evals.lease_eval
    scene.state.step = 1
    scene.publishes(1)
    effects = scene.installs("w-1", V1)
    assert [(m.lease, m.reason) for m in sent(effects, LeaseRevoked)] == [
        (lease, "w-1 serves 1.1 now")
    ]
    assert not scene.state.evals.lease_eval


def test_a_failed_install_leaves_the_version_before_in_service() -> None:
    scene = a_running_scene(slots=1, tasks=1)
    scene.state.step = 1
    scene.publishes(1)
    effects = scene.install_fails("w-1", V1, serving=V0)
    assert emitted(effects, "install_failed") == [
        {"worker": "w-1", "incarnation": 1, "step": 1, "stage": "canary", "text": "nan"}
    ]
    worker = scene.state.members.get("w-1")
    assert (worker.installed, worker.state_name) == (V0, "ready")


@pytest.mark.parametrize("serving", [None, a_version(9)])
def test_a_failed_install_without_a_known_version_in_service_stops_the_worker(serving) -> None:
    scene = a_running_scene(slots=1)
    scene.delivers(scene.leases()[0])
    scene.install_fails("w-1", V1, serving=serving)
    worker = scene.state.members.get("w-1")
    assert (worker.installed, worker.state_name) == (None, "syncing")
    assert not worker.may_lease


def test_a_worker_that_fell_back_to_a_dead_version_gets_no_lease() -> None:
    scene = a_running_scene(slots=1, staleness_max=4, groups_per_step=1)
    scene.delivers(scene.leases()[0])
    scene.trains()
    scene.publishes(1)
    scene.installs("w-1", V1)
    scene.delivers(scene.leases()[0], V1)
    scene.learner_joins(0, hello_id="b")
    scene.publishes(0)
    assert scene.state.lineage.newest == a_version(0, incarnation=2)
    effects = scene.install_fails("w-1", a_version(0, incarnation=2), serving=V1)
    assert not sent(effects, LeaseGranted)
    assert scene.leases() == []
    assert scene.reason() == "version 1.1 is served, which leads nowhere any more"


# ------------------------------------------------------------------------------ results


def test_a_result_is_acknowledged_only_when_it_is_durable() -> None:
    scene = a_running_scene(slots=1)
    (lease,) = scene.leases()
    effects = scene.delivers(lease, durable=False)
    assert not sent(effects, GroupAcknowledged)
    assert scene.state_of("g0") is GroupState.STORING
    repeated = scene.delivers(lease, durable=False)
    assert not sent(repeated, GroupAcknowledged), "the acknowledgement follows"
    effects = scene.becomes_durable()
    assert the_acknowledgement(effects).outcome == "accepted"
    assert scene.state_of("g0") is GroupState.BUFFERED


def test_a_repeated_result_is_a_duplicate() -> None:
    scene = a_running_scene(slots=1)
    (lease,) = scene.leases()
    scene.delivers(lease)
    assert the_acknowledgement(scene.delivers(lease)).outcome == "duplicate"


def test_a_repeated_result_of_a_group_that_ended_is_a_duplicate() -> None:
    scene = a_running_scene(slots=2)
    first, second = scene.leases()
    scene.delivers(first)
    scene.delivers(second)
    scene.trains()
    assert the_acknowledgement(scene.delivers(first)).outcome == "duplicate"


def test_a_result_of_a_lease_that_nobody_knows_is_superseded() -> None:
    scene = a_running_scene(slots=1)
    (lease,) = scene.leases()
    unknown = scene.result(lease, group="g77")
    acknowledged = the_acknowledgement(scene.receive("w-1", unknown))
    assert (acknowledged.outcome, acknowledged.reason) == ("superseded", "")


def test_a_result_of_another_workers_lease_is_refused() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=1)
    lease = scene.leases("w-1")[0]
    with scene.refuses("wrong_lease", f"lease {lease} was granted to w-1, not to w-2"):
        scene.delivers(lease, by="w-2")


def test_the_second_result_of_a_group_is_superseded() -> None:
    scene = a_running_scene(workers=("w-1",), slots=1, tasks=1, stall_s=5.0)
    (first,) = scene.leases()
    scene.passes(6.0, alive=["w-1"])
    (second,) = scene.leases()
    assert second != first
    scene.delivers(second)
    assert the_acknowledgement(scene.delivers(first)).outcome == "superseded"


def test_a_late_result_of_a_revoked_lease_counts_and_ends_the_newer_lease() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=1, tasks=1, stall_s=5.0)
    (first,) = scene.leases()
    owner = scene.grantee[first]
    scene.passes(6.0, alive=["w-1", "w-2"])
    (second,) = scene.leases()
    assert scene.grantee[second] != owner
    effects = scene.delivers(first)
    assert the_acknowledgement(effects).outcome == "accepted"
    assert [(m.lease, m.reason) for m in sent(effects, LeaseRevoked, to=scene.grantee[second])] == [
        (second, f"{owner} delivered the group first")
    ]
    assert scene.leases() == []


def test_a_late_result_is_taken_while_its_group_waits_in_the_queue() -> None:
    scene = a_running_scene(slots=1, tasks=1)
    (lease,) = scene.leases()
    scene.receive("w-1", Draining(reason="spot"))
    scene.fails(lease, stage="draining")
    assert scene.state_of("g0") is GroupState.QUEUED
    assert the_acknowledgement(scene.delivers(lease)).outcome == "accepted"
    assert scene.state_of("g0") is GroupState.BUFFERED
    assert not scene.state.book.queue


def refused_result(scene: Scene, lease: str, *versions, **changes) -> str:
    """The result is refused, the worker rests, the group waits again. Returns the reason."""
    effects = scene.delivers(lease, *versions, **changes)
    acknowledged = the_acknowledgement(effects)
    assert acknowledged.outcome == "refused"
    (refused,) = emitted(effects, "result_refused")
    assert refused["reason"] == acknowledged.reason
    assert scene.state_of("g0") is GroupState.QUEUED
    assert scene.group("g0").attempts == 1
    assert scene.group("g0").last_reason == acknowledged.reason
    assert not sent(effects, LeaseGranted), "the worker rests"
    return acknowledged.reason


def test_a_result_with_too_few_trajectories_is_refused() -> None:
    scene = a_running_scene(slots=1, group_size=2)
    reason = refused_result(scene, scene.leases()[0], trajectories=(a_header(V0),))
    assert reason == "1 trajectories, a group has 2"


def test_a_result_with_tokens_of_nobody_is_refused() -> None:
    scene = a_running_scene(slots=1)
    header = a_header(V0)
    more = type(header)(
        length=5,
        prompt_length=1,
        num_sampled=3,
        reward=0.0,
        finish="stop",
        num_turns=1,
        spans=header.spans,
    )
    reason = refused_result(scene, scene.leases()[0], trajectories=(more,))
    assert reason == "sampled tokens that no span names"


def test_a_result_of_a_version_above_v_is_refused() -> None:
    scene = a_running_scene(slots=1)
    assert refused_result(scene, scene.leases()[0], V1) == "version 1.1 is above v = 0"


def test_a_result_of_a_version_that_was_never_published_is_refused() -> None:
    scene = a_running_scene(slots=1)
    scene.state.step = 1
    assert refused_result(scene, scene.leases()[0], V0, V1) == "version 1.1 was never published"


def test_a_result_older_than_its_lease_is_refused() -> None:
    scene = Scene(groups_per_step=1)
    scene.learner_joins()
    scene.publishes(0)
    scene.state.step = 1
    scene.publishes(1)
    scene.worker_joins("w-1", slots=1)
    scene.installs("w-1", V1)
    scene.submits(1)
    reason = refused_result(scene, scene.leases()[0], V0, V1)
    assert reason == "tokens of version 1.0, but the lease began at 1.1"


def test_a_refused_result_counts_as_an_attempt_until_the_group_has_failed() -> None:
    scene = a_running_scene(slots=1, tasks=1, attempts_max=2)
    refused_result(scene, scene.leases()[0], V1)
    scene.tick(after=2.0)
    effects = scene.delivers(scene.leases()[0], V1)
    (ended,) = emitted(effects, "group_ended")
    assert (ended["end"], ended["reason"]) == (
        "failed",
        "2 attempts, the last: version 1.1 is above v = 0",
    )


def test_a_refused_late_result_leaves_the_newer_lease_alone() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=1, tasks=1, stall_s=5.0)
    (first,) = scene.leases()
    scene.passes(6.0, alive=["w-1", "w-2"])
    (second,) = scene.leases()
    assert the_acknowledgement(scene.delivers(first, V1)).outcome == "refused"
    assert scene.leases() == [second]


def test_a_result_of_a_version_that_a_rewind_killed_is_superseded_without_blame() -> None:
    scene = a_running_scene(slots=1, groups_per_step=1, staleness_max=3)
    scene.delivers(scene.leases()[0])
    (lease,) = scene.leases()
    scene.trains()
    scene.publishes(1)
    scene.installs("w-1", V1)
    scene.learner_joins(0, hello_id="b")
    assert lease in scene.leases(), "it was granted under a version that is alive"
    scene.state.step = 1
    scene.publishes(0)
    scene.publishes(1)
    effects = scene.delivers(lease, V0, V1)
    acknowledged = the_acknowledgement(effects)
    assert acknowledged.outcome == "superseded"
    assert acknowledged.reason == "version 1.1 is not in the line of incarnation 2"
    assert not emitted(effects, "result_refused")
    group = scene.state.book.groups[scene.grants[lease].group]
    assert (group.attempts, group.avoid) == (0, None)


def test_late_tokens_of_several_turns_stretch_the_cap_of_the_next_leases() -> None:
    scene = a_running_scene(slots=1, stall_s=1.0)
    scene.now = 1.0
    scene.delivers(scene.leases()[0], trajectories=(a_header(V0, turns=4),))
    assert scene.state.turns_max == 4
    assert scene.state.members.get("w-1").slowest_rate == 2.0
    assert scene.grants[scene.leases()[0]].revoke_after_s == 16 * 4 / 2.0


def test_a_result_without_tokens_says_nothing_of_the_rate() -> None:
    scene = a_running_scene(slots=1)
    scene.now = 1.0
    header = a_header(V0)
    silent = type(header)(
        length=3,
        prompt_length=1,
        num_sampled=0,
        reward=0.0,
        finish="stop",
        num_turns=0,
        spans=header.spans,
    )
    scene.delivers(scene.leases()[0], trajectories=(silent,))
    assert scene.state.members.get("w-1").slowest_rate is None


def test_a_group_whose_rewards_are_all_equal_is_filtered_when_asked_for() -> None:
    scene = a_running_scene(slots=1, group_size=2, filter_zero_variance=True)
    same = scene.leases()[0]
    effects = scene.delivers(same)
    (ended,) = emitted(effects, "group_ended")
    assert (ended["end"], ended["reason"]) == ("filtered", "all rewards of the group are equal")
    assert (ended["trained_at"], ended["tokens"], ended["min_version"]) == (None, 4, 0)
    assert the_acknowledgement(effects).outcome == "accepted"
    different = scene.leases()[0]
    headers = (a_header(V0, reward=0.0), a_header(V0, reward=1.0))
    effects = scene.delivers(different, trajectories=headers)
    assert not emitted(effects, "group_ended")
    assert scene.state.book.num_buffered == 1


def test_groups_of_equal_rewards_are_kept_by_default() -> None:
    scene = a_running_scene(slots=1, group_size=2)
    scene.delivers(scene.leases()[0])
    assert scene.state.book.num_buffered == 1


def test_a_result_that_becomes_durable_after_a_rewind_is_superseded() -> None:
    scene = a_running_scene(slots=1, groups_per_step=1, staleness_max=2)
    scene.delivers(scene.leases()[0])
    scene.trains()
    scene.publishes(1)
    scene.delivers(scene.leases()[0])
    scene.installs("w-1", V1)
    scene.delivers(scene.leases()[0], V1, durable=False)
    (storing,) = scene.state.book.in_state(GroupState.STORING)
    scene.learner_joins(0, hello_id="b", durable=False)
    assert storing.state is GroupState.QUEUED
    effects = scene.becomes_durable()
    acknowledged = sent(effects, GroupAcknowledged)
    assert [(a.outcome, a.reason) for a in acknowledged] == [
        ("superseded", "sampled after the checkpoint that was resumed")
    ]


def test_a_late_result_that_no_batch_has_room_for_is_superseded() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=1, tasks=2, groups_per_step=1)
    late = scene.lease_of("g0")
    scene.delivers(scene.lease_of("g1"))
    scene.trains()
    scene.publishes(1)
    scene.installs("w-2", V1)
    scene.fails(late)
    assert scene.group("g0").lease.version == V1
    scene.now = 1.0  # w-1 is not waited for any longer
    scene.submits(1)
    assert scene.group("g2").lease.version == V0, "the only group that version 1 can take"
    effects = scene.delivers(late)
    acknowledged = the_acknowledgement(effects)
    assert acknowledged.outcome == "superseded"
    assert acknowledged.reason == "no batch has room for it any more"
    assert scene.state_of("g0") is GroupState.LEASED


def test_a_late_result_that_has_expired_is_superseded() -> None:
    scene = a_running_scene(workers=("w-1",), slots=1, tasks=1, groups_per_step=1, staleness_max=0)
    late = scene.lease_of("g0")
    scene.receive("w-1", Draining(reason="spot"))
    scene.fails(late, stage="draining")
    scene.state.step = 1
    assert the_acknowledgement(scene.delivers(late)).outcome == "superseded"
    assert scene.state_of("g0") is GroupState.QUEUED


def test_with_wait_a_result_past_its_expiry_is_queued_again_without_blame() -> None:
    scene = a_running_scene(slots=1, tasks=1, groups_per_step=1, staleness_max=0)
    scene.state.step = 1
    acknowledged = the_acknowledgement(scene.delivers(scene.leases()[0]))
    assert acknowledged.outcome == "superseded"
    group = scene.group("g0")
    assert (group.state, group.attempts) == (GroupState.QUEUED, 0)
    assert group.last_reason.startswith("sampled by version 0, window is [1, 1]")


# ------------------------------------------------------------------- late = drop, mask


def test_with_mask_a_result_with_too_few_tokens_in_the_window_ends_expired() -> None:
    scene = a_running_scene(
        slots=1, late="mask", groups_per_step=1, staleness_max=1, mask_min_tokens=3
    )
    lease = scene.leases()[0]
    scene.state.step = 1
    scene.publishes(1)
    scene.state.step = 2
    scene.publishes(2)
    effects = scene.delivers(lease, V0, V0, V1)
    acknowledged = the_acknowledgement(effects)
    assert (acknowledged.outcome, acknowledged.reason) == ("accepted", "expired")
    (ended,) = emitted(effects, "group_ended")
    assert (ended["end"], ended["tokens"]) == ("expired", 6)
    assert ended["reason"].startswith("sampled by version 0, window is [1, 2]")
    assert the_acknowledgement(scene.delivers(lease)).outcome == "duplicate"


def test_with_mask_a_result_with_just_enough_tokens_in_the_window_is_taken() -> None:
    scene = a_running_scene(
        slots=1, late="mask", groups_per_step=1, staleness_max=1, mask_min_tokens=2
    )
    lease = scene.leases()[0]
    scene.state.step = 1
    scene.publishes(1)
    scene.state.step = 2
    scene.publishes(2)
    effects = scene.delivers(lease, V0, V0, V1)
    assert the_acknowledgement(effects).outcome == "accepted"
    assert scene.state_of("g0") is GroupState.BUFFERED


def test_with_drop_a_result_that_expires_while_it_is_stored_ends_expired() -> None:
    scene = a_running_scene(slots=1, tasks=1, groups_per_step=1, staleness_max=0, late="drop")
    scene.delivers(scene.leases()[0], durable=False)
    scene.state.step = 1
    effects = scene.becomes_durable()
    assert the_acknowledgement(effects).outcome == "accepted"
    (ended,) = emitted(effects, "group_ended")
    assert (ended["end"], ended["trained_at"]) == ("expired", None)
    assert ended["reason"].startswith("sampled by version 0, window is [1, 1]")


# ----------------------------------------------------------------------- failed leases


def test_a_failed_lease_is_acknowledged_and_its_group_goes_to_another_worker() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=1, tasks=2)
    lease = scene.lease_of("g0")
    owner = scene.grantee[lease]
    effects = scene.fails(lease)
    assert the_acknowledgement(effects).outcome == "accepted"
    assert emitted(effects, "lease_failed") == [
        {
            "group_id": "g0",
            "lease": lease,
            "worker": owner,
            "stage": "environment",
            "reason": "boom",
            "held_s": 0.0,
        }
    ]
    assert scene.group("g0").avoid == owner
    assert scene.group("g0").last_reason == "environment: boom"


def test_a_group_fails_after_its_last_attempt() -> None:
    scene = a_running_scene(slots=1, tasks=1, attempts_max=2)
    scene.fails(scene.leases()[0])
    effects = scene.fails(scene.leases()[0])
    (ended,) = emitted(effects, "group_ended")
    assert (ended["end"], ended["reason"], ended["attempts"]) == (
        "failed",
        "2 attempts, the last: environment: boom",
        2,
    )
    assert (ended["worker"], ended["min_version"], ended["reward_mean"]) == ("w-1", None, None)


@pytest.mark.parametrize("stage", ["engine", "lost"])
def test_a_worker_whose_engine_failed_rests_a_moment(stage: str) -> None:
    scene = a_running_scene(slots=1)
    effects = scene.fails(scene.leases()[0], stage=stage)
    assert not sent(effects, LeaseGranted)
    assert not sent(scene.tick(after=0.5), LeaseGranted)
    assert sent(scene.tick(after=0.5), LeaseGranted)


def test_a_lease_given_up_by_a_draining_worker_is_no_attempt() -> None:
    scene = a_running_scene(slots=1, tasks=1, attempts_max=1)
    scene.receive("w-1", Draining(reason="spot"))
    scene.fails(scene.leases()[0], stage="draining")
    assert scene.group("g0").attempts == 0
    assert scene.group("g0").avoid is None


def test_the_failure_of_a_lease_that_was_revoked_changes_nothing() -> None:
    scene = a_running_scene(slots=1, tasks=1)
    (lease,) = scene.leases()
    scene.delivers(lease)
    before = scene.snapshot()
    effects = scene.fails(lease)
    assert the_acknowledgement(effects).outcome == "accepted"
    assert not emitted(effects, "lease_failed")
    assert scene.snapshot() == before


def test_the_failure_of_another_workers_lease_changes_nothing() -> None:
    scene = a_running_scene(workers=("w-1", "w-2"), slots=1)
    lease = scene.leases("w-1")[0]
    scene.fails(lease, by="w-2")
    assert lease in scene.leases()


# -------------------------------------------------------------------------------- evals


def an_eval(*, tasks: int = 1, group_size: int = 1, workers=("w-1",)) -> tuple[Scene, str]:
    scene = a_running_scene(slots=1, tasks=0, workers=workers)
    scene.evaluates(V0, tasks=tasks, group_size=group_size)
    return scene, next(iter(scene.state.evals.lease_eval))


def test_the_result_of_an_eval_is_scored_and_not_stored() -> None:
    scene, lease = an_eval()
    effects = scene.delivers(lease, reward=0.5)
    assert the_acknowledgement(effects).outcome == "accepted"
    (ended,) = emitted(effects, "eval_ended")
    assert (ended["num_done"], ended["reward_mean"], ended["reason"]) == (1, 0.5, "")
    assert the_acknowledgement(scene.delivers(lease)).outcome == "duplicate"


@pytest.mark.parametrize("what", ["version", "size"])
def test_an_eval_of_another_version_or_size_is_refused(what: str) -> None:
    scene, lease = an_eval()
    headers = (a_header(V1),) if what == "version" else (a_header(V0), a_header(V0))
    acknowledged = the_acknowledgement(scene.delivers(lease, trajectories=headers))
    assert acknowledged.outcome == "refused"
    assert acknowledged.reason == (
        "evaluated 1 trajectories of ['1.1'], asked were 1 of 1.0"
        if what == "version"
        else "evaluated 2 trajectories of ['1.0'], asked were 1 of 1.0"
    )
    assert scene.state.evals.evals["e"].attempts == {0: 1}


def test_the_result_of_another_workers_eval_is_refused() -> None:
    scene, lease = an_eval(workers=("w-1", "w-2"))
    other = "w-2" if scene.grantee[lease] == "w-1" else "w-1"
    with scene.refuses("wrong_lease", f"eval lease {lease} was granted to w-\\d, not to {other}"):
        scene.delivers(lease, by=other)


def test_a_failed_eval_lease_is_granted_again_a_bounded_number_of_times() -> None:
    scene, _ = an_eval()
    for _ in range(2):
        (lease,) = scene.state.evals.lease_eval
        assert not emitted(scene.fails(lease), "eval_ended")
    (lease,) = scene.state.evals.lease_eval
    (ended,) = emitted(scene.fails(lease), "eval_ended")
    assert (ended["num_done"], ended["num_asked"]) == (0, 1)
    assert ended["reason"] == "1 of 1 not done: boom"


def test_the_failure_of_another_workers_eval_lease_changes_nothing() -> None:
    scene, lease = an_eval(workers=("w-1", "w-2"))
    other = "w-2" if scene.grantee[lease] == "w-1" else "w-1"
    scene.fails(lease, by=other)
    assert list(scene.state.evals.lease_eval) == [lease]
    assert scene.state.evals.evals["e"].attempts == {}


def test_a_restored_coordinator_calls_results_of_its_earlier_life_superseded() -> None:
    earlier = a_running_scene(slots=1)
    scene = Scene(a_restored_run())
    scene.worker_joins("w-1", installed=a_version(3), held=("l.1",))
    effects = scene.receive("w-1", earlier.result("l.1"))
    assert the_acknowledgement(effects).outcome == "superseded"


def test_the_learner_may_not_send_what_only_workers_send() -> None:
    scene = a_running_scene()
    with scene.refuses("unknown_peer", "learner is not known here"):
        scene.beats(LEARNER)
