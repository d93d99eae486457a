"""Headers of messages that come often and large, read straight into their types.

Promise: a reader gives the fields of a header only if they are what the step-by-step way of
`echo2.wire` would give; else None, and that way decides, and says what is wrong. Three things make
it so. Each bound that a field has for pydantic it has for msgspec too, which is demanded when a
reader is made. Types are no looser: msgspec turns nothing into a field's type but an int into a
float. And the fields, written again, must be the very bytes that came: a header with a key twice,
a key that is unknown, a number in another form than ours or fields in another order is not read
here.

What a declared length may cost is bounded by the bytes that came: msgspec looks at those first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import annotated_types
import msgspec
from pydantic import FailFast, Strict
from pydantic.fields import FieldInfo
from typing_extensions import Buffer

Reader = Callable[[Buffer], dict[str, Any] | None]
"""The fields in a header `[name, {field: value}]` of one message, or None."""

_SCALARS: Final = (bool, int, float, str, NoneType)


def reader_of(cls: type, *, without: frozenset[str]) -> Reader:
    """A reader for the headers of `cls`, in which the fields `without` do not stand.

    Raises TypeError for a field whose bounds msgspec would not check as pydantic does.
    """
    hints = get_type_hints(cls, include_extras=True)
    names = [field.name for field in fields(cls) if field.name not in without]
    for name in names:
        _demand_same_bounds(hints[name], f"{cls.__name__}.{name}")
    struct = msgspec.defstruct(
        cls.__name__, [(name, hints[name]) for name in names], forbid_unknown_fields=True
    )
    name_type: Any = Literal.__getitem__(cls.__name__)
    header_type: Any = tuple.__class_getitem__((name_type, struct))
    decode = msgspec.msgpack.Decoder(header_type).decode
    encode = msgspec.msgpack.Encoder().encode

    def read(header: Buffer) -> dict[str, Any] | None:
        try:
            found = decode(header)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        if encode(found) != header:
            return None
        return {name: getattr(found[1], name) for name in names}

    return read


def _demand_same_bounds(hint: Any, place: str) -> None:
    """Of this type and of all types in it."""
    hint, notes = _plain(hint)
    pydantics, msgspecs = _pydantics_bounds(notes, place), _msgspecs_bounds(notes)
    if pydantics != msgspecs:
        raise TypeError(f"{place} is bounded by {pydantics} for pydantic, {msgspecs} for msgspec")
    if hint is float and not {"ge", "le"} <= msgspecs.keys():
        raise TypeError(f"{place} is a float without both bounds: msgspec would take NaN")
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        for field in fields(hint):
            _demand_same_bounds(hints[field.name], f"{place}.{field.name}")
    elif get_origin(hint) is tuple and get_args(hint)[1:] == (...,):
        _demand_same_bounds(get_args(hint)[0], f"{place}[]")
    elif hint not in _SCALARS and get_origin(hint) is not Literal:
        raise TypeError(f"{place} is {hint}, of which it is not known that both read it alike")


def _plain(hint: Any) -> tuple[Any, list[Any]]:
    """(the type itself, what is noted beside it)."""
    notes: list[Any] = []
    while True:
        if get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            notes += more
        elif hasattr(hint, "__supertype__"):
            hint = hint.__supertype__
        else:
            return hint, notes


def _pydantics_bounds(notes: list[Any], place: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for note in notes:
        for item in note.metadata if isinstance(note, FieldInfo) else ():
            match item:
                case annotated_types.Ge(bound):
                    found["ge"] = bound
                case annotated_types.Le(bound):
                    found["le"] = bound
                case annotated_types.MinLen(bound):
                    found["min_length"] = bound
                case annotated_types.MaxLen(bound):
                    found["max_length"] = bound
                case Strict() | FailFast():
                    pass  # msgspec is both
                case _ if getattr(item, "allow_inf_nan", None) is False:
                    pass  # both bounds of a float forbid them too
                case _:
                    raise TypeError(f"{place} has {item}, which msgspec does not check")
    return found


def _msgspecs_bounds(notes: list[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for note in notes:
        if isinstance(note, msgspec.Meta):
            names = ("ge", "gt", "le", "lt", "multiple_of", "min_length", "max_length", "pattern")
            found |= {name: bound for name in names if (bound := getattr(note, name)) is not None}
    return found
