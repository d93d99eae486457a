"""The learner's own lines, held against the coordinator's events."""

from __future__ import annotations

import math
from typing import Any, Final

from echo2.verify.check import Check
from echo2.verify.records import METRICS_FILE, NO_WEIGHTS, Line

LOGPROB_DIFF_MAX: Final = {
    "float32": 1e-3, "bfloat16": 5e-2, "fp8": 1e-1, "int8": 1e-1, "int4": 3e-1,
}  # fmt: skip
"""Largest mean |behaviour logprob - recomputed logprob| of a check, by precision class."""
LOGPROB_TOKENS_MIN: Final = 1000
"""A mean is over so many tokens, which small batches add up to."""
NO_METRICS: Final = f"there is no {METRICS_FILE}: the learner is a program of the user's"


class MetricsCheck(Check):
    """A check that has nothing to say about a run whose learner writes no metrics."""

    def conclude(self) -> None:
        if not (self.run_dir / METRICS_FILE).is_file():
            self.missing()
            return
        self.compare()

    def missing(self) -> None:
        self.promise.skipped = NO_METRICS

    def compare(self) -> None:
        raise NotImplementedError


class MetricsLines(MetricsCheck):
    NAME = "metrics_lines"
    TEXT = "metrics.jsonl has one line for each completed step, in order, without a gap"
    UNIT = "lines"

    def missing(self) -> None:
        own = [name for name in ("learner.json", "checkpoints") if (self.run_dir / name).exists()]
        if own and self.history.completed:
            self.violate(
                METRICS_FILE,
                f"{METRICS_FILE} does not exist, but {own[0]} shows that a learner wrote here, "
                f"and {len(self.history.completed)} steps were completed",
            )
        else:
            super().missing()

    def compare(self) -> None:
        self.promise.checked = len(self.metrics)
        self._in_order()
        lines = {(line["incarnation"], line["step"] - 1): line for line in self.metrics}
        last = self.history.v - 1
        for step, incarnation in sorted(self.history.line.items()):
            if (incarnation, step) in lines:
                continue
            if step == last and not self.history.finished:
                self.promise.notes.append(
                    f"the line of step {step + 1} was not written; the run was interrupted there"
                )
                continue
            self.violate(
                METRICS_FILE,
                f"step {step} was completed by incarnation {incarnation}, but there is no line "
                f"with step = {step + 1} of that incarnation",
                step=step + 1,
                incarnation=incarnation,
            )
        for (incarnation, step), line in lines.items():
            if (incarnation, step) not in self.history.completed and not self._cut_off(line):
                self.violate(
                    line.where,
                    f"the line of step {step + 1} of incarnation {incarnation} has no "
                    "step_completed",
                    step=step + 1,
                    incarnation=incarnation,
                )

    def _in_order(self) -> None:
        expected: dict[int, int] = {}
        for line in self.metrics:
            incarnation, step = line["incarnation"], line["step"]
            resumed = self.history.resume_steps.get(incarnation)
            wanted = expected.get(incarnation, None if resumed is None else resumed + 1)
            if step != wanted:
                self.violate(
                    line.where,
                    f"step {step} of incarnation {incarnation} stands where "
                    + ("it never joined" if wanted is None else f"step {wanted} belongs"),
                    step=step,
                    incarnation=incarnation,
                )
            if line["policy_version"] != step - 1:
                self.violate(
                    line.where,
                    f"the line of step {step} names policy_version {line['policy_version']}; "
                    f"the batch was trained at {step - 1}",
                    step=step,
                )
            expected[incarnation] = step + 1

    def _cut_off(self, line: Line) -> bool:
        """The learner died after the line and before its step was completed."""
        step = line["step"] - 1
        later = any(
            other["step"] > line["step"] and other["incarnation"] == line["incarnation"]
            for other in self.metrics
        )
        superseded = line["incarnation"] < self.history.incarnation
        return not later and (superseded or (not self.history.finished and step == self.history.v))


class MetricsAgree(MetricsCheck):
    NAME = "metrics_agree"
    TEXT = "each line's groups, staleness and reward are those recomputed from the events"
    UNIT = "lines"

    def compare(self) -> None:
        for line in self.metrics:
            key = (line["incarnation"], line["step"] - 1)
            if key not in self.history.completed:
                continue
            self.promise.checked += 1
            ids = {"step": line["step"], "incarnation": line["incarnation"]}
            num_groups = self.history.completed[key]
            if line["groups_trained"] != num_groups:
                self.violate(
                    line.where,
                    f"groups_trained is {line['groups_trained']} at step {line['step']}; "
                    f"step_completed has {num_groups}",
                    **ids,
                )
            if line["staleness_max"] > self.settings.staleness_max:
                self.violate(
                    line.where,
                    f"staleness_max is {line['staleness_max']} at step {line['step']}; at most "
                    f"{self.settings.staleness_max} is allowed",
                    **ids,
                )
            batch = self.history.batches.get(key)
            if batch is None:
                continue
            reward = batch.reward_sum / batch.num_groups
            if not _same(line["reward_mean"], reward):
                self.violate(
                    line.where,
                    f"reward_mean is {line['reward_mean']} at step {line['step']}; the groups of "
                    f"that batch give {reward:.6g}",
                    **ids,
                )
            if line["staleness_max"] != batch.staleness_max:
                self.violate(
                    line.where,
                    f"staleness_max is {line['staleness_max']} at step {line['step']}; the "
                    f"groups of that batch give {batch.staleness_max}",
                    **ids,
                )


class Logprobs(MetricsCheck):
    NAME = "logprobs"
    TEXT = "behaviour logprobs, recomputed by the version that sampled them, agree"
    UNIT = "lines with a check"

    def compare(self) -> None:
        """Lines up to the quarantine of a worker for its logprobs may show them, and so may the
        next one, to which a check with few tokens is added up."""
        if self.metrics and all(line.fields.get("simulated") is True for line in self.metrics):
            self.promise.skipped = NO_WEIGHTS
            return
        excused_until = self.history.found_out_at
        precisions = {*self.history.precisions.values(), self.settings.dtype}
        allowed = max(LOGPROB_DIFF_MAX.get(name, 0.0) for name in precisions)
        compared = 0
        checks = 0.0
        largest: float | None = None
        for line in self.metrics:
            diff = line["logprob_diff_mean"]
            if diff is None:
                continue
            self.promise.checked += 1
            tokens = line["logprob_diff_tokens"]
            compared += tokens
            # What one batch had too few for was added up with the next.
            checks += min(2.0, tokens / LOGPROB_TOKENS_MIN)
            if tokens < LOGPROB_TOKENS_MIN:
                self.violate(
                    line.where,
                    f"logprob_diff_mean is over {tokens} tokens at step {line['step']}; at least "
                    f"{LOGPROB_TOKENS_MIN} are needed",
                    step=line["step"],
                )
            if diff > allowed and excused_until >= 0:
                self.promise.facts["of_offenders"] = self.promise.facts.get("of_offenders", 0) + 1
            elif diff > allowed:
                self.violate(
                    line.where,
                    f"logprob_diff_mean is {diff:.3g} at step {line['step']}; at most {allowed:g} "
                    f"is allowed with {', '.join(sorted(precisions))}",
                    step=line["step"],
                )
            else:
                largest = max(largest or 0.0, diff)
            if line["step"] > excused_until:
                excused_until = -1
        self._enough(checks)
        if not self.promise.checked:
            self.promise.skipped = (
                f"nothing was checked: none of {len(self.metrics)} lines compares logprobs (a "
                f"comparison needs {LOGPROB_TOKENS_MIN} tokens, which small batches add up to)"
            )
            return
        self.promise.facts.update({"largest": largest, "allowed": allowed, "tokens": compared})

    def _enough(self, checks: float) -> None:
        """Half of the lines have a check, or as many as small batches add up to: a mean needs
        LOGPROB_TOKENS_MIN tokens, and a learner that dies loses what it had added up."""
        every = max(2, self.settings.logprob_check_every_steps)
        wanted = 0
        for incarnation in self.history.resume_steps:
            lines = [line for line in self.metrics if line["incarnation"] == incarnation]
            tokens = sum(line["tokens"] for line in lines)
            if tokens >= LOGPROB_TOKENS_MIN * len(lines):
                wanted += len(lines) // every
            else:
                wanted += min(len(lines) // every, tokens // (3 * LOGPROB_TOKENS_MIN))
        if checks < wanted:
            self.violate(
                METRICS_FILE,
                f"{self.promise.checked} of {len(self.metrics)} lines have logprob_diff_mean; a "
                f"check every {every} steps, over {LOGPROB_TOKENS_MIN} tokens or more, makes at "
                f"least {wanted}",
            )


class Evals(MetricsCheck):
    NAME = "evals"
    TEXT = "each eval in the metrics is one that the coordinator ended, with the same reward"
    UNIT = "evals"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ended: dict[int, list[Line]] = {}

    def read(self, line: Line) -> None:
        if line["event"] != "eval_ended":
            return
        self._ended.setdefault(line["step"], []).append(line)
        if line["num_done"] > line["num_asked"]:
            self.violate(
                line.where,
                f"eval {line['eval_id']} has {line['num_done']} results of {line['num_asked']}",
                eval_id=line["eval_id"],
            )

    def compare(self) -> None:
        for line in self.metrics:
            reward, step = line["eval_reward"], line["eval_version"]
            if reward is None:
                continue
            self.promise.checked += 1
            ended = self._ended.get(step, []) if step is not None else []
            if not any(_same(event["reward_mean"], reward) for event in ended):
                found = ", ".join(str(event["reward_mean"]) for event in ended) or "none"
                self.violate(
                    line.where,
                    f"eval_reward is {reward} for version {step!r}; the coordinator ended {found}",
                    step=line["step"],
                )
        self.promise.facts["ended"] = sum(map(len, self._ended.values()))


def _same(left: Any, right: Any) -> bool:
    return (
        isinstance(left, int | float)
        and isinstance(right, int | float)
        and math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-9)
    )


def metric_checks() -> tuple[type[Check], ...]:
    return (MetricsLines, MetricsAgree, Logprobs, Evals)
