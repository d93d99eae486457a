"""The worker's state machine: events in, effects out, no sockets and no clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import pytest

from echo2 import messages
from echo2.core import worker_events as events
from echo2.core.worker import TRANSITIONS, WorkerPhase, WorkerState
from echo2.core.worker_settings import WorkerSettings
from echo2.errors import LocalProtocolError
from echo2.types import GroupId, LeaseId, Sampling, Span, Task, TrajectoryHeader, Version

E = TypeVar("E")
M = TypeVar("M", bound=messages.Message)
V = [Version(1, step) for step in range(8)]


def a_digest(version: Version) -> str:
    return f"{version.incarnation:032x}{version.step:032x}"


def announced(version: Version, **other: Any) -> messages.VersionAnnounced:
    values: dict[str, Any] = {
        "version": version,
        "manifest_digest": a_digest(version),
        "num_bytes": 1000,
        "origin": "tcp://127.0.0.1:5700",
        "origin_key": "k" * 40,
        "assets_digest": "a" * 64,
    }
    return messages.VersionAnnounced(**(values | other))


def a_welcome(**other: Any) -> messages.WorkerWelcome:
    values: dict[str, Any] = {
        "protocol": messages.PROTOCOL,
        "run_id": "run-1",
        "worker": "w-1",
        "heartbeat_interval_s": 1.0,
        "silence_max_s": 15.0,
        "environment": "addition",
        "origin": "tcp://127.0.0.1:5700",
        "origin_key": "k" * 40,
        "assets_digest": "a" * 64,
    }
    return messages.WorkerWelcome(**(values | other))


def a_lease(name: str = "l1", *, version: Version = V[0], **other: Any) -> messages.LeaseGranted:
    values: dict[str, Any] = {
        "lease": LeaseId(name),
        "group": GroupId(f"g-{name}"),
        "attempt": 1,
        "kind": "train",
        "version": version,
        "task": Task(0, "{}"),
        "group_size": 1,
        "sampling": Sampling(),
        "seed": 1,
        "revoke_after_s": 1000.0,
    }
    return messages.LeaseGranted(**(values | other))


def a_result(name: str = "l1", *, tokens: int = 2) -> messages.GroupResult:
    header = TrajectoryHeader(
        length=tokens,
        prompt_length=1,
        num_sampled=tokens - 1,
        reward=1.0,
        finish="stop",
        num_turns=1,
        spans=(Span(V[0], 1, tokens),),
    )
    return messages.GroupResult(
        lease=LeaseId(name),
        group=GroupId(f"g-{name}"),
        attempt=1,
        trajectories=(header,),
        generate_s=1.0,
        environment_s=0.0,
        token_ids=bytes(4 * tokens),
        logprobs=bytes(4 * tokens),
        loss_mask=bytes(tokens),
    )


class Worker:
    """A state machine with a clock; `effects` are those of the last event."""

    def __init__(self, **settings: Any) -> None:
        values: dict[str, Any] = {
            "name": "w-1",
            "echo2_version": "0.1.0",
            "engine": "transformers",
            "precision": "float32",
            "environment": "addition",
            "slots": 2,
        }
        self.state = WorkerState(WorkerSettings(**(values | settings)))
        self.now = 100.0
        self.effects: list[events.Effect] = []

    def after(self, seconds: float) -> Worker:
        self.now += seconds
        return self

    def on(self, event: events.Event) -> list[events.Effect]:
        self.effects = self.state.handle(event, self.now)
        return self.effects

    def tick(self, seconds: float = 0.0) -> list[events.Effect]:
        self.now += seconds
        return self.on(events.Tick())

    def only(self, kind: type[E]) -> E:
        (found,) = [effect for effect in self.effects if isinstance(effect, kind)]
        return found

    def none(self, kind: type[Any]) -> bool:
        return not any(isinstance(effect, kind) for effect in self.effects)

    def sent(self, kind: type[M]) -> list[M]:
        return [
            effect.message
            for effect in self.effects
            if isinstance(effect, events.Send) and isinstance(effect.message, kind)
        ]

    # ---- words for longer stretches of life

    def connected(self) -> Worker:
        self.on(events.Started())
        self.on(events.ConnectionRestored())
        return self

    def welcomed(self, **welcome: Any) -> Worker:
        self.connected()
        self.on(a_welcome(**welcome))
        return self

    def with_engine(self) -> Worker:
        self.welcomed()
        self.on(events.FetchDone("a" * 64, 0.1))
        self.on(events.EngineReady(self.state.engine.epoch))
        return self

    def fetches(self, version: Version, **other: Any) -> Worker:
        self.on(announced(version, **other))
        self.on(events.FetchDone(a_digest(version), 0.5))
        return self

    def installs(self, version: Version) -> Worker:
        self.on(
            events.InstallDone(
                epoch=self.state.engine.epoch,
                version=version,
                install_s=0.2,
                pause_s=0.1,
                canary_diff=1e-6,
            )
        )
        return self

    def fails_install(
        self,
        version: Version,
        stage: Literal["install", "canary"] = "canary",
        *,
        restored: bool = True,
    ) -> Worker:
        self.on(
            events.InstallFailed(
                epoch=self.state.engine.epoch,
                version=version,
                stage=stage,
                text="off by 2.6",
                restored=restored,
            )
        )
        return self

    def ready(self, version: Version = V[0]) -> Worker:
        return self.with_engine().fetches(version).installs(version)

    def fails_fetch(self, version: Version) -> Worker:
        self.on(events.FetchFailed(a_digest(version), "no route"))
        return self

    def again(self, *alive: str) -> Worker:
        """The connection is lost and comes back."""
        self.on(events.ConnectionLost("cut"))
        self.on(events.ConnectionRestored())
        self.on(a_welcome(alive=alive))
        return self


# ------------------------------------------------------------------------ the session


def test_the_hello_comes_first_and_names_the_worker() -> None:
    worker = Worker()
    assert worker.on(events.Started()) == [events.Reconnect(0, "start")]
    worker.on(events.ConnectionRestored())
    (hello,) = worker.sent(messages.WorkerHello)
    assert worker.effects == [events.Send(hello)]
    assert (hello.name, hello.slots, hello.held, hello.installed) == ("w-1", 2, (), None)


def test_a_welcome_fetches_assets_then_starts_the_engine() -> None:
    worker = Worker().welcomed()
    fetch = worker.only(events.Fetch)
    assert (fetch.manifest_digest, fetch.version) == ("a" * 64, None)
    assert worker.state.phase is WorkerPhase.SYNCING
    worker.on(events.FetchDone("a" * 64, 0.1))
    assert worker.only(events.StartEngine) == events.StartEngine(1, "a" * 64, "{}")


def test_an_engine_without_a_model_starts_without_assets() -> None:
    worker = Worker(engine="null", needs_weights=False).welcomed(assets_digest="")
    assert worker.only(events.StartEngine).assets_digest == ""


def test_assets_may_be_named_by_the_first_announcement_only() -> None:
    worker = Worker().welcomed(assets_digest="")
    assert worker.none(events.Fetch)
    worker.on(announced(V[0]))
    assert {
        fetch.manifest_digest for fetch in worker.effects if isinstance(fetch, events.Fetch)
    } == {
        "a" * 64,
        a_digest(V[0]),
    }


@pytest.mark.parametrize(
    ("welcome", "said"),
    [
        ({"protocol": 99}, "protocol 99"),
        ({"environment": "reversal"}, "'reversal'"),
    ],
)
def test_a_welcome_to_another_kind_of_run_ends_the_worker(
    welcome: dict[str, Any], said: str
) -> None:
    worker = Worker().welcomed(**welcome)
    ended = worker.only(events.Exit)
    assert ended.code == 1
    assert said in ended.reason


@pytest.mark.parametrize(
    ("welcome", "said"),
    [
        ({"run_id": "run-2"}, "run-2"),
        ({"settings": '{"seed": 1}'}, "settings changed"),
        ({"assets_digest": "b" * 64}, "start this worker again"),
    ],
)
def test_another_run_at_the_same_address_ends_the_worker(
    welcome: dict[str, Any], said: str
) -> None:
    worker = Worker().ready()
    worker.on(events.ConnectionLost("cut"))
    worker.on(events.ConnectionRestored())
    worker.on(a_welcome(**welcome))
    assert said in worker.only(events.Exit).reason


def test_heartbeats_carry_state_and_tokens_of_live_leases_at_the_interval() -> None:
    worker = Worker().ready()
    worker.on(a_lease("l1"))
    worker.after(1.0).on(
        events.Tick(
            lease_tokens={LeaseId("l1"): 7, LeaseId("gone"): 9}, tokens_per_s=3.5, loop_lag_s=0.1
        )
    )
    (heartbeat,) = worker.sent(messages.Heartbeat)
    assert heartbeat.lease_tokens == {"l1": 7}
    assert (heartbeat.state, heartbeat.tokens_per_s) == ("ready", 3.5)
    worker.tick(0.5)
    assert not worker.sent(messages.Heartbeat)
    worker.tick(0.5)
    assert worker.sent(messages.Heartbeat)[0].sequence == heartbeat.sequence + 1


def test_silence_asks_for_fresh_sockets_and_echoes_prevent_it() -> None:
    worker = Worker().ready()
    worker.tick(14.0)
    worker.on(messages.HeartbeatEcho(sequence=1))
    worker.tick(14.0)
    assert worker.none(events.Reconnect)
    worker.tick(2.0)
    assert "16.0 s" in worker.only(events.Reconnect).reason
    worker.tick(1.0)
    assert worker.none(events.Reconnect), "one is under way already"


def test_a_hello_without_an_answer_is_sent_again_through_fresh_sockets() -> None:
    worker = Worker().connected()
    worker.tick(9.0)
    assert worker.none(events.Reconnect)
    worker.tick(2.0)
    assert worker.only(events.Reconnect).attempt == 1
    worker.on(events.ConnectionRestored())
    assert worker.sent(messages.WorkerHello)


@pytest.mark.parametrize("welcomed_before", [False, True])
def test_it_gives_up_with_the_last_cause(welcomed_before: bool) -> None:
    worker = Worker(connect_timeout_s=60.0)
    if welcomed_before:
        worker.ready()
        worker.on(events.ConnectionLost("cut"))
    else:
        worker.on(events.Started())
    worker.after(30.0).on(events.ConnectFailed("nothing answers at tcp://h:1"))
    worker.tick(29.0)
    assert worker.none(events.Exit)
    worker.tick(2.0)
    ended = worker.only(events.Exit)
    assert ended.code == 1
    assert "nothing answers at tcp://h:1" in ended.reason
    assert "net.connect_timeout_s" in ended.reason


def test_a_fatal_refusal_ends_and_another_is_told_as_the_cause() -> None:
    worker = Worker().connected()
    worker.on(messages.Refused(reason="busy", text="later", fatal=False))
    assert worker.none(events.Exit)
    worker.tick(200.0)
    assert "later" in worker.only(events.Exit).reason
    worker = Worker().connected()
    worker.on(messages.Refused(reason="environment", text="pip install x==2", fatal=True))
    assert worker.only(events.Exit).code == 1
    assert "pip install x==2" in worker.only(events.Exit).reason


def test_a_coordinator_that_forgot_the_worker_gets_a_hello_at_once_but_not_in_a_flood() -> None:
    worker = Worker().ready()
    refusal = messages.Refused(reason="unknown_peer", text="say hello", fatal=False)
    worker.after(2.0).on(refusal)
    assert worker.sent(messages.WorkerHello)[0].installed == V[0]
    worker.on(refusal)
    assert not worker.sent(messages.WorkerHello)


def test_messages_before_the_welcome_of_a_session_are_stale() -> None:
    worker = Worker().ready()
    worker.on(events.ConnectionLost("cut"))
    worker.on(events.ConnectionRestored())
    for message in (a_lease("old"), announced(V[1])):
        worker.on(message)
        assert worker.none(events.StartGroup)
        assert worker.none(events.Fetch)


# ---------------------------------------------------------------------------- versions


def test_a_version_is_fetched_installed_and_reported_with_its_times() -> None:
    worker = Worker().with_engine()
    worker.on(announced(V[0]))
    assert worker.only(events.Fetch).version == V[0]
    worker.on(events.FetchDone(a_digest(V[0]), 0.5))
    install = worker.only(events.Install)
    assert (install.announced.version, install.previous) == (V[0], None)
    worker.installs(V[0])
    (report,) = worker.sent(messages.VersionInstalled)
    assert (report.version, report.fetch_s, report.install_s, report.pause_s) == (
        V[0],
        0.5,
        0.2,
        0.1,
    )
    assert report.canary_diff == 1e-6
    assert worker.state.phase is WorkerPhase.READY
    assert worker.only(events.Keep).manifest_digests == {"a" * 64, a_digest(V[0])}


def test_the_version_waits_for_the_engine() -> None:
    worker = Worker().welcomed().fetches(V[0])
    assert worker.none(events.Install)
    worker.on(events.FetchDone("a" * 64, 0.1))
    worker.on(events.EngineReady(1))
    assert worker.only(events.Install).announced.version == V[0]


@pytest.mark.parametrize(("share", "cancelled"), [(0.0, True), (0.5, True), (0.51, False)])
def test_a_newer_version_replaces_a_fetch_of_which_half_or_less_is_here(
    share: float, cancelled: bool
) -> None:
    worker = Worker().ready()
    worker.on(announced(V[1]))
    worker.on(events.FetchProgress(a_digest(V[1]), 100, round(100 * (1 - share))))
    worker.on(announced(V[2]))
    if cancelled:
        assert worker.only(events.CancelFetch).manifest_digest == a_digest(V[1])
        assert worker.only(events.Fetch).version == V[2]
    else:
        assert worker.none(events.CancelFetch)
        worker.on(events.FetchDone(a_digest(V[1]), 1.0))
        assert worker.only(events.Install).announced.version == V[1]
        assert worker.only(events.Fetch).version == V[2], "the next one comes meanwhile"


def test_versions_that_follow_each_other_faster_than_a_fetch_do_not_keep_it_from_its_end() -> None:
    worker = Worker().welcomed()
    worker.on(events.FetchDone("a" * 64, 0.1))
    worker.on(events.EngineReady(1))
    for step in range(4):
        worker.on(announced(V[step]))
        worker.on(events.FetchProgress(a_digest(V[min(step, 1)]), 100, 60))
    assert worker.state.versions.fetching is not None
    assert worker.state.versions.fetching.version == V[1], "the first gave way, the second did not"
    worker.on(events.FetchDone(a_digest(V[1]), 1.0))
    worker.installs(V[1])
    worker.on(announced(V[4]))
    assert worker.only(events.Fetch).version == V[4], "and the next may give way again"


def test_a_whole_version_gives_way_to_the_deltas_that_lead_to_it() -> None:
    worker = Worker().ready()
    worker.on(announced(V[2]))
    worker.on(announced(V[2], path=("d" * 64,)))
    assert worker.only(events.CancelFetch).manifest_digest == a_digest(V[2])
    assert worker.only(events.Fetch).path == ("d" * 64,)
    worker.on(announced(V[2]))
    assert worker.none(events.CancelFetch)
    assert worker.none(events.Fetch)


def test_an_install_under_way_is_finished_and_the_newest_follows() -> None:
    worker = Worker().ready().fetches(V[1])
    worker.fetches(V[2])
    assert worker.none(events.Install), "one at a time"
    worker.fetches(V[3])
    worker.installs(V[1])
    assert worker.sent(messages.VersionInstalled)[0].version == V[1]
    install = worker.only(events.Install)
    assert install.announced.version == V[3]
    assert install.previous is not None
    assert install.previous.version == V[1]


def test_an_older_announcement_is_ignored() -> None:
    worker = Worker().ready(V[2])
    worker.on(announced(V[1]))
    assert worker.none(events.Fetch)


def test_a_higher_incarnation_is_newer_whatever_its_step() -> None:
    worker = Worker().ready(V[5])
    worker.on(announced(Version(2, 3)))
    assert worker.only(events.Fetch).version == Version(2, 3)


def test_another_line_of_versions_ends_the_worker() -> None:
    worker = Worker().ready(V[2])
    worker.on(announced(V[2], manifest_digest="f" * 64))
    assert "another line of versions" in worker.only(events.Exit).reason
    worker = Worker().ready(V[2]).again()
    worker.on(announced(V[1]))
    assert "1.1 is the newest version there" in worker.only(events.Exit).reason


def test_the_installed_version_announced_again_is_reported_again() -> None:
    worker = Worker().ready()
    worker.on(announced(V[0]))
    assert worker.sent(messages.VersionInstalled)[0].version == V[0]


def test_an_install_that_ends_without_a_session_is_reported_at_the_next_welcome() -> None:
    worker = Worker().with_engine().fetches(V[0])
    worker.on(events.ConnectionLost("cut"))
    worker.installs(V[0])
    assert not worker.sent(messages.VersionInstalled)
    worker.on(events.ConnectionRestored())
    assert worker.sent(messages.WorkerHello)[0].installed == V[0]
    worker.on(a_welcome())
    assert worker.sent(messages.VersionInstalled)[0].version == V[0]


def told_versions(worker: Worker) -> list[tuple[Version, bool]]:
    return [(told.version, told.past) for told in worker.sent(messages.VersionInstalled)]


def test_a_report_that_a_lost_connection_may_have_taken_is_told_again_for_the_record() -> None:
    worker = Worker().ready()
    worker.tick(1.0)
    (heartbeat,) = worker.sent(messages.Heartbeat)
    worker.again()
    assert told_versions(worker) == [(V[0], True)]
    worker.tick(1.0)
    worker.on(messages.HeartbeatEcho(sequence=heartbeat.sequence))  # of before
    worker.again()
    assert told_versions(worker) == [(V[0], True)], "an old echo says nothing of it"
    worker.tick(1.0)
    (heartbeat,) = worker.sent(messages.Heartbeat)
    worker.on(messages.HeartbeatEcho(sequence=heartbeat.sequence))
    worker.again()
    assert told_versions(worker) == []


def test_every_version_that_served_without_a_session_is_told_at_the_welcome() -> None:
    worker = Worker().ready()
    worker.fetches(V[1])
    worker.on(announced(V[2]))
    worker.on(events.ConnectionLost("cut"))
    worker.installs(V[1])
    worker.on(events.FetchDone(a_digest(V[2]), 0.5))
    worker.installs(V[2])
    worker.on(events.EngineDied(worker.state.engine.epoch, "killed"))
    worker.on(events.ConnectionRestored())
    assert worker.sent(messages.WorkerHello)[0].installed is None
    worker.on(a_welcome())
    assert told_versions(worker) == [(V[0], True), (V[1], True), (V[2], True)]


def test_a_failed_canary_leaves_the_version_before_serving_and_is_not_tried_again() -> None:
    worker = Worker().ready().fetches(V[1]).fails_install(V[1])
    (failed,) = worker.sent(messages.InstallFailed)
    assert (failed.version, failed.stage, failed.serving) == (V[1], "canary", V[0])
    assert worker.state.phase is WorkerPhase.READY
    worker.tick(1000.0)
    assert worker.none(events.Fetch)
    worker.on(a_welcome())
    worker.fetches(V[2])
    assert worker.only(events.Install).announced.version == V[2]


@pytest.mark.parametrize("stage", ["fetch", "install"])
def test_other_failures_are_tried_again_with_backoff_a_bounded_number_of_times(stage: str) -> None:
    worker = Worker(attempts_max=3, connect_timeout_s=1e6).ready()
    worker.on(announced(V[1]))
    for wait_s in (1.0, 2.0):
        if stage == "install":
            worker.on(events.FetchDone(a_digest(V[1]), 1.0))
            worker.fails_install(V[1], "install")
        else:
            worker.fails_fetch(V[1])
        assert worker.sent(messages.InstallFailed)[0].stage == stage
        worker.tick(wait_s - 0.1)
        assert worker.none(events.Fetch)
        worker.tick(0.2)
        assert worker.only(events.Fetch).version == V[1]
        worker.on(messages.HeartbeatEcho(sequence=1))
    worker.fails_fetch(V[1])
    worker.tick(100.0)
    assert worker.none(events.Fetch)
    assert worker.state.versions.serving == V[0]


def test_a_newer_version_is_fetched_at_once_after_a_failure() -> None:
    worker = Worker().ready()
    worker.on(announced(V[1]))
    worker.fails_fetch(V[1])
    worker.on(announced(V[2]))
    assert worker.only(events.Fetch).version == V[2]


@pytest.mark.parametrize("stage", ["fetch", "canary"])
def test_a_first_version_that_keeps_failing_ends_the_worker_with_the_cause(stage: str) -> None:
    worker = Worker(attempts_max=3).with_engine()
    worker.on(announced(V[0]))
    for attempt in range(3):
        assert worker.state.phase is WorkerPhase.SYNCING
        if stage == "fetch":
            worker.fails_fetch(V[0])
        else:
            worker.on(events.FetchDone(a_digest(V[0]), 1.0))
            worker.fails_install(V[0])
        if attempt < 2:
            worker.tick(5.0)
            assert worker.only(events.Fetch).version == V[0]
    ended = worker.only(events.Exit)
    assert ended.code == 1
    assert ("no route" if stage == "fetch" else "off by 2.6") in ended.reason


def test_failures_of_ever_newer_first_versions_are_bounded_too() -> None:
    worker = Worker(attempts_max=3).with_engine()
    for version in V[:3]:
        worker.on(announced(version))
        worker.fails_fetch(version)
    assert worker.only(events.Exit).code == 1


def test_an_announcement_without_origin_or_assets_fails_for_an_engine_that_needs_them() -> None:
    worker = Worker().with_engine()
    worker.on(announced(V[0], origin="", origin_key=""))
    assert "an origin" in worker.sent(messages.InstallFailed)[0].text
    worker = Worker().welcomed(assets_digest="")
    worker.on(announced(V[0], assets_digest=""))
    assert "assets" in worker.sent(messages.InstallFailed)[0].text
    assert worker.none(events.Fetch)
    null = Worker(engine="null", needs_weights=False).welcomed(assets_digest="")
    null.on(events.EngineReady(1))
    null.on(announced(V[0], origin="", origin_key=""))
    assert null.only(events.Install).announced.version == V[0]


def test_assets_that_cannot_be_fetched_end_the_worker_after_some_tries() -> None:
    worker = Worker(attempts_max=3).welcomed()
    for attempt in range(3):
        worker.on(events.FetchFailed("a" * 64, "no route"))
        if attempt < 2:
            worker.tick(4.0)
            assert worker.only(events.Fetch).version is None
    assert "no route" in worker.only(events.Exit).reason


# ------------------------------------------------------------------------------- evals


def an_eval(name: str = "e1", *, version: Version = V[0], hold_s: float = 5.0) -> Any:
    return a_lease(name, version=version, kind="eval", hold_s=hold_s)


def test_evals_put_off_the_flip_until_they_are_done() -> None:
    worker = Worker().ready()
    worker.on(an_eval())
    worker.fetches(V[1])
    assert worker.none(events.Install)
    worker.on(events.GroupDone(a_result("e1")))
    assert worker.only(events.Install).announced.version == V[1]
    assert worker.none(events.AbortGroup)


def test_evals_put_off_the_flip_for_hold_s_at_most_and_are_handed_back() -> None:
    worker = Worker().ready()
    worker.on(an_eval())
    worker.on(a_lease("l1"))
    worker.after(5.0).fetches(V[1])
    worker.tick(4.9)
    assert worker.none(events.Install)
    worker.fetches(V[2])
    worker.tick(0.2)
    assert worker.only(events.AbortGroup).lease == "e1"
    (failed,) = worker.sent(messages.LeaseFailed)
    assert (failed.lease, failed.stage) == ("e1", "lost")
    assert worker.only(events.Install).announced.version == V[2], "the newest that is here"


@pytest.mark.parametrize("installing", [False, True])
def test_an_eval_of_another_version_is_not_taken(installing: bool) -> None:
    worker = Worker().ready()
    if installing:
        worker.fetches(V[1])
        worker.on(an_eval(version=V[0]))
    else:
        worker.on(an_eval(version=V[1]))
    assert worker.sent(messages.LeaseFailed)[0].stage == "lost"
    assert worker.none(events.StartGroup)


# ------------------------------------------------------------------------------ leases


@pytest.mark.parametrize(
    ("life", "stage"),
    [
        (lambda: Worker().with_engine(), "engine"),
        (lambda: Worker(takes_leases=False, engine="none").welcomed(), "lost"),
        (lambda: _full(Worker(slots=1).ready()), "lost"),
        (lambda: _draining(Worker().ready()), "draining"),
    ],
)
def test_a_lease_is_refused_with_whose_fault_it_is(life: Callable[[], Worker], stage: str) -> None:
    worker = life()
    worker.on(a_lease("new"))
    (failed,) = worker.sent(messages.LeaseFailed)
    assert (failed.lease, failed.group, failed.stage) == ("new", "g-new", stage)
    assert worker.none(events.StartGroup)


def _full(worker: Worker) -> Worker:
    worker.on(a_lease("l0"))
    return worker


def _draining(worker: Worker) -> Worker:
    worker.on(a_lease("l0"))
    worker.on(events.DrainRequested("SIGTERM"))
    return worker


def test_a_lease_is_taken_once_however_often_it_comes() -> None:
    worker = Worker().ready()
    worker.on(a_lease())
    assert worker.only(events.StartGroup).lease.lease == "l1"
    worker.on(a_lease())
    assert worker.none(events.StartGroup)
    worker.on(messages.LeaseRevoked(lease=LeaseId("l1"), reason="stalled"))
    worker.on(a_lease())
    assert worker.none(events.StartGroup)


def test_a_result_is_sent_until_it_is_acknowledged() -> None:
    worker = Worker().ready()
    worker.on(a_lease())
    worker.on(events.GroupDone(a_result()))
    assert worker.sent(messages.GroupResult) == [a_result()]
    worker.again("l1")
    assert worker.sent(messages.GroupResult) == [a_result()]
    for _ in range(2):
        worker.tick(14.0)
        assert not worker.sent(messages.GroupResult)
        worker.on(messages.HeartbeatEcho(sequence=1))
    worker.tick(2.0)
    assert worker.sent(messages.GroupResult) == [a_result()], "silence: once more"
    acknowledged = messages.GroupAcknowledged(
        group=GroupId("g-l1"), lease=LeaseId("l1"), outcome="superseded", reason="late"
    )
    worker.on(acknowledged)
    worker.again()
    assert not worker.sent(messages.GroupResult)


def test_a_result_that_is_done_without_a_session_is_held_and_sent_after_the_welcome() -> None:
    worker = Worker().ready()
    worker.on(a_lease())
    worker.on(events.ConnectionLost("cut"))
    worker.on(events.GroupDone(a_result()))
    assert not worker.sent(messages.GroupResult)
    worker.on(events.ConnectionRestored())
    assert worker.sent(messages.WorkerHello)[0].held == ("l1",)
    assert not worker.sent(messages.GroupResult)
    worker.on(a_welcome(alive=()))
    assert worker.sent(messages.GroupResult) == [a_result()], "even if its lease is dead"


def test_leases_that_a_welcome_does_not_name_are_ended_in_silence() -> None:
    worker = Worker().ready()
    worker.on(a_lease("l1"))
    worker.on(a_lease("l2"))
    worker.again("l2")
    assert worker.only(events.AbortGroup).lease == "l1"
    assert not worker.sent(messages.LeaseFailed)


def test_what_failed_between_hello_and_welcome_is_told_after_it() -> None:
    worker = Worker().ready()
    worker.on(a_lease("l1"))
    worker.on(events.ConnectionLost("cut"))
    worker.on(events.ConnectionRestored())
    worker.on(events.GroupFailed(LeaseId("l1"), "environment", "ValueError"))
    assert not worker.sent(messages.LeaseFailed)
    worker.on(a_welcome(alive=("l1",)))
    assert worker.sent(messages.LeaseFailed)[0].text == "ValueError"


def test_a_revoked_lease_is_aborted_and_its_result_dropped() -> None:
    worker = Worker().ready()
    worker.on(a_lease())
    worker.on(messages.LeaseRevoked(lease=LeaseId("l1"), reason="stalled"))
    assert worker.effects == [events.AbortGroup(LeaseId("l1"), "stalled")]
    worker.on(events.GroupDone(a_result()))
    assert not worker.sent(messages.GroupResult)
    worker.on(messages.LeaseRevoked(lease=LeaseId("l1"), reason="stalled"))
    assert worker.effects == []


def test_a_lease_ends_by_itself_when_it_is_too_old() -> None:
    worker = Worker().ready()
    worker.on(a_lease(revoke_after_s=10.0))
    worker.tick(9.9)
    assert worker.none(events.AbortGroup)
    worker.tick(0.2)
    assert worker.only(events.AbortGroup).lease == "l1"
    assert worker.sent(messages.LeaseFailed)[0].stage == "lost"


def test_a_result_must_be_that_of_its_lease() -> None:
    worker = Worker().ready()
    worker.on(a_lease(group=GroupId("other")))
    with pytest.raises(LocalProtocolError, match="granted was group other"):
        worker.on(events.GroupDone(a_result()))
    assert LeaseId("l1") in worker.state.leases.live, "nothing changed"


def test_results_share_a_window_of_bytes_and_a_big_one_may_always_go() -> None:
    worker = Worker(bytes_in_flight_max=20_000, slots=4).ready()
    for name in ("l1", "l2", "l3"):
        worker.on(a_lease(name))
    worker.on(events.GroupDone(a_result("l1", tokens=4000)))
    assert worker.sent(messages.GroupResult), "alone it may exceed the window"
    worker.on(events.GroupDone(a_result("l2")))
    assert not worker.sent(messages.GroupResult)
    worker.on(
        messages.GroupAcknowledged(group=GroupId("g-l1"), lease=LeaseId("l1"), outcome="accepted")
    )
    assert [result.lease for result in worker.sent(messages.GroupResult)] == ["l2"]


def test_too_many_unacknowledged_bytes_stop_further_leases() -> None:
    worker = Worker(bytes_in_flight_max=1000).ready()
    worker.on(a_lease("l1"))
    worker.on(events.GroupDone(a_result("l1", tokens=1000)))
    worker.on(a_lease("l2"))
    assert "net.rollout_bytes_in_flight" in worker.sent(messages.LeaseFailed)[0].text


# -------------------------------------------------------------------- the engine's death


def test_an_engines_death_hands_leases_back_and_reinstalls_what_served() -> None:
    worker = Worker().ready()
    worker.on(a_lease())
    worker.on(events.EngineDied(1, "signal SIGKILL"))
    assert worker.only(events.AbortGroup).lease == "l1"
    (failed,) = worker.sent(messages.LeaseFailed)
    assert (failed.stage, "SIGKILL" in failed.text) == ("engine", True)
    (hello,) = worker.sent(messages.WorkerHello)
    assert (hello.installed, hello.held) == (None, ())
    assert str(worker.state.phase) == "syncing"
    worker.tick(1.1)
    assert worker.only(events.StartEngine).epoch == 2
    worker.on(events.EngineReady(2))
    assert worker.only(events.Install).announced.version == V[0]
    worker.installs(V[0])
    assert worker.sent(messages.VersionInstalled)[0].version == V[0]
    assert str(worker.state.phase) == "ready"


def test_a_dead_engine_that_still_speaks_changes_nothing() -> None:
    worker = Worker().ready().fetches(V[1])
    worker.on(events.EngineDied(1, "gone"))
    for stale in (
        events.EngineDied(1, "gone"),
        events.EngineReady(1),
        events.InstallDone(epoch=0, version=V[1], install_s=0.0, pause_s=0.0, canary_diff=None),
    ):
        worker.on(stale)
        assert worker.effects == []
    assert worker.state.versions.serving is None


def test_an_engine_that_dies_too_often_ends_the_worker_and_a_group_forgives() -> None:
    worker = Worker(engine_restarts_max=2, connect_timeout_s=1e6).ready()
    for epoch in (1, 2):
        worker.on(events.EngineDied(epoch, "out of memory"))
        worker.tick(10.0)
        worker.on(messages.HeartbeatEcho(sequence=1))
        worker.on(events.EngineReady(epoch + 1))
        worker.installs(V[0])
    worker.on(a_lease())
    worker.on(events.GroupDone(a_result()))
    worker.on(events.EngineDied(3, "out of memory"))
    assert worker.none(events.Exit)
    for epoch in (4, 5):
        worker.tick(10.0)
        worker.on(messages.HeartbeatEcho(sequence=1))
        worker.on(events.EngineDied(epoch, "out of memory"))
    assert "out of memory" in worker.only(events.Exit).reason


def test_an_install_that_lost_the_version_before_restarts_the_engine() -> None:
    worker = Worker().ready()
    worker.on(a_lease())
    worker.fetches(V[1]).fails_install(V[1], "install", restored=False)
    assert worker.sent(messages.InstallFailed)[0].serving is None
    assert worker.sent(messages.LeaseFailed)[0].stage == "engine"
    worker.tick(1.1)
    assert worker.only(events.StartEngine).epoch == 2
    worker.on(events.EngineReady(2))
    assert worker.only(events.Install).announced.version == V[0]


# ----------------------------------------------------------------------------- the end


def test_a_drain_waits_for_groups_and_acknowledgements() -> None:
    worker = Worker(drain_timeout_s=30.0).ready()
    worker.on(a_lease())
    worker.on(announced(V[1]))
    worker.on(events.DrainRequested("SIGTERM"))
    assert worker.sent(messages.Draining)
    assert worker.only(events.CancelFetch).manifest_digest == a_digest(V[1])
    worker.on(events.GroupDone(a_result()))
    assert worker.none(events.Exit)
    worker.on(
        messages.GroupAcknowledged(group=GroupId("g-l1"), lease=LeaseId("l1"), outcome="accepted")
    )
    assert worker.sent(messages.Goodbye)
    assert worker.only(events.Exit) == events.Exit(0, "SIGTERM")


@pytest.mark.parametrize("again", [False, True])
def test_a_drain_ends_at_its_time_or_when_it_is_asked_for_again(again: bool) -> None:
    worker = Worker(drain_timeout_s=30.0).ready()
    worker.on(a_lease())
    worker.on(events.DrainRequested("SIGTERM"))
    if again:
        worker.on(events.DrainRequested("SIGTERM"))
    else:
        worker.on(messages.HeartbeatEcho(sequence=1))
        worker.tick(14.0)
        worker.on(messages.HeartbeatEcho(sequence=1))
        worker.tick(14.0)
        assert worker.none(events.Exit)
        worker.on(messages.HeartbeatEcho(sequence=1))
        worker.tick(2.1)
    assert worker.only(events.AbortGroup).lease == "l1"
    assert worker.sent(messages.LeaseFailed)[0].stage == "draining"
    assert worker.sent(messages.Goodbye)
    assert worker.only(events.Exit).code == 0


def test_a_drain_before_the_welcome_ends_at_once() -> None:
    worker = Worker().connected()
    worker.on(events.DrainRequested("SIGINT"))
    assert worker.only(events.Exit) == events.Exit(0, "SIGINT")


def test_a_draining_worker_that_reconnects_says_so_again() -> None:
    worker = Worker().ready()
    worker.on(a_lease())
    worker.on(events.DrainRequested("SIGTERM"))
    worker.again("l1")
    assert worker.sent(messages.Draining)


def test_a_drain_installs_nothing_new() -> None:
    worker = Worker().ready()
    worker.on(a_lease())
    worker.on(events.DrainRequested("SIGTERM"))
    worker.on(announced(V[1]))
    assert worker.none(events.Fetch)


def test_a_shutdown_ends_cleanly_and_nothing_follows() -> None:
    worker = Worker().ready()
    worker.on(a_lease())
    worker.on(messages.Shutdown(reason="100 steps are done", finished=True))
    assert worker.only(events.AbortGroup).lease == "l1"
    assert worker.sent(messages.Goodbye)
    assert worker.only(events.Exit).code == 0
    assert worker.on(a_lease("l2")) == []
    assert worker.tick(1.0) == []


def test_a_start_that_cannot_work_ends_the_worker() -> None:
    worker = Worker().welcomed()
    worker.on(events.StartFailed("environment.settings: no such key"))
    assert worker.only(events.Exit) == events.Exit(1, "environment.settings: no such key")


def test_a_message_that_is_not_for_workers_is_our_own_error() -> None:
    worker = Worker().ready()
    with pytest.raises(LocalProtocolError, match="LearnerHeartbeat"):
        worker.on(messages.LearnerHeartbeat(incarnation=1, sequence=1, state="x"))


def test_every_phase_but_the_last_can_end() -> None:
    for phase, following in TRANSITIONS.items():
        assert (WorkerPhase.STOPPED in following) == (phase is not WorkerPhase.STOPPED)


def test_a_node_that_generates_nothing_installs_every_version_with_its_own_assets() -> None:
    worker = Worker(engine="none", needs_weights=False, takes_leases=False).welcomed()
    assert worker.only(events.StartEngine).assets_digest == ""
    worker.on(events.EngineReady(worker.state.engine.epoch))
    for version, assets in ((V[0], "a" * 64), (V[1], "b" * 64)):
        worker.fetches(version, assets_digest=assets)
        assert worker.only(events.Install).announced.assets_digest == assets
        worker.installs(version)
        assert worker.only(events.Keep).manifest_digests == {a_digest(version), assets}
        assert worker.sent(messages.VersionInstalled)[0].version == version
    worker.on(a_lease("l0", version=V[1]))
    assert worker.sent(messages.LeaseFailed)[0].stage == "lost"
