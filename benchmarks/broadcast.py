"""Seconds until a new policy version is installed on a whole fleet, against the fluid bound.

    python benchmarks/broadcast.py --scenario homogeneous --workers 8 --mb 64 --json
        [--runs 3] [--line-share 0.25] [--peers star,torrent | none]
        [--torrent-python VENV/bin/python]

The fleet is hosts with shaped links on this machine (wan.py; needs root or a user namespace).
In each run, on fresh hosts each time: echo2 with real daemons, whose engine holds no model, so
that an install takes no time of its own; an HTTP star; BitTorrent. Figures are medians of
--runs. Nothing else should run on the machine.

    bound_s            what no scheme can beat, for the links as they are set
    ours_q90_s, ours_s publication until 90 % (rounded up to workers), and all, have installed it
    star_s, torrent_s  until every worker has every byte; null when left out
    ratio              ours_s / bound_s

BitTorrent needs libtorrent (pip install libtorrent), in this Python or --torrent-python; where
it is absent and --peers does not ask for it, it is left out with a word on stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from broadcast_actor import Actor
from broadcast_peers import run_star, run_torrent, torrent_problem
from wan import HostLink, Wan, WanError

from echo2.config import config_from_mapping, config_to_toml

ORIGIN: Final = "origin"
ORIGIN_DOWN_MBIT: Final = 1000.0
READY_S: Final = 120.0
POLL_S: Final = 0.1
TENSOR_BYTES: Final = 8_000_000


@dataclass(frozen=True, slots=True)
class Scenario:
    """Links of a fleet. Worker i has the i-th of `workers_mbit` (up, down), over and over.

    `round_trip_s` and `loss` are those between any two hosts; each of the two links on the way
    has half of them.
    """

    origin_mbit: float
    workers_mbit: tuple[tuple[float, float], ...] = ((100, 100),)
    num_workers: int = 8
    round_trip_s: float = 0.0
    loss: float = 0.0

    def links(self, num_workers: int, line_share: float = 1.0) -> list[HostLink]:
        """Origin first; every rate times `line_share`."""
        delay_s, loss = self.round_trip_s / 4, 1 - math.sqrt(1 - self.loss)
        rates = [(self.origin_mbit, ORIGIN_DOWN_MBIT)]
        rates += [self.workers_mbit[i % len(self.workers_mbit)] for i in range(num_workers)]
        names = [ORIGIN, *(f"w{i}" for i in range(num_workers))]
        return [
            HostLink(name, up * line_share, down * line_share, delay_s, loss)
            for name, (up, down) in zip(names, rates, strict=True)
        ]


SCENARIOS: Final = {
    "homogeneous": Scenario(origin_mbit=300),
    "unequal": Scenario(
        origin_mbit=300, workers_mbit=((20, 200), (50, 200), (100, 400), (200, 400))
    ),
    "slow_origin": Scenario(origin_mbit=100),
    "wan": Scenario(
        origin_mbit=80, workers_mbit=((40, 40),), num_workers=4, round_trip_s=0.1, loss=0.001
    ),
}


def bound_s(num_bytes: float, origin: HostLink, workers: Sequence[HostLink]) -> float:
    """The fluid bound (Kumar and Ross 2006): T >= max(G/u_0, G/min d_i, nG/(u_0 + Σu_i)).

    G: bytes of the version; u_0: the origin's uplink; u_i, d_i: the workers' links.
    """
    bits = num_bytes * 8 / 1e6
    return max(
        bits / origin.up_mbit,
        bits / min(link.down_mbit for link in workers),
        len(workers) * bits / (origin.up_mbit + sum(link.up_mbit for link in workers)),
    )


# ---------------------------------------------------------------------------------- ours


def run_ours(
    wan: Wan,
    snapshot: Path,
    folder: Path,
    *,
    origin: str,
    workers: Sequence[str],
    limit_s: float,
    lines: Mapping[str, HostLink] | None = None,
) -> dict[str, float]:
    """Seconds from the publication to each worker's install, by the run's own records.

    `lines`: what each host is told of its own line (worker.uplink_mbit, worker.downlink_mbit and
    net.origin_uplink_mbit), as whoever rents one knows it; without it nobody knows more than the
    defaults, for this is the fleet's first version.

    A coordinator with its origin on the origin's host, `echo2 worker` on each other.
    """
    run_dir = folder / "run"
    path = folder / "config.toml"
    tables = {
        "run": {"name": "broadcast"},
        "environment": {"name": "null"},
        "worker": {"engine": "null"},
        "net": {
            "host": wan.address(origin),
            "origin_uplink_mbit": lines[origin].up_mbit if lines else 0.0,
        },
        "http": {"enabled": False},
        "log": {"format": "json"},
    }
    path.write_text(config_to_toml(config_from_mapping(tables)), encoding="utf-8")
    script = str(Path(__file__).with_name("broadcast_publisher.py"))
    argv = [sys.executable, script, str(path), str(run_dir), str(snapshot)]
    publisher = Actor(wan, origin, argv, folder)
    ready = time.monotonic() + READY_S
    publisher.hear("up", deadline=ready)
    actors = [publisher]
    for name in workers:
        argv = [sys.executable, "-m", "echo2.cli", "worker", str(path)]
        argv += ["--run-dir", str(run_dir), "--name", name]
        if lines:
            argv += ["--set", f"worker.uplink_mbit={lines[name].up_mbit}"]
            argv += ["--set", f"worker.downlink_mbit={lines[name].down_mbit}"]
        actors.append(Actor(wan, name, argv, folder))

    def times_of(event: str, num: int, *, deadline: float) -> dict[str, float]:
        """When it happened, by worker, once it has to `num` of them."""
        while len(found := _times(run_dir, event)) < num:
            for actor in actors:
                actor.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"in time there were {len(found)} of {num} {event}")
            time.sleep(POLL_S)
        return found

    times_of("worker_joined", len(workers), deadline=ready)
    publisher.tell("publish")
    deadline = time.monotonic() + limit_s
    publisher.hear("published", deadline=deadline)
    (published,) = times_of("version_published", 1, deadline=deadline).values()
    installed = times_of("version_installed", len(workers), deadline=deadline)
    return {worker: at - published for worker, at in installed.items()}


def _times(run_dir: Path, name: str) -> dict[str, float]:
    """By worker ("" if it is about none), from events.jsonl."""
    found = {}
    for line in (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):  # else it is being written
            event = json.loads(line)
            if event["event"] == name:
                found[event.get("worker", "")] = event["time"]
    return found


# --------------------------------------------------------------------------------- runs


def measure(options: argparse.Namespace) -> dict[str, Any]:
    scenario = SCENARIOS[options.scenario]
    links = scenario.links(options.workers or scenario.num_workers, options.line_share)
    origin, *workers = links
    names = [link.name for link in workers]
    bound = bound_s(options.mb * 1e6, origin, workers)
    lines = {link.name: link for link in links} if options.rates == "told" else None
    systems: dict[str, Callable[..., dict[str, float]]] = {"ours": partial(run_ours, lines=lines)}
    if "star" in options.peers:
        systems["star"] = run_star
    if "torrent" in options.peers:
        systems["torrent"] = lambda *arguments, **keywords: run_torrent(
            *arguments, python=options.torrent_python, **keywords
        )
    runs: dict[str, list[list[float]]] = {system: [] for system in systems}
    with tempfile.TemporaryDirectory(prefix="broadcast-") as temporary:
        snapshot = Path(temporary) / "snapshot"
        file = write_snapshot(snapshot, options.mb * 1_000_000)
        for index in range(options.runs):
            for system, run in systems.items():
                what = snapshot if system == "ours" else file
                with tempfile.TemporaryDirectory(dir=temporary) as folder, Wan(links) as wan:
                    seconds = run(
                        wan,
                        what,
                        Path(folder),
                        origin=ORIGIN,
                        workers=names,
                        limit_s=options.limit,
                    )
                runs[system].append(sorted(seconds.values()))
                took = f"{max(seconds.values()):.2f} s"
                print(f"run {index + 1}: {system} {took}", file=sys.stderr, flush=True)

    def median(system: str, q: float) -> float | None:
        if system not in runs:
            return None
        at = math.ceil(q * len(workers)) - 1
        return round(statistics.median(times[at] for times in runs[system]), 3)

    ours = median("ours", 1.0)
    assert ours is not None
    return {
        "benchmark": "broadcast",
        "scenario": options.scenario,
        "workers": len(workers),
        "mb": options.mb,
        "runs": options.runs,
        "rates": options.rates,
        "line_share": options.line_share,
        "bound_s": round(bound, 3),
        "ours_s": ours,
        "ours_q90_s": median("ours", 0.9),
        "ratio": round(ours / bound, 3),
        "star_s": median("star", 1.0),
        "torrent_s": median("torrent", 1.0),
        "all_s": {
            system: [[round(value, 3) for value in times] for times in found]
            for system, found in runs.items()
        },
        "machine": machine(),
    }


def write_snapshot(folder: Path, num_bytes: int) -> Path:
    """A safetensors folder with so many bytes of bfloat16 weights, which no codec shrinks."""
    folder.mkdir()
    header: dict[str, Any] = {}
    for begin in range(0, num_bytes, TENSOR_BYTES):
        end = min(begin + TENSOR_BYTES, num_bytes)
        header[f"layers.{len(header)}.weight"] = {
            "dtype": "BF16",
            "shape": [(end - begin) // 2],
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for entry in header.values():
            file.write(os.urandom(entry["data_offsets"][1] - entry["data_offsets"][0]))
    return path


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text(encoding="utf-8").strip()
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "tcp_congestion_control": control,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), default="homogeneous")
    parser.add_argument("--workers", type=int, default=0, help="default: the scenario's own")
    parser.add_argument("--mb", type=int, default=64, help="size of the version in 10^6 bytes")
    parser.add_argument("--runs", type=int, default=1, help="figures are medians of so many")
    parser.add_argument(
        "--peers", help="star, torrent, star,torrent or none; default: those that can run here"
    )
    parser.add_argument("--torrent-python", default=sys.executable, help="one with libtorrent")
    parser.add_argument(
        "--rates",
        choices=("told", "unknown"),
        default="told",
        help="whether echo2's hosts are told their lines, or start with the defaults",
    )
    parser.add_argument(
        "--line-share",
        type=float,
        default=1.0,
        help="every line at this share of its rate, so that a small machine carries a larger fleet",
    )
    parser.add_argument("--limit", type=float, default=300.0, help="seconds; longer is a failure")
    parser.add_argument("--json", action="store_true", help="one JSON object, and nothing else")
    options = parser.parse_args(arguments)
    problem = torrent_problem(options.torrent_python) if options.peers != "none" else ""
    if options.peers is None:
        options.peers = "star" if problem else "star,torrent"
        if problem:
            print(f"broadcast.py: BitTorrent is left out: {problem}", file=sys.stderr)
    options.peers = [] if options.peers == "none" else options.peers.split(",")
    if unknown := set(options.peers) - {"star", "torrent"}:
        parser.error(f"--peers {','.join(sorted(unknown))}: allowed are star, torrent, none")
    if options.workers < 0 or options.mb < 1 or options.runs < 1:
        parser.error("--workers, --mb and --runs must be 1 or more")
    if not 0.01 <= options.line_share <= 10:
        parser.error("--line-share must be between 0.01 and 10")
    if problem and "torrent" in options.peers:
        parser.error(problem)
    try:
        report = measure(options)
    except (WanError, RuntimeError) as error:
        print(f"broadcast.py: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(report))
        return 0
    print(f"{report['scenario']}: {report['mb']} MB to {report['workers']} workers")
    for system in ("bound_s", "ours_s", "ours_q90_s", "star_s", "torrent_s"):
        if report[system] is not None:
            times = report[system] / report["bound_s"]
            print(f"{system:11} {report[system]:8.2f}   {times:5.2f} times the bound")
    return 0


if __name__ == "__main__":
    sys.exit(main())
