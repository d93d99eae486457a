"""The ledger in memory: answers each record at once and keeps nothing.

It has the interface of the durable one: `append` never blocks, and `on_persisted` is called on
the event loop when the record is safe, in the order of appending.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from echo2.core.records import Record
from echo2.core.run_state import Restored


class Ledger(Protocol):
    """What the coordinator's shell needs of a ledger."""

    def restored(self) -> Restored | None: ...
    async def start(self, on_persisted: Callable[[int], None]) -> None: ...
    async def wait(self) -> None: ...
    async def stop(self) -> None: ...
    def append(self, record_id: int, record: Record) -> None: ...
    def observe(self, event: str, fields: Mapping[str, Any], position: int) -> None: ...


class MemoryLedger:
    def __init__(self) -> None:
        self.num_records = 0
        self._on_persisted: Callable[[int], None] | None = None
        self._stopped = asyncio.Event()

    def restored(self) -> Restored | None:
        return None

    async def start(self, on_persisted: Callable[[int], None]) -> None:
        self._on_persisted = on_persisted

    async def wait(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        self._on_persisted = None
        self._stopped.set()

    def observe(self, event: str, fields: Mapping[str, Any], position: int) -> None:
        """Nothing is kept."""

    def append(self, record_id: int, record: Record) -> None:
        self.num_records += 1
        asyncio.get_running_loop().call_soon(self._persisted, record_id)

    def _persisted(self, record_id: int) -> None:
        if self._on_persisted is not None:
            self._on_persisted(record_id)
