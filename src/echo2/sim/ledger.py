"""The coordinator's ledger in a simulation: the real index, in memory, and payloads beside it.

    append, observe --> waits --commit--> in the index          (a crash loses what waits,
                                                                 but for events, which are told)

Promise: what a restarted coordinator gets is what `ledger.database` makes of the same records and
events in the same order as on a disk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from echo2.core.group import StoredResult
from echo2.core.records import GroupStored, Record
from echo2.core.restored import Restored, RestoredGroup
from echo2.ledger.database import OBSERVED, Database
from echo2.ledger.segments import Place
from echo2.messages import GroupResult
from echo2.sim.moment import require
from echo2.types import GroupId, LeaseId

SETTLE_EACH: Final = 64
"""Commits after which what is settled is let go."""


class SimLedger:
    """`is_read`: a coordinator will be started again, so that it is worth keeping anything."""

    def __init__(self, *, is_read: bool) -> None:
        self._database = Database(Path(":memory:")) if is_read else None
        self._waits: deque[tuple[int, Record] | tuple[str, Mapping[str, Any]]] = deque()
        self._stored: dict[GroupId, RestoredGroup] = {}
        self._num_commits = 0

    def append(self, record_id: int, record: Record) -> None:
        if self._database is not None:
            self._waits.append((record_id, record))

    def observe(self, event: str, fields: Mapping[str, Any]) -> None:
        if self._database is not None:
            self._waits.append((event, fields))

    def commit(self, record_id: int) -> None:
        """This record is safe, and all that came before it."""
        database = self._database
        if database is None or all(first != record_id for first, _ in self._waits):
            return
        with database.transaction():
            first: int | str = -1
            while first != record_id:
                first, second = self._waits.popleft()
                self._apply(database, first, second)
            self._num_commits += 1
            if self._num_commits % SETTLE_EACH == 0:
                database.settle()

    def read(self, group: GroupId, lease: LeaseId) -> GroupResult | None:
        """The payload of a result that the core left to the ledger, as production reads it. None
        where nothing is kept; Violation where it is not there."""
        if self._database is None:
            return None
        place = self._database.place(group, lease)
        stored = self._stored[group].result
        require(
            place is not None and stored.lease == lease,
            f"the payload of {group}, of lease {lease}, is to be read, and is not there",
        )
        assert isinstance(stored.payload, GroupResult)
        return stored.payload

    def restored(self) -> Restored | None:
        """What a coordinator that is started now finds."""
        database = self._database
        assert database is not None, "nothing was kept"
        with database.transaction():
            for first, second in self._waits:
                if isinstance(first, str):
                    assert isinstance(second, Mapping)
                    database.catch_up(first, second, 0)
        self._waits.clear()
        found = database.restored()
        groups = [
            replace(
                self._stored[stored.id],
                attempt=stored.attempt,
                trained_at=stored.trained_at,
                told=stored.told,
            )
            for stored in database.stored()
        ]
        return found and found.with_groups(groups)

    def _apply(self, database: Database, first: int | str, second: Any) -> None:
        if isinstance(first, str):
            if first in OBSERVED:
                database.observe(first, second, 0)
        elif isinstance(second, GroupStored):
            message = second.payload
            assert isinstance(message, GroupResult)
            result = StoredResult(second.lease, second.worker, message.trajectories, message)
            self._stored[second.group] = RestoredGroup(second.group, second.task, result, 0)
            database.store(second.group, second.lease, second.worker, Place(0, 0, 0, b""))
        else:
            database.apply(second)
