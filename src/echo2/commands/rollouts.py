"""`echo2 rollouts`: what the policy said in the batches that were trained.

Each trajectory with its text (what was given, and in colour what was sampled), reward,
advantage, versions, staleness, and how far worker and learner disagree on its logprobs.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from echo2.commands.run_text import Decode, decoder_of, escaped
from echo2.errors import Echo2Error
from echo2_learner.rollout_files import FOLDER, SavedBatch, read_saved_batch, saved_steps


@dataclass(frozen=True, slots=True)
class Shown:
    """One trajectory. `parts` are (sampled by the policy, text) in order; `mismatch` is mean
    |logprob of learner - of worker| over `mismatch_tokens` tokens, or with 0 tokens that of
    its worker in this step; None when neither was measured."""

    group: str
    index: int
    task_index: int
    worker: str
    reward: float
    advantage: float
    versions: list[str]
    staleness: int
    tokens: int
    tokens_in_loss: int
    turns: int
    finish: str
    mismatch: float | None
    mismatch_tokens: int
    parts: list[tuple[bool, str]]


def main(run_dir: Path, *, step: int | None, order: str, limit: int, as_json: bool) -> int:
    """`order`: "batch", "best" or "worst"."""
    steps = saved_steps(run_dir / FOLDER)
    if not steps:
        raise Echo2Error(
            f"{run_dir / FOLDER} holds no rollouts: the run trained no step yet, or "
            "rollouts.keep_steps is 0"
        )
    if step is None:
        step = max(steps)
    if step not in steps:
        raise Echo2Error(
            f"the rollouts of step {step} are not kept; kept are {_ranges(list(steps))} "
            "(rollouts.keep_steps says how many)"
        )
    batch = read_saved_batch(steps[step])
    decode, note = decoder_of(run_dir)
    found = trajectories(batch, decode)
    if order != "batch":
        found.sort(key=lambda shown: shown.reward, reverse=order == "best")
    chosen = found[:limit]
    if as_json:
        told = [asdict(shown) for shown in chosen]
        summary = {**_summary(batch, found), "kept_steps": list(steps), "note": note}
        print(json.dumps({**summary, "trajectories": told}, indent=2, ensure_ascii=False))
        return 0
    console = Console(highlight=False)
    summary = _summary(batch, found)
    console.print(
        f"step {step} of {run_dir}: {summary['groups']} groups, {len(found)} trajectories, reward "
        f"{summary['reward_mean']:.3f}; kept steps {_ranges(list(steps))}"
    )
    if note:
        console.print(note, style="yellow")
    for shown in chosen:
        console.print(as_text(shown))
    if len(chosen) < len(found):
        console.print(f"{len(found) - len(chosen)} more: --limit {len(found)}", style="dim")
    return 0


def trajectories(batch: SavedBatch, decode: Decode) -> list[Shown]:
    """All of a batch, in its order."""
    bounds = iter(batch.bounds())
    found: list[Shown] = []
    for group in batch.groups:
        for index, header in enumerate(group.trajectories):
            start, end = next(bounds)
            number = len(found)
            own = {name: batch.arrays[name][start:end] for name in _PER_TOKEN & set(batch.arrays)}
            in_loss = own["in_loss"].astype(bool)
            versions = [span.version for span in header.spans]
            oldest = min(
                (s.version.step for s in header.spans if in_loss[s.start : s.end].any()),
                default=batch.step - 1,
            )
            mismatch, compared = _mismatch(own, in_loss, batch.mismatch.get(group.worker))
            found.append(
                Shown(
                    group=group.group,
                    index=index,
                    task_index=group.task.index,
                    worker=group.worker,
                    reward=header.reward,
                    advantage=float(batch.arrays["advantages"][number]),
                    versions=[str(version) for version in dict.fromkeys(versions)],
                    staleness=batch.step - 1 - oldest,
                    tokens=header.length,
                    tokens_in_loss=int(in_loss.sum()),
                    turns=header.num_turns,
                    finish=header.finish,
                    mismatch=mismatch,
                    mismatch_tokens=compared,
                    parts=_parts(own["token_ids"], own["loss_mask"], decode),
                )
            )
    return found


def as_text(shown: Shown) -> Text:
    """A head line, then what was given (dim) and what was sampled."""
    if shown.mismatch is None:
        mismatch = "not measured"
    elif shown.mismatch_tokens:
        mismatch = f"{shown.mismatch:.2g}"
    else:
        mismatch = f"{shown.mismatch:.2g} (of {shown.worker})"
    text = Text()
    text.append(f"\n{shown.group} #{shown.index}", style="bold")
    text.append(
        f"  reward {shown.reward:g}  advantage {shown.advantage:+.3f}  {shown.worker}  version "
        f"{', '.join(shown.versions)}  staleness {shown.staleness}  {shown.turns} turns, "
        f"{shown.tokens_in_loss} of {shown.tokens} tokens trained, {shown.finish}  Δlogprob "
        f"{mismatch}\n"
    )
    for sampled, part in shown.parts:
        text.append(escaped(part), style="green" if sampled else "dim")
    return text


_PER_TOKEN = {"token_ids", "logprobs", "loss_mask", "in_loss", "learner_logprobs"}


def _mismatch(
    own: dict[str, Any], in_loss: Any, of_worker: float | None
) -> tuple[float | None, int]:
    if "learner_logprobs" in own:
        known = in_loss & np.isfinite(own["learner_logprobs"])
        if known.any():
            difference = own["learner_logprobs"][known] - own["logprobs"][known]
            return float(np.abs(difference).mean()), int(known.sum())
    return of_worker, 0


def _parts(token_ids: Any, mask: Any, decode: Decode) -> list[tuple[bool, str]]:
    rows = zip(mask.tolist(), token_ids.tolist(), strict=True)
    return [
        (bool(sampled), decode([token_id for _, token_id in some]))
        for sampled, some in itertools.groupby(rows, key=lambda row: row[0])
    ]


def _summary(batch: SavedBatch, found: list[Shown]) -> dict[str, Any]:
    rewards = [shown.reward for shown in found]
    return {
        "step": batch.step,
        "incarnation": batch.incarnation,
        "groups": len(batch.groups),
        "reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "mismatch_by_worker": batch.mismatch,
    }


def _ranges(steps: list[int]) -> str:
    """1 to 3, 7"""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][-1] + 1:
            runs[-1].append(step)
        else:
            runs.append([step])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
