"""Encoded messages that wait for a socket: bounded in bytes, urgent ones first."""

from __future__ import annotations

from collections import deque
from typing import Final

URGENT_BYTES: Final = 64 << 10
"""What urgent messages may take beyond the bound."""


class OutQueue:
    """At most `bytes_max`; one message is always accepted into an empty queue."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._messages: deque[list[bytes]] = deque()
        self._num_bytes = 0
        self._num_urgent = 0
        """Of the first ones."""

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def credit(self) -> int:
        """Bytes that may be added now."""
        return max(0, self._bytes_max - self._num_bytes)

    def add(self, frames: list[bytes], *, urgent: bool = False) -> bool:
        """False when it is full. An urgent message goes behind those that are urgent too."""
        size = sum(map(len, frames))
        bytes_max = self._bytes_max + (URGENT_BYTES if urgent else 0)
        if self._messages and self._num_bytes + size > bytes_max:
            return False
        self._insert(frames, size, urgent=urgent)
        return True

    def add_first(self, frames: list[bytes]) -> None:
        """Before all others, whatever the bound."""
        self._messages.appendleft(frames)
        self._num_urgent += 1
        self._num_bytes += sum(map(len, frames))

    def first(self) -> list[bytes]:
        return self._messages[0]

    def pop(self) -> int:
        """Let the first go; its size in bytes."""
        size = sum(map(len, self._messages.popleft()))
        self._num_bytes -= size
        self._num_urgent = max(0, self._num_urgent - 1)
        return size

    def clear(self) -> None:
        self._messages.clear()
        self._num_bytes = self._num_urgent = 0

    def _insert(self, frames: list[bytes], size: int, *, urgent: bool) -> None:
        if urgent:
            self._messages.insert(self._num_urgent, frames)
            self._num_urgent += 1
        else:
            self._messages.append(frames)
        self._num_bytes += size
