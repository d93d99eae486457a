"""The shape of the records: which fields an event and a line of metrics must have.

Written from the documents of the record files, not from the code that writes them, so that
a field that goes missing or changes its type is found here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of JSON values, with the word for it in an error."""

    word: str
    types: tuple[type, ...]
    low: float | None = None
    high: float | None = None

    def takes(self, value: Any) -> bool:
        if not isinstance(value, self.types):
            return False
        if isinstance(value, bool):  # an int to Python, but not to the records
            return bool in self.types
        if not isinstance(value, int | float):
            return True
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


TEXT: Final = Kind("text", (str,))
TEXT_OR_NULL: Final = Kind("text or null", (str, type(None)))
COUNT: Final = Kind("an integer of at least 0", (int,), 0)
COUNT_OR_NULL: Final = Kind("an integer of at least 0, or null", (int, type(None)), 0)
REAL: Final = Kind("a number", (int, float))
REAL_OR_NULL: Final = Kind("a number or null", (int, float, type(None)))
SHARE: Final = Kind("a number from 0 to 1", (int, float), 0, 1)
AT_LEAST_0: Final = Kind("a number of at least 0", (int, float), 0)
BOOLEAN: Final = Kind("true or false", (bool,))
LIST: Final = Kind("a list", (list,))

EVENTS: Final[Mapping[str, Mapping[str, Kind]]] = {
    "run_started": {
        "run_id": TEXT,
        "staleness_max": COUNT,
        "groups_per_step": COUNT,
        "group_size": COUNT,
        "late": TEXT,
        "period": COUNT,
    },
    "run_finished": {"reason": TEXT, "finished": BOOLEAN},
    "learner_joined": {"incarnation": COUNT, "resume_step": COUNT, "digest": TEXT},
    "learner_left": {"incarnation": COUNT, "reason": TEXT},
    "learner_fenced": {"incarnation": COUNT, "by": COUNT},
    "version_published": {
        "incarnation": COUNT,
        "step": COUNT,
        "manifest_digest": TEXT,
        "num_bytes": COUNT,
    },
    "worker_enrolled": {"worker": TEXT, "token": TEXT, "public_key": TEXT},
    "enrolment_refused": {
        "token": TEXT,
        "public_key": TEXT,
        "reason": TEXT,
        "text": TEXT,
        "num_since": COUNT,
    },
    "handshake_refused": {
        "reason": TEXT,
        "public_key": TEXT,
        "address": TEXT,
        "num_since": COUNT,
    },
    "message_refused": {"peer": TEXT, "reason": TEXT, "text": TEXT, "num_since": COUNT},
    "worker_joined": {"worker": TEXT, "engine": TEXT, "precision": TEXT, "slots": COUNT},
    "worker_ready": {"worker": TEXT},
    "worker_suspect": {"worker": TEXT},
    "worker_gone": {"worker": TEXT, "reason": TEXT},
    "worker_activated": {"worker": TEXT, "reason": TEXT},
    "worker_released": {"worker": TEXT, "reason": TEXT},
    "machine_changed": {"worker": TEXT, "offer": TEXT, "state": TEXT, "reason": TEXT},
    "version_installed": {
        "worker": TEXT,
        "incarnation": COUNT,
        "step": COUNT,
        "manifest_digest": TEXT,
        "fetch_s": AT_LEAST_0,
        "install_s": AT_LEAST_0,
        "pause_s": AT_LEAST_0,
        "canary_diff": REAL_OR_NULL,
    },
    "install_failed": {
        "worker": TEXT,
        "incarnation": COUNT,
        "step": COUNT,
        "stage": TEXT,
        "text": TEXT,
    },
    "lease_granted": {
        "group_id": TEXT,
        "lease": TEXT,
        "worker": TEXT,
        "incarnation": COUNT,
        "step": COUNT,
        "attempt": COUNT,
        "revoke_after_s": REAL,
    },
    "lease_revoked": {
        "group_id": TEXT,
        "lease": TEXT,
        "worker": TEXT,
        "reason": TEXT,
        "held_s": REAL,
    },
    "lease_failed": {
        "group_id": TEXT,
        "lease": TEXT,
        "worker": TEXT,
        "stage": TEXT,
        "reason": TEXT,
        "held_s": REAL,
    },
    "group_ended": {
        "group_id": TEXT,
        "end": TEXT,
        "reason": TEXT,
        "worker": TEXT_OR_NULL,
        "incarnation": COUNT,
        "min_version": COUNT_OR_NULL,
        "max_version": COUNT_OR_NULL,
        "min_incarnation": COUNT_OR_NULL,
        "max_incarnation": COUNT_OR_NULL,
        "trained_at": COUNT_OR_NULL,
        "tokens": COUNT,
        "reward_mean": REAL_OR_NULL,
        "attempts": COUNT,
    },
    "group_returned": {"group_id": TEXT, "incarnation": COUNT, "reason": TEXT, "to": TEXT},
    "audit_opened": {"group_id": TEXT, "lease": TEXT, "worker": TEXT},
    "group_audited": {
        "group_id": TEXT,
        "lease": TEXT,
        "worker": TEXT,
        "auditor": TEXT_OR_NULL,
        "verdict": TEXT,
        "reason": TEXT,
        "reward_diff_max": REAL_OR_NULL,
        "claimed": LIST,
        "recomputed": LIST,
    },
    "group_withdrawn": {"group_id": TEXT, "lease": TEXT, "worker": TEXT, "reason": TEXT},
    "worker_suspected": {"worker": TEXT, "cause": TEXT, "reason": TEXT, "evidence": LIST},
    "fleet_suspected": {"centre": AT_LEAST_0, "bound": AT_LEAST_0, "reason": TEXT},
    "worker_quarantined": {
        "worker": TEXT,
        "cause": TEXT,
        "reason": TEXT,
        "step": COUNT,
        "evidence": LIST,
        "precision": TEXT,
        "centre": REAL_OR_NULL,
        "spread": REAL_OR_NULL,
        "bound": REAL_OR_NULL,
        "in_training": LIST,
        "num_trained": COUNT,
        "trained_since": COUNT_OR_NULL,
        "trained": LIST,
        "withdrawn": LIST,
    },
    "worker_pardoned": {"worker": TEXT},
    "step_completed": {"incarnation": COUNT, "step": COUNT, "num_groups": COUNT},
    "checkpoint_saved": {"incarnation": COUNT, "step": COUNT, "kept": LIST},
    "wait_changed": {
        "wait": TEXT,
        "owner": TEXT,
        "text": TEXT,
        "since_s": AT_LEAST_0,
        "ends_in_s": REAL_OR_NULL,
        "then": TEXT,
        "over": BOOLEAN,
    },
    "eval_ended": {
        "eval_id": TEXT,
        "incarnation": COUNT,
        "step": COUNT,
        "num_asked": COUNT,
        "num_done": COUNT,
        "reward_mean": REAL_OR_NULL,
        "reason": TEXT,
    },
}

METRICS: Final[Mapping[str, Kind]] = {
    "step": COUNT,
    "policy_version": COUNT,
    "incarnation": COUNT,
    "reward_mean": REAL_OR_NULL,
    "staleness_mean": AT_LEAST_0,
    "staleness_max": COUNT,
    "logprob_diff_mean": REAL_OR_NULL,
    "logprob_diff_tokens": COUNT,
    "mismatch_kl": REAL,
    "ess": REAL,
    "entropy": REAL,
    "clip_fraction": SHARE,
    "grad_norm": REAL,
    "loss": REAL,
    "tokens": COUNT,
    "tokens_per_s": AT_LEAST_0,
    "train_s": AT_LEAST_0,
    "wait_s": AT_LEAST_0,
    "bubble_ratio": SHARE,
    "publish_s": AT_LEAST_0,
    "updates": COUNT,
    "learning_rate": AT_LEAST_0,
    "groups_trained": COUNT,
    "groups_expired": COUNT,
    "groups_failed": COUNT,
    "groups_filtered": COUNT,
    "workers_ready": COUNT,
    "cost_usd": AT_LEAST_0,
    "eval_reward": REAL_OR_NULL,
    "eval_version": COUNT_OR_NULL,
    "time": REAL,
}

ONLY_WEIGHTS_TELL: Final = frozenset(
    {
        *("mismatch_kl", "ess", "entropy", "clip_fraction"),
        *("grad_norm", "loss", "learning_rate"),
    }
)
"""Fields that a line lacks which says that it is `simulated`."""
SIMULATED_METRICS: Final = {
    name: kind for name, kind in METRICS.items() if name not in ONLY_WEIGHTS_TELL
}


def problems_of(fields: Mapping[str, Any], wanted: Mapping[str, Kind]) -> list[str]:
    """One sentence for each field that is missing or has another type; empty if all is well."""
    found = []
    for name, kind in wanted.items():
        if name not in fields:
            found.append(f"field {name} is missing; it must be {kind.word}")
        elif not kind.takes(fields[name]):
            found.append(f"field {name} is {fields[name]!r}; it must be {kind.word}")
    return found
