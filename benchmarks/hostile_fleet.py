"""Those who belong here, for `hostile_peers.py`: each mode is a process of its own.

    hostile_fleet.py fleet RUN OUT --names w-1,w-2 [--learner] [--begins FILE]
                                                                 workers that deliver groups
    hostile_fleet.py relay FOLDER PEERS                          a worker's relay over its store
    hostile_fleet.py fetch OUT SETTINGS                          a peer that fetches chunks, again

Workers are bare protocol clients: a lease is answered with a group LEASE_S later, sent again until
it is acknowledged. OUT gets a line "time seconds" for each acknowledgement (from the first
delivery), or each window of chunks, and at SIGTERM a line of JSON with the sums. The learner takes
batches and completes them at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import time
from pathlib import Path
from typing import Any, Final, TextIO

import numpy as np
import uvloop
import zmq.asyncio

from echo2.config import config_from_mapping
from echo2.errors import Echo2Error
from echo2.learner_client import LearnerClient
from echo2.learner_transport import SocketTransport
from echo2.messages import (
    PROTOCOL,
    Chunk,
    ChunksRequest,
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
from echo2.net.dealer import Connection, Dealer
from echo2.net.keys import KeyPair, load_or_create_key
from echo2.net.relay import Relay
from echo2.net.sockets import close_context, make_context
from echo2.types import LeaseId, RelayPeer, Span, Task, TrajectoryHeader, Version
from echo2.weights.store import ChunkStore, write_version

LEASE_S: Final = 0.1
RESEND_S: Final = 2.0
HEARTBEAT_S: Final = 1.0
TOKENS: Final = 128
SLOTS: Final = 2
PERIOD: Final = 4
"""The run's staleness.period."""
WINDOW: Final = 4
FETCH_INTERVAL_S: Final = 0.2
LEAVE_S: Final = 30.0
WATCH_S: Final = 0.02


class Worker:
    """One worker's two lanes, and what it has delivered."""

    def __init__(self, context: zmq.asyncio.Context, run_dir: Path, name: str, out: TextIO) -> None:
        self.num_delivered = 0
        self.num_acknowledged = 0
        self.outcomes: dict[str, int] = {}
        self.refused: list[str] = []
        self.stopping = False
        self.settled = asyncio.Event()
        """No lease is at work, and nothing that was delivered is unacknowledged."""
        self.settled.set()
        self._name = name
        self._out = out
        self._rng = random.Random(name)
        self._at_work: set[LeaseId] = set()
        self._unacknowledged: dict[LeaseId, tuple[float, GroupResult]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        record = json.loads((run_dir / "coordinator.json").read_text(encoding="utf-8"))
        self._dealers = {
            lane: Dealer(
                context,
                lane=lane,
                role=Role.WORKER,
                endpoint=record[lane.value],
                server_key=record["public_key"],
                keys=load_or_create_key(run_dir / "keys" / f"{name}.key"),
                name=name,
                greeting=self._hello if lane is Lane.CONTROL else LaneOpened,
                on_message=self._take,
            )
            for lane in (Lane.CONTROL, Lane.ROLLOUTS)
        }

    async def start(self) -> None:
        for dealer in self._dealers.values():
            await dealer.start()
        self._own(self._beat())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for dealer in self._dealers.values():
            await dealer.stop()

    def _own(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hello(self) -> Message:
        return WorkerHello(
            protocol=PROTOCOL,
            echo2_version="0",
            name=self._name,
            engine="null",
            precision="none",
            on_update="continue",
            environment="null",
            slots=SLOTS,
        )

    def _send(self, message: Message) -> None:
        self._dealers[message.LANE].send(message)

    def _take(self, message: Message) -> None:
        match message:
            case WorkerWelcome():
                self._send(LaneOpened())
            case VersionAnnounced():
                self._send(
                    VersionInstalled(
                        version=message.version,
                        manifest_digest=message.manifest_digest,
                        fetch_s=0.0,
                        install_s=0.0,
                        pause_s=0.0,
                    )
                )
            case LeaseGranted() if not self.stopping:
                self._at_work.add(message.lease)
                self.settled.clear()
                self._own(self._generate(message))
            case GroupAcknowledged():
                self._acknowledged(message)
            case Refused():
                self.refused.append(f"{message.reason}: {message.text}")

    async def _generate(self, lease: LeaseGranted) -> None:
        await asyncio.sleep(LEASE_S * self._rng.uniform(0.5, 1.5))
        result = a_result(lease)
        self._unacknowledged[lease.lease] = time.time(), result
        self.num_delivered += 1
        while lease.lease in self._unacknowledged:
            self._send(result)
            await asyncio.sleep(RESEND_S)

    def _acknowledged(self, message: GroupAcknowledged) -> None:
        found = self._unacknowledged.pop(message.lease, None)
        if found is not None:
            now = time.time()
            self.num_acknowledged += 1
            self.outcomes[message.outcome] = self.outcomes.get(message.outcome, 0) + 1
            self._out.write(f"{now:.6f} {now - found[0]:.6f}\n")
            self._out.flush()
            self._at_work.discard(message.lease)
            if not self._at_work:
                self.settled.set()

    async def _beat(self) -> None:
        sequence = 0
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._dealers[Lane.CONTROL].state is Connection.CONNECTED:
                sequence += 1
                self._send(Heartbeat(sequence=sequence, state="ready", lease_tokens={}))


def a_result(lease: LeaseGranted) -> GroupResult:
    num = lease.group_size
    span = (Span(lease.version, 1, TOKENS),)
    headers = tuple(
        TrajectoryHeader(TOKENS, 1, TOKENS - 1, float(index), "stop", 1, span)
        for index in range(num)
    )
    mask = np.ones((num, TOKENS), np.uint8)
    mask[:, 0] = 0
    return GroupResult(
        lease=lease.lease,
        group=lease.group,
        attempt=lease.attempt,
        trajectories=headers,
        generate_s=LEASE_S,
        environment_s=0.0,
        token_ids=np.arange(num * TOKENS, dtype=np.int32).tobytes(),
        logprobs=np.zeros(num * TOKENS, np.float32).tobytes(),
        loss_mask=mask.tobytes(),
    )


async def fleet(
    run_dir: Path, out: Path, names: list[str], *, learns: bool, begins: Path | None
) -> None:
    stop = stop_event()
    context = make_context()
    while begins is not None and not begins.exists() and not stop.is_set():  # noqa: ASYNC110, ASYNC240  another process owes it
        await asyncio.sleep(WATCH_S)
    with out.open("w", encoding="utf-8") as file:
        workers = [Worker(context, run_dir, name, file) for name in names]
        learning = asyncio.create_task(learn(run_dir)) if learns else None
        try:
            for worker in workers:
                await worker.start()
            waiting = asyncio.create_task(stop.wait())
            await asyncio.wait(
                {waiting, learning} if learning is not None else {waiting},
                return_when=asyncio.FIRST_COMPLETED,
            )
            if learning is not None and learning.done():
                learning.result()
            for worker in workers:
                worker.stopping = True
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    for worker in workers:
                        await worker.settled.wait()
        finally:
            if learning is not None:
                learning.cancel()
                await asyncio.gather(learning, return_exceptions=True)
            for worker in workers:
                await worker.stop()
            await close_context(context)
        sums = {
            "delivered": sum(worker.num_delivered for worker in workers),
            "acknowledged": sum(worker.num_acknowledged for worker in workers),
            "outcomes": [worker.outcomes for worker in workers],
            "refused": [text for worker in workers for text in worker.refused],
        }
        file.write(json.dumps(sums) + "\n")


async def learn(run_dir: Path) -> None:
    """Batches are taken and completed at once, versions published as the period says."""
    config = config_from_mapping({"environment": {"name": "null"}, "worker": {"engine": "null"}})
    client = LearnerClient(SocketTransport(config, run_dir), tasks=endless)
    try:
        welcome = await client.start(resume_step=0)
        step = welcome.step
        while True:
            if step % PERIOD == 0:
                version = Version(welcome.incarnation, step)
                await client.publish(await asyncio.to_thread(a_version, run_dir, version))
            batch = await client.next_batch(step)
            if batch is None:
                raise Echo2Error("the endless stream of tasks ended")
            await client.complete(step, train_s=0.0, wait_s=0.0, mismatch={})
            step += 1
    finally:
        await client.close("the benchmark is over", finished=False)


def endless(start: int, count: int) -> tuple[list[Task], bool]:
    return [Task(index, "{}") for index in range(start, start + count)], False


def a_version(run_dir: Path, version: Version) -> VersionPublished:
    """A small one, so that what was published is there."""
    tensors = [("weight", "F32", (256,), np.full(256, version.step, np.float32).tobytes())]
    metadata = {"version": str(version)}
    manifest = write_version(run_dir / "versions", tensors, kind="weights", metadata=metadata)
    return VersionPublished(
        version=version,
        manifest_digest=manifest.manifest_digest,
        assets_digest="",
        num_bytes=manifest.num_bytes,
        origin="",
        origin_key="",
    )


async def relay(folder: Path, peers: Path) -> None:
    """Writes FOLDER/relay.json when it listens."""
    stop = stop_event()
    listed = json.loads(peers.read_text(encoding="utf-8"))  # noqa: ASYNC240  once, in the beginning
    keys = KeyPair.generate()
    context = make_context()
    store = ChunkStore(folder / "store", 1 << 40)
    async with Relay(context, store, keys=keys, name="relay", bind="tcp://127.0.0.1:0") as serving:
        serving.set_peers([RelayPeer(name, "", key) for name, key in listed.items()])
        record = {"endpoint": serving.endpoint, "public_key": keys.public}
        (folder / "relay.json").write_text(json.dumps(record), encoding="utf-8")
        waiting = asyncio.create_task(serving.wait())
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if waiting.done():
            waiting.result()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        router = serving._links._router
        assert router is not None
        sums = {"refused": dict(router.refused), "counters": dict(serving.server.counters)}
    await close_context(context)
    (folder / "relay_sums.json").write_text(json.dumps(sums), encoding="utf-8")


async def fetch(out: Path, settings: dict[str, Any]) -> None:
    """Windows of chunks, one after the other."""
    stop = stop_event()
    context = make_context()
    dealer = Dealer(
        context,
        lane=Lane.CHUNKS,
        role=Role.WORKER,
        endpoint=settings["endpoint"],
        server_key=settings["public_key"],
        server_role=Role(settings["role"]),
        keys=KeyPair.from_secret(settings["secret"]),
        name="fetcher",
    )
    await dealer.start()
    num_chunks, digest = settings["num_chunks"], settings["digest"]
    num_windows = 0
    with out.open("w", encoding="utf-8") as file:
        while not stop.is_set():
            first = num_windows * WINDOW % max(1, num_chunks - WINDOW)
            wanted = set(range(first, first + WINDOW))
            began = time.time()
            dealer.send(ChunksRequest(manifest_digest=digest, indexes=tuple(wanted)))
            async with asyncio.timeout(LEAVE_S):
                while wanted:
                    message = await dealer.receive()
                    if isinstance(message, Chunk):
                        wanted.discard(message.index)
            now = time.time()
            file.write(f"{now:.6f} {now - began:.6f}\n")
            file.flush()
            num_windows += 1
            await asyncio.sleep(FETCH_INTERVAL_S)
        file.write(json.dumps({"windows": num_windows}) + "\n")
    await dealer.stop(flush_s=0.0)
    await close_context(context)


def stop_event() -> asyncio.Event:
    """Set by SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    modes = parser.add_subparsers(dest="mode", required=True)
    of_fleet = modes.add_parser("fleet")
    of_fleet.add_argument("run_dir", type=Path)
    of_fleet.add_argument("out", type=Path)
    of_fleet.add_argument("--names", required=True)
    of_fleet.add_argument("--learner", action="store_true")
    of_fleet.add_argument("--begins", type=Path, help="wait until this file is there")
    of_relay = modes.add_parser("relay")
    of_relay.add_argument("folder", type=Path)
    of_relay.add_argument("peers", type=Path)
    of_fetch = modes.add_parser("fetch")
    of_fetch.add_argument("out", type=Path)
    of_fetch.add_argument("settings", type=Path)
    options = parser.parse_args()
    match options.mode:
        case "fleet":
            names = options.names.split(",")
            learns, begins = options.learner, options.begins
            uvloop.run(fleet(options.run_dir, options.out, names, learns=learns, begins=begins))
        case "relay":
            uvloop.run(relay(options.folder, options.peers))
        case "fetch":
            settings = json.loads(options.settings.read_text(encoding="utf-8"))
            uvloop.run(fetch(options.out, settings))


if __name__ == "__main__":
    main()
