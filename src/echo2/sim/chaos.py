"""A storm: many workers on a bad network, and every kind of fault, all the time.

`Chaos` names one storm completely, so that a broken promise is played again by one command;
`shrunk` looks for a smaller one that breaks it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from random import Random, SystemRandom
from typing import Final, TypeVar

from echo2.errors import ConfigError
from echo2.sim.scenario import (
    Faults,
    LearnerModel,
    NetworkModel,
    Scenario,
    WorkerModel,
    a_run,
    some_activation,
)
from echo2.sim.simulation import Simulation

HOURS: Final = 0.2
NUM_WORKERS: Final = 20
FAULTS: Final = Faults(
    worker_death_s=8.0,
    worker_silence_s=10.0,
    worker_drain_s=30.0,
    engine_death_s=20.0,
    wrong_message_s=0.5,
    replay_s=0.5,
    learner_crash_s=40.0,
    learner_stop_s=80.0,
    learner_silence_s=60.0,
    coordinator_restart_s=60.0,
    coordinator_crash_s=30.0,
    disk_full_s=120.0,
    clock_jump_s=60.0,
    one_way_s=20.0,
    partition_s=60.0,
    install_failure=0.05,
)
NETWORK: Final = NetworkModel(loss=0.01, duplication=0.01, reordering=0.01)
_OF_FAULTS: Final = tuple(f.name.removesuffix("_s") for f in fields(Faults) if f.name != "until_s")
KINDS: Final = (*_OF_FAULTS, "loss", "duplication", "reordering")
"""What may be left out, by name."""
PLAYS_MAX: Final = 60
STEPS_MAX: Final = 100_000
Model = TypeVar("Model", Faults, NetworkModel)


@dataclass(frozen=True, slots=True)
class Chaos:
    """Faults strike for `hours` of virtual time; then the run must reach its end."""

    seed: int
    hours: float = HOURS
    num_workers: int = NUM_WORKERS
    without: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if unknown := sorted(self.without.difference(KINDS)):
            raise ConfigError(
                f"{unknown[0]} is no kind of fault; known are {', '.join(sorted(KINDS))}"
            )
        if self.hours <= 0 or self.num_workers < 1:
            raise ConfigError(
                f"{self.hours:g} hours with {self.num_workers} workers cannot be simulated; both "
                "must be above 0"
            )

    @property
    def command(self) -> str:
        """Plays it again."""
        parts = [f"echo2 simulate --chaos --seed {self.seed}"]
        if self.hours != HOURS:
            parts.append(f"--hours {self.hours:.6g}")
        if self.num_workers != NUM_WORKERS:
            parts.append(f"--workers {self.num_workers}")
        parts += [f"--without {kind}" for kind in sorted(self.without)]
        return " ".join(parts)

    def scenario(self) -> Scenario:
        rng = Random(f"storm {self.seed}")
        staleness_max = rng.choice((0, 1, 2, 4))
        late = rng.choice(("wait", "wait", "drop", "mask"))
        settings = a_run(
            self.seed,
            staleness_max=staleness_max,
            late=late,
            period=rng.randint(1, staleness_max + 1),
            groups_per_step=rng.choice((4, 8, 16)),
            attempts_max=rng.choice((3, 20)),
            heartbeat_interval_s=1.0,
            activation=some_activation(self.seed),
        )
        learner = LearnerModel(
            train_s=rng.choice((0.5, 2.0)),
            checkpoint_every=rng.choice((2, 5)),
            checkpoints_kept=rng.choice((1, 3)),
            eval_every=rng.choice((0, 5)),
            resumes_any_checkpoint=rng.random() < 0.5,
        )
        faults = replace(FAULTS, until_s=3600 * self.hours, records_reordered=rng.random() < 0.5)
        persist_s = rng.choice((0.01, 0.2))
        workers = tuple(self._worker(rng, late) for _ in range(self.num_workers))
        return Scenario(
            seed=self.seed,
            settings=settings,
            steps=STEPS_MAX,
            steps_after=10,
            workers=workers,
            learner=learner,
            network=_without(NETWORK, self.without),
            faults=_without(faults, self.without),
            persist_s=persist_s,
            turn_s=Random(f"turns of {self.seed}").choice((0.0, 0.02, 0.2)),
            patience_s=4000.0,
        )

    def _worker(self, rng: Random, late: str) -> WorkerModel:
        on_update = "continue" if late == "mask" else rng.choice(("continue", "finish"))
        return WorkerModel(
            slots=rng.choice((1, 2, 4)),
            latency_s=rng.choice((1.0, 3.0, 10.0)),
            latency_cv=rng.choice((0.2, 0.8)),
            install_s=rng.choice((0.1, 1.0)),
            on_update=on_update,  # type: ignore[arg-type]
            rest_s=rng.choice((1.0, 10.0)),
        )


def fresh_seed() -> int:
    """One that was hardly ever played before."""
    return SystemRandom().randrange(10**6, 10**12)


def _without(model: Model, kinds: frozenset[str]) -> Model:
    off = {
        field.name: type(getattr(model, field.name))()
        for field in fields(model)
        if field.name.removesuffix("_s") in kinds
    }
    return replace(model, **off)


@dataclass(frozen=True, slots=True)
class Broken:
    """What a storm broke, after how many events and virtual seconds."""

    chaos: Chaos
    text: str
    trace: str
    num_events: int
    at_s: float


def played(chaos: Chaos) -> Simulation | Broken:
    """The simulation at its end, or what broke."""
    simulation = Simulation(chaos.scenario())
    try:
        simulation.run()
    except AssertionError as error:
        return Broken(
            chaos,
            f"{type(error).__name__}: {error}",
            simulation.last_events(),
            simulation.outcome.num_events,
            simulation.timeline.now,
        )
    return simulation


def shrunk(
    broken: Broken, play: Callable[[Chaos], Simulation | Broken] = played, *, plays: int = PLAYS_MAX
) -> Broken:
    """A storm with fewer kinds of fault, fewer workers and less time, which breaks a promise
    after fewer events. At most `plays` are tried."""
    progress = True
    while progress:
        progress = False
        for candidate in _smaller(broken):
            if plays == 0:
                return broken
            plays -= 1
            found = play(candidate)
            if isinstance(found, Broken) and found.num_events <= broken.num_events:
                broken, progress = found, True
                break
    return broken


def _smaller(broken: Broken) -> Iterator[Chaos]:
    chaos = broken.chaos
    hours = broken.at_s / 3600
    if hours < 0.9 * chaos.hours:
        yield replace(chaos, hours=hours)
    for num_workers in sorted({chaos.num_workers // 4, chaos.num_workers // 2}):
        if num_workers >= 1:
            yield replace(chaos, num_workers=num_workers)
    for kind in KINDS:
        if kind not in chaos.without:
            yield replace(chaos, without=chaos.without | {kind})
