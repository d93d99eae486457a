"""Losses and corrections as their papers' formulas read: float64 scalars and loops, so slow
and so plain that a look tells whether they are right. Only tests use them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Case:
    """Trajectories of any length: `logprobs[i]` are scalars with a gradient."""

    logprobs: list[list[Tensor]]
    old: list[list[float]]
    behaviour: list[list[float]]
    reference: list[list[float]]
    advantages: list[float]
    mask: list[list[bool]]


def surrogate(rho: Tensor, advantage: float, low: float, high: float) -> Tensor:
    clipped = rho
    if float(rho.detach()) < 1 - low:
        clipped = torch.tensor(1 - low, dtype=torch.float64)
    if float(rho.detach()) > 1 + high:
        clipped = torch.tensor(1 + high, dtype=torch.float64)
    one, other = rho * advantage, clipped * advantage
    return one if float(one.detach()) <= float(other.detach()) else other


def weights(case: Case, i: int, tokens: Sequence[int], table: Any) -> list[float]:
    ratios = [math.exp(float(case.old[i][t]) - case.behaviour[i][t]) for t in tokens]
    capped = [min(w, table.importance_cap) for w in ratios]
    low, high = table.correction_low, table.correction_high
    if table.correction == "none":
        return [1.0 for _ in ratios]
    if table.correction == "icepop":
        return [w if low <= w <= high else 0.0 for w in ratios]
    whole = math.prod(ratios)
    if table.correction == "geometric_mask":
        whole = whole ** (1 / len(ratios))
    if table.correction in ("sequence_mask", "geometric_mask") and not low <= whole <= high:
        return [0.0 for _ in ratios]
    return capped


def objectives(case: Case, i: int, tokens: Sequence[int], table: Any) -> list[Tensor]:
    advantage = case.advantages[i]
    low, high = table.clip_low, table.clip_high
    logs = [case.logprobs[i][t] - case.old[i][t] for t in tokens]
    if table.name in ("grpo", "dr_grpo", "dapo"):
        return [surrogate(torch.exp(log), advantage, low, high) for log in logs]
    if table.name == "gspo":
        whole = torch.exp(sum(logs[1:], logs[0]) / len(logs))
        return [surrogate(whole, advantage, low, high) for _ in logs]
    assert table.name == "cispo"
    return [
        min(max(math.exp(float(log.detach())), 1 - low), 1 + high) * advantage * case.logprobs[i][t]
        for log, t in zip(logs, tokens, strict=True)
    ]


def loss(case: Case, table: Any, *, length: int) -> Tensor:
    """-J over all trajectories."""
    sums: list[Tensor] = []
    counts: list[int] = []
    for i, mask in enumerate(case.mask):
        tokens = [t for t, inside in enumerate(mask) if inside]
        if not tokens:
            continue
        total = torch.zeros((), dtype=torch.float64)
        terms = zip(
            tokens,
            weights(case, i, tokens, table),
            objectives(case, i, tokens, table),
            strict=True,
        )
        for t, weight, objective in terms:
            apart = case.reference[i][t] - case.logprobs[i][t]
            kl = torch.exp(apart) - apart - 1
            total = total + weight * (objective - table.kl_coefficient * kl)
        sums.append(total)
        counts.append(len(tokens))
    if not sums:
        return torch.zeros((), dtype=torch.float64)
    if table.aggregate == "token_mean":
        parts = [total / sum(counts) for total in sums]
    elif table.aggregate == "constant":
        parts = [total / length / len(sums) for total in sums]
    else:
        parts = [total / n / len(sums) for total, n in zip(sums, counts, strict=True)]
    return -sum(parts[1:], parts[0])
