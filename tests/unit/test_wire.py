from __future__ import annotations

import tracemalloc
from dataclasses import replace

import msgpack  # type: ignore[import-untyped]
import pytest
from pydantic import TypeAdapter

from echo2 import wire
from echo2.errors import LocalProtocolError, RemoteProtocolError
from echo2.messages import (
    HEADER_MAX_BYTES,
    BatchGroup,
    Chunk,
    Goodbye,
    GroupResult,
    Heartbeat,
    Lane,
    LearnerHeartbeat,
    Message,
    Role,
    Shutdown,
    VersionAnnounced,
    frame_fields,
)
from echo2.types import GroupId, LeaseId, Span, Task, TrajectoryHeader, Version

DIGEST = "0" * 64


def a_heartbeat(**changes: object) -> Heartbeat:
    fields: dict[str, object] = {"sequence": 3, "state": "ready", "lease_tokens": {"l-1": 5}}
    return Heartbeat(**(fields | changes))  # type: ignore[arg-type]


def a_group(*, num_trajectories: int = 2, length: int = 10) -> GroupResult:
    total = num_trajectories * length
    spans = (Span(Version(1, 4), 2, 5), Span(Version(1, 5), 5, length))
    header = TrajectoryHeader(length, 2, length - 2, 0.5, "stop", 1, spans)
    return GroupResult(
        lease=LeaseId("l-1"),
        group=GroupId("g-1"),
        attempt=1,
        trajectories=(header,) * num_trajectories,
        generate_s=1.5,
        environment_s=0.25,
        token_ids=bytes(range(total)) * 4,
        logprobs=bytes(4 * total),
        loss_mask=b"\1" * total,
    )


def a_header(name: object = "Heartbeat", **fields: object) -> bytes:
    valid = {"sequence": 3, "state": "ready", "lease_tokens": {}, "tokens_per_s": 0.0}
    return wire.pack([name, valid | fields])


def decoded(*frames: bytes, **route: object) -> Message:
    from_worker = {"lane": Lane.CONTROL, "sender": Role.WORKER, "receiver": Role.COORDINATOR}
    return wire.decode(frames, **(from_worker | route))  # type: ignore[arg-type]


def reason_of(*frames: bytes, **route: object) -> str:
    with pytest.raises(RemoteProtocolError) as caught:
        decoded(*frames, **route)
    assert caught.value.remote
    return caught.value.reason


def test_a_message_comes_back_as_it_was() -> None:
    assert decoded(*wire.encode(a_heartbeat())) == a_heartbeat()
    assert decoded(*wire.encode(a_group()), lane=Lane.ROLLOUTS) == a_group()


def test_raw_frames_are_sent_as_they_are_and_received_from_any_buffer() -> None:
    group = a_group()
    frames = wire.encode(group)
    assert frames[1] is group.token_ids
    assert frames[3] is group.loss_mask
    views = [memoryview(frame) for frame in frames]
    received = wire.decode(views, lane=Lane.ROLLOUTS, sender=Role.WORKER, receiver=Role.COORDINATOR)
    assert received == group
    assert isinstance(received, GroupResult)
    assert type(received.token_ids) is bytes


def a_batch_group(group: GroupResult) -> BatchGroup:
    return BatchGroup(
        incarnation=1,
        step=4,
        group=group.group,
        worker="w-1",
        task=Task(7, '{"n": 1}'),
        trajectories=group.trajectories,
        token_ids=group.token_ids,
        logprobs=group.logprobs,
        loss_mask=group.loss_mask,
    )


def received(*frames: bytes) -> GroupResult:
    group = decoded(*frames, lane=Lane.ROLLOUTS)
    assert isinstance(group, GroupResult)
    return group


def test_what_is_handed_on_leaves_as_it_came() -> None:
    header, *raw = wire.encode(a_group())
    name, fields = wire.unpack(header, max_bytes=len(header))
    turned = wire.pack([name, dict(reversed(fields.items()))])
    group = received(turned, *raw)
    assert group == a_group()
    assert wire.encode(group) == [turned, *raw]
    assert wire.encode(replace(group, attempt=2)) == wire.encode(replace(a_group(), attempt=2))


def test_a_field_that_is_handed_on_is_the_same_to_its_receiver() -> None:
    group = received(*wire.encode(a_group(num_trajectories=16, length=12)))
    made = a_batch_group(group)
    wire.hand_on(made, group, "trajectories")
    to_learner = {"lane": Lane.ROLLOUTS, "sender": Role.COORDINATOR, "receiver": Role.LEARNER}
    assert decoded(*wire.encode(made), **to_learner) == a_batch_group(group)
    made_here = a_batch_group(a_group())
    wire.hand_on(made_here, a_group(), "trajectories")
    assert decoded(*wire.encode(made_here), **to_learner) == made_here


def test_of_a_field_that_comes_twice_the_one_that_was_checked_is_handed_on() -> None:
    header, *raw = wire.encode(a_group())
    _, fields = wire.unpack(header, max_bytes=len(header))
    lying = [{**trajectory, "reward": 99.0} for trajectory in fields["trajectories"]]
    packer = msgpack.Packer()
    items = [("trajectories", lying), *fields.items()]
    twice = b"".join(
        (
            packer.pack_array_header(2) + packer.pack("GroupResult"),
            packer.pack_map_header(len(items)),
            *(packer.pack(key) + packer.pack(value) for key, value in items),
        )
    )
    group = received(twice, *raw)
    assert group == a_group()
    made = a_batch_group(group)
    wire.hand_on(made, group, "trajectories")
    to_learner = {"lane": Lane.ROLLOUTS, "sender": Role.COORDINATOR, "receiver": Role.LEARNER}
    assert decoded(*wire.encode(made), **to_learner) == a_batch_group(group)


def test_the_number_of_frames_is_checked() -> None:
    header, *raw = wire.encode(a_group())
    assert reason_of() == "frames"
    assert reason_of(*[b""] * 50) == "frames"
    assert reason_of(*wire.encode(a_heartbeat()), b"") == "frames"
    assert reason_of(header, *raw[:2], lane=Lane.ROLLOUTS) == "frames"


def test_sizes_are_checked() -> None:
    assert reason_of(bytes(HEADER_MAX_BYTES + 1)) == "oversized"
    ((_, probe_max_bytes), *_) = frame_fields(VersionAnnounced)
    announced = VersionAnnounced(
        version=Version(1, 1), manifest_digest=DIGEST, num_bytes=1, origin="", origin_key=""
    )
    header, _, logprobs = wire.encode(announced)
    to_worker = {"sender": Role.COORDINATOR, "receiver": Role.WORKER}
    assert decoded(header, bytes(probe_max_bytes), logprobs, **to_worker)
    assert reason_of(header, bytes(probe_max_bytes + 1), logprobs, **to_worker) == "oversized"


def test_lane_sender_and_receiver_are_checked() -> None:
    heartbeat = wire.encode(a_heartbeat())
    assert reason_of(*heartbeat, lane=Lane.ROLLOUTS) == "wrong_lane"
    assert reason_of(*heartbeat, sender=Role.LEARNER) == "wrong_sender"
    assert reason_of(*heartbeat, sender=frozenset[Role]()) == "wrong_sender"
    assert reason_of(*heartbeat, receiver=Role.ORIGIN) == "wrong_receiver"
    either = frozenset({Role.WORKER, Role.LEARNER})
    assert decoded(*heartbeat, sender=either)
    learner = LearnerHeartbeat(incarnation=1, sequence=1, state="trains")
    assert decoded(*wire.encode(learner), sender=either)
    assert decoded(*wire.encode(Goodbye(reason="done")), sender=Role.LEARNER)


@pytest.mark.parametrize("name", ["Hartbeat", "", "Message", "heartbeat", "Hart\nbeat" * 1000])
def test_an_unknown_name_is_named_but_not_at_any_length(name: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decoded(a_header(name))
    assert caught.value.reason == "unknown_message"
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        wire.pack(None),
        wire.pack([]),
        wire.pack(["Heartbeat"]),
        wire.pack(["Heartbeat", []]),
        wire.pack([b"Heartbeat", {}]),
        wire.pack([["Heartbeat"], {}]),
        wire.pack(["Heartbeat", {b"sequence": 1}]),
        wire.pack(["Heartbeat", {}, {}]),
        a_header() + b"\0",
        a_header()[:-1],
        msgpack.packb(["Heartbeat", {1: 2}]),
        msgpack.packb(["Heartbeat", {"sequence": msgpack.ExtType(5, b"")}]),
        msgpack.packb(["Heartbeat", {"sequence": msgpack.ExtType(5, b"abc")}]),
        msgpack.packb(["Heartbeat", {"sequence": msgpack.Timestamp(1)}]),
        b"\x92\xa9Heartbeat\x81\xa8sequence\xa1\xff",  # not UTF-8
        b"\x92\xa9Heartbeat\x81\xa5state\xa3\xed\xa0\x80",  # half of a surrogate pair
        b"\x91" * 100_000,
        b"\xdf\xff\xff\xff\xff",  # a map of 4 G entries
        b"\xdb\xff\xff\xff\xff",
    ],
)
def test_a_header_that_is_none_is_malformed(header: bytes) -> None:
    assert reason_of(header) == "malformed"


@pytest.mark.parametrize(
    "fields",
    [
        {"sequence": -1},
        {"sequence": 2**60},
        {"sequence": "3"},
        {"sequence": True},
        {"sequence": None},
        {"state": ""},
        {"state": "no spaces here"},
        {"state": 7},
        {"lease_tokens": {"l": "many"}},
        {"lease_tokens": {"l" * 65: 1}},
        {"lease_tokens": {str(index): 1 for index in range(4097)}},
        {"lease_tokens": []},
        {"tokens_per_s": float("nan")},
        {"tokens_per_s": float("inf")},
        {"loop_lag_s": -0.5},
        {"surprise": 1},
    ],
)
def test_every_field_is_checked(fields: dict[str, object]) -> None:
    assert decoded(a_header())
    assert reason_of(a_header(**fields)) == "malformed"


def test_the_text_of_an_error_names_the_field_and_not_the_value() -> None:
    with pytest.raises(RemoteProtocolError, match=r"^Heartbeat: state: ") as caught:
        decoded(a_header(state="secret " * 100))
    assert "secret" not in str(caught.value)


def test_a_missing_field_is_malformed() -> None:
    assert reason_of(wire.pack(["Heartbeat", {"sequence": 1}])) == "malformed"


def test_a_raw_frame_may_not_come_as_a_field() -> None:
    chunk = Chunk(manifest_digest=DIGEST, index=1, payload=b"abc")
    header, payload = wire.encode(chunk)
    name, fields = wire.unpack(header, max_bytes=1000)
    to_worker = {"lane": Lane.CHUNKS, "sender": Role.ORIGIN, "receiver": Role.WORKER}
    assert decoded(header, payload, **to_worker) == chunk
    smuggled = wire.pack([name, fields | {"payload": b"other"}])
    assert reason_of(smuggled, payload, **to_worker) == "malformed"


def test_what_a_message_checks_itself_is_checked_on_arrival() -> None:
    header, tokens, logprobs, mask = wire.encode(a_group())
    assert reason_of(header, tokens, logprobs[:-4], mask, lane=Lane.ROLLOUTS) == "malformed"


def test_a_message_too_big_to_be_received_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="frame payload of Chunk has 262145 bytes"):
        wire.encode(Chunk(manifest_digest=DIGEST, index=0, payload=bytes((256 << 10) + 1)))


def test_only_messages_are_encoded() -> None:
    class Strange(Message):
        pass

    with pytest.raises(LocalProtocolError, match="Strange is not a message"):
        wire.encode(Strange())


def test_encoding_is_independent_of_how_numbers_were_given() -> None:
    shutdown = Shutdown(reason="über, 終わり", finished=True)
    to_worker = {"sender": Role.COORDINATOR, "receiver": Role.WORKER}
    assert decoded(*wire.encode(shutdown), **to_worker) == shutdown


def test_plain_values_are_packed_and_unpacked() -> None:
    plain = {"a": [1, -1, 2.5, None, True], "b": b"\0\xff", "c": {"d": "é"}}
    assert wire.unpack(wire.pack(plain), max_bytes=100) == plain


def test_unpack_is_bounded_and_strict() -> None:
    with pytest.raises(RemoteProtocolError, match="at most 3") as caught:
        wire.unpack(wire.pack("abcd"), max_bytes=3)
    assert caught.value.reason == "oversized"
    for data in (b"", b"\xc1", wire.pack(1) * 2, msgpack.packb(msgpack.Timestamp(0))):
        with pytest.raises(RemoteProtocolError):
            wire.unpack(data, max_bytes=100)


@pytest.mark.parametrize("strange", [object(), {1, 2}, 2**64, "\ud800", [b"", {"a": 1j}]])
def test_pack_refuses_what_is_not_plain(strange: object) -> None:
    with pytest.raises(LocalProtocolError, match="cannot be packed"):
        wire.pack(strange)


@pytest.mark.parametrize(
    "header",
    [
        wire.pack(["Goodbye", {"reason": "", **{f"{i:x}": 0 for i in range(600_000)}}]),
        wire.pack(["Goodbye", {"reason": "", **{f"{i:x}": 0 for i in range(60_000)}}]),
        a_header(lease_tokens={f"{i:x}": -1 for i in range(60_000)}),
        wire.pack(["WorkerHello", {"held": [0] * 4_000_000}]),
    ],
    ids=["a map of 600000", "60000 unknown fields", "60000 leases", "4000000 held leases"],
)
def test_a_header_of_a_million_mistakes_costs_little(header: bytes) -> None:
    # Validation would collect each of them: a minute, and gigabytes.
    tracemalloc.start()
    try:
        assert reason_of(header) == "malformed"
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


def test_a_trajectory_of_a_million_wrong_spans_costs_little() -> None:
    header = wire.pack(["GroupResult", {"trajectories": [{"spans": [0] * 4_000_000}]}])
    tracemalloc.start()
    try:
        assert reason_of(header, b"", b"", b"", lane=Lane.ROLLOUTS) == "malformed"
        assert tracemalloc.get_traced_memory()[1] < 128 << 20
    finally:
        tracemalloc.stop()


def test_a_reward_whose_square_would_overflow_is_refused() -> None:
    with pytest.raises(ValueError, match="reward"):
        TypeAdapter(TrajectoryHeader).validate_python(
            {
                "length": 1,
                "prompt_length": 0,
                "num_sampled": 1,
                "reward": 1e300,
                "finish": "stop",
                "num_turns": 1,
                "spans": ({"version": {"incarnation": 1, "step": 0}, "start": 0, "end": 1},),
            }
        )


def test_a_message_that_may_not_come_here_costs_no_codec() -> None:
    """Making one takes up to 50 ms, and a peer can name them all."""
    frames = wire.encode(LearnerHeartbeat(incarnation=1, sequence=1, state=""))
    wire._codec_named.cache_clear()
    with pytest.raises(RemoteProtocolError) as refusal:
        wire.decode(frames, lane=Lane.CONTROL, sender=Role.WORKER, receiver=Role.COORDINATOR)
    assert refusal.value.reason == "wrong_sender"
    assert wire._codec_named.cache_info().currsize == 0
