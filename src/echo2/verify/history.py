"""What the events say happened, as far as several checks need it.

One pass over events.jsonl keeps this up to date. It believes every event; whether an event
was allowed is for the checks, each of which sees the history as it was before the event.
Kept per group: its standing end, a few words; so a run of a million groups fits in memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from echo2.verify.records import Line


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that the promises are about, from config.resolved.toml."""

    staleness_max: int = 2
    period: int = 1
    late: str = "wait"
    group_size: int = 8
    attempts_max: int = 3
    groups_per_step: int = 32
    dtype: str = "float32"
    """What layers compute in."""
    logprob_check_every_steps: int = 2
    canary_max_diff: float | None = None
    audit_share: float = 0.0
    audit_workers: tuple[str, ...] = ()
    reward_tolerance: float = 1e-6

    @classmethod
    def of(cls, tables: dict[str, Any]) -> tuple[Settings, list[str]]:
        """(settings, problems): a problem for each that is missing or of another type."""
        places = {
            "staleness_max": ("staleness", "max", int),
            "period": ("staleness", "period", int),
            "late": ("staleness", "late", str),
            "group_size": ("dispatch", "group_size", int),
            "attempts_max": ("dispatch", "attempts_max", int),
            "groups_per_step": ("learner", "groups_per_step", int),
            "dtype": ("model", "dtype", str),
            "logprob_check_every_steps": ("learner", "logprob_check_every_steps", int),
        }
        found: dict[str, Any] = {}
        problems = []
        for name, (table, key, kind) in places.items():
            value = tables.get(table, {}).get(key)
            if type(value) is kind:
                found[name] = value
            else:
                problems.append(f"{table}.{key} is {value!r}; it must be of type {kind.__name__}")
        if tables.get("model", {}).get("compute", "auto") != "auto":
            found["dtype"] = str(tables["model"]["compute"])
        canary = tables.get("worker", {}).get("canary_max_diff")
        if isinstance(canary, int | float):
            found["canary_max_diff"] = float(canary)
        audit = tables.get("audit", {})  # runs of earlier releases have none
        found["audit_share"] = float(audit.get("share", 0.0))
        found["audit_workers"] = tuple(audit.get("workers", ()))
        found["reward_tolerance"] = float(audit.get("reward_tolerance", 1e-6))
        return cls(**found), problems


@dataclass(frozen=True, slots=True)
class End:
    """The end of a group that stands: none returned it since."""

    end: str
    incarnation: int
    trained_at: int | None
    where: str


@dataclass(slots=True)
class Batch:
    """What the ends of groups say about one batch, (incarnation, v)."""

    num_groups: int = 0
    staleness_max: int = 0
    tokens: int = 0
    reward_sum: float = 0.0
    where: str = ""


@dataclass(slots=True)
class History:
    """The state after the events read so far."""

    settings: Settings
    problems: list[str] = field(default_factory=list)
    """What is wrong with the configuration."""
    resume_steps: dict[int, int] = field(default_factory=dict)
    """Incarnation -> the step at which it resumed."""
    incarnation: int = 0
    """The highest incarnation that joined; 0 before the first."""
    v: int = 0
    line: dict[int, int] = field(default_factory=dict)
    """The surviving line: step -> the incarnation that trained it last."""
    published: dict[tuple[int, int], str] = field(default_factory=dict)
    """(incarnation, step) -> manifest digest, in order of publication."""
    completed: dict[tuple[int, int], int] = field(default_factory=dict)
    """(incarnation, step) -> num_groups."""
    batches: dict[tuple[int, int], Batch] = field(default_factory=dict)
    standing: dict[str, End] = field(default_factory=dict)
    installed: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    """Worker -> versions that it has installed at some time."""
    precisions: dict[str, str] = field(default_factory=dict)
    quarantined: set[str] = field(default_factory=set)
    found_out_at: int = -1
    """v when a worker was accused of its logprobs last."""
    run_id: str = ""
    finished: bool = False
    """The run came to its own end (not an interruption, not an error)."""
    end_reason: str = ""

    def apply(self, line: Line) -> None:
        """Take one event in."""
        handler = getattr(self, f"_{line['event']}", None)
        if handler is not None:
            handler(line)

    def resume_limit(self, older: int, newer: int) -> int | None:
        """The last step of incarnation `older` that survives in incarnation `newer`: the
        lowest step at which one of (older, newer] resumed. None: no limit."""
        steps = [step for i, step in self.resume_steps.items() if older < i <= newer]
        return min(steps, default=None)

    def is_alive(self, incarnation: int, step: int) -> bool:
        """Whether version (incarnation, step) belongs to the surviving line."""
        limit = self.resume_limit(incarnation, self.incarnation)
        return limit is None or step <= limit

    def survives(self, incarnation: int, step: int) -> bool:
        """Whether what `incarnation` trained at `step` is in the surviving line."""
        limit = self.resume_limit(incarnation, self.incarnation)
        return limit is None or step < limit

    def _run_started(self, line: Line) -> None:
        self.run_id = line["run_id"]
        self.finished, self.end_reason = False, ""

    def _run_finished(self, line: Line) -> None:
        self.finished, self.end_reason = line["finished"], line["reason"]

    def _learner_joined(self, line: Line) -> None:
        incarnation, step = line["incarnation"], line["resume_step"]
        if incarnation in self.resume_steps:
            return
        self.resume_steps[incarnation] = step
        if incarnation > self.incarnation:
            self.incarnation, self.v = incarnation, step
            self.line = {s: i for s, i in self.line.items() if s < step}

    def _version_published(self, line: Line) -> None:
        self.published.setdefault((line["incarnation"], line["step"]), line["manifest_digest"])

    def _worker_joined(self, line: Line) -> None:
        self.precisions[line["worker"]] = line["precision"]

    def _worker_quarantined(self, line: Line) -> None:
        self.quarantined.add(line["worker"])
        if line["cause"] == "mismatch":
            self.found_out_at = self.v

    def _worker_pardoned(self, line: Line) -> None:
        self.quarantined.discard(line["worker"])

    def _version_installed(self, line: Line) -> None:
        self.installed.setdefault(line["worker"], set()).add((line["incarnation"], line["step"]))

    def _step_completed(self, line: Line) -> None:
        incarnation, step = line["incarnation"], line["step"]
        self.completed.setdefault((incarnation, step), line["num_groups"])
        if incarnation == self.incarnation:
            self.line[step] = incarnation
            self.v = max(self.v, step + 1)

    def _group_ended(self, line: Line) -> None:
        trained_at = line["trained_at"] if line["end"] == "trained" else None
        self.standing[line["group_id"]] = End(
            line["end"], line["incarnation"], trained_at, line.where
        )
        if trained_at is None:
            return
        batch = self.batches.setdefault((line["incarnation"], trained_at), Batch(where=line.where))
        batch.num_groups += 1
        batch.tokens += line["tokens"]
        batch.reward_sum += line["reward_mean"] or 0.0
        if line["min_version"] is not None:
            batch.staleness_max = max(batch.staleness_max, trained_at - line["min_version"])

    def _group_returned(self, line: Line) -> None:
        self.standing.pop(line["group_id"], None)
