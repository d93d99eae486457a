"""The worker's promises for any order of events.

The machine below plays the coordinator (grants, revocations, acknowledgements, lost
connections) and the shell (fetches, engine, groups), and checks every effect against a
model of its own: what is connected, what runs, what is owed.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from echo2 import messages
from echo2.core import worker_events as events
from echo2.core.worker import WorkerPhase, WorkerState
from echo2.core.worker_settings import WorkerSettings
from echo2.types import GroupId, LeaseId, Sampling, Span, Task, TrajectoryHeader, Version

SLOTS = 3
ASSETS = "a" * 64


def a_digest(version: Version) -> str:
    return f"{version.incarnation:032x}{version.step:032x}"


def a_result(granted: messages.LeaseGranted, version: Version) -> messages.GroupResult:
    header = TrajectoryHeader(2, 1, 1, 1.0, "stop", 1, (Span(version, 1, 2),))
    return messages.GroupResult(
        lease=granted.lease,
        group=granted.group,
        attempt=granted.attempt,
        trajectories=(header,),
        generate_s=0.0,
        environment_s=0.0,
        token_ids=bytes(8),
        logprobs=bytes(8),
        loss_mask=bytes(2),
    )


class WorkerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = WorkerState(
            WorkerSettings(
                name="w-1",
                echo2_version="0",
                engine="transformers",
                precision="float32",
                environment="addition",
                slots=SLOTS,
                attempts_max=4,
                engine_restarts_max=4,
                bytes_in_flight_max=2000,
                drain_timeout_s=20.0,
                connect_timeout_s=100.0,
            )
        )
        self.now = 0.0
        self.exited = False
        # the connection
        self.connected = False
        self.hello_sent = False
        self.hello: messages.WorkerHello | None = None
        self.welcomed = False
        # versions
        self.newest = Version(1, 0)
        self.fetching: set[str] = set()
        self.on_disk: set[str] = set()
        self.versions: dict[str, Version] = {}
        self.epoch = 0
        self.engine = "off"
        self.installing: events.Install | None = None
        self.serving: Version | None = None
        self.served: set[Version] = set()
        self.canary_failed: set[Version] = set()
        # leases
        self.num_granted = 0
        self.running: dict[LeaseId, messages.LeaseGranted] = {}
        self.owed: dict[LeaseId, messages.GroupResult] = {}
        self.ends: dict[LeaseId, list[str]] = {}
        self.draining = False
        self.feed(events.Started())

    # ------------------------------------------------------------- feeding and checking

    def feed(self, event: events.Event) -> None:
        was_exited = self.exited
        effects = self.state.handle(event, self.now)
        assert not (was_exited and effects), "nothing follows an Exit"
        for effect in effects:
            assert not self.exited, "Exit is the last effect"
            self.check(effect)

    def check(self, effect: events.Effect) -> None:
        match effect:
            case events.Send(message):
                self.check_message(message)
            case events.Reconnect():
                self.connected = self.welcomed = False
            case events.Fetch():
                assert effect.manifest_digest not in self.fetching
                self.fetching.add(effect.manifest_digest)
                assert len(self.fetching - {ASSETS}) <= 1, "one version is fetched at a time"
                if effect.version is not None:
                    self.versions[effect.manifest_digest] = effect.version
            case events.CancelFetch(manifest_digest):
                assert manifest_digest in self.fetching
                self.fetching.discard(manifest_digest)
            case events.StartEngine(epoch):
                assert self.engine == "off"
                assert ASSETS in self.on_disk
                assert epoch == self.epoch + 1
                self.epoch, self.engine = epoch, "starting"
            case events.Install():
                self.check_install(effect)
            case events.StartGroup(granted):
                assert self.serving is not None, "no group before an install"
                assert self.engine == "up"
                assert not self.draining
                if granted.kind == "eval":
                    assert granted.version == self.serving
                    assert self.installing is None
                assert granted.lease not in self.ends, "taken once"
                self.ends[granted.lease] = []
                self.running[granted.lease] = granted
                assert len(self.running) <= SLOTS
            case events.AbortGroup(lease):
                del self.running[lease]
                self.ends[lease].append("aborted")
            case events.Exit():
                self.exited = True
            case events.Keep(manifest_digests):
                assert self.serving is not None
                assert a_digest(self.serving) in manifest_digests
                self.on_disk &= manifest_digests

    def check_message(self, message: messages.Message) -> None:
        assert self.connected, "nothing is sent without a connection"
        if isinstance(message, messages.WorkerHello):
            self.hello_sent, self.hello = True, message
            assert set(message.held) == set(self.running) | set(self.owed)
            assert message.installed == self.serving
            return
        assert self.hello_sent, "the hello is first"
        assert self.welcomed, "nothing but the hello before the welcome"
        match message:
            case messages.VersionInstalled(past=True):
                assert message.version in self.served
            case messages.VersionInstalled():
                assert message.version == self.serving
            case messages.InstallFailed():
                assert message.serving == self.serving
            case messages.GroupResult():
                assert self.owed[message.lease] == message
            case messages.LeaseFailed():
                assert message.lease not in self.running
                assert message.lease not in self.owed
            case messages.Heartbeat():
                assert set(message.lease_tokens) == set(self.running)

    def check_install(self, effect: events.Install) -> None:
        assert self.installing is None, "one install at a time"
        assert self.engine == "up"
        assert effect.epoch == self.epoch
        version = effect.announced.version
        assert a_digest(version) in self.on_disk, "installed from verified bytes"
        assert self.serving is None or version > self.serving
        previous = None if effect.previous is None else effect.previous.version
        assert previous == self.serving, "what serves can be restored"
        assert not any(granted.kind == "eval" for granted in self.running.values())
        if self.serving is not None:
            assert version not in self.canary_failed
        self.installing = effect

    # -------------------------------------------------------------------------- the world

    @initialize(is_ready=st.integers(0, 4))
    def most_workers_begin_ready(self, is_ready: int) -> None:
        """Else hardly a run would come as far as leases."""
        if is_ready:
            self.sockets_are_up()
            self.welcome(())
            self.end_fetch(ASSETS)
            self.the_engine_is_ready()
            self.a_version_is_announced(0, False, True)
            self.end_fetch(a_digest(self.newest))
            self.an_install_ends()

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 4.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(events.Tick(lease_tokens=dict.fromkeys(self.running, 1)))

    @precondition(lambda self: not self.connected and not self.exited)
    @rule()
    def sockets_are_up(self) -> None:
        self.connected, self.hello_sent = True, False
        self.feed(events.ConnectionRestored())
        assert self.hello_sent

    @precondition(lambda self: self.connected and not self.exited)
    @rule()
    def the_connection_is_cut(self) -> None:
        self.feed(events.ConnectionLost("cut"))
        assert not self.connected

    @precondition(lambda self: self.connected and not self.exited)
    @rule(data=st.data())
    def the_coordinator_welcomes(self, data: st.DataObject) -> None:
        assert self.hello is not None
        held = sorted(self.hello.held)
        drawn = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        self.welcome(tuple(drawn))

    def welcome(self, alive: tuple[LeaseId, ...]) -> None:
        owed = set(self.owed)
        sent: set[LeaseId] = set()
        self.welcomed = True
        effects = self.state.handle(
            messages.WorkerWelcome(
                protocol=messages.PROTOCOL,
                run_id="run-1",
                worker="w-1",
                heartbeat_interval_s=1.0,
                silence_max_s=15.0,
                environment="addition",
                assets_digest=ASSETS,
                origin="tcp://127.0.0.1:1",
                origin_key="k" * 40,
                alive=alive,
            ),
            self.now,
        )
        for effect in effects:
            self.check(effect)
            if isinstance(effect, events.Send) and isinstance(effect.message, messages.GroupResult):
                sent.add(effect.message.lease)
        assert not owed or sent, "a result goes again in each session"
        for lease in self.running:
            assert lease in alive

    @precondition(lambda self: self.welcomed and not self.exited)
    @rule()
    def a_heartbeat_is_echoed(self) -> None:
        self.feed(messages.HeartbeatEcho(sequence=1))

    @precondition(lambda self: self.welcomed and not self.exited)
    @rule(steps=st.integers(0, 2), rewind=st.booleans(), origin=st.booleans())
    def a_version_is_announced(self, steps: int, rewind: bool, origin: bool) -> None:
        if rewind:
            self.newest = Version(self.newest.incarnation + 1, max(0, self.newest.step - steps))
        else:
            self.newest = Version(self.newest.incarnation, self.newest.step + steps)
        self.feed(
            messages.VersionAnnounced(
                version=self.newest,
                manifest_digest=a_digest(self.newest),
                num_bytes=1,
                origin="tcp://127.0.0.1:1" if origin else "",
                origin_key="k" * 40 if origin else "",
                assets_digest=ASSETS,
            )
        )

    # -------------------------------------------------------------------------- the shell

    @precondition(lambda self: not self.exited and self.fetching)
    @rule(data=st.data(), share=st.floats(0.0, 1.0))
    def a_fetch_advances(self, data: st.DataObject, share: float) -> None:
        digest = data.draw(st.sampled_from(sorted(self.fetching)))
        self.feed(events.FetchProgress(digest, 1000, round(1000 * (1 - share))))

    @precondition(lambda self: not self.exited and self.fetching)
    @rule(data=st.data())
    def a_fetch_ends(self, data: st.DataObject) -> None:
        self.end_fetch(data.draw(st.sampled_from(sorted(self.fetching))))

    def end_fetch(self, digest: str) -> None:
        self.fetching.discard(digest)
        self.on_disk.add(digest)
        self.feed(events.FetchDone(digest, 1.0))

    @precondition(lambda self: not self.exited and self.fetching)
    @rule(data=st.data())
    def a_fetch_fails(self, data: st.DataObject) -> None:
        digest = data.draw(st.sampled_from(sorted(self.fetching)))
        self.fetching.discard(digest)
        self.feed(events.FetchFailed(digest, "no route"))

    @precondition(lambda self: not self.exited and self.engine == "starting")
    @rule()
    def the_engine_is_ready(self) -> None:
        self.engine = "up"
        self.feed(events.EngineReady(self.epoch))

    @precondition(lambda self: not self.exited and self.engine != "off")
    @rule(chance=st.integers(0, 4))
    def the_engine_dies(self, chance: int) -> None:
        if chance:
            return
        self.engine, self.installing, self.serving = "off", None, None
        self.feed(events.EngineDied(self.epoch, "signal 9"))

    @precondition(lambda self: not self.exited and self.epoch > 1)
    @rule()
    def a_dead_engine_still_speaks(self) -> None:
        before = self.state.versions.serving
        self.feed(events.EngineDied(self.epoch - 1, "late"))
        self.feed(events.EngineReady(self.epoch - 1))
        assert self.state.versions.serving == before

    @precondition(lambda self: not self.exited and self.installing is not None)
    @rule()
    def an_install_ends(self) -> None:
        assert self.installing is not None
        self.serving, self.installing = self.installing.announced.version, None
        self.served.add(self.serving)
        self.feed(
            events.InstallDone(
                epoch=self.epoch,
                version=self.serving,
                install_s=0.1,
                pause_s=0.1,
                canary_diff=None,
            )
        )

    @precondition(lambda self: not self.exited and self.installing is not None)
    @rule(stage=st.sampled_from(["install", "canary"]), restored=st.booleans())
    def an_install_fails(self, stage: Any, restored: bool) -> None:
        assert self.installing is not None
        version, self.installing = self.installing.announced.version, None
        if stage == "canary":
            self.canary_failed.add(version)
        if not restored and self.serving is not None:
            self.serving, self.engine = None, "off"  # the state machine ends it
        self.feed(
            events.InstallFailed(
                epoch=self.epoch, version=version, stage=stage, text="no", restored=restored
            )
        )

    # ----------------------------------------------------------------------------- leases

    @precondition(lambda self: self.welcomed and not self.exited)
    @rule(
        is_eval=st.booleans(),
        of_newest=st.booleans(),
        dead_s=st.sampled_from([3.0, 1e6]),
        repeat=st.booleans(),
    )
    def a_lease_is_granted(
        self, is_eval: bool, of_newest: bool, dead_s: float, repeat: bool
    ) -> None:
        self.num_granted += 1
        granted = messages.LeaseGranted(
            lease=LeaseId(f"l{self.num_granted}"),
            group=GroupId(f"g{self.num_granted}"),
            attempt=1,
            kind="eval" if is_eval else "train",
            version=self.newest if of_newest or self.serving is None else self.serving,
            task=Task(0, "{}"),
            group_size=1,
            sampling=Sampling(),
            seed=1,
            revoke_after_s=dead_s,
            hold_s=6.0 if is_eval else 0.0,
        )
        failures: list[str] = []
        for _ in range(1 + repeat):
            effects = self.state.handle(granted, self.now)
            for effect in effects:
                self.check(effect)
                if isinstance(effect, events.Send) and isinstance(
                    effect.message, messages.LeaseFailed
                ):
                    failures.append(effect.message.lease)
        taken = granted.lease in self.running
        assert taken != (failures.count(granted.lease) == 1), "answered once, one way"

    @precondition(lambda self: not self.exited and self.running and self.serving is not None)
    @rule(data=st.data())
    def a_group_is_done(self, data: st.DataObject) -> None:
        granted = self.running.pop(data.draw(st.sampled_from(sorted(self.running))))
        self.ends[granted.lease].append("result")
        assert self.serving is not None
        self.owed[granted.lease] = a_result(granted, self.serving)
        self.feed(events.GroupDone(self.owed[granted.lease]))

    @precondition(lambda self: not self.exited and self.running)
    @rule(data=st.data())
    def a_group_fails(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[lease]
        self.ends[lease].append("failed")
        self.feed(events.GroupFailed(lease, "environment", "ValueError"))

    @precondition(lambda self: self.welcomed and not self.exited and self.num_granted)
    @rule(data=st.data())
    def a_lease_is_revoked(self, data: st.DataObject) -> None:
        lease = LeaseId(f"l{data.draw(st.integers(1, self.num_granted))}")
        self.feed(messages.LeaseRevoked(lease=lease, reason="stalled"))
        assert lease not in self.running

    @precondition(lambda self: self.welcomed and not self.exited and self.owed)
    @rule(data=st.data(), outcome=st.sampled_from(["accepted", "duplicate", "superseded"]))
    def a_result_is_acknowledged(self, data: st.DataObject, outcome: Any) -> None:
        lease = data.draw(st.sampled_from(sorted(self.owed)))
        result = self.owed.pop(lease)
        self.feed(messages.GroupAcknowledged(group=result.group, lease=lease, outcome=outcome))

    @precondition(lambda self: not self.draining)
    @rule(chance=st.integers(0, 19))
    def the_operator_drains(self, chance: int) -> None:
        if chance == 0:
            self.draining = True
            self.feed(events.DrainRequested("SIGTERM"))

    # ------------------------------------------------------------------------- the promises

    @invariant()
    def every_lease_ended_at_most_once(self) -> None:
        for lease, ends in self.ends.items():
            assert len(ends) == (lease not in self.running), (lease, ends)

    @invariant()
    def what_is_owed_is_kept(self) -> None:
        if not self.exited:
            assert set(self.state.leases.outbox.leases) == set(self.owed)
            assert set(self.state.leases.live) == set(self.running)

    @invariant()
    def one_version_serves_or_none(self) -> None:
        if not self.exited:
            assert self.state.versions.serving == self.serving
            ready = self.state.phase is WorkerPhase.READY
            assert ready <= (self.serving is not None)

    @invariant()
    def the_phase_follows_the_facts(self) -> None:
        assert self.exited == self.state.stopped


TestWorker = WorkerMachine.TestCase
TestWorker.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
