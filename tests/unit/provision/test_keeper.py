"""The keeper writes down before it starts, stops what failed, tries again, and hands over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from echo2.config import Config, config_from_mapping
from echo2.net.auth import load_or_create_key
from echo2.net.join_token import JoinToken
from echo2.net.token_book import TokenBook
from echo2.provision import Machine, MachineOrder, ProvisionError
from echo2.provision.book import MachineBook, MachineRecord
from echo2.provision.keeper import Keeper


def a_config(**provisioner: Any) -> Config:
    return config_from_mapping(
        {
            "offers": [{"name": "gpu", "price_usd_per_h": 1.0, "groups_per_s": 1.0}],
            "provisioner": {
                "kind": "command",
                "start_command": ["false"],
                "stop_command": ["false", "{worker}"],
                "retry_s": 0.001,
                **provisioner,
            },
        }
    )


class Cloud:
    """Machines that are on; `starts` and `stops` are what the next calls raise, in turn."""

    def __init__(self, book: MachineBook) -> None:
        self.book = book
        self.on: set[str] = set()
        self.starts: list[Exception] = []
        self.stops: list[Exception] = []
        self.tokens: list[str] = []
        self.listed: Collection[str] | None = None
        self.stop_gate: asyncio.Event | None = None
        self.calls: list[str] = []

    async def start(self, order: MachineOrder) -> str:
        self.calls.append(f"start {order.worker}")
        written = {record.worker: record.state for record in self.book.records()}
        assert written[order.worker] == "starting", "it is written down before"
        self.tokens.append(order.token)
        self.on.add(order.worker)  # also of a start that fails
        if self.starts:
            raise self.starts.pop(0)
        return f"id-{order.worker}"

    async def stop(self, machine: Machine) -> None:
        self.calls.append(f"stop {machine.worker} {machine.id}".strip())
        assert machine.worker in {record.worker for record in self.book.records()}
        if self.stop_gate is not None:
            await self.stop_gate.wait()
        if self.stops:
            raise self.stops.pop(0)
        self.on.discard(machine.worker)

    async def list(self) -> Collection[str] | None:
        return self.listed


class Bench:
    def __init__(self, run_dir: Path, **provisioner: Any) -> None:
        self.run_dir = run_dir
        self.book = MachineBook(run_dir)
        self.cloud = Cloud(self.book)
        self.told: list[dict[str, Any]] = []
        self.key = load_or_create_key(run_dir / "keys" / "coordinator.key").public
        config = a_config(**provisioner)
        self.keeper = Keeper(config, run_dir, self.cloud, self.book, self.told.append)

    def start(self, worker: str) -> None:
        self.keeper.order_start(worker, "gpu", endpoint="tcp://127.0.0.1:5703", server_key=self.key)

    async def idle(self) -> None:
        while self.keeper._tasks:
            await asyncio.wait(self.keeper._tasks)

    def states(self, worker: str) -> list[str]:
        return [line["state"] for line in self.told if line.get("worker") == worker]


async def test_a_machine_is_written_down_from_before_its_start_until_after_its_stop(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.start("gpu-1")
    await bench.idle()
    (record,) = bench.book.records()
    assert (record.worker, record.state, record.id) == ("gpu-1", "running", "id-gpu-1")
    assert bench.states("gpu-1") == ["running"]
    token = JoinToken.parse(bench.cloud.tokens[0])
    (known,) = TokenBook(tmp_path / "keys").records()
    assert (known.id, known.name, known.uses) == (token.id, "gpu-1", 1)
    bench.keeper.order_stop("gpu-1")
    await bench.idle()
    assert bench.cloud.calls[-1] == "stop gpu-1 id-gpu-1"
    assert bench.book.records() == []
    assert TokenBook(tmp_path / "keys").records() == [], "its token opens nothing any more"
    assert bench.states("gpu-1") == ["running", "stopping", "gone"]


async def test_what_a_failed_start_may_have_left_is_stopped(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.cloud.starts = [ProvisionError("rent ended with code 3: no credit")]
    bench.start("gpu-1")
    await bench.idle()
    assert bench.cloud.calls == ["start gpu-1", "stop gpu-1"]
    assert bench.cloud.on == set()
    assert bench.told[-1] == {
        "worker": "gpu-1",
        "state": "gone",
        "text": "rent ended with code 3: no credit",
    }


async def test_a_start_that_hangs_is_cut_short_and_stopped(tmp_path: Path) -> None:
    bench = Bench(tmp_path, start_timeout_s=0.05)

    async def hangs(order: MachineOrder) -> str:
        await asyncio.Event().wait()
        return ""

    bench.cloud.start = hangs  # type: ignore[method-assign]
    bench.start("gpu-1")
    await bench.idle()
    assert bench.told[-1]["text"] == "its start took longer than 0.05 s"
    assert bench.book.records() == []


async def test_a_stop_that_fails_is_tried_again_and_told_once_per_change(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start("gpu-1")
    await bench.idle()
    no, other = ProvisionError("down ended with code 1: busy"), RuntimeError("odd")
    bench.cloud.stops = [no, no, no, other]
    bench.keeper.order_stop("gpu-1")
    await bench.idle()
    texts = [line["text"] for line in bench.told if line["state"] == "stopping"]
    assert texts == [
        "",
        "it cannot be stopped: down ended with code 1: busy",
        "it cannot be stopped: RuntimeError: odd",
    ]
    assert bench.cloud.on == set()
    assert bench.book.records() == []


async def test_one_that_cannot_be_stopped_stays_written_down(tmp_path: Path) -> None:
    bench = Bench(tmp_path, stop_attempts=2)
    bench.start("gpu-1")
    await bench.idle()
    bench.cloud.stops = [ProvisionError("no")] * 2
    await bench.keeper.stop_all()
    assert [record.state for record in bench.book.records()] == ["stopping"]


async def test_all_are_stopped_also_one_that_is_being_started(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.start("gpu-1")
    await bench.idle()
    bench.start("gpu-2")
    await asyncio.sleep(0)
    await bench.keeper.stop_all()
    assert bench.cloud.on == set()
    assert bench.book.records() == []


async def test_the_next_keeper_adopts_what_runs_and_stops_the_rest(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.book.write(MachineRecord(worker="gpu-1", offer="gpu", state="running", id="1"))
    bench.book.write(MachineRecord(worker="gpu-2", offer="gpu", state="running", id="2"))
    bench.book.write(MachineRecord(worker="gpu-3", offer="gpu", state="starting"))
    bench.book.write(MachineRecord(worker="gpu-4", offer="gpu", state="stopping", id="4"))
    bench.cloud.listed = {"gpu-1", "gpu-4", "another run's"}
    await bench.keeper.take_stock()
    (told,) = bench.told
    assert {m["worker"]: m["is_on"] for m in told["machines"]} == {
        "gpu-1": True,
        "gpu-2": False,  # it vanished
        "gpu-3": False,  # nobody knows whether it was started
        "gpu-4": False,
    }


async def test_who_hands_over_lets_a_try_end_and_makes_no_other(tmp_path: Path) -> None:
    bench = Bench(tmp_path, retry_s=1000.0)
    bench.start("gpu-1")
    await bench.idle()
    bench.cloud.stops = [ProvisionError("busy")]
    bench.cloud.stop_gate = asyncio.Event()
    bench.keeper.order_stop("gpu-1")
    settling = asyncio.create_task(bench.keeper.settle())
    await asyncio.sleep(0)
    bench.cloud.stop_gate.set()
    async with asyncio.timeout(60):
        await settling
    assert bench.cloud.calls.count("stop gpu-1 id-gpu-1") == 1
    assert [record.worker for record in bench.book.records()] == ["gpu-1"]


def test_a_file_that_is_no_record_is_passed_over(tmp_path: Path) -> None:
    book = MachineBook(tmp_path)
    book.write(MachineRecord(worker="gpu-1", offer="gpu"))
    (book.folder / "torn.json").write_text("{")
    (book.folder / "other.json").write_text(json.dumps({"worker": "gpu-2", "offer": "gpu"}))
    assert [record.worker for record in book.records()] == ["gpu-1"]


async def test_a_keeper_knows_that_another_waits_for_it(tmp_path: Path) -> None:
    book = MachineBook(tmp_path)
    is_next = asyncio.Event()
    loop = asyncio.get_running_loop()

    def waits() -> None:
        with MachineBook(tmp_path).taken_over():
            loop.call_soon_threadsafe(is_next.set)

    with book.taken_over():
        assert not book.has_successor()
        waiting = asyncio.create_task(asyncio.to_thread(waits))
        async with asyncio.timeout(60):
            while not book.has_successor():  # noqa: ASYNC110  a lock of files
                await asyncio.sleep(0.01)
        assert not is_next.is_set()
    async with asyncio.timeout(60):
        await waiting
    assert is_next.is_set()
