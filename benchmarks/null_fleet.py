"""A fleet of real worker daemons without a model, and a learner that only takes its time.

For benchmarks that compare a run of real processes with a prediction of it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import fmean

import echo2
from echo2.embedding import Tensors

TASKS_SPARE_STEPS = 40
"""Tasks are submitted for so many steps more than are trained."""


def worker_argv(
    config: Path, run_dir: Path, name: str, settings: Mapping[str, float | str]
) -> list[str]:
    """The command of a worker daemon with settings of its own."""
    argv = [sys.executable, "-m", "echo2_workers", str(config), "--run-dir", str(run_dir)]
    argv += ["--name", name]
    return argv + [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


async def a_worker(
    stack: AsyncExitStack,
    config: Path,
    run_dir: Path,
    name: str,
    settings: Mapping[str, float | str],
) -> None:
    """Started now, ended with the stack."""
    log = stack.enter_context((run_dir / f"{name}.log").open("wb"))
    argv = worker_argv(config, run_dir, name, settings)
    process = await asyncio.create_subprocess_exec(*argv, stdout=log, stderr=log)

    async def end() -> None:
        if process.returncode is None:
            process.terminate()
        await process.wait()

    stack.push_async_callback(end)


async def workers_joined(coordinator: echo2.Coordinator, count: int) -> None:
    while len(coordinator.status()["workers"]) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


async def trained(
    coordinator: echo2.Coordinator,
    weights: Callable[[], Tensors],
    *,
    steps: int,
    train_s: float,
    groups_per_step: int,
    period: int = 1,
) -> list[dict[str, float]]:
    """`steps` learner steps, each a wait of `train_s`; `weights()` are published before the first
    and then every `period` steps. One row for each step: seconds waited and trained, $ of the
    whole run and what a group takes by the coordinator's measurement when its batch came, and the
    time at its end."""
    await coordinator.submit(["{}"] * (steps + TASKS_SPARE_STEPS) * groups_per_step)
    await coordinator.publish(weights())
    rows = []
    for step in range(1, steps + 1):
        asked = time.monotonic()
        batch = await coordinator.next_batch()
        assert batch is not None
        received = time.monotonic()
        status = coordinator.status()
        await asyncio.sleep(train_s - (time.monotonic() - received))
        done = time.monotonic()
        await coordinator.complete(batch)
        if step % period == 0:
            await coordinator.publish(weights())
        rows.append(
            {
                "wait_s": received - asked,
                "train_s": done - received,
                "cost_usd": status["cost_usd"],
                "latency_s": fmean(
                    each["latency_s"] for each in status["workers"] for _ in range(each["slots"])
                ),
                "time": time.monotonic(),
            }
        )
    return rows
