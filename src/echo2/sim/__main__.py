"""`python -m echo2.sim`: play one seed, or a range of them, and say what came of it.

    python -m echo2.sim faulty --seed 7             a small fleet on which much breaks
    python -m echo2.sim faulty --seed 0 --count 200 two hundred of them
    python -m echo2.sim fleet --seed 1              200 workers, nothing breaks
    python -m echo2.sim lossy --seed 3              one message in seven is lost
    python -m echo2.sim lying --seed 3              two workers lie, and are found out
    python -m echo2.sim rewinding --seed 3          learners crash, one after the other
    python -m echo2.sim silent --seed 3             workers come back with late results
    python -m echo2.sim storm --seed 3              20 workers, every kind of fault all the time

Exit status 1 at the first broken promise, with the last events and the command that plays
it again.
"""

from __future__ import annotations

import argparse
import sys
import time

from echo2.sim.fleets import SCENARIOS
from echo2.sim.simulation import Simulation, command_of


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m echo2.sim", description=__doc__)
    parser.add_argument("scenario", choices=sorted(SCENARIOS), help="which kind of run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=1, help="so many seeds from --seed on")
    options = parser.parse_args(arguments)
    for seed in range(options.seed, options.seed + options.count):
        simulation = Simulation(SCENARIOS[options.scenario](seed))
        began = time.perf_counter()
        try:
            outcome = simulation.run()
        except Exception as error:  # a violation, or the core's own bug: both end the play
            print(simulation.last_events())
            print(f"{type(error).__name__}: {error}")
            print(f"again: {command_of(options.scenario, seed)}")
            if not isinstance(error, AssertionError):
                raise
            return 1
        wall_s = time.perf_counter() - began
        print(
            f"seed {seed}: {outcome.reason}; v {outcome.step} after {outcome.virtual_s:.0f} s, "
            f"{dict(outcome.ends)}, returned {outcome.returned}, staleness "
            f"{dict(sorted(outcome.staleness.items()))}, bubble {outcome.bubble:.2f}, "
            f"{outcome.num_events} events in {wall_s:.2f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
