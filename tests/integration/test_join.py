"""One line and a rented machine works: daemons and commands as a user starts them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from echo2.config import load_config
from echo2.learner_client import LearnerClient
from echo2.learner_transport import SocketTransport
from echo2.messages import VersionPublished
from echo2.net.token_book import TokenBook
from echo2.types import Task, Version

DEADLINE_S = 240.0
ECHO2 = (sys.executable, "-m", "echo2.cli")
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
slots = 2

[worker.null]
tokens_mean = 8
tokens_per_s = 200

[sampling]
max_tokens = 4
"""


class Fleet:
    """A run folder, the processes that were started on it, and what they left there."""

    def __init__(self, folder: Path) -> None:
        self.config = folder / "run.toml"
        self.config.write_text(CONFIG)
        self.run_dir = folder / "run"
        self.far = folder / "far"
        self.processes: list[asyncio.subprocess.Process] = []
        self._log = (folder / "processes.log").open("ab")

    async def start(self, *arguments: object) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *ECHO2,
            *map(str, arguments),
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.processes.append(process)
        return process

    async def coordinator(self) -> asyncio.subprocess.Process:
        process = await self.start("coordinator", self.config, "--run-dir", self.run_dir)
        await self.until(lambda: self.record().get("pid") == process.pid)
        return process

    async def joins(self, token: str, *settings: str) -> asyncio.subprocess.Process:
        given = [word for setting in settings for word in ("--set", setting)]
        return await self.start("worker", "--join", token, "--run-dir", self.far, *given)

    async def says(self, *arguments: object) -> str:
        """What a command prints that ends well."""
        process = await asyncio.create_subprocess_exec(
            *ECHO2, *map(str, arguments), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        return out.decode()

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

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():  # noqa: ASYNC110  what it looks at is files
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        for process in self.processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        self._log.close()
        print((self.config.parent / "processes.log").read_text(errors="replace")[-8000:])


@contextlib.asynccontextmanager
async def a_fleet(folder: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(folder)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield fleet
    finally:
        await fleet.close()


@contextlib.asynccontextmanager
async def a_learner(fleet: Fleet) -> AsyncIterator[LearnerClient]:
    def tasks(start: int, count: int) -> tuple[list[Task], bool]:
        return [Task(i, "{}") for i in range(start, start + count)], False

    transport = SocketTransport(load_config(fleet.config), fleet.run_dir)
    client = LearnerClient(transport, tasks=tasks)
    try:
        await client.start(resume_step=0)
        yield client
    finally:
        await client.close("test over", finished=False)


async def steps(learner: LearnerClient, first: int, last: int) -> list[str]:
    """Who sampled the groups that were trained."""
    workers: list[str] = []
    for step in range(first, last):
        await learner.publish(
            VersionPublished(
                version=Version(1, step),
                manifest_digest=f"{step:064x}",
                assets_digest="",
                num_bytes=1,
                origin="",
                origin_key="",
            )
        )
        batch = await learner.next_batch(step)
        assert batch is not None
        workers += [group.worker for group in batch.groups]
        await learner.complete(step, train_s=0.0, wait_s=0.0, mismatch=())
    return workers


async def test_a_machine_joins_by_one_line_comes_back_by_the_same_and_is_revoked(
    tmp_path: Path,
) -> None:
    async with a_fleet(tmp_path) as fleet:
        await fleet.coordinator()
        made = await fleet.says("token", "create", fleet.config, "--run-dir", fleet.run_dir)
        token = made.strip()
        assert made == f"{token}\n"
        worker = await fleet.joins(token, "worker.price_usd_per_h=0.25")
        async with a_learner(fleet) as learner:
            assert set(await steps(learner, 0, 2)) == {"joined-1"}

            worker.kill()
            await worker.wait()
            assert TokenBook(fleet.run_dir / "keys").records()[0].uses_left == 0
            again = await fleet.joins(token, "net.connect_timeout_s=3")
            assert set(await steps(learner, 2, 4)) == {"joined-1"}
            assert len(fleet.events("worker_enrolled")) == 1, "the same machine, the same key"

            told = await fleet.says(
                "keys", "revoke", "joined-1", fleet.config, "--run-dir", fleet.run_dir
            )
            assert told.startswith("joined-1 may connect no more")
            await fleet.until(
                lambda: any(
                    event["reason"] == "its key was revoked"
                    for event in fleet.events("worker_gone")
                )
            )
            assert await again.wait() == 1, "it gives up, and says why"
            assert fleet.events("handshake_refused")[-1]["reason"] == "stranger"


async def test_a_token_is_made_before_the_coordinator_was_ever_started(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    async with a_fleet(tmp_path) as fleet:
        fleet.config.write_text(f"{CONFIG}\n[net]\njoin_port = {port}\n")
        made = await fleet.says("token", "create", fleet.config, "--run-dir", fleet.run_dir)
        await fleet.joins(made.strip())  # it waits for the coordinator
        await fleet.coordinator()
        async with a_learner(fleet) as learner:
            assert set(await steps(learner, 0, 1)) == {"joined-1"}


async def test_a_joined_worker_outlives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    """Its ports were chosen by the system, and are taken up again."""
    async with a_fleet(tmp_path) as fleet:
        first = await fleet.coordinator()
        made = await fleet.says("token", "create", "--run-dir", fleet.run_dir)
        await fleet.joins(made.strip())
        await fleet.until(lambda: fleet.events("worker_joined"))
        before = fleet.record()
        first.kill()
        await first.wait()
        await fleet.coordinator()
        after = fleet.record()
        for lane in ("control", "rollouts", "join"):
            assert after[lane] == before[lane]
        async with a_learner(fleet) as learner:
            assert set(await steps(learner, 0, 2)) == {"joined-1"}


@pytest.mark.parametrize("token", ["echo2join1_x", "nonsense"])
async def test_what_is_no_token_ends_the_worker_with_2(tmp_path: Path, token: str) -> None:
    async with a_fleet(tmp_path) as fleet:
        worker = await fleet.joins(token)
        assert await worker.wait() == 2
