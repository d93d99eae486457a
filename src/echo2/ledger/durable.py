"""The ledger on the disk: ledger.sqlite and the payloads' segments, with group commit.

    append(record) --> queue --> one thread: payloads written, fdatasync
                                             events.jsonl as it is, fdatasync
                                             facts applied, COMMIT
                                 --> on_persisted(record_ids), in the order of appending
    read(group)    --> queue --> the same:   a payload, as it was stored

The thread takes all that has come while it was busy into one commit, so that a thousand groups
a second cost a few dozen waits for the disk. Nothing is answered before it is on the disk; an
error of the disk ends the coordinator with its cause, and what was answered before is there.
What the index took in of events.jsonl is on the disk too: a power cut may tear what follows, and
that is cut off.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from echo2 import wire
from echo2.core.group import StoredResult
from echo2.core.records import GroupStored, Record, StepRecorded
from echo2.core.restored import Restored, RestoredGroup
from echo2.errors import ConfigError, Echo2Error
from echo2.ledger.database import OBSERVED, Database, StoredGroup
from echo2.ledger.events_log import cut_torn_lines, read_events
from echo2.ledger.events_log import restore as restore_from_events
from echo2.ledger.segments import SEGMENT_BYTES, Place, Segments
from echo2.messages import GroupResult, Lane, Role
from echo2.types import GroupId, LeaseId, PeerId, Task
from echo2.weights.files import sync_folder

log = structlog.get_logger(__name__)

FILE: Final = "ledger.sqlite"
FOLDER: Final = "ledger"
EVENTS: Final = "events.jsonl"
BATCH_MAX: Final = 1024
"""Most records in one commit."""
END_S: Final = 30.0
"""For the disk to take what was appended, at the end."""
GATHER_S: Final = 0.002
"""A commit costs the processor as much as several groups: it waits so long for more of them."""
SETTLE_EACH: Final = 512
"""Ends of groups after which what is settled is let go."""


@dataclass(frozen=True, slots=True)
class _Observed:
    event: str
    fields: Mapping[str, Any]
    position: int


@dataclass(frozen=True, slots=True)
class _Wanted:
    group: GroupId
    lease: LeaseId
    found: asyncio.Future[GroupResult]


_Written = tuple[int, Record] | _Observed
_Entry = _Written | _Wanted


class DurableLedger:
    """Of the run in `run_dir`. `restored` first, then `start`."""

    def __init__(self, run_dir: Path, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.num_commits = 0
        self._run_dir = run_dir
        self._segments = Segments(run_dir / FOLDER, segment_bytes=segment_bytes)
        self._database: Database | None = None
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._on_persisted: Callable[[Sequence[int]], None] = lambda _: None
        self._num_ended = 0
        self._events = -1
        self._failed: asyncio.Future[None] | None = None

    def restored(self) -> Restored | None:
        """Open the files, and give what an earlier coordinator of this run left in them. A run
        of an earlier release, which has no ledger, is read from its events. ConfigError when
        they cannot be used; nothing is changed then."""
        database = self._open()
        events = self._run_dir / EVENTS
        if database.events_position is None and database.restored() is None:
            earlier = restore_from_events(events)
            end = cut_torn_lines(events, start=None)
            if earlier is not None:
                database.take_over(earlier, end)
            else:
                with database.transaction():
                    database.events_position = end
            return earlier
        self._catch_up(database, events)
        found = database.restored()
        if found is None:
            return None
        return found.with_groups(map(self._read_group, database.stored()))

    async def start(self, on_persisted: Callable[[Sequence[int]], None]) -> None:
        """Take records, and tell of those that a commit put on the disk. OSError for a folder that
        cannot be used."""
        self._open()
        self._events = os.open(self._run_dir / EVENTS, os.O_RDONLY | os.O_CREAT, 0o666)
        sync_folder(self._run_dir)  # the names of all its files must outlive a power cut
        loop = asyncio.get_running_loop()
        self._failed = loop.create_future()
        self._on_persisted = on_persisted
        self._thread = threading.Thread(
            target=self._run, args=(loop, self._failed), name="ledger", daemon=True
        )
        self._thread.start()

    async def wait(self) -> None:
        """Until stopped; Echo2Error when the disk does not take a record."""
        assert self._failed is not None, "start it first"
        await asyncio.shield(self._failed)

    async def stop(self) -> None:
        """Everything that was appended is on the disk, or the disk did not take it in END_S."""
        self._on_persisted = lambda _: None
        thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            await asyncio.to_thread(thread.join, END_S)
            if thread.is_alive():  # the disk hangs; the thread ends with the process
                log.error("ledger_hangs", run_dir=str(self._run_dir), after_s=END_S)
                return
        if self._failed is not None and not self._failed.done():
            self._failed.set_result(None)
        self.close()

    def close(self) -> None:
        """Of a ledger that was only read."""
        if self._database is not None:
            self._database.close()
            self._database = None
        self._segments.close()
        if self._events >= 0:
            os.close(self._events)
            self._events = -1

    def append(self, record_id: int, record: Record) -> None:
        self._queue.put((record_id, record))

    def observe(self, event: str, fields: Mapping[str, Any], position: int) -> None:
        """An event whose line is in events.jsonl, and ends at byte `position` there."""
        if event in OBSERVED:
            self._queue.put(_Observed(event, fields, position))

    async def read(self, group: GroupId, lease: LeaseId) -> GroupResult:
        """What this lease delivered, of a group that a learner may still get. When it is not
        there any more, `wait` raises what is wrong, and this waits."""
        found: asyncio.Future[GroupResult] = asyncio.get_running_loop().create_future()
        self._queue.put(_Wanted(group, lease, found))
        return await found

    # ------------------------------------------------------------------- the thread

    def _run(self, loop: asyncio.AbstractEventLoop, failed: asyncio.Future[None]) -> None:
        try:
            while batch := self._next_batch():
                self._commit([entry for entry in batch if not isinstance(entry, _Wanted)])
                for entry in batch:
                    if isinstance(entry, _Wanted):
                        payload = self._read_wanted(entry)
                        loop.call_soon_threadsafe(_give, entry.found, payload)
                done = [entry[0] for entry in batch if isinstance(entry, tuple)]
                if done:
                    loop.call_soon_threadsafe(self._tell, done)
        except Exception as error:  # whatever ends this thread must end the coordinator, loudly
            problem: Exception = error
            if isinstance(error, OSError | sqlite3.Error):
                cause = getattr(error, "strerror", None) or str(error)
                problem = Echo2Error(
                    f"the ledger in {self._run_dir} cannot be written ({cause}); free space there, "
                    "then start the coordinator again: what was acknowledged is in it"
                )
                problem.__cause__ = error
            loop.call_soon_threadsafe(_fail, failed, problem)

    def _tell(self, record_ids: list[int]) -> None:
        self._on_persisted(record_ids)

    def _next_batch(self) -> list[_Entry]:
        """All that waits, at least one, and what comes within GATHER_S; empty at the end."""
        entry = self._queue.get()
        if entry is not None:
            time.sleep(GATHER_S)
        batch: list[_Entry] = []
        while entry is not None:
            batch.append(entry)
            if len(batch) == BATCH_MAX:
                return batch
            try:
                entry = self._queue.get_nowait()
            except queue.Empty:
                return batch
        if batch:
            self._queue.put(None)  # the end comes after this batch
        return batch

    def _commit(self, batch: list[_Written]) -> None:
        database = self._database
        assert database is not None
        places = {}
        for entry in batch:
            if isinstance(entry, tuple) and isinstance(entry[1], GroupStored):
                places[entry[0]] = self._segments.append(_frames(entry[1]))
        if places:
            self._segments.sync()
        os.fdatasync(self._events)
        settles = False
        with database.transaction():
            for entry in batch:
                match entry:
                    case _Observed(event, fields, position):
                        database.observe(event, fields, position)
                        self._num_ended += event == "group_ended"
                    case (record_id, GroupStored(group, lease, worker)):
                        database.store(group, lease, worker, places[record_id])
                    case (_, record):
                        database.apply(record)
                        if isinstance(record, StepRecorded):
                            self._num_ended += len(record.groups)
            if self._num_ended >= SETTLE_EACH:
                self._num_ended, settles = 0, True
                database.settle()
        self.num_commits += 1
        if settles:
            self._remove_unneeded(database)

    def _read_wanted(self, wanted: _Wanted) -> GroupResult:
        assert self._database is not None
        place = self._database.place(wanted.group, wanted.lease)
        if place is None:
            raise Echo2Error(
                f"the ledger in {self._run_dir} does not hold group {wanted.group} of lease "
                f"{wanted.lease}, which the learner is to get: this is a bug of echo2; start the "
                "coordinator again, and what it does not find is sampled again"
            )
        return self._read(place)[1]

    def _remove_unneeded(self, database: Database) -> None:
        for number in set(self._segments.numbers()) - database.segments():
            self._segments.remove(number)

    # -------------------------------------------------------------------- restoring

    def _open(self) -> Database:
        if self._database is None:
            try:
                self._segments.open()
            except OSError as error:
                raise ConfigError(
                    f"{self._run_dir / FOLDER} cannot be used ({error.strerror}); free space, "
                    "make it writable, or give another --run-dir"
                ) from error
            self._database = Database(self._run_dir / FILE)
            # Of a commit that a crash cut off, or that was settled just before one.
            self._remove_unneeded(self._database)
        return self._database

    def _catch_up(self, database: Database, events: Path) -> None:
        """Take in the events that the last process wrote and had not committed here: what it
        told of a group stays true. What a power cut tore, or what follows a part that it lost,
        is cut off: nobody was acknowledged anything by it."""
        position = database.events_position or 0
        end = cut_torn_lines(events, start=position)
        if end != position:  # it is below after a power cut under an earlier release
            with database.transaction():
                for line in read_events(events, start=position):
                    database.catch_up(line.get("event", ""), line, end)
                database.events_position = end

    def _read_group(self, stored: StoredGroup) -> RestoredGroup:
        task, message = self._read(stored.place)
        lease, worker = LeaseId(stored.lease), PeerId(stored.worker)
        payload = message if stored.trained_at is None else None
        return RestoredGroup(
            stored.id,
            task,
            StoredResult(lease, worker, message.trajectories, payload),
            stored.attempt,
            trained_at=stored.trained_at,
            told=stored.told,
        )

    def _read(self, place: Place) -> tuple[Task, GroupResult]:
        task, *frames = self._segments.read(place)
        message = wire.decode(
            frames, lane=Lane.ROLLOUTS, sender=Role.WORKER, receiver=Role.COORDINATOR
        )
        assert isinstance(message, GroupResult)
        index, payload = wire.unpack(task, max_bytes=len(task))
        return Task(index, payload), message


def _give(found: asyncio.Future[GroupResult], payload: GroupResult) -> None:
    if not found.done():
        found.set_result(payload)


def _frames(record: GroupStored) -> list[bytes]:
    message = record.payload
    assert isinstance(message, GroupResult)
    task = record.task
    return [wire.pack([task.index, task.payload]), *wire.encode(message)]


def _fail(failed: asyncio.Future[None], problem: Exception) -> None:
    if not failed.done():
        failed.set_exception(problem)
