"""Reads TOML into a model of settings and tells every problem at once.

Life-cycle: text -> tables -> overrides -> values checked one by one -> rules between them.
A value that is wrong itself is left out (its default stands in) while the rules are
checked, so that one reading finds everything. Knows no setting of echo2's: the model and
the rules are arguments.
"""

from __future__ import annotations

import copy
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ValidationError

from echo2.config_overrides import Location, apply_overrides
from echo2.errors import ConfigError
from echo2.nearest import alternatives, nearest
from echo2.toml_text import toml_value

M = TypeVar("M", bound=BaseModel)
M_contra = TypeVar("M_contra", bound=BaseModel, contravariant=True)


class RuleOf(Protocol[M_contra]):
    """One rule between settings: `check` answers None or a sentence about `key`."""

    @property
    def key(self) -> str: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    def check(self, config: M_contra, /) -> str | None: ...


def load_model(
    model: type[M], path: str | Path, overrides: Sequence[str], rules: Sequence[RuleOf[M]]
) -> M:
    """Read `path`, apply "a.b=c" overrides, check all. Raises ConfigError."""
    path = Path(path)
    tables = read_toml(path)
    problems = apply_overrides(tables, overrides)
    return check_model(model, tables, rules, source=str(path), problems=problems)


def check_model(
    model: type[M],
    tables: Mapping[str, Any],
    rules: Sequence[RuleOf[M]],
    *,
    source: str = "",
    problems: Iterable[str] = (),
) -> M:
    """The model made of `tables`, or ConfigError with `problems` and all that were found."""
    found = list(problems)
    wrong: set[str] = set()
    tables = _without_moved_defaults(model, tables)
    try:
        config = model.model_validate(tables, strict=True)
    except ValidationError as error:
        schema = _Schema(model)
        left = copy.deepcopy(dict(tables))
        for detail in error.errors(include_url=False, include_context=False):
            location = schema.known_part(detail["loc"])
            whole = _without_item(location)
            wrong.add(".".join(whole))
            found.append(schema.problem(location, detail["type"], detail["msg"], detail["input"]))
            _leave_out(left, whole)
        config = model.model_validate(left, strict=True)
    found.extend(rule_problems(config, rules, wrong))
    if found:
        # A value that may be one of several kinds is refused once by each of them.
        raise ConfigError(list(dict.fromkeys(found)), source=source)
    return config


def rule_problems(
    config: M, rules: Sequence[RuleOf[M]], wrong: Iterable[str] = ()
) -> Iterator[str]:
    """What the rules say, without those that read a key that is `wrong` itself."""
    heads = tuple(wrong)
    for rule in rules:
        if any(key == head or key.startswith(f"{head}.") for key in rule.reads for head in heads):
            continue
        text = rule.check(config)
        if text is not None:
            yield f"{rule.key}: {text}"


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises ConfigError that says where and what."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(_missing(path)) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; give a TOML file in it") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text (byte {error.start}), as TOML files are: save it as UTF-8"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read ({error.strerror}); give a TOML file that this user may read"
        ) from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(_syntax(path, text, str(error))) from None


def _missing(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"{path} does not exist, nor does its folder (searched from {Path.cwd()})"
    there = sorted(each.name for each in folder.glob("*.toml"))
    close = nearest(path.name, there)
    hint = f"; did you mean {folder / close}?" if close else ""
    listed = ", ".join(there[:8]) or "none"
    return f"{path} does not exist{hint} (TOML files in {folder.resolve()}: {listed})"


_AT = re.compile(r"^(?P<what>.*?) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end .*)\)$")


def _syntax(path: Path, text: str, said: str) -> str:
    lines = text.splitlines() or [""]
    match = _AT.match(said)
    what = match["what"] if match else said
    if match and match["line"]:
        line, column = int(match["line"]), int(match["column"])
    else:
        line, column = len(lines), len(lines[-1]) + 1
    shown = lines[min(line, len(lines)) - 1].strip()
    what = what[:1].lower() + what[1:]
    return f"{path}, line {line}, column {column}: not TOML: {what}; the line reads: {shown[:120]}"


def _without_moved_defaults(model: type[BaseModel], tables: Mapping[str, Any]) -> dict[str, Any]:
    """The same without settings under a former name (the model's MOVED) that say what holds
    anyway: run folders of earlier releases have all settings written out."""
    left = copy.deepcopy(dict(tables))
    moved: Mapping[str, str] = getattr(model, "MOVED", {})
    for old, new in moved.items():
        default: Any = model()
        for key in new.split("."):
            default = getattr(default, key)
        *path, name = old.split(".")
        table: Any = left
        for key in path:
            table = table.get(key) if isinstance(table, dict) else None
        if isinstance(table, dict) and table.get(name) == default:
            del table[name]
    return left


def _leave_out(tables: dict[str, Any], location: Location) -> None:
    inner: Any = tables
    for key in location[:-1]:
        inner = inner.get(key) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.pop(location[-1], None)


def _without_item(location: Location) -> Location:
    """Up to the setting that holds it: to the array, for one of its items."""
    for depth, key in enumerate(location):
        if key.endswith("]"):
            return (*location[:depth], key.partition("[")[0])
    return location


class _Schema:
    """What a model knows and allows, read from its JSON schema.

    An item of an array of tables is a part of a location as "offers[0]". The model's MOVED, if it
    has one, names where settings are that had another name before.
    """

    def __init__(self, model: type[BaseModel]) -> None:
        self._root = model.model_json_schema()
        self._moved: Mapping[str, str] = getattr(model, "MOVED", {})

    def known_part(self, location: Sequence[int | str]) -> Location:
        """`location` up to the first key that is unknown, or to the setting that holds it."""
        known: list[str] = []
        schema: Mapping[str, Any] | None = self._root
        for key in location:
            if isinstance(key, int):
                schema = self._item(schema or {})
                if schema is None:
                    break
                known[-1] += f"[{key}]"
                continue
            properties = self._properties(schema or {})
            if properties is None:
                break
            known.append(key)
            schema = properties.get(key)
        return tuple(known)

    def problem(self, location: Location, kind: str, said: str, given: Any) -> str:
        if kind == "extra_forbidden":
            return self._unknown(location, given)
        key = ".".join(location)
        schema = self._at(location)
        properties = self._properties(schema)
        if kind == "missing":
            *path, leaf = location
            lacks = f"{'.'.join(path)} lacks {leaf}"
            return f"{lacks}: give {_allowed(schema)}"
        if properties is not None:
            return (
                f"{key} = {_shown(given)}: this is a table; write it as {_header(key)} with keys "
                f"{alternatives(list(properties))}"
            )
        item = self._item(schema)
        if item is not None and not isinstance(given, list):
            return (
                f"{key} = {_shown(given)}: these are tables; begin each with [[{key}]], its keys "
                f"are {alternatives(list(self._properties(item) or {}))}"
            )
        allowed, suggestion = _allowed(schema), _suggestion(schema, given)
        told = f"allowed is {allowed}" if allowed else said
        hint = f"; did you mean {suggestion}?" if suggestion else ""
        return f"{key} = {_shown(given)}: {told}{hint}"

    def _unknown(self, location: Location, given: Any) -> str:
        *path, leaf = location
        moved = self._moved.get(".".join(location))
        if moved is not None:
            table, _, key = moved.rpartition(".")
            return (
                f"{'.'.join(location)} = {_shown(given)}: this setting is {moved} now; write "
                f"{key} = {_shown(given)} under {_header(table)}"
            )
        table = ".".join(path)
        known = self._properties(self._at(tuple(path))) or {}
        near = self._nearest(table, leaf, known)
        hint = f"; did you mean {near}?" if near else ""
        what = "table" if isinstance(given, Mapping) else "setting"
        where = f"{_header(table)} knows" if table else "tables are"
        return (
            f"{'.'.join(location)} = {_shown(given)}: no such {what}{hint} "
            f"({where} {', '.join(known)})"
        )

    def _nearest(self, table: str, leaf: str, known: Iterable[str]) -> str | None:
        """In the same table if it is close, else the same or a close name elsewhere."""
        prefix = f"{table}." if table else ""
        here = nearest(leaf, known, 0.75)
        if here:
            return prefix + here
        elsewhere: dict[str, list[str]] = {}
        for key in self._leaves(self._root, ""):
            elsewhere.setdefault(key.rpartition(".")[2], []).append(key)
        if leaf in elsewhere:
            return alternatives(elsewhere[leaf])
        here = nearest(leaf, known)
        if here:
            return prefix + here
        there = nearest(leaf, elsewhere, 0.8)
        return alternatives(elsewhere[there]) if there else None

    def _leaves(self, schema: Mapping[str, Any], prefix: str) -> Iterator[str]:
        for key, inner in (self._properties(schema) or {}).items():
            if self._properties(inner) is None:
                yield prefix + key
            else:
                yield from self._leaves(inner, f"{prefix}{key}.")

    def _at(self, location: Location) -> Mapping[str, Any]:
        schema: Mapping[str, Any] = self._root
        for key in location:
            name, bracket, _ = key.partition("[")
            schema = (self._properties(schema) or {})[name]
            if bracket:
                schema = self._item(schema) or {}
        return schema

    def _item(self, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The table that each item of an array is; None for anything else."""
        item = schema.get("items")
        return item if item is not None and self._properties(item) is not None else None

    def _properties(self, schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Keys of a table of the model; None for a value (a free table is a value too)."""
        reference = schema.get("$ref")
        if reference is not None:
            schema = self._root["$defs"][reference.rpartition("/")[2]]
        return schema.get("properties")


def _header(table: str) -> str:
    """As TOML writes it above the keys of a table."""
    name, bracket, _ = table.partition("[")
    return f"[[{name}]]" if bracket else f"[{table}]"


def _shown(value: Any) -> str:
    text = toml_value(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _allowed(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        inner = [each for each in schema["anyOf"] if each.get("type") != "null"]
        told = alternatives([_allowed(each) for each in inner])
        return told if len(inner) == len(schema["anyOf"]) else f"{told}, or leave it out"
    if "enum" in schema:
        return alternatives([toml_value(each) for each in schema["enum"]])
    match schema.get("type"):
        case "boolean":
            return "true or false"
        case "integer" | "number" as kind:
            return ("an integer" if kind == "integer" else "a number") + _range(schema)
        case "string":
            return f"text like {schema['pattern']}" if "pattern" in schema else "text in quotes"
        case "object":
            return "a table"
        case "array":
            return "an array"
        case _:
            return ""


def _range(schema: Mapping[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        return f" from {low} to {high}"
    bounds = {
        "at least {}": low,
        "above {}": schema.get("exclusiveMinimum"),
        "at most {}": high,
        "below {}": schema.get("exclusiveMaximum"),
    }
    told = [form.format(bound) for form, bound in bounds.items() if bound is not None]
    return " " + " and ".join(told) if told else ""


def _suggestion(schema: Mapping[str, Any], given: Any) -> str | None:
    """A value that the user may have meant: the nearest word, or a number out of quotes."""
    if "anyOf" in schema:
        return next(
            (found for each in schema["anyOf"] if (found := _suggestion(each, given))), None
        )
    words = [each for each in schema.get("enum", ()) if isinstance(each, str)]
    if words and isinstance(given, str):
        close = nearest(given.lower(), words, 0.5)
        return toml_value(close) if close else None
    kind = schema.get("type")
    if isinstance(given, str):
        forms = {
            "boolean": r"(?i:true|false)",
            "integer": r"[+-]?\d+",
            "number": r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?",
        }
        form = forms.get(str(kind))
        if form and re.fullmatch(form, given.strip()):
            return f"{given.strip().lower()} without quotes"
    if kind == "integer" and isinstance(given, float) and given.is_integer():
        return str(int(given))
    if kind == "string" and isinstance(given, int | float) and not isinstance(given, bool):
        return toml_value(str(given))
    return None
