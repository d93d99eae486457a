"""Writes docs/protocol.md from the messages themselves, so that the page cannot drift.

`python -m echo2.protocol_docs` writes the page, `--check` only compares it and exits with 1
when it is out of date. The page holds the limits, the lanes, the named types, the nested
values and one table per message, in the order of `echo2.messages`. Meaning lives in the
docstrings there; this module only lays it out.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import types as python_types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin, get_type_hints

import annotated_types
from pydantic.fields import FieldInfo

from echo2 import messages, types
from echo2.messages import Frame, Lane, Message, Role

PAGE_PATH: Final = Path("docs/protocol.md")

_VALUES: Final = (
    types.Version,
    types.Span,
    types.Sampling,
    types.Task,
    types.TrajectoryHeader,
)
_LANE_TEXTS: Final = {
    Lane.CONTROL: "small messages whose delay matters: hellos, heartbeats, leases, versions, "
    "steps. ROUTER at the coordinator.",
    Lane.ROLLOUTS: "finished groups and their acknowledgements, up to megabytes each. ROUTER "
    "at the coordinator.",
    Lane.CHUNKS: "manifests and chunks of versions and assets. ROUTER at the origin.",
    Lane.ENROLMENT: "for machines that hold a join token and have no name yet. ROUTER at the "
    "coordinator, in an authentication domain of its own.",
}
_CONVERSATIONS: Final = {
    "Worker and coordinator": Role.WORKER,
    "Learner and coordinator": Role.LEARNER,
    "Worker and origin": Role.ORIGIN,
}
_LIMITS: Final = (
    ("PROTOCOL", "number of this protocol; a hello with another one is refused"),
    ("HEADER_MAX_BYTES", "largest header frame, checked before it is parsed"),
    ("CHUNK_MAX_BYTES", "largest chunk"),
    ("GROUP_FRAME_MAX_BYTES", "largest frame of a group"),
    ("MANIFEST_MAX_BYTES", "largest manifest"),
    ("LEASES_PER_PEER_MAX", "most leases that one peer may hold or name"),
    ("JOIN_SETTINGS_MAX", "longest settings of an enrolled worker, in characters"),
)


def render() -> str:
    """The whole page as Markdown, ending in a newline."""
    return "\n".join(_page()) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write or compare the page; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m echo2.protocol_docs", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("path", nargs="?", type=Path, default=PAGE_PATH)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 if it differs")
    options = parser.parse_args(arguments)
    path: Path = options.path
    page = render()
    if options.check:
        if path.is_file() and path.read_text(encoding="utf-8") == page:
            return 0
        print(
            f"{path} is not what the messages say now; run: python -m echo2.protocol_docs {path}",
            file=sys.stderr,
        )
        return 1
    if not path.parent.is_dir():
        print(
            f"{path.parent} is not a folder; run this at the root of the sources, or name the "
            "file to write",
            file=sys.stderr,
        )
        return 2
    path.write_text(page, encoding="utf-8")
    print(f"{path}: {len(messages.MESSAGES)} messages")
    return 0


def _page() -> Iterator[str]:
    yield "# Protocol"
    yield ""
    yield "Generated from `src/echo2/messages.py` by `python -m echo2.protocol_docs`; edit there."
    yield ""
    yield (
        "A message on the wire is a list of frames. The first is a MessagePack header, "
        "`[name, {field: value}]`; then comes one raw frame for each field marked *frame* below, "
        "in the order of the table. Everything is bounded, and checked by the receiver before it "
        "is used: the number of frames and their sizes before anything is parsed, the name, the "
        "lane, the sender's and the receiver's role, then every field. A field that is not in "
        "the table is refused. What breaks a rule is counted by its reason and dropped."
    )
    yield ""
    yield "## Limits"
    yield ""
    yield from _table(
        ("name", "value", "meaning"),
        ((f"`{name}`", f"{getattr(messages, name):,}", text) for name, text in _LIMITS),
    )
    yield "## Lanes"
    yield ""
    yield "Lanes are separate sockets, so that none queues behind another."
    yield ""
    for lane, text in _LANE_TEXTS.items():
        names = [name for name, cls in messages.MESSAGES.items() if cls.LANE is lane]
        yield f"- **{lane.value}**: {text}"
        yield "  " + ", ".join(f"[{name}](#{name.lower()})" for name in names) + "."
    yield ""
    yield "## Types"
    yield ""
    yield from _table(
        ("type", "is", "bounds", "meaning"),
        (
            (f"`{name}`", *_expanded(alias), _alias_text(name))
            for name, alias in _ALIASES.items()
            if name != "Position"
        ),
    )
    yield "## Values"
    yield ""
    for value in _VALUES:
        yield from _section(value, level=3)
    for title, wanted in _CONVERSATIONS.items():
        yield f"## {title}"
        yield ""
        for cls in messages.MESSAGES.values():
            if _peer(cls) is wanted:
                yield from _section(cls, level=3)


def _peer(cls: type[Message]) -> Role:
    """Under whose heading a message stands: the first that fits of origin, worker, learner."""
    roles = cls.SENDERS | cls.RECEIVERS
    return next(role for role in (Role.ORIGIN, Role.WORKER, Role.LEARNER) if role in roles)


def _section(cls: type[Any], *, level: int) -> Iterator[str]:
    yield f"{'#' * level} {cls.__name__}"
    yield ""
    if issubclass(cls, Message):
        senders, receivers = (
            " or ".join(sorted(role.value for role in roles))
            for roles in (cls.SENDERS, cls.RECEIVERS)
        )
        yield f"{senders} → {receivers}, lane {cls.LANE.value}"
        yield ""
    text = _docstring(cls)
    if text:
        yield text
        yield ""
    hints = get_type_hints(cls, include_extras=True)
    rows = []
    for field in dataclasses.fields(cls):
        type_text, bounds = _described(hints[field.name])
        rows.append((f"`{field.name}`", type_text, bounds, _default(field)))
    if not rows:
        yield "It has no fields."
        yield ""
        return
    yield from _table(("field", "type", "bounds", "default"), rows)


def _docstring(cls: type[Any]) -> str:
    text = cls.__doc__ or ""
    if text.startswith(f"{cls.__name__}("):  # made by dataclass, says nothing new
        return ""
    return " ".join(inspect.cleandoc(text).split())


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        return "" if field.default_factory is dataclasses.MISSING else "empty"
    if value is None:
        return "null"
    if isinstance(value, bytes):
        return "empty" if not value else f"{len(value)} bytes"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[]" if not value else f"[{', '.join(map(str, value))}]"
    return str(value)


def _described(hint: Any) -> tuple[str, str]:
    """(type, bounds) of a field's hint, in the words of the page."""
    alias = _ALIAS_NAMES.get(id(hint))
    if alias is not None:
        return f"[{alias}](#types)", ""
    return _expanded(hint)


def _expanded(hint: Any) -> tuple[str, str]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        type_text, bounds = _described(arguments[0])
        found = [bounds] if bounds else []
        for extra in arguments[1:]:
            if isinstance(extra, Frame):
                return f"frame of {type_text}", f"at most {extra.max_bytes:,} bytes"
            if isinstance(extra, FieldInfo):
                found.extend(_bounds(extra, arguments[0]))
        return type_text, "; ".join(found)
    if origin is Literal:
        return " or ".join(f'"{argument}"' for argument in arguments), ""
    if origin in (Union, python_types.UnionType):
        parts = [_described(argument) for argument in arguments if argument is not type(None)]
        optional = len(parts) < len(arguments)
        type_text = " or ".join(part[0] for part in parts) + (" or null" if optional else "")
        return type_text, "; ".join(part[1] for part in parts if part[1])
    if origin is tuple:
        item_type, item_bounds = _described(arguments[0])
        return f"list of {item_type}", f"each: {item_bounds}" if item_bounds else ""
    if origin is dict:
        key, value = (_described(argument) for argument in arguments)
        pairs = (("keys", key), ("values", value))
        return f"map of {key[0]} to {value[0]}", "; ".join(
            f"{what}: {part[1]}" for what, part in pairs if part[1]
        )
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return f"[{hint.__name__}](#{hint.__name__.lower()})", ""
    return _PLAIN_NAMES[getattr(hint, "__supertype__", hint)], ""


_PLAIN_NAMES: Final[dict[Any, str]] = {
    int: "integer",
    float: "real",
    str: "text",
    bool: "boolean",
    bytes: "bytes",
}


def _bounds(info: FieldInfo, base: Any) -> Iterator[str]:
    low = high = ""
    sizes: list[str] = []
    others: list[str] = []
    for extra in info.metadata:
        match extra:
            case annotated_types.Ge(ge=bound):
                low = f"≥ {_number(bound)}"
            case annotated_types.Gt(gt=bound):
                low = f"> {_number(bound)}"
            case annotated_types.Le(le=bound):
                high = f"≤ {_number(bound)}"
            case annotated_types.Lt(lt=bound):
                high = f"< {_number(bound)}"
            case annotated_types.MinLen(min_length=size):
                sizes.append(f"at least {size:,}")
            case annotated_types.MaxLen(max_length=size):
                sizes.append(f"at most {size:,}")
            case _:
                pattern = getattr(extra, "pattern", None)
                if pattern is not None:
                    others.append(f"matches `{str(pattern).replace('|', chr(92) + '|')}`")
                if getattr(extra, "allow_inf_nan", None) is False:
                    others.append("finite")
    if low or high:
        yield ", ".join(part for part in (low, high) if part)
    if sizes:
        unit = "characters" if get_origin(base) is None else "items"
        yield f"{', '.join(sizes)} {unit}"
    yield from others


def _number(bound: Any) -> str:
    if isinstance(bound, int) and bound > 4096 and bound & (bound - 1) == 0:
        return f"2^{bound.bit_length() - 1}"
    if isinstance(bound, int) and bound > 4096 and (bound + 1) & bound == 0:
        return f"2^{bound.bit_length()} - 1"
    if bound == int(bound):
        return f"{int(bound):,}"
    return f"{bound:g}"


def _alias_text(name: str) -> str:
    return {
        "Count": "a number of things, or a learner step",
        "Seconds": "a duration",
        "Real": "any finite number",
        "Name": "name of a peer, an engine, a reason",
        "Text": "for people",
        "Digest": "BLAKE3 of 32 bytes in lower-case hexadecimal",
        "Endpoint": "address of a socket; empty: none",
        "ServerKey": "public CURVE key (z85); empty: none",
        "PublicKey": "public CURVE key (z85)",
        "VersionNumber": "an incarnation, or the learner steps behind a version",
        "TokenCount": "tokens of a trajectory, or a position in it",
        "TrajectoryLength": "all tokens of a trajectory",
        "TurnCount": "turns of a trajectory",
        "LeaseName": "id of a lease",
        "GroupName": "id of a group",
    }.get(name, "")


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


_ALIASES: Final[dict[str, Any]] = {
    **{name: alias for name, alias in vars(types).items() if get_origin(alias) is Annotated},
    "LeaseName": messages.LeaseName,
    "GroupName": messages.GroupName,
}
_ALIAS_NAMES: Final[dict[int, str]] = {id(alias): name for name, alias in _ALIASES.items()}


if __name__ == "__main__":
    sys.exit(main())
