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
with the origin its downtime more.

Afterwards each daemon that lives has to be where it is without a fault: its descriptors, its
sockets among them, and its own memory (RssAnon) are looked at for SETTLE_S at most. Which worker
forwards to how many is the plan's to say, so that the most of any worker is held against the most
of any worker after the run without a fault (`more_than_none`; that run itself `more_than_before`
anything was published). A link that a repair made stays, for the next version: `links_twice` counts
pairs of workers that have more than one each way, which none may. Needs root, as wan.py does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
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
TCP_ESTABLISHED, TCP_LISTEN = "01", "0A"
SETTLE_S: Final = 60.0
LINK_DESCRIPTORS: Final = 4
ALLOWED_MORE: Final = {"descriptors": 2 * LINK_DESCRIPTORS, "sockets": 2, "memory_mb": 16.0}
"""Two links that a repair made."""
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
        self.before = self.kept()
        self.publisher = self.start(
            ORIGIN, "publish", str(snapshot), str(self.config), "--workers", str(len(workers))
        )

    def kept(self) -> dict[str, dict[str, float]]:
        """What coordinator and origin hold now, and the most that any worker does that lives."""
        workers = [held(d.pid) for d in self.daemons.values() if d.poll() is None]
        most = {key: max(worker[key] for worker in workers) for key in ALLOWED_MORE}
        return {
            "coordinator": held(self.coordinator.pid),
            "origin": held(self.origin.pid),
            "worker": most,
        }

    def links(self) -> dict[str, int]:
        """Pairs of workers of which the first has dialed the second, and those with more than one
        connection of that kind."""
        addresses = {self.wan.address(name) for name in self.daemons}
        dialed = Counter(
            (name, peer)
            for name, daemon in self.daemons.items()
            if daemon.poll() is None
            for peer in peers_dialed(daemon.pid)
            if peer in addresses
        )
        return {"links": len(dialed), "links_twice": sum(n > 1 for n in dialed.values())}

    def settled(self, usual: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
        """The same, once nobody holds more than is usual; as it is, when that does not come."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            kept = self.kept()
            if is_back(most_more(kept, usual)) or time.monotonic() > deadline:
                return kept
            time.sleep(1.0)

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


def held(pid: int) -> dict[str, float]:
    """Descriptors, sockets among them, and MB of memory of its own, of a process."""
    targets = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            targets.append(os.readlink(descriptor))
    status = Path(f"/proc/{pid}/status").read_text()
    (kb,) = (line.split()[1] for line in status.splitlines() if line.startswith("RssAnon:"))
    return {
        "descriptors": len(targets),
        "sockets": sum(target.startswith("socket:") for target in targets),
        "memory_mb": round(int(kb) / 1024, 1),
    }


def peers_dialed(pid: int) -> list[str]:
    """Addresses to which a process has TCP connections, but those that came to a port on which its
    host listens."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    ends = [
        (*line.split()[1].split(":"), *line.split()[2].split(":"), line.split()[3])
        for line in lines
    ]
    listening = {port for _, port, _, _, state in ends if state == TCP_LISTEN}
    return [
        socket.inet_ntoa(bytes.fromhex(address)[::-1])
        for _, port, address, _, state in ends
        if state == TCP_ESTABLISHED and port not in listening
    ]


def most_more(
    kept: Mapping[str, Mapping[str, float]], usual: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Of each quantity, the most that anyone has more than is usual."""
    return {
        key: round(max(kept[name][key] - usual[name][key] for name in kept), 1)
        for key in ALLOWED_MORE
    }


def is_back(more: Mapping[str, float]) -> bool:
    return all(more[key] <= allowed for key, allowed in ALLOWED_MORE.items())


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
    fault: str,
    snapshot: Path,
    options: argparse.Namespace,
    half_s: float,
    usual: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """`usual`: what each daemon holds after the run without a fault, which puts it in there."""
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
        if fault == "none":
            time.sleep(SETTLE_S / 4)  # nothing is told that could be waited for
            usual.update(run.kept())
            more = {"more_than_before": most_more(usual, run.before)}
        else:
            kept = most_more(run.settled(usual), usual)
            links = run.links()
            is_there = is_back(kept) and not links["links_twice"]
            more = {"more_than_none": kept, **links, "is_back": is_there}
        return {
            "fault": fault,
            "victim": victim,
            "descendants": num_behind,
            "untouched_s": round(max(untouched), 2),
            "touched_s": round(found[touched], 2) if touched else None,
            **more,
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
        usual: dict[str, dict[str, float]] = {}
        for fault in wanted:
            try:
                result = measure(fault, snapshot, options, plain_s / 2, usual)
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
    return 1 if any("problem" in each or not each.get("is_back", True) for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
