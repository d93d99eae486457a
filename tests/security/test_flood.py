"""Many who knock: those who belong here get their answers, and no disk or memory fills."""

from __future__ import annotations

import asyncio
from pathlib import Path

import zmq

from echo2 import wire
from echo2.messages import Heartbeat, HeartbeatEcho, Lane, WorkerWelcome
from echo2.net.auth import KeyPair

from .ground import a_ground, a_hello, answer_of, until

STRANGERS = 150


async def test_a_flood_of_wrong_keys_keeps_no_worker_out(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        worker, _ = await ground.says_hello(ground.a_peer("w-1"), "w-1")
        assert isinstance(await answer_of(worker), WorkerWelcome)
        for number in range(STRANGERS):
            lane = (Lane.CONTROL, Lane.ROLLOUTS, Lane.ENROLMENT)[number % 3]
            raw = ground.raw(ground.endpoints[lane], KeyPair.generate())
            raw.send_multipart(wire.encode(a_hello()), zmq.NOBLOCK)
        for sequence in range(20):
            assert worker.send(Heartbeat(sequence=sequence, state="ready", lease_tokens={}))
            while not isinstance(answer := await answer_of(worker), HeartbeatEcho):
                pass
            assert answer.sequence == sequence
        await ground.says_hello(ground.a_peer("w-2"), "w-2")
        await until(lambda: ground.state()["workers"] == ["w-1", "w-2"])
        await until(
            lambda: (
                ground.refused.get("stranger", 0) >= STRANGERS // 3
                and ground.refused.get("token_unknown", 0) >= STRANGERS // 3
            )
        )
        told = ground.events("handshake_refused")
        assert 0 < len(told) < STRANGERS // 2, "a flood does not fill the records"
        assert ground.state()["workers"] == ["w-1", "w-2"]


async def test_connections_that_say_nothing_keep_no_worker_out(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        host, _, port = ground.endpoints[Lane.CONTROL].removeprefix("tcp://").rpartition(":")
        silent = []
        for _ in range(STRANGERS):
            silent.append(await asyncio.open_connection(host, int(port)))
        try:
            await ground.says_hello(ground.a_peer("w-1"), "w-1")
            await until(lambda: ground.state()["workers"] == ["w-1"])
        finally:
            for _, writer in silent:
                writer.close()
