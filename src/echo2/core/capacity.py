"""How many workers the learner needs, and what a pool will come to: echo2's capacity model.

The paper's rule (`core/capacity_paper.py`) takes nothing that is sampled during a broadcast for
usable. In echo2 workers sample on with what they have, as far ahead as pacing and lead allow; a
group takes its time in a slot, and some take long. `predict` plays the learner's steps with those
rules (`core/capacity_steps.py`) and counts. It leaves out failures, evals, audits, the delays of
the network and what an engine gains while some of its slots are empty. docs/capacity.md derives
it, says where it departs from the paper, and shows how near it comes to the coordinator itself.

The same input and seed give the same output. A call plays about GROUPS groups, which takes a few
hundredths of a second, and up to ROUNDS_MAX times as many where chance decides more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from echo2.core.capacity_pool import Pool
from echo2.core.capacity_steps import Cause, Counts, Rules, Slots, StepRecursion
from echo2.core.settings import Late

BUBBLE_MAX = 0.01
"""A learner that waits less than this share of its time does not wait."""
LATENCY_CV_MAX = 10.0
"""Largest coefficient of variation of a group's time that is played."""
GROUPS = 8000
STEPS_MIN = 16
"""A prediction counts so many groups, but at least so many learner steps."""
GROUPS_PER_STEP_MAX = 2048
"""Larger batches are played in blocks of groups, each like one group."""
ROUNDS_MAX = 3
BUBBLE_ERROR_MAX = 0.005
"""Where the bubble's standard error is larger, as many are played again, at most ROUNDS_MAX times
in all."""
PARTS = 8
"""Of the steps counted, whose means tell the error of the bubble."""

Bottleneck = Literal["learner"] | Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What the learner does, and what it allows.

    R `groups_per_step` groups a learner step; T_train `train_s` seconds of a step without waiting;
    S `staleness_max` steps; κ `period` steps, at most S + 1; `late` as in the configuration.
    `latency_cv`: coefficient of variation of a group's time in a slot (0.3: alike; 1: a long
    tail). `lead_steps`: dispatch.lead_steps, None for the default. `fetch_s`: seconds from the
    publication until the bytes are there. ValueError when a value is out of its range.
    """

    groups_per_step: int
    train_s: float
    staleness_max: int
    period: int = 1
    late: Late = "wait"
    latency_cv: float = 0.5
    lead_steps: float | None = None
    fetch_s: float = 0.0

    def __post_init__(self) -> None:
        for field, value, least, most in (
            ("groups_per_step", self.groups_per_step, 1, 1 << 20),
            ("train_s", self.train_s, 1e-6, 1e9),
            ("staleness_max", self.staleness_max, 0, 1000),
            ("period", self.period, 1, self.staleness_max + 1),
            ("latency_cv", self.latency_cv, 0.0, LATENCY_CV_MAX),
            ("lead_steps", self.lead_steps or 0.0, 0.0, 1000.0),
            ("fetch_s", self.fetch_s, 0.0, 1e9),
        ):
            if not least <= value <= most:
                raise ValueError(f"{field} is {value}; allowed is {least:g} to {most:g}")

    @property
    def learner_rate(self) -> float:
        """R / T_train: groups per second that the learner eats when it never waits."""
        return self.groups_per_step / self.train_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """`bubble`: share of its time that the learner waits, with `bubble_error`, the standard error
    of what was played; `expired_share` of the groups that were begun; `staleness_mean` in learner
    steps; `bottleneck` what the learner
    waits for most (itself, where the bubble is at most BUBBLE_MAX), `reason` that in words."""

    bubble: float
    bubble_error: float
    expired_share: float
    staleness_mean: float
    bottleneck: Bottleneck
    reason: str


def predict(workload: Workload, pool: Pool, *, seed: int = 0) -> Prediction:
    """What the pool comes to. ValueError for a pool without workers."""
    if not pool.members:
        raise ValueError("a pool without workers delivers nothing; name at least one")
    counts, error = _played(workload, pool, seed=seed)
    total_s = counts.wait_s + counts.train_s
    bubble = counts.wait_s / total_s
    bottleneck = _bottleneck(counts, bubble)
    return Prediction(
        bubble=bubble,
        bubble_error=error,
        expired_share=counts.expired / (counts.expired + counts.trained),
        staleness_mean=counts.staleness / counts.trained,
        bottleneck=bottleneck,
        reason=_reason(bottleneck, workload, pool, bubble),
    )


# ------------------------------------------------------------------------------- helpers


def _played(workload: Workload, pool: Pool, *, seed: int) -> tuple[Counts, float]:
    """What was counted, and the standard error of the bubble."""
    size = workload.staleness_max + 1
    block = math.ceil(workload.groups_per_step / GROUPS_PER_STEP_MAX)
    rules = Rules(
        groups_per_step=math.ceil(workload.groups_per_step / block),
        train_s=workload.train_s,
        staleness_max=workload.staleness_max,
        period=workload.period,
        late=workload.late,
        latency_cv=workload.latency_cv,
        lead_steps=workload.lead_steps,
        fetch_s=workload.fetch_s,
    )
    share = rules.groups_per_step / workload.groups_per_step  # 1, where blocks are single groups
    kinds = []
    for kind, count in pool.members:
        slots = max(1, round(kind.slots * count * share))
        latency_s = slots / (kind.rate_groups_per_s * count * share)  # the rate stays exact
        kinds.append(Slots(min(count, slots), slots, latency_s, kind.install_s, [0] * size))
    warmup = workload.staleness_max + workload.period + 3
    steps = max(STEPS_MIN, GROUPS // rules.groups_per_step)
    recursion = StepRecursion(rules, kinds, seed=seed)
    counts = recursion.run(warmup=warmup, steps=steps)
    error = _bubble_error(counts, workload.train_s)
    for _ in range(ROUNDS_MAX - 1):
        if error <= BUBBLE_ERROR_MAX:
            break
        counts = recursion.run(warmup=0, steps=steps)
        error = _bubble_error(counts, workload.train_s)
    return counts, error


def _bubble_error(counts: Counts, train_s: float) -> float:
    """From the bubbles of PARTS equal parts of the steps."""
    waits, size = counts.step_waits_s, len(counts.step_waits_s) // PARTS
    bubbles = []
    for part in range(PARTS):
        wait_s = math.fsum(waits[part * size : (part + 1) * size])
        bubbles.append(wait_s / (wait_s + size * train_s))
    mean = math.fsum(bubbles) / PARTS
    variance = math.fsum((bubble - mean) ** 2 for bubble in bubbles) / (PARTS - 1)
    return math.sqrt(variance / PARTS)


def _bottleneck(counts: Counts, bubble: float) -> Bottleneck:
    if bubble <= BUBBLE_MAX:
        return "learner"
    return max(counts.waits_s, key=lambda cause: counts.waits_s[cause])


def _reason(bottleneck: Bottleneck, workload: Workload, pool: Pool, bubble: float) -> str:
    delivered, eaten = pool.rate_groups_per_s, workload.learner_rate
    if bottleneck == "learner":
        return f"the learner: it eats {eaten:.4g} groups/s and waits {bubble:.1%} of its time"
    if bottleneck == "rate" and delivered < eaten:
        return (
            f"the pool's rate: it delivers {delivered:.4g} groups/s, the learner eats "
            f"{eaten:.4g}; add workers"
        )
    if bottleneck == "rate":
        return (
            f"the pool's rate: {delivered:.4g} groups/s are above the {eaten:.4g} that the learner "
            "eats, but slots stand still for installs, lost groups or uneven arrival; add workers"
        )
    if bottleneck == "tail":
        return (
            "the slowest groups of a batch: the others are there and wait for them; raise "
            'staleness.max, set staleness.late = "drop", or shorten what a group takes'
        )
    if bottleneck == "install":
        install_s = max(kind.install_s for kind, _ in pool.members)
        return (
            "installs: slots wait for the new version, which takes "
            f"{workload.fetch_s + install_s:.4g} s; send deltas, or raise "
            "staleness.period"
        )
    return (
        f"the window: staleness.max = {workload.staleness_max} lets no more be sampled ahead; "
        "raise it"
    )
