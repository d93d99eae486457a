"""What a fault in the middle of a dissemination costs the workers that it did not touch.

    python benchmarks/broadcast_faults.py [--mb 256] [--workers 8] [--faults kill,stop,...] --json

The homogeneous scenario of broadcast.py (100/100 Mbit/s, origin 300) with daemons of their own
for coordinator, origin, publisher and workers on shaped hosts. When half of the fault-free time
is over:

    none      nothing: the time that the others are held against
    kill      SIGKILL of the relay with most descendants in the plan
    stop      SIGSTOP of that relay for 10 s
    cut       its link is cut for 5 s
    slow      its uplink falls to 10 Mbit/s
    lie       it flips a byte in every tenth chunk that it forwards, from then on
    origin    SIGKILL of the origin, which is started again 3 s later

Prints for each who was hit and how many workers were behind it in the plan, the seconds until
the last untouched worker, and the touched one, had installed the version (its digest as
published), and what the untouched ones are allowed: 1.1 times the run without a fault plus 3 s,
with the origin its downtime more. Needs root, as wan.py does.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from broadcast import ORIGIN, SCENARIOS, bound_s, machine, write_snapshot
from wan import Wan, WanError

from echo2.config import config_from_mapping, config_to_toml

FAULTS: Final = ("none", "kill", "stop", "cut", "slow", "lie", "origin")
STOP_S: Final = 10.0
CUT_S: Final = 5.0
ORIGIN_DOWN_S: Final = 3.0
SLOW_MBIT: Final = 10.0
READY_S: Final = 180.0
POLL_S: Final = 0.1
LIAR: Final = """
import os, sys
from echo2.messages import Chunk
from echo2.weights.serving import ChunkServer

flag, sent = sys.argv.pop(1), ChunkServer._sent
count = 0

async def lying(self, peer, reply):
    global count
    if isinstance(reply, Chunk) and os.path.exists(flag):
        count += 1
        if count % 10 == 0:
            wrong = bytes([reply.payload[0] ^ 1]) + reply.payload[1:]
            reply = Chunk(
                manifest_digest=reply.manifest_digest, index=reply.index, payload=wrong
            )
    return await sent(self, peer, reply)

ChunkServer._sent = lying
from echo2.cli import main
main()
"""


class Run:
    """One fleet and one version."""

    def __init__(self, wan: Wan, folder: Path, snapshot: Path, workers: Sequence[str]) -> None:
        self.wan, self.folder, self.workers = wan, folder, workers
        self.run_dir = folder / "run"
        self.config = folder / "config.toml"
        tables = {
            "run": {"name": "faults"},
            "environment": {"name": "null"},
            "worker": {"engine": "null", "uplink_mbit": 100.0, "downlink_mbit": 100.0},
            "net": {"host": wan.address(ORIGIN), "origin_uplink_mbit": 300.0},
            "log": {"format": "json"},
        }
        self.config.write_text(config_to_toml(config_from_mapping(tables)), encoding="utf-8")
        self.deadline = time.monotonic() + READY_S
        self.coordinator = self.start(ORIGIN, "coordinator")
        self.wait_for(self.run_dir / "coordinator.json")
        self.origin = self.start(ORIGIN, "origin")
        self.wait_for(self.run_dir / "origin.json")
        self.daemons = {name: self.start_worker(name) for name in workers}
        while len(self.events("worker_joined")) < len(workers):
            self.check_time("not all workers joined")
        time.sleep(2.0)  # the relays are probed meanwhile
        self.publisher = self.start(
            ORIGIN, "publish", str(snapshot), str(self.config), "--workers", str(len(workers))
        )

    def start(self, host: str, command: str, *more: str) -> subprocess.Popen[Any]:
        argv = [sys.executable, "-m", "echo2.cli", command, *(more or (str(self.config),))]
        argv += ["--run-dir", str(self.run_dir)]
        log = (self.folder / f"{command}-{time.monotonic_ns()}.log").open("wb")
        return self.wan.popen(host, argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def start_worker(self, name: str) -> subprocess.Popen[Any]:
        argv = [sys.executable, "-c", LIAR, str(self.folder / f"lie-{name}"), "worker"]
        argv += [str(self.config), "--run-dir", str(self.run_dir), "--name", name]
        log = (self.folder / f"{name}.log").open("wb")
        return self.wan.popen(name, argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)

    def wait_for(self, path: Path) -> None:
        while not path.exists():
            self.check_time(f"{path.name} was not written")

    def check_time(self, what: str) -> None:
        if time.monotonic() > self.deadline:
            raise RuntimeError(f"in time {what}; see {self.folder}")
        time.sleep(POLL_S)

    def events(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / "events.jsonl"
        if not path.exists():
            return []
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in found if event["event"] == name]

    def published(self) -> dict[str, Any]:
        while not (found := self.events("version_published")):
            self.check_time("nothing was published")
        return found[-1]

    def most_needed(self) -> tuple[str, int]:
        """The relay that most workers are behind in the plan, and how many."""
        planned = self.events("dissemination_planned")
        if not planned or not planned[-1]["most_needed"]:
            raise RuntimeError(f"no relay forwards anything in the plan; see {self.folder}")
        most_needed: dict[str, int] = planned[-1]["most_needed"]
        return next(iter(most_needed.items()))

    def installed(self, names: Sequence[str], limit_s: float) -> Mapping[str, float]:
        """Seconds since the publication, of those who must have it."""
        published = self.published()
        self.deadline = time.monotonic() + limit_s
        while True:
            found = {
                event["worker"]: event["time"] - published["time"]
                for event in self.events("version_installed")
                if event["manifest_digest"] == published["manifest_digest"]
            }
            if set(names) <= set(found):
                return found
            self.check_time(f"only {sorted(found)} of {sorted(names)} had it")


def strike(run: Run, fault: str, victim: str) -> None:
    daemon = run.daemons[victim]
    if fault == "kill":
        os.kill(daemon.pid, signal.SIGKILL)
    elif fault == "stop":
        os.kill(daemon.pid, signal.SIGSTOP)
        time.sleep(STOP_S)
        os.kill(daemon.pid, signal.SIGCONT)
    elif fault == "cut":
        run.wan.cut(victim)
        time.sleep(CUT_S)
        run.wan.mend(victim)
    elif fault == "slow":
        run.wan.set_uplink(victim, SLOW_MBIT)
    elif fault == "origin":
        run.origin.kill()
        run.origin.wait()
        time.sleep(ORIGIN_DOWN_S)
        run.origin = run.start(ORIGIN, "origin")


def measure(
    fault: str, snapshot: Path, options: argparse.Namespace, half_s: float
) -> dict[str, Any]:
    links = SCENARIOS["homogeneous"].links(options.workers)
    names = [link.name for link in links[1:]]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, Wan(links) as wan:
        run = Run(wan, Path(folder), snapshot, names)
        run.published()
        victim, num_behind = "", 0
        if fault != "none":
            time.sleep(half_s)
            victim, num_behind = run.most_needed()
            if fault == "lie":
                (Path(folder) / f"lie-{victim}").touch()
            else:
                strike(run, fault, victim)
        live = [name for name in names if not (fault == "kill" and name == victim)]
        found = run.installed(live, options.limit)
        touched = victim if fault in ("stop", "cut", "slow") else ""
        untouched = [found[name] for name in live if name != touched]
        return {
            "fault": fault,
            "victim": victim,
            "descendants": num_behind,
            "untouched_s": round(max(untouched), 2),
            "touched_s": round(found[touched], 2) if touched else None,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mb", type=int, default=256)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--limit", type=float, default=200.0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    wanted = ["none", *(f for f in options.faults.split(",") if f != "none")]
    if unknown := set(wanted) - set(FAULTS):
        parser.error(f"--faults {','.join(sorted(unknown))}: allowed are {', '.join(FAULTS)}")
    links = SCENARIOS["homogeneous"].links(options.workers)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="faults-snapshot-") as temporary:
        snapshot = Path(temporary) / "snapshot"
        write_snapshot(snapshot, options.mb * 1_000_000)
        plain_s = 0.0
        for fault in wanted:
            try:
                result = measure(fault, snapshot, options, plain_s / 2)
            except (WanError, RuntimeError) as error:
                result = {"fault": fault, "problem": str(error)}
            if fault == "none" and "untouched_s" in result:
                plain_s = result["untouched_s"]
            allowed = 1.1 * plain_s + 3.0 + (ORIGIN_DOWN_S if fault == "origin" else 0.0)
            found.append({**result, "allowed_s": round(allowed, 2)})
            print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    report = {
        "benchmark": "broadcast_faults",
        "mb": options.mb,
        "workers": options.workers,
        "bound_s": round(bound_s(options.mb * 1e6, links[0], links[1:]), 2),
        "faults": found,
        "machine": machine(),
    }
    print(json.dumps(report) if options.json else json.dumps(report, indent=2))
    return 1 if any("problem" in each for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
