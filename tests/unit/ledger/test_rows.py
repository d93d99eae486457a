"""Rows of a transaction: what was changed is seen at once, written together, and let go."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from echo2.core.task_queue import group_of
from echo2.ledger.database import Database
from echo2.ledger.rows import Row, Rows
from echo2.ledger.segments import Place


def a_file(tmp_path: Path) -> sqlite3.Connection:
    Database(tmp_path / "ledger.sqlite").close()
    return sqlite3.connect(tmp_path / "ledger.sqlite")


@pytest.mark.parametrize("number", [1, 7, 8, 63, 64, 65, 200])
def test_any_number_of_rows_is_written_whole(tmp_path: Path, number: int) -> None:
    db = a_file(tmp_path)
    rows = Rows(db)
    for index in range(number):
        row = rows.change(index)
        row.lease, row.attempt, row.digest = f"l{index}", index, bytes([index])
    rows.flush()
    found = [Row(*values) for values in db.execute("SELECT * FROM groups ORDER BY idx")]
    assert found == [
        Row(index, lease=f"l{index}", attempt=index, digest=bytes([index]))
        for index in range(number)
    ]


def test_a_row_of_the_file_is_changed_and_keeps_its_other_columns(tmp_path: Path) -> None:
    db = a_file(tmp_path)
    rows = Rows(db)
    first = rows.change(3)
    first.lease, first.segment = "l3", 5
    rows.flush()
    again = Rows(db)
    assert again.get(2) is None
    assert again.get(4) is None
    again.change(3).ended = "expired"
    assert again.get(3) == Row(3, lease="l3", segment=5, ended="expired")
    again.flush()
    assert Rows(db).get(3) == Row(3, lease="l3", segment=5, ended="expired")


def test_only_rows_that_will_be_changed_again_are_kept(tmp_path: Path) -> None:
    db = a_file(tmp_path)
    rows = Rows(db)
    rows.change(0).ended = "filtered"
    untold = rows.change(1)
    untold.ended, untold.told = "trained", 0
    rows.change(2)
    rows.flush()
    db.execute("DELETE FROM groups")
    assert (rows.get(0), rows.get(1), rows.get(2)) == (None, untold, Row(2))
    rows.forget_ended()
    assert (rows.get(1), rows.get(2)) == (None, Row(2))


def test_a_transaction_that_fails_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    database = Database(tmp_path / "ledger.sqlite")
    place = Place(1, 0, 10, b"d" * 32)

    def fails() -> None:
        with database.transaction():
            database.store(group_of(4), "l4", "w-1", place)
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        fails()
    with database.transaction():
        database.store(group_of(1), "l1", "w-1", place)
    assert [group.id for group in database.stored()] == ["g1"]
    database.close()
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    assert db.execute("SELECT idx FROM groups").fetchall() == [(1,)]
    assert db.execute("SELECT value FROM facts WHERE name = 'next_index'").fetchone() == ("2",)
