"""One real coordinator process under the load of `load_clients`: started, paced, measured, ended.

The coordinator is `echo2 coordinator CONFIG`, or with `ledger="memory"` the same with records
that are kept in memory and forgotten at their end, so that what durability costs can be told.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from load_clients import (
    Address,
    FleetSpec,
    LearnerSpec,
    Measured,
    Shape,
    run_fleet,
    run_learner,
)

from echo2.config import config_from_mapping, config_to_toml
from echo2.net.keys import KeyPair

READY_S: Final = 120.0
POLL_S: Final = 0.05
JOIN_AT_ONCE: Final = 50
"""A handshake that is not through in ten seconds is broken off, and these peers dial once."""
STOP_S: Final = 30.0
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """`processes` hold the workers between them. The learner publishes every `publish_every`
    steps and keeps a checkpoint every `checkpoint_every`. `gone_s`: a worker that is silent for so
    long loses its leases."""

    workers: int = 200
    processes: int = 1
    slots: int = 8
    shape: Shape = field(default_factory=Shape)
    groups_per_step: int = 128
    publish_every: int = 16
    checkpoint_every: int = 8
    gone_s: float = 15.0
    curve: bool = False
    ledger: Literal["disk", "memory"] = "disk"

    def tables(self) -> dict[str, Any]:
        """Of the coordinator's configuration."""
        return {
            "run": {"name": "load"},
            "environment": {"name": "null"},
            "worker": {"engine": "null"},
            "learner": {"groups_per_step": self.groups_per_step},
            "dispatch": {"group_size": self.shape.group_size, "lead_steps": 4},
            "staleness": {"max": 4 * self.publish_every, "period": self.publish_every},
            "heartbeat": {
                "interval_s": self.gone_s / 15,
                "suspect_s": self.gone_s / 3,
                "gone_s": self.gone_s,
            },
            "net": {"curve": self.curve},
        }


@dataclass(frozen=True, slots=True)
class Load:
    """What the fleet, and the coordinator's process, did in `seconds`."""

    seconds: float
    groups: int
    num_bytes: int
    latencies_s: list[float]
    outcomes: Counter[str]
    starved_s: float
    cpu_s: float
    threads_cpu_s: dict[str, float]
    load_cpu_s: float
    """Of the workers' and the learner's processes."""

    @property
    def groups_per_s(self) -> float:
        return self.groups / self.seconds

    def percentile_ms(self, share: float) -> float | None:
        found = percentile(self.latencies_s, share)
        return None if found is None else round(1e3 * found, 2)

    def report(self) -> dict[str, Any]:
        return {
            "groups_per_s": round(self.groups_per_s),
            "mb_per_s": round(self.num_bytes / self.seconds / 1e6, 1),
            "acknowledged_p50_ms": self.percentile_ms(0.5),
            "acknowledged_p99_ms": self.percentile_ms(0.99),
            "cpu_us_per_group": round(1e6 * self.cpu_s / max(1, self.groups)),
            "cpu_us_per_group_of_the_load": round(1e6 * self.load_cpu_s / max(1, self.groups)),
            "cpu_us_per_group_by_thread": {
                name: round(1e6 * seconds / max(1, self.groups))
                for name, seconds in sorted(self.threads_cpu_s.items())
            },
            "outcomes": dict(self.outcomes),
        }


class LoadRun:
    """Use as a context manager; `folder` is made anew and left there."""

    def __init__(self, folder: Path, spec: LoadSpec) -> None:
        self.spec = spec
        self.folder = folder
        self.run_dir = folder / "run"
        self.coordinator: subprocess.Popen[bytes] | None = None
        self.record: dict[str, Any] = {}
        self.names: list[list[str]] = [[] for _ in range(spec.processes)]
        """Of each process's workers."""
        self._keys: dict[str, KeyPair] = {}
        self._fleets: list[tuple[BaseProcess, Pipe]] = []
        self._learner: tuple[BaseProcess, Pipe] | None = None

    def __enter__(self) -> LoadRun:
        try:
            self._start()
        except BaseException:  # whatever it was: no process is left behind
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -------------------------------------------------------------------- processes

    def _start(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.run_dir / "keys").mkdir(parents=True, mode=0o700)
        (self.run_dir / "keys" / "authorized").mkdir(mode=0o700)
        config = self.folder / "load.toml"
        config.write_text(config_to_toml(config_from_mapping(self.spec.tables())))
        names = [f"w-{number}" for number in range(self.spec.workers)]
        self.authorize([*names, "learner"])
        self._start_coordinator(config)
        self.record = json.loads((self.run_dir / "coordinator.json").read_text())
        spawn = multiprocessing.get_context("spawn")
        for place in range(self.spec.processes):
            fleet = FleetSpec(self.address, self.spec.shape, self.spec.slots, seed=place)
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=run_fleet, args=(theirs, fleet), daemon=True)
            process.start()
            self._fleets.append((process, ours))
        for start in range(0, len(names), JOIN_AT_ONCE):
            coming = names[start : start + JOIN_AT_ONCE]
            for place in range(self.spec.processes):
                self.join(place, coming[place :: self.spec.processes])
            most = start + len(coming)
            self.until(lambda most=most: self.num_welcome >= most, "workers to be welcomed")
        learner = LearnerSpec(
            self.address,
            self._keys.get("learner"),
            self.spec.publish_every,
            self.spec.checkpoint_every,
        )
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=run_learner, args=(theirs, learner), daemon=True)
        process.start()
        self._learner = process, ours

    def _start_coordinator(self, config: Path) -> None:
        module = ["-m", "echo2.cli", "coordinator"]
        if self.spec.ledger == "memory":
            module = [str(Path(__file__).parent / "load_memory_coordinator.py")]
        with (self.folder / "coordinator.log").open("wb") as log:
            self.coordinator = subprocess.Popen(
                [sys.executable, *module, str(config), "--run-dir", str(self.run_dir)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.until((self.run_dir / "coordinator.json").exists, "the coordinator")

    def stop(self) -> None:
        """End all of it; what does not end by itself is killed."""
        parts = [*self._fleets, *([self._learner] if self._learner else [])]
        for _, pipe in parts:
            try:
                pipe.send(("stop",))
            except OSError:
                continue  # it has ended
        for process, _ in parts:
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()
        if self.coordinator is not None and self.coordinator.poll() is None:
            self.coordinator.send_signal(signal.SIGTERM)
            try:
                self.coordinator.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.coordinator.kill()
                self.coordinator.wait()

    # ------------------------------------------------------------------------ peers

    @property
    def address(self) -> Address:
        record = self.record
        return Address(record["control"], record["rollouts"], record["public_key"])

    def authorize(self, names: Sequence[str]) -> None:
        """Make keys, and let them in."""
        if not self.spec.curve:
            return
        for name in names:
            keys = self._keys[name] = KeyPair.generate()
            path = self.run_dir / "keys" / "authorized" / f"{name}.pub"
            aside = path.with_suffix(".new")
            aside.write_text(f"{keys.public}\n")
            aside.rename(path)

    def join(self, place: int, names: Sequence[str]) -> None:
        """Workers of one process come."""
        self.names[place] += names
        keys = [(name, self._keys.get(name)) for name in names]
        self._fleets[place][1].send(("join", keys))

    def leave(self, place: int, names: Sequence[str], *, goodbye: bool) -> None:
        for name in names:
            self.names[place].remove(name)
        self._fleets[place][1].send(("leave", list(names), goodbye))

    # -------------------------------------------------------------------- measuring

    def pace(self, rate: float | None) -> None:
        """Groups a second in all; None: as many as possible."""
        each = None if rate is None else rate / self.spec.processes
        for _, pipe in self._fleets:
            pipe.send(("pace", each))

    def measure(self, seconds: float) -> Load:
        """Whoever ended meanwhile is an error."""
        for _, pipe in self._fleets:
            pipe.send(("begin",))
        before, threads, load = self.cpu_s(), self.threads_cpu_s(), self.load_cpu_s()
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
            self.check()
        cpu_s, load = self.cpu_s() - before, self.load_cpu_s() - load
        now = self.threads_cpu_s()
        threads = {name: now[name] - threads.get(name, 0.0) for name in now}
        for _, pipe in self._fleets:
            pipe.send(("end",))
        found: list[Measured] = [self._hear(pipe) for _, pipe in self._fleets]
        refused = json.loads(self.http("/api/status"))["refused"]
        if refused:
            raise RuntimeError(f"the coordinator refused {refused}\n{self.log_tail()}")
        outcomes: Counter[str] = Counter()
        for part in found:
            outcomes.update(part.outcomes)
        return Load(
            seconds=sum(part.seconds for part in found) / len(found),
            groups=sum(len(part.latencies_s) for part in found),
            num_bytes=sum(part.num_bytes for part in found),
            latencies_s=[latency for part in found for latency in part.latencies_s],
            outcomes=outcomes,
            starved_s=max(part.starved_s for part in found),
            cpu_s=cpu_s,
            threads_cpu_s=threads,
            load_cpu_s=load,
        )

    def counts(self) -> tuple[int, int]:
        """Workers that are welcome, and groups that were acknowledged."""
        for _, pipe in self._fleets:
            pipe.send(("count",))
        found = [self._hear(pipe) for _, pipe in self._fleets]
        return sum(part[0] for part in found), sum(part[1] for part in found)

    @property
    def num_welcome(self) -> int:
        return self.counts()[0]

    def trained(self) -> tuple[int, int]:
        """(learner steps, groups) that the null learner has completed."""
        assert self._learner is not None
        self._learner[1].send(("count",))
        steps, groups = self._hear(self._learner[1])
        return int(steps), int(groups)

    def http(self, path: str) -> str:
        with urllib.request.urlopen(self.record["http"] + path, timeout=30) as response:
            return str(response.read().decode())

    @property
    def pid(self) -> int:
        assert self.coordinator is not None
        return self.coordinator.pid

    def cpu_s(self) -> float:
        return _cpu_of(Path(f"/proc/{self.pid}/stat"))

    def load_cpu_s(self) -> float:
        parts = [*self._fleets, *([self._learner] if self._learner else [])]
        return sum(_cpu_of(Path(f"/proc/{process.pid}/stat")) for process, _ in parts)

    def threads_cpu_s(self) -> dict[str, float]:
        """By what the threads are: Python's own names are not the kernel's, so all but the first
        and ZeroMQ's go by "other"."""
        found: dict[str, float] = {}
        for entry in Path(f"/proc/{self.pid}/task").iterdir():
            name = (entry / "comm").read_text().strip()
            kind = "event loop" if int(entry.name) == self.pid else _THREADS.get(name[:6], "other")
            found[kind] = found.get(kind, 0.0) + _cpu_of(entry / "stat")
        return found

    def check(self) -> None:
        """RuntimeError if a part has ended."""
        assert self.coordinator is not None
        if (code := self.coordinator.poll()) is not None:
            raise RuntimeError(f"the coordinator ended with {code}:\n{self.log_tail()}")
        parts = [*self._fleets, *([self._learner] if self._learner else [])]
        for process, _ in parts:
            if not process.is_alive():
                raise RuntimeError(
                    f"{process.name} ended with {process.exitcode}\n{self.log_tail()}"
                )

    def log_tail(self) -> str:
        return (self.folder / "coordinator.log").read_text(errors="replace")[-3000:]

    def until(
        self, is_true: Callable[[], object], what: str, *, timeout_s: float = READY_S
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_true():
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"waited {timeout_s:g} s for {what}\n{self.log_tail()}")
            time.sleep(POLL_S)

    def _hear(self, pipe: Pipe) -> Any:
        deadline = time.monotonic() + READY_S
        while not pipe.poll(1.0):
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"a process did not answer for {READY_S:g} s")
        return pipe.recv()


_THREADS: Final = {"ZMQbg/": "zeromq"}


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of them do not exceed; None of none."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def _cpu_of(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {
        "cores": os.cpu_count(),
        "processor": model,
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
    }
