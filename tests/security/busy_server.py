"""A process whose event loop is busy for BUSY_S with the first message, and then serves again.

busy_server.py     prints its endpoint, and "served" once it has read on after that
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from echo2.messages import Lane, Message, Role
from echo2.net import sockets
from echo2.net.router import Router
from echo2.net.sockets import LANES, close_context, make_context
from echo2.types import PeerId

BUSY_S = 3.0
PING_MS = 200


async def main() -> None:
    limits = replace(LANES[Lane.CONTROL], ping_ms=PING_MS, silence_ms=60_000)
    sockets.LANES[Lane.CONTROL] = limits  # so often that none needs to be waited for
    context = make_context()
    read_on = asyncio.Event()
    num_read = 0

    def busy(peer: PeerId, message: Message) -> None:
        nonlocal num_read
        num_read += 1
        if num_read == 1:
            time.sleep(BUSY_S)
        read_on.set()

    router = Router(
        context,
        lane=Lane.CONTROL,
        role=Role.COORDINATOR,
        bind="tcp://127.0.0.1:*",
        keys=None,
        on_message=busy,
    )
    await router.start()
    print(router.endpoint, flush=True)
    await read_on.wait()
    await asyncio.sleep(2 * PING_MS / 1000)
    print("served", flush=True)
    await router.stop()
    await close_context(context)


asyncio.run(main())
