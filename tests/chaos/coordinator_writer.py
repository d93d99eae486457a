"""A whole run in one process: a coordinator that is embedded, its learner, and a scripted worker.

    python coordinator_writer.py RUN_DIR STEPS

    =g g12      the worker holds the acknowledgement of this group
    =s 3        the learner holds that of step 3
    =v 1.3      and that of this version

Started again on the same folder it goes on where the coordinator's records are.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import numpy as np
from test_coordinator_service import ScriptedWorker, a_config

from echo2.messages import GroupAcknowledged, Message
from echo2.service import Coordinator
from echo2.types import Task

Say = Callable[[str], None]
TASKS = 400


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


class TellingWorker(ScriptedWorker):
    """Says which of its groups were acknowledged."""

    tells: Say = staticmethod(say)

    def react(self, message: Message) -> None:
        super().react(message)
        if isinstance(message, GroupAcknowledged) and message.outcome in ("accepted", "duplicate"):
            self.tells(f"=g {message.group}")


async def run(run_dir: Path, num_steps: int, *, tells: Say = say) -> None:
    config = a_config(checkpoint={"every_steps": 1})
    async with Coordinator(config, run_dir=run_dir) as coordinator:
        worker = TellingWorker(run_dir)
        worker.tells = tells
        await worker.start()
        try:
            await coordinator.submit([Task(index, "{}") for index in range(TASKS)])
            for _ in range(num_steps):
                version = await coordinator.publish({"w": np.zeros(4, np.float32)})
                tells(f"=v {version}")
                batch = await coordinator.next_batch()
                assert batch is not None
                await coordinator.complete(batch)
                tells(f"=s {batch.step}")
        finally:
            await worker.stop()


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), int(sys.argv[2])))
