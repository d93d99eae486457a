"""The learner's client: every request answered once, asked again after a lost connection."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo2.core.learner_client import (
    BATCH_INCOMPLETE_S,
    HELLO_RETRY_S,
    BatchReady,
    BroadcastKnown,
    ClientState,
    Ended,
    EvalDone,
    LearnerClientState,
    RequestRefused,
    Seated,
    StepDurable,
    TasksNeeded,
    Transmit,
    VersionDurable,
    WaitingFor,
)
from echo2.errors import LocalProtocolError
from echo2.messages import (
    PROTOCOL,
    BatchGranted,
    BatchGroup,
    BatchRequest,
    BatchWaiting,
    BroadcastRequest,
    BroadcastStatus,
    CheckpointSaved,
    EvalRequest,
    EvalResult,
    Fenced,
    Goodbye,
    HeartbeatEcho,
    LearnerHeartbeat,
    LearnerHello,
    LearnerWelcome,
    PublishAcknowledged,
    Refused,
    Shutdown,
    StepAcknowledged,
    StepCompleted,
    TasksSubmitted,
    TasksWanted,
    VersionPublished,
)
from echo2.types import Sampling, Span, Task, TrajectoryHeader, Version


def a_client() -> LearnerClientState:
    return LearnerClientState(
        LearnerHello(
            protocol=PROTOCOL, echo2_version="0", name="learner", resume_step=0, hello_id="h"
        )
    )


def a_welcome(*, incarnation: int = 1, step: int = 0) -> LearnerWelcome:
    return LearnerWelcome(
        protocol=PROTOCOL,
        run_id="r",
        incarnation=incarnation,
        step=step,
        heartbeat_interval_s=1.0,
        silence_max_s=10.0,
    )


def a_seated_client() -> LearnerClientState:
    client = a_client()
    client.start(0.0)
    client.received(a_welcome(), 0.0)
    return client


def granted(*groups: str, step: int = 0, incarnation: int = 1) -> BatchGranted:
    return BatchGranted(
        incarnation=incarnation, step=step, loss_from_step=0, groups=groups, last=False
    )


def a_group(name: str, *, step: int = 0) -> BatchGroup:
    header = TrajectoryHeader(1, 0, 1, 1.0, "stop", 1, (Span(Version(1, 0), 0, 1),))
    return BatchGroup(
        incarnation=1,
        step=step,
        group=name,
        worker="w",
        task=Task(0, "{}"),
        trajectories=(header,),
        token_ids=bytes(4),
        logprobs=bytes(4),
        loss_mask=bytes(1),
    )


def a_version(step: int = 0) -> VersionPublished:
    return VersionPublished(
        version=Version(1, step),
        manifest_digest="0" * 64,
        assets_digest="",
        num_bytes=1,
        origin="",
        origin_key="",
    )


def an_eval() -> EvalRequest:
    return EvalRequest(
        incarnation=1,
        eval_id="e",
        version=Version(1, 0),
        tasks=(Task(0, "{}"),),
        sampling=Sampling(),
    )


def sent(outcomes: list[object]) -> list[type]:
    return [type(o.message) for o in outcomes if isinstance(o, Transmit)]


def comes_whole(client: LearnerClientState) -> None:
    """The batch that was asked for."""
    client.received(granted("g0"), 0.0)
    client.received(a_group("g0"), 0.0)


def test_the_hello_is_repeated_until_it_is_answered() -> None:
    client = a_client()
    assert LearnerHello in sent(client.start(0.0))
    assert client.tick(HELLO_RETRY_S / 2) == []
    assert LearnerHello in sent(client.tick(HELLO_RETRY_S))
    outcomes = client.received(a_welcome(step=7), 1.0)
    assert outcomes[0] == Seated(a_welcome(step=7), first=True)
    assert (client.incarnation, client.step) == (1, 7)
    assert client.received(a_welcome(step=9), 1.0) == [], "a second welcome changes nothing"


def test_a_batch_is_ready_when_all_its_groups_are_here_in_any_order() -> None:
    client = a_seated_client()
    assert sent(client.request_batch(0)) == [BatchRequest]
    assert client.received(a_group("b"), 1.0) == []
    assert client.received(granted("a", "b"), 1.0) == []
    (ready,) = client.received(a_group("a"), 1.0)
    assert isinstance(ready, BatchReady)
    assert [g.group for g in ready.groups] == ["a", "b"]
    assert client.received(granted("a", "b"), 1.0) == [], "a late copy is ignored"


def test_a_batch_whose_groups_were_lost_is_asked_for_again() -> None:
    client = a_seated_client()
    client.request_batch(0)
    client.received(granted("a"), 1.0)
    client.received(HeartbeatEcho(sequence=1), 1.0)
    assert BatchRequest in sent(client.tick(1.0 + BATCH_INCOMPLETE_S + 0.1))


def test_only_one_batch_and_one_step_are_asked_for_at_a_time() -> None:
    client = a_seated_client()
    client.request_batch(0)
    with pytest.raises(LocalProtocolError, match="batch"):
        client.request_batch(0)
    with pytest.raises(LocalProtocolError, match="no batch was delivered"):
        client.complete(0, train_s=1, wait_s=0, mismatch=())
    comes_whole(client)
    (completed,) = client.complete(0, train_s=1, wait_s=0, mismatch=())
    assert isinstance(completed, Transmit)
    assert isinstance(completed.message, StepCompleted)
    assert completed.message.groups == ("g0",)
    with pytest.raises(LocalProtocolError, match="step"):
        client.complete(0, train_s=1, wait_s=0, mismatch=())


def test_silence_leads_to_a_hello_under_the_same_incarnation_and_all_is_asked_again() -> None:
    client = a_seated_client()
    client.publish(a_version(0))
    client.received(PublishAcknowledged(version=Version(1, 0), keep_from=0), 0.0)
    client.request_batch(0)
    comes_whole(client)
    client.complete(0, train_s=1, wait_s=0, mismatch=())
    client.checkpoint_saved(0, (0,))
    client.evaluate(an_eval())
    outcomes = client.tick(10.5)
    hello = next(
        o.message
        for o in outcomes
        if isinstance(o, Transmit) and isinstance(o.message, LearnerHello)
    )
    assert hello.incarnation == 1
    assert client.state is ClientState.JOINING
    assert sent(client.publish(a_version(1))) == [], "kept until the next welcome"
    again = sent(client.received(a_welcome(), 11.0))
    assert {StepCompleted, CheckpointSaved, EvalRequest, VersionPublished} <= set(again)
    assert client.received(a_welcome(incarnation=2), 11.0) == []


def test_after_a_welcome_the_newest_version_is_published_again() -> None:
    client = a_seated_client()
    client.publish(a_version(0))
    client.received(PublishAcknowledged(version=Version(1, 0), keep_from=0), 0.0)
    client.request_batch(0)
    client.tick(10.5)
    assert {VersionPublished, BatchRequest} <= set(sent(client.received(a_welcome(), 11.0)))


def test_answers_end_what_was_asked_once() -> None:
    client = a_seated_client()
    client.request_batch(0)
    comes_whole(client)
    client.complete(0, train_s=1, wait_s=0, mismatch=())
    assert client.received(StepAcknowledged(incarnation=1, step=0), 1.0) == []
    assert client.received(StepAcknowledged(incarnation=1, step=1), 1.0) == [StepDurable(1)]
    assert client.received(StepAcknowledged(incarnation=1, step=1), 1.0) == []
    client.publish(a_version(1))
    acknowledged = PublishAcknowledged(version=Version(1, 1), keep_from=1)
    assert client.received(acknowledged, 1.0) == [VersionDurable(Version(1, 1), 1)]
    assert client.received(acknowledged, 1.0) == []
    client.evaluate(an_eval())
    result = EvalResult(
        incarnation=1,
        eval_id="e",
        version=Version(1, 0),
        num_asked=1,
        num_done=1,
        reward_mean=1.0,
        tokens_mean=1.0,
    )
    assert client.received(result, 1.0) == [EvalDone(result)]
    assert client.received(result, 1.0) == []


def test_tasks_and_waits_are_passed_on() -> None:
    client = a_seated_client()
    wanted = TasksWanted(incarnation=1, start=3, count=2)
    assert client.received(wanted, 1.0) == [TasksNeeded(3, 2)]
    assert sent(client.submit_tasks(TasksSubmitted(incarnation=1, start=3, tasks=()))) == [
        TasksSubmitted
    ]
    waiting = BatchWaiting(incarnation=1, step=0, text="why")
    assert client.received(waiting, 1.0) == [WaitingFor("why")]
    assert client.received(BatchWaiting(incarnation=2, step=0, text="why"), 1.0) == []


def test_heartbeats_say_what_the_learner_does() -> None:
    client = a_seated_client()
    client.say("training")
    outcomes = client.tick(1.5)
    assert sent(outcomes) == [LearnerHeartbeat]
    assert outcomes[0].message.state == "training"
    assert client.tick(1.6) == []


def test_a_fenced_client_sends_nothing_any_more() -> None:
    client = a_seated_client()
    assert client.received(Fenced(incarnation=9, by=10), 1.0) == []
    (ended,) = client.received(Fenced(incarnation=1, by=2), 1.0)
    assert isinstance(ended, Ended)
    assert ended.kind == "fenced"
    assert "incarnation 2" in ended.text
    assert client.tick(100.0) == []
    assert sent(client.publish(a_version(0))) == []
    assert client.received(a_welcome(), 2.0) == []


def test_a_fatal_refusal_and_a_shutdown_end_it() -> None:
    client = a_client()
    client.start(0.0)
    (ended,) = client.received(Refused(reason="protocol", text="1 and 2", fatal=True), 0.0)
    assert ended == Ended("refused", "protocol: 1 and 2")
    client = a_seated_client()
    farewell = Goodbye(reason="the coordinator ended", incarnation=client.incarnation)
    assert client.received(Shutdown(reason="over", finished=True), 0.0) == [
        Transmit(farewell),
        Ended("shutdown", "over", True),
    ]


def test_an_unknown_peer_says_hello_again_and_other_refusals_give_up_the_request() -> None:
    client = a_seated_client()
    assert LearnerHello in sent(
        client.received(Refused(reason="unknown_peer", text="who", fatal=False), 1.0)
    )
    # What was sent before that hello is refused too, and asked again after the welcome.
    client.request_batch(0)
    assert client.received(Refused(reason="unknown_peer", text="who", fatal=False), 1.0) == []
    assert BatchRequest in sent(client.received(a_welcome(), 2.0))
    client = a_seated_client()
    client.request_batch(0)
    refused = Refused(reason="wrong_step", text="v is 3", fatal=False)
    assert client.received(refused, 1.0) == [RequestRefused("wrong_step: v is 3")]
    client.request_batch(3)


def test_goodbye_closes() -> None:
    client = a_seated_client()
    assert sent(client.close("done", finished=True)) == [Goodbye]
    assert client.state is ClientState.CLOSED


def test_a_coordinator_that_stays_away_ends_the_session_with_its_cause() -> None:
    client = a_seated_client()
    client.connect_timeout_s = 30.0
    assert LearnerHello in sent(client.tick(11.0))
    assert LearnerHello in sent(client.tick(40.0))
    (ended,) = client.tick(41.5)
    assert isinstance(ended, Ended)
    assert ended.kind == "lost"
    assert "net.connect_timeout_s" in ended.text
    assert client.tick(42.0) == []


def test_a_learner_that_slept_gives_the_coordinator_time_to_answer() -> None:
    client = a_seated_client()
    client.connect_timeout_s = 30.0
    assert LearnerHello in sent(client.tick(10_000.0))
    assert LearnerHello in sent(client.tick(10_001.0))
    assert client.received(a_welcome(), 10_001.1)
    assert client.state is ClientState.SEATED


def test_a_guest_gives_no_tasks_and_does_not_say_that_there_are_none() -> None:
    client = a_client()
    client.hello = replace(client.hello, guest=True)
    client.start(0.0)
    client.received(a_welcome(), 0.0)
    assert client.received(TasksWanted(incarnation=1, start=0, count=8), 1.0) == []


def test_how_far_a_version_is_is_answered_while_seated() -> None:
    client = a_client()
    assert client.ask_broadcast() == []
    client = a_seated_client()
    assert sent(client.ask_broadcast()) == [BroadcastRequest]
    status = BroadcastStatus(incarnation=1, version=None, num_active=2, workers=())
    assert client.received(status, 1.0) == [BroadcastKnown(status)]
    assert client.received(replace(status, incarnation=2), 1.0) == []
