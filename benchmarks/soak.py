"""Is the coordinator flat? Memory, descriptors, tasks, disk and the loop's lag over a long run.

    python benchmarks/soak.py [--groups 200000] [--workers 1000] [--rate 1000] [--churn 4]
        [--plain] [--realtime] [--warm-up 0] [--folder DIR] [--out FILE]

One real `echo2 coordinator` (CURVE, ledger on the disk), the sockets of 1,000 null workers and
a null learner, at a steady rate of groups of 16 x 512 tokens. Every second --churn workers leave,
every other one without a word, and as many come: every other one under a name that was never
there, the others under one that left. Each quantity is averaged from one tenth of the groups on
(the tenth that follows) and over the last tenth:

    memory_mb         resident memory of the coordinator's process
    descriptors       that it has open
    tasks             of its event loop (/metrics)
    state_mb          of the run's folder: the ledger's index and payloads. They hold what a kept
                      checkpoint may need, and must not grow
    record_mb         events.jsonl: one line for each thing that happened. It grows by design, and
                      is told apart

    lag_p99_ms        of the event loop, from the coordinator's own histogram, since the first group

With --realtime the coordinator runs before the processes of the load, which share its cores here
and have machines of their own elsewhere (SCHED_RR; needs root).

With --warm-up as many seconds pass under the same load before the first group counts. ZeroMQ takes
room for the queues of a worker's connections, 200 KB of it, and uses it, page by page, as messages
pass: a thousand workers that send a message or two a second have used all of it after 400 s.

Goals: each ratio of late to early at most 1.05, lag below 20 ms.
Takes groups / rate seconds and half a minute: by default about four minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

from load_clients import Shape
from load_run import LoadRun, LoadSpec, machine

SAMPLE_S: Final = 1.0
SCRAPE_S: Final = 10.0
"""A scrape of /metrics is work for the coordinator too: about as often as Prometheus asks."""
EARLY: Final = (0.10, 0.20)
LATE: Final = (0.90, 1.01)
RATIO_MAX: Final = 1.05
LAG_MAX_MS: Final = 20.0
FLAT: Final = ("memory_mb", "descriptors", "tasks", "state_mb")


@dataclass(frozen=True, slots=True)
class Sample:
    seconds: float
    groups: int
    memory_mb: float
    descriptors: int
    threads: int
    tasks: int
    state_mb: float
    record_mb: float


class Soak:
    """One run; `samples` of it, and the last scrape."""

    def __init__(self, run: LoadRun, groups: int, churn: float) -> None:
        self.run = run
        self.samples: list[Sample] = []
        self.num_joins = self.num_leaves = 0
        self.metrics = ""
        self._groups = groups
        self._churn = churn
        self._new = count()
        self._gone: list[str] = []
        self._began = time.monotonic()
        self._scraped_at = float("-inf")
        self._lag_before: list[tuple[float, float]] = []

    def _pass(self, seconds: float) -> None:
        """Joins and leaves go on, and nothing is counted."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            for _ in range(int(self._churn)):
                self.one_leaves_one_comes()
            time.sleep(SAMPLE_S)
            self.run.check()

    def go(self, warm_up_s: float = 0.0) -> None:
        """Until so many groups were acknowledged. RuntimeError when they do not get on."""
        self._pass(warm_up_s)
        self.scrape()
        self._lag_before = lag_buckets(self.metrics)
        begun = self.run.counts()[1]
        owed, next_s, last = 0.0, time.monotonic(), (begun, time.monotonic())
        while True:
            done = self.run.counts()[1]
            now = time.monotonic()
            if done > last[0]:
                last = done, now
            elif now - last[1] > 60.0:
                raise RuntimeError(f"no group in 60 s\n{self.run.log_tail()}")
            self.sample(done - begun)
            if done - begun >= self._groups:
                break
            owed += self._churn * SAMPLE_S
            for _ in range(int(owed)):
                self.one_leaves_one_comes()
            owed -= int(owed)
            next_s = max(next_s + SAMPLE_S, now)
            time.sleep(max(0.0, next_s - time.monotonic()))
            self.run.check()
        self.scrape()

    def one_leaves_one_comes(self) -> None:
        number = self.num_joins
        place = number % self.run.spec.processes
        names = self.run.names[place]
        leaving = names[(number * 7919) % len(names)]
        self.run.leave(place, [leaving], goodbye=bool(number // 2 % 2))
        self._gone.append(leaving)
        self.num_leaves += 1
        if number % 2 or len(self._gone) < 20:
            coming = f"new-{next(self._new)}"
            self.run.authorize([coming])
        else:
            coming = self._gone.pop(0)
        self.run.join(place, [coming])
        self.num_joins += 1

    def sample(self, groups: int) -> None:
        now = time.monotonic()
        if now - self._scraped_at >= SCRAPE_S:
            self.scrape()
        status = Path(f"/proc/{self.run.pid}/status").read_text()
        state = record = 0
        for path in self.run.run_dir.rglob("*"):
            try:
                size = path.stat().st_size if path.is_file() else 0
            except FileNotFoundError:
                continue  # a segment that is needed no more
            if path.name == "events.jsonl":
                record += size
            elif "keys" not in path.parts:
                state += size
        self.samples.append(
            Sample(
                seconds=round(now - self._began, 1),
                groups=groups,
                memory_mb=round(_field(status, "VmRSS") / 1024, 2),
                descriptors=len(os.listdir(f"/proc/{self.run.pid}/fd")),
                threads=_field(status, "Threads"),
                tasks=int(metric(self.metrics, "echo2_tasks")),
                state_mb=round(state / 1e6, 2),
                record_mb=round(record / 1e6, 2),
            )
        )

    def scrape(self) -> None:
        self.metrics = self.run.http("/metrics")
        self._scraped_at = time.monotonic()

    # ---------------------------------------------------------------------- results

    def window(self, name: str, share: tuple[float, float]) -> float:
        """Mean of a quantity while these shares of the groups went through."""
        last = self.samples[-1].groups
        found = [
            float(getattr(sample, name))
            for sample in self.samples
            if share[0] * last <= sample.groups <= share[1] * last
        ]
        return sum(found) / max(1, len(found))

    def report(self) -> dict[str, Any]:
        quantities = {}
        after = lag_buckets(self.metrics)
        lags = [(edge, n - m) for (edge, n), (_, m) in zip(after, self._lag_before, strict=True)]
        for name in (*FLAT, "threads", "record_mb"):
            early, late = self.window(name, EARLY), self.window(name, LATE)
            quantities[name] = {
                "early": round(early, 2),
                "late": round(late, 2),
                "ratio": round(late / early, 3) if early else None,
            }
        return {
            "groups": self.samples[-1].groups,
            "seconds": self.samples[-1].seconds,
            "joins": self.num_joins,
            "leaves": self.num_leaves,
            "quantities": quantities,
            "is_flat": all(quantities[name]["ratio"] <= RATIO_MAX for name in FLAT),
            "lag_p99_ms": round(1e3 * quantile(lags, 0.99), 2),
            "lag_p50_ms": round(1e3 * quantile(lags, 0.5), 2),
        }


def metric(text: str, name: str) -> float:
    """The value of a metric without labels."""
    found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/metrics has no {name}")
    return float(found[1])


def lag_buckets(text: str) -> list[tuple[float, float]]:
    """(upper edge in seconds, samples up to it)."""
    pattern = r'^echo2_loop_lag_samples_seconds_bucket\{le="([^"]+)"\} (\S+)$'
    return [(float(le), float(n)) for le, n in re.findall(pattern, text, re.MULTILINE)]


def quantile(buckets: list[tuple[float, float]], share: float) -> float:
    """Seconds, interpolated within the bucket as Prometheus does."""
    total = buckets[-1][1]
    below, low = 0.0, 0.0
    for edge, number in buckets:
        if number >= share * total:
            if edge == float("inf"):
                return low
            return low + (edge - low) * (share * total - below) / max(1.0, number - below)
        below, low = number, edge
    return low


def _field(status: str, name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
    assert found is not None
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--groups", type=int, default=200_000)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rate", type=float, default=1000.0)
    parser.add_argument("--churn", type=float, default=4.0, help="workers a second")
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--groups-per-step", type=int, default=128)
    parser.add_argument("--publish-every", type=int, default=64, help="learner steps")
    parser.add_argument("--plain", action="store_true", help="without CURVE")
    parser.add_argument("--realtime", action="store_true", help="the coordinator goes first")
    parser.add_argument("--warm-up", type=float, default=0.0, help="seconds")
    parser.add_argument("--samples", action="store_true", help="every sample in the output")
    parser.add_argument("--folder", type=Path, help="for the run folder")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    spec = LoadSpec(
        workers=options.workers,
        processes=options.processes,
        slots=2,
        shape=Shape(options.group_size, options.tokens, min(32, options.tokens // 4)),
        groups_per_step=options.groups_per_step,
        publish_every=options.publish_every,
        curve=not options.plain,
    )
    found: dict[str, Any] = {
        "benchmark": "soak",
        "machine": machine(),
        "parameters": {
            **asdict(spec),
            "groups": options.groups,
            "rate": options.rate,
            "churn": options.churn,
            "realtime": options.realtime,
            "warm_up_s": options.warm_up,
        },
        "goals": {"ratio": RATIO_MAX, "lag_p99_ms": LAG_MAX_MS},
    }
    with (
        tempfile.TemporaryDirectory(prefix="soak-", dir=options.folder) as name,
        LoadRun(Path(name) / "load", spec) as run,
    ):
        run.pace(options.rate)
        if options.realtime:
            for thread in os.listdir(f"/proc/{run.pid}/task"):
                os.sched_setscheduler(int(thread), os.SCHED_RR, os.sched_param(1))
        soak = Soak(run, options.groups, options.churn)
        soak.go(options.warm_up)
        steps, groups = run.trained()
        found.update(soak.report(), trained_groups=groups, learner_steps=steps)
    if options.samples:
        found["samples"] = [asdict(sample) for sample in soak.samples]
    text = json.dumps(found, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")
    sys.exit(0 if found["is_flat"] else 1)


if __name__ == "__main__":
    main()
