"""The coordinator over real sockets with CURVE: a learner session, a scripted worker."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from echo2.config import Config, config_from_mapping
from echo2.errors import ConfigError, FencedError, RefusedError
from echo2.learner_client import LearnerClient
from echo2.learner_session import LearnerSession
from echo2.learner_transport import SocketTransport
from echo2.messages import (
    PROTOCOL,
    GroupAcknowledged,
    GroupResult,
    Heartbeat,
    Lane,
    LaneOpened,
    LeaseGranted,
    Message,
    Refused,
    Role,
    Shutdown,
    VersionAnnounced,
    VersionInstalled,
    VersionPublished,
    WorkerHello,
    WorkerWelcome,
)
from echo2.net.auth import AllowList, load_or_create_key
from echo2.net.dealer import Dealer
from echo2.net.sockets import close_context, make_context
from echo2.service import Coordinator
from echo2.types import GroupMismatch, Sampling, Span, Task, TrajectoryHeader, Version

R, G = 4, 2


def a_config(**tables: dict[str, object]) -> Config:
    base: dict[str, dict[str, object]] = {
        "environment": {"name": "null"},
        "learner": {"groups_per_step": R},
        "dispatch": {"group_size": G},
        "worker": {"engine": "null"},
        "heartbeat": {"interval_s": 0.2, "suspect_s": 20.0, "gone_s": 40.0},
        "log": {"level": "warning"},
    }
    for name, table in tables.items():
        base[name] = {**base.get(name, {}), **table}
    return config_from_mapping(base)


class ScriptedWorker:
    """Speaks the worker's protocol; answers each lease at once with two tokens."""

    def __init__(
        self, run_dir: Path, name: str = "w-1", protocol: int = PROTOCOL, relay_key: str = ""
    ) -> None:
        self.name, self.protocol, self.relay_key = name, protocol, relay_key
        self.record = json.loads((run_dir / "coordinator.json").read_text())
        self.keys = load_or_create_key(run_dir / "keys" / f"{name}.key")
        AllowList(run_dir / "keys" / "authorized").authorize(name, self.keys.public)
        self.context = make_context()
        self.received: list[Message] = []
        self.news = asyncio.Event()
        self.version: Version | None = None
        self.tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self.dealers = {}
        for lane in (Lane.CONTROL, Lane.ROLLOUTS):
            dealer = Dealer(
                self.context,
                lane=lane,
                role=Role.WORKER,
                endpoint=self.record[lane.value],
                server_key=self.record["public_key"],
                keys=self.keys,
                name=self.name,
                greeting=LaneOpened if lane is Lane.ROLLOUTS else None,
            )
            await dealer.start()
            self.dealers[lane] = dealer
            self.tasks.append(asyncio.create_task(self._receive(dealer)))
        await self.dealers[Lane.CONTROL].wait_connected(20)
        self.send(
            WorkerHello(
                protocol=self.protocol,
                echo2_version="0",
                name=self.name,
                engine="null",
                precision="none",
                on_update="continue",
                environment="null",
                slots=8,
                relay_key=self.relay_key,
            )
        )

    async def stop(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for dealer in self.dealers.values():
            await dealer.stop()
        await close_context(self.context)

    def send(self, message: Message) -> None:
        assert self.dealers[message.LANE].send(message)

    async def _receive(self, dealer: Dealer) -> None:
        while True:
            message = await dealer.receive()
            self.received.append(message)
            self.react(message)
            self.news.set()

    def react(self, message: Message) -> None:
        match message:
            case VersionAnnounced():
                self.version = message.version
                self.send(
                    VersionInstalled(
                        version=message.version,
                        manifest_digest=message.manifest_digest,
                        fetch_s=0,
                        install_s=0,
                        pause_s=0,
                    )
                )
            case LeaseGranted():
                self.send(self.result(message))

    def result(self, lease: LeaseGranted) -> GroupResult:
        headers = tuple(
            TrajectoryHeader(3, 1, 2, float(i), "stop", 1, (Span(lease.version, 1, 3),))
            for i in range(lease.group_size)
        )
        n = lease.group_size
        return GroupResult(
            lease=lease.lease,
            group=lease.group,
            attempt=lease.attempt,
            trajectories=headers,
            generate_s=0.1,
            environment_s=0.0,
            token_ids=np.arange(3 * n, dtype=np.int32).tobytes(),
            logprobs=np.zeros(3 * n, np.float32).tobytes(),
            loss_mask=np.tile(np.array([0, 1, 1], np.uint8), n).tobytes(),
        )

    async def wait_until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not is_true():
                self.news.clear()
                await self.news.wait()

    async def wait_for(self, kind: type[Message], count: int = 1) -> Message:
        await self.wait_until(lambda: sum(isinstance(m, kind) for m in self.received) >= count)
        return [m for m in self.received if isinstance(m, kind)][count - 1]


def published(version: Version) -> VersionPublished:
    return VersionPublished(
        version=version,
        manifest_digest=f"{version.incarnation:032x}{version.step:032x}",
        assets_digest="",
        num_bytes=1,
        origin="",
        origin_key="",
    )


def endless(start: int, count: int) -> tuple[list[Task], bool]:
    return [Task(i, "{}") for i in range(start, start + count)], False


@asynccontextmanager
async def a_learner(
    config: Config, run_dir: Path, tasks: Callable[[int, int], tuple[list[Task], bool]] = endless
) -> AsyncIterator[LearnerClient]:
    client = LearnerClient(SocketTransport(config, run_dir), tasks=tasks)
    try:
        yield client
    finally:
        await client.close("test over", finished=False)


@asynccontextmanager
async def a_worker(run_dir: Path, **options: object) -> AsyncIterator[ScriptedWorker]:
    worker = ScriptedWorker(run_dir, **options)  # type: ignore[arg-type]
    try:
        await worker.start()
        yield worker
    finally:
        await worker.stop()


def events(run_dir: Path, name: str) -> list[dict[str, object]]:
    lines = (run_dir / "events.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == name]


async def steps(client: LearnerClient, first: int, last: int, incarnation: int) -> None:
    for step in range(first, last):
        await client.publish(published(Version(incarnation, step)))
        batch = await client.next_batch(step)
        assert batch is not None
        assert len(batch.groups) == R
        assert batch.groups[0].token_ids == np.arange(3 * G, dtype=np.int32).tobytes()
        told = [GroupMismatch(batch.groups[0].group, 8, 0.5)]
        await client.complete(step, train_s=0.0, wait_s=0.0, mismatch=told)


async def test_batches_reach_a_learner_and_all_is_recorded(tmp_path: Path) -> None:
    config = a_config()
    async with (
        Coordinator(config, run_dir=tmp_path) as coordinator,
        a_worker(tmp_path) as worker,
        a_learner(config, tmp_path) as learner,
    ):
        welcome = await learner.start(resume_step=0)
        assert (welcome.incarnation, welcome.step) == (1, 0)
        await steps(learner, 0, 5, 1)
        await learner.publish(published(Version(1, 5)))
        eval_id = await learner.evaluate(
            Version(1, 5), [Task(i, "{}") for i in range(7)], Sampling(temperature=0.0), 1
        )
        result = await learner.wait_eval(eval_id, 60)
        assert (result.num_done, result.num_asked, result.reward_mean) == (7, 7, 0.0)
        worker.send(Heartbeat(sequence=1, state="ready", lease_tokens={}, tokens_per_s=12.0))
        async with aiohttp.ClientSession() as http:
            async with http.get(coordinator.http_url + "/health") as response:
                assert (await response.json())["ok"]
            async with http.get(coordinator.http_url + "/api/status") as response:
                status = await response.json()
            async with http.get(coordinator.http_url + "/metrics") as response:
                metrics = await response.text()
        assert status["step"] == 5
        assert status["workers"][0]["name"] == "w-1"
        assert status["workers"][0]["mismatch"] == 0.5
        assert 'echo2_groups_ended_total{end="trained"} 20.0' in metrics
        assert "echo2_staleness_steps_bucket" in metrics
        await learner.close("done", finished=True)
        assert await coordinator.run_until_finished() == 0
        await worker.wait_for(Shutdown)
    trained = [e for e in events(tmp_path, "group_ended") if e["end"] == "trained"]
    assert len(trained) == 5 * R
    assert all(0 <= e["trained_at"] - e["min_version"] <= 2 for e in trained)  # type: ignore[operator]
    assert events(tmp_path, "run_finished")[0]["finished"] is True


async def test_another_protocol_is_refused_with_both_numbers(tmp_path: Path) -> None:
    async with (
        Coordinator(a_config(), run_dir=tmp_path),
        a_worker(tmp_path, protocol=PROTOCOL + 41) as worker,
    ):
        refused = await worker.wait_for(Refused)
        assert isinstance(refused, Refused)
        assert refused.fatal
        assert f"protocol {PROTOCOL}," in refused.text
        assert f"speaks {PROTOCOL + 41}" in refused.text


async def test_a_relay_key_that_is_another_than_the_worker_s_own_is_refused(
    tmp_path: Path,
) -> None:
    async with (
        Coordinator(a_config(), run_dir=tmp_path) as coordinator,
        a_worker(tmp_path, relay_key=coordinator.public_key) as worker,
    ):
        refused = await worker.wait_for(Refused)
        assert isinstance(refused, Refused)
        assert (refused.reason, refused.fatal) == ("relay_key", True)
        assert worker.keys.public[:8] in refused.text


async def test_messages_before_the_hello_are_refused_and_counted(tmp_path: Path) -> None:
    async with Coordinator(a_config(), run_dir=tmp_path) as coordinator:
        async with a_worker(tmp_path, protocol=PROTOCOL + 1) as worker:
            await worker.wait_for(Refused)
            worker.send(Heartbeat(sequence=1, state="ready", lease_tokens={}))
            second = await worker.wait_for(Refused, 2)
            assert isinstance(second, Refused)
            assert second.reason == "unknown_peer"
            assert not second.fatal
        assert coordinator.status()["refused"]["unknown_peer"] == 1


async def test_a_second_learner_fences_the_first(tmp_path: Path) -> None:
    config = a_config()
    async with (
        Coordinator(config, run_dir=tmp_path),
        a_worker(tmp_path),
        a_learner(config, tmp_path) as first,
    ):
        await first.start(resume_step=0)
        await steps(first, 0, 3, 1)
        await first.checkpoint_saved(2, (2,))
        async with a_learner(config, tmp_path) as second:
            welcome = await second.start(resume_step=2, checkpoint_steps=(2,))
            assert (welcome.incarnation, welcome.step) == (2, 2)
            with pytest.raises(FencedError, match="incarnation 2"):
                await steps(first, 3, 4, 1)
            await steps(second, 2, 4, 2)
    returned = events(tmp_path, "group_returned")
    assert len(returned) == R
    ends = [e["group_id"] for e in events(tmp_path, "group_ended") if e["end"] == "trained"]
    assert len(ends) == 5 * R
    assert len(set(ends)) == len(ends) - len(
        [e for e in returned if ends.count(e["group_id"]) == 2]
    )


async def test_learner_and_worker_go_on_after_the_coordinator_came_back(tmp_path: Path) -> None:
    config = a_config(heartbeat={"interval_s": 0.2, "suspect_s": 1.0, "gone_s": 2.0})
    async with a_learner_over_two(config, tmp_path) as (learner, _, restart):
        await steps(learner, 0, 2, 1)
        await restart()
        async with a_worker(tmp_path, name="w-2"):
            await steps(learner, 2, 4, 1)
    completed = [(e["incarnation"], e["step"]) for e in events(tmp_path, "step_completed")]
    assert completed == [(1, 0), (1, 1), (1, 2), (1, 3)]
    trained = [e["group_id"] for e in events(tmp_path, "group_ended") if e["end"] == "trained"]
    assert len(trained) == len(set(trained)) == 4 * R


async def test_acknowledged_groups_survive_a_coordinator_and_are_trained_without_a_worker(
    tmp_path: Path,
) -> None:
    config = a_config(heartbeat={"interval_s": 0.2, "suspect_s": 1.0, "gone_s": 2.0})
    async with a_learner_over_two(config, tmp_path) as (learner, worker, restart):
        await steps(learner, 0, 1, 1)
        await learner.publish(published(Version(1, 1)))
        # By now there is at least one more batch, since pacing lets workers work ahead.
        await worker.wait_for(GroupAcknowledged, 2 * R)
        accepted = {m.group for m in worker.received if isinstance(m, GroupAcknowledged)}
        await restart()
        batch = await learner.next_batch(1)
        assert batch is not None
        await learner.complete(1, train_s=0.0, wait_s=0.0, mismatch=())
    trained = [e["group_id"] for e in events(tmp_path, "group_ended") if e["end"] == "trained"]
    assert len(trained) == len(set(trained)) == 2 * R
    assert set(trained) <= accepted


@asynccontextmanager
async def a_learner_over_two(config: Config, run_dir: Path):  # type: ignore[no-untyped-def]
    """A learner, the first worker, and a function that ends that one and replaces the
    coordinator under the learner."""
    current = [Coordinator(config, run_dir=run_dir)]
    await current[0].__aenter__()
    worker = ScriptedWorker(run_dir)
    await worker.start()

    async def restart() -> None:
        await worker.stop()
        await close_without_goodbye(current[0])
        current[0] = Coordinator(config, run_dir=run_dir)
        await current[0].__aenter__()

    try:
        async with a_learner(config, run_dir) as learner:
            await learner.start(resume_step=0)
            yield learner, worker, restart
    finally:
        await current[0].__aexit__(None, None, None)


async def close_without_goodbye(coordinator: Coordinator) -> None:
    """As a crash looks from outside: sockets close, nobody is told."""
    await coordinator._exit.aclose()


def test_the_session_blocks_and_raises_in_the_learners_thread(tmp_path: Path) -> None:
    config = a_config()
    ready, over = threading.Event(), threading.Event()

    async def serve() -> None:
        async with Coordinator(config, run_dir=tmp_path), a_worker(tmp_path):
            ready.set()
            await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        session = LearnerSession(config, tmp_path, tasks=endless)
        welcome = session.start(resume_step=0)
        session.say("testing")
        keep_from = session.publish(published(Version(welcome.incarnation, 0)))
        assert keep_from == 0
        batch = session.next_batch(0)
        assert batch is not None
        session.complete(0, train_s=0.1, wait_s=0.1, mismatch=())
        session.checkpoint_saved(1, (1,))
        with pytest.raises(RefusedError, match="v is 1"):
            session.next_batch(7)
        assert session.poll_evals() == []
        session.close("done", finished=False)
    finally:
        over.set()
        thread.join(60)


async def test_a_group_that_is_acknowledged_is_acknowledged_once_more_when_repeated(
    tmp_path: Path,
) -> None:
    config = a_config()
    async with (
        Coordinator(config, run_dir=tmp_path),
        a_worker(tmp_path) as worker,
        a_learner(config, tmp_path) as learner,
    ):
        await learner.start(resume_step=0)
        await learner.publish(published(Version(1, 0)))
        lease = await worker.wait_for(LeaseGranted)
        assert isinstance(lease, LeaseGranted)

        def outcomes() -> list[str]:
            return [
                m.outcome
                for m in worker.received
                if isinstance(m, GroupAcknowledged) and m.lease == lease.lease
            ]

        await worker.wait_until(lambda: len(outcomes()) == 1)
        worker.send(worker.result(lease))
        await worker.wait_until(lambda: len(outcomes()) == 2)
        assert outcomes() == ["accepted", "duplicate"]
        assert any(isinstance(m, WorkerWelcome) for m in worker.received)


async def test_a_group_whose_frames_lie_fails_its_lease_and_reaches_no_learner(
    tmp_path: Path,
) -> None:
    class Liar(ScriptedWorker):
        """Its first group holds a logprob that is no number."""

        lies = 1

        def result(self, lease: LeaseGranted) -> GroupResult:
            honest = super().result(lease)
            if not self.lies:
                return honest
            self.lies = 0
            return dataclasses.replace(honest, logprobs=b"\xff" * len(honest.logprobs))

    config = a_config()
    async with (
        Coordinator(config, run_dir=tmp_path) as coordinator,
        a_learner(config, tmp_path) as learner,
    ):
        worker = Liar(tmp_path)
        try:
            await worker.start()
            await learner.start(resume_step=0)
            await steps(learner, 0, 2, 1)
        finally:
            await worker.stop()
        assert coordinator.status()["refused"]["frames"] == 1
    (failed,) = events(tmp_path, "lease_failed")
    assert "a behaviour logprob is nan" in str(failed["reason"])
    ended = events(tmp_path, "group_ended")
    assert {e["end"] for e in ended} == {"trained"}


async def test_a_folder_has_one_coordinator_and_is_free_when_it_ends(tmp_path: Path) -> None:
    async with Coordinator(a_config(), run_dir=tmp_path):
        with pytest.raises(ConfigError, match="has a coordinator already"):
            async with Coordinator(a_config(), run_dir=tmp_path):
                pass
    async with Coordinator(a_config(), run_dir=tmp_path):
        mode = (tmp_path / "config.resolved.toml").stat().st_mode
        assert mode & 0o077 == 0


async def test_a_strange_authorization_header_is_refused_like_any_other(tmp_path: Path) -> None:
    config = a_config(http={"token": "secret"})
    async with Coordinator(config, run_dir=tmp_path) as coordinator:
        host, _, port = coordinator.http_url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nAuthorization: \xff\xfe\r\n\r\n")
        assert (await reader.readline()).split()[1] == b"401"
        writer.close()
