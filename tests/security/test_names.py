"""Nobody is who it says it is: a peer is the name of its key, and speaks as that only."""

from __future__ import annotations

from pathlib import Path

import zmq

from echo2 import wire
from echo2.messages import (
    PROTOCOL,
    BatchRequest,
    Goodbye,
    Lane,
    LearnerHello,
)

from .ground import a_ground, a_hello, until


async def test_a_hello_in_another_worker_s_name_is_the_sender_s_own(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        await ground.says_hello(ground.a_peer("w-1"), "w-1")
        await until(lambda: ground.state()["workers"] == ["w-1"])
        await ground.says_hello(ground.a_peer("w-2"), "w-1")
        await until(lambda: ground.state()["workers"] == ["w-1", "w-2"])


async def test_a_routing_id_and_metadata_of_somebody_else_change_nothing(tmp_path: Path) -> None:
    async with a_ground(tmp_path) as ground:
        victim, _ = await ground.says_hello(ground.a_peer("w-1"), "w-1")
        await until(lambda: ground.state()["workers"] == ["w-1"])
        keys = ground.a_peer("w-2")
        raw = ground.raw(ground.endpoints[Lane.ROLLOUTS], None)  # one more that gets nothing
        forged = raw.context.socket(zmq.DEALER)
        ground.stack.callback(forged.close, 0)
        forged.setsockopt(zmq.ROUTING_ID, b"w-1")
        forged.setsockopt(zmq.METADATA, b"X-User-Id:w-1")
        forged.setsockopt(zmq.CURVE_SERVERKEY, ground.server_key.encode())
        forged.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        forged.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        forged.connect(ground.endpoints[Lane.CONTROL])
        forged.send_multipart(wire.encode(Goodbye(reason="w-1 leaves")))
        forged.send_multipart(wire.encode(a_hello("w-1")))
        await until(lambda: "w-2" in ground.state()["workers"])
        assert ground.state()["workers"] == ["w-1", "w-2"]
        assert victim.state == "connected"


async def test_a_worker_cannot_speak_as_the_learner(tmp_path: Path) -> None:
    hello = LearnerHello(protocol=PROTOCOL, echo2_version="0", name="learner", resume_step=0)
    asks = BatchRequest(incarnation=1, step=0)
    async with a_ground(tmp_path) as ground:
        keys = ground.a_peer("w-1")
        with ground.unchanged():
            raw = ground.raw(ground.endpoints[Lane.CONTROL], keys)
            for message in (hello, asks):
                raw.send_multipart(wire.encode(message))
            await ground.counts("wrong_sender", 2)
            assert not raw.poll(0)


async def test_a_name_that_only_looks_like_the_learner_s_is_a_worker_s(tmp_path: Path) -> None:
    hello = LearnerHello(protocol=PROTOCOL, echo2_version="0", name="learner", resume_step=0)
    async with a_ground(tmp_path) as ground:
        for name in ("learner2", "Learner", "the-learner", "learner.1"):
            keys = ground.a_peer(name)
            before = ground.refused.get("wrong_sender", 0)
            with ground.unchanged():
                raw = ground.raw(ground.endpoints[Lane.CONTROL], keys)
                raw.send_multipart(wire.encode(hello))
                await ground.counts("wrong_sender", before + 1)
        assert ground.state()["learner"] is None
