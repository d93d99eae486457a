"""The learner's steps as the events tell them: their order, their batches, their versions."""

from __future__ import annotations

from typing import Any

from echo2.verify.check import Check
from echo2.verify.records import Line


class StepsContiguous(Check):
    NAME = "steps_contiguous"
    TEXT = "an incarnation completes each step once, one after the other from where it resumed"
    UNIT = "steps"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._next: dict[int, int] = {}

    def read(self, line: Line) -> None:
        if line["event"] == "learner_joined":
            self._next.setdefault(line["incarnation"], line["resume_step"])
        elif line["event"] == "step_completed":
            self.promise.checked += 1
            incarnation, step = line["incarnation"], line["step"]
            expected = self._next.get(incarnation)
            if step != expected:
                self.violate(
                    line.where,
                    f"incarnation {incarnation} completed step {step}; "
                    + (
                        "it never joined"
                        if expected is None
                        else f"the one after {expected - 1} is {expected}"
                    ),
                    incarnation=incarnation,
                    step=step,
                )
            self._next[incarnation] = step + 1

    def conclude(self) -> None:
        self.promise.facts["v"] = self.history.v
        line = self.history.line
        if not line:
            return
        missing = set(range(min(line), max(line) + 1)) - set(line)
        for step in sorted(missing):
            self.violate("events.jsonl", f"step {step} is missing in the surviving line", step=step)


class BatchSizes(Check):
    NAME = "batch_sizes"
    TEXT = "a batch has the groups that ended in it: R of them, or fewer in the last"
    UNIT = "batches"

    def conclude(self) -> None:
        history = self.history
        self.promise.checked = len(history.completed)
        last = max((step for _, step in history.completed), default=0)
        wanted = self.settings.groups_per_step
        for (incarnation, step), num_groups in history.completed.items():
            batch = history.batches.get((incarnation, step))
            ended = batch.num_groups if batch is not None else 0
            ids = {"incarnation": incarnation, "step": step}
            if ended != num_groups:
                self.violate(
                    batch.where if batch is not None else "events.jsonl",
                    f"step {step} of incarnation {incarnation} was completed with {num_groups} "
                    f"groups, but {ended} groups ended as trained in it",
                    **ids,
                )
            if num_groups != wanted and not (step == last and 1 <= num_groups < wanted):
                self.violate(
                    batch.where if batch is not None else "events.jsonl",
                    f"step {step} of incarnation {incarnation} has {num_groups} groups; every "
                    f"batch but the last has {wanted}",
                    **ids,
                )
        orphans = [key for key in history.batches if key not in history.completed]
        for key in orphans:
            batch = history.batches[key]
            if not history.finished and key == (history.incarnation, history.v):
                self.promise.notes.append(
                    f"step {key[1]} was being completed when the run was interrupted"
                )
                continue
            if not history.survives(*key):
                self.promise.notes.append(
                    f"step {key[1]} of incarnation {key[0]} was being completed when the "
                    "coordinator died; it was rewound"
                )
                continue
            self.violate(
                batch.where,
                f"{batch.num_groups} groups ended as trained at step {key[1]} of incarnation "
                f"{key[0]}, which was never completed",
                incarnation=key[0],
                step=key[1],
            )
        self.promise.facts["R"] = wanted
        self.promise.facts["last"] = history.completed.get((history.line.get(last, 0), last), 0)


class Period(Check):
    NAME = "period"
    TEXT = "published versions are at least κ steps apart, but for the first and the last"
    UNIT = "versions"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._last: dict[int, int] = {}
        self._close: list[tuple[str, int, int, int]] = []

    def read(self, line: Line) -> None:
        if line["event"] != "version_published":
            return
        self.promise.checked += 1
        incarnation, step = line["incarnation"], line["step"]
        name = f"{incarnation}.{step}"
        if step > self.history.v:
            self.violate(
                line.where,
                f"version {name} was published when only {self.history.v} steps were completed",
                version=name,
            )
        before = self._last.get(incarnation)
        if before is not None and step <= before:
            self.violate(
                line.where,
                f"version {name} was published after {incarnation}.{before}; steps only grow",
                version=name,
            )
        elif before is not None and step - before < self.settings.period:
            self._close.append((line.where, incarnation, before, step))
        self._last[incarnation] = step

    def conclude(self) -> None:
        period = self.settings.period
        self.promise.facts["κ"] = period
        last = max((step for _, step in self.history.completed), default=-1) + 1
        for where, incarnation, before, step in self._close:
            if step < last:
                self.violate(
                    where,
                    f"versions {incarnation}.{before} and {incarnation}.{step} are "
                    f"{step - before} steps apart; the period is {period}",
                    version=f"{incarnation}.{step}",
                )
        if period > self.settings.staleness_max + 1:
            self.violate(
                "config.resolved.toml",
                f"the period {period} is above S + 1 = {self.settings.staleness_max + 1}",
            )


def step_checks() -> tuple[type[Check], ...]:
    return (StepsContiguous, BatchSizes, Period)
