"""A coordinator that runs, over real sockets: workers and learners that do not fit its run."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import numpy as np
from aiohttp import web
from bad_input import Bench, Told, case, run
from cases_weights import a_model

from echo2.config import Config, config_from_mapping
from echo2.core.records import LearnerRecorded
from echo2.core.worker_session import refusal_text
from echo2.errors import Echo2Error
from echo2.learner_client import LearnerClient
from echo2.learner_transport import SocketTransport
from echo2.ledger.database import Database
from echo2.ledger.durable import FILE
from echo2.messages import (
    PROTOCOL,
    Goodbye,
    GroupAcknowledged,
    GroupResult,
    Heartbeat,
    Lane,
    LaneOpened,
    LeaseGranted,
    Message,
    Refused,
    Role,
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
from echo2.types import Span, Task, TrajectoryHeader, Version

M = TypeVar("M", bound=Message)
DIGEST = "d" * 64


def a_config(**tables: dict[str, Any]) -> Config:
    return config_from_mapping(
        {
            "environment": {"name": "null"},
            "worker": {"engine": "null"},
            "learner": {"groups_per_step": 1},
            "dispatch": {"group_size": 1},
            "heartbeat": {"interval_s": 0.2, "suspect_s": 60.0, "gone_s": 90.0},
            "log": {"level": "error"},
            **tables,
        }
    )


class Worker:
    """Speaks the worker's protocol, as the case wants it to."""

    def __init__(self, coordinator: Coordinator, name: str = "w-1") -> None:
        self.name = name
        folder = coordinator.run_dir / "keys"
        self._keys = load_or_create_key(folder / f"{name}.key")
        AllowList(folder / "authorized").authorize(name, self._keys.public)
        self._context = make_context()
        self._coordinator = coordinator
        self._heard: list[Message] = []
        self._arrived = asyncio.Event()
        self._dealers: dict[Lane, Dealer] = {}

    async def __aenter__(self) -> Worker:
        endpoints = {
            Lane.CONTROL: self._coordinator.control_endpoint,
            Lane.ROLLOUTS: self._coordinator.rollouts_endpoint,
        }
        for lane, endpoint in endpoints.items():
            dealer = Dealer(
                self._context,
                lane=lane,
                role=Role.WORKER,
                endpoint=endpoint,
                server_key=self._coordinator.public_key,
                keys=self._keys,
                name=self.name,
                greeting=LaneOpened if lane is Lane.ROLLOUTS else None,
                on_message=self._hear,
            )
            await dealer.start()
            self._dealers[lane] = dealer
        return self

    async def __aexit__(self, *_: object) -> None:
        self.send(Goodbye(reason="the case is over"))
        for dealer in self._dealers.values():
            await dealer.stop()
        await close_context(self._context)

    def _hear(self, message: Message) -> None:
        self._heard.append(message)
        self._arrived.set()

    def send(self, message: Message) -> None:
        assert self._dealers[message.LANE].send(message)

    def hello(self, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "protocol": PROTOCOL,
            "echo2_version": "9.9",
            "name": self.name,
            "engine": "null",
            "precision": "none",
            "on_update": "continue",
            "environment": "null",
            "slots": 2,
        }
        self.send(WorkerHello(**(fields | changes)))

    async def hear(self, kind: type[M]) -> M:
        """The next message of this kind; others before it are passed over."""
        while True:
            while self._heard:
                message = self._heard.pop(0)
                if isinstance(message, kind):
                    return message
            self._arrived.clear()
            await self._arrived.wait()

    async def lease(self, learner: LearnerClient) -> LeaseGranted:
        """Join, install what the learner publishes, and get a lease."""
        self.hello()
        await self.hear(WorkerWelcome)
        await learner.publish(published(Version(1, 0)))
        announced = await self.hear(VersionAnnounced)
        self.send(
            VersionInstalled(
                version=announced.version,
                manifest_digest=announced.manifest_digest,
                fetch_s=0,
                install_s=0,
                pause_s=0,
            )
        )
        return await self.hear(LeaseGranted)


def a_result(lease: LeaseGranted, **changes: Any) -> GroupResult:
    version = changes.pop("version", lease.version)
    header = TrajectoryHeader(3, 1, 2, 1.0, "stop", 1, (Span(version, 1, 3),))
    fields: dict[str, Any] = {
        "lease": lease.lease,
        "group": lease.group,
        "attempt": lease.attempt,
        "trajectories": (header,),
        "generate_s": 0.1,
        "environment_s": 0.0,
        "token_ids": np.arange(3, dtype=np.int32).tobytes(),
        "logprobs": np.zeros(3, np.float32).tobytes(),
        "loss_mask": bytes([0, 1, 1]),
    }
    return GroupResult(**(fields | changes))


def published(version: Version) -> VersionPublished:
    return VersionPublished(
        version=version,
        manifest_digest=DIGEST,
        assets_digest="",
        num_bytes=1,
        origin="",
        origin_key="",
    )


def endless(start: int, count: int) -> tuple[list[Task], bool]:
    return [Task(index, "{}") for index in range(start, start + count)], False


@contextlib.asynccontextmanager
async def a_learner(coordinator: Coordinator, **options: Any) -> AsyncIterator[LearnerClient]:
    transport = SocketTransport(coordinator.config, coordinator.run_dir)
    client = LearnerClient(transport, tasks=endless, **options)
    try:
        yield client
    finally:
        await client.close("the case is over", finished=False)


Scene = Callable[[Coordinator], Any]


def at_a_coordinator(bench: Bench, scene: Scene, **tables: dict[str, Any]) -> Told:
    async def scenario() -> Told:
        async with Coordinator(a_config(**tables), run_dir=bench.run_dir) as coordinator:
            bench.hide(coordinator.run_id, "ID")
            told: Told = await scene(coordinator)
            return told

    return run(scenario())


def refused_worker(bench: Bench, **changes: Any) -> Told:
    async def scene(coordinator: Coordinator) -> Told:
        async with Worker(coordinator) as worker:
            worker.hello(**changes)
            refusal = await worker.hear(Refused)
            assert refusal.fatal
            assert not coordinator.status()["workers"]
            return bench.told("exit 1", refusal_text(refusal))

    return at_a_coordinator(bench, scene)


@case("a worker of a newer protocol")
def _(bench: Bench) -> Told:
    return refused_worker(bench, protocol=PROTOCOL + 1)


@case("a worker of another run")
def _(bench: Bench) -> Told:
    return refused_worker(bench, run_id="0123456789abcdef")


@case("a worker that is quarantined")
def _(bench: Bench) -> Told:
    text = "2 of its groups were refuted, the last (g9): 8 of 8 rewards are wrong: trajectory 0 "
    text += "claims 1, recomputed 0"
    told = {"cause": "rewards", "reason": text, "step": 4, "in_training": []}
    bench.run_dir.mkdir()
    database = Database(bench.run_dir / FILE)
    with database.transaction():
        database.learner(LearnerRecorded(1, 0))
        database.observe("worker_quarantined", {"worker": "w-1", **told}, 0)
    database.close()
    return refused_worker(bench)


@case("a worker with another environment")
def _(bench: Bench) -> Told:
    return refused_worker(bench, environment="my_package.sums:Sums")


@case("a worker with another version of the environment")
def _(bench: Bench) -> Told:
    async def scene(coordinator: Coordinator) -> Told:
        async with a_learner(coordinator, environment_version="2") as learner:
            await learner.start(resume_step=0)
            async with Worker(coordinator) as worker:
                worker.hello(environment_version="1")
                return bench.told("exit 1", refusal_text(await worker.hear(Refused)))

    return at_a_coordinator(bench, scene)


@case("a worker that speaks before its hello")
def _(bench: Bench) -> Told:
    async def scene(coordinator: Coordinator) -> Told:
        async with Worker(coordinator) as worker:
            worker.send(Heartbeat(sequence=1, state="ready", lease_tokens={}))
            refusal = await worker.hear(Refused)
            assert not refusal.fatal
            return bench.told("log", refusal_text(refusal))

    return at_a_coordinator(bench, scene)


def answered_result(bench: Bench, **changes: Any) -> Told:
    """What a worker is told of the result of its lease."""

    async def scene(coordinator: Coordinator) -> Told:
        async with a_learner(coordinator) as learner, Worker(coordinator) as worker:
            await learner.start(resume_step=0)
            lease = await worker.lease(learner)
            worker.send(a_result(lease, **changes))
            told = await worker.hear(GroupAcknowledged)
            assert coordinator.status()["buffer"]["total"] == 0
            return bench.told(f"acknowledged `{told.outcome}`", told.reason)

    return at_a_coordinator(bench, scene)


@case("a result of a version above v")
def _(bench: Bench) -> Told:
    return answered_result(bench, version=Version(1, 9))


@case("a result of a version that was never published")
def _(bench: Bench) -> Told:
    return answered_result(bench, version=Version(0, 0))


@case("a result with a trajectory too many")
def _(bench: Bench) -> Told:
    header = TrajectoryHeader(3, 1, 2, 1.0, "stop", 1, (Span(Version(1, 0), 1, 3),))
    return answered_result(
        bench,
        trajectories=(header, header),
        token_ids=bytes(24),
        logprobs=bytes(24),
        loss_mask=bytes([0, 1, 1] * 2),
    )


def failed_result(bench: Bench, **changes: Any) -> Told:
    """Why the lease of a group with such frames fails, as events.jsonl has it."""

    async def scene(coordinator: Coordinator) -> Told:
        async with a_learner(coordinator) as learner, Worker(coordinator) as worker:
            await learner.start(resume_step=0)
            lease = await worker.lease(learner)
            worker.send(a_result(lease, **changes))
            await worker.hear(GroupAcknowledged)
            assert coordinator.status()["buffer"]["total"] == 0
        lines = (coordinator.run_dir / "events.jsonl").read_text().splitlines()
        events = [json.loads(line) for line in lines]
        [failed] = [event for event in events if event["event"] == "lease_failed"]
        return bench.told("`lease_failed`", failed["reason"])

    return at_a_coordinator(bench, scene)


@case("a result with a logprob that is no number")
def _(bench: Bench) -> Told:
    return failed_result(bench, logprobs=np.array([0, np.nan, 0], np.float32).tobytes())


@case("a result whose mask and header differ")
def _(bench: Bench) -> Told:
    return failed_result(bench, loss_mask=bytes([0, 1, 0]))


@case("a result with a token below zero")
def _(bench: Bench) -> Told:
    return failed_result(bench, token_ids=np.array([0, -1, 0], np.int32).tobytes())


def refused_learner(bench: Bench, kept_step: int, **hello: Any) -> Told:
    """A learner sat down, kept a checkpoint of `kept_step`, and left; another says hello."""

    async def scene(coordinator: Coordinator) -> Told:
        async with a_learner(coordinator) as first:
            await first.start(resume_step=kept_step)
            await first.checkpoint_saved(kept_step, (kept_step,))
        options = {key: hello.pop(key) for key in ("run_id",) if key in hello}
        async with a_learner(coordinator, **options) as second:
            try:
                await second.start(**hello)
            except Echo2Error as error:
                return bench.told("exit 1", error)
        raise AssertionError("it was welcomed")

    return at_a_coordinator(bench, scene)


@case("a checkpoint that is ahead of the run")
def _(bench: Bench) -> Told:
    return refused_learner(bench, 0, resume_step=9)


@case("a checkpoint that is older than those kept")
def _(bench: Bench) -> Told:
    return refused_learner(bench, 5, resume_step=2)


@case("a learner of another run")
def _(bench: Bench) -> Told:
    return refused_learner(bench, 0, resume_step=0, run_id="0123456789abcdef")


@case("echo2 publish while a learner trains")
def _(bench: Bench) -> Told:
    async def scene(coordinator: Coordinator) -> Told:
        a_model(bench)
        async with a_learner(coordinator) as learner:
            await learner.start(resume_step=0)
            words = (bench.folder / "model", "--run-dir", bench.run_dir)
            return await asyncio.to_thread(bench.command, "publish", *words)

    return at_a_coordinator(bench, scene)


@case("a learner that a newer one has replaced")
def _(bench: Bench) -> Told:
    async def scene(coordinator: Coordinator) -> Told:
        async with a_learner(coordinator) as old, a_learner(coordinator) as new:
            await old.start(resume_step=0)
            await new.start(resume_step=0)
            try:
                await old.next_batch(0)
            except Echo2Error as error:
                return bench.told("exit 3", error)
        raise AssertionError("it got a batch")

    return at_a_coordinator(bench, scene)


@case("a version published twice with different bytes")
def _(bench: Bench) -> Told:
    async def scene(coordinator: Coordinator) -> Told:
        async with a_learner(coordinator) as learner:
            await learner.start(resume_step=0)
            first = published(Version(1, 0))
            await learner.publish(first)
            other = VersionPublished(
                version=first.version,
                manifest_digest="e" * 64,
                assets_digest="",
                num_bytes=1,
                origin="",
                origin_key="",
            )
            try:
                await learner.publish(other)
            except Echo2Error as error:
                return bench.told("exit 1", error)
        raise AssertionError("it was published")

    return at_a_coordinator(bench, scene)


@case("status with a wrong token")
def _(bench: Bench) -> Told:
    async def scene(coordinator: Coordinator) -> Told:
        words = ("--url", coordinator.http_url, "--token", "guessed")
        return await asyncio.to_thread(bench.command, "status", *words)

    return at_a_coordinator(bench, scene, http={"token": "secret"})


@case("status of a server that is no coordinator")
def _(bench: Bench) -> Told:
    async def scenario() -> Told:
        runner = web.AppRunner(web.Application())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            return await asyncio.to_thread(bench.command, "status", "--url", url)
        finally:
            await runner.cleanup()

    return run(scenario())


@case("tasks after the end of the tasks")
def _(bench: Bench) -> Told:
    async def scene(coordinator: Coordinator) -> Told:
        await coordinator.end_of_tasks()
        try:
            await coordinator.submit(["{}"])
        except Echo2Error as error:
            return bench.told("LearnerError", error)
        raise AssertionError("they were taken")

    return at_a_coordinator(bench, scene)
