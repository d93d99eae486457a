"""The framing alone; a stream is fed by hand. Processes: tests/integration/test_pipe.py."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterable
from typing import Any, cast

import pytest

from echo2 import wire
from echo2.errors import LocalProtocolError, RemoteProtocolError
from echo2.net import pipe as pipe_module
from echo2.net.pipe import Pipe, PipeBrokenError


class Recorder:
    """What a StreamWriter would have sent."""

    def __init__(self) -> None:
        self.sent = b""

    def writelines(self, parts: Iterable[bytes]) -> None:
        self.sent += b"".join(parts)

    async def drain(self) -> None: ...

    def is_closing(self) -> bool:
        return False


def bytes_of(header: dict[str, Any], frames: list[Any]) -> bytes:
    async def send() -> bytes:
        writer = Recorder()
        pipe = Pipe(asyncio.StreamReader(), cast(asyncio.StreamWriter, writer))
        await pipe.send(header, frames)
        assert not writer.sent, "it goes with what else is sent in this turn"
        await asyncio.sleep(0)
        return writer.sent

    return asyncio.run(send())


def a_piece(content: bytes) -> bytes:
    """What a stream holds of messages that were sent together."""
    return struct.pack(">I", len(content)) + content


def received(stream: bytes) -> list[tuple[dict[str, Any], list[bytes]]]:
    """All messages of a stream that ends."""

    async def receive() -> list[tuple[dict[str, Any], list[bytes]]]:
        reader = asyncio.StreamReader()
        reader.feed_data(stream)
        reader.feed_eof()
        pipe = Pipe(reader, cast(asyncio.StreamWriter, Recorder()))
        messages = []
        while (message := await pipe.receive()) is not None:
            messages.append(message)
        return messages

    return asyncio.run(receive())


def test_messages_come_back_in_order() -> None:
    first = ({"op": "generate", "ids": [1, 2], "raw": b"\0"}, [b"abc", b"", b"x" * 100_000])
    second: tuple[dict[str, Any], list[bytes]] = ({}, [])
    assert received(bytes_of(*first) + bytes_of(*second)) == [first, second]


def test_what_is_sent_in_one_turn_is_one_piece_and_large_messages_do_not_wait() -> None:
    async def scenario() -> tuple[bytes, bytes]:
        writer = Recorder()
        pipe = Pipe(asyncio.StreamReader(), cast(asyncio.StreamWriter, writer))
        await asyncio.gather(*(pipe.send({"n": n}, [b"abc"]) for n in range(3)))
        await asyncio.sleep(0)
        small = writer.sent
        await pipe.send({}, [bytes(pipe_module.PIECE_BYTES)])
        return small, writer.sent[len(small) :]

    small, large = asyncio.run(scenario())
    assert struct.unpack_from(">I", small)[0] == len(small) - 4
    assert received(small) == [({"n": n}, [b"abc"]) for n in range(3)]
    assert len(large) > pipe_module.PIECE_BYTES


def test_frames_may_be_views_of_any_item_size() -> None:
    floats = memoryview(struct.pack("3f", 1, 2, 3)).cast("f")
    assert received(bytes_of({}, [floats])) == [({}, [floats.tobytes()])]


def test_the_end_at_a_border_is_none_and_within_a_message_an_error() -> None:
    whole = bytes_of({"op": 1}, [b"abc"])
    assert received(b"") == []
    for cut in range(1, len(whole)):
        with pytest.raises(PipeBrokenError, match="within a message"):
            received(whole[:cut])


@pytest.mark.parametrize(
    "head",
    [
        struct.pack(">II", pipe_module.HEADER_MAX_BYTES + 1, 0),
        struct.pack(">II", 1, pipe_module.FRAMES_MAX + 1),
        struct.pack(">II2I", 1, 2, 2**30, 2**30),
    ],
)
def test_sizes_are_refused_before_anything_is_made_of_them(head: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="at most") as caught:
        received(a_piece(head))
    assert caught.value.reason == "oversized"


def test_a_piece_beyond_all_bounds_is_refused_before_it_is_read() -> None:
    with pytest.raises(RemoteProtocolError, match="a piece of 4294967295 bytes is coming"):
        received(b"\xff" * 8)


@pytest.mark.parametrize("cut", [1, 7, 9, 12, 20])
def test_a_message_that_ends_within_its_piece_is_refused(cut: int) -> None:
    whole = bytes_of({"op": 1}, [b"abc", b"de"])[4:]
    with pytest.raises(RemoteProtocolError):
        received(a_piece(whole[:cut]))


@pytest.mark.parametrize("header", [b"\xc1", wire.pack([1]), wire.pack({}) + b"\0"])
def test_a_header_that_is_no_dict_is_refused(header: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        received(a_piece(struct.pack(">II", len(header), 0) + header))


def test_what_could_not_be_received_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match="send it in parts"):
        bytes_of({}, [b""] * (pipe_module.FRAMES_MAX + 1))
    with pytest.raises(LocalProtocolError, match="send it in parts"):
        bytes_of({"text": "x" * pipe_module.HEADER_MAX_BYTES}, [])
    with pytest.raises(LocalProtocolError, match="cannot be packed"):
        bytes_of({"a": object()}, [])
