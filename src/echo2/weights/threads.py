"""Work on files off the event loop: it is told to stop, and what it made is not lost open."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import TypeVar

from echo2.weights.assembly import Assembly
from echo2.weights.versions import StoredVersion

T = TypeVar("T")


async def in_thread(stop: threading.Event, work: Callable[[], T]) -> T:
    """Run `work` in a thread. When cancelled, set `stop`, wait for its end, and close what
    it made."""
    # What asyncio.to_thread does, without a task for each call: this is called for each chunk.
    context = contextvars.copy_context()
    future = asyncio.get_running_loop().run_in_executor(None, context.run, work)
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        stop.set()
        while not future.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({future})
        if future.exception() is None:
            made = future.result()
            if isinstance(made, Assembly | StoredVersion):
                made.close()
        raise
