"""How many groups a second the coordinator's ledger makes durable, and how long each waits for it.

    python benchmarks/ledger.py [--groups 4000] [--in-flight 64] [--kilobytes 70] [--folder DIR]

Peers deliver groups, each the next one when its last was acknowledged, as workers do; a lease and
an end are told as events between. Prints one JSON object: the machine, the parameters, groups
and commits a second, quantiles of the wait, and beside them the bound of the disk: how often it
forces a write of a group's size to itself, alone, and the ratio of groups to that.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echo2.core.records import GroupStored, LearnerRecorded
from echo2.core.task_queue import group_of
from echo2.ledger.durable import EVENTS, DurableLedger
from echo2.ledger.events_log import EventsLog
from echo2.messages import GroupResult
from echo2.types import LeaseId, PeerId, Span, Task, TrajectoryHeader, Version

SYNCS = 200
TOKEN_BYTES = 9
"""An id, a logprob, a mask."""


def a_group(index: int, num_tokens: int) -> GroupStored:
    version = Version(1, 0)
    header = TrajectoryHeader(
        length=num_tokens,
        prompt_length=1,
        num_sampled=num_tokens - 1,
        reward=1.0,
        finish="stop",
        num_turns=1,
        spans=(Span(version, 1, num_tokens),),
    )
    result = GroupResult(
        lease=f"l{index}",
        group=f"g{index}",
        attempt=1,
        trajectories=(header,),
        generate_s=1.0,
        environment_s=0.0,
        token_ids=os.urandom(4 * num_tokens),
        logprobs=os.urandom(4 * num_tokens),
        loss_mask=bytes(num_tokens),
    )
    lease, worker = LeaseId(f"l{index}"), PeerId("w-1")
    return GroupStored(group_of(index), lease, worker, Task(index, "{}"), result)


class Delivery:
    """The ledger with its events, and who waits for what to be durable."""

    def __init__(self, run_dir: Path, num_tokens: int) -> None:
        self.ledger = DurableLedger(run_dir)
        self.log = EventsLog(run_dir / EVENTS)
        self.num_tokens = num_tokens
        self.waits_s: list[float] = []
        self._waiting: dict[int, asyncio.Event] = {}

    async def start(self) -> None:
        self.ledger.restored()
        self.log.open()
        await self.ledger.start(self._persisted)
        await self._durable(0, LearnerRecorded(1, 0))

    async def stop(self) -> None:
        await self.ledger.stop()
        self.log.close()

    async def deliver(self, index: int) -> None:
        fields = {
            **{"group_id": f"g{index}", "lease": f"l{index}", "worker": "w-1"},
            **{"incarnation": 1, "step": 0, "attempt": 1, "revoke_after_s": 60.0},
        }
        position = self.log.write("lease_granted", fields)
        self.log.flush()
        self.ledger.observe("lease_granted", fields, position)
        record = a_group(index, self.num_tokens)
        began = time.perf_counter()
        await self._durable(index + 1, record)
        self.waits_s.append(time.perf_counter() - began)

    def _persisted(self, record_ids: Sequence[int]) -> None:
        for record_id in record_ids:
            self._waiting.pop(record_id).set()

    async def _durable(self, record_id: int, record: GroupStored | LearnerRecorded) -> None:
        self._waiting[record_id] = done = asyncio.Event()
        self.ledger.append(record_id, record)
        await done.wait()


async def measure(run_dir: Path, *, groups: int, in_flight: int, num_tokens: int) -> dict[str, Any]:
    delivery = Delivery(run_dir, num_tokens)
    await delivery.start()
    before = delivery.ledger.num_commits
    indexes = iter(range(groups))

    async def peer() -> None:
        for index in indexes:
            await delivery.deliver(index)

    began = time.perf_counter()
    await asyncio.gather(*(peer() for _ in range(in_flight)))
    seconds = time.perf_counter() - began
    commits = delivery.ledger.num_commits - before
    await delivery.stop()
    waits_s = sorted(delivery.waits_s)
    return {
        "groups_per_s": round(groups / seconds, 1),
        "commits_per_s": round(commits / seconds, 1),
        "wait_p50_s": round(waits_s[len(waits_s) // 2], 5),
        "wait_p99_s": round(waits_s[len(waits_s) * 99 // 100], 5),
    }


def syncs_per_s(folder: Path, num_bytes: int) -> float:
    """How often the disk takes a write of this size and forces it to itself."""
    content = os.urandom(num_bytes)
    handle = os.open(folder / "alone", os.O_WRONLY | os.O_CREAT, 0o600)
    began = time.perf_counter()
    for number in range(SYNCS):
        os.pwrite(handle, content, number * num_bytes)
        os.fdatasync(handle)
    seconds = time.perf_counter() - began
    os.close(handle)
    return SYNCS / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=4000)
    parser.add_argument("--in-flight", type=int, default=64)
    parser.add_argument("--kilobytes", type=int, default=70)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    num_bytes = options.kilobytes * 1000
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        alone = syncs_per_s(Path(name), num_bytes)
        found = asyncio.run(
            measure(
                Path(name) / "run",
                groups=options.groups,
                in_flight=options.in_flight,
                num_tokens=num_bytes // TOKEN_BYTES,
            )
        )
    parameters = {"groups": options.groups, "in_flight": options.in_flight, "bytes": num_bytes}
    figures = {
        "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
        "parameters": parameters,
        "ours": found,
        "bound": {"syncs_per_s_alone": round(alone, 1)},
        "ratio": round(found["groups_per_s"] / alone, 3),
    }
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
