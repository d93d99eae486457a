"""Every message comes back as it was; nothing else comes out, whatever goes in."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import types
import typing
from typing import Annotated, Any, Literal

import annotated_types
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic.fields import FieldInfo

from echo2 import wire
from echo2.errors import RemoteProtocolError
from echo2.messages import MESSAGES, BatchGroup, Frame, GroupResult, Lane, Message, Role
from echo2.types import GroupId, LeaseId, Span, TrajectoryHeader, Version

from ..security.decoder_target import decodes_or_is_refused
from ..security.mutator import Mutator

ASCII = st.characters(codec="ascii")
RAW_MAX_BYTES = 64
ITEMS_MAX = 4


def of_type(hint: Any) -> st.SearchStrategy[Any]:
    """Values that a field of this type allows, its bounds and patterns included."""
    limits: dict[str, Any] = {}
    while True:
        if isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif typing.get_origin(hint) is Annotated:
            hint, *notes = typing.get_args(hint)
            for note in notes:
                add_limits(limits, note)
        else:
            break
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*[st.none() if a is types.NoneType else of_type(a) for a in arguments])
    if origin is tuple:
        least = limits.get("min_length", 0)
        items = st.lists(of_type(arguments[0]), min_size=least, max_size=least + ITEMS_MAX)
        return items.map(tuple)
    if origin is dict:
        return st.dictionaries(of_type(arguments[0]), of_type(arguments[1]), max_size=ITEMS_MAX)
    if dataclasses.is_dataclass(hint):
        return st.builds(typing.cast(type, hint), **of_fields(hint))
    return of_scalar(hint, limits)


def of_scalar(hint: Any, limits: dict[str, Any]) -> st.SearchStrategy[Any]:
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(limits.get("ge", -(2**63)), limits.get("le", 2**63))
    if hint is float:
        least, most = limits.get("gt", limits.get("ge")), limits.get("le")
        return st.floats(
            least, most, allow_nan=False, allow_infinity=False, exclude_min="gt" in limits
        )
    if hint is bytes:
        return st.binary(max_size=min(RAW_MAX_BYTES, limits["frame_bytes"]))
    assert hint is str, hint
    if "pattern" in limits:
        return st.from_regex(limits["pattern"], fullmatch=True, alphabet=ASCII).filter(
            lambda text: not text.endswith("\n") and len(text) <= limits.get("max_length", 10**6)
        )
    least = limits.get("min_length", 0)
    return st.text(min_size=least, max_size=min(limits["max_length"], 40))


def add_limits(limits: dict[str, Any], note: Any) -> None:
    if isinstance(note, Frame):
        limits["frame_bytes"] = note.max_bytes
    for item in note.metadata if isinstance(note, FieldInfo) else ():
        match item:
            case annotated_types.Ge(ge):
                limits["ge"] = ge
            case annotated_types.Gt(gt):
                limits["gt"] = gt
            case annotated_types.Le(le):
                limits["le"] = le
            case annotated_types.MinLen(least):
                limits["min_length"] = least
            case annotated_types.MaxLen(most):
                limits["max_length"] = most
            case _ if getattr(item, "pattern", None):
                limits["pattern"] = item.pattern


def of_fields(cls: Any) -> dict[str, st.SearchStrategy[Any]]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: of_type(hints[field.name]) for field in dataclasses.fields(cls)}


@st.composite
def trajectories(draw: st.DrawFn) -> tuple[TrajectoryHeader, ...]:
    """Headers whose lengths are small and whose spans are in order."""
    headers = []
    for _ in range(draw(st.integers(1, 3))):
        length = draw(st.integers(1, 20))
        borders = sorted(draw(st.sets(st.integers(0, length), min_size=2, max_size=4)))
        pairs = itertools.pairwise(borders)
        spans = tuple(Span(draw(of_type(Version)), start, end) for start, end in pairs)
        header = draw(of_type(TrajectoryHeader))
        headers.append(dataclasses.replace(header, length=length, spans=spans))
    return tuple(headers)


@st.composite
def groups(draw: st.DrawFn, cls: type[Message]) -> Message:
    """A message with trajectories and the frames that fit them."""
    headers = draw(trajectories())
    total = sum(header.length for header in headers)
    fields: dict[str, Any] = {
        name: draw(strategy)
        for name, strategy in of_fields(cls).items()
        if name not in ("trajectories", "token_ids", "logprobs", "loss_mask")
    }
    fields["trajectories"] = headers
    for name, unit in (("token_ids", 4), ("logprobs", 4), ("loss_mask", 1)):
        fields[name] = draw(st.binary(min_size=unit * total, max_size=unit * total))
    return cls(**fields)


@functools.cache
def of_message(name: str) -> st.SearchStrategy[Message]:
    cls = MESSAGES[name]
    if cls in (GroupResult, BatchGroup):
        return groups(cls)
    return st.builds(cls, **of_fields(cls))


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_every_message_comes_back_as_it_was(name: str) -> None:
    cls = MESSAGES[name]

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(of_message(name), st.sampled_from(sorted(cls.SENDERS)))
    def check(message: Message, sender: Role) -> None:
        frames = wire.encode(message)
        for receiver in cls.RECEIVERS:
            received = wire.decode(frames, lane=cls.LANE, sender=sender, receiver=receiver)
            assert received == message
            assert wire.encode(received) == frames

    check()


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=5)
    | st.dictionaries(st.text() | st.binary(), inner, max_size=5),
    max_leaves=20,
)  # fmt: skip
MUTATOR = Mutator(random.Random(0))
ROUTES = st.tuples(st.sampled_from(Lane), st.sampled_from(Role), st.sampled_from(Role))


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(), max_size=6), ROUTES)
@example([b"\x91" * 5000], (Lane.CONTROL, Role.WORKER, Role.COORDINATOR))
def test_random_bytes_are_refused_and_nothing_worse(
    frames: list[bytes], route: tuple[Lane, Role, Role]
) -> None:
    decodes_or_is_refused(frames, route)


@settings(max_examples=150, deadline=None)
@given(PLAIN | st.tuples(st.sampled_from(sorted(MESSAGES)), PLAIN), st.data())
def test_random_values_in_a_header_are_refused_and_nothing_worse(
    header: Any, data: st.DataObject
) -> None:
    frames = [wire.pack(header), *data.draw(st.lists(st.binary(), max_size=4))]
    decodes_or_is_refused(frames, data.draw(ROUTES))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_valid_message_with_one_thing_changed_is_refused_or_valid(data: st.DataObject) -> None:
    drawn = data.draw(st.sampled_from(sorted(MESSAGES)))
    cls = MESSAGES[drawn]
    header, *raw = wire.encode(data.draw(of_message(drawn)))
    name, fields = wire.unpack(header, max_bytes=1 << 20)
    match data.draw(st.sampled_from(["value", "missing", "more", "byte", "cut", "frames"])):
        case "value" if fields:
            fields[data.draw(st.sampled_from(sorted(fields)))] = data.draw(PLAIN)
        case "missing" if fields:
            del fields[data.draw(st.sampled_from(sorted(fields)))]
        case "more":
            fields[data.draw(st.text() | st.binary())] = data.draw(PLAIN)
        case "frames":
            raw = data.draw(st.lists(st.binary(), max_size=5))
        case change:
            position = data.draw(st.integers(0, len(header) - 1))
            tail = b"" if change == "cut" else data.draw(st.binary(min_size=1, max_size=2))
            rest = b"" if change == "cut" else header[position + 1 :]
            frames = [header[:position] + tail + rest, *raw]
            decodes_or_is_refused(frames, (cls.LANE, min(cls.SENDERS), min(cls.RECEIVERS)))
            return
    frames = [wire.pack([name, fields]), *raw]
    decodes_or_is_refused(frames, (cls.LANE, min(cls.SENDERS), min(cls.RECEIVERS)))


@settings(max_examples=150, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_a_valid_message_with_several_things_changed_is_refused_or_valid(
    rng: random.Random, num_changes: int
) -> None:
    MUTATOR.rng = rng
    frames, route = MUTATOR.valid()
    for _ in range(num_changes):
        frames = MUTATOR.mutate(frames)
    decodes_or_is_refused(frames, route)


def read_both_ways(frames: list[bytes]) -> Message | None:
    """What `frames` are when they are read in one go, or None; then the steps give the same."""
    route = {"lane": Lane.ROLLOUTS, "sender": Role.WORKER, "receiver": Role.COORDINATOR}
    at_once = wire._decode_at_once(frames, **route)  # type: ignore[arg-type]
    if at_once is not None:
        in_steps = wire._decode_in_steps(frames, **route)  # type: ignore[arg-type]
        assert repr(at_once) == repr(in_steps)  # 1 is not True, nor 1.0
        assert at_once == in_steps
        assert vars(at_once) == vars(in_steps)
    return at_once


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(of_message("GroupResult"))
def test_a_valid_group_is_read_in_one_go(message: Message) -> None:
    assert read_both_ways(wire.encode(message)) == message


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(of_message("GroupResult"), st.data())
def test_a_group_with_one_value_changed_is_read_in_one_go_as_in_steps(
    message: Message, data: st.DataObject
) -> None:
    header, *raw = wire.encode(message)
    _, fields = wire.unpack(header, max_bytes=1 << 20)
    place: Any = fields
    while True:
        keys = range(len(place)) if isinstance(place, list) else sorted(place)
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or data.draw(st.integers(0, 3)) == 0:
            break
        place = place[key]
    number = st.sampled_from((True, -1, 0, 1, 1.0, 2**20 + 1, 2**31 + 1, 2**64 - 1, 1e31))
    near = st.sampled_from(("", "stop", "stop\n", "a" * 65, b"stop", None, float("nan"), -0.0))
    match data.draw(st.sampled_from(("set", "drop", "add"))):
        case "set":
            place[key] = data.draw(number | near | PLAIN)
        case "drop":
            del place[key]
        case "add" if isinstance(place, dict):
            place["more"] = data.draw(PLAIN)
        case _:
            place.append(data.draw(st.sampled_from(place) | PLAIN))
    read_both_ways([wire.pack(["GroupResult", fields]), *raw])


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(of_message("GroupResult"), st.randoms(use_true_random=False), st.integers(1, 3))
def test_a_group_that_was_changed_is_read_in_one_go_as_in_steps(
    message: Message, rng: random.Random, num_changes: int
) -> None:
    MUTATOR.rng = rng
    frames = wire.encode(message)
    for _ in range(num_changes):
        frames = MUTATOR.mutate(frames)
    read_both_ways(frames)


@pytest.mark.parametrize(
    ("bytes_before", "bytes_after"),
    [
        (b"\xa4step\x02", b"\xa4step\xd0\x02"),  # a number in more bytes than it needs
        (b"\xa4step\x02", b"\xa4step\xc3"),  # true
        (b"\x82\xabincarnation", b"\x83\xa4more\x01\xabincarnation"),  # an unknown key, within
        (b"\x82\xabincarnation", b"\x83\xa4step\x01\xabincarnation"),  # a key twice
        (b"\x86\xa5lease", b"\x87\xa5group\xa1x\xa5lease"),
    ],
)
def test_a_header_in_another_form_than_ours_is_read_in_steps(
    bytes_before: bytes, bytes_after: bytes
) -> None:
    spans = (Span(Version(1, 2), 0, 1),)
    header = TrajectoryHeader(
        length=1, prompt_length=0, num_sampled=1, reward=0.5, finish="stop", num_turns=1,
        spans=spans,
    )  # fmt: skip
    message = GroupResult(
        lease=LeaseId("l"), group=GroupId("g"), attempt=1, trajectories=(header,),
        generate_s=1.0, environment_s=0.0,
        token_ids=bytes(4), logprobs=bytes(4), loss_mask=bytes(1),
    )  # fmt: skip
    first, *raw = wire.encode(message)
    assert bytes_before in first
    assert read_both_ways([first, *raw]) == message
    assert read_both_ways([first.replace(bytes_before, bytes_after), *raw]) is None


@settings(max_examples=100, deadline=None)
@given(PLAIN)
def test_plain_values_survive_a_pipe(plain: Any) -> None:
    packed = wire.pack(plain)
    assert wire.pack(wire.unpack(packed, max_bytes=len(packed))) == packed


@settings(max_examples=150, deadline=None)
@given(st.binary(), st.integers(0, 200))
def test_unpack_raises_one_error_only(data: bytes, max_bytes: int) -> None:
    try:
        wire.unpack(data, max_bytes=max_bytes)
    except RemoteProtocolError as error:
        assert error.reason in ("malformed", "oversized")  # noqa: PT017
