"""The tables of ledger.sqlite, whose they are, and how an older release's become today's.

no table          today's are made
schema 1, 2, ...  migrated one by one, in one transaction
newer, damaged, or another program's file: refused, nothing in it is changed
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from echo2.errors import ConfigError

SCHEMA: Final = 2
APPLICATION_ID: Final = 0x65636832
"""Written into the file's header, where `file` and others read whose it is."""
_TABLES: Final = (
    """CREATE TABLE groups (
        idx INTEGER PRIMARY KEY,
        lease TEXT, worker TEXT,
        incarnation INTEGER, step INTEGER, attempt INTEGER, revoke_after_s REAL,
        segment INTEGER, offset INTEGER, num_bytes INTEGER, digest BLOB,
        ended TEXT, trained_at INTEGER, told INTEGER NOT NULL DEFAULT 1
    )""",
    "CREATE INDEX groups_by_segment ON groups (segment) WHERE segment IS NOT NULL",
    "CREATE INDEX groups_open ON groups (idx) WHERE ended IS NULL",
    "CREATE TABLE learners (incarnation INTEGER PRIMARY KEY, resume_step INTEGER NOT NULL)",
    """CREATE TABLE versions (
        incarnation INTEGER, step INTEGER, manifest_digest TEXT NOT NULL,
        told INTEGER NOT NULL DEFAULT 0,
        PRIMARY KEY (incarnation, step)
    )""",
    "CREATE TABLE ends (ended TEXT PRIMARY KEY, number INTEGER NOT NULL)",
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL)",
)
_TABLE_NAMES: Final = frozenset({"groups", "learners", "versions", "ends", "facts"})


def prepare(db: sqlite3.Connection, path: Path) -> None:
    """Make or migrate the tables of the file at `path`, within the caller's transaction.
    ConfigError for a file of a newer release, without its tables, or of another program;
    sqlite3.Error when it cannot be written."""
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    if application_id == APPLICATION_ID and schema > SCHEMA:
        raise ConfigError(
            f"{path} was written by a newer release of echo2 (schema {schema}, this one "
            f"knows {SCHEMA}); nothing in it was changed: install that release"
        )
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    missing = sorted(_TABLE_NAMES - tables)
    is_new = not tables and schema == 0 and application_id == 0
    if not is_new and (missing or application_id not in (0, APPLICATION_ID)):
        lacks = f"it has no table {missing[0]}" if missing else "another program made it"
        raise ConfigError(
            f"{path} is no ledger of echo2: {lacks}; nothing in it was changed: restore it from a "
            "copy, move it away, or give another --run-dir"
        )
    if schema == SCHEMA:
        return
    if schema == 0:
        for statement in _TABLES:
            db.execute(statement)
    else:
        for older in range(schema, SCHEMA):
            _MIGRATIONS[older](db)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA}")


def _from_1(db: sqlite3.Connection) -> None:
    """It kept no lease in work, and not whether what it recorded had been told: it had been, but
    for what a kill cut off, which a restart then goes through events.jsonl for."""
    for table, columns in (
        (
            "groups",
            {
                "incarnation": "INTEGER",
                "step": "INTEGER",
                "attempt": "INTEGER",
                "revoke_after_s": "REAL",
                "told": "INTEGER NOT NULL DEFAULT 1",
            },
        ),
        ("versions", {"told": "INTEGER NOT NULL DEFAULT 1"}),
    ):
        known = {column for _, column, *_ in db.execute(f"PRAGMA table_info({table})")}
        for column, kind in columns.items():
            if column not in known:
                db.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")
    db.execute(
        "INSERT OR IGNORE INTO facts SELECT 'told_step', value FROM facts WHERE name = 'step'"
    )


_MIGRATIONS: Final[Mapping[int, Callable[[sqlite3.Connection], None]]] = MappingProxyType(
    {1: _from_1}
)
"""What makes schema N + 1 of schema N."""
