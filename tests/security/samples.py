"""Valid messages of every class, drawn from a `random.Random`: where fuzzing begins.

Built from the classes' own type hints and bounds, without hypothesis, so that millions cost
seconds. Sizes are small; what is large on purpose is made by `mutator`.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
import types
import typing
from typing import Annotated, Any, Final, Literal

import annotated_types
from pydantic.fields import FieldInfo

from echo2.messages import MESSAGES, BatchGroup, Frame, GroupResult, Message
from echo2.types import Span, TrajectoryHeader, Version

ITEMS_MAX: Final = 4
TEXT_MAX: Final = 24
RAW_MAX: Final = 64
DIGITS: Final = "0123456789abcdef"
Z85: Final = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
WORD: Final = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"


def a_message(rng: random.Random, cls: type[Message]) -> Message:
    """Valid, of this class."""
    if cls in (GroupResult, BatchGroup):
        return _a_group(rng, cls)
    return cls(**{name: _of(rng, hint) for name, hint in hints_of(cls).items()})


def a_message_of_any_class(rng: random.Random) -> Message:
    return a_message(rng, MESSAGES[rng.choice(sorted(MESSAGES))])


@functools.cache
def hints_of(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _a_group(rng: random.Random, cls: type[Message]) -> Message:
    """With frames that fit its trajectories."""
    headers = tuple(_a_trajectory(rng) for _ in range(rng.randint(1, 3)))
    total = sum(header.length for header in headers)
    fields = {
        name: _of(rng, hint)
        for name, hint in hints_of(cls).items()
        if name not in ("trajectories", "token_ids", "logprobs", "loss_mask")
    }
    fields["trajectories"] = headers
    for name, unit in (("token_ids", 4), ("logprobs", 4), ("loss_mask", 1)):
        fields[name] = rng.randbytes(unit * total)
    return cls(**fields)


def _a_trajectory(rng: random.Random) -> TrajectoryHeader:
    length = rng.randint(1, 20)
    borders = sorted(rng.sample(range(length + 1), min(length + 1, rng.randint(2, 4))))
    pairs = itertools.pairwise(borders)
    spans = tuple(Span(_of(rng, Version), start, end) for start, end in pairs)
    header: TrajectoryHeader = _of(rng, TrajectoryHeader)
    return dataclasses.replace(header, length=length, spans=spans)


def _of(rng: random.Random, hint: Any) -> Any:
    hint, limits = _unwrapped(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return rng.choice(arguments)
    if origin in (typing.Union, types.UnionType):
        chosen = rng.choice(arguments)
        return None if chosen is types.NoneType else _of(rng, chosen)
    if origin is tuple:
        least = limits.get("min_length", 0)
        return tuple(_of(rng, arguments[0]) for _ in range(least + rng.randint(0, ITEMS_MAX)))
    if origin is dict:
        keys = (_of(rng, arguments[0]) for _ in range(rng.randint(0, ITEMS_MAX)))
        return {key: _of(rng, arguments[1]) for key in keys}
    if dataclasses.is_dataclass(hint):
        made: Any = hint
        return made(**{name: _of(rng, each) for name, each in hints_of(made).items()})
    return _scalar(rng, hint, limits)


def _unwrapped(hint: Any) -> tuple[Any, dict[str, Any]]:
    limits: dict[str, Any] = {}
    while True:
        if isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif typing.get_origin(hint) is Annotated:
            hint, *notes = typing.get_args(hint)
            for note in notes:
                _add_limits(limits, note)
        else:
            return hint, limits


def _add_limits(limits: dict[str, Any], note: Any) -> None:
    if isinstance(note, Frame):
        limits["frame_bytes"] = note.max_bytes
    for item in note.metadata if isinstance(note, FieldInfo) else ():
        match item:
            case annotated_types.Ge(least) | annotated_types.Gt(least):
                limits["least"] = least
            case annotated_types.Le(most):
                limits["most"] = most
            case annotated_types.MinLen(least):
                limits["min_length"] = least
            case annotated_types.MaxLen(most):
                limits["max_length"] = most
            case _ if getattr(item, "pattern", None):
                limits["pattern"] = item.pattern


def _scalar(rng: random.Random, hint: Any, limits: dict[str, Any]) -> Any:
    if hint is bool:
        return rng.random() < 0.5
    if hint is int:
        least, most = limits.get("least", -(2**63)), limits.get("most", 2**63 - 1)
        return rng.choice((least, most, min(most, max(least, rng.getrandbits(rng.randint(1, 53))))))
    if hint is float:
        least, most = limits.get("least", -1e300), limits.get("most", 1e300)
        return min(most, max(least, rng.choice((0.5, 1.0, most, rng.uniform(0, 1e6)))))
    if hint is bytes:
        return rng.randbytes(rng.randint(0, min(RAW_MAX, limits["frame_bytes"])))
    assert hint is str, hint
    return _text(rng, limits)


def _text(rng: random.Random, limits: dict[str, Any]) -> str:
    pattern = limits.get("pattern", "")
    if "[0-9a-f]{64}" in pattern:
        return "".join(rng.choices(DIGITS, k=64))
    if "{40}" in pattern:
        return (
            ""
            if pattern.endswith(")?$") and rng.random() < 0.3
            else "".join(rng.choices(Z85, k=40))
        )
    if "tcp://" in pattern:
        return rng.choice(("", f"tcp://127.0.0.1:{rng.randint(1, 65535)}", "tcp://[::1]:5700"))
    if "stop|length" in pattern:
        return rng.choice(("stop", "length", "abort", "environment"))
    if pattern:
        return "".join(rng.choices(WORD, k=rng.randint(1, TEXT_MAX)))
    least = limits.get("min_length", 0)
    most = min(limits["max_length"], TEXT_MAX)
    alphabet = WORD + ' .:/{}"\\é\u2603\U0001f600\x00\n'
    return "".join(rng.choices(alphabet, k=rng.randint(least, most)))
