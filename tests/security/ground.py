"""A coordinator with real sockets, and what attackers need: connections of their own making."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import zmq
import zmq.asyncio

from echo2.config import Config, config_from_mapping
from echo2.errors import RefusedError
from echo2.messages import (
    PROTOCOL,
    Enrol,
    Lane,
    LaneOpened,
    Message,
    Role,
    WorkerHello,
)
from echo2.net.auth import AllowList, KeyPair, load_or_create_key
from echo2.net.dealer import Dealer
from echo2.net.sockets import close_context, make_context
from echo2.net.token_book import TokenBook, TokenRecord
from echo2.service import Coordinator
from echo2.weights.origin import Origin
from echo2.weights.store import write_version

DEADLINE_S = 60.0
LANES = (Lane.CONTROL, Lane.ROLLOUTS, Lane.ENROLMENT)


def a_config(**tables: dict[str, Any]) -> Config:
    base: dict[str, dict[str, Any]] = {
        "environment": {"name": "null"},
        "worker": {"engine": "null"},
        "learner": {"groups_per_step": 2},
        "dispatch": {"group_size": 2},
        "heartbeat": {"interval_s": 0.2, "suspect_s": 30.0, "gone_s": 60.0},
        "log": {"level": "warning"},
    }
    return config_from_mapping({**base, **tables})


class Ground:
    """A run, and a context of the attackers'."""

    def __init__(self, coordinator: Coordinator, run_dir: Path) -> None:
        self.coordinator = coordinator
        self.run_dir = run_dir
        self.record = json.loads((run_dir / "coordinator.json").read_text())
        self.endpoints = {
            Lane.CONTROL: self.record["control"],
            Lane.ROLLOUTS: self.record["rollouts"],
            Lane.ENROLMENT: self.record["join"],
        }
        self.server_key: str = self.record["public_key"]
        self.book = TokenBook(run_dir / "keys")
        self.allow_list = AllowList(run_dir / "keys" / "authorized")
        self.context = make_context()
        self.stack = contextlib.AsyncExitStack()

    # --------------------------------------------------------------------- who they are

    def a_peer(self, name: str) -> KeyPair:
        """A key on the allow-list."""
        keys = load_or_create_key(self.run_dir / "keys" / f"{name}.key")
        self.allow_list.authorize(name, keys.public)
        return keys

    def a_token(self, *, now: float, **wish: Any) -> tuple[TokenRecord, KeyPair]:
        return self.book.make(**{"expires_s": 3600.0, "now": now, **wish})

    # ------------------------------------------------------------------- how they come

    async def dials(
        self,
        lane: Lane,
        keys: KeyPair,
        *,
        endpoint: str = "",
        role: Role = Role.WORKER,
        **more: Any,
    ) -> Dealer:
        dealer = Dealer(
            self.context,
            lane=lane,
            role=role,
            endpoint=endpoint or self.endpoints[lane],
            server_key=more.pop("server_key", self.server_key),
            keys=keys,
            name="attacker",
            **more,
        )
        await dealer.start()
        self.stack.push_async_callback(dealer.stop, flush_s=0.0)
        return dealer

    async def is_refused(self, lane: Lane, keys: KeyPair, **more: Any) -> None:
        """At the handshake: nothing is ever received."""
        dealer = await self.dials(lane, keys, **more)
        with pytest.raises(RefusedError):
            await dealer.wait_connected(DEADLINE_S)
        assert dealer.counters["received"] == 0

    async def gets_in(self, lane: Lane, keys: KeyPair, **more: Any) -> Dealer:
        dealer = await self.dials(lane, keys, **more)
        await dealer.wait_connected(DEADLINE_S)
        return dealer

    async def says_hello(self, keys: KeyPair, name: str) -> tuple[Dealer, Dealer]:
        """A worker's two lanes, after its hello."""
        control = await self.gets_in(Lane.CONTROL, keys)
        rollouts = await self.gets_in(Lane.ROLLOUTS, keys, greeting=LaneOpened)
        assert control.send(a_hello(name))
        return control, rollouts

    def raw(self, endpoint: str, keys: KeyPair | None, server_key: str = "") -> zmq.Socket[bytes]:
        """A peer that speaks ZeroMQ and nothing else of ours; plain without `keys`."""
        context = cast("zmq.Context[zmq.Socket[bytes]]", self.context)
        socket = context.socket(zmq.DEALER, socket_class=zmq.Socket)
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, (server_key or self.server_key).encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self.stack.callback(socket.close)
        socket.connect(endpoint)
        return socket

    # ------------------------------------------------------------------- what came of it

    @property
    def refused(self) -> dict[str, int]:
        """By reason, as `echo2 status` shows them."""
        return dict(self.coordinator.status()["refused"])

    async def counts(self, reason: str, at_least: int = 1) -> None:
        await until(lambda: self.refused.get(reason, 0) >= at_least)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["event"] == name]

    def state(self) -> dict[str, Any]:
        """Everything that an attacker must leave as it was."""
        status = self.coordinator.status()
        return {
            "workers": [worker["name"] for worker in status["workers"]],
            "learner": status["learner"] and status["learner"]["name"],
            "step": status["step"],
            "leases": status["leases"],
            "groups": status["groups"],
            "keys": {
                str(path.relative_to(self.run_dir)): path.read_bytes()
                for path in sorted((self.run_dir / "keys").rglob("*"))
                if path.is_file()
            },
            "outside": sorted(path.name for path in self.run_dir.parent.iterdir()),
        }

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        before = self.state()
        yield
        assert self.state() == before


@contextlib.asynccontextmanager
async def a_ground(tmp_path: Path, config: Config | None = None) -> AsyncIterator[Ground]:
    run_dir = tmp_path / "run"
    async with Coordinator(config or a_config(), run_dir=run_dir) as coordinator:
        ground = Ground(coordinator, run_dir)
        try:
            yield ground
        finally:
            await ground.stack.aclose()
            await close_context(ground.context)


async def until(condition: Callable[[], object]) -> None:
    """Wait for what the other end does in its own time."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  what it looks at is plain data
            await asyncio.sleep(0.01)


async def answer_of(dealer: Dealer) -> Message:
    async with asyncio.timeout(DEADLINE_S):
        return await dealer.receive()


def a_hello(name: str = "w-1") -> WorkerHello:
    return WorkerHello(
        protocol=PROTOCOL,
        echo2_version="0",
        name=name,
        engine="null",
        precision="none",
        on_update="continue",
        environment="null",
        slots=4,
    )


def an_enrolment(public_key: str, name: str = "") -> Enrol:
    return Enrol(protocol=PROTOCOL, echo2_version="0", public_key=public_key, name=name)


def a_version(folder: Path) -> str:
    """Written to a store; its manifest's digest."""
    tensors = [("weight", "F32", (1024,), memoryview(bytes(4096)))]
    return write_version(folder, tensors, kind="weights", metadata={}).manifest_digest


@contextlib.asynccontextmanager
async def an_origin(ground: Ground) -> AsyncIterator[tuple[Origin, str]]:
    """The run's origin, in this process, and the manifest's digest of a version that it has."""
    digest = a_version(ground.run_dir / "versions")
    context = make_context()
    origin = Origin(context, ground.coordinator.config, ground.run_dir)
    try:
        await origin.start()
        yield origin, digest
    finally:
        await origin.stop()
        await close_context(context)
