"""The base of every check: it reads events in order, then concludes once.

A check looks at one promise. It records violations with where they are and which ids they
concern; it never raises for what a record says.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from echo2.verify.history import History
from echo2.verify.records import Line
from echo2.verify.report import VIOLATIONS_KEPT, Promise, Violation


class Check:
    """One promise. Subclasses override `read`, `conclude` or both."""

    NAME: ClassVar[str]
    TEXT: ClassVar[str]
    UNIT: ClassVar[str]

    def __init__(self, run_dir: Path, history: History, metrics: Sequence[Line]) -> None:
        self.run_dir = run_dir
        self.history = history
        self.settings = history.settings
        self.metrics = metrics
        self.promise = Promise(name=self.NAME, text=self.TEXT, unit=self.UNIT)

    def read(self, line: Line) -> None:
        """One event, whole; the history is as it was before it."""

    def conclude(self) -> None:
        """All events are read."""

    def violate(self, where: str, text: str, **ids: Any) -> None:
        self.promise.num_violations += 1
        if len(self.promise.violations) < VIOLATIONS_KEPT:
            self.promise.violations.append(Violation(where=where, text=text, ids=ids))
