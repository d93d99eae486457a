"""The scenarios that have a name, each a function of a seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final, Literal

from echo2.core.settings import AuditSettings
from echo2.core.suspicion import MismatchRule
from echo2.sim.chaos import Chaos
from echo2.sim.scenario import (
    Faults,
    LearnerModel,
    NetworkModel,
    Scenario,
    WorkerModel,
    a_run,
    calm_fleet,
    faulty_fleet,
)
from echo2.types import PeerId


def big_fleet(seed: int) -> Scenario:
    """200 workers of different speed, more than 50,000 groups, nothing breaks."""
    settings = a_run(
        seed,
        staleness_max=3,
        period=3,
        groups_per_step=256,
        group_size=4,
        heartbeat_interval_s=6.0,
        suspect_s=15.0,
        gone_s=45.0,
    )
    return calm_fleet(
        seed,
        num_workers=200,
        steps=210,
        settings=settings,
        learner=LearnerModel(train_s=1.2, checkpoint_every=20),
    )


def lossy_fleet(seed: int) -> Scenario:
    """Nobody fails, but one message in seven is lost: everything must be asked for again."""
    rng = Random(f"lossy {seed}")
    return Scenario(
        seed=seed,
        settings=a_run(seed, staleness_max=rng.choice((0, 2)), groups_per_step=2),
        steps=12,
        workers=(WorkerModel(latency_s=1.0), WorkerModel(latency_s=2.0)),
        learner=LearnerModel(train_s=0.5, eval_every=4),
        network=NetworkModel(loss=0.15, duplication=0.05),
        faults=Faults(until_s=60.0),
        patience_s=900.0,
    )


def silent_fleet(seed: int) -> Scenario:
    """Workers fall silent for longer than they are waited for, and come back with results."""
    rng = Random(f"silent {seed}")
    workers = tuple(
        WorkerModel(slots=2, latency_s=rng.choice((2.0, 6.0)), latency_cv=0.5) for _ in range(5)
    )
    settings = a_run(
        seed,
        staleness_max=rng.choice((3, 4)),
        groups_per_step=2,
        lead_steps=4.0,
        attempts_max=20,
        gone_s=8.0,
    )
    return Scenario(
        seed=seed,
        settings=settings,
        steps=40,
        workers=workers,
        learner=LearnerModel(train_s=rng.choice((2.0, 5.0))),
        faults=Faults(until_s=200.0, worker_silence_s=4.0),
    )


def rewinding_fleet(seed: int) -> Scenario:
    """Learners crash after few steps and resume from any checkpoint that is kept."""
    rng = Random(f"rewinding {seed}")
    staleness_max = rng.choice((0, 1, 3))
    workers = tuple(
        WorkerModel(slots=rng.choice((1, 2)), latency_s=2.0, latency_cv=0.5) for _ in range(2)
    )
    learner = LearnerModel(
        train_s=0.5,
        checkpoint_every=2,
        checkpoints_kept=rng.choice((1, 3)),
        num_tasks=rng.choice((None, 60)),
        rest_s=2.0,
        resumes_any_checkpoint=True,
    )
    return Scenario(
        seed=seed,
        settings=a_run(
            seed,
            staleness_max=staleness_max,
            groups_per_step=rng.choice((2, 6)),
            attempts_max=20,
            budget_usd=rng.choice((0.0, 0.005, 0.02)),
        ),
        steps=rng.randint(4, 20),
        workers=workers,
        learner=learner,
        faults=Faults(
            until_s=150.0, learner_crash_s=12.0, learner_stop_s=60.0, records_reordered=True
        ),
        persist_s=0.3,
    )


def lying_fleet(seed: int) -> Scenario:
    """One worker claims rewards that it did not get, one has other weights; auditors, peers and
    the coordinator fail now and then."""
    rng = Random(f"lying {seed}")
    lies: list[Literal["", "rewards", "logprobs"]] = ["rewards", "logprobs", *("",) * 5]
    num_auditors = rng.choice((1, 1, 2))
    workers = tuple(
        WorkerModel(
            slots=rng.choice((1, 2, 4)),
            latency_s=rng.choice((1.0, 3.0)),
            latency_cv=0.4,
            lies=lie,
            audit_s=rng.choice((0.1, 2.0)),
            rest_s=2.0,
        )
        for lie in lies
    )
    audit = AuditSettings(
        share=rng.choice((0.3, 1.0)),
        workers=tuple(PeerId(f"w{len(lies) - 1 - i}") for i in range(num_auditors)),
        key=seed.to_bytes(8, "little"),
        wait_s=rng.choice((5.0, 30.0)),
        rule=MismatchRule(run_precision="bfloat16"),
    )
    settings = a_run(
        seed,
        staleness_max=rng.choice((1, 3)),
        late=rng.choice(("wait", "drop", "mask")),
        groups_per_step=rng.choice((4, 8)),
        group_size=rng.choice((2, 4)),
        attempts_max=20,
        filter_zero_variance=rng.random() < 0.3,
        gone_s=8.0,
        audit=audit,
    )
    shaky = rng.random() < 0.7
    faults = Faults(
        until_s=150.0,
        worker_death_s=15.0,
        worker_silence_s=20.0,
        replay_s=0.5,
        wrong_message_s=5.0,
        learner_crash_s=60.0,
        coordinator_restart_s=40.0,
        coordinator_crash_s=60.0,
    )
    return Scenario(
        seed=seed,
        settings=settings,
        steps=40,
        workers=workers,
        learner=LearnerModel(train_s=1.0, checkpoint_every=3, resumes_any_checkpoint=True),
        network=NetworkModel(loss=0.01, duplication=0.05) if shaky else NetworkModel(),
        faults=faults if shaky else Faults(),
        persist_s=rng.choice((0.01, 0.3)),
    )


SCENARIOS: Final[dict[str, Callable[[int], Scenario]]] = {
    "faulty": faulty_fleet,
    "fleet": big_fleet,
    "lossy": lossy_fleet,
    "lying": lying_fleet,
    "rewinding": rewinding_fleet,
    "silent": silent_fleet,
    "storm": lambda seed: Chaos(seed).scenario(),
}
