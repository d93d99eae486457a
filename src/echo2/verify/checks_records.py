"""The records themselves: whole lines with their fields, and a start that fits the settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from echo2.verify import schema
from echo2.verify.check import Check
from echo2.verify.records import EVENTS_FILE, METRICS_FILE, BrokenLine, Line, read_lines


class RecordsWhole(Check):
    """Also the one reader of both files: what is not whole goes no further."""

    NAME = "records_whole"
    TEXT = "every line of the records is one JSON object with the fields of its kind"
    UNIT = "lines"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._torn: list[BrokenLine] = []
        """Broken last lines, allowed if the run did not finish."""

    def events(self) -> Iterator[Line]:
        """Whole events in order."""
        for line, broken in self._lines(EVENTS_FILE):
            if broken is not None:
                restarted = line is not None and line.fields.get("event") == "run_started"
                self._judge(broken, writer_restarted=restarted)
            if line is not None and self._is_event(line):
                yield line

    def metric_lines(self) -> Iterator[Line]:
        """Whole lines of metrics in order."""
        incarnation = 0
        for line, broken in self._lines(METRICS_FILE):
            now = line.fields.get("incarnation") if line is not None else None
            restarted = isinstance(now, int) and now > incarnation
            if broken is not None:
                self._judge(broken, writer_restarted=restarted)
            if line is None:
                continue
            simulated = line.fields.get("simulated") is True
            wanted = schema.SIMULATED_METRICS if simulated else schema.METRICS
            problems = schema.problems_of(line.fields, wanted)
            if problems:
                self.violate(line.where, "; ".join(problems))
                continue
            incarnation = max(incarnation, line["incarnation"])
            yield line

    def _lines(self, name: str) -> Iterator[tuple[Line | None, BrokenLine | None]]:
        """(a whole line, the broken one before it); at the end (None, a broken one)."""
        broken: BrokenLine | None = None
        for line in read_lines(self.run_dir / name):
            self.promise.checked += 1
            if isinstance(line, Line):
                yield line, broken
                broken = None
                continue
            if broken is not None:
                self.violate(broken.where, broken.text)
            broken = line
        if broken is not None:
            yield None, broken

    def _judge(self, broken: BrokenLine, *, writer_restarted: bool) -> None:
        if broken.last:
            self._torn.append(broken)
        elif writer_restarted:
            self.promise.notes.append(
                f"{broken.where}: {broken.text}; its writer died there and was started again"
            )
        else:
            self.violate(broken.where, broken.text)

    def _is_event(self, line: Line) -> bool:
        name = line.fields.get("event")
        if not isinstance(name, str) or not schema.REAL.takes(line.fields.get("time")):
            self.violate(line.where, "an event needs its name in `event` and a number in `time`")
            return False
        problems = schema.problems_of(line.fields, schema.EVENTS.get(name, {}))
        if problems:
            self.violate(line.where, f"{name}: {'; '.join(problems)}")
        return not problems

    def conclude(self) -> None:
        if not (self.run_dir / EVENTS_FILE).is_file():
            self.violate(EVENTS_FILE, f"{EVENTS_FILE} does not exist in {self.run_dir}")
        for broken in self._torn:
            if self.history.finished:
                self.violate(broken.where, f"{broken.text}, though the run finished")
            else:
                self.promise.notes.append(f"{broken.where}: {broken.text}; the run did not finish")


class RunStarted(Check):
    NAME = "run_started"
    TEXT = "the events begin with run_started, and it names the settings of the run folder"
    UNIT = "starts"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._first = True

    def read(self, line: Line) -> None:
        if self._first and line["event"] != "run_started":
            self.violate(line.where, f"the first event is {line['event']}, not run_started")
        self._first = False
        if line["event"] != "run_started":
            return
        self.promise.checked += 1
        if self.history.run_id not in ("", line["run_id"]):
            self.violate(
                line.where,
                f"run {line['run_id']} started in the folder of run {self.history.run_id}",
                run_id=line["run_id"],
            )
        for name in ("staleness_max", "groups_per_step", "group_size", "late", "period"):
            wanted = getattr(self.settings, name)
            if line[name] != wanted:
                self.violate(
                    line.where,
                    f"{name} is {line[name]!r}; the configuration says {wanted!r}",
                    setting=name,
                )

    def conclude(self) -> None:
        if self._first:
            self.violate(EVENTS_FILE, "there is no event at all, so no run_started")
        for problem in self.history.problems:
            self.violate("config.resolved.toml", problem)


def record_checks() -> tuple[type[Check], ...]:
    return (RunStarted,)
