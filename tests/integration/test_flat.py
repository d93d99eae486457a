"""Nothing that is bounded grows with the length of a run: the coordinator under the load of
benchmarks/soak.py, a small one, with workers that come and leave all the while."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import sqlite3
import threading
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from echo2.config import config_from_mapping
from echo2.core.audits import WORKERS_MAX
from echo2.core.run_state import RECENT_LEASES_MAX
from echo2.net.peer_budget import PEERS_MAX
from echo2.service import Coordinator

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
DEADLINE_S = 120.0
R = 8
LEAD = 4
REMEMBERED = {
    "._core.state.recent_leases": RECENT_LEASES_MAX,
    "._core.state.audits.num_trained": WORKERS_MAX,
    "._sockets._control._budgets._accounts": PEERS_MAX,
    "._sockets._rollouts._budgets._accounts": PEERS_MAX,
}
"""What is kept of those who left, on purpose, and of how many at most."""


@pytest.fixture
def benchmark_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are spawned find the modules too."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.usefixtures("benchmark_path")
def test_a_coordinator_is_as_large_after_many_groups_as_after_few(tmp_path: Path) -> None:
    load_run, soak_module = map(importlib.import_module, ("load_run", "soak"))
    clients = importlib.import_module("load_clients")
    spec = load_run.LoadSpec(
        workers=24,
        processes=1,
        slots=2,
        shape=clients.Shape(group_size=2, tokens=16, prompt=4),
        groups_per_step=R,
        publish_every=4,
        checkpoint_every=4,
        gone_s=3.0,
        curve=True,
    )
    with load_run.LoadRun(tmp_path / "load", spec) as run:
        run.pace(200.0)
        soak = soak_module.Soak(run, groups=3000, churn=3.0)
        soak.go()
        steps, trained = run.trained()
        ends = Counter(int(sample.tasks) for sample in soak.samples)
    assert soak.num_leaves > 20
    assert trained > 2500
    assert soak_module.metric(soak.metrics, "echo2_loop_lag_samples_seconds_count") > 10
    early, late = soak_module.EARLY, soak_module.LATE
    # A worker that vanished is missed after heartbeat.gone_s, so a few come and go.
    assert soak.window("descriptors", late) <= soak.window("descriptors", early) + 12
    assert max(ends) <= min(ends) + 3
    # Two checkpoints, what is held, and what waits to be settled.
    rows = sqlite3.connect(run.run_dir / "ledger.sqlite").execute("SELECT count(*) FROM groups")
    assert rows.fetchone()[0] < 2 * 4 * R + (1 + LEAD) * R + 600
    assert steps * R <= trained <= (steps + 1) * R


@pytest.mark.usefixtures("benchmark_path")
async def test_workers_that_come_under_ever_new_names_leave_nothing_behind(tmp_path: Path) -> None:
    clients = importlib.import_module("load_clients")
    config = config_from_mapping(
        {
            "environment": {"name": "null"},
            "learner": {"groups_per_step": R},
            "dispatch": {"group_size": 2, "lead_steps": LEAD},
            "staleness": {"max": 16, "period": 4},
            "worker": {"engine": "null"},
            "heartbeat": {"interval_s": 0.1, "suspect_s": 1.0, "gone_s": 2.0},
            "net": {"curve": False},
            "log": {"level": "warning"},
        }
    )
    async with Coordinator(config, run_dir=tmp_path) as coordinator, asyncio.timeout(DEADLINE_S):
        address = clients.Address(coordinator.control_endpoint, coordinator.rollouts_endpoint, "")
        fleet = a_thread(
            clients.run_fleet,
            clients.FleetSpec(address, clients.Shape(2, 16, 4), slots=2, seed=0),
        )
        learner = a_thread(clients.run_learner, clients.LearnerSpec(address, None, 4, 4))
        try:
            fleet.send(("pace", None))
            fleet.send(("join", [(f"stays-{n}", None) for n in range(4)]))
            early = {}
            for visit in range(12):
                names = [f"comes-{visit}.{n}" for n in range(6)]
                fleet.send(("join", [(name, None) for name in names]))
                await until(lambda: workers(coordinator) == 10)
                _, done = await ask(fleet, "count")
                while (await ask(fleet, "count"))[1] < done + 4 * R:  # noqa: ASYNC110  a thread's
                    await asyncio.sleep(0.02)
                fleet.send(("leave", names[:4], True))
                fleet.send(("leave", names[4:], False))
                await until(lambda: workers(coordinator) == 4)
                if visit == 4:
                    early = sizes(coordinator)
            late = sizes(coordinator)
            for _ in range(10):  # what is on its way for a moment is not what stays
                await asyncio.sleep(0.05)
                late &= sizes(coordinator)
        finally:
            fleet.send(("stop",))
            learner.send(("stop",))
    # What stands for a moment of the run differs from one to the next by a batch or so.
    grown = {path: (early[path], late[path]) for path in late if late[path] > early[path] + 2 * R}
    for path, most in REMEMBERED.items():
        assert late[path] <= most
        grown.pop(path, None)
    assert grown == {}


def a_thread(main: Any, spec: Any) -> Any:
    """The parent's end of the pipe to a fleet, or a learner, in a thread."""
    ours, theirs = multiprocessing.Pipe()
    threading.Thread(target=main, args=(theirs, spec), daemon=True).start()
    return ours


async def ask(pipe: Any, command: str) -> Any:
    pipe.send((command,))
    return await asyncio.to_thread(pipe.recv)


async def until(is_true: Any) -> None:
    while not is_true():  # noqa: ASYNC110  what it looks at is plain data
        await asyncio.sleep(0.02)


def workers(coordinator: Coordinator) -> int:
    return len(coordinator.status()["workers"])


def sizes(root: Any) -> Counter[str]:
    """How many items the containers of an object, and of echo2's objects in it, hold, by path."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    waiting = deque([("", root)])
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict | list | set | frozenset | tuple | deque):
            found[path] += len(value)
            items = value.values() if isinstance(value, dict) else value
            waiting.extend((f"{path}[]", item) for item in list(items))
        elif type(value).__module__.partition(".")[0] == "echo2":
            waiting.extend((f"{path}.{name}", part) for name, part in attributes(value))
    return found


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    names = {name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())}
    for name in sorted({*names, *getattr(value, "__dict__", {})}):
        if hasattr(value, name):
            yield name, getattr(value, name)
