"""The ledger on the disk: nothing is answered before it is safe, and all of that survives."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from ledger_builders import a_ledger, a_result, stored

from echo2.core.records import CheckpointRecorded, LearnerRecorded, StepRecorded
from echo2.core.restored import Restored
from echo2.core.task_queue import group_of
from echo2.errors import Echo2Error
from echo2.ledger import durable
from echo2.ledger.durable import DurableLedger
from echo2.ledger.events_log import EventsLog
from echo2.ledger.segments import Segments, TornRecordError
from echo2.types import LeaseId

DEADLINE_S = 60.0


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await coroutine

    asyncio.run(within_deadline())


def reopened(run_dir: Path) -> Restored | None:
    ledger = DurableLedger(run_dir)
    try:
        return ledger.restored()
    finally:
        ledger.close()


def test_what_was_answered_is_there_with_its_payload(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_ledger(tmp_path) as running:
            running.ledger.append(1, LearnerRecorded(1, 0))
            for index in range(20):
                running.ledger.append(2 + index, stored(index))
            running.ledger.append(22, StepRecorded(1, 0, (group_of(0), group_of(7))))
            await running.until(22)
            assert running.durable == list(range(1, 23))
        found = reopened(tmp_path)
        assert found is not None
        still_open = [group for group in found.groups if group.trained_at is None]
        assert [group.result.payload for group in still_open] == [
            a_result(i) for i in range(20) if i not in (0, 7)
        ]
        trained = [group for group in found.groups if group.trained_at == 0]
        assert [group.result.trajectories for group in trained] == [
            a_result(0).trajectories,
            a_result(7).trajectories,
        ]
        assert all(group.result.payload is None for group in trained), "they may stay on the disk"
        assert found.groups[0].task.payload == '{"n": 1}'
        assert found.open_indexes == ()
        assert found.trained == (), "all of them are here with what they were trained on"

    run(scenario())


def test_a_payload_is_read_again_as_it_was_delivered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_ledger(tmp_path) as running:
            running.ledger.append(1, LearnerRecorded(1, 0))
            for index in range(3):
                running.ledger.append(2 + index, stored(index))
            running.ledger.append(5, StepRecorded(1, 0, (group_of(0), group_of(1))))
            running.ledger.append(6, LearnerRecorded(2, 0))
            for index in range(3):
                lease = stored(index).lease
                assert await running.ledger.read(group_of(index), lease) == a_result(index)
        async with a_ledger(tmp_path) as running:
            assert await running.ledger.read(group_of(1), stored(1).lease) == a_result(1)

    run(scenario())


def test_a_payload_that_is_not_there_ends_the_coordinator(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_ledger(tmp_path) as running:
            running.ledger.append(1, LearnerRecorded(1, 0))
            running.ledger.append(2, stored(0))
            reading = asyncio.create_task(running.ledger.read(group_of(0), LeaseId("another")))
            with pytest.raises(Echo2Error, match=r"does not hold group g0 of lease another"):
                await running.ledger.wait()
            assert not reading.done()
            reading.cancel()

    run(scenario())


def test_records_that_come_together_are_committed_together(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_ledger(tmp_path) as running:
            for index in range(500):
                running.ledger.append(index, stored(index))
            await running.until(499)
            assert running.ledger.num_commits < 100

    run(scenario())


def test_the_disk_holds_what_a_checkpoint_may_need_and_little_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "SETTLE_EACH", 16)

    async def scenario() -> None:
        async with a_ledger(tmp_path, segment_bytes=2048) as running:
            running.ledger.append(0, LearnerRecorded(1, 0))
            sizes = []
            for step in range(200):
                for index in range(8 * step, 8 * step + 8):
                    running.ledger.append(1 + index, stored(index))
                groups = tuple(group_of(i) for i in range(8 * step, 8 * step + 8))
                running.ledger.append(10_000 + 2 * step, StepRecorded(1, step, groups))
                kept = CheckpointRecorded(1, (max(0, step - 3),))
                running.ledger.append(10_001 + 2 * step, kept)
                await running.until(10_001 + 2 * step)
                sizes.append(sum(f.stat().st_size for f in (tmp_path / "ledger").iterdir()))
            assert max(sizes[100:]) < 2 * max(sizes[:100])
            assert max(sizes) < sum(len(s.payload.token_ids) for s in map(stored, range(1600)))

    run(scenario())


def test_a_full_disk_is_one_clear_error_and_nothing_more_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with a_ledger(tmp_path) as running:
            running.ledger.append(1, LearnerRecorded(1, 0))
            running.ledger.append(2, stored(0))
            await running.until(2)

            def full(*_: Any) -> int:
                raise OSError(28, "No space left on device")

            monkeypatch.setattr(os, "pwrite", full)
            running.ledger.append(3, stored(1))
            with pytest.raises(Echo2Error, match=r"cannot be written .No space left on device"):
                await running.ledger.wait()
            monkeypatch.undo()
            assert running.durable == [1, 2]
        found = reopened(tmp_path)
        assert found is not None
        assert [group.id for group in found.groups] == [group_of(0)]

    run(scenario())


def test_a_power_cut_at_any_write_keeps_every_acknowledged_group(tmp_path: Path) -> None:
    """Copies of the files as a cut would leave them: the log of commits ends anywhere."""
    run_dir = tmp_path / "run"
    safe: list[tuple[int, int]] = []  # (bytes of the log, groups that were answered by then)

    async def scenario() -> None:
        async with a_ledger(run_dir) as running:
            wal = run_dir / "ledger.sqlite-wal"
            running.ledger.append(0, LearnerRecorded(1, 0))
            await running.until(0)
            for index in range(12):
                running.ledger.append(1 + index, stored(index))
                await running.until(1 + index)
                safe.append((wal.stat().st_size, index + 1))
            shutil.copytree(run_dir, tmp_path / "copy")

    run(scenario())
    whole = (tmp_path / "copy" / "ledger.sqlite-wal").read_bytes()
    first = safe[0][0]
    for cut in (*range(first, len(whole), 997), len(whole)):
        torn = tmp_path / f"cut-{cut}"
        shutil.copytree(tmp_path / "copy", torn)
        (torn / "ledger.sqlite-shm").unlink(missing_ok=True)
        (torn / "ledger.sqlite-wal").write_bytes(whole[:cut])
        found = reopened(torn)
        assert found is not None
        answered = max(number for size, number in safe if size <= cut)
        assert [group.id for group in found.groups][:answered] == list(
            map(group_of, range(answered))
        )
        shutil.rmtree(torn)


def test_a_payload_that_is_gone_is_told_and_not_passed_over(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with a_ledger(tmp_path) as running:
            running.ledger.append(0, LearnerRecorded(1, 0))
            running.ledger.append(1, stored(0))
            await running.until(1)
        for path in (tmp_path / "ledger").iterdir():
            path.unlink()
        with pytest.raises(TornRecordError, match="does not hold what was written"):
            reopened(tmp_path)

    run(scenario())


def test_events_are_on_the_disk_before_what_follows_them_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fdatasync

    def fdatasync(handle: int) -> None:
        real(handle)
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))

    async def scenario() -> None:
        async with a_ledger(tmp_path) as running:
            monkeypatch.setattr(os, "fdatasync", fdatasync)
            running.ledger.append(1, stored(0))
            await running.until(1)
            assert str(tmp_path / "events.jsonl") in synced

    run(scenario())


def test_a_segment_is_on_the_disk_before_the_next_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fdatasync

    def fdatasync(handle: int) -> None:
        real(handle)
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    segments = Segments(tmp_path / "ledger", segment_bytes=100)
    segments.open()
    places = [segments.append([bytes(80)]) for _ in range(3)]
    segments.sync()
    segments.close()
    assert [place.segment for place in places] == [1, 1, 2]
    assert synced == ["00000001.seg", "00000002.seg"]


@pytest.mark.parametrize(
    "torn", [b"\0" * 700, b'{"event": "x"\n{"event": "y"}\n', b"[1]\n", b"half"]
)
def test_what_a_power_cut_tore_of_the_events_is_cut_off_with_what_follows(
    tmp_path: Path, torn: bytes
) -> None:
    path = tmp_path / "events.jsonl"

    async def scenario() -> None:
        async with a_ledger(tmp_path) as running:
            log = EventsLog(path)
            log.open()
            fields = {"group_id": "g0", "end": "failed", "trained_at": None}
            position = log.write("group_ended", fields)
            log.close()
            running.ledger.append(0, LearnerRecorded(1, 0))
            running.ledger.observe("group_ended", fields, position)
            running.ledger.append(1, stored(1))
            await running.until(1)

    run(scenario())
    whole = path.read_bytes()
    follows = b'{"event":"group_ended","group_id":"g2","end":"failed","trained_at":null}\n'
    path.write_bytes(whole + follows + torn + follows)
    found = reopened(tmp_path)
    assert found is not None
    assert found.ends == {"failed": 2}
    assert path.read_bytes() == whole + follows
    # Of an earlier release, which did not wait for the file: it is taken in from where it ends.
    path.write_bytes(b"")
    found = reopened(tmp_path)
    assert found is not None
    assert found.ends == {"failed": 2}
    path.write_bytes(follows.replace(b"g2", b"g3"))
    found = reopened(tmp_path)
    assert found is not None
    assert found.ends == {"failed": 3}
