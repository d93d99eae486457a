"""Messages over real sockets that the protocol forbids, and peers that do not fit the run."""

from __future__ import annotations

import asyncio
from typing import Any

import zmq
import zmq.asyncio
from bad_input import Bench, Told, case, run

from echo2 import wire
from echo2.errors import ProtocolError
from echo2.messages import (
    HEADER_MAX_BYTES,
    BatchRequest,
    Heartbeat,
    Lane,
    LaneOpened,
    Message,
    Role,
)
from echo2.net.router import Router
from echo2.net.sockets import close_context, make_context


def header(name: str, **fields: Any) -> bytes:
    return wire.pack([name, fields])


A_HEARTBEAT = {"sequence": 1, "state": "ready", "lease_tokens": {}}


def refused(bench: Bench, frames: list[bytes], *, lane: Lane = Lane.CONTROL) -> Told:
    """What a lane of the coordinator says of a worker's message."""

    async def scenario() -> Told:
        context = make_context()
        answered: asyncio.Future[ProtocolError] = asyncio.get_running_loop().create_future()
        taken: list[Message] = []
        router = Router(
            context,
            lane=lane,
            role=Role.COORDINATOR,
            bind="tcp://127.0.0.1:*",
            keys=None,
            on_message=lambda peer, message: taken.append(message),
            on_refused=lambda peer, error: answered.set_result(error),
            client_roles=lambda peer: frozenset({Role.WORKER}),
        )
        await router.start()
        socket = context.socket(zmq.DEALER)
        try:
            socket.setsockopt(zmq.ROUTING_ID, b"w-1")
            socket.connect(router.endpoint)
            await socket.send_multipart(frames)
            error = await answered
            assert not taken
            assert router.refused == {error.reason: 1}
            return bench.told(f"log and count `{error.reason}`", error)
        finally:
            socket.close(linger=0)
            await router.stop()
            await close_context(context)

    return run(scenario())


@case("a message in the wrong lane")
def _(bench: Bench) -> Told:
    return refused(bench, wire.encode(LaneOpened()))


@case("a message that only the learner may send, from a worker")
def _(bench: Bench) -> Told:
    return refused(bench, wire.encode(BatchRequest(incarnation=1, step=0)))


@case("a message of a kind that is not known")
def _(bench: Bench) -> Told:
    return refused(bench, [header("GiveMeEverything", now=True)])


@case("bytes that are no MessagePack")
def _(bench: Bench) -> Told:
    return refused(bench, [b"\xc1GET / HTTP/1.1"])


@case("MessagePack that is no message")
def _(bench: Bench) -> Told:
    return refused(bench, [wire.pack({"Heartbeat": 1})])


@case("an extension type within a message")
def _(bench: Bench) -> Told:
    return refused(bench, [b"\x92\xa9Heartbeat\x81\xa8sequence\xd4\x05\x00"])


@case("a message with a field that is not known")
def _(bench: Bench) -> Told:
    return refused(bench, [header("Heartbeat", **A_HEARTBEAT, colour="red")])


@case("a message that lacks a field")
def _(bench: Bench) -> Told:
    return refused(bench, [header("Heartbeat", sequence=1, state="ready")])


@case("a message with a field of another type")
def _(bench: Bench) -> Told:
    return refused(bench, [header("Heartbeat", **{**A_HEARTBEAT, "sequence": "first"})])


@case("a message with a number out of its range")
def _(bench: Bench) -> Told:
    return refused(bench, [header("Heartbeat", **{**A_HEARTBEAT, "tokens_per_s": float("inf")})])


@case("a message with a name that is too long")
def _(bench: Bench) -> Told:
    return refused(bench, [header("Heartbeat", **{**A_HEARTBEAT, "state": "r" * 200})])


@case("a message with a map of too many entries")
def _(bench: Bench) -> Told:
    tokens = {f"l{index}": 1 for index in range(5000)}
    return refused(bench, [header("Heartbeat", **{**A_HEARTBEAT, "lease_tokens": tokens})])


@case("a header that is too long")
def _(bench: Bench) -> Told:
    return refused(bench, [bytes(HEADER_MAX_BYTES + 1)])


@case("a message with a frame too many")
def _(bench: Bench) -> Told:
    beat = Heartbeat(sequence=1, state="ready", lease_tokens={})
    return refused(bench, [*wire.encode(beat), b"more"])


@case("a message of very many frames")
def _(bench: Bench) -> Told:
    return refused(bench, [header("Heartbeat", **A_HEARTBEAT)] * 20)


def a_group(*, reward: float = 1.0) -> bytes:
    """The header of a group of one trajectory of three tokens."""
    trajectory = {
        "length": 3,
        "prompt_length": 1,
        "num_sampled": 2,
        "reward": reward,
        "finish": "stop",
        "num_turns": 1,
        "spans": [{"version": {"incarnation": 1, "step": 0}, "start": 1, "end": 3}],
    }
    return header(
        "GroupResult",
        lease="l1",
        group="g1",
        attempt=1,
        trajectories=[trajectory],
        generate_s=0.1,
        environment_s=0.0,
    )


@case("a group whose frames are shorter than its header says")
def _(bench: Bench) -> Told:
    return refused(bench, [a_group(), bytes(12), bytes(12), bytes(2)], lane=Lane.ROLLOUTS)


@case("a group with a reward that is no number")
def _(bench: Bench) -> Told:
    group = a_group(reward=float("nan"))
    return refused(bench, [group, bytes(12), bytes(12), bytes(3)], lane=Lane.ROLLOUTS)
