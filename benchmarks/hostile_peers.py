"""A run among hostile peers: acknowledgement latency of honest workers, memory, descriptors.

    python benchmarks/hostile_peers.py [--phases quiet,flood,...] [--messages 100000] [--per-s 2000]
                                       [--connections 2000] [--seconds 30] [--out FILE]

A coordinator and an origin (`echo2 coordinator`, `echo2 origin`), a worker's relay, five honest
workers that deliver about a hundred groups a second to a learner that takes them at once, and two
honest peers that fetch chunks, are processes of this machine. One after the other:

    quiet     nobody else
    flood     a peer with a worker's key sends --messages mutated, random and valid but wrong
              messages at --per-s a second, half on the control and half on the rollouts lane
    relay     the same to the relay's chunk lane
    origin    a tenth as many to the origin's
    garbage   50 TCP connections at a time to all ports, that send bytes which are no handshake
    slow      --connections half-open ones, a byte a second each, again as soon as one is closed;
              after a while a new worker with a key joins
    silent    as many that connect and say nothing; another one joins
    long      16 that each send 64 MiB of a handshake that never ends, at once: what strangers can
              have a server hold for ten seconds, at this machine's own speed (no goal for p99)

Delivery to acknowledgement is measured by the workers, from the first sending of a result. The
goal: every process lives, every honest result is acknowledged, p99 stays under 50 ms, and memory
and descriptors come back. Prints one JSON object; exit code 1 when a goal was missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from hostile_fleet import PERIOD  # noqa: E402

from echo2.config import config_from_mapping, config_to_toml  # noqa: E402
from echo2.messages import Lane  # noqa: E402
from echo2.net.auth import AllowList, load_or_create_key  # noqa: E402
from echo2.net.descriptors import raise_descriptor_limit  # noqa: E402
from echo2.net.keys import KeyPair  # noqa: E402
from echo2.weights.store import write_version  # noqa: E402

P99_GOAL_MS: Final = 50.0
GROWTH_MB_MAX: Final = 64.0
"""Of what a process holds in the end over what it held when all had been quiet."""
WORKERS: Final = ("w-1", "w-2", "w-3", "w-4", "w-5")
NEWCOMERS: Final = ("w-slow", "w-silent")
PHASES: Final = ("quiet", "flood", "relay", "origin", "garbage", "slow", "silent", "long")
VERSION_MB: Final = 32
WATCH_S: Final = 0.1
LAG_S: Final = 1.0
JOIN_AFTER_S: Final = 12.0
"""Later than the first half-open connections are closed, so the crowd has come back once."""
UP_S: Final = 60.0
SETTLE_S: Final = 15.0
CALM_S: Final = 2.0
"""Between the start of an attacker's process, which costs a core and is no attack, and its first
message."""
LONG_CONNECTIONS: Final = 16
LONG_BYTES: Final = 64 << 20
_TICKS: Final = os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------ who is watched


@dataclass
class Sample:
    resident_mb: float
    descriptors: int
    processor_s: float


class Watch:
    """What the processes hold, every WATCH_S, and the largest lag of the coordinator's loop,
    every LAG_S, in a thread of its own."""

    def __init__(self) -> None:
        self.metrics_url = ""
        self.lags_s: list[tuple[float, float]] = []
        self.pids: dict[str, int] = {}
        self.samples: list[tuple[float, dict[str, Sample]]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def of(self, name: str, start: float, end: float) -> dict[str, float]:
        found = [s[name] for at, s in self.samples if start <= at <= end and name in s]
        if not found:
            return {}
        return {
            "resident_mb": round(found[-1].resident_mb, 1),
            "resident_mb_most": round(max(s.resident_mb for s in found), 1),
            "descriptors": found[-1].descriptors,
            "descriptors_most": max(s.descriptors for s in found),
            "processor_share": round(
                (found[-1].processor_s - found[0].processor_s) / max(1e-9, end - start), 2
            ),
        }

    def lag_max_ms(self, start: float, end: float) -> list[int]:
        """One for each LAG_S."""
        return [round(1e3 * lag_s) for at, lag_s in self.lags_s if start <= at <= end + LAG_S]

    def _run(self) -> None:
        due = time.time()
        while not self._stop.wait(WATCH_S):
            self.samples.append((time.time(), dict(self._look())))
            if self.metrics_url and time.time() >= due:
                due = time.time() + LAG_S
                self._look_at_lag()

    def _look_at_lag(self) -> None:
        with contextlib.suppress(OSError):  # it may be gone already, in the end
            text = urllib.request.urlopen(self.metrics_url, timeout=5.0).read().decode()
            for line in text.splitlines():
                if line.startswith("echo2_loop_lag_max_seconds "):
                    self.lags_s.append((time.time(), float(line.split()[1])))

    def _look(self) -> Iterator[tuple[str, Sample]]:
        for name, pid in list(self.pids.items()):
            proc = Path("/proc") / str(pid)
            with contextlib.suppress(OSError, IndexError):
                pages = int((proc / "statm").read_text().split()[1])
                fields = (proc / "stat").read_text().rpartition(")")[2].split()
                yield (
                    name,
                    Sample(
                        pages * resource.getpagesize() / 1e6,
                        len(os.listdir(proc / "fd")),
                        (int(fields[11]) + int(fields[12])) / _TICKS,
                    ),
                )


# --------------------------------------------------------------------------- who belongs here


@dataclass
class Ground:
    """The processes of the run."""

    folder: Path
    stack: contextlib.ExitStack
    watch: Watch
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    def start(self, name: str, command: list[str]) -> None:
        log = self.stack.enter_context((self.folder / f"{name}.log").open("wb"))
        process = subprocess.Popen([sys.executable, *command], stdout=log, stderr=log)
        self.processes[name] = process
        self.watch.pids[name] = process.pid
        self.stack.callback(self.end, name)

    def end(self, name: str) -> int:
        process = self.processes[name]
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(UP_S)
            except subprocess.TimeoutExpired:
                process.kill()
        return process.wait()

    def until(self, path: Path, name: str) -> Any:
        """The JSON that a process writes when it is up."""
        deadline = time.monotonic() + UP_S
        while not path.exists():
            self.check_alive(name)
            if time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not come up")
            time.sleep(0.05)
        return json.loads(path.read_text(encoding="utf-8"))

    def check_alive(self, *names: str) -> None:
        for name in names or tuple(self.processes):
            if (code := self.processes[name].poll()) is not None:
                log = (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{name} ended with {code}: {log}")

    def a_key(self, name: str) -> KeyPair:
        keys = load_or_create_key(self.run_dir / "keys" / f"{name}.key")
        AllowList(self.run_dir / "keys" / "authorized").authorize(name, keys.public)
        return keys


def start_all(ground: Ground) -> dict[str, Any]:
    config = config_from_mapping(
        {
            "environment": {"name": "null"},
            "worker": {"engine": "null"},
            "learner": {"groups_per_step": 32},
            "dispatch": {"group_size": 4, "lead_steps": 3},
            "staleness": {"max": 2 * PERIOD, "period": PERIOD},
            "heartbeat": {"interval_s": 1.0, "suspect_s": 10.0, "gone_s": 30.0},
            "log": {"level": "warning"},
        }
    )
    path = ground.folder / "config.toml"
    path.write_text(config_to_toml(config), encoding="utf-8")
    run = [str(path), "--run-dir", str(ground.run_dir)]
    ground.start("coordinator", ["-m", "echo2.cli", "coordinator", *run])
    record = ground.until(ground.run_dir / "coordinator.json", "coordinator")
    for name in WORKERS:
        ground.a_key(name)
    manifest = write_version(ground.run_dir / "versions", a_tensor())
    write_version(ground.folder / "relay" / "store", a_tensor())
    ground.start("origin", ["-m", "echo2.cli", "origin", *run])
    origin = ground.until(ground.run_dir / "origin.json", "origin")
    keys = {name: ground.a_key(name) for name in ("fetcher", "w-evil")}
    peers = ground.folder / "peers.json"
    peers.write_text(json.dumps({name: pair.public for name, pair in keys.items()}))
    script = str(ROOT / "benchmarks" / "hostile_fleet.py")
    ground.start("relay", [script, "relay", str(ground.folder / "relay"), str(peers)])
    relay = ground.until(ground.folder / "relay" / "relay.json", "relay")
    names = ",".join(WORKERS)
    out = str(ground.folder / "fleet.txt")
    ground.start(
        "fleet", [script, "fleet", str(ground.run_dir), out, "--names", names, "--learner"]
    )
    for name in NEWCOMERS:
        ground.a_key(name)
        out, begins = (str(ground.folder / f"{name}.{end}") for end in ("txt", "begins"))
        fleet = ["fleet", str(ground.run_dir), out, "--names", name, "--begins", begins]
        ground.start(name, [script, *fleet])
    for where, server, role in (("relay", relay, "worker"), ("origin", origin, "origin")):
        settings = ground.folder / f"fetch_{where}.json"
        found = {
            **server,
            "role": role,
            "secret": keys["fetcher"].secret,
            "digest": manifest.manifest_digest,
            "num_chunks": manifest.num_chunks,
        }
        settings.write_text(json.dumps(found))
        fetched = str(ground.folder / f"fetched_{where}.txt")
        ground.start(f"fetch_{where}", [script, "fetch", fetched, str(settings)])
    return {
        "record": record,
        "origin": origin,
        "relay": relay,
        "digest": manifest.manifest_digest,
        "evil": keys["w-evil"],
    }


def a_tensor() -> Iterator[tuple[str, str, tuple[int, ...], bytes]]:
    yield "t", "U8", (VERSION_MB << 20,), random.Random(0).randbytes(VERSION_MB << 20)


def first_acknowledgement(ground: Ground, name: str, path: Path) -> None:
    deadline = time.monotonic() + UP_S
    while not path.exists() or not path.stat().st_size:
        ground.check_alive(name)
        if time.monotonic() > deadline:
            log = (ground.folder / f"{name}.log").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"{name} got no acknowledgement: {log}")
        time.sleep(0.05)


# ---------------------------------------------------------------------------- who does not


def flood_process(pipe: Any, kwargs: dict[str, Any], per_s: float, count: int) -> None:
    """A process of its own: its work is not the run's."""
    from security.hostile import Flood

    flood = Flood(**kwargs)
    pipe.send("ready")
    pipe.recv()
    began = time.monotonic()
    flood.send_at(per_s, count, deadline_s=3 * count / per_s + 30.0)
    seconds = time.monotonic() - began
    time.sleep(1.0)  # what ZeroMQ has taken is sent
    flood.close()
    pipe.send({"sent": dict(flood.sent), "seconds": round(seconds, 1)})


def flood(
    targets: list[tuple[dict[str, Any], float, int]],
) -> tuple[float, list[dict[str, Any]]]:
    """When the first message was sent, and the sums of each."""
    context = multiprocessing.get_context("spawn")
    found = []
    for kwargs, per_s, count in targets:
        ours, theirs = context.Pipe()
        process = context.Process(target=flood_process, args=(theirs, kwargs, per_s, count))
        process.start()
        found.append((ours, process))
    for pipe, _ in found:
        assert pipe.recv() == "ready"
    time.sleep(CALM_S)
    began = time.time()
    for pipe, _ in found:
        pipe.send("go")
    sums = []
    for pipe, process in found:
        process.join()
        sums.append(pipe.recv() if pipe.poll() else {"failed": process.exitcode})
    return began, sums


def crowd_process(
    pipe: Any, endpoints: list[str], how: str, num: int, drip_s: float, seconds: float
) -> None:
    from security.hostile import Crowd

    raise_descriptor_limit()
    pipe.send("ready")
    pipe.recv()

    async def play() -> dict[str, int]:
        crowd = Crowd(random.Random(6), endpoints, how=how, num=num, drip_s=drip_s)
        least = 0
        began = time.monotonic()
        async with crowd.here():
            if how != "garbage":
                await crowd.all_open()
                least = crowd.num_open
            opened_s = time.monotonic() - began
            pipe.send("here")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                await asyncio.sleep(0.1)
                least = min(least, crowd.num_open)
        return {
            **crowd.counters,
            "all_open_after_ms": int(1e3 * opened_s),
            "open_at_once_least": least,
        }

    pipe.send(asyncio.run(play()))


@contextlib.contextmanager
def crowd(*args: Any) -> Iterator[list[dict[str, Any]]]:
    """They are there when this begins, and gone when it ends; filled with their sums."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=crowd_process, args=(theirs, *args))
    process.start()
    assert ours.recv() == "ready"
    time.sleep(CALM_S)
    ours.send("go")
    assert ours.recv() == "here"
    sums: list[dict[str, Any]] = []
    yield sums
    process.join()
    sums.append(ours.recv() if ours.poll() else {"failed": process.exitcode})


def long_process(pipe: Any, endpoint: str) -> None:
    from security.hostile import a_long_hello, address_of

    pipe.send("ready")

    async def one() -> int:
        _, writer = await asyncio.open_connection(*address_of(endpoint))
        num_bytes = 0
        try:
            for piece in a_long_hello(LONG_BYTES):
                writer.write(piece)
                await writer.drain()
                num_bytes += len(piece)
            await asyncio.sleep(5.0)
        except ConnectionError:
            pass  # that is what should happen
        finally:
            writer.close()
        return num_bytes

    async def play() -> int:
        return sum(await asyncio.gather(*(one() for _ in range(LONG_CONNECTIONS))))

    pipe.send(asyncio.run(play()))


# --------------------------------------------------------------------------------- phases


def run_phases(ground: Ground, facts: dict[str, Any], options: argparse.Namespace) -> Any:
    record, evil = facts["record"], facts["evil"]
    control = {
        "endpoint": record["control"],
        "server_key": record["public_key"],
        "keys": evil,
    }
    rollouts = {**control, "endpoint": record["rollouts"]}
    ports = [record[lane] for lane in ("control", "rollouts", "join")]
    all_ports = [*ports, facts["origin"]["endpoint"], facts["relay"]["endpoint"]]
    windows: dict[str, tuple[float, float]] = {}
    details: dict[str, Any] = {}
    for phase in options.phases.split(","):
        began = time.time()
        match phase:
            case "quiet":
                time.sleep(options.seconds)
            case "flood":
                half, rate = options.messages // 2, options.per_s / 2
                began, details[phase] = flood(
                    [
                        ({"rng": random.Random(1), "lane": Lane.CONTROL, **control}, rate, half),
                        ({"rng": random.Random(2), "lane": Lane.ROLLOUTS, **rollouts}, rate, half),
                    ]
                )
            case "relay" | "origin":
                server = facts[phase]
                target = {
                    "rng": random.Random(3),
                    "lane": Lane.CHUNKS,
                    "endpoint": server["endpoint"],
                    "server_key": server["public_key"],
                    "keys": evil,
                    "digest": facts["digest"],
                }
                count = options.messages if phase == "relay" else options.messages // 10
                began, details[phase] = flood([(target, options.per_s, count)])
            case "garbage":
                with crowd(all_ports, "garbage", 50, 0.0, options.seconds) as sums:
                    began = time.time()
                details[phase] = sums
            case "slow" | "silent":
                seconds = max(options.seconds, 2 * JOIN_AFTER_S)
                with crowd(ports, phase, options.connections, 1.0, seconds) as sums:
                    began = time.time()
                    time.sleep(JOIN_AFTER_S)
                    joined = join(ground, f"w-{phase}")
                details[phase] = [*sums, joined]
            case "long":
                context = multiprocessing.get_context("spawn")
                ours, theirs = context.Pipe()
                process = context.Process(target=long_process, args=(theirs, record["rollouts"]))
                process.start()
                assert ours.recv() == "ready"
                began = time.time()
                process.join()
                details[phase] = {"megabytes_taken": round(ours.recv() / 1e6)}
        windows[phase] = began, time.time()
        ground.check_alive()
    time.sleep(SETTLE_S)
    windows["after"] = time.time() - 2.0, time.time()
    return windows, details


def join(ground: Ground, name: str) -> dict[str, Any]:
    """A new worker with a key, whose process waits already: how long from its first connection
    until its first group is acknowledged, of which it takes LEASE_S and more to make it."""
    began = time.monotonic()
    (ground.folder / f"{name}.begins").touch()
    first_acknowledgement(ground, name, ground.folder / f"{name}.txt")
    return {"new_worker_acknowledged_s": round(time.monotonic() - began, 2)}


def latencies(path: Path) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """(time, seconds) of each line, and the sums at the end."""
    lines = path.read_text(encoding="utf-8").splitlines()
    sums = json.loads(lines.pop()) if lines and lines[-1].startswith("{") else {}
    return [(float(a), float(b)) for a, b in (line.split() for line in lines)], sums


def in_window(times: list[tuple[float, float]], window: tuple[float, float]) -> dict[str, Any]:
    found = sorted(s for at, s in times if window[0] <= at <= window[1])
    if not found:
        return {"num": 0}
    return {
        "num": len(found),
        "p50_ms": round(1e3 * found[len(found) // 2], 1),
        "p99_ms": round(1e3 * found[int(0.99 * len(found))], 1),
        "max_ms": round(1e3 * found[-1], 1),
        "over_goal_in_second": dict(
            Counter(
                int(at - window[0])
                for at, s in times
                if window[0] <= at <= window[1] and 1e3 * s >= P99_GOAL_MS
            )
        ),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="hostile-peers-", dir=options.folder) as name,
        contextlib.ExitStack() as s,
    ):
        ground = Ground(Path(name), s, Watch())
        s.callback(ground.watch.close)
        facts = start_all(ground)
        first_acknowledgement(ground, "fleet", ground.folder / "fleet.txt")
        ground.watch.metrics_url = facts["record"]["http"] + "/metrics"
        time.sleep(3.0)
        windows, details = run_phases(ground, facts, options)
        status = json.loads(
            urllib.request.urlopen(facts["record"]["http"] + "/api/status", timeout=30).read()
        )
        newcomers = [name for name in NEWCOMERS if (ground.folder / f"{name}.begins").exists()]
        codes = {
            name: ground.end(name)
            for name in ("fleet", *NEWCOMERS, "fetch_relay", "fetch_origin", "relay", "origin")
        }
        codes["coordinator"] = ground.end("coordinator")
        events = Counter(
            json.loads(line)["event"]
            for line in (ground.run_dir / "events.jsonl").read_text().splitlines()
        )
        verified = subprocess.run(
            [sys.executable, "-m", "echo2.cli", "verify", str(ground.run_dir)],
            capture_output=True,
            text=True,
            check=False,
        )
        acknowledged, sums = latencies(ground.folder / "fleet.txt")
        fetched = {w: latencies(ground.folder / f"fetched_{w}.txt")[0] for w in ("relay", "origin")}
        delivered = [sums, *(latencies(ground.folder / f"{n}.txt")[1] for n in newcomers)]
        found: dict[str, Any] = {"phases": {}}
        for phase, window in windows.items():
            found["phases"][phase] = {
                "seconds": round(window[1] - window[0], 1),
                "acknowledgement": in_window(acknowledged, window),
                "window_of_chunks": {w: in_window(t, window) for w, t in fetched.items()},
                **{p: ground.watch.of(p, *window) for p in ("coordinator", "relay", "origin")},
                "loop_lag_max_ms": ground.watch.lag_max_ms(*window),
                "hostile": details.get(phase),
            }
        found["delivered"] = delivered
        found["refused"] = status["refused"]
        found["relay_sums"] = json.loads(
            (ground.folder / "relay" / "relay_sums.json").read_text(encoding="utf-8")
        )
        found["events"] = {
            k: events[k]
            for k in ("message_refused", "handshake_refused", "install_failed", "worker_joined")
        }
        found["log_bytes"] = {
            p: (ground.folder / f"{p}.log").stat().st_size for p in ("coordinator", "relay")
        }
        found["events_bytes"] = (ground.run_dir / "events.jsonl").stat().st_size
        found["exit_codes"] = codes
        found["verify"] = {"code": verified.returncode, "said": verified.stdout[-400:]}
        found["missed"] = missed(found)
        return found


def missed(found: dict[str, Any]) -> list[str]:
    """The goals that were not reached, in words."""
    problems = []
    first = next(iter(found["phases"].values()))
    for phase, facts in found["phases"].items():
        p99_ms = facts["acknowledgement"].get("p99_ms")
        if phase not in ("after", "long") and (p99_ms is None or p99_ms >= P99_GOAL_MS):
            problems.append(f"{phase}: p99 of acknowledgements {p99_ms} ms")
    for process in ("coordinator", "relay", "origin"):
        before, after = first[process], found["phases"]["after"][process]
        if after["resident_mb"] > before["resident_mb"] + GROWTH_MB_MAX:
            problems.append(f"{process} holds {after['resident_mb']} MB")
        if after["descriptors"] > before["descriptors"] + 16:
            problems.append(f"{process} holds {after['descriptors']} descriptors")
    for sums in found["delivered"]:
        if not sums or sums["delivered"] != sums["acknowledged"]:
            problems.append(f"not every result was acknowledged: {sums}")
    if any(found["exit_codes"].values()):
        problems.append(f"exit codes {found['exit_codes']}")
    if found["verify"]["code"]:
        problems.append("echo2 verify")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--phases", default=",".join(PHASES))
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--per-s", type=float, default=2000.0)
    parser.add_argument("--connections", type=int, default=2000)
    parser.add_argument("--seconds", type=float, default=30.0, help="of a phase without an end")
    parser.add_argument(
        "--folder", type=Path, help="where the run folder is made; on /dev/shm no disk is measured"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the processes are ended too
    report = {
        "benchmark": "hostile_peers",
        "machine": {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "messages": options.messages,
        "per_s": options.per_s,
        "connections": options.connections,
        "folder": str(options.folder or tempfile.gettempdir()),
        "load_before": os.getloadavg()[0],
        "niceness": os.nice(0),
        "goal": {"p99_ms": P99_GOAL_MS, "growth_mb_max": GROWTH_MB_MAX},
        **measure(options),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    return 1 if report["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
