"""Words for the ledger in tests: groups that were delivered, and a ledger on the disk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from echo2.core.records import GroupStored
from echo2.core.task_queue import group_of
from echo2.ledger.durable import DurableLedger
from echo2.messages import GroupResult
from echo2.types import LeaseId, PeerId, Span, Task, TrajectoryHeader, Version

LENGTH = 8


def a_result(index: int, version: Version | None = None) -> GroupResult:
    """Two trajectories of LENGTH tokens, which differ from group to group."""
    header = TrajectoryHeader(
        length=LENGTH,
        prompt_length=2,
        num_sampled=LENGTH - 2,
        reward=float(index % 2),
        finish="stop",
        num_turns=1,
        spans=(Span(version or Version(1, 0), 2, LENGTH),),
    )
    total = 2 * LENGTH
    return GroupResult(
        lease=f"l{index}",
        group=f"g{index}",
        attempt=1,
        trajectories=(header, header),
        generate_s=0.1,
        environment_s=0.0,
        token_ids=b"".join((index + k).to_bytes(4, "little") for k in range(total)),
        logprobs=bytes(4 * total),
        loss_mask=bytes(total),
    )


def stored(index: int, version: Version | None = None) -> GroupStored:
    return GroupStored(
        group_of(index),
        LeaseId(f"l{index}"),
        PeerId("w-1"),
        Task(index, f'{{"n": {index}}}'),
        a_result(index, version),
    )


class Running:
    """A started ledger, and what it has called durable."""

    def __init__(self, ledger: DurableLedger) -> None:
        self.ledger = ledger
        self.durable: list[int] = []
        self.news = asyncio.Event()

    def persisted(self, record_ids: Sequence[int]) -> None:
        self.durable += record_ids
        self.news.set()

    async def until(self, record_id: int) -> None:
        while record_id not in self.durable:
            self.news.clear()
            await self.news.wait()


@contextlib.asynccontextmanager
async def a_ledger(run_dir: Path, *, segment_bytes: int = 1 << 20) -> AsyncIterator[Running]:
    ledger = DurableLedger(run_dir, segment_bytes=segment_bytes)
    ledger.restored()
    running = Running(ledger)
    await ledger.start(running.persisted)
    try:
        yield running
    finally:
        await ledger.stop()
