"""`echo2 simulate CONFIG`: fleets that cannot be, and runs that cannot be simulated."""

from __future__ import annotations

from pathlib import Path

from bad_input import Bench, Told, case

KIND = ("[[simulation.workers]]", 'name = "spot"')


def simulate(bench: Bench, config: Path, *options: object) -> Told:
    return bench.command("simulate", config, *options)


@case("no fleet to simulate")
def _(bench: Bench) -> Told:
    return simulate(bench, bench.config("[simulation]", "hours = 1.0"))


@case("a setting of a kind of simulated workers that is nearly one")
def _(bench: Bench) -> Told:
    return simulate(bench, bench.config(*KIND, "tokens_per_sec = 100"))


@case("a number of simulated workers out of its range")
def _(bench: Bench) -> Told:
    return simulate(bench, bench.config(*KIND, "", "[[simulation.workers]]", "count = 0"))


@case("a kind of simulated workers that is no table")
def _(bench: Bench) -> Told:
    return simulate(bench, bench.config("[simulation]", "workers = [3]"))


@case("two kinds of simulated workers with one name")
def _(bench: Bench) -> Told:
    return simulate(bench, bench.config(*KIND, *KIND))


@case("simulated workers with the name of another part")
def _(bench: Bench) -> Told:
    return simulate(bench, bench.config("[[simulation.workers]]", 'name = "learner"'))


@case("more simulated workers than a coordinator takes")
def _(bench: Bench) -> Told:
    more = ("[[simulation.workers]]", 'name = "more"', "count = 9000")
    return simulate(bench, bench.config(*KIND, "count = 1001", *more))


@case("audits in a simulation")
def _(bench: Bench) -> Told:
    audit = ("[audit]", "share = 0.1", 'workers = ["spot-1"]')
    return simulate(bench, bench.config(*audit, *KIND))


@case("a simulation of no time")
def _(bench: Bench) -> Told:
    return simulate(bench, bench.config(*KIND), "--hours", "0")


@case("a simulation into a folder that holds a run")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "events.jsonl").touch()
    return simulate(bench, bench.config(*KIND), "--run-dir", bench.run_dir)


@case("a simulated fleet that never comes")
def _(bench: Bench) -> Told:
    config = bench.config(*KIND, "start_s = 9000", "[run]", "no_worker_timeout_s = 60")
    return simulate(bench, config)


@case("the paper's model without scenarios")
def _(bench: Bench) -> Told:
    return simulate(bench, bench.config(*KIND), "--model", "paper")


@case("a scenario of the paper with more machines than there are")
def _(bench: Bench) -> Told:
    scenario = ("[[simulation.scenarios]]", 'name = "star"', "machines = 2")
    return simulate(bench, bench.config(*KIND, *scenario), "--model", "paper")
