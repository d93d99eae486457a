"""ledger.sqlite: the index of what the coordinator must remember, and what it makes of it.

    groups     every group that is not settled: who has it in work, or where its payload lies,
               and how it ended
    learners   incarnations and the step from which each went on
    versions   published versions and their manifests
    facts      v, the kept checkpoints, the data position, the cost, who is quarantined

What a record made of a group, a step or a version is `told` when the event that says so was seen:
a coordinator that is killed between the commit and the event leaves it to the next one.

A group is settled when it has ended, no kept checkpoint can bring it back, and all before it
have ended too: its row goes, and only the counts stay, so that the file does not grow with the
run. Applying what was applied before changes nothing.

What a transaction changes is gathered (`ledger.rows`, and facts and counts likewise) and written
at its end, many rows with one statement: SQLite lets Python's other threads in at each one, and
so many turns would cost the event loop more than the work itself.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from echo2.core.audits import Quarantine
from echo2.core.records import (
    CheckpointRecorded,
    LearnerRecorded,
    Record,
    StepRecorded,
    VersionRecorded,
)
from echo2.core.restored import Restored, RestoredLease
from echo2.core.task_queue import group_of, index_of
from echo2.errors import ConfigError, Echo2Error
from echo2.ledger import schema
from echo2.ledger.rows import Rows
from echo2.ledger.segments import Place
from echo2.types import GroupId, PeerId, Version

OBSERVED: Final = frozenset(
    {
        "group_ended",
        "group_returned",
        "lease_granted",
        "lease_revoked",
        "lease_failed",
        "step_completed",
        "version_published",
        "group_withdrawn",
        "worker_quarantined",
        "worker_pardoned",
    }
)
"""Events that the ledger takes in beside records: nobody waits for them to be durable."""
QUARANTINED: Final = "quarantined"
"""The fact that names quarantined workers: cause, reason, step and what the learner had."""
_QUARANTINE_FIELDS: Final = ("cause", "reason", "step", "in_training")
EARLIER: Final = "earlier"
"""How a group ended under a release without a ledger: only that it did is known here."""
_LEASE_FIELDS: Final = (
    "lease",
    "worker",
    "incarnation",
    "step",
    "attempt",
    "revoke_after_s",
)
_TRAINED_SINCE: Final = "ended = 'trained' AND trained_at >= ?"


@dataclass(frozen=True, slots=True)
class StoredGroup:
    """Where the payload of an acknowledged group lies; `trained_at` of one that was trained, and
    whether an event has `told` so."""

    id: GroupId
    lease: str
    worker: str
    attempt: int
    trained_at: int | None
    told: bool
    place: Place


class Database:
    """The file at `path`, made if it is not there. For one thread at a time. ConfigError for a
    file that is no ledger of this release; sqlite3.Error later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._is_stale = False
        """A transaction failed: what is known must be read again."""
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._prepare()
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{path} cannot be used as a ledger ({error}); nothing in it was changed: free "
                "space, make it writable, restore it from a copy, or give another --run-dir"
            ) from error
        self._read_again()

    def _prepare(self) -> None:
        try:
            with self._whole():
                schema.prepare(self._db, self._path)
        except BaseException:  # whatever it was, no file stays open
            self._db.close()
            raise
        self._db.execute("PRAGMA journal_mode = WAL")
        # A commit is on the disk when it returns.
        self._db.execute("PRAGMA synchronous = FULL")

    @contextmanager
    def _whole(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:  # also what is no error must not leave half of it
            if self._db.in_transaction:  # on a full disk SQLite has rolled it back itself
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written belongs in one."""
        if self._is_stale:
            self._read_again()
        self._is_stale = True
        with self._whole():
            yield
            self._flush()
        self._is_stale = False

    def _read_again(self) -> None:
        """Nothing is gathered, and what is known is what the file holds."""
        self._is_stale = False
        self._rows = Rows(self._db)
        self._facts: dict[str, Any] = {
            name: json.loads(value)
            for name, value in self._db.execute("SELECT name, value FROM facts")
        }
        self._changed_facts: set[str] = set()
        self._counts: Counter[str] = Counter()

    def _flush(self) -> None:
        """Write what this transaction has gathered."""
        self._rows.flush()
        facts = [(name, json.dumps(self._facts[name])) for name in sorted(self._changed_facts)]
        self._db.executemany("INSERT OR REPLACE INTO facts VALUES (?, ?)", facts)
        self._db.executemany(
            "INSERT INTO ends VALUES (?, ?) ON CONFLICT (ended) "
            "DO UPDATE SET number = number + excluded.number",
            [(end, change) for end, change in self._counts.items() if change],
        )
        self._changed_facts.clear()
        self._counts.clear()

    def close(self) -> None:
        self._db.close()

    # -------------------------------------------------------------------- writing

    def store(self, group: GroupId, lease: str, worker: str, place: Place) -> None:
        """A group was delivered; its payload lies at `place`."""
        index = index_of(group)
        self._reach(index)
        row = self._rows.change(index)
        row.lease, row.worker = lease, worker
        row.segment, row.offset = place.segment, place.offset
        row.num_bytes, row.digest = place.num_bytes, place.digest

    def apply(self, record: Record) -> None:
        """Any record but a stored group."""
        match record:
            case StepRecorded():
                self.step(record)
            case LearnerRecorded():
                self.learner(record)
            case VersionRecorded():
                self.version(record)
            case CheckpointRecorded():
                self.checkpoint(record)

    def step(self, record: StepRecorded) -> None:
        for group in record.groups:
            self._end(index_of(group), "trained", record.step, told=False)
        self._set("step", record.step + 1)
        self._set("cost_usd", record.cost_usd)

    def learner(self, record: LearnerRecorded) -> None:
        """A learner took over. What was trained after the step that it goes on from is open."""
        values = record.incarnation, record.resume_step
        known = self._db.execute("INSERT OR IGNORE INTO learners VALUES (?, ?)", values)
        if not known.rowcount:
            return
        self._flush()
        step = (record.resume_step,)
        for (index,) in self._db.execute(
            f"SELECT idx FROM groups WHERE {_TRAINED_SINCE}", step
        ).fetchall():
            self._return(index)
        self._set("step", record.resume_step)
        self._set("told_step", record.resume_step)
        if not any(step <= record.resume_step for step in self.kept):
            self._set("kept", [record.resume_step])

    def version(self, record: VersionRecorded) -> None:
        version = record.version
        self._db.execute(
            "INSERT INTO versions (incarnation, step, manifest_digest, told) VALUES (?, ?, ?, 0) "
            "ON CONFLICT (incarnation, step) DO UPDATE SET "
            "manifest_digest = excluded.manifest_digest",
            (version.incarnation, version.step, record.manifest_digest),
        )

    def checkpoint(self, record: CheckpointRecorded) -> None:
        self._set("kept", list(record.kept))

    def observe(self, event: str, fields: Mapping[str, Any], position: int) -> None:
        """One of OBSERVED, whose line ends at byte `position` of events.jsonl."""
        match event:
            case "step_completed":
                self._set("told_step", fields["step"] + 1)
            case "version_published":
                version = Version(fields["incarnation"], fields["step"])
                self.version(VersionRecorded(version, fields["manifest_digest"]))
                self._db.execute(
                    "UPDATE versions SET told = 1 WHERE incarnation = ? AND step = ?",
                    (version.incarnation, version.step),
                )
            case "worker_quarantined":
                told = {name: fields[name] for name in _QUARANTINE_FIELDS}
                self._set(QUARANTINED, self._fact(QUARANTINED, {}) | {fields["worker"]: told})
            case "worker_pardoned":
                kept = self._fact(QUARANTINED, {})
                kept.pop(fields["worker"], None)
                self._set(QUARANTINED, kept)
            case _:
                self._observe_group(index_of(GroupId(fields["group_id"])), event, fields)
        self._set("events_position", position)

    def _observe_group(self, index: int, event: str, fields: Mapping[str, Any]) -> None:
        self._reach(index)
        match event:
            case "group_ended":
                trained_at = fields["trained_at"]
                self._end(index, fields["end"], -1 if trained_at is None else trained_at, told=True)
            case "group_returned":
                self._return(index)
                if fields["to"] == "queue" and self._rows.get(index) is not None:
                    row = self._rows.change(index)
                    row.segment = row.lease = None  # its result has no place any more
            case "lease_granted":
                self._lease(index, fields)
            case "group_withdrawn":
                known = self._rows.get(index)
                if known is not None and known.lease == fields["lease"] and known.ended is None:
                    row = self._rows.change(index)
                    row.segment = row.lease = None
            case _:
                self._end_lease(index, fields["lease"])

    def take_over(self, earlier: Restored, position: int) -> None:
        """What a run of a release without a ledger had in its events, up to `position`."""
        with self.transaction():
            for incarnation, resume_step in earlier.starts:
                self.learner(LearnerRecorded(incarnation, resume_step))
            for version, digest in earlier.published:
                self.version(VersionRecorded(version, digest))
            self._db.execute("UPDATE versions SET told = 1")
            self._set("step", earlier.step)
            self._set("told_step", earlier.step)
            self._set("kept", list(earlier.kept))
            self._set("next_index", earlier.next_index)
            self._set("events_position", position)
            trained, still_open = dict(earlier.trained), set(earlier.open_indexes)
            below = min(still_open, default=earlier.next_index)
            below = min(below, *(index_of(group) for group in trained), earlier.next_index)
            self._set("settled_below", below)
            for index in range(below, earlier.next_index):
                if index not in still_open:
                    row = self._rows.change(index)
                    row.trained_at = trained.get(group_of(index), -1)
                    row.ended = "trained" if row.trained_at >= 0 else EARLIER
            for end, number in earlier.ends.items():
                self._count(end, number)

    def catch_up(self, event: str, fields: Mapping[str, Any], position: int) -> None:
        """A line of events.jsonl that the last process may not have committed here: what it
        told stays true, though what it told it of had to be recorded first."""
        match event:
            case "learner_joined":
                self.learner(LearnerRecorded(fields["incarnation"], fields["resume_step"]))
            case "checkpoint_saved":
                self.checkpoint(CheckpointRecorded(fields["incarnation"], tuple(fields["kept"])))
            case _ if event in OBSERVED:
                self.observe(event, fields, position)

    def settle(self) -> None:
        """Let go of what is settled, and of payloads that nobody may need again."""
        self._flush()
        self._rows.forget_ended()
        low = min(self.kept)
        (first_open,) = self._db.execute(
            "SELECT min(idx) FROM groups WHERE ended IS NULL"
        ).fetchone()
        below = self._fact("settled_below", 0)
        limit = self._fact("next_index", 0) if first_open is None else first_open
        # Rows are missing of those that were leased and never ended: they are open too.
        for (index,) in self._db.execute(
            "SELECT idx FROM groups WHERE idx >= ? AND idx < ? ORDER BY idx", (below, limit)
        ).fetchall():
            if index != below:
                break
            below += 1
        self._set("settled_below", below)
        unneeded = "ended IS NOT NULL AND (ended != 'trained' OR trained_at < ?)"
        self._db.execute(f"UPDATE groups SET segment = NULL WHERE {unneeded}", (low,))
        self._db.execute(f"DELETE FROM groups WHERE idx < ? AND {unneeded}", (below, low))

    def segments(self) -> set[int]:
        """Those in which something may be needed."""
        rows = self._db.execute("SELECT DISTINCT segment FROM groups WHERE segment IS NOT NULL")
        return {segment for (segment,) in rows}

    def _end(self, index: int, end: str, trained_at: int, *, told: bool) -> None:
        row = self._rows.get(index)
        if row is None and index < self._fact("settled_below", 0):
            return
        if row is not None and row.ended is not None:
            if told:
                self._rows.change(index).told = 1
            return
        row = self._rows.change(index)
        row.ended, row.trained_at, row.told = end, trained_at, int(told)
        self._count(end, 1)

    def _lease(self, index: int, fields: Mapping[str, Any]) -> None:
        """In work again: an earlier result, if there was one, leads nowhere any more."""
        row = self._rows.change(index)
        for name in _LEASE_FIELDS:
            setattr(row, name, fields[name])
        row.segment = None

    def _end_lease(self, index: int, lease: str) -> None:
        row = self._rows.get(index)
        if row is not None and row.lease == lease and row.segment is None:
            self._rows.change(index).lease = None

    def _return(self, index: int) -> None:
        row = self._rows.get(index)
        if row is not None and row.ended is not None:
            self._count(row.ended, -1)
            row = self._rows.change(index)
            row.ended, row.trained_at, row.told = None, None, 1

    def _count(self, end: str, change: int) -> None:
        self._counts[end] += change

    def _reach(self, index: int) -> None:
        if index >= self._fact("next_index", 0):
            self._set("next_index", index + 1)

    # -------------------------------------------------------------------- reading

    @property
    def kept(self) -> list[int]:
        """Steps of the checkpoints from which a learner may go on."""
        return list(self._fact("kept", [0]))

    def _fact(self, name: str, default: Any) -> Any:
        return self._facts.get(name, default)

    def _set(self, name: str, value: Any) -> None:
        self._facts[name] = value
        self._changed_facts.add(name)

    @property
    def events_position(self) -> int | None:
        """Up to where events.jsonl is taken in, and on the disk; None before the first look."""
        position = self._fact("events_position", None)
        return None if position is None else int(position)

    @events_position.setter
    def events_position(self, position: int) -> None:
        self._set("events_position", position)

    def stored(self) -> list[StoredGroup]:
        """Groups whose payload may be needed: those that were acknowledged and have not ended,
        and those that were trained since the oldest kept checkpoint, in the order of steps."""
        rows = self._db.execute(
            "SELECT idx, lease, worker, attempt, trained_at, told, "
            "segment, offset, num_bytes, digest "
            f"FROM groups WHERE (ended IS NULL OR {_TRAINED_SINCE}) AND segment IS NOT NULL "
            "ORDER BY trained_at, idx",
            (min(self.kept),),
        )
        return [
            StoredGroup(
                group_of(index), lease, worker, attempt or 0, trained_at, bool(told), Place(*place)
            )
            for index, lease, worker, attempt, trained_at, told, *place in rows
        ]

    def place(self, group: GroupId, lease: str) -> Place | None:
        """Where the payload that this lease delivered lies; None when it is not needed, or
        another lease's result took its place."""
        row = self._rows.get(index_of(group))
        if row is None or row.lease != lease or row.segment is None:
            return None
        assert row.offset is not None
        assert row.num_bytes is not None
        assert row.digest is not None
        return Place(row.segment, row.offset, row.num_bytes, row.digest)

    def _leases(self) -> tuple[RestoredLease, ...]:
        rows = self._db.execute(
            "SELECT idx, lease, worker, incarnation, step, attempt, revoke_after_s FROM groups "
            "WHERE ended IS NULL AND segment IS NULL AND lease IS NOT NULL ORDER BY idx"
        )
        return tuple(
            RestoredLease(
                lease, group_of(index), worker, Version(incarnation, step), attempt, revoke_after_s
            )
            for index, lease, worker, incarnation, step, attempt, revoke_after_s in rows
        )

    def restored(self) -> Restored | None:
        """What an earlier coordinator left, without the payloads; None when there was none."""
        starts = self._db.execute(
            "SELECT incarnation, resume_step FROM learners ORDER BY incarnation"
        ).fetchall()
        if not starts:
            return None
        kept, below = self.kept, self._fact("settled_below", 0)
        next_index = self._fact("next_index", 0)
        is_open = dict(self._db.execute("SELECT idx, ended IS NULL FROM groups"))
        # A row may be missing of one that never ended, but not below what is settled.
        is_open.update((index, 1) for index in range(below, next_index) if index not in is_open)
        trained = self._db.execute(
            f"SELECT idx, trained_at FROM groups WHERE {_TRAINED_SINCE} ORDER BY idx",
            (min(kept),),
        )
        versions = self._db.execute(
            "SELECT incarnation, step, manifest_digest, told FROM versions "
            "ORDER BY incarnation, step"
        ).fetchall()
        step = self._fact("step", 0)
        return Restored(
            incarnation=starts[-1][0],
            step=step,
            told_step=min(step, self._fact("told_step", 0)),
            starts=tuple(starts),
            next_index=next_index,
            open_indexes=tuple(sorted(index for index, yes in is_open.items() if yes)),
            trained=tuple((group_of(index), trained_at) for index, trained_at in trained),
            kept=tuple(kept),
            published=tuple((Version(i, step), digest) for i, step, digest, _ in versions),
            untold=tuple(Version(i, step) for i, step, _, told in versions if not told),
            leases=self._leases(),
            cost_usd=self._fact("cost_usd", 0.0),
            quarantined=tuple(
                (
                    PeerId(name),
                    Quarantine(
                        told["cause"], told["reason"], told["step"], tuple(told["in_training"])
                    ),
                )
                for name, told in self._fact(QUARANTINED, {}).items()
            ),
            ends=dict(self._db.execute("SELECT ended, number FROM ends WHERE number > 0")),
        )


def quarantined_workers(path: Path) -> dict[str, dict[str, Any]]:
    """Name -> cause, reason and step of each worker that the ledger at `path` has in quarantine;
    {} where there is no ledger. Nothing is written. Echo2Error for one that cannot be read."""
    if not path.is_file():
        return {}
    try:
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=rw", uri=True)) as database:
            row = database.execute(
                "SELECT value FROM facts WHERE name = ?", (QUARANTINED,)
            ).fetchone()
    except sqlite3.Error as error:
        raise Echo2Error(
            f"{path} cannot be read ({error}); see what is wrong with: echo2 verify"
        ) from error
    found: dict[str, dict[str, Any]] = {} if row is None else json.loads(row[0])
    return found
