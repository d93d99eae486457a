"""Writes a ledger as the coordinator's shell does, and tells on standard output what it was told.

    python ledger_writer.py RUN_DIR STEPS [--rewind] [--lazy]

It goes on where the ledger is, or with `--rewind` from the oldest kept checkpoint.

What it says: `+` before it hands something over, `=` once the ledger has called it durable.

    +g 12   =g 12                 group 12 was delivered
    +s 3 8,9,10,11   =s 3         step 3 trained these groups
    +c 4,5   =c                   these checkpoints are kept
    +l 2 4   =l 2                 incarnation 2 goes on from step 4
    +e 13                         an event will tell that group 13 failed

`--lazy` never waits for the disk: a test of the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "ledger"))

from ledger_builders import a_result, stored

from echo2.core.records import (
    CheckpointRecorded,
    LearnerRecorded,
    Record,
    StepRecorded,
)
from echo2.core.restored import Restored
from echo2.core.task_queue import group_of, index_of
from echo2.ledger import durable
from echo2.ledger.durable import DurableLedger
from echo2.ledger.events_log import EventsLog
from echo2.weights.files import make_folder

__all__ = ["SEGMENT_BYTES", "R", "a_result"]

R = 4
SEGMENT_BYTES = 1000
"""Some groups: a commit of several often begins a segment."""
SETTLE_EACH = 12


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


class Writer:
    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.log = EventsLog(run_dir / "events.jsonl")
        self.ledger = DurableLedger(run_dir, segment_bytes=SEGMENT_BYTES)
        self.waiting: dict[int, tuple[str, asyncio.Event]] = {}
        self.next_id = 0
        self.found: Restored | None = None
        self.buffered: set[int] = set()
        self.incarnation = 1

    async def __aenter__(self) -> Writer:
        self.found = self.ledger.restored()
        self.log.open()
        await self.ledger.start(self._persisted)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.ledger.stop()
        self.log.close()

    def _persisted(self, record_ids: Sequence[int]) -> None:
        for record_id in record_ids:
            text, done = self.waiting.pop(record_id)
            say(f"={text}")
            done.set()

    def append(self, text: str, record: Record, *, details: str = "") -> asyncio.Event:
        say(f"+{text}{details}")
        self.next_id += 1
        done = asyncio.Event()
        self.waiting[self.next_id] = text, done
        self.ledger.append(self.next_id, record)
        return done

    def tell(self, *events: tuple[str, dict[str, Any]]) -> None:
        """The lines first, then the ledger: as the coordinator carries out its effects."""
        positions = [self.log.write(event, fields) for event, fields in events]
        self.log.flush()
        for (event, fields), position in zip(events, positions, strict=True):
            self.ledger.observe(event, fields, position)

    async def take_over(self, *, rewind: bool) -> int:
        """Of a learner. Returns the step from which it goes on; what was trained since is
        buffered again."""
        found, step = self.found, 0
        if found is not None:
            step = min(found.kept) if rewind else found.step
            self.incarnation = found.incarnation + 1
            back = [g for g in found.groups if g.trained_at is None or g.trained_at >= step]
            self.buffered = {index_of(group.id) for group in back}
        record = LearnerRecorded(self.incarnation, step)
        await self.append(f"l {self.incarnation}", record, details=f" {step}").wait()
        return step

    async def step(self, step: int) -> None:
        """R groups come, the first of them before the others, and are trained; one fails."""
        first = step * (R + 1)
        groups = list(range(first, first + R))
        missing = [index for index in groups if index not in self.buffered]
        self.tell(*(granted(index) for index in [*missing, first + R]))
        for index in missing[:1]:
            await self.append(f"g {index}", stored(index)).wait()
        rest = [self.append(f"g {index}", stored(index)) for index in missing[1:]]
        say(f"+e {first + R}")
        self.tell(ended(first + R, "failed", None))
        for done in rest:
            await done.wait()
        names = ",".join(map(str, groups))
        record = StepRecorded(self.incarnation, step, tuple(map(group_of, groups)))
        await self.append(f"s {step}", record, details=f" {names}").wait()
        self.tell(
            *(ended(index, "trained", step) for index in groups),
            ("step_completed", {"incarnation": 1, "step": step, "num_groups": R}),
        )
        if step % 2:
            kept = (max(0, step - 2), step + 1)
            record = CheckpointRecorded(self.incarnation, kept)
            await self.append("c", record, details=f" {kept[0]},{kept[1]}").wait()


def granted(index: int) -> tuple[str, dict[str, Any]]:
    return "lease_granted", {
        "group_id": f"g{index}",
        "lease": f"l{index}",
        "worker": "w-1",
        "incarnation": 1,
        "step": 0,
        "attempt": 1,
        "revoke_after_s": 60.0,
    }


def ended(index: int, end: str, trained_at: int | None) -> tuple[str, dict[str, Any]]:
    return "group_ended", {"group_id": f"g{index}", "end": end, "trained_at": trained_at}


async def write(run_dir: Path, num_steps: int, *, rewind: bool) -> None:
    make_folder(run_dir)
    async with Writer(run_dir) as writer:
        step = await writer.take_over(rewind=rewind)
        for number in range(step, step + num_steps):
            await writer.step(number)


@contextlib.contextmanager
def lazily() -> Any:
    """Nothing is forced to the disk, as if somebody had forgotten it."""
    real = sqlite3.connect

    def connect(*arguments: Any, **options: Any) -> sqlite3.Connection:
        return real(*arguments, **options, factory=_Lazy)

    sqlite3.connect = connect  # type: ignore[assignment]
    os.fdatasync = os.fsync = lambda _: None  # type: ignore[assignment]
    yield


class _Lazy(sqlite3.Connection):
    def execute(self, text: str, *values: Any) -> sqlite3.Cursor:  # type: ignore[override]
        return super().execute(text.replace("synchronous = FULL", "synchronous = OFF"), *values)


def main(run_dir: str, num_steps: str, *options: str) -> None:
    durable.SETTLE_EACH = SETTLE_EACH  # type: ignore[misc]
    with lazily() if "--lazy" in options else contextlib.nullcontext():
        asyncio.run(write(Path(run_dir), int(num_steps), rewind="--rewind" in options))


if __name__ == "__main__":
    main(*sys.argv[1:])
