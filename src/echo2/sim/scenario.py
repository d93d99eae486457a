"""What a simulation is made of: the run's settings, the fleet, the network and the faults.

Everything in a simulation follows from one `Scenario`, and a scenario from one seed.
Durations are in virtual seconds. A mean time between faults of 0 means never; faults stop
at `Faults.until_s`, after which the run must reach its end within `Scenario.patience_s`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from echo2.core.activation_policy import ActivationSettings
from echo2.core.settings import ActivationTerms, CoordinatorSettings
from echo2.types import PeerId


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """`latency_s`: mean time of a group in a slot, gamma distributed with
    `latency_cv`; `num_tokens` sampled in a trajectory; `rest_s`: time until it comes back
    after it died or left. `lies`: it claims a reward of 1 for everything, or logprobs that its
    weights do not give."""

    slots: int = 4
    latency_s: float = 4.0
    latency_cv: float = 0.5
    install_s: float = 0.5
    num_tokens: int = 4
    on_update: Literal["continue", "finish"] = "continue"
    price_usd_per_h: float = 0.5
    standby_usd_per_h: float = 0.0
    rest_s: float = 10.0
    lies: Literal["", "rewards", "logprobs"] = ""
    audit_s: float = 0.2
    """Longest time that an audit takes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerModel:
    """`checkpoint_every` learner steps, of which `checkpoints_kept` stay on disk;
    `eval_every` 0: no evals. `num_tasks` None: the data never ends."""

    train_s: float = 1.0
    train_cv: float = 0.1
    publish_s: float = 0.1
    checkpoint_every: int = 4
    checkpoints_kept: int = 2
    eval_every: int = 0
    eval_tasks: int = 4
    num_tasks: int | None = None
    retry_s: float = 2.0
    rest_s: float = 5.0
    mismatch: float = 0.012
    mismatch_sigma: float = 0.3
    """Of an honest group, lognormal: median in nats, and spread of the logarithm."""
    outlier_share: float = 0.002
    lied_mismatch: float = 1.0
    """Of an odd honest group, which happens, and of a group with fabricated logprobs."""
    resumes_any_checkpoint: bool = False
    """Resume from any checkpoint that is kept, not always from the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkModel:
    """`loss`, `duplication`, `reordering`: probabilities per message."""

    delay_s: float = 0.02
    jitter_s: float = 0.02
    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    reordering_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Mean seconds between faults of a kind, over the whole fleet; 0: never.

    `coordinator_restart_s`: killed between two events; `coordinator_crash_s`: while it carries
    out what follows from one; `disk_full_s`: by a disk that takes no record. `one_way_s`: a
    peer's messages get through in one direction only; `partition_s`: some of the fleet is cut off
    together. `install_failure`: probability that an install fails. `records_reordered`: records
    become durable in any order."""

    until_s: float = 0.0
    worker_death_s: float = 0.0
    worker_silence_s: float = 0.0
    worker_drain_s: float = 0.0
    engine_death_s: float = 0.0
    wrong_message_s: float = 0.0
    replay_s: float = 0.0
    learner_crash_s: float = 0.0
    learner_stop_s: float = 0.0
    learner_silence_s: float = 0.0
    coordinator_restart_s: float = 0.0
    coordinator_crash_s: float = 0.0
    disk_full_s: float = 0.0
    one_way_s: float = 0.0
    partition_s: float = 0.0
    clock_jump_s: float = 0.0
    install_failure: float = 0.0
    records_reordered: bool = False

    @property
    def restarts_coordinator(self) -> bool:
        return bool(self.coordinator_restart_s or self.coordinator_crash_s or self.disk_full_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`patience_s`: within so long after the last fault the run must end; `steps_after`: with
    so many learner steps after it, if that is less than `steps` in all."""

    seed: int
    settings: CoordinatorSettings
    steps: int
    workers: tuple[WorkerModel, ...]
    learner: LearnerModel = field(default_factory=LearnerModel)
    network: NetworkModel = field(default_factory=NetworkModel)
    faults: Faults = field(default_factory=Faults)
    persist_s: float = 0.005
    turn_s: float = 0.0
    tick_s: float = 0.25
    patience_s: float = 4000.0
    steps_after: int | None = None

    @property
    def liars(self) -> dict[PeerId, str]:
        """Name -> what it lies about."""
        return {PeerId(f"w{i}"): model.lies for i, model in enumerate(self.workers) if model.lies}


def a_run(seed: int, **changes: object) -> CoordinatorSettings:
    """Settings of a small simulated run; `changes` by name."""
    settings = CoordinatorSettings(
        run_id="simulated",
        staleness_max=2,
        groups_per_step=4,
        group_size=2,
        stall_s=30.0,
        lease_max_s=300.0,
        attempts_max=5,
        no_worker_timeout_s=2000.0,
        learner_timeout_s=2000.0,
        seed=seed,
    )
    return replace(settings, **changes)  # type: ignore[arg-type]


def calm_fleet(
    seed: int,
    *,
    num_workers: int,
    steps: int,
    settings: CoordinatorSettings,
    learner: LearnerModel | None = None,
) -> Scenario:
    """Many workers of different speed, nothing breaks."""
    rng = Random(f"fleet {seed}")
    workers = tuple(
        WorkerModel(
            slots=rng.choice((4, 8)),
            latency_s=rng.uniform(2.0, 4.0),
            latency_cv=rng.uniform(0.1, 0.4),
            install_s=rng.uniform(0.1, 0.5),
            price_usd_per_h=rng.uniform(0.1, 2.0),
        )
        for _ in range(num_workers)
    )
    return Scenario(
        seed=seed,
        settings=settings,
        steps=steps,
        workers=workers,
        learner=learner or LearnerModel(),
        tick_s=1.0,
        patience_s=100_000.0,
    )


def faulty_fleet(seed: int) -> Scenario:
    """A small fleet with its settings, speeds and faults drawn from the seed."""
    rng = Random(f"scenario {seed}")
    staleness_max = rng.choice((0, 1, 1, 2, 3, 4))
    late = rng.choice(("wait", "wait", "drop", "mask"))
    period = rng.randint(1, staleness_max + 1) if rng.random() < 0.4 else 1
    settings = a_run(
        seed,
        staleness_max=staleness_max,
        late=late,
        period=period,
        groups_per_step=rng.choice((1, 2, 3, 5, 8)),
        group_size=rng.choice((1, 2, 3)),
        lead_steps=rng.choice((None, None, 0.0, float(staleness_max))),
        partial_batch=rng.choice(("train", "drop")),
        attempts_max=rng.choice((2, 5, 20)),
        mask_min_tokens=rng.choice((1, 2)),
        budget_usd=rng.choice((0.0,) * 9 + (0.02,)),
    )
    if settings.group_size > 1 and rng.random() < 0.3:
        settings = replace(settings, filter_zero_variance=True)
    settings = replace(settings, activation=some_activation(seed))
    workers = tuple(
        WorkerModel(
            slots=rng.choice((1, 2, 4)),
            latency_s=rng.choice((0.5, 2.0, 5.0, 15.0)),
            latency_cv=rng.choice((0.0, 0.5, 1.5)),
            install_s=rng.choice((0.0, 0.3, 3.0)),
            on_update="continue" if late == "mask" else rng.choice(("continue", "finish")),
            rest_s=rng.choice((1.0, 10.0, 40.0)),
        )
        for _ in range(rng.randint(1, 6))
    )
    learner = LearnerModel(
        train_s=rng.choice((0.1, 1.0, 4.0)),
        checkpoint_every=rng.choice((1, 3, 5)),
        checkpoints_kept=rng.choice((1, 2, 3)),
        eval_every=rng.choice((0, 0, 3)),
        num_tasks=rng.choice((None, None, 37, 90)),
        resumes_any_checkpoint=rng.random() < 0.5,
    )
    return Scenario(
        seed=seed,
        settings=settings,
        steps=rng.randint(10, 30),
        workers=workers,
        learner=learner,
        network=_a_network(rng),
        faults=_some_faults(rng),
        persist_s=rng.choice((0.0, 0.01, 0.5)),
        turn_s=Random(f"turns of {seed}").choice((0.0, 0.05, 0.5)),
        patience_s=_patience_s(settings, workers, learner),
    )


def some_activation(seed: int) -> ActivationTerms:
    """The policy is "cheapest" in every other run."""
    rng = Random(f"activation {seed}")
    if rng.random() < 0.5:
        return ActivationTerms()
    deciding = ActivationSettings(
        margin=rng.choice((1.0, 1.1, 1.5)),
        surplus_share=rng.choice((0.0, 0.15)),
        persistence_s=rng.choice((0.0, 5.0)),
        cool_down_s=rng.choice((0.0, 10.0)),
    )
    return ActivationTerms(policy="cheapest", settings=deciding)


def _patience_s(
    settings: CoordinatorSettings, workers: tuple[WorkerModel, ...], learner: LearnerModel
) -> float:
    """Ample time for 30 steps: the pool's, the learner's, and a straggler in each."""
    rate = sum(worker.slots / worker.latency_s for worker in workers)
    slowest_s = max(worker.latency_s for worker in workers)
    step_s = 4 * settings.groups_per_step / rate + 2 * learner.train_s + 5 * slowest_s + 1.0
    return 600.0 + 30 * step_s


def _a_network(rng: Random) -> NetworkModel:
    if rng.random() < 0.3:
        return NetworkModel()
    return NetworkModel(
        loss=rng.choice((0.0, 0.01, 0.1)),
        duplication=rng.choice((0.0, 0.01, 0.2)),
        reordering=rng.choice((0.0, 0.01, 0.2)),
        reordering_s=rng.choice((0.1, 1.0, 10.0)),
    )


def _some_faults(rng: Random) -> Faults:
    def mean_s(shortest: float) -> float:
        return rng.choice((0.0, shortest, shortest * 4))

    return Faults(
        until_s=rng.choice((60.0, 200.0)),
        worker_death_s=mean_s(10.0),
        worker_silence_s=mean_s(15.0),
        worker_drain_s=mean_s(30.0),
        engine_death_s=mean_s(30.0),
        wrong_message_s=mean_s(1.0),
        replay_s=mean_s(0.5),
        learner_crash_s=mean_s(15.0),
        learner_stop_s=mean_s(30.0),
        learner_silence_s=mean_s(30.0),
        coordinator_restart_s=rng.choice((0.0, 0.0, 0.0, 40.0)),
        coordinator_crash_s=rng.choice((0.0, 0.0, 0.0, 20.0)),
        disk_full_s=rng.choice((0.0, 0.0, 0.0, 60.0)),
        clock_jump_s=mean_s(40.0),
        one_way_s=mean_s(30.0),
        partition_s=rng.choice((0.0, 0.0, 60.0)),
        install_failure=rng.choice((0.0, 0.0, 0.3)),
        records_reordered=rng.random() < 0.3,
    )
