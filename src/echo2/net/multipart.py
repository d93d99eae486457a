"""How a message of several frames passes a socket: as a whole, and large ones without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import zmq

from echo2 import wire

COPIED_BYTES: Final = 64 << 10
"""Smaller frames are copied: to share one with ZeroMQ's thread costs more."""
_LAST: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
"""Plain numbers: pyzmq joins its flags in Python for each frame, which takes longer."""


def send_frames(socket: zmq.Socket[Any], frames: Sequence[bytes]) -> None:
    """Hand one message over, or raise zmq.Again: once the first frame is taken, all are."""
    *others, last = frames
    for frame in others:
        socket.send(frame, _MORE, copy=len(frame) < COPIED_BYTES)
    socket.send(last, _LAST, copy=len(last) < COPIED_BYTES)


def receive_frames(socket: zmq.Socket[Any]) -> list[zmq.Frame]:
    """One message, of which at most one frame more than any message has is kept; zmq.Again
    when there is none."""
    frames = [socket.recv(_LAST, copy=False)]
    while frames[-1].more:
        frame = socket.recv(copy=False)  # parts of one message come together
        if len(frames) > wire.FRAMES_MAX + 1:
            frames.pop()
        frames.append(frame)
    return frames
