"""Who is asked to audit what, what a verdict does, and what becomes of an offender."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from core_builders import (
    LEARNER,
    Scene,
    a_restored_run,
    a_running_scene,
    a_stored_result,
    a_version,
    delivered,
    emitted,
    sent,
)

from echo2.core.audits import Quarantine, is_chosen
from echo2.core.effects import Effect, OrderAudit
from echo2.core.events import PardonRequested
from echo2.core.group import GroupState
from echo2.core.restored import RestoredGroup
from echo2.core.settings import AuditSettings
from echo2.core.suspicion import MismatchRule
from echo2.core.waits import waiting_text
from echo2.messages import AuditDone, AuditFailed, BatchGranted, GroupAcknowledged, Refused
from echo2.types import GroupId, GroupMismatch, LeaseId, PeerId, Task

AUDITOR = "aud"


def audit(**changes: Any) -> AuditSettings:
    values: dict[str, Any] = {"share": 1.0, "workers": (PeerId(AUDITOR),), "key": b"secret"}
    return AuditSettings(**{**values, **changes})


NEVER_LATE = audit(wait_s=1e6)


def an_audited_scene(
    workers: Iterable[str] = ("w-1",), *, auditors: int = 1, **changes: Any
) -> Scene:
    """Workers that sample two groups each, and auditors that sample nothing, for they have not
    installed anything when the tasks come."""
    settings = changes.pop("audit", None) or audit(
        workers=tuple(PeerId(AUDITOR if i == 0 else f"{AUDITOR}{i}") for i in range(auditors))
    )
    scene = a_running_scene(workers=workers, audit=settings, **changes)
    for name in settings.workers[:auditors]:
        scene.worker_joins(name, slots=1, replays=True)
        scene.installs(name, a_version(0))
    return scene


def orders(effects: Iterable[Effect]) -> list[OrderAudit]:
    return [effect for effect in effects if isinstance(effect, OrderAudit)]


def says(scene: Scene, order: OrderAudit, *rewards: float, problem: str = "") -> list[Effect]:
    return scene.receive(
        order.peer,
        AuditDone(lease=order.result.lease, group=order.group, rewards=rewards, problem=problem),
    )


def own(scene: Scene, worker: str = "w-1") -> list[str]:
    return list(scene.leases(worker))


# --------------------------------------------------------------------------- the choice


def test_the_share_is_met_the_same_for_every_attempt_and_secret() -> None:
    groups = [GroupId(f"g{i}") for i in range(20_000)]

    def chosen(share: float, key: bytes) -> set[str]:
        settings = audit(share=share, key=key)
        return {g for g in groups if is_chosen(g, run_id="r", audit=settings)}

    tenth = chosen(0.1, b"k")
    assert len(tenth) == pytest.approx(2000, rel=0.1)
    assert chosen(0.1, b"k") == tenth
    assert chosen(0.0, b"k") == set()
    assert chosen(1.0, b"k") == set(groups)
    assert tenth < chosen(0.3, b"k")  # more, and the same ones among them
    assert len(tenth & chosen(0.1, b"other")) == pytest.approx(200, rel=0.4)


def test_what_is_not_chosen_goes_into_the_buffer_at_once() -> None:
    scene = an_audited_scene(audit=audit(share=0.0))
    scene.delivers(own(scene)[0])
    assert scene.state_of("g0") is GroupState.BUFFERED


# ------------------------------------------------------------------------------ verdicts


def test_a_chosen_group_is_trained_only_after_its_verdict() -> None:
    scene = an_audited_scene()
    lease = own(scene)[0]
    effects = scene.delivers(lease)
    assert sent(effects, GroupAcknowledged)[0].outcome == "accepted"
    assert scene.state_of("g0") is GroupState.AUDITING
    (order,) = orders(effects)
    assert (order.peer, order.group, order.result.lease) == (AUDITOR, "g0", lease)
    assert emitted(effects, "audit_opened") == [{"group_id": "g0", "lease": lease, "worker": "w-1"}]
    effects = says(scene, order, 1.0)
    (told,) = emitted(effects, "group_audited")
    assert (told["verdict"], told["auditor"], told["reward_diff_max"]) == ("confirmed", "aud", 0.0)
    assert scene.state_of("g0") is GroupState.BUFFERED
    assert scene.state.audits.verdicts == {"confirmed": 1}


def test_a_batch_waits_for_a_verdict_and_says_so() -> None:
    scene = an_audited_scene()
    found = [orders(scene.delivers(lease))[0] for lease in own(scene)]
    assert not delivered(scene.wants_batch())
    scene.tick(3)
    assert "2 wait for their audit, the oldest 3 s, asked: aud" in waiting_text(scene.state, "")
    says(scene, found[0], 1.0)
    effects = says(scene, found[1], 1.0)
    assert delivered(effects) == ["g0", "g1"]


def test_a_difference_within_the_tolerance_is_none() -> None:
    scene = an_audited_scene(audit=audit(reward_tolerance=0.01))
    (order,) = orders(scene.delivers(own(scene)[0], reward=1.0))
    assert emitted(says(scene, order, 0.991), "group_audited")[0]["verdict"] == "confirmed"


@pytest.mark.parametrize(
    ("rewards", "problem", "reason"),
    [
        ((0.25,), "", "1 of 1 rewards are wrong: trajectory 0 claims 1, recomputed 0.25"),
        ((), "the environment asks for turn 2, it has 1", "the environment asks for turn 2"),
    ],
)
def test_a_refuted_group_is_withdrawn_and_its_attempt_not_counted(
    rewards: tuple[float, ...], problem: str, reason: str
) -> None:
    scene = an_audited_scene()
    lease = own(scene)[0]
    (order,) = orders(scene.delivers(lease))
    effects = says(scene, order, *rewards, problem=problem)
    (told,) = emitted(effects, "group_audited")
    assert told["verdict"] == "refuted"
    assert reason in told["reason"]
    assert (told["claimed"], told["recomputed"]) == ([1.0], list(rewards))
    (withdrawn,) = emitted(effects, "group_withdrawn")
    assert (withdrawn["group_id"], withdrawn["lease"]) == ("g0", lease)
    assert not emitted(effects, "worker_quarantined")
    group = scene.group("g0")
    assert (group.state, group.avoid, group.attempts) == (GroupState.QUEUED, "w-1", 0)


def test_a_refuted_result_that_is_sent_again_is_not_taken_again() -> None:
    scene = an_audited_scene()
    lease = own(scene)[0]
    (order,) = orders(scene.delivers(lease))
    says(scene, order, 0.0)
    effects = scene.delivers(lease)
    assert sent(effects, GroupAcknowledged)[0].outcome == "duplicate"
    assert scene.state_of("g0") is not GroupState.STORING


def test_rewards_of_another_number_are_refused() -> None:
    scene = an_audited_scene()
    (order,) = orders(scene.delivers(own(scene)[0]))
    with scene.refuses("wrong_audit", "aud recomputed 2 rewards of g0, which has 1 trajectories"):
        says(scene, order, 1.0, 1.0)


def test_a_worker_that_is_no_auditor_is_refused() -> None:
    scene = an_audited_scene(workers=("w-1", "w-2"))
    (order,) = orders(scene.delivers(own(scene)[0]))
    with scene.refuses("not_an_auditor", "w-2 is no auditor: it is not named in audit.workers"):
        scene.receive("w-2", AuditDone(lease=order.result.lease, group=order.group, rewards=(1.0,)))
    with scene.refuses("unknown_peer", "say hello first"):
        scene.receive("w-9", AuditDone(lease=order.result.lease, group=order.group, rewards=(1.0,)))


def test_answers_that_are_repeated_late_or_of_another_lease_change_nothing() -> None:
    scene = an_audited_scene()
    (order,) = orders(scene.delivers(own(scene)[0]))
    other = AuditDone(lease=LeaseId("l.99"), group=order.group, rewards=(0.0,))
    assert not emitted(scene.receive(AUDITOR, other), "group_audited")
    says(scene, order, 1.0)
    assert not emitted(says(scene, order, 0.0), "group_audited")
    assert scene.state_of("g0") is GroupState.BUFFERED


# ----------------------------------------------------------------------- who is asked


def test_a_worker_does_not_audit_its_own_groups() -> None:
    scene = an_audited_scene(workers=(AUDITOR, "w-1"), audit=audit(), auditors=0)
    scene.worker_joins(
        AUDITOR, slots=2, replays=True, held=tuple(own(scene, AUDITOR)), installed=a_version(0)
    )
    effects = scene.delivers(own(scene, AUDITOR)[0])
    assert not orders(effects)
    (told,) = emitted(effects, "group_audited")
    assert told["verdict"] == "unaudited"
    assert told["reason"] == "aud is the only auditor here, and sampled it"


def test_an_auditors_group_is_audited_by_another_one() -> None:
    scene = an_audited_scene(auditors=2)
    scene.fails(own(scene)[0])  # so that the group is leased to an auditor
    lease = next(each for name in ("aud", "aud1") for each in own(scene, name))
    (order,) = orders(scene.delivers(lease))
    assert order.peer != scene.grantee[lease]


def test_what_cannot_be_replayed_there_is_asked_of_nobody() -> None:
    scene = an_audited_scene(auditors=0, audit=audit())
    scene.worker_joins(AUDITOR, slots=1, replays=False)
    scene.installs(AUDITOR, a_version(0))
    assert not orders(scene.delivers(own(scene)[0]))
    assert scene.state_of("g0") is GroupState.AUDITING


def test_an_auditor_has_only_so_many_orders_at_once() -> None:
    scene = an_audited_scene(slots=4, groups_per_step=4, audit=audit(in_flight_max=2), auditors=1)
    found = [order for lease in own(scene) for order in orders(scene.delivers(lease))]
    assert len(found) == 2
    assert len(orders(says(scene, found[0], 1.0))) == 1


def test_when_an_auditor_leaves_another_is_asked() -> None:
    scene = an_audited_scene(auditors=2)
    (order,) = orders(scene.delivers(own(scene)[0]))
    scene.passes(20, alive=[each for each in ("w-1", "aud", "aud1") if each != order.peer])
    audit_of = scene.state.audits.open.get("g0")
    assert audit_of is not None
    assert audit_of.auditor not in (None, order.peer)


def test_an_order_without_an_answer_is_given_again() -> None:
    scene = an_audited_scene()
    (order,) = orders(scene.delivers(own(scene)[0]))
    scene.passes(14, alive=("w-1", "aud"))
    scene.now += 2
    scene.beats("aud")
    assert [each.group for each in orders(scene.tick())] == [order.group]


def test_an_auditor_that_comes_back_is_asked_again_at_once() -> None:
    scene = an_audited_scene()
    (order,) = orders(scene.delivers(own(scene)[0]))
    effects = scene.worker_joins(AUDITOR, replays=True, installed=a_version(0))
    assert [each.group for each in orders(effects)] == [order.group]


def test_an_auditor_that_cannot_say_is_followed_by_another_then_by_none() -> None:
    scene = an_audited_scene(auditors=2)
    (order,) = orders(scene.delivers(own(scene)[0]))

    def fails(order: OrderAudit) -> list[Effect]:
        message = AuditFailed(lease=order.result.lease, group=order.group, text="it hangs")
        return scene.receive(order.peer, message)

    (second,) = orders(fails(order))
    assert second.peer != order.peer
    (told,) = emitted(fails(second), "group_audited")
    assert told["verdict"] == "unaudited"
    assert told["reason"] == f"{second.peer} could not say: it hangs"
    assert scene.state_of("g0") is GroupState.BUFFERED


# -------------------------------------------------------------------- the wait is bounded


def test_without_a_verdict_a_group_is_trained_unaudited_after_wait_s() -> None:
    scene = an_audited_scene(audit=audit(wait_s=10.0), auditors=1)
    scene.delivers(own(scene)[0])
    scene.passes(10, alive=("w-1", "aud"))
    assert scene.state_of("g0") is GroupState.AUDITING
    scene.now += 1
    (told,) = emitted(scene.tick(), "group_audited")
    assert told["verdict"] == "unaudited"
    assert told["reason"] == "no verdict at aud after 11.0 s, audit.wait_s is 10"
    assert scene.state_of("g0") is GroupState.BUFFERED


def test_nobody_waits_for_auditors_that_are_not_here() -> None:
    scene = an_audited_scene(auditors=0, audit=audit())
    scene.delivers(own(scene)[0])
    assert scene.state_of("g0") is GroupState.AUDITING  # one may still come
    scene.passes(16, alive=("w-1",))
    assert scene.state_of("g0") is GroupState.BUFFERED
    effects = scene.delivers(own(scene)[0])
    (told,) = emitted(effects, "group_audited")
    assert told["reason"] == "no auditor was here that could be asked"


def test_a_group_that_is_too_old_when_its_verdict_comes_expires() -> None:
    scene = an_audited_scene(("w-1", "w-2"), late="drop", staleness_max=0, audit=NEVER_LATE)
    leases = own(scene)
    (order,) = orders(scene.delivers(leases[0]))
    group = scene.group(order.group)
    scene.state.step += 1  # as if a batch of other groups had been trained
    effects = says(scene, order, 1.0)
    assert emitted(effects, "group_audited")[0]["verdict"] == "confirmed"
    (told,) = emitted(effects, "group_ended")
    assert (told["group_id"], told["end"]) == (group.id, "expired")


# ------------------------------------------------------------------------- quarantine


def a_scene_with_an_offender(**changes: Any) -> tuple[Scene, list[Effect]]:
    """w-1 delivered two groups whose rewards are wrong; a third is buffered by chance."""
    scene = an_audited_scene(workers=("w-1", "w-2"), slots=4, groups_per_step=4, **changes)
    leases = own(scene)
    found = [orders(scene.delivers(lease))[0] for lease in leases[:2]]
    says(scene, found[0], 0.0)
    return scene, says(scene, found[1], 0.0)


def test_two_refuted_groups_quarantine_a_worker_with_the_evidence() -> None:
    scene, effects = a_scene_with_an_offender()
    (told,) = emitted(effects, "worker_quarantined")
    assert (told["worker"], told["cause"], told["step"]) == ("w-1", "rewards", 0)
    assert [each["group_id"] for each in told["evidence"]] == ["g0", "g2"]
    assert [each["claimed"] for each in told["evidence"]] == [[1.0], [1.0]]
    assert [each["recomputed"] for each in told["evidence"]] == [[0.0], [0.0]]
    (refused,) = sent(effects, Refused, to="w-1")
    assert refused.fatal
    assert "w-1 is quarantined since step 0: 2 of its groups were refuted" in refused.text
    assert "echo2 keys pardon w-1" in refused.text
    assert scene.state.members.get(PeerId("w-1")) is None
    assert not own(scene)


def test_its_leases_are_given_to_others_and_no_attempt_is_counted() -> None:
    scene, effects = a_scene_with_an_offender()
    lost = [each["group_id"] for each in emitted(effects, "lease_revoked")]
    assert lost
    for group in lost:
        assert scene.group(group).attempts <= 1
    assert emitted(effects, "worker_gone")


def test_its_hello_is_refused_until_it_is_pardoned() -> None:
    scene, _ = a_scene_with_an_offender()
    (refused,) = sent(scene.worker_joins("w-1"), Refused)
    assert (refused.reason, refused.fatal) == ("quarantined", True)
    effects = scene.handle(PardonRequested(PeerId("w-1")))
    assert emitted(effects, "worker_pardoned") == [{"worker": "w-1"}]
    assert not sent(scene.worker_joins("w-1"), Refused)
    assert not emitted(scene.handle(PardonRequested(PeerId("w-7"))), "worker_pardoned")


def test_what_it_delivered_and_no_batch_holds_is_withdrawn() -> None:
    settings = audit(share=0.5, key=b"a", refuted_needed=1)
    groups = [GroupId(f"g{i}") for i in range(8)]
    chosen = [g for g in groups if is_chosen(g, run_id="run", audit=settings)]
    scene = an_audited_scene(workers=("w-1",), slots=8, groups_per_step=4, audit=settings)
    leases = {scene.grants[lease].group: lease for lease in own(scene)}
    unchosen = [g for g in groups if g not in chosen]
    buffered = unchosen[0]
    scene.delivers(leases[buffered])
    assert scene.state_of(buffered) is GroupState.BUFFERED
    (order,) = orders(scene.delivers(leases[chosen[0]]))
    effects = says(scene, order, 0.0)
    (told,) = emitted(effects, "worker_quarantined")
    assert told["withdrawn"] == [buffered]
    assert [each["group_id"] for each in emitted(effects, "group_withdrawn")] == [
        chosen[0],
        buffered,
    ]


def test_what_was_being_stored_is_withdrawn_and_not_taken_when_it_is_durable() -> None:
    scene = an_audited_scene(
        workers=("w-1",), slots=4, groups_per_step=4, audit=audit(refuted_needed=1)
    )
    leases = own(scene)
    (order,) = orders(scene.delivers(leases[0]))
    scene.delivers(leases[1], durable=False)
    group = scene.grants[leases[1]].group
    assert scene.state_of(group) is GroupState.STORING
    scene.handle(PardonRequested(PeerId("nobody")), durable=False)
    message = AuditDone(lease=order.result.lease, group=order.group, rewards=(0.0,))
    scene.receive(AUDITOR, message, durable=False)
    assert scene.state_of(group) is not GroupState.STORING
    effects = scene.becomes_durable()
    (told,) = [each for each in sent(effects, GroupAcknowledged) if each.lease == leases[1]]
    assert told.outcome == "superseded"
    assert "w-1 is quarantined" in told.reason


def test_what_the_learner_has_is_named_and_stays() -> None:
    scene = an_audited_scene(
        workers=("w-1",), slots=6, groups_per_step=2, audit=audit(refuted_needed=1)
    )
    for lease in own(scene)[:2]:
        says(scene, orders(scene.delivers(lease))[0], 1.0)
    had = delivered(scene.wants_batch())
    (order,) = orders(scene.delivers(own(scene)[0]))
    (told,) = emitted(says(scene, order, 0.0), "worker_quarantined")
    assert told["in_training"] == had == ["g0", "g1"]
    effects = scene.completes()
    assert [each["end"] for each in emitted(effects, "group_ended")] == ["trained", "trained"]


def test_the_event_names_what_was_trained_of_it_already() -> None:
    scene = an_audited_scene(workers=("w-1",), slots=6, audit=audit(refuted_needed=1))
    for lease in own(scene)[:2]:
        says(scene, orders(scene.delivers(lease))[0], 1.0)
    scene.trains()
    (order,) = orders(scene.delivers(own(scene)[0]))
    (told,) = emitted(says(scene, order, 0.0), "worker_quarantined")
    assert (told["num_trained"], told["trained_since"]) == (2, 0)
    assert told["trained"] == ["g0", "g1"]
    assert told["in_training"] == []


def test_with_report_nobody_is_quarantined_and_it_is_told_once() -> None:
    scene, effects = a_scene_with_an_offender(audit=audit(action="report"))
    (told,) = emitted(effects, "worker_suspected")
    assert (told["worker"], told["cause"]) == ("w-1", "rewards")
    assert scene.state.members.get(PeerId("w-1")) is not None
    (order,) = orders(scene.delivers(own(scene)[0]))
    assert not emitted(says(scene, order, 0.0), "worker_suspected")


# --------------------------------------------------------------------------- logprobs


def trains_with(scene: Scene, **diffs: float) -> list[Effect]:
    """One step in which every worker delivers its groups, and each is compared."""
    for lease in scene.leases():
        scene.delivers(lease)
    effects = scene.wants_batch()
    batch = scene.state.seat.batch
    assert batch is not None
    told = [GroupMismatch(g.id, 64, diffs[g.result.worker]) for g in batch.groups]
    effects += scene.completes(mismatch=told)
    scene.publishes(scene.state.step)
    for name in list(scene.state.members.workers):
        scene.installs(name, a_version(scene.state.step))
    scene.submits() if scene.wanted is not None else None
    return effects


def test_wrong_logprobs_quarantine_a_worker_when_its_step_is_over() -> None:
    rule = MismatchRule(run_precision="bfloat16")
    names = ("w-1", "w-2", "w-3", "w-4")
    scene = a_running_scene(
        workers=names, slots=1, groups_per_step=4, staleness_max=0, audit=AuditSettings(rule=rule)
    )
    honest = dict.fromkeys(names, 0.01)
    for _ in range(2):
        assert not emitted(trains_with(scene, **{**honest, "w-2": 0.9}), "worker_quarantined")
    (told,) = emitted(trains_with(scene, **{**honest, "w-2": 0.9}), "worker_quarantined")
    assert (told["worker"], told["cause"], told["step"]) == ("w-2", "mismatch", 3)
    assert told["centre"] == pytest.approx(0.01)
    assert told["bound"] == 0.05
    assert len(told["evidence"]) == 3
    assert told["in_training"] == []
    assert told["num_trained"] == 3


def test_the_only_worker_is_only_reported() -> None:
    rule = MismatchRule(run_precision="bfloat16")
    scene = a_running_scene(
        workers=("w-1",),
        slots=1,
        groups_per_step=1,
        staleness_max=0,
        audit=AuditSettings(rule=rule),
    )
    effects: list[Effect] = []
    for _ in range(5):
        effects += trains_with(scene, **{"w-1": 0.9})
    assert not emitted(effects, "worker_quarantined")
    (told,) = emitted(effects, "worker_suspected")
    assert (told["worker"], told["cause"]) == ("w-1", "mismatch")


def test_a_fleet_that_differs_as_a_whole_is_told_once() -> None:
    rule = MismatchRule(run_precision="bfloat16")
    names = ("w-1", "w-2", "w-3")
    scene = a_running_scene(
        workers=names, slots=1, groups_per_step=3, staleness_max=0, audit=AuditSettings(rule=rule)
    )
    effects: list[Effect] = []
    for _ in range(4):
        effects += trains_with(scene, **dict.fromkeys(names, 0.3))
    (told,) = emitted(effects, "fleet_suspected")
    assert told["centre"] == pytest.approx(0.3)
    assert told["bound"] == 0.05
    assert not emitted(effects, "worker_quarantined")


# ---------------------------------------------------------------------------- restarts


def a_restored_group(index: int, worker: str) -> RestoredGroup:
    result = a_stored_result(a_version(3), lease=f"l.{index}", worker=worker)
    return RestoredGroup(GroupId(f"g{index}"), Task(index, "{}"), result, 1)


def a_restarted_scene(**changes: Any) -> Scene:
    """v is 3; g6 of w-1 and g7 of w-2 were acknowledged."""
    restored = a_restored_run(
        groups=(a_restored_group(6, "w-1"), a_restored_group(7, "w-2")),
        open_indexes=(),
        **changes,
    )
    scene = Scene(restored, audit=audit(), staleness_max=1)
    scene.tick()
    return scene


def test_after_a_restart_chosen_groups_are_audited_once_the_learner_has_spoken() -> None:
    scene = a_restarted_scene()
    assert scene.state_of("g6") is scene.state_of("g7") is GroupState.AUDITING
    scene.learner_joins(3, incarnation=1)
    effects = scene.worker_joins(AUDITOR, replays=True, installed=a_version(3))
    assert not orders(effects)  # the learner may be training them
    assert [each.group for each in orders(scene.wants_batch(3))] == ["g6", "g7"]


def test_after_a_restart_no_batch_of_others_overtakes_what_is_audited_again() -> None:
    """The learner may have been granted it before, and says so later."""
    scene = a_restarted_scene()
    scene.learner_joins(3, incarnation=1)
    scene.worker_joins(AUDITOR, replays=True, installed=a_version(3))
    scene.worker_joins("w-3", slots=4, installed=a_version(3))
    first, second = orders(scene.wants_batch(3))
    assert not delivered(says(scene, first, 1.0))
    assert not sent(scene.completes(3, groups=("g6", "g7")), Refused)
    assert not emitted(says(scene, second, 1.0), "group_audited")


def test_after_a_restart_what_the_learner_trained_needs_no_second_verdict() -> None:
    scene = a_restarted_scene()
    scene.learner_joins(3, incarnation=1)
    effects = scene.completes(3, groups=("g6", "g7"))
    assert not sent(effects, Refused)
    assert [each["end"] for each in emitted(effects, "group_ended")] == ["trained", "trained"]
    assert not scene.state.audits.open


def test_a_quarantine_survives_and_what_the_learner_had_is_believed_once_more() -> None:
    quarantine = Quarantine("rewards", "2 were refuted", 3, (GroupId("g6"),))
    for speaks in ("completes", "asks"):
        scene = a_restarted_scene(quarantined=((PeerId("w-1"), quarantine),))
        (refused,) = sent(scene.worker_joins("w-1"), Refused)
        assert refused.reason == "quarantined"
        scene.learner_joins(3, incarnation=1)
        if speaks == "completes":
            effects = scene.completes(3, groups=("g6", "g7"))
            assert len(emitted(effects, "group_ended")) == 2
        else:
            effects = scene.wants_batch(3)
            assert [each["group_id"] for each in emitted(effects, "group_withdrawn")] == ["g6"]


def test_a_rewind_gives_nothing_of_a_quarantined_worker_back_to_the_buffer() -> None:
    scene = an_audited_scene(workers=("w-1",), slots=6, audit=audit(refuted_needed=1))
    for lease in own(scene)[:2]:
        says(scene, orders(scene.delivers(lease))[0], 1.0)
    scene.trains()
    (order,) = orders(scene.delivers(own(scene)[0]))
    says(scene, order, 0.0)
    effects = scene.learner_joins(0)
    assert {each["to"] for each in emitted(effects, "group_returned")} == {"queue"}


def test_a_batch_that_goes_back_holds_nothing_of_a_quarantined_worker() -> None:
    scene = an_audited_scene(workers=("w-1",), slots=6, audit=audit(refuted_needed=1))
    for lease in own(scene)[:2]:
        says(scene, orders(scene.delivers(lease))[0], 1.0)
    scene.wants_batch()
    (order,) = orders(scene.delivers(own(scene)[0]))
    says(scene, order, 0.0)
    scene.learner_joins(0, peer=LEARNER)
    effects = scene.wants_batch(0)
    assert not sent(effects, BatchGranted)
    assert {each["group_id"] for each in emitted(effects, "group_withdrawn")} == {"g0", "g1"}
