"""Records that a coordinator finds at its start, or verify: ledger, segments, events.jsonl."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path
from typing import Any

from bad_input import Bench, Told, case, run
from cases_folders import NULL
from ledger_builders import a_ledger, stored

from echo2.core.records import LearnerRecorded
from echo2.errors import Echo2Error


def a_run_with_three_groups(bench: Bench) -> Path:
    """What a coordinator that was killed leaves: three groups are acknowledged and open."""

    async def scenario() -> Told:
        async with a_ledger(bench.run_dir) as running:
            running.ledger.append(1, LearnerRecorded(1, 0))
            for index in range(3):
                running.ledger.append(2 + index, stored(index))
            await running.until(4)
        return Told("", "")

    bench.run_dir.mkdir()
    run(scenario())
    return bench.run_dir


def started(bench: Bench) -> Told:
    return bench.command("coordinator", bench.config(*NULL), "--run-dir", bench.run_dir)


def everything_in(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 1 << 26)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@case("a ledger.sqlite that is no database")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    path = bench.run_dir / "ledger.sqlite"
    path.write_bytes(b"this is no database at all, but a text" * 100)
    before = path.read_bytes()
    told = started(bench)
    assert path.read_bytes() == before
    return told


@case("a ledger of a newer release")
def _(bench: Bench) -> Told:
    run_dir = a_run_with_three_groups(bench)
    database = sqlite3.connect(run_dir / "ledger.sqlite")
    database.execute("PRAGMA user_version = 99")
    database.close()
    return started(bench)


@case("a folder where ledger.sqlite belongs")
def _(bench: Bench) -> Told:
    (bench.run_dir / "ledger.sqlite").mkdir(parents=True)
    return started(bench)


@case("a file where the folder of segments belongs")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "ledger").touch()
    return started(bench)


@case("a ledger.sqlite with a damaged page")
def _(bench: Bench) -> Told:
    run_dir = a_run_with_three_groups(bench)
    path = run_dir / "ledger.sqlite"
    content = bytearray(path.read_bytes())
    content[4096:] = bytes(len(content) - 4096)
    path.write_bytes(content)
    return _unchanged(bench)


@case("a ledger.sqlite that lacks its tables")
def _(bench: Bench) -> Told:
    run_dir = a_run_with_three_groups(bench)
    database = sqlite3.connect(run_dir / "ledger.sqlite")
    database.execute("DROP TABLE learners")
    database.commit()
    database.close()
    return _unchanged(bench)


@case("another program's database where ledger.sqlite belongs")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    database = sqlite3.connect(bench.run_dir / "ledger.sqlite")
    database.execute("CREATE TABLE notes (text TEXT)")
    database.commit()
    database.close()
    return _unchanged(bench)


@case("a ledger.sqlite that is gone while its segments are there")
def _(bench: Bench) -> Told:
    run_dir = a_run_with_three_groups(bench)
    (run_dir / "ledger.sqlite").unlink()
    return _unchanged(bench)


@case("a segment that was cut off")
def _(bench: Bench) -> Told:
    run_dir = a_run_with_three_groups(bench)
    [segment] = (run_dir / "ledger").glob("*.seg")
    os.truncate(segment, 100)  # its end is filled up to a block of the disk
    return _unchanged(bench)


@case("a payload with one wrong bit")
def _(bench: Bench) -> Told:
    run_dir = a_run_with_three_groups(bench)
    [segment] = (run_dir / "ledger").glob("*.seg")
    content = bytearray(segment.read_bytes())
    content[100] ^= 1
    segment.write_bytes(content)
    return _unchanged(bench)


@case("a segment that is gone")
def _(bench: Bench) -> Told:
    run_dir = a_run_with_three_groups(bench)
    [segment] = (run_dir / "ledger").glob("*.seg")
    segment.unlink()
    return _unchanged(bench)


def _unchanged(bench: Bench) -> Told:
    """A coordinator that will not start leaves the groups that it could not read."""
    before = everything_in(bench.run_dir / "ledger")
    told = started(bench)
    assert everything_in(bench.run_dir / "ledger") == before
    return told


@case("a full disk under the ledger")
def _(bench: Bench) -> Told:
    def full(*_: Any) -> int:  # a disk cannot be filled in a test
        raise OSError(28, "No space left on device")

    async def scenario() -> Told:
        bench.run_dir.mkdir()
        async with a_ledger(bench.run_dir) as running:
            with bench.monkeypatch.context() as patch:
                patch.setattr(os, "pwrite", full)
                running.ledger.append(1, stored(0))
                try:
                    await running.ledger.wait()
                except Echo2Error as error:
                    return bench.told("exit 1", error)
        raise AssertionError("it was written")

    return run(scenario())


@case("events.jsonl with a torn line in its middle")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    path = bench.run_dir / "events.jsonl"
    path.write_bytes(b'{"time": 1.0, "event": "run_started"}\n{"time": 2.0, "ev\n{"time": 3.0}\n')
    before = path.read_bytes()
    told = started(bench)
    assert path.read_bytes() == before
    return told


@case("events.jsonl with a line that lacks a field")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "events.jsonl").write_bytes(b'{"time": 1.0, "event": "learner_joined"}\n')
    return started(bench)


@case("verify of a run with a torn line in its middle")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "config.resolved.toml").touch()
    line = b'{"time": 1.0, "event": "learner_left", "incarnation": 1, "reason": ""}\n'
    (bench.run_dir / "events.jsonl").write_bytes(line + b'{"time": 2.0, "ev\n' + line)
    return bench.output("events.jsonl:2", "verify", bench.run_dir)


@case("verify of a run with a damaged ledger")
def _(bench: Bench) -> Told:
    run_dir = a_run_with_three_groups(bench)
    (run_dir / "config.resolved.toml").touch()
    (run_dir / "events.jsonl").touch()
    [segment] = (run_dir / "ledger").glob("*.seg")
    os.truncate(segment, 10)
    return bench.output("the payload of g1", "verify", run_dir)
