"""Probes over real sockets: what a relay is, and what only looks like one."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq

from echo2.config import config_from_mapping
from echo2.core.events import Received
from echo2.messages import PROTOCOL, WorkerHello
from echo2.net.probe import probe_endpoint
from echo2.service import Coordinator
from echo2.types import PeerId

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def a_server(serve: Serve) -> AsyncIterator[str]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def a_relay() -> AsyncIterator[str]:
    """A ROUTER with CURVE, as relays listen with."""
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.curve_server = True
    router.curve_publickey, router.curve_secretkey = zmq.curve_keypair()
    router.bind("tcp://127.0.0.1:*")
    try:
        yield router.last_endpoint.decode()
    finally:
        router.close()
        context.term()


def a_closed_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


async def test_a_relay_greets_who_connects() -> None:
    async with a_relay() as endpoint:
        probe = await probe_endpoint(endpoint)
    assert (probe.ok, probe.reason) == (True, "")
    assert probe.rtt_s is not None
    assert probe.rtt_s >= 0


async def test_what_does_not_listen_was_not_reached() -> None:
    probe = await probe_endpoint(a_closed_port())
    assert (probe.ok, probe.rtt_s) == (False, None)
    assert "was not reached: " in probe.reason


@pytest.mark.parametrize("host", ["a" * 80, "no.such.host.invalid", "[::g]"])
async def test_what_is_no_host_was_not_reached(host: str) -> None:
    probe = await probe_endpoint(f"tcp://{host}:7000", timeout_s=20.0)
    assert not probe.ok
    assert f"tcp://{host}:7000" in probe.reason


@pytest.mark.parametrize(
    ("first", "reason"),
    [(b"HTTP/1.1 400", "speaks no ZMTP"), (b"", "closed the connection without a greeting")],
)
async def test_something_else_that_listens_is_no_relay(first: bytes, reason: str) -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        writer.close()

    async with a_server(serve) as endpoint:
        probe = await probe_endpoint(endpoint)
    assert not probe.ok
    assert reason in probe.reason


async def test_what_says_nothing_is_given_up() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with a_server(serve) as endpoint:
        probe = await probe_endpoint(endpoint, timeout_s=0.1)
    assert (probe.ok, probe.reason) == (False, f"{endpoint} did not greet within 0.1 s")


async def test_the_coordinator_probes_the_relay_of_each_hello(tmp_path: Path) -> None:
    config = config_from_mapping(
        {"environment": {"name": "null"}, "worker": {"engine": "null"}, "log": {"level": "error"}}
    )

    def probed() -> dict[str, bool]:
        lines = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
        return {line["worker"]: line["ok"] for line in lines if line["event"] == "relay_probed"}

    def hello(name: str, endpoint: str) -> Received:
        message = WorkerHello(
            protocol=PROTOCOL,
            echo2_version="0",
            name=name,
            engine="null",
            precision="none",
            on_update="continue",
            environment="null",
            slots=1,
            relay_endpoint=endpoint,
            relay_key=(name * 40)[:40],
        )
        return Received(PeerId(name), message)

    async with a_relay() as endpoint, Coordinator(config, run_dir=tmp_path) as coordinator:
        coordinator.feed(hello("a", endpoint))
        coordinator.feed(hello("b", a_closed_port()))
        async with asyncio.timeout(30):
            while len(probed()) < 2:  # noqa: ASYNC110  it looks at a file
                await asyncio.sleep(0.01)
        assert probed() == {"a": True, "b": False}
        relays = {w["name"]: w["relay"]["accepts"] for w in coordinator.status()["workers"]}
        assert relays == {"a": True, "b": False}
