"""No ready socket is slept on: one task waits here for its ZeroMQ sockets.

A ZeroMQ descriptor is edge-triggered. It turns readable when the socket's I/O thread has
news, and ANY call on the socket (a send, a receive, reading EVENTS) may consume that edge.
So the one task that owns the sockets lives by this cycle, and nobody else touches them:

    take what is there without waiting -> nothing was there -> look at EVENTS once more
    -> `wait` -> again

`set` wakes the task from outside (there is something to send). A wake-up that comes at any
moment after the last `wait` returned is kept, and spurious ones are allowed.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import zmq

POLLIN: Final = int(zmq.POLLIN)
POLLOUT: Final = int(zmq.POLLOUT)
_EVENTS: Final = int(zmq.EVENTS)
"""Plain numbers: pyzmq joins and looks up its own in Python, which costs as much as the call."""


class Signal:
    """News for the one task that waits for them: `set` at any moment after the last `wait`
    returned is kept. Cheaper than an asyncio.Event under an asyncio.timeout, for what waits
    many times a second."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Return when there may be news since the last return, or after `timeout_s`; other
        tasks get a turn in any case. For one task only."""
        if self._is_set:
            await asyncio.sleep(0)
        else:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = None if timeout_s is None else loop.call_later(timeout_s, self.set)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        self._is_set = False


class Wakeups(Signal):
    """Watches the descriptors of `sockets` on the running loop until `close`."""

    def __init__(self, *sockets: zmq.Socket[Any]) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._descriptors = [int(socket.getsockopt(zmq.FD)) for socket in sockets]
        self.set()  # what happened before the watch began is not known
        self._fired = set(self._descriptors)
        for descriptor in self._descriptors:
            self._loop.add_reader(descriptor, self._fire, descriptor)

    def fired(self, place: int) -> bool:
        """Whether the socket in this place had news since the last call, the first included.
        Whoever is told so takes all of them."""
        descriptor = self._descriptors[place]
        if descriptor not in self._fired:
            return False
        self._fired.remove(descriptor)
        return True

    def _fire(self, descriptor: int) -> None:
        self._fired.add(descriptor)
        self.set()

    def close(self) -> None:
        """Stop watching; to be called before the sockets are closed."""
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._descriptors.clear()


def is_ready(socket: zmq.Socket[Any], flags: int = POLLIN) -> bool:
    """Whether `socket` can do one of `flags` now. Handles all of the socket's news, so its
    descriptor falls silent until there is more."""
    return bool(socket.get(_EVENTS) & flags)  # type: ignore[operator]
