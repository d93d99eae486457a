"""An engine is paused, killed, stopped, and runs out of memory in the middle of a run: its
worker gives the leases back with the cause, starts it again, and the run ends as it should.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .fleet import Fleet, finishes_well

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds engine processes in /proc"
)
ENGINE = "echo2_workers.engine_host"


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path, steps=80, engine_silence_s=8.0)
    yield made
    made.stop()


def engine_of(fleet: Fleet, worker: str) -> int | None:
    """Process id of the worker's engine; None while it has none."""
    daemon = fleet.processes[worker].pid
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == daemon and ENGINE in (path / "cmdline").read_text():
                return int(path.name)
    return None


def ready_engine(fleet: Fleet, worker: str) -> int:
    """The engine of a worker that has installed a version since its engine began."""
    started = fleet.folder / f"{worker}.log"

    def is_up() -> bool:
        text = started.read_text(errors="replace")
        # Before it has installed a version it gets no leases that it could give back.
        installed, started_at = text.rfind("version_installed"), text.rfind("engine_started")
        return installed > started_at > text.rfind("engine_process_died")

    fleet.until(is_up, f"engine of {worker}")
    pid = engine_of(fleet, worker)
    assert pid is not None, fleet.logs()
    return pid


def told(fleet: Fleet, worker: str) -> str:
    return (fleet.folder / f"{worker}.log").read_text(errors="replace")


def hurt(fleet: Fleet, worker: str, act: Callable[[int], None], cause: str) -> None:
    """Do something to the engine, and wait until its worker has told the cause."""
    pid = ready_engine(fleet, worker)
    before = told(fleet, worker).count("engine_process_died")
    act(pid)
    fleet.until(
        lambda: told(fleet, worker).count("engine_process_died") > before,
        f"end of the engine of {worker}",
    )
    ended = [line for line in told(fleet, worker).splitlines() if "engine_process_died" in line]
    assert cause in ended[-1]


def take_memory(pid: int) -> None:
    """Not a byte of address space more than now."""
    size = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.prlimit(pid, resource.RLIMIT_AS, (size, size))


def test_faults_of_engines_cost_leases_and_no_run(fleet: Fleet) -> None:
    fleet.start_all(workers=2)
    fleet.until_step(2)
    paused = ready_engine(fleet, "w-1")
    os.kill(paused, signal.SIGSTOP)  # for less than worker.engine_silence_s
    fleet.until_step(3)
    os.kill(paused, signal.SIGCONT)
    hurt(fleet, "w-1", lambda pid: os.kill(pid, signal.SIGKILL), "SIGKILL: out of memory?")
    hurt(fleet, "w-2", lambda pid: os.kill(pid, signal.SIGSTOP), "silent for 8 s")
    hurt(fleet, "w-1", take_memory, "emory")
    finishes_well(fleet)
    assert fleet.ends("learner") == 0
    given_back = [
        e
        for e in [*fleet.events("lease_failed"), *fleet.events("lease_revoked")]
        if e["worker"] in ("w-1", "w-2")
    ]
    assert given_back, "an engine at work had leases"
    assert all(e["held_s"] >= 0.0 and e["reason"] for e in given_back)
