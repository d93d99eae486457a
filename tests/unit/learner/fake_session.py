"""A session in memory: samples with the last published version, read back from the run
folder, so that behaviour logprobs are real. Everything is decided by the seed and the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from echo2.config import Config
from echo2.learner_client import Batch
from echo2.messages import (
    PROTOCOL,
    BatchGranted,
    BatchGroup,
    EvalResult,
    LearnerWelcome,
    VersionPublished,
)
from echo2.types import GroupMismatch, Sampling, Span, Task, TrajectoryHeader, Version
from echo2.weights.store import open_version
from echo2_learner.policy import Policy

PROMPT = (1, 3, 4)


@dataclass
class FakeSession:
    """`calls` lists what was called, with the step. `on_call` is asked first and may raise or
    send a signal. `data_ends_at`: there is no batch from this step on."""

    config: Config
    run_dir: Path
    policy: Policy
    incarnation: int = 1
    data_ends_at: int = 10**9
    tell_last: bool = True
    on_call: Callable[[str, int], None] = lambda name, step: None
    calls: list[tuple[str, int]] = field(default_factory=list)
    mismatches: list[Sequence[GroupMismatch]] = field(default_factory=list)
    published: list[VersionPublished] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    results: list[EvalResult] = field(default_factory=list)
    closed: tuple[str, bool] | None = None
    missing_steps: int = 0

    def start(
        self, *, resume_step: int, digest: str = "", checkpoint_steps: Sequence[int] = ()
    ) -> LearnerWelcome:
        self._called("start", resume_step)
        return LearnerWelcome(
            protocol=PROTOCOL,
            run_id="r",
            incarnation=self.incarnation,
            step=resume_step,
            heartbeat_interval_s=1.0,
            silence_max_s=15.0,
        )

    def next_batch(self, step: int) -> Batch | None:
        self._called("next_batch", step)
        if step >= self.data_ends_at:
            return None
        groups = self._groups(step)
        last = self.tell_last and step + 1 >= self.data_ends_at
        granted = BatchGranted(
            incarnation=self.incarnation,
            step=step,
            loss_from_step=max(0, step - self.config.staleness.max),
            groups=tuple(group.group for group in groups),
            last=last,
            workers_ready=2,
            cost_usd=0.5,
        )
        return Batch(step, granted.loss_from_step, groups, granted, last)

    def complete(
        self, step: int, *, train_s: float, wait_s: float, mismatch: Sequence[GroupMismatch]
    ) -> None:
        self._called("complete", step)
        self.mismatches.append(mismatch)

    def publish(self, message: VersionPublished) -> int:
        self._called("publish", message.version.step)
        self.published.append(message)
        stored = open_version(self.run_dir / "versions", message.manifest_digest)
        assert stored is not None
        with stored:
            self.policy.load_tensors(
                {
                    name: torch.frombuffer(bytearray(content), dtype=torch.float32).reshape(shape)
                    for name, (_, shape, content) in stored.tensors().items()
                }
            )
        return max(0, message.version.step - self.config.staleness.max)

    def checkpoint_saved(self, step: int, kept: Sequence[int]) -> None:
        self._called("checkpoint_saved", step)
        self.kept = list(kept)

    def evaluate(
        self, version: Version, tasks: Sequence[Task], sampling: Sampling, group_size: int
    ) -> str:
        self._called("evaluate", version.step)
        self.results.append(
            EvalResult(
                incarnation=self.incarnation,
                eval_id=f"e{version.step}",
                version=version,
                num_asked=len(tasks),
                num_done=len(tasks),
                reward_mean=version.step / 100,
                tokens_mean=3.0,
            )
        )
        return f"e{version.step}"

    def poll_evals(self) -> list[EvalResult]:
        done, self.results = self.results, []
        return done

    def wait_eval(self, eval_id: str, timeout_s: float) -> EvalResult:
        self._called("wait_eval", int(eval_id[1:]))
        [result] = [found for found in self.results if found.eval_id == eval_id]
        self.results.remove(result)
        return result

    def say(self, text: str) -> None:
        self.said.append(text)

    @property
    def tasks_ended(self) -> bool:
        return any(
            step + 1 >= self.data_ends_at for name, step in self.calls if name == "next_batch"
        )

    def close(self, reason: str, *, finished: bool, missing_steps: int = 0) -> None:
        self.calls.append(("close", -1))
        self.closed = (reason, finished)
        self.missing_steps = missing_steps

    def _called(self, name: str, step: int) -> None:
        self.calls.append((name, step))
        self.on_call(name, step)

    def _groups(self, step: int) -> list[BatchGroup]:
        """Sampled in one go; a group depends on nothing but its index and the weights."""
        count, size = self.config.learner.groups_per_step, self.config.dispatch.group_size
        length = self.config.sampling.max_tokens
        indexes = range(step * count, (step + 1) * count)
        tokens = np.array([[*PROMPT, 5 + index % 8] for index in indexes for _ in range(size)])
        rngs = [np.random.default_rng([7, index]) for index in indexes]
        for _ in range(length):
            with torch.no_grad():
                logits = self.policy.module(torch.from_numpy(tokens)).logits[:, -1].double()
            noise = np.concatenate([rng.gumbel(size=(size, logits.shape[1])) for rng in rngs])
            chosen = (logits + torch.from_numpy(noise)).argmax(-1, keepdim=True).numpy()
            tokens = np.concatenate([tokens, chosen], axis=1)
        lengths = torch.full((len(tokens),), tokens.shape[1])
        with torch.no_grad():
            logprobs, _ = self.policy.logprobs(torch.from_numpy(tokens), lengths, temperature=1.0)
        return [
            self._group(step, index, tokens[rows], logprobs.numpy()[rows])
            for index, rows in (
                (index, slice(i * size, (i + 1) * size)) for i, index in enumerate(indexes)
            )
        ]

    def _group(self, step: int, index: int, tokens: Any, logprobs: Any) -> BatchGroup:
        start = len(PROMPT) + 1
        mask = np.zeros(tokens.shape, np.uint8)
        mask[:, start:] = 1
        version = self.published[-1].version
        return BatchGroup(
            incarnation=self.incarnation,
            step=step,
            group=f"g{index}",
            worker=f"w{index % 2}",
            task=Task(index, "{}"),
            trajectories=tuple(
                TrajectoryHeader(
                    length=tokens.shape[1],
                    prompt_length=start,
                    num_sampled=tokens.shape[1] - start,
                    reward=float(row[start:].sum() % 2),
                    finish="length",
                    num_turns=1,
                    spans=(Span(version, start, tokens.shape[1]),),
                )
                for row in tokens
            ),
            token_ids=tokens.astype("<i4").tobytes(),
            logprobs=(logprobs * mask).astype("<f4").tobytes(),
            loss_mask=mask.tobytes(),
        )


def make_config(folder: Path, **tables: Any) -> Config:
    """A small run of the model in `folder`."""
    found: dict[str, Any] = {
        "model": {"path": str(folder)},
        "environment": {"name": "addition"},
        "sampling": {"max_tokens": 3},
        "dispatch": {"group_size": 4},
        "staleness": {"max": 2},
        "learner": {"steps": 4, "groups_per_step": 4, "learning_rate": 1e-3},
        "checkpoint": {"every_steps": 2, "keep": 2},
        "eval": {"every_steps": 2, "num_tasks": 8},
        "net": {"connect_timeout_s": 1.0},
    }
    for name, table in tables.items():
        found[name] = {**found.get(name, {}), **table}
    return Config.model_validate(found)
