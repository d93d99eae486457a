"""A worker under full load is not taken for dead: its engine uses every core, and then some."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from .fleet import Fleet, processes_below

pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/stat").exists(), reason="finds engine processes in /proc"
)
ENGINE = "echo2_workers.engine_host"
GONE_S = 5.0
"""heartbeat.gone_s of the fleet."""
SPUN_S = 4 * GONE_S
SPIN = """
import os, sys, threading
if any("engine_host" in word for word in sys.orig_argv):
    def spin(parent):
        while os.getppid() == parent:
            pass
    for _ in range(2 * (os.cpu_count() or 1)):
        parent = os.getpid()
        if os.fork() == 0:
            spin(parent)
            os._exit(0)
    threading.Thread(target=spin, args=(os.getppid(),), daemon=True).start()
"""
"""Two processes for each core, and a thread that holds the engine's own interpreter."""


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SPIN)
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    made = Fleet(tmp_path, steps=100_000)
    yield made
    made.stop()


def spun_s(pids: list[int]) -> float:
    """Seconds of a processor that these processes have used."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_worker_whose_engine_uses_every_core_is_not_taken_for_dead(fleet: Fleet) -> None:
    fleet.start_all(workers=1)
    fleet.until_step(1)
    engines = processes_below(fleet.processes["w-1"].pid, ENGINE)
    cores = os.cpu_count() or 1
    assert len(engines) > 2 * cores, "the engine spins"
    before, done = spun_s(engines), len(fleet.events("step_completed"))
    fleet.until(
        lambda: (
            spun_s(engines) - before > cores * SPUN_S
            and len(fleet.events("step_completed")) > done + 2
        ),
        f"{SPUN_S:g} s of every core, and three more steps",
    )
    assert set(engines) == set(processes_below(fleet.processes["w-1"].pid, ENGINE)), (
        "it is the same"
    )
    fleet.processes["coordinator"].send_signal(signal.SIGTERM)
    assert fleet.ends("coordinator") == 0, fleet.logs()
    assert fleet.events("worker_gone") == []
    assert len(fleet.events("worker_joined")) == 1
    lost = [*fleet.events("lease_revoked"), *fleet.events("lease_failed")]
    assert not [e for e in lost if "silent" in e["reason"] or "engine" in e["reason"]]
