"""Writes plain values as TOML that `tomllib` reads back to the very same values.

Only what a configuration holds: tables, arrays, text, numbers, booleans, dates. None is
left out, since TOML has no null.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_ESCAPES = {
    "\\": "\\\\",
    '"': '\\"',
    "\b": "\\b",
    "\t": "\\t",
    "\n": "\\n",
    "\f": "\\f",
    "\r": "\\r",
}


def toml_document(tables: Mapping[str, Any]) -> str:
    """The mapping as a TOML document, in its own order: plain values of a table first,
    then its tables, and arrays of tables, under headers of their own."""
    lines: list[str] = []
    _write_table(lines, (), tables)
    return "\n".join(lines).strip("\n") + "\n"


def toml_value(value: Any) -> str:
    """One value on one line. Raises TypeError for what TOML cannot hold."""
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _text(value)
        case int():
            return str(value)
        case float():
            return _number(value)
        case dt.datetime() | dt.date() | dt.time():
            return value.isoformat()
        case Mapping():
            inner = ", ".join(
                f"{toml_key(key)} = {toml_value(item)}"
                for key, item in value.items()
                if item is not None
            )
            return f"{{ {inner} }}" if inner else "{}"
        case Sequence():
            return "[" + ", ".join(toml_value(item) for item in value) + "]"
        case _:
            raise TypeError(f"TOML cannot hold {value!r} of type {type(value).__name__}")


def toml_key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _write_table(
    lines: list[str], path: tuple[str, ...], table: Mapping[str, Any], *, is_item: bool = False
) -> None:
    plain = {k: v for k, v in table.items() if v is not None and not _has_headers(v)}
    inner = {k: v for k, v in table.items() if _has_headers(v)}
    if path and (plain or not inner or is_item):
        name = ".".join(toml_key(part) for part in path)
        lines.append("")
        lines.append(f"[[{name}]]" if is_item else f"[{name}]")
    lines.extend(f"{toml_key(key)} = {toml_value(value)}" for key, value in plain.items())
    for key, value in inner.items():
        if isinstance(value, Mapping):
            _write_table(lines, (*path, key), value)
        else:
            for item in value:
                _write_table(lines, (*path, key), item, is_item=True)


def _has_headers(value: Any) -> bool:
    """Whether it is a table, or an array of nothing but tables."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, Mapping) for item in value)
    return isinstance(value, Mapping)


def _number(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return repr(value)


def _text(value: str) -> str:
    return '"' + "".join(_character(character) for character in value) + '"'


def _character(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x20 or code == 0x7F else character
