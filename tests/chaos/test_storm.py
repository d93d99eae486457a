"""Random faults of processes and links strike a run over several hosts, which then ends well.

Coordinator, learner and origin are at one place, three workers at three others. Killed, stopped
for 2 to 20 s, cut off for 2 to 20 s, or cut off one way: each part in turn, at a fixed seed, some
at the same time. What ended is started again, and afterwards all is left alone.

    ECHO2_CHAOS_S=300 pytest tests/chaos/test_storm.py -s         five minutes of it
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from echo2.verify import verify_run

from .wan_fleet import HEAD, WanFleet, missing

pytest.importorskip("torch")
WHY = missing()
pytestmark = [
    pytest.mark.skipif(bool(WHY), reason=f"no hosts here: {WHY}"),
    pytest.mark.timeout(1800),
]
SEED = 23
CHAOS_S = float(os.environ.get("ECHO2_CHAOS_S", "45"))
EACH_S = (3.0, 8.0)
"""Between the beginnings of two faults."""
LASTS_S = (2.0, 20.0)
WORKERS = 3
STEPS = int(1.6 * CHAOS_S)
"""More than are done while faults strike: of 8 groups each, at 4 of a worker in a second."""
END_S = 900.0

Kind = Literal["kill", "stop", "cut", "in", "out"]
KILLED: tuple[Kind, ...] = ("kill", "stop")
CUT: tuple[Kind, ...] = ("cut", "in", "out")


@dataclass(frozen=True, slots=True)
class Fault:
    """`victim`: a process, `engine:WORKER`, or a host for a cut. `lasts_s` is 0 for a kill."""

    at_s: float
    kind: Kind
    victim: str
    lasts_s: float

    def __str__(self) -> str:
        for_s = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:6.1f} s: {self.kind} {self.victim}{for_s}"


def planned(rng: random.Random, chaos_s: float) -> list[Fault]:
    """Every kind of fault of every part once, before any comes again."""
    deck: list[tuple[Kind, str]] = []
    faults: list[Fault] = []
    at_s = rng.uniform(*EACH_S)
    busy: dict[str, float] = {}
    while at_s < chaos_s:
        if not deck:
            parts = ("coordinator", "learner", "origin", "worker", "engine:")
            deck = [(kind, part) for kind in KILLED for part in parts]
            deck += [(kind, host) for kind in CUT for host in (HEAD, "worker")]
            rng.shuffle(deck)
        kind, part = deck.pop()
        worker = f"w-{rng.randint(1, WORKERS)}"
        victim = part.replace("worker", worker) + (worker if part == "engine:" else "")
        lasts_s = 0.0 if kind == "kill" else min(rng.uniform(*LASTS_S), chaos_s - at_s)
        if at_s >= busy.get(victim, 0.0):
            faults.append(Fault(at_s, kind, victim, lasts_s))
            busy[victim] = at_s + lasts_s
        at_s += rng.uniform(*EACH_S)
    return faults


def strike(fleet: WanFleet, fault: Fault) -> Callable[[], object]:
    """Returns what undoes it."""
    match fault.kind:
        case "kill":
            fleet.send(fault.victim, signal.SIGKILL)
            return lambda: None
        case "stop":
            fleet.send(fault.victim, signal.SIGSTOP)
            return lambda: fleet.send(fault.victim, signal.SIGCONT)
        case "cut":
            fleet.wan.cut(fault.victim)
        case "in" | "out":
            fleet.wan.cut(fault.victim, fault.kind)
    return lambda: fleet.wan.mend(fault.victim)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[WanFleet]:
    with WanFleet(tmp_path, steps=STEPS, workers=WORKERS) as made:
        yield made


def test_a_run_over_hosts_comes_through_a_storm_of_faults(fleet: WanFleet) -> None:
    fleet.start_all(workers=WORKERS)
    fleet.until_step(1)
    faults = planned(random.Random(SEED), CHAOS_S)
    due: list[tuple[float, int, Callable[[], object]]] = []
    serial = itertools.count()
    began = time.monotonic()
    for number, fault in enumerate(faults, 1):
        # On a quick machine faults come sooner: the run must not be over before the last.
        until, step = began + fault.at_s, number * STEPS // (len(faults) + 1)
        while (now := time.monotonic()) < until and last_step(fleet) < step:
            while due and due[0][0] <= now:
                heapq.heappop(due)[2]()
            fleet.supervise()
            time.sleep(0.1)
        assert not fleet.over, f"the run was over before {fault}\n{fleet.logs()}"
        print(fault, f"v {last_step(fleet)}", flush=True)
        undo = strike(fleet, fault)
        heapq.heappush(due, (time.monotonic() + fault.lasts_s, next(serial), undo))
    for end, _, undo in sorted(due, key=lambda entry: entry[0]):
        time.sleep(max(0.0, end - time.monotonic()))
        undo()
    alone = time.monotonic()
    print(f"{alone - began:6.1f} s: left alone, v {last_step(fleet)}", flush=True)
    while not fleet.over:
        fleet.supervise()
        assert time.monotonic() - alone < END_S, f"no end after {END_S:g} s\n{fleet.logs()}"
        time.sleep(0.1)
    print(f"{time.monotonic() - began:6.1f} s: over; ended before: {Counter(fleet.ended)}")
    report = verify_run(fleet.run_dir)
    print(report.to_text())
    assert report.ok, report.to_text()
    assert fleet.ends("learner") == 0, fleet.logs()
    assert fleet.lines("metrics.jsonl")[-1]["step"] == STEPS
    assert fleet.events("run_finished")[-1]["finished"] is True
    # No fault but a kill ends a process: the others only make it wait.
    assert {code for _, code in fleet.ended} <= {-signal.SIGKILL}, f"{fleet.ended}\n{fleet.logs()}"


def last_step(fleet: WanFleet) -> int:
    return max((line["step"] + 1 for line in fleet.events("step_completed")), default=0)
