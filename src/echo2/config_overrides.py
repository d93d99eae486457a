"""`--set TABLE.KEY=VALUE`: overrides of what a TOML file says, before it is checked.

Values are TOML, a bare word is text. A table of an array is named by its name:
`offers.rtx-5090.count=3`.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from echo2.nearest import nearest

Location = tuple[str, ...]


def apply_overrides(tables: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Set "a.b=c" in `tables`; values are TOML, a bare word is text. Returns the problems."""
    problems = []
    for override in overrides:
        key, equals, text = override.partition("=")
        try:
            if not equals:
                raise ValueError('the form is --set TABLE.KEY=VALUE, e.g. "learner.steps=20"')
            _set(tables, _keys(key), _override_value(text.strip()))
        except ValueError as error:
            problems.append(f"--set {override}: {error}")
    return problems


def _keys(text: str) -> Location:
    try:
        if not text.isprintable():
            raise ValueError
        table = tomllib.loads(f"{text.strip()} = 0")
    except ValueError:
        raise ValueError(f'"{text.strip()}" is no key; the form is TABLE.KEY=VALUE') from None
    keys: list[str] = []
    inner: Any = table
    while isinstance(inner, dict) and len(inner) == 1:
        ((key, inner),) = inner.items()
        keys.append(key)
    if inner != 0:
        raise ValueError(f'"{text.strip()}" is no single key; the form is TABLE.KEY=VALUE')
    return tuple(keys)


def _override_value(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
        if table.keys() == {"value"}:
            return table["value"]
    except tomllib.TOMLDecodeError as error:
        if text.startswith(('"', "'", "[", "{")):
            raise ValueError(
                f"{text} is not a TOML value: {error}; close what it opens, or leave that out"
            ) from None
    if not text.isprintable():
        raise ValueError("text of an override must be printable; put it into the file")
    return text


def _set(tables: dict[str, Any], keys: Location, value: Any) -> None:
    inner: Any = tables
    for depth, key in enumerate(keys[:-1], 1):
        so_far = ".".join(keys[:depth])
        if isinstance(inner, list):
            inner = _called(inner, key, ".".join(keys[: depth - 1]))
        else:
            inner = inner.setdefault(key, {})
        if not isinstance(inner, dict | list):
            raise ValueError(f"{so_far} is a value and has no keys of its own; set {so_far}")
    if isinstance(inner, list):
        path = ".".join(keys[:-1])
        raise ValueError(
            f"{path} is an array of tables; say which by its name, as in {path}.NAME.KEY=VALUE"
        )
    inner[keys[-1]] = value


def _called(items: list[Any], name: str, path: str) -> dict[str, Any]:
    """The table of an array that has this name."""
    names = [str(item["name"]) for item in items if isinstance(item, dict) and "name" in item]
    for item in items:
        if isinstance(item, dict) and item.get("name") == name:
            return item
    near = nearest(name, names)
    hint = f"; did you mean {path}.{near}?" if near else ""
    raise ValueError(f'no table of {path} is called "{name}"{hint} (known: {", ".join(names)})')
