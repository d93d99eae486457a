"""`echo2 coordinator` with its ledger in memory: the other end of what durability costs.

    python benchmarks/load_memory_coordinator.py CONFIG --run-dir DIR

Records are kept as they come, answered in the next turn of the event loop, and forgotten when
their group has ended. Nothing outlives the process: for `coordinator_load.py` alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo2 import service
from echo2.commands import coordinator
from echo2.core.records import GroupStored, Record


class MemoryLedger:
    """Has what `echo2.service` asks of `ledger.durable.DurableLedger`."""

    def __init__(self, run_dir: Path) -> None:
        self._groups: dict[str, GroupStored] = {}
        self._others: list[Record] = []
        self._on_persisted: Callable[[Sequence[int]], None] = lambda _: None
        self._ids: list[int] = []
        self._over = asyncio.Event()

    def restored(self) -> None:
        return None

    async def start(self, on_persisted: Callable[[Sequence[int]], None]) -> None:
        self._on_persisted = on_persisted
        self._loop = asyncio.get_running_loop()

    async def wait(self) -> None:
        await self._over.wait()

    async def stop(self) -> None:
        self._over.set()

    def append(self, record_id: int, record: Record) -> None:
        if isinstance(record, GroupStored):
            self._groups[record.group] = record
        else:
            self._others.append(record)
        if not self._ids:
            self._loop.call_soon(self._tell)
        self._ids.append(record_id)

    def observe(self, event: str, fields: Mapping[str, Any], position: int) -> None:
        if event == "group_ended":
            self._groups.pop(fields["group_id"], None)

    def _tell(self) -> None:
        ids, self._ids = self._ids, []
        self._on_persisted(ids)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--run-dir", type=Path, required=True)
    options = parser.parse_args()
    service.DurableLedger = MemoryLedger  # type: ignore[misc, assignment]
    return coordinator.main(options.config, options.run_dir, [])


if __name__ == "__main__":
    sys.exit(main())
