"""A power cut at any write of the ledger keeps every acknowledged group.

A process writes a ledger, and later goes on with it, under strace. From what it asked of the
kernel the files are rebuilt as a cut may have left them after each of its calls: what was forced
to the disk, and of the rest whatever a disk may have made of it (disk_model.py). The product
opens them, and must know what the process had been told until then.

    ECHO2_POWER_CUTS=all pytest tests/chaos/test_power_cuts.py -s      every moment, in every mode
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from echo2.core.restored import Restored
from echo2.core.task_queue import group_of, index_of
from echo2.errors import Echo2Error
from echo2.ledger.durable import DurableLedger
from echo2.ledger.events_log import EventsLog, read_events
from echo2.verify import verify_run

from . import coordinator_writer
from .disk_calls import Call, absent, calls, record
from .disk_model import MODES, Disk, Luck, Mode

UNIT_LEDGER = Path(__file__).parents[1] / "unit" / "ledger"
sys.path.insert(0, str(UNIT_LEDGER))

from ledger_builders import a_ledger, a_result, stored  # noqa: E402 found by the path above

WHY = absent()
pytestmark = pytest.mark.skipif(bool(WHY), reason=WHY)
LEDGER = Path(__file__).parent / "ledger_writer.py"
COORDINATOR = Path(__file__).parent / "coordinator_writer.py"
RUNS = 8
"""Of which a whole run goes on."""
EVERY = os.environ.get("ECHO2_POWER_CUTS") == "all"
SEED = 11
SHARE = 0.06
"""Of the moments that are looked at, unless all are."""
GOES_ON_EACH = 10
TIMEOUT_S = 300.0


@dataclass
class Told:
    """What the writing process had handed over, and what it had been told of it."""

    offered: set[int] = field(default_factory=set)
    acknowledged: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    batches: dict[int, tuple[int, ...]] = field(default_factory=dict)
    steps_asked: dict[int, int] = field(default_factory=dict)
    """v before -> how often it was asked for since the last take-over."""
    steps_done: set[int] = field(default_factory=set)
    oldest_kept: int = 0
    """The highest that a checkpoint was asked to make it."""
    seated: bool = False
    highest: int = 0

    @classmethod
    def of(cls, said: str) -> Told:
        told = cls()
        for line in said.splitlines():
            told._take(*line.split())
        return told

    def _take(self, what: str, *words: str) -> None:
        match what:
            case "+g":
                self.offered.add(int(words[0]))
            case "=g":
                self.acknowledged.add(int(words[0]))
            case "+e":
                self.failed.add(int(words[0]))
            case "+s":
                self.batches[int(words[0])] = tuple(map(int, words[1].split(",")))
                self.highest = max(self.highest, int(words[0]) + 1)
            case "=s":
                self.steps_done.add(int(words[0]))
            case "+l":
                self.steps_done = {step for step in self.steps_done if step < int(words[1])}
            case "=l":
                self.seated = True
            case "+c":
                self.oldest_kept = max(self.oldest_kept, int(words[0].split(",")[0]))

    def may_be_gone(self, index: int) -> bool:
        """It ended and no checkpoint can bring it back, if what was asked for was done."""
        trained = any(
            index in groups and step < self.oldest_kept for step, groups in self.batches.items()
        )
        return trained or index in self.failed


def judge(found: Restored | None, told: Told) -> None:
    """`found` is what a coordinator would go on with."""
    if found is None:
        assert not told.seated
        assert not told.acknowledged
        return
    here = {index_of(group.id): group for group in found.groups}
    for index, group in here.items():
        assert index in told.offered, f"g{index} was never delivered"
        wrong = f"g{index} is not what was delivered"
        assert group.result.trajectories == a_result(index).trajectories, wrong
        if group.trained_at is None:
            assert group.result.payload == a_result(index), wrong
        else:  # it was read, and had its digest, and stays on the disk
            assert group.result.payload is None
    for index in sorted(told.acknowledged - here.keys()):
        assert told.may_be_gone(index), f"g{index} was acknowledged and is gone"
    assert found.step <= told.highest
    for step in sorted(told.steps_done):
        assert found.step > step, f"step {step} was acknowledged, v is {found.step}"
        for index in told.batches[step]:
            assert index not in found.open_indexes, f"g{index} was trained at {step} and is open"
            if index in here:
                assert here[index].trained_at == step
    still_open = {*found.open_indexes, *(i for i, g in here.items() if g.trained_at is None)}
    counted = sum(found.ends.values()) + len(still_open)
    assert counted == found.next_index, f"{found.ends} and {len(still_open)} open groups"


def reopened(run_dir: Path) -> Restored | None:
    """As the coordinator opens it."""
    ledger = DurableLedger(run_dir)
    log = EventsLog(run_dir / "events.jsonl")
    try:
        found = ledger.restored()
        log.open()
    finally:
        ledger.close()
        log.close()
    for line in read_events(run_dir / "events.jsonl"):
        assert line["event"] in ("lease_granted", "group_ended", "step_completed")
    return found


async def goes_on(run_dir: Path, found: Restored | None, told: Told) -> None:
    """One more group is taken, and found by whoever comes after; nothing else is changed."""
    index = 1_000_000
    async with a_ledger(run_dir) as running:
        running.ledger.append(0, stored(index))
        async with asyncio.timeout(TIMEOUT_S):
            await running.until(0)
    if found is None:
        return
    again = reopened(run_dir)
    assert again is not None
    here = {index_of(group.id): group for group in again.groups}
    assert here.pop(index).result.payload == a_result(index)
    assert [group.id for group in found.groups] == [group.id for group in again.groups][:-1] or (
        here.keys() == {index_of(group.id) for group in found.groups}
    )
    assert again.step == found.step


class Recording:
    """What a writing process did in `folder`/runs, and where the files of a cut are made."""

    def __init__(self, folder: Path, script: Path = LEDGER) -> None:
        self.folder = folder
        self.script = script
        self.root = folder / "runs"
        self.said_before = ""
        self.num_files = 0

    @property
    def run_dir(self) -> Path:
        return self.root / "a" / "run"

    def begin(self) -> Disk:
        """The files as they are now, all on the disk."""
        self.root.mkdir(exist_ok=True)
        return Disk(self.root)

    def write(self, *arguments: str) -> list[Call]:
        log = self.folder / "calls"
        argv = [sys.executable, str(self.script), str(self.run_dir), *arguments]
        done = record(argv, log, timeout_s=TIMEOUT_S)
        assert done.returncode == 0, done.stderr
        return list(calls(log))

    def cut(self, disk: Disk, luck: Luck) -> Path:
        """The run's folder as a cut may leave it now."""
        self.num_files += 1
        target = self.folder / f"cut-{self.num_files}"
        disk.leave(target, luck)
        run_dir = target / "a" / "run"
        if not run_dir.exists():
            run_dir.mkdir(parents=True)
        return run_dir


def chosen(rng: random.Random) -> Iterator[Mode]:
    """The modes in which a moment is looked at."""
    if EVERY:
        yield from MODES
    elif rng.random() < SHARE:
        yield from rng.sample(MODES, 2)


def judge_cuts(recording: Recording, disk: Disk, made: list[Call], seed: int) -> Counter[str]:
    """Cut at the moments of `made`; how many cuts there were of each kind of call."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    for number, moment in enumerate(disk.moments(made)):
        for mode in chosen(rng):
            luck = Luck(random.Random(rng.random()), mode)
            run_dir = recording.cut(disk, luck)
            told = Told.of(recording.said_before + disk.said)
            try:
                found = reopened(run_dir)
                judge(found, told)
                if sum(counts.values()) % GOES_ON_EACH == 0:
                    asyncio.run(goes_on(run_dir, found, told))
            except (AssertionError, Echo2Error) as error:
                error.add_note(
                    f"cut after call {number}, {moment.name}({moment.arguments[0]!r}, ...), "
                    f"{mode}, sectors of {luck.sector} bytes, seed {seed}"
                )
                raise
            shutil.rmtree(run_dir.parents[1])
            counts[moment.name] += 1
    return counts


def test_a_cut_at_any_moment_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    disk = recording.begin()
    counts = judge_cuts(recording, disk, recording.write("12"), SEED)
    print(f"{sum(counts.values())} cuts: {dict(counts)}")
    assert counts.keys() >= {"write", "pwrite64", "fdatasync"}
    assert sum(counts.values()) > 50


@pytest.mark.parametrize("how", ["goes on", "rewinds"])
def test_a_cut_while_a_ledger_recovers_from_a_cut_keeps_it_too(tmp_path: Path, how: str) -> None:
    recording = Recording(tmp_path)
    disk = recording.begin()
    made = list(recording.write("8"))
    rng = random.Random(f"{SEED} {how}")
    at = int(len(made) * rng.uniform(0.5, 0.9))
    for _ in disk.moments(made[:at]):
        pass
    recording.said_before = disk.said
    left = recording.cut(disk, Luck(rng, "torn")).parents[1]
    shutil.rmtree(recording.root)
    left.rename(recording.root)
    disk = recording.begin()
    options = ["--rewind"] if how == "rewinds" else []
    counts = judge_cuts(recording, disk, recording.write("5", *options), SEED)
    print(f"{sum(counts.values())} cuts: {dict(counts)}")
    assert sum(counts.values()) > 20


def test_a_ledger_that_does_not_wait_for_the_disk_is_found_out(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    disk = recording.begin()
    with pytest.raises((AssertionError, Echo2Error)):
        judge_cuts(recording, disk, recording.write("6", "--lazy"), SEED)


def test_what_is_not_forced_to_the_disk_may_be_torn_and_what_is_may_not(tmp_path: Path) -> None:
    """Of the model: a file that was written twice and synced between."""
    root = tmp_path / "root"
    root.mkdir()
    disk = Disk(root)
    path = str(root / "file").encode()
    made: list[Call] = []

    def call(name: str, *arguments: Any, result: int = 0) -> None:
        made.extend((Call(name, arguments, None, 1), Call(name, arguments, result, 1)))

    call("openat", "AT_FDCWD", path, "O_WRONLY|O_CREAT", "0600", result=7)
    call("pwrite64", "7", b"a" * 1024, "1024", "0", result=1024)
    call("fsync", "7")
    call("openat", "AT_FDCWD", str(root).encode(), "O_RDONLY", result=8)
    call("fsync", "8")
    call("pwrite64", "7", b"b" * 2048, "2048", "0", result=2048)
    for _ in disk.moments(made):
        pass
    found = set()
    for seed in range(200):
        luck = Luck(random.Random(seed), random.Random(seed).choice(MODES))
        disk.leave(tmp_path / f"left-{seed}", luck)
        found.add((tmp_path / f"left-{seed}" / "file").read_bytes())
    a, b, zeros = b"a" * 512, b"b" * 512, bytes(512)
    assert {a + a, b + b + b + b, a + b, a + a + b + b, a + a + zeros + b} <= found
    assert all(len(content) in (1024, 1536, 2048) for content in found)


def test_a_run_goes_on_after_a_cut_and_its_records_keep_every_promise(tmp_path: Path) -> None:
    """The coordinator itself, with its learner and a worker: what they hold an acknowledgement
    of is there, and `echo2 verify` finds nothing in the records of the run that went on."""
    recording = Recording(tmp_path, COORDINATOR)
    disk = recording.begin()
    made = recording.write("6")
    rng = random.Random(SEED)
    moments = sum(1 for _ in Disk(recording.root).moments(made))
    at = range(moments) if EVERY else sorted(rng.sample(range(moments), RUNS))
    for number, moment in enumerate(disk.moments(made)):
        if number not in at:
            continue
        luck = Luck(random.Random(rng.random()), rng.choice(MODES))
        run_dir = recording.cut(disk, luck)
        try:
            goes_on_as_a_run(run_dir, disk.said.split("\n"))
        except (AssertionError, Echo2Error) as error:
            error.add_note(f"cut after call {number} of {moments}, {moment.name}, {luck.mode}")
            raise
        shutil.rmtree(run_dir.parents[1])


def goes_on_as_a_run(run_dir: Path, told: list[str]) -> None:
    groups = {line[3:] for line in told if line.startswith("=g ")}
    steps = [int(line[3:]) for line in told if line.startswith("=s ")]
    copy = run_dir.parent / "copy"
    shutil.copytree(run_dir, copy)
    ledger = DurableLedger(copy)
    found = ledger.restored()
    ledger.close()
    if found is None:
        assert not groups
        assert not steps
    else:
        assert found.step >= max(steps, default=-1) + 1
        ended = {group_of(index) for index in range(found.next_index)} - {
            group_of(index) for index in found.open_indexes
        }
        assert groups <= ended | {group.id for group in found.groups}
    said: list[str] = []
    asyncio.run(coordinator_writer.run(run_dir, 2, tells=said.append))
    report = verify_run(run_dir)
    assert report.ok, report.to_text()
    trained = [
        line["group_id"]
        for line in read_events(run_dir / "events.jsonl")
        if line["event"] == "group_ended" and line["end"] == "trained"
    ]
    assert len(trained) == len(set(trained))
