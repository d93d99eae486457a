"""`echo2 simulate --chaos`: the coordinator's core and ledger in a storm of faults, on a virtual
clock; every promise is checked after every event.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice

from echo2.sim.chaos import Broken, Chaos, played, shrunk


@dataclass(frozen=True, slots=True)
class Told:
    """What came of one storm."""

    text: str
    broken: Broken | None = None
    num_events: int = 0
    faults: Counter[str] = field(default_factory=Counter)


def main(
    seeds: Iterable[int],
    hours: float,
    num_workers: int,
    without: list[str],
    *,
    jobs: int,
    minutes: float | None = None,
) -> int:
    """0 when no promise was broken. `minutes`: no seed begins later, but the first. ConfigError
    for an unknown kind of fault."""
    storms = (Chaos(seed, hours, num_workers, frozenset(without)) for seed in seeds)
    began = time.perf_counter()

    def is_over() -> bool:
        return minutes is not None and time.perf_counter() - began > 60 * minutes

    events: list[int] = []
    faults: Counter[str] = Counter()
    for told in _all_told(storms, jobs, is_over):
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


def _all_told(storms: Iterator[Chaos], jobs: int, is_over: Callable[[], bool]) -> Iterator[Told]:
    """In the order of the seeds."""
    if jobs == 1:
        for storm in storms:
            yield _told(storm)
            if is_over():
                return
        return
    with ProcessPoolExecutor(jobs) as executor:
        under_way = deque(executor.submit(_told, storm) for storm in islice(storms, 2 * jobs))
        try:
            while under_way:
                yield under_way.popleft().result()
                if is_over():
                    under_way = deque(future for future in under_way if not future.cancel())
                else:
                    under_way.extend(executor.submit(_told, storm) for storm in islice(storms, 1))
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
