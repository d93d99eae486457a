"""Does the rule of `echo2.core.suspicion` leave honest workers alone, how soon are others found?

    python benchmarks/audit.py [--groups 200] [--honest 10000] [--out audit.json]

1. measured   real groups: the transformers engine samples answers of `reversal` with the model
              addition-1m, in float32 and bfloat16; the learner's policy recomputes their logprobs
              with the same weights. So do engines with weights of 8 and of 4 bits, with weights of
              a step before, and a worker that makes its logprobs up. The groups are replayed, too.
2. honest     `--honest` groups of honest workers through the production rule, their differences
              drawn from the measured ones (with replacement): false alarms, for fleets of 1 to 64
              workers. And as many through the whole coordinator of a simulated fleet (virtual
              clock), all of them compared and audited, differences lognormal with the measured
              median and spread.
3. offenders  how many groups until each is suspected, drawn in the same way; for rewards, how many
              until two audited groups were refuted, by share.

Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echo2.core.audits import is_chosen
from echo2.core.precision import TOLERANCES
from echo2.core.settings import AuditSettings
from echo2.core.suspicion import EvidenceSum, MismatchRule, MismatchWatch
from echo2.sim import LearnerModel, Simulation, a_run, calm_fleet
from echo2.types import GroupId, GroupMismatch, LeaseId, PeerId, Sampling, Task, Version
from echo2_learner.policy import Policy
from echo2_workers.engine import Generated, GenerateRequest, Tensors
from echo2_workers.engines.dtypes import DTYPE_NAMES
from echo2_workers.engines.transformers import TransformersEngine
from echo2_workers.environments.reversal import Reversal
from echo2_workers.models import model_folder
from echo2_workers.playing import GroupJob, GroupPlayed, play_group
from echo2_workers.replaying import ReplayJob, replay_group

MODEL = "builtin:addition-1m"
SIZE, DIGITS = 8, 16
GROUPS_MAX = 500
SAMPLING = Sampling(max_tokens=DIGITS + 1)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Measured:
    """Per group: mean |difference| in nats, and the tokens that it is over."""

    diffs: list[float]
    tokens: list[int]

    def facts(self) -> dict[str, Any]:
        order = np.asarray(self.diffs)
        return {
            "groups": len(self.diffs),
            "tokens_per_group": statistics.mean(self.tokens),
            "median": float(np.median(order)),
            "p99": float(np.quantile(order, 0.99)),
            "largest": float(order.max()),
        }

    @property
    def log_spread(self) -> float:
        return statistics.stdev(math.log(max(diff, 1e-12)) for diff in self.diffs)


def rounded(bits: int) -> Change:
    """Symmetric, one scale per tensor."""
    levels = 2 ** (bits - 1) - 1

    def change(tensor: torch.Tensor) -> torch.Tensor:
        step = tensor.float().abs().max() / levels
        return ((tensor.float() / step).round() * step).to(tensor.dtype) if step > 0 else tensor

    return change


def a_step_before(tensor: torch.Tensor) -> torch.Tensor:
    """As one step of Adam at a learning rate of 2e-4 moves it."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))
    return (tensor.float() + 2e-4 * noise.sign()).to(tensor.dtype)


def tensors_of(policy: Policy, change: Change | None) -> Tensors:
    found = {}
    for name, tensor in policy.tensors().items():
        own = tensor.detach() if change is None else change(tensor.detach())
        content = own.contiguous().view(torch.uint8).numpy().tobytes()
        found[name] = (DTYPE_NAMES[own.dtype], tuple(own.shape), memoryview(content))
    return found


async def played(dtype: str, change: Change | None, count: int) -> list[GroupPlayed]:
    """Groups of an engine that computes in `dtype`, with weights that were changed."""
    folder = model_folder(MODEL)
    policy = Policy.load(folder, dtype=DTYPES[dtype])
    engine = TransformersEngine(dtype=dtype, device="cpu", sequences_max=256)
    await engine.start(folder)
    await engine.pause("finish")
    await engine.load(tensors_of(policy, change), Version(1, 0))
    engine.resume()
    environment = Reversal(digits=DIGITS)

    async def generate(request: GenerateRequest) -> Generated:
        return await engine.generate(request, lambda _: None)

    found = []
    for first in range(0, count, 16):
        jobs = [
            GroupJob(
                lease=LeaseId(f"l{index}"),
                task=Task(index, environment.task("train", index)),
                group_size=SIZE,
                sampling=SAMPLING,
                seed=index * 1000,
            )
            for index in range(first, min(first + 16, count))
        ]
        found += await asyncio.gather(*(play_group(environment, job, generate) for job in jobs))
    await engine.stop()
    return found


@torch.no_grad()
def compared(dtype: str, groups: list[GroupPlayed], *, fabricated: bool = False) -> Measured:
    """What the learner, whose weights are right, finds."""
    policy = Policy.load(model_folder(MODEL), dtype=DTYPES[dtype])
    measured = Measured([], [])
    for group in groups:
        lengths = [header.length for header in group.trajectories]
        rows = np.split(np.frombuffer(group.token_ids, "<i4"), np.cumsum(lengths)[:-1])
        theirs = np.split(np.frombuffer(group.logprobs, "<f4"), np.cumsum(lengths)[:-1])
        masks = np.split(np.frombuffer(group.loss_mask, np.uint8), np.cumsum(lengths)[:-1])
        padded = np.zeros((len(rows), max(lengths)), np.int64)
        for place, row in enumerate(rows):
            padded[place, : len(row)] = row
        own, _ = policy.logprobs(
            torch.from_numpy(padded), torch.tensor(lengths), temperature=SAMPLING.temperature
        )
        total, tokens = 0.0, 0
        for place, (their, mask) in enumerate(zip(theirs, masks, strict=True)):
            chosen = mask.astype(bool)
            said = np.full(len(their), -0.5, np.float32) if fabricated else their
            mine = own[place, : len(their)].double().numpy()
            total += float(np.abs(mine - said)[chosen].sum())
            tokens += int(chosen.sum())
        measured.diffs.append(total / tokens)
        measured.tokens.append(tokens)
    return measured


async def replayed(groups: list[GroupPlayed], *, inflated: bool) -> dict[str, int]:
    """Verdicts of an auditor over real groups, as they are or with every reward claimed 1."""
    environment = Reversal(digits=DIGITS)
    told = {"confirmed": 0, "refuted": 0}
    for index, group in enumerate(groups):
        job = ReplayJob(
            task=Task(index, environment.task("train", index)),
            sampling=SAMPLING,
            trajectories=group.trajectories,
            token_ids=group.token_ids,
            loss_mask=group.loss_mask,
        )
        found = await replay_group(environment, job)
        claimed = [1.0 if inflated else header.reward for header in group.trajectories]
        agrees = not found.problem and all(
            abs(a - b) <= 1e-6 for a, b in zip(claimed, found.rewards, strict=True)
        )
        told["confirmed" if agrees else "refuted"] += 1
    return told


# ------------------------------------------------------------------------------ the rule


def draw(rng: random.Random, measured: Measured) -> GroupMismatch:
    place = rng.randrange(len(measured.diffs))
    return GroupMismatch(GroupId("g0"), measured.tokens[place], measured.diffs[place])


def false_alarms(
    precision: str, honest: Measured, *, floor: float | None, workers: int, groups: int
) -> dict[str, Any]:
    """Workers that are suspected, and those that would be quarantined."""
    rng = random.Random(f"{precision} {workers}")
    watch = MismatchWatch(MismatchRule(run_precision=precision, floor=floor))
    suspected: set[PeerId] = set()
    quarantined: set[PeerId] = set()
    for number in range(groups):
        peer = PeerId(f"w{number % workers}")
        for found in watch.note([(peer, draw(rng, honest))], lambda _: precision):
            suspected.add(peer)
            if found.confirmed:
                quarantined.add(peer)
    return {
        "workers": workers,
        "groups": groups,
        "suspected": len(suspected),
        "quarantined": len(quarantined),
    }


def groups_until(
    precision: str,
    honest: Measured,
    offender: Measured,
    *,
    floor: float | None,
    workers: int,
    share: float,
    trials: int,
) -> dict[str, Any]:
    """Compared groups of one offender, which lies in `share` of its groups, until the rule would
    quarantine it; the others deliver as many each."""
    rng = random.Random(f"{precision} {workers} {share}")
    counts, missed = [], 0
    for _ in range(trials):
        watch = MismatchWatch(MismatchRule(run_precision=precision, floor=floor))
        for number in range(1, GROUPS_MAX + 1):
            step = [(PeerId(f"w{i}"), draw(rng, honest)) for i in range(workers - 1)]
            lies = rng.random() < share
            step.append((PeerId("liar"), draw(rng, offender if lies else honest)))
            found = watch.note(step, lambda _: precision)
            if any(each.worker == "liar" and each.confirmed for each in found):
                counts.append(number)
                break
        else:
            missed += 1
    return {
        "lies_in": share,
        "workers": workers,
        "mean": statistics.mean(counts) if counts else None,
        "p99": float(np.quantile(counts, 0.99)) if counts else None,
        "largest": max(counts, default=None),
        f"not_in_{GROUPS_MAX}": missed,
    }


def groups_until_refuted(share: float, *, trials: int) -> dict[str, Any]:
    """Delivered groups of a worker whose rewards are all wrong, until two audits refuted it."""
    counts = []
    for trial in range(trials):
        audit = AuditSettings(share=share, key=trial.to_bytes(8, "little"))
        evidence, number = EvidenceSum(), 0
        while evidence.value < audit.refuted_needed:
            number += 1
            if is_chosen(GroupId(f"g{number}"), run_id="r", audit=audit):
                evidence.note(odd=True)
        counts.append(number)
    return {
        "share": share,
        "mean": statistics.mean(counts),
        "expected": 2 / share,
        "p99": float(np.quantile(counts, 0.99)),
    }


def whole_coordinator(honest: Measured, groups: int) -> dict[str, Any]:
    """Honest workers of a simulated fleet: every group is compared and audited."""
    audit = AuditSettings(
        share=1.0,
        workers=(PeerId("w0"), PeerId("w1")),
        key=b"k",
        in_flight_max=64,
        rule=MismatchRule(run_precision="bfloat16"),
    )
    settings = a_run(7, groups_per_step=64, group_size=4, staleness_max=2, audit=audit)
    learner = LearnerModel(
        train_s=2.0,
        checkpoint_every=20,
        mismatch=statistics.median(honest.diffs),
        mismatch_sigma=honest.log_spread,
        outlier_share=0.0,
    )
    scenario = calm_fleet(
        7, num_workers=16, steps=math.ceil(groups / 64), settings=settings, learner=learner
    )
    simulation = Simulation(replace(scenario, tick_s=0.5))
    outcome = simulation.run()
    verdicts = simulation.invariants.books.verdicts.values()
    return {
        "groups_trained": outcome.ends["trained"],
        "workers": 16,
        "audits": {
            v: sum(1 for x in verdicts if x == v) for v in ("confirmed", "refuted", "unaudited")
        },
        "quarantined": outcome.events["worker_quarantined"],
        "suspected": outcome.events["worker_suspected"],
        "withdrawn": outcome.events["group_withdrawn"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=200, help="real groups of each kind")
    parser.add_argument("--honest", type=int, default=10_000)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    offenders: dict[str, tuple[Change | None, bool]] = {
        "weights of 8 bits": (rounded(8), False),
        "weights of 4 bits": (rounded(4), False),
        "weights of a step before": (a_step_before, False),
        "logprobs made up": (None, True),
    }
    measured: dict[str, Any] = {}
    honest: dict[str, Measured] = {}
    lying: dict[str, dict[str, Measured]] = {}
    for dtype in DTYPES:
        groups = asyncio.run(played(dtype, None, options.groups))
        honest[dtype] = compared(dtype, groups)
        lying[dtype] = {}
        measured[dtype] = {"honest": honest[dtype].facts()}
        for name, (change, fabricated) in offenders.items():
            theirs = (
                groups if change is None else asyncio.run(played(dtype, change, options.groups))
            )
            lying[dtype][name] = compared(dtype, theirs, fabricated=fabricated)
            measured[dtype][name] = lying[dtype][name].facts()
    told = {
        "machine": f"{os.cpu_count()} CPUs, {platform.machine()}, "
        f"Python {platform.python_version()}",
        "parameters": {
            "model": MODEL,
            "environment": f"reversal of {DIGITS} digits",
            "group_size": SIZE,
            "honest": options.honest,
            "trials": options.trials,
        },
        "measured": measured,
        "replayed": {
            "honest": asyncio.run(replayed(groups, inflated=False)),
            "inflated": asyncio.run(replayed(groups, inflated=True)),
        },
        "whole_coordinator": whole_coordinator(honest["bfloat16"], options.honest),
        "rules": [
            {
                "precision": dtype,
                "mismatch_floor": floor or f"that of {dtype}, {TOLERANCES[dtype]:g}",
                "false_alarms": [
                    false_alarms(
                        dtype, honest[dtype], floor=floor, workers=workers, groups=options.honest
                    )
                    for workers in (1, 2, 4, 8, 64)
                ],
                "offenders": {
                    name: [
                        groups_until(
                            dtype,
                            honest[dtype],
                            found,
                            floor=floor,
                            workers=workers,
                            share=share,
                            trials=options.trials,
                        )
                        for workers, share in ((2, 1.0), (8, 1.0), (8, 0.5), (8, 0.25))
                    ]
                    for name, found in lying[dtype].items()
                },
            }
            for dtype, floor in (("float32", None), ("bfloat16", None), ("bfloat16", 0.01))
        ],
        "rewards": [
            groups_until_refuted(share, trials=options.trials) for share in (0.05, 0.1, 0.25, 1.0)
        ],
        "seconds": time.perf_counter() - began,
    }
    text = json.dumps(told, indent=2)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
