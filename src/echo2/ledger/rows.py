"""The rows of the table `groups` that a transaction reads and changes, written many at a time.

    get, change ... -> flush (within the transaction)

A row that is open, or whose end nobody has told yet, stays here after it is written: it is what
the next transactions change. So this holds about as many rows as groups are held, and hardly
ever asks the file. Whoever rolls back a transaction begins anew with another `Rows`.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Final


@dataclass(slots=True)
class Row:
    """Columns of the table, in its order."""

    idx: int
    lease: str | None = None
    worker: str | None = None
    incarnation: int | None = None
    step: int | None = None
    attempt: int | None = None
    revoke_after_s: float | None = None
    segment: int | None = None
    offset: int | None = None
    num_bytes: int | None = None
    digest: bytes | None = None
    ended: str | None = None
    trained_at: int | None = None
    told: int = 1

    @property
    def is_needed_soon(self) -> bool:
        return self.ended is None or not self.told


_NAMES: Final = tuple(field.name for field in fields(Row))
_VALUES: Final = attrgetter(*_NAMES)
_AT_ONCE: Final = (64, 8, 1)
"""Rows of one statement, which is prepared once. SQLite's bound on values was 999 for long."""


def _statement(num_rows: int) -> str:
    row = f"({', '.join('?' * len(_NAMES))})"
    return (
        f"INSERT OR REPLACE INTO groups ({', '.join(_NAMES)}) VALUES {', '.join([row] * num_rows)}"
    )


_STATEMENTS: Final = {num_rows: _statement(num_rows) for num_rows in _AT_ONCE}


class Rows:
    """For one thread. What is not written yet is seen by `get` and `change` alone."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._rows: dict[int, Row] = {}
        self._changed: dict[int, Row] = {}
        (highest,) = db.execute("SELECT max(idx) FROM groups").fetchone()
        self._unknown_from = 0 if highest is None else highest + 1
        """The file has no row from here on."""

    def get(self, index: int) -> Row | None:
        """To read; None if there is none."""
        row = self._rows.get(index)
        if row is None and index < self._unknown_from:
            found = self._db.execute(
                f"SELECT {', '.join(_NAMES)} FROM groups WHERE idx = ?", (index,)
            ).fetchone()
            if found is not None:
                row = self._rows[index] = Row(*found)
        return row

    def change(self, index: int) -> Row:
        """To write to; made if there is none."""
        row = self.get(index)
        if row is None:
            row = self._rows[index] = Row(index)
        self._changed[index] = row
        return row

    def flush(self) -> None:
        """Write what has changed."""
        changed = list(self._changed.values())
        if changed:
            self._unknown_from = max(self._unknown_from, max(self._changed) + 1)
        self._changed.clear()
        start = 0
        for num_rows in _AT_ONCE:
            while len(changed) - start >= num_rows:
                values = [
                    value for row in changed[start : start + num_rows] for value in _VALUES(row)
                ]
                self._db.execute(_STATEMENTS[num_rows], values)
                start += num_rows
        for row in changed:
            if not row.is_needed_soon:
                del self._rows[row.idx]

    def forget_ended(self) -> None:
        """Others are about to write to, or to remove, rows of groups that have ended. To be
        called when all is written."""
        self._rows = {index: row for index, row in self._rows.items() if row.ended is None}
