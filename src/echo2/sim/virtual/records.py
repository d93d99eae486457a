"""The run folder of a simulated run: the files of a real one, with virtual times.

config.resolved.toml, events.jsonl and metrics.jsonl are as a real run's, for the same readers; a
line of metrics says `simulated`, and leaves out what only weights can tell. `simulation.json` says
that it is one, and what came of it. There is no ledger, no checkpoint and no version: nothing was
delivered that could be kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

from echo2.config import Config, config_to_toml
from echo2.folder_errors import folder_errors
from echo2.ledger.events_log import EventsLog
from echo2.verify.records import SIMULATION_FILE
from echo2.weights.files import write_whole


class Records:
    """`folder` must be there. Use as a context manager. ConfigError when it cannot be written."""

    def __init__(self, folder: Path, config: Config, *, clock: Callable[[], float]) -> None:
        self.folder = folder
        self._config = config
        self._events = EventsLog(folder / "events.jsonl", clock=clock)
        self._metrics: TextIO | None = None

    def __enter__(self) -> Records:
        with folder_errors(self.folder):
            resolved = self.folder / "config.resolved.toml"
            write_whole(resolved, config_to_toml(self._config).encode(), mode=0o600)
            self.conclude({"finished": False})
            self._events.open()
            self._metrics = (self.folder / "metrics.jsonl").open("w", encoding="utf-8")
        return self

    def __exit__(self, *_: object) -> None:
        self._events.close()
        if self._metrics is not None:
            self._metrics.close()

    def event(self, name: str, fields: dict[str, Any]) -> None:
        self._events.write(name, fields)

    def flush(self) -> None:
        self._events.flush()

    def line(self, fields: Mapping[str, Any]) -> None:
        """A line of metrics."""
        assert self._metrics is not None
        with folder_errors(self.folder):
            self._metrics.write(json.dumps(fields, allow_nan=False) + "\n")

    def conclude(self, figures: Mapping[str, Any]) -> None:
        """What came of the run."""
        content = json.dumps({"simulated": True, **figures}, indent=2) + "\n"
        write_whole(self.folder / SIMULATION_FILE, content.encode())
