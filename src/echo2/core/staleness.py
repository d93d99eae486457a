"""The staleness rules, as pure decisions: admission, pacing, holding a batch.

Symbols as in docs/staleness.md: S staleness_max, R groups_per_step, v completed steps,
f the version at which the next batch will be trained, u the version that sampled, and
u + S its expiry. A verdict carries its reason, and the log line, the operator and the
tests read the same sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok


ALLOWED = Verdict(ok=True)


def expiry_step(sampled_step: int, *, staleness_max: int) -> int:
    """u + S: the last v at which what version u sampled may be trained."""
    return sampled_step + staleness_max


def window_verdict(sampled_step: int, *, train_step: int, staleness_max: int) -> Verdict:
    """May a token of version `sampled_step` be in the loss at version `train_step`?"""
    low = max(0, train_step - staleness_max)
    if low <= sampled_step <= train_step:
        return ALLOWED
    return Verdict(
        ok=False,
        reason=(
            f"sampled by version {sampled_step}, window is [{low}, {train_step}]; "
            "raise staleness.max or add workers"
        ),
    )


def pacing_verdict(
    held_by_expiry: Mapping[int, int], *, new_expiry: int, next_step: int, groups_per_step: int
) -> Verdict:
    """May one more group with `new_expiry` be held (leased or buffered)?

    For every e ≥ f the groups held with expiry ≤ e must afterwards number at most
    R·(e − f + 1): that many batches are formed up to version e, so each finds its place. Where no
    group expires there is only more room, so that those e need not be looked at.
    """
    if new_expiry < next_step:
        return Verdict(
            ok=False,
            reason=f"expiry {new_expiry} is before the next batch, trained at {next_step}",
        )
    total = 0
    for expiry in sorted({new_expiry, *held_by_expiry}):
        total += held_by_expiry.get(expiry, 0)
        held = total + (1 if new_expiry <= expiry else 0)
        room = groups_per_step * (expiry - next_step + 1)
        if expiry >= new_expiry and held > room:
            return Verdict(
                ok=False,
                reason=(
                    f"{held} groups would expire by version {expiry}, and the batches "
                    f"{next_step} to {expiry} train {room}"
                ),
            )
    return ALLOWED


def hold_verdict(
    leased_by_expiry: Mapping[int, int], *, train_step: int, groups_per_step: int
) -> Verdict:
    """With late = "wait": may the batch of `train_step` be formed now?

    Held while more groups are still out with expiry ≤ e than the batches after this one
    can train by e, for any e ≥ f: R·(e − f). For e = f this is the rule "held while a live
    lease has expiry ≤ f"; the larger e keep a batch of fresh groups from overtaking more
    slow ones than the next batches have room for.
    """
    total = 0
    for expiry in sorted(leased_by_expiry):
        total += leased_by_expiry[expiry]
        room = groups_per_step * max(0, expiry - train_step)
        if total > room:
            return Verdict(
                ok=False,
                reason=(
                    f"{total} groups in flight expire by version {max(expiry, train_step)}, "
                    f"later batches have room for {room}"
                ),
            )
    return ALLOWED


def publish_verdict(step: int, *, last_step: int | None, period: int, final: bool) -> Verdict:
    """May `step` be published, κ = `period` after the last one of this incarnation?"""
    if last_step is None:
        return ALLOWED
    if step <= last_step:
        return Verdict(ok=False, reason=f"version {step} is not above the last one, {last_step}")
    if step - last_step < period and not final:
        return Verdict(
            ok=False,
            reason=f"version {step} follows {last_step} by less than the period κ = {period}",
        )
    return ALLOWED
