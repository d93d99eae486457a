"""Whose file ledger.sqlite is, and how an older release's is taken over."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from echo2.core.records import LearnerRecorded, VersionRecorded
from echo2.core.task_queue import group_of
from echo2.errors import ConfigError
from echo2.ledger.database import Database
from echo2.ledger.schema import APPLICATION_ID, SCHEMA
from echo2.types import Version

SCHEMA_1 = """
CREATE TABLE groups (
    idx INTEGER PRIMARY KEY,
    lease TEXT, worker TEXT, segment INTEGER, offset INTEGER, num_bytes INTEGER, digest BLOB,
    ended TEXT, trained_at INTEGER
);
CREATE INDEX groups_by_segment ON groups (segment) WHERE segment IS NOT NULL;
CREATE INDEX groups_open ON groups (idx) WHERE ended IS NULL;
CREATE TABLE learners (incarnation INTEGER PRIMARY KEY, resume_step INTEGER NOT NULL);
CREATE TABLE versions (
    incarnation INTEGER, step INTEGER, manifest_digest TEXT NOT NULL,
    PRIMARY KEY (incarnation, step)
);
CREATE TABLE ends (ended TEXT PRIMARY KEY, number INTEGER NOT NULL);
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
"""As the first release that had a ledger made it."""


def a_file(tmp_path: Path, script: str) -> Path:
    path = tmp_path / "ledger.sqlite"
    db = sqlite3.connect(path)
    db.executescript(script)
    db.close()
    return path


def refused(path: Path) -> str:
    """What the ledger says of the file, which stays as it is."""
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="nothing in it was changed") as caught:
        Database(path)
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == [path]
    return str(caught.value)


def header(path: Path) -> tuple[int, int]:
    db = sqlite3.connect(path)
    (schema,) = db.execute("PRAGMA user_version").fetchone()
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    db.close()
    return schema, application_id


def test_a_new_file_says_whose_it_is(tmp_path: Path) -> None:
    Database(tmp_path / "ledger.sqlite").close()
    assert header(tmp_path / "ledger.sqlite") == (SCHEMA, APPLICATION_ID)


def test_the_first_schema_is_migrated_and_keeps_what_it_held(tmp_path: Path) -> None:
    path = a_file(
        tmp_path,
        SCHEMA_1
        + f"""
        INSERT INTO learners VALUES (1, 0);
        INSERT INTO versions VALUES (1, 0, '{"a" * 64}'), (1, 1, '{"b" * 64}');
        INSERT INTO groups VALUES (0, 'l1', 'w-1', NULL, NULL, NULL, NULL, 'trained', 0);
        INSERT INTO groups VALUES (1, 'l2', 'w-2', 3, 7, 10, x'{"64" * 32}', NULL, NULL);
        INSERT INTO ends VALUES ('trained', 1);
        INSERT INTO facts VALUES ('step', '1'), ('next_index', '3'), ('events_position', '99');
        PRAGMA user_version = 1;
        """,
    )
    database = Database(path)
    found = database.restored()
    assert found is not None
    assert (found.step, found.told_step, found.next_index) == (1, 1, 3)
    assert found.published == ((Version(1, 0), "a" * 64), (Version(1, 1), "b" * 64))
    assert found.untold == ()
    assert found.open_indexes == (1, 2)
    [group] = database.stored()
    assert (group.id, group.worker, group.attempt, group.told) == (group_of(1), "w-2", 0, True)
    assert database.events_position == 99
    with database.transaction():
        database.version(VersionRecorded(Version(1, 2), "c" * 64))
    again = database.restored()
    assert again is not None
    assert again.untold == (Version(1, 2),)
    database.close()
    assert header(path) == (SCHEMA, APPLICATION_ID)
    reopened = Database(path).restored()
    assert reopened == again


def test_a_first_schema_that_had_the_later_columns_is_migrated_too(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    database = Database(path)
    with database.transaction():
        database.learner(LearnerRecorded(1, 0))
        database.version(VersionRecorded(Version(1, 0), "a" * 64))
    before = database.restored()
    database.close()
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 1")
    db.execute("PRAGMA application_id = 0")
    db.close()
    assert Database(path).restored() == before


def test_a_ledger_of_a_newer_release_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    newer = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA + 1};"
    told = refused(a_file(tmp_path, "CREATE TABLE groups (id INTEGER);" + newer))
    assert f"newer release of echo2 (schema {SCHEMA + 1}, this one knows {SCHEMA})" in told


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("CREATE TABLE notes (text TEXT);", "it has no table ends"),
        ("CREATE TABLE notes (text TEXT); PRAGMA user_version = 1;", "it has no table ends"),
        ("PRAGMA user_version = 7;", "it has no table ends"),
        (SCHEMA_1 + "DROP TABLE versions; PRAGMA user_version = 1;", "it has no table versions"),
        (SCHEMA_1 + "PRAGMA application_id = 77;", "another program made it"),
    ],
)
def test_a_database_that_is_no_ledger_is_refused_and_stays_as_it_is(
    tmp_path: Path, script: str, cause: str
) -> None:
    assert f"is no ledger of echo2: {cause};" in refused(a_file(tmp_path, script))
