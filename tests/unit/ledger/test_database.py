"""ledger.sqlite: what is applied, what is restored, and that it does not grow with the run."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from echo2.core.audits import Quarantine
from echo2.core.records import (
    CheckpointRecorded,
    LearnerRecorded,
    StepRecorded,
    VersionRecorded,
)
from echo2.core.restored import Restored, RestoredLease
from echo2.core.task_queue import group_of
from echo2.errors import ConfigError
from echo2.ledger.database import Database, StoredGroup, quarantined_workers
from echo2.ledger.segments import Place
from echo2.types import GroupId, PeerId, Version


def a_place(segment: int = 1) -> Place:
    return Place(segment, 0, 10, b"d" * 32)


def a_database(tmp_path: Path) -> Database:
    database = Database(tmp_path / "ledger.sqlite")
    with database.transaction():
        database.learner(LearnerRecorded(1, 0))
    return database


def steps(database: Database, *groups: int, step: int) -> None:
    with database.transaction():
        database.step(StepRecorded(1, step, tuple(map(group_of, groups))))


def store(database: Database, *indexes: int, segment: int = 1) -> None:
    with database.transaction():
        for index in indexes:
            database.store(group_of(index), f"l{index}", "w-1", a_place(segment))


def ends(database: Database, index: int, end: str, trained_at: int | None = None) -> None:
    fields = {"group_id": f"g{index}", "end": end, "trained_at": trained_at}
    with database.transaction():
        database.observe("group_ended", fields, 0)


def leases(database: Database, *indexes: int, attempt: int = 1) -> None:
    with database.transaction():
        for index in indexes:
            fields = {
                "group_id": f"g{index}",
                "lease": f"l{index}.{attempt}",
                "worker": "w-1",
                "incarnation": 1,
                "step": 4,
                "attempt": attempt,
                "revoke_after_s": 60.0,
            }
            database.observe("lease_granted", fields, 0)


def loses(database: Database, index: int, *, attempt: int = 1) -> None:
    fields = {"group_id": f"g{index}", "lease": f"l{index}.{attempt}"}
    with database.transaction():
        database.observe("lease_revoked", fields, 0)


def restored(database: Database) -> Restored:
    found = database.restored()
    assert found is not None
    return found


def test_a_new_ledger_has_nothing_to_restore(tmp_path: Path) -> None:
    assert Database(tmp_path / "ledger.sqlite").restored() is None


def test_what_was_recorded_is_restored(tmp_path: Path) -> None:
    database = a_database(tmp_path)
    store(database, 0, 1, 2, 5)
    steps(database, 0, 2, step=0)
    ends(database, 0, "trained", 0)
    ends(database, 3, "expired")
    with database.transaction():
        database.observe("lease_failed", {"group_id": "g6", "lease": "l6"}, 0)
        database.version(VersionRecorded(Version(1, 1), "f" * 64))
        database.checkpoint(CheckpointRecorded(1, (0, 1)))
    database.close()
    found = restored(Database(tmp_path / "ledger.sqlite"))
    assert found == Restored(
        incarnation=1,
        step=1,
        told_step=0,
        starts=((1, 0),),
        next_index=7,
        open_indexes=(1, 4, 5, 6),
        trained=((group_of(0), 0), (group_of(2), 0)),
        kept=(0, 1),
        published=((Version(1, 1), "f" * 64),),
        untold=(Version(1, 1),),
        ends={"trained": 2, "expired": 1},
    )


def test_groups_that_may_be_needed_are_named_with_their_places(tmp_path: Path) -> None:
    database = a_database(tmp_path)
    store(database, 6, 5, 4, 3, 2)
    steps(database, 5, step=1)
    steps(database, 2, step=2)
    steps(database, 3, step=3)
    ends(database, 6, "filtered")
    with database.transaction():
        database.checkpoint(CheckpointRecorded(1, (2, 3)))
    assert database.stored() == [
        StoredGroup(group_of(4), "l4", "w-1", 0, None, True, a_place()),
        StoredGroup(group_of(2), "l2", "w-1", 0, 2, False, a_place()),
        StoredGroup(group_of(3), "l3", "w-1", 0, 3, False, a_place()),
    ]


def test_what_a_record_made_is_untold_until_its_event_was_seen(tmp_path: Path) -> None:
    database = a_database(tmp_path)
    version = Version(1, 1)
    store(database, 0, 1)
    steps(database, 0, 1, step=0)
    with database.transaction():
        database.version(VersionRecorded(version, "f" * 64))
    ends(database, 1, "trained", 0)
    assert [(group.id, group.told) for group in database.stored()] == [("g0", False), ("g1", True)]
    found = restored(database)
    assert (found.step, found.told_step, found.untold) == (1, 0, (version,))
    ends(database, 0, "trained", 0)
    published = {"incarnation": 1, "step": 1, "manifest_digest": "f" * 64}
    with database.transaction():
        database.observe("step_completed", {"step": 0}, 0)
        database.observe("version_published", published, 0)
    assert all(group.told for group in database.stored())
    found = restored(database)
    assert (found.step, found.told_step, found.untold) == (1, 1, ())


def test_the_cost_is_that_of_the_newest_step(tmp_path: Path) -> None:
    database = a_database(tmp_path)
    with database.transaction():
        database.step(StepRecorded(1, 0, (group_of(0),), 0.25))
        database.step(StepRecorded(1, 1, (group_of(1),), 0.5))
    assert restored(database).cost_usd == 0.5


def test_a_rewind_takes_back_what_was_recorded_and_not_told(tmp_path: Path) -> None:
    database = a_database(tmp_path)
    store(database, 0)
    steps(database, 0, step=3)
    with database.transaction():
        database.learner(LearnerRecorded(2, 2))
    found = restored(database)
    assert (found.step, found.told_step, found.open_indexes) == (2, 2, (0,))
    assert [group.told for group in database.stored()] == [True]


def test_what_is_in_work_is_restored_until_it_is_given_back_stored_or_ended(
    tmp_path: Path,
) -> None:
    database = a_database(tmp_path)
    leases(database, 0, 1, 2, 3)
    leases(database, 3, attempt=2)
    loses(database, 1)
    loses(database, 3)  # its first lease, known late
    store(database, 2)
    assert restored(database).leases == (
        RestoredLease("l0.1", group_of(0), "w-1", Version(1, 4), 1, 60.0),
        RestoredLease("l3.2", group_of(3), "w-1", Version(1, 4), 2, 60.0),
    )
    assert restored(database).open_indexes == (0, 1, 2, 3)
    ends(database, 0, "expired")
    loses(database, 3, attempt=2)
    assert restored(database).leases == ()


def test_a_group_that_is_in_work_again_has_lost_its_earlier_result(tmp_path: Path) -> None:
    database = a_database(tmp_path)
    leases(database, 0)
    store(database, 0)
    leases(database, 0, attempt=2)
    assert database.stored() == []
    assert [lease.id for lease in restored(database).leases] == ["l0.2"]
    assert database.segments() == set()


def test_a_group_that_returned_to_the_queue_has_no_result_and_is_in_nobodys_work(
    tmp_path: Path,
) -> None:
    database = a_database(tmp_path)
    leases(database, 0)
    store(database, 0)
    steps(database, 0, step=3)
    with database.transaction():
        database.observe("group_returned", {"group_id": "g0", "to": "queue"}, 0)
        database.learner(LearnerRecorded(2, 2))
    found = restored(database)
    assert (database.stored(), found.leases, found.open_indexes) == ([], (), (0,))


def test_applying_again_changes_nothing(tmp_path: Path) -> None:
    database = a_database(tmp_path)
    store(database, 0, 1)
    for _ in range(2):
        steps(database, 0, 1, step=0)
        ends(database, 0, "trained", 0)
    assert restored(database).ends == {"trained": 2}


def test_a_group_that_a_rewind_returned_is_open_again_and_ends_once_more(tmp_path: Path) -> None:
    database = a_database(tmp_path)
    store(database, 0)
    steps(database, 0, step=3)
    with database.transaction():
        database.observe("group_returned", {"group_id": "g0", "to": "buffer"}, 0)
        database.learner(LearnerRecorded(2, 2))
    assert restored(database).open_indexes == (0,)
    assert restored(database).ends == {}
    assert len(database.stored()) == 1
    ends(database, 0, "expired")
    assert restored(database).ends == {"expired": 1}


def test_what_no_checkpoint_can_bring_back_leaves_nothing_but_counts(tmp_path: Path) -> None:
    database = a_database(tmp_path)
    for index in range(100):
        store(database, index, segment=index // 10)
        if index != 50:
            steps(database, index, step=index)
    with database.transaction():
        database.checkpoint(CheckpointRecorded(1, (30, 40)))
        database.settle()
    assert database.segments() == set(range(3, 10))
    found = restored(database)
    assert found.trained[0] == (group_of(30), 30)
    assert found.open_indexes == (50,)
    assert found.ends == {"trained": 99}
    ends(database, 50, "expired")
    with database.transaction():
        database.checkpoint(CheckpointRecorded(1, (100,)))
        database.settle()
    assert database.segments() == set()
    database.close()
    rows = sqlite3.connect(tmp_path / "ledger.sqlite").execute("SELECT count(*) FROM groups")
    assert rows.fetchone() == (0,)
    again = Database(tmp_path / "ledger.sqlite")
    found = restored(again)
    assert (found.next_index, found.open_indexes, found.trained) == (100, (), ())
    steps(again, 7, step=7)  # told again after a crash
    assert restored(again).ends == {"trained": 99, "expired": 1}


def test_what_a_rewind_returns_of_what_was_settled_is_open_again(tmp_path: Path) -> None:
    database = a_database(tmp_path)
    store(database, *range(4))
    for index in range(4):
        steps(database, index, step=index)
    with database.transaction():
        database.checkpoint(CheckpointRecorded(1, (2,)))
        database.settle()
        database.learner(LearnerRecorded(2, 2))
        database.observe("group_returned", {"group_id": "g2", "to": "queue"}, 0)
        database.observe("group_returned", {"group_id": "g3", "to": "buffer"}, 0)
    assert restored(database).open_indexes == (2, 3)
    assert [group.id for group in database.stored()] == ["g3"]


def test_the_records_of_an_earlier_release_are_taken_over(tmp_path: Path) -> None:
    earlier = Restored(
        incarnation=2,
        step=5,
        told_step=5,
        starts=((1, 0), (2, 4)),
        next_index=9,
        open_indexes=(3, 7),
        trained=((group_of(2), 4), (group_of(8), 5)),
        kept=(4,),
        published=((Version(1, 1), "a" * 64),),
        ends={"trained": 5, "expired": 2},
    )
    database = Database(tmp_path / "ledger.sqlite")
    database.take_over(earlier, 123)
    assert restored(database) == earlier
    assert database.events_position == 123


def test_a_file_that_is_no_ledger_is_one_clear_error_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database, but someone's notes " * 100)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"cannot be used as a ledger .*nothing in it was chang"):
        Database(path)
    assert path.read_bytes() == before


def test_a_quarantine_is_kept_until_it_is_pardoned(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    database = Database(path)
    told = {"cause": "mismatch", "reason": "odd", "step": 4, "in_training": ["g3"]}
    with database.transaction():
        database.learner(LearnerRecorded(1, 0))
        database.observe("worker_quarantined", {"worker": "w-1", **told}, 10)
        database.observe("worker_quarantined", {"worker": "w-2", **told}, 20)
        database.observe("worker_pardoned", {"worker": "w-2"}, 30)
        database.observe("worker_pardoned", {"worker": "w-9"}, 40)
    restored = database.restored()
    assert restored is not None
    assert restored.quarantined == (
        (PeerId("w-1"), Quarantine("mismatch", "odd", 4, (GroupId("g3"),))),
    )
    database.close()
    assert quarantined_workers(path).keys() == {"w-1"}
    assert quarantined_workers(tmp_path / "none.sqlite") == {}
    assert not (tmp_path / "none.sqlite").exists()


def test_a_withdrawn_result_does_not_come_back(tmp_path: Path) -> None:
    database = Database(tmp_path / "ledger.sqlite")
    with database.transaction():
        database.learner(LearnerRecorded(1, 0))
        for index in (0, 1):
            database.store(GroupId(f"g{index}"), f"l{index}", "w-1", Place(0, 0, 1, b"x"))
        database.observe("group_withdrawn", {"group_id": "g0", "lease": "l0"}, 1)
        database.observe("group_withdrawn", {"group_id": "g1", "lease": "another"}, 2)
    assert [stored.id for stored in database.stored()] == ["g1"]
    restored = database.restored()
    assert restored is not None
    assert restored.open_indexes == (0, 1)
