"""Real worker daemons are started and stopped as the load changes, and none outlives its run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from echo2.config import load_config
from echo2.errors import Echo2Error
from echo2.learner_client import LearnerClient
from echo2.learner_transport import SocketTransport
from echo2.messages import VersionPublished
from echo2.provision.book import MachineBook, MachineRecord
from echo2.provision.local_machine import _pid
from echo2.types import Task, Version

DEADLINE_S = 240.0
CONFIG = """
[run]
learner_timeout_s = 1000.0

[environment]
name = "null"

[learner]
groups_per_step = 2

[dispatch]
group_size = 2

[heartbeat]
interval_s = 0.2
suspect_s = 2.0
gone_s = 5.0

[worker]
engine = "null"
slots = 1

[worker.null]
tokens_mean = 4
tokens_per_s = 10

[sampling]
max_tokens = 4

[activation]
policy = "cheapest"
margin = 1.0
persistence_s = 0.5
cool_down_s = 0.5

[[offers]]
name = "cpu"
price_usd_per_h = 0.36
groups_per_s = 2.0
count = 3

[provisioner]
kind = "command"
start_command = [{start}]
stop_command = [{stop}]
list_command = [{listed}]
reap_after_s = {reap_after_s}
retry_s = 0.1
"""


class ProvisionedRun:
    """A run folder whose coordinator starts and stops workers of this machine, in `machines`."""

    def __init__(self, folder: Path, *, reap_after_s: float) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        self.machines = folder / "machines"
        local = [sys.executable, "-m", "echo2.provision.local_machine"]

        def command(*words: str) -> str:
            return ", ".join(json.dumps(word) for word in (*local, *words))

        self.config = folder / "run.toml"
        where = str(self.machines)
        self.config.write_text(
            CONFIG.format(
                start=command("start", where, "{worker}"),
                stop=command("stop", where, "{worker}"),
                listed=command("list", where),
                reap_after_s=reap_after_s,
            )
        )
        self.book = MachineBook(self.run_dir)
        self.processes: list[asyncio.subprocess.Process] = []
        self._log = (folder / "processes.log").open("ab")

    async def coordinator(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "echo2.cli", "coordinator", str(self.config)),
            *("--run-dir", str(self.run_dir)),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self.processes.append(process)
        await self.until(lambda: self.record().get("pid") == process.pid)
        return process

    def record(self) -> dict[str, Any]:
        with contextlib.suppress(FileNotFoundError):
            found = json.loads((self.run_dir / "coordinator.json").read_text())
            assert isinstance(found, dict)
            return found
        return {}

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] == name]

    def alive(self) -> set[str]:
        """Workers whose daemon lives."""
        names = {path.stem for path in self.machines.glob("*.pid")}
        return {name for name in names if _pid(self.machines, name) is not None}

    def written(self) -> set[str]:
        return {record.worker for record in self.book.records()}

    def running(self) -> set[str]:
        """Ready by the events, and not told to stop since."""
        ready = {event["worker"] for event in self.events("worker_ready")}
        changes = self.events("machine_changed")
        return ready - {e["worker"] for e in changes if e["state"] in ("stopping", "gone")}

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():  # noqa: ASYNC110  what it looks at is files
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        for name in self.alive():  # only after a failure
            os.killpg(_pid(self.machines, name) or 0, 9)
        self._log.close()
        for path in (self.folder / "processes.log", self.run_dir / "logs" / "machines.log"):
            if path.exists():
                print(path.read_text(errors="replace")[-8000:])


@contextlib.asynccontextmanager
async def a_run(folder: Path, *, reap_after_s: float) -> AsyncIterator[ProvisionedRun]:
    run = ProvisionedRun(folder, reap_after_s=reap_after_s)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield run
    finally:
        await run.close()


class Learner:
    """Trains for `train_s` a step, which is all that the load depends on."""

    def __init__(self, run: ProvisionedRun) -> None:
        def tasks(start: int, count: int) -> tuple[list[Task], bool]:
            return [Task(i, "{}") for i in range(start, start + count)], False

        self.train_s = 0.0
        self.client = LearnerClient(
            SocketTransport(load_config(run.config), run.run_dir), tasks=tasks
        )

    async def learn(self) -> None:
        await self.client.start(resume_step=0)
        step = 0
        while True:
            version = VersionPublished(
                version=Version(1, step),
                manifest_digest=f"{step:064x}",
                assets_digest="",
                num_bytes=1,
                origin="",
                origin_key="",
            )
            await self.client.publish(version)
            assert await self.client.next_batch(step) is not None
            await asyncio.sleep(self.train_s)
            await self.client.complete(step, train_s=self.train_s, wait_s=0.0, mismatch=())
            step += 1


@contextlib.asynccontextmanager
async def a_learner(run: ProvisionedRun) -> AsyncIterator[Learner]:
    learner = Learner(run)
    task = asyncio.create_task(learner.learn())
    try:
        yield learner
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Echo2Error):
            await task
        with contextlib.suppress(Echo2Error):
            await learner.client.close("test over", finished=False)


async def test_workers_follow_the_load_and_none_outlives_a_killed_coordinator(
    tmp_path: Path,
) -> None:
    async with a_run(tmp_path, reap_after_s=1.0) as run:
        coordinator = await run.coordinator()
        async with a_learner(run) as learner:
            learner.train_s = 4.0  # half a group per second: one machine
            await run.until(run.running)
            learner.train_s = 0.1  # twenty: all three
            await run.until(lambda: len(run.running()) == 3)
            assert len(run.alive()) == 3
            learner.train_s = 4.0
            await run.until(lambda: len(run.alive()) == 1)
            coordinator.kill()
            await coordinator.wait()
            await run.until(lambda: not run.alive() and not run.written())
        stopped = {e["worker"] for e in run.events("worker_released")}
        assert stopped
        assert all("surplus" in e["reason"] for e in run.events("worker_released"))


async def test_a_coordinator_that_is_started_again_adopts_what_runs(tmp_path: Path) -> None:
    async with a_run(tmp_path, reap_after_s=1000.0) as run:
        coordinator = await run.coordinator()
        async with a_learner(run) as learner:
            learner.train_s = 4.0
            await run.until(run.running)
            (before,) = run.alive()
            coordinator.kill()
            await coordinator.wait()
            again = await run.coordinator()
            await run.until(
                lambda: any(
                    e["worker"] == before and e["reason"] == "was written down before"
                    for e in run.events("machine_changed")
                )
            )
            await run.until(
                lambda: [e["worker"] for e in run.events("worker_joined")].count(before) == 2
            )
            assert before in run.alive()
            again.terminate()
            assert await again.wait() == 0
        assert not run.alive()
        assert not run.written()


async def test_a_machine_that_was_being_started_when_all_were_killed_is_stopped(
    tmp_path: Path,
) -> None:
    """Only what is written down is known, and no daemon was ever there."""
    async with a_run(tmp_path, reap_after_s=1000.0) as run:
        run.book.write(MachineRecord(worker="cpu-old-1", offer="cpu"))
        coordinator = await run.coordinator()
        await run.until(lambda: "cpu-old-1" not in run.written())
        coordinator.terminate()
        assert await coordinator.wait() == 0
        assert not run.alive()
