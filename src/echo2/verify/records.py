"""Reads the record files of a run folder, line by line, and names every line that is not whole.

A file is read once and in order. A line is whole when it is one JSON object with the fields
of its kind; others are reported and left out. A torn line (cut by a crash while it was being
written) is allowed where its writer died: at the end of a run that did not finish, and just
before the first line of a later incarnation.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

EVENTS_FILE: Final = "events.jsonl"
METRICS_FILE: Final = "metrics.jsonl"
CONFIG_FILE: Final = "config.resolved.toml"
SIMULATION_FILE: Final = "simulation.json"
"""In the folder of a run that `echo2 simulate` played, in which there are no weights."""
NO_WEIGHTS: Final = "the run is simulated: there are no weights"
LINE_MAX_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Line:
    """One whole line: `number` counts from 1."""

    file: str
    number: int
    fields: dict[str, Any]

    @property
    def where(self) -> str:
        return f"{self.file}:{self.number}"

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line that is no JSON object. `last`: nothing follows it in the file."""

    file: str
    number: int
    text: str
    last: bool

    @property
    def where(self) -> str:
        return f"{self.file}:{self.number}"


def read_lines(path: Path) -> Iterator[Line | BrokenLine]:
    """Every line of a JSON-lines file, whole or broken; nothing if the file does not exist."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        number = 0
        raw = file.readline(LINE_MAX_BYTES)
        while raw:
            number += 1
            following = file.readline(LINE_MAX_BYTES)
            yield _line(path.name, number, raw, last=not following)
            raw = following


def read_config(path: Path) -> tuple[dict[str, Any], str]:
    """(tables, problem): the configuration's tables; `problem` is "" when it can be read."""
    try:
        with path.open("rb") as file:
            return tomllib.load(file), ""
    except FileNotFoundError:
        return {}, f"{path.name} does not exist"
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        return {}, f"{path.name} is not TOML: {error}"


def _line(file: str, number: int, raw: bytes, *, last: bool) -> Line | BrokenLine:
    def broken(text: str) -> BrokenLine:
        return BrokenLine(file, number, text, last)

    if not raw.strip():
        return broken("the line is empty")
    try:
        fields = json.loads(raw, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        torn = "torn" if not raw.endswith(b"\n") else "not JSON"
        return broken(f"the line is {torn} after {len(raw)} bytes: {error}")
    if not isinstance(fields, dict):
        return broken(f"the line is a JSON {type(fields).__name__}, not an object")
    return Line(file, number, fields)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
