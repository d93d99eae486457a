"""Whatever happens, in whatever order: the promises hold, and the run can go on.

Hypothesis plays workers, a learner and a clock against `CoordinatorState`, also against
the protocol. After every event the simulator's checker looks, and the group book's counts
are compared with a recount. At the end of each example a learner and a worker that behave
must be able to train two more steps.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from echo2.core.events import PardonRequested, Persisted, Tick
from echo2.core.settings import AuditSettings, CoordinatorSettings
from echo2.core.status import status
from echo2.messages import (
    PROTOCOL,
    AuditFailed,
    BatchRequest,
    Draining,
    EvalRequest,
    Goodbye,
    Heartbeat,
    InstallFailed,
    LearnerHeartbeat,
    LearnerHello,
    LeaseFailed,
)
from echo2.types import PeerId, Sampling, Task, Version

from .coordinator_driver import LEARNERS, PARTS, WORKERS, Driver, a_result, recount

workers = st.sampled_from(WORKERS)
places = st.integers(0, 10**6)
"""An index into a list of any length: taken modulo it."""


class Coordinator(Driver):
    @initialize(
        staleness_max=st.integers(0, 4),
        late=st.sampled_from(["wait", "drop", "mask"]),
        groups_per_step=st.integers(1, 3),
        group_size=st.integers(1, 2),
        period=st.integers(1, 5),
        attempts_max=st.sampled_from([1, 2, 8]),
        filtered=st.booleans(),
        lead=st.sampled_from([None, 0.0, 4.0]),
        partial=st.sampled_from(["train", "drop"]),
        share=st.sampled_from([0.0, 0.0, 0.5, 1.0]),
        warm=st.booleans(),
    )
    def begin(
        self,
        staleness_max: int,
        late: Any,
        groups_per_step: int,
        group_size: int,
        period: int,
        attempts_max: int,
        filtered: bool,
        lead: float | None,
        partial: Any,
        share: float,
        warm: bool,
    ) -> None:
        run_settings = CoordinatorSettings(
            run_id="r",
            staleness_max=staleness_max,
            late=late,
            groups_per_step=groups_per_step,
            group_size=group_size,
            period=min(period, staleness_max + 1),
            attempts_max=attempts_max,
            filter_zero_variance=filtered and group_size > 1,
            lead_steps=lead,
            partial_batch=partial,
            no_worker_timeout_s=1e8,
            learner_timeout_s=1e8,
            audit=AuditSettings(
                share=share, workers=(WORKERS[0], WORKERS[2]), key=b"k", in_flight_max=2
            ),
        )
        self.start(run_settings)
        if warm:
            self.take_over(LEARNERS[0], 0)
            for peer in WORKERS[:2]:
                self.a_worker_joins(peer, 2)
            for _ in range(3):
                self.work(set(PARTS) - {"checkpoint"})

    # -------------------------------------------------------------------- what goes well

    @rule(parts=st.sets(st.sampled_from(PARTS), min_size=4), times=st.integers(1, 3))
    def the_run_goes_on(self, parts: set[str], times: int) -> None:
        for _ in range(times):
            self.work(parts)

    @rule(slow=workers, times=st.integers(1, 4))
    def the_run_goes_on_with_a_slow_worker(self, slow: PeerId, times: int) -> None:
        for _ in range(times):
            self.work(set(PARTS), slow=slow)

    @rule(left_out=st.sampled_from(PARTS))
    def the_run_goes_on_but_for(self, left_out: str) -> None:
        self.work(set(PARTS) - {left_out})

    @rule(num_events=st.integers(2, 8))
    def a_turn_has_several_events(self, num_events: int) -> None:
        """The next events are taken before anything that follows from them is done."""
        self.turn_left = max(self.turn_left, num_events - 1)

    # ------------------------------------------------------------------------- workers

    @rule(peer=workers, slots=st.integers(1, 3))
    def a_worker_joins(self, peer: PeerId, slots: int) -> None:
        self.installed.pop(peer, None)
        self.say_hello(peer, slots=slots)

    @rule(peer=workers, keep=st.booleans())
    def a_worker_comes_back(self, peer: PeerId, keep: bool) -> None:
        """It reconnects, with the leases that it was ever given or with none."""
        held = [granted.lease for to, granted in self.granted if to == peer][-8:] if keep else []
        self.say_hello(peer, held=tuple(held))

    @rule(peer=workers)
    def a_worker_installs(self, peer: PeerId) -> None:
        self.install_announced(peer)

    @rule(peer=workers, place=places)
    def a_worker_installs_any_version(self, peer: PeerId, place: int) -> None:
        known = list(self.core.state.lineage.published) or [Version(1, 0)]
        self.installed[peer] = known[place % len(known)]
        self.install(peer, self.installed[peer])

    @rule(peer=workers, place=places)
    def an_install_fails(self, peer: PeerId, place: int) -> None:
        known = [None, *self.core.state.lineage.published]
        serving = known[place % len(known)]
        if serving is None:
            self.installed.pop(peer, None)
        else:
            self.installed[peer] = serving
        self.receive(
            peer, InstallFailed(version=Version(1, 0), stage="install", text="no", serving=serving)
        )

    @rule(peer=workers, tokens=st.integers(0, 9))
    def a_heartbeat(self, peer: PeerId, tokens: int) -> None:
        leases = {g.lease: tokens for to, g in self.granted[-6:] if to == peer}
        self.receive(peer, Heartbeat(sequence=1, state="ready", lease_tokens=leases))

    @rule(peer=workers, polite=st.booleans())
    def a_worker_leaves(self, peer: PeerId, polite: bool) -> None:
        if polite:
            self.receive(peer, Draining(reason="spot"))
        else:
            self.receive(peer, Goodbye(reason="killed"))

    @precondition(lambda self: self.granted)
    @rule(
        place=places,
        recent=st.booleans(),
        flips=st.integers(0, 2),
        equal=st.booleans(),
        lies=st.booleans(),
    )
    def a_result_arrives(
        self, place: int, recent: bool, flips: int, equal: bool, lies: bool
    ) -> None:
        """Of any lease ever granted, revoked or not; sampled by the version that it names
        and by those that were published after it."""
        pool = self.granted[-4:] if recent else self.granted
        peer, granted = pool[place % len(pool)]
        later = [v for v in self.core.state.lineage.published if v > granted.version]
        versions = (granted.version, *later[:flips])
        rewards = (1.0,) if equal else (0.0, 1.0)
        result = a_result(granted, versions, rewards=rewards, lies=lies)
        self.sent.append((peer, result))
        self.receive(peer, result)

    @precondition(lambda self: self.sent)
    @rule(place=places)
    def a_result_is_repeated(self, place: int) -> None:
        self.receive(*self.sent[place % len(self.sent)])

    @precondition(lambda self: self.granted)
    @rule(place=places, kind=st.integers(0, 3))
    def a_result_is_wrong(self, place: int, kind: int) -> None:
        peer, granted = self.granted[place % len(self.granted)]
        if kind == 0:
            self.receive(WORKERS[place % 3], a_result(granted, (granted.version,)))
        elif kind == 1:
            self.receive(peer, a_result(granted, (granted.version,), extra=1))
        elif kind == 2:
            self.receive(peer, a_result(granted, (Version(self.incarnation, self.step + 1),)))
        else:
            self.receive(peer, a_result(granted, (Version(0, 0),)))

    @precondition(lambda self: self.granted)
    @rule(place=places, stage=st.sampled_from(["environment", "engine", "draining", "lost"]))
    def a_lease_fails(self, place: int, stage: Any) -> None:
        peer, granted = self.granted[place % len(self.granted)]
        self.receive(
            peer, LeaseFailed(lease=granted.lease, group=granted.group, stage=stage, text="no")
        )

    # -------------------------------------------------------------------------- audits

    @precondition(lambda self: self.orders)
    @rule(place=places, keep=st.booleans())
    def an_audit_is_answered(self, place: int, keep: bool) -> None:
        """Perhaps once more later."""
        order = self.orders[place % len(self.orders)]
        if not keep:
            self.orders.remove(order)
        self.answer(order)

    @precondition(lambda self: self.orders)
    @rule(place=places, peer=workers)
    def an_audit_fails_or_is_answered_by_another(self, place: int, peer: PeerId) -> None:
        order = self.orders[place % len(self.orders)]
        self.receive(
            peer, AuditFailed(lease=order.result.lease, group=order.group, text="it cannot say")
        )

    @rule(peer=workers)
    def the_operator_pardons(self, peer: PeerId) -> None:
        self.feed(PardonRequested(peer))

    # ------------------------------------------------------------------------- the clock

    @precondition(lambda self: self.pending)
    @rule(place=places)
    def a_record_becomes_durable(self, place: int) -> None:
        self.feed(Persisted(self.pending.pop(place % len(self.pending))))

    @rule()
    def all_records_become_durable(self) -> None:
        self.persist_all()

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 20.0, 100.0, 4000.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(Tick())

    @rule(seconds=st.sampled_from([-1000.0, -5.0, 5.0, 1000.0]))
    def the_clock_jumps(self, seconds: float) -> None:
        self.offset += seconds
        self.feed(Tick())

    # ----------------------------------------------------------------------- the learner

    @rule(peer=st.sampled_from(LEARNERS), place=places)
    def a_learner_takes_over(self, peer: PeerId, place: int) -> None:
        self.take_over(peer, place)

    @precondition(lambda self: self.last_hello)
    @rule()
    def its_hello_is_repeated(self) -> None:
        assert self.last_hello is not None
        self.receive(*self.last_hello)

    @rule(peer=st.sampled_from(LEARNERS), back=st.integers(-1, 2))
    def a_learner_reconnects(self, peer: PeerId, back: int) -> None:
        named = self.incarnation - back
        if named < 1:
            return
        self.receive(
            peer,
            LearnerHello(
                protocol=PROTOCOL,
                echo2_version="0",
                name="learner",
                incarnation=named,
                resume_step=self.step,
            ),
        )
        self.learner = self.core.state.seat.peer or self.learner

    @rule(back=st.integers(0, 2), off=st.integers(-1, 1))
    def a_batch_is_asked_for(self, back: int, off: int) -> None:
        self.receive(
            self.learner,
            BatchRequest(incarnation=max(0, self.incarnation - back), step=max(0, self.step + off)),
        )

    @rule()
    def the_next_batch_is_asked_for(self) -> None:
        self.ask_batch()

    @precondition(lambda self: self.batch)
    @rule()
    def the_step_is_completed(self) -> None:
        assert self.batch is not None
        self.complete(self.batch.incarnation, self.batch.step)

    @rule(back=st.integers(0, 2), off=st.integers(-2, 1))
    def some_step_is_completed(self, back: int, off: int) -> None:
        known = self.core.state.seat.batch
        incarnation, step = max(0, self.incarnation - back), max(0, self.step + off)
        if known is None and (incarnation, step) == (self.incarnation, self.step):
            return  # refused for good, which a learner in its right mind avoids
        self.complete(incarnation, step)

    @rule(back=st.integers(0, 1), off=st.integers(-2, 1), final=st.booleans())
    def a_version_is_published(self, back: int, off: int, final: bool) -> None:
        self.publish(Version(max(0, self.incarnation - back), max(0, self.step + off)), final)

    @rule()
    def v_is_published(self) -> None:
        self.publish_v()

    @rule(keep=st.integers(1, 3))
    def a_checkpoint_is_saved(self, keep: int) -> None:
        self.save_checkpoint(keep=keep)

    @precondition(lambda self: self.wanted)
    @rule(exhausted=st.sampled_from([False, False, False, True]))
    def tasks_are_submitted(self, exhausted: bool) -> None:
        wanted = self.wanted.pop()
        self.submit(wanted, exhausted=exhausted and wanted.start > 20)

    @rule(place=places)
    def an_eval_is_asked_for(self, place: int) -> None:
        known = list(self.core.state.lineage.published) or [Version(1, 0)]
        version = known[place % len(known)]
        self.receive(
            self.learner,
            EvalRequest(
                incarnation=self.incarnation,
                eval_id=f"e{self.incarnation}.{version}",
                version=version,
                tasks=(Task(10**6, "{}"), Task(10**6 + 1, "{}")),
                sampling=Sampling(),
                group_size=self.run_settings.group_size,
            ),
        )

    @rule()
    def the_learner_lives(self) -> None:
        self.receive(
            self.learner,
            LearnerHeartbeat(incarnation=self.incarnation, sequence=1, state="training"),
        )

    # ------------------------------------------------------------------------- always

    @invariant()
    def the_counts_are_those_of_the_groups(self) -> None:
        if hasattr(self, "core"):
            recount(self.core)
            assert status(self.core.state, self.core.dispatcher.reason)["run_id"] == "r"

    def teardown(self) -> None:
        """Whatever happened: the run can go on, and then it ends clean."""
        if not hasattr(self, "core") or not self.running():
            return
        self.ending = True
        self.end_turn()
        for peer in WORKERS:
            self.the_operator_pardons(peer)
        self.persist_all()
        self.now += 1e6
        self.offset = max(self.offset, 0.0)
        self.feed(Tick())
        self.checkpoints = list(self.core.state.history.kept)
        self.take_over(LEARNERS[0], -1)
        self.persist_all()
        begin, exhausted = self.step, self.core.state.stream.exhausted_at is not None
        for _ in range(400):
            self.go_on()
            if self.step >= begin + 2 or (self.batch and not self.batch.groups):
                break
        assert self.step >= begin + 2 or exhausted, status(
            self.core.state, self.core.dispatcher.reason
        )
        self.receive(LEARNERS[0], Goodbye(reason="done", finished=True))
        assert not self.running()

    def go_on(self) -> None:
        """A learner and a worker do what they should."""
        self.now += 1.0
        self.feed(Tick())
        self.the_learner_lives()
        if WORKERS[0] not in self.core.state.members.workers:
            self.a_worker_joins(WORKERS[0], 3)
        self.wanted = self.wanted[-1:]
        self.work(set(PARTS))


TestCoordinator = pytest.mark.timeout(1200)(Coordinator.TestCase)
TestCoordinator.settings = settings(
    max_examples=250,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
