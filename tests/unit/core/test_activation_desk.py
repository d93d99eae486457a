"""Who works and who stands by, which machines are on, and what that costs."""

from __future__ import annotations

from typing import Any

import pytest
from core_builders import Scene, a_running_scene, a_version, emitted

from echo2.core.activation_policy import ActivationSettings
from echo2.core.effects import Effect, StartMachine, StopMachine
from echo2.core.events import MachineChanged, MachineFound, MachinesFound
from echo2.core.settings import ActivationTerms, AuditSettings, OfferTerms
from echo2.core.status import status
from echo2.messages import Draining
from echo2.types import PeerId

QUICK = ActivationSettings(margin=1.0, persistence_s=2.0, cool_down_s=3.0)
SMALL = OfferTerms(name="small", usd_per_h=1.0, rate=1.0, count=3)
LARGE = OfferTerms(name="large", usd_per_h=9.0, rate=4.0, count=1, standby_usd_per_h=0.5)


def terms(**changes: Any) -> ActivationTerms:
    values: dict[str, Any] = {"policy": "cheapest", "settings": QUICK, "train_s": 1.0}
    return ActivationTerms(**{**values, **changes})


def a_fleet(num_workers: int, **changes: Any) -> Scene:
    """Each makes a group per second and costs 1 $/h, or nothing while it stands by; the learner
    needs two groups per second."""
    given = terms(offers=(OfferTerms(name="w", usd_per_h=1.0, rate=1.0, standby_usd_per_h=0.0),))
    scene = a_running_scene(slots=1, workers=(), tasks=0, **{"activation": given, **changes})
    for number in range(1, num_workers + 1):
        scene.worker_joins(f"w-{number}", slots=1)
        scene.installs(f"w-{number}", scene.state.lineage.newest)
    return scene


def actives(scene: Scene) -> list[str]:
    return sorted(w.peer for w in scene.state.members.workers.values() if w.active)


def of_kind(effects: list[Effect], kind: type[Effect]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


# ------------------------------------------------------------------------- workers


def test_without_a_policy_whoever_joins_works() -> None:
    scene = a_fleet(5, activation=ActivationTerms())
    scene.passes(30, alive=[f"w-{i}" for i in range(1, 6)])
    assert len(actives(scene)) == 5
    assert status(scene.state, "")["activation"] is None


def test_a_surplus_is_released_and_gets_no_lease_and_no_price() -> None:
    everyone = [f"w-{i}" for i in range(1, 6)]
    scene = a_fleet(5)
    scene.passes(60, alive=everyone)
    assert len(actives(scene)) == 3  # two, and what lies within the error of their rates
    scene.submits()
    granted = {scene.grantee[lease] for lease in scene.leases()}
    assert granted <= set(actives(scene))
    assert granted
    before = {w.peer: w.cost_usd for w in scene.state.members.workers.values()}
    scene.tick(1.0)
    for worker in scene.state.members.workers.values():
        spent = worker.cost_usd - before[worker.peer]
        assert spent == pytest.approx(1.0 / 3600 if worker.active else 0.0)


def test_who_comes_while_enough_work_stands_by_and_says_so() -> None:
    everyone = [f"w-{i}" for i in range(1, 5)]
    scene = a_fleet(4)
    scene.passes(60, alive=everyone)
    effects = scene.worker_joins("w-9")
    assert emitted(effects, "worker_released") == [
        {"worker": "w-9", "reason": "came while enough are active"}
    ]
    assert not scene.state.members.get(PeerId("w-9")).active


def test_who_leaves_is_replaced_by_one_that_stands_by() -> None:
    everyone = [f"w-{i}" for i in range(1, 6)]
    scene = a_fleet(5)
    scene.passes(60, alive=everyone)
    gone = actives(scene)[:2]
    scene.receive(gone[0], Draining(reason="spot"))
    scene.receive(gone[1], Draining(reason="spot"))
    scene.passes(30, alive=everyone)
    working = set(actives(scene)) - set(gone)
    assert len(working) >= 2


def test_somebody_works_whatever_was_decided() -> None:
    scene = a_fleet(3)
    for worker in scene.state.members.workers.values():
        worker.active = False
    effects = scene.tick(0.1)
    (activated,) = emitted(effects, "worker_activated")
    assert activated["reason"] == "nobody who is active is ready"
    scene.submits(2)
    assert scene.leases()


def test_an_auditor_never_stands_by() -> None:
    audit = AuditSettings(share=0.1, workers=(PeerId("w-1"),), key=b"k" * 32)
    scene = a_fleet(5, audit=audit)
    scene.passes(120, alive=[f"w-{i}" for i in range(1, 6)])
    assert "w-1" in actives(scene)
    assert len(actives(scene)) < 5


def test_before_anything_is_measured_everybody_works() -> None:
    scene = a_fleet(5, activation=terms(train_s=None))
    scene.passes(60, alive=[f"w-{i}" for i in range(1, 6)])
    assert len(actives(scene)) == 5
    assert "not measured yet" in status(scene.state, "")["activation"]["decision"]


def test_rates_are_slots_over_latency_with_the_error_of_the_mean() -> None:
    scene = a_fleet(2)
    worker = scene.state.members.get(PeerId("w-1"))
    worker.slots = 4
    for latency_s in (1.0, 3.0, 2.0, 2.0):
        worker.latency_s.add(latency_s)
    desk = scene.coordinator.activation
    (known, other) = desk._estimates(desk._rates())
    assert known.rate_mean == pytest.approx(4 / worker.latency_s.mean)
    assert known.num_samples == 4
    assert known.rate_deviation > 0
    assert other.prior_rate == pytest.approx(known.rate_mean)  # of the same offer


def test_a_learner_that_waits_although_enough_work_raises_the_wanted_rate() -> None:
    everyone = ["w-1", "w-2", "w-3"]
    scene = a_fleet(3)
    scene.passes(20, alive=everyone)
    assert scene.state.activation.boost == 1.0
    for _ in range(6):
        scene.state.wait_s.add(2.0)
        scene.state.busy_s.add(1.0)
        scene.passes(2, alive=everyone)
    assert 1.05 < scene.state.activation.boost <= 2.0
    for _ in range(20):  # until what was waited for is forgotten
        scene.state.wait_s.add(0.0)
        scene.passes(2, alive=everyone)
    raised = scene.state.activation.boost
    for _ in range(20):
        scene.state.wait_s.add(0.0)
        scene.passes(2, alive=everyone)
    assert 1.0 <= scene.state.activation.boost < raised


# ------------------------------------------------------------------------- machines


def a_provisioned_run(**changes: Any) -> Scene:
    values: dict[str, Any] = {"offers": (SMALL, LARGE), "provisions": True, "machines_max": 10}
    scene = Scene(activation=terms(**{**values, **changes}), life="abc", groups_per_step=2)
    scene.learner_joins()
    scene.publishes(0)
    return scene


def found(scene: Scene, *machines: MachineFound) -> list[Effect]:
    return scene.handle(MachinesFound(machines))


def is_up(scene: Scene, name: str) -> None:
    scene.handle(MachineChanged(PeerId(name), "running"))
    scene.worker_joins(name)
    scene.installs(name, a_version(0))


def until_started(scene: Scene, seconds: int = 10) -> list[StartMachine]:
    started: list[StartMachine] = []
    for _ in range(seconds):
        scene.learner_beats()
        started += of_kind(scene.tick(1.0), StartMachine)
    return started


def test_nothing_is_started_before_it_is_known_what_is_on() -> None:
    scene = a_provisioned_run()
    assert until_started(scene) == []
    found(scene)
    assert until_started(scene)


def test_the_cheapest_machines_that_are_enough_are_started_and_their_lead_time_measured() -> None:
    scene = a_provisioned_run()
    found(scene)
    started = until_started(scene)
    assert [each.offer for each in started] == ["small", "small"]
    assert started[0].worker == "small-abc-1"
    for each in started:
        is_up(scene, each.worker)
    told = status(scene.state, "")["activation"]
    assert [m["state"] for m in told["machines"]] == ["running", "running"]
    assert told["lead_s"]["small"] > 0


def test_a_machine_is_paid_from_the_order_until_it_is_gone() -> None:
    scene = a_provisioned_run(policy="all", offers=(SMALL,), machines_max=1)
    found(scene)
    (started,) = until_started(scene, 2)
    before = scene.state.cost_usd
    scene.tick(3600.0)
    assert scene.state.cost_usd - before == pytest.approx(1.0)
    scene.handle(MachineChanged(started.worker, "gone"))
    scene.state.activation.records["small"].rests_until = 1e9
    before = scene.state.cost_usd
    scene.tick(3600.0)
    assert scene.state.cost_usd == before


def test_a_released_machine_is_stopped_when_its_last_lease_has_ended() -> None:
    scene = a_provisioned_run(train_s=0.7, offers=(SMALL,))  # all three are needed
    found(scene)
    for each in until_started(scene):
        is_up(scene, each.worker)
    scene.submits(2)
    leases = scene.leases()
    assert len({scene.grantee[lease] for lease in leases}) == 2
    scene.state.busy_s.add(40.0)  # the learner needs far less from now on

    def stopped_in(seconds: float) -> set[str]:
        stopped: set[str] = set()
        for _ in range(int(seconds * 5)):
            for name in scene.state.members.workers:
                scene.beats(name)
            scene.learner_beats()
            stopped |= {each.worker for each in of_kind(scene.tick(0.2), StopMachine)}
        return stopped

    before = stopped_in(15)
    assert not before & {scene.grantee[lease] for lease in leases}
    for lease in leases:
        scene.delivers(lease)
    assert len(before | stopped_in(2)) == 2  # one has to stay


def test_a_start_that_failed_is_not_tried_at_once_again() -> None:
    scene = a_provisioned_run(policy="all", offers=(SMALL,), machines_max=1)
    found(scene)
    (started,) = until_started(scene, 1)
    effects = scene.handle(MachineChanged(started.worker, "gone", "exit 3: no such image"))
    (told,) = emitted(effects, "machine_changed")
    assert (told["state"], told["reason"]) == ("gone", "exit 3: no such image")
    assert until_started(scene, 4) == []
    (again,) = until_started(scene, 3)
    assert again.worker != started.worker


def test_a_machine_whose_worker_never_comes_is_stopped() -> None:
    scene = a_provisioned_run(policy="all", offers=(SMALL,), machines_max=1, ready_timeout_s=5.0)
    found(scene)
    (started,) = until_started(scene, 1)
    scene.handle(MachineChanged(started.worker, "running"))
    effects = [effect for _ in range(7) for effect in scene.tick(1.0)]
    assert of_kind(effects, StopMachine) == [StopMachine(started.worker)]
    assert "was not ready for" in emitted(effects, "machine_changed")[0]["reason"]


def test_what_an_earlier_coordinator_started_is_adopted_or_stopped() -> None:
    scene = a_provisioned_run(offers=(SMALL,))
    effects = found(
        scene,
        MachineFound(PeerId("small-old-1"), "small", True),
        MachineFound(PeerId("small-old-2"), "small", False),
    )
    assert of_kind(effects, StopMachine) == [StopMachine(PeerId("small-old-2"))]
    started = until_started(scene)
    assert len(started) == 1  # the adopted one counts


def test_what_is_written_down_no_more_is_gone() -> None:
    scene = a_provisioned_run(policy="all", offers=(SMALL,), machines_max=1)
    found(scene)
    until_started(scene, 1)
    found(scene)
    assert scene.state.activation.machines == {}
