"""RUN/metrics.jsonl: one JSON object per learner step.

`step` counts completed steps: the line of the batch trained at v has step = v + 1 and
policy_version = v. After a resume, lines of a higher incarnation stand for those of the same
step before. All values are of the batch of this step, unless the list says otherwise.

    reward_mean         over all trajectories of the batch (null for a batch without any)
    staleness_mean/max  per token in the loss, at the version at which it was trained
    logprob_diff_mean   mean |learner - worker| with the version that sampled, over
                        logprob_diff_tokens tokens (since the last one reported); null on
                        lines without a check
    mismatch_kl         k3 estimate of KL(behaviour ‖ learner at the start of the step)
    ess                 effective sample size of the importance weights, as a share of 1
    entropy             nats per token, of the policy at the start of the step
    clip_fraction       share of tokens whose gradient the clip cut
    grad_norm, loss     means over the optimizer updates; the norm is the one before clipping
    tokens              in the loss; tokens_per_s is over waiting and training
    groups_expired, groups_failed, cost_usd     of the whole run so far
    eval_reward, eval_version, eval_num_done    of an eval that ended since the last line

A value that is not finite is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo2.messages import BatchGranted, EvalResult
from echo2.types import Version
from echo2_learner.batch import TrainingBatch
from echo2_learner.logprob_check import CheckResult
from echo2_learner.trainer import StepMetrics


class MetricsFile:
    """Appends whole lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def mend(self) -> None:
        """Cut off the half line that a killed learner may have left."""
        if not self._path.exists():
            return
        with self._path.open("r+b") as file:
            content = file.read()
            file.truncate(content.rfind(b"\n") + 1)

    def append(self, line: Mapping[str, Any]) -> None:
        finite = {key: value if _is_finite(value) else None for key, value in line.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finite, allow_nan=False) + "\n")


def metrics_line(
    batch: TrainingBatch,
    trained: StepMetrics,
    check: CheckResult,
    granted: BatchGranted,
    *,
    version: Version,
    train_s: float,
    wait_s: float,
    publish_s: float,
    time: float,
) -> dict[str, Any]:
    """The line of a step, all but the eval's fields. `version` is the one trained on."""
    staleness = batch.staleness()
    busy_s = wait_s + train_s
    return {
        "step": version.step + 1,
        "policy_version": version.step,
        "incarnation": version.incarnation,
        "reward_mean": batch.reward_mean,
        "staleness_mean": float(staleness.mean()) if len(staleness) else 0.0,
        "staleness_max": int(staleness.max()) if len(staleness) else 0,
        "logprob_diff_mean": check.diff_mean,
        "logprob_diff_tokens": check.tokens,
        "mismatch_kl": trained.mismatch_kl,
        "ess": trained.ess,
        "entropy": trained.entropy,
        "clip_fraction": trained.clip_fraction,
        "grad_norm": trained.grad_norm,
        "loss": trained.loss,
        "tokens": trained.tokens,
        "tokens_per_s": trained.tokens / busy_s if busy_s > 0 else 0.0,
        "train_s": train_s,
        "wait_s": wait_s,
        "bubble_ratio": wait_s / busy_s if busy_s > 0 else 0.0,
        "publish_s": publish_s,
        "updates": trained.num_updates,
        "learning_rate": trained.learning_rate,
        "groups_trained": len(batch.groups),
        "groups_expired": granted.groups_expired,
        "groups_failed": granted.groups_failed,
        "groups_filtered": granted.groups_filtered,
        "workers_ready": granted.workers_ready,
        "rollout_tokens_per_s": granted.tokens_per_s,
        "t_bcast_s": granted.t_bcast_s,
        "install_pause_s": granted.install_pause_s,
        "cost_usd": granted.cost_usd,
        "time": time,
    }


def eval_fields(result: EvalResult | None) -> dict[str, Any]:
    """What a line says of an eval; null when there is none to report."""
    if result is None:
        return {
            "eval_reward": None,
            "eval_version": None,
            "eval_num_done": None,
            "eval_num_asked": None,
        }
    return {
        "eval_reward": result.reward_mean,
        "eval_version": result.version.step,
        "eval_num_done": result.num_done,
        "eval_num_asked": result.num_asked,
    }


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
