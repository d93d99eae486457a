"""A message of several frames passes a socket as a whole, and large ones without a copy."""

from __future__ import annotations

from typing import cast

import zmq

from echo2.net.multipart import COPIED_BYTES, send_frames


class Socket:
    """What was handed over, and how."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, bool, bool]] = []

    def send(self, frame: bytes, flags: int, *, copy: bool) -> None:
        assert flags & zmq.NOBLOCK
        self.frames.append((frame, bool(flags & zmq.SNDMORE), copy))


def test_a_message_leaves_as_a_whole_and_its_large_frames_are_not_copied() -> None:
    socket, large = Socket(), bytes(COPIED_BYTES)
    send_frames(cast("zmq.Socket[bytes]", socket), [b"route", b"header", large])
    assert socket.frames == [
        (b"route", True, True),
        (b"header", True, True),
        (large, False, False),
    ]
