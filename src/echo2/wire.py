"""Between messages and frames: nothing but a valid message comes out, and no copy goes in.

A message is a MessagePack header `[name, {field: value}]` and one raw frame for each field
marked `Frame`, in the order of the class. `decode` checks, in this order and before the next
step may cost anything: the number of frames, the size of the header, MessagePack within
limits, the name, the lane, who may send and who may receive it, the number and sizes of the
raw frames, the fields' names and lengths, and every field against its type. Whatever is wrong
is a `RemoteProtocolError` with one word as its `reason`; no input raises anything else. A
message that is `HANDED_ON` is read in one go if all of it is as it should be (`wire_typed`), and
in these steps if anything is not.

The only importer of msgpack. Left to others: who the peer is (`net.router`) and what a valid
message means (`core`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Final, get_args, get_origin, get_type_hints

import annotated_types
import msgpack  # type: ignore[import-untyped]
import msgspec
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from typing_extensions import Buffer

from echo2.errors import LocalProtocolError, RemoteProtocolError
from echo2.messages import HEADER_MAX_BYTES, MESSAGES, Lane, Message, Role, frame_fields
from echo2.wire_typed import Reader, reader_of

FRAMES_MAX: Final = 1 + max(len(frame_fields(cls)) for cls in MESSAGES.values())
"""Most frames of any message, the header included."""

MAP_ITEMS_MAX: Final = 65536
"""Most entries of any map in a header."""

_HEADER: Final = "_header"
_PACKED: Final = "_packed"
"""Of a message's own __dict__, beside its fields: its header as it came, and the MessagePack of
fields that it has from another message."""
_READ_AT_ONCE: Final = tuple(
    (b"\x92" + msgpack.packb(name), name) for name, cls in MESSAGES.items() if cls.HANDED_ON
)
"""How the headers of these messages begin."""
_ENCODER: Final = msgspec.msgpack.Encoder()
_TEXT_MAX: Final = 300
_PROBLEMS_READ_MAX: Final = 1000


def encode(message: Message) -> list[bytes]:
    """`message` as [header, frame...]; raw frames are the message's own bytes, not copied.
    One that is `HANDED_ON` and came over the wire gives its header as it came.

    Raises LocalProtocolError when a field does not fit: a frame or header too big, or text
    that is not UTF-8. Types were checked when the message was made.
    """
    codec = _codec_of(message)
    frames = []
    for name, max_bytes in codec.frames:
        frame = getattr(message, name)
        if len(frame) > max_bytes:
            raise LocalProtocolError(
                f"frame {name} of {codec.name} has {len(frame)} bytes; at most {max_bytes} are "
                f"allowed; send less in one message",
                reason="oversized",
            )
        frames.append(frame)
    header = vars(message).get(_HEADER) or _header_of(message, codec)
    if len(header) > HEADER_MAX_BYTES:
        raise LocalProtocolError(
            f"the header of {codec.name} has {len(header)} bytes; at most {HEADER_MAX_BYTES} are "
            f"allowed; send less in one message",
            reason="oversized",
        )
    return [header, *frames]


def hand_on(made: Message, came: Message, name: str) -> None:
    """Let field `name` of `made`, which has its value from the same field of `came`, travel as it
    arrived there: packing it again would cost more than all the rest. `came` is `HANDED_ON`; if
    it was made in this process, nothing is changed."""
    header = vars(came).get(_HEADER)
    if header is not None:
        vars(made)[_PACKED] = {name: _packed_field(header, name)}


def decode(
    frames: Sequence[Buffer], *, lane: Lane, sender: Role | frozenset[Role], receiver: Role
) -> Message:
    """The message in `frames`, which came to `receiver` on `lane`.

    `sender` is the role of the peer, or all roles that it may have: one of them must be
    among the message's senders. Frames are bytes, memoryviews or zmq Frames; raw frames of
    the result are bytes (a copy unless they were bytes). Raises RemoteProtocolError, with a
    reason out of: frames, oversized, malformed, unknown_message, wrong_lane, wrong_sender,
    wrong_receiver.
    """
    message = _decode_at_once(frames, lane=lane, sender=sender, receiver=receiver)
    if message is None:
        message = _decode_in_steps(frames, lane=lane, sender=sender, receiver=receiver)
    return message


def _decode_in_steps(
    frames: Sequence[Buffer], *, lane: Lane, sender: Role | frozenset[Role], receiver: Role
) -> Message:
    if not 1 <= len(frames) <= FRAMES_MAX:
        told = f"more than {FRAMES_MAX} frames" if frames else "no frame"
        raise RemoteProtocolError(
            f"a message of {told} came; 1 to {FRAMES_MAX} are allowed", reason="frames"
        )
    name, fields = _parse_header(frames[0])
    # Before its codec, which takes up to 50 ms to make: nobody has those made that are not theirs.
    _check_route(_class_named(name), lane=lane, sender=sender, receiver=receiver)
    codec = _codec_named(name)
    _add_frames(fields, codec, frames)
    _check_shape(fields, codec)
    try:
        message = codec.adapter.validate_python(fields)
    except ValidationError as error:
        raise RemoteProtocolError(f"{codec.name}: {_first_problem(error)}") from None
    if codec.cls.HANDED_ON:
        vars(message)[_HEADER] = bytes(frames[0])
    return message


def _decode_at_once(
    frames: Sequence[Buffer], *, lane: Lane, sender: Role | frozenset[Role], receiver: Role
) -> Message | None:
    """The message, if it is one that is read so, and nothing is wrong with it: what is wrong is
    found, in its order, by `_decode_in_steps`."""
    if not frames or _size(frames[0]) > HEADER_MAX_BYTES:
        return None
    header = bytes(frames[0])
    name = next((name for begin, name in _READ_AT_ONCE if header.startswith(begin)), None)
    if name is None:
        return None
    try:
        _check_route(MESSAGES[name], lane=lane, sender=sender, receiver=receiver)
    except RemoteProtocolError:
        return None
    codec = _codec_named(name)
    fields = _reader_of(name)(header)
    if fields is None or len(frames) != 1 + len(codec.frames):
        return None
    for (frame_name, max_bytes), frame in zip(codec.frames, frames[1:], strict=True):
        if _size(frame) > max_bytes:
            return None
        fields[frame_name] = bytes(frame)
    made: Any = object.__new__(codec.cls)
    vars(made).update(fields)
    try:
        made.__post_init__()
    except ValueError:
        return None
    vars(made)[_HEADER] = header
    return made  # type: ignore[no-any-return]  # a message of this class


def pack(plain: Any) -> bytes:
    """Plain values (None, bool, int, float, str, bytes, list, tuple, dict) as MessagePack.

    Raises LocalProtocolError for anything else.
    """
    try:
        packed: bytes = msgpack.packb(plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"cannot be packed: {error}") from error
    return packed


def unpack(data: Buffer, *, max_bytes: int) -> Any:
    """What `pack` packed, with tuples as lists. Floats may be NaN or infinite.

    Raises RemoteProtocolError: more than `max_bytes`, not exactly one MessagePack value, an
    extension type, a key that is neither str nor bytes, or text that is not UTF-8.
    """
    return _unpack(data, max_bytes=max_bytes, use_list=True, max_map_items=max_bytes)


@dataclass(frozen=True, slots=True)
class _Codec:
    name: str
    cls: type[Message]
    adapter: TypeAdapter[Message]
    frames: tuple[tuple[str, int], ...]
    frame_names: set[str]
    lengths: dict[str, int | None]
    """Of each field: most items of a tuple or dict; None for a field of another type."""


def _codec_of(message: Message) -> _Codec:
    cls = type(message)
    if MESSAGES.get(cls.__name__) is not cls:
        raise LocalProtocolError(
            f"{cls.__name__} is not a message; declare it with @message in echo2.messages"
        )
    return _codec_named(cls.__name__)


@functools.cache  # as many entries as there are messages: an error is not kept
def _codec_named(name: str) -> _Codec:
    cls = _class_named(name)
    frames = frame_fields(cls)
    names = {name for name, _ in frames}
    return _Codec(name, cls, TypeAdapter(cls), frames, names, _lengths(cls))


@functools.cache
def _reader_of(name: str) -> Reader:
    codec = _codec_named(name)
    return reader_of(codec.cls, without=frozenset(codec.frame_names))


def _class_named(name: str) -> type[Message]:
    cls = MESSAGES.get(name)
    if cls is None:
        raise RemoteProtocolError(
            f"message {_short(name)} is unknown; does the peer run another release of echo2?",
            reason="unknown_message",
        )
    return cls


def _lengths(cls: type[Message]) -> dict[str, int | None]:
    hints = get_type_hints(cls, include_extras=True)
    found: dict[str, int | None] = {}
    for name in (field.name for field in fields(cls)):  # type: ignore[arg-type]
        hint = hints[name]
        if get_origin(hint) is Annotated and get_origin(get_args(hint)[0]) in (tuple, dict):
            bounds = [
                bound.max_length
                for extra in get_args(hint)[1:]
                if isinstance(extra, FieldInfo)
                for bound in extra.metadata
                if isinstance(bound, annotated_types.MaxLen)
            ]
            found[name] = min(bounds)
        else:
            found[name] = None
    return found


def _header_of(message: Message, codec: _Codec) -> bytes:
    packed: dict[str, bytes] = vars(message).get(_PACKED, {})
    fields: Any = message
    if packed or codec.frames:
        fields = {
            name: msgspec.Raw(packed[name]) if name in packed else getattr(message, name)
            for name in codec.lengths
            if name not in codec.frame_names
        }
    try:
        return _ENCODER.encode((codec.name, fields))
    except (TypeError, ValueError, OverflowError) as error:
        raise LocalProtocolError(f"{codec.name} cannot be packed: {error}") from error


def _packed_field(header: bytes, name: str) -> bytes:
    """The MessagePack of a field in a header that was checked."""
    unpacker = msgpack.Unpacker(max_buffer_size=HEADER_MAX_BYTES)
    unpacker.feed(header)
    unpacker.read_array_header()
    unpacker.skip()
    found = b""
    for _ in range(unpacker.read_map_header()):
        key = unpacker.unpack()
        start = unpacker.tell()
        unpacker.skip()
        if key == name:  # of one that comes twice the last counts, here as in `decode`
            found = header[start : unpacker.tell()]
    assert found, f"the header has no field {name}"
    return found


def _parse_header(header: Buffer) -> tuple[str, dict[str, Any]]:
    parsed = _unpack(
        header, max_bytes=HEADER_MAX_BYTES, use_list=False, max_map_items=MAP_ITEMS_MAX
    )
    match parsed:
        case (str(name), dict(fields)) if all(type(key) is str for key in fields):
            return name, fields
    raise RemoteProtocolError("a header is not [name, {field: value}]")


def _check_route(
    cls: type[Message], *, lane: Lane, sender: Role | frozenset[Role], receiver: Role
) -> None:
    if cls.LANE is not lane:
        raise RemoteProtocolError(
            f"{cls.__name__} came in lane {lane}; it belongs to lane {cls.LANE}",
            reason="wrong_lane",
        )
    roles = frozenset((sender,)) if isinstance(sender, Role) else sender
    if cls.SENDERS.isdisjoint(roles):
        raise RemoteProtocolError(
            f"{cls.__name__} came from {_roles(roles)}; only {_roles(cls.SENDERS)} may send it",
            reason="wrong_sender",
        )
    if receiver not in cls.RECEIVERS:
        raise RemoteProtocolError(
            f"{cls.__name__} came to {receiver}; only {_roles(cls.RECEIVERS)} may get it",
            reason="wrong_receiver",
        )


def _add_frames(fields: dict[str, Any], codec: _Codec, frames: Sequence[Buffer]) -> None:
    if len(frames) != 1 + len(codec.frames):
        raise RemoteProtocolError(
            f"{codec.name} came with {len(frames) - 1} raw frames; it has {len(codec.frames)}",
            reason="frames",
        )
    for (name, max_bytes), frame in zip(codec.frames, frames[1:], strict=True):
        if name in fields:
            raise RemoteProtocolError(f"{codec.name}: {name} is a raw frame, not a header field")
        size = _size(frame)
        if size > max_bytes:
            raise RemoteProtocolError(
                f"frame {name} of {codec.name} has {size} bytes; at most {max_bytes} are allowed",
                reason="oversized",
            )
        fields[name] = bytes(frame)


def _check_shape(fields: dict[str, Any], codec: _Codec) -> None:
    """Names and lengths: validation reports every problem, so a header of a million wrong
    keys would cost a minute and gigabytes."""
    for name, value in fields.items():
        if name not in codec.lengths:
            raise RemoteProtocolError(
                f"{codec.name} has no field {_short(name)}; does the peer run another release?"
            )
        most = codec.lengths[name]
        if most is not None and isinstance(value, tuple | dict) and len(value) > most:
            raise RemoteProtocolError(
                f"{codec.name}: {name} has {len(value)} items; at most {most} are allowed"
            )


def _unpack(data: Buffer, *, max_bytes: int, use_list: bool, max_map_items: int) -> Any:
    size = _size(data)
    if size > max_bytes:
        raise RemoteProtocolError(
            f"{size} bytes of MessagePack came; at most {max_bytes} are allowed",
            reason="oversized",
        )
    try:
        return msgpack.unpackb(
            data,
            use_list=use_list,
            strict_map_key=True,
            ext_hook=_refuse_extension,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=size,
            max_map_len=min(size // 2, max_map_items),
            max_ext_len=0,  # timestamps too, which never reach the hook
        )
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        # TypeError: a key that cannot be hashed.
        cause = _short(error) or type(error).__name__
        raise RemoteProtocolError(f"not MessagePack: {cause}; echo2 sends nothing else") from None


def _refuse_extension(code: int, _: bytes) -> None:
    raise ValueError(f"extension type {code}")


def _size(buffer: Buffer) -> int:
    return buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)  # type: ignore[arg-type]


def _roles(roles: frozenset[Role]) -> str:
    return " or ".join(sorted(roles)) or "nobody"


def _first_problem(error: ValidationError) -> str:
    if error.error_count() > _PROBLEMS_READ_MAX:
        return f"{error.error_count()} problems"  # pydantic tells all or none
    problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    said = _short(problem["msg"].removeprefix("Value error, "))
    return f"{_short(place)}: {said}" if place else said


def _short(text: object) -> str:
    """Foreign text, printable and bounded: it goes into logs."""
    printable = ascii(str(text)[:_TEXT_MAX])[1:-1]
    return printable[:_TEXT_MAX]
