"""`echo2 simulate --chaos`: the coordinator's core and ledger in a storm of faults, on a virtual
clock; every promise is checked after every event.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from echo2.sim.chaos import Broken, Chaos, played, shrunk


@dataclass(frozen=True, slots=True)
class Told:
    """What came of one storm."""

    text: str
    broken: Broken | None = None
    num_events: int = 0
    faults: Counter[str] = field(default_factory=Counter)


def main(seeds: range, hours: float, num_workers: int, without: list[str], *, jobs: int) -> int:
    """0 when no promise was broken. ConfigError for an unknown kind of fault."""
    storms = [Chaos(seed, hours, num_workers, frozenset(without)) for seed in seeds]
    began = time.perf_counter()
    events: list[int] = []
    faults: Counter[str] = Counter()
    for told in _all_told(storms, jobs):
        if told.broken is not None:
            return _report(told.broken)
        print(told.text, flush=True)
        events.append(told.num_events)
        faults += told.faults
    print(
        f"no promise was broken: {len(events)} seeds, {min(events)} to {max(events)} events each, "
        f"{sum(events)} in all, in {time.perf_counter() - began:.0f} s"
    )
    print("faults: " + ", ".join(f"{number} {kind}" for kind, number in sorted(faults.items())))
    return 0


def _all_told(storms: Sequence[Chaos], jobs: int) -> Iterator[Told]:
    """In the order of the seeds."""
    if jobs == 1:
        yield from map(_told, storms)
        return
    with ProcessPoolExecutor(jobs) as executor:
        try:
            yield from executor.map(_told, storms)
        finally:
            executor.shutdown(cancel_futures=True)


def _told(chaos: Chaos) -> Told:
    began = time.perf_counter()
    found = played(chaos)
    if isinstance(found, Broken):
        return Told(found.text, found)
    outcome = found.outcome
    text = (
        f"seed {chaos.seed}: {outcome.num_events} events, v {outcome.step} after "
        f"{outcome.virtual_s:.0f} virtual s, {outcome.ends['trained']} groups trained, "
        f"{outcome.faults.total()} faults; {time.perf_counter() - began:.1f} s"
    )
    return Told(text, None, outcome.num_events, outcome.faults)


def _report(broken: Broken) -> int:
    print(
        f"{broken.text}\nbroken by {broken.chaos.command}; looking for a smaller storm", flush=True
    )
    smaller = shrunk(broken)
    print(smaller.trace)
    print(smaller.text)
    print(f"again:  {smaller.chaos.command}   ({smaller.num_events} events)")
    if smaller.chaos != broken.chaos:
        print(f"before: {broken.chaos.command}   ({broken.num_events} events)")
    return 1
