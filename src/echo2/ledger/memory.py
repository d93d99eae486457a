"""The ledger in memory: answers each record at once and keeps nothing.

It has the interface that a durable ledger has: `append` never blocks, and `on_persisted`
is called on the event loop when the record is safe, in the order of appending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from echo2.core.records import Record


class Ledger(Protocol):
    """What the coordinator's shell needs of a ledger."""

    async def start(self, on_persisted: Callable[[int], None]) -> None: ...
    async def stop(self) -> None: ...
    def append(self, record_id: int, record: Record) -> None: ...


class MemoryLedger:
    def __init__(self) -> None:
        self.num_records = 0
        self._on_persisted: Callable[[int], None] | None = None

    async def start(self, on_persisted: Callable[[int], None]) -> None:
        self._on_persisted = on_persisted

    async def stop(self) -> None:
        self._on_persisted = None

    def append(self, record_id: int, record: Record) -> None:
        self.num_records += 1
        asyncio.get_running_loop().call_soon(self._persisted, record_id)

    def _persisted(self, record_id: int) -> None:
        if self._on_persisted is not None:
            self._on_persisted(record_id)
