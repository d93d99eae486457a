"""`echo2 verify` reads the ledger as it lies on the disk, and beside the events."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from echo2.core.task_queue import group_of
from echo2.ledger.database import OBSERVED, Database
from echo2.ledger.segments import Segments
from echo2.verify import verify_run

ARun = Any
"""The healthy run of conftest.py."""


def written(run: ARun, folder: Path, *, upto: int | None = None) -> Path:
    """The run with the ledger of its coordinator, which has taken in `upto` of its events; a
    payload is kept for g60, which has not ended."""
    folder = run.write(folder)
    segments = Segments(folder / "ledger")
    segments.open()
    place = segments.append([b"task", b"payload"])
    segments.sync()
    segments.close()
    database = Database(folder / "ledger.sqlite")
    with database.transaction():
        database.store(group_of(60), "l60", "w1", place)
        for position, line in enumerate(run.events[:upto]):
            if line["event"] in OBSERVED or line["event"] == "learner_joined":
                database.catch_up(line["event"], line, position)
    database.close()
    return folder


def interrupted(run: ARun, folder: Path) -> Path:
    run.interrupt()
    return written(run, folder)


def test_a_ledger_that_agrees_holds(run: ARun, tmp_path: Path) -> None:
    report = verify_run(interrupted(run, tmp_path / "run"))
    assert report["ledger"].holds, report.to_text()
    assert report["ledger"].checked > 10


def test_a_ledger_behind_the_events_is_that_of_a_killed_coordinator(
    run: ARun, tmp_path: Path
) -> None:
    run.interrupt()
    report = verify_run(written(run, tmp_path / "run", upto=len(run.events) - 4))
    assert report["ledger"].holds, report.to_text()


def test_of_a_run_that_is_over_nothing_may_be_open(run: ARun, tmp_path: Path) -> None:
    report = verify_run(written(run, tmp_path / "run"))
    assert not report["ledger"].holds
    assert "the ledger says open of g60" in report.to_text()


def test_a_run_of_an_earlier_release_has_none(run: ARun, tmp_path: Path) -> None:
    report = verify_run(run.write(tmp_path / "run"))
    assert report["ledger"].verdict == "skipped"


@pytest.mark.parametrize("how", ["byte", "gone", "end", "pages"])
def test_a_ledger_that_was_changed_is_found(run: ARun, tmp_path: Path, how: str) -> None:
    folder = interrupted(run, tmp_path / "run")
    (segment,) = (folder / "ledger").iterdir()
    path = folder / "ledger.sqlite"
    match how:
        case "byte":
            written = segment.read_bytes().rstrip(b"\0")  # without the block's end
            segment.write_bytes(written[:-1] + b"?")
        case "gone":
            segment.unlink()
        case "end":
            with sqlite3.connect(path) as database:
                database.execute("UPDATE groups SET ended = 'expired' WHERE idx = 8")
            database.close()
        case _:
            content = path.read_bytes()
            path.write_bytes(content[:4096] + b"\xff" * 4096 + content[8192:])
    report = verify_run(folder)
    assert not report["ledger"].holds, report.to_text()
