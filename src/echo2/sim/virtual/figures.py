"""What a simulated run came to, read from its events as they are emitted."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from echo2.types import Version


@dataclass(slots=True)
class Figures:
    """`staleness` counts trained groups by learner steps; `t_bcast_s` of each version until 0.9 of
    the active workers had it; `worker_s` and `worker_usd` by kind. Times in virtual seconds."""

    reason: str = ""
    finished: bool = False
    ok: bool = False
    steps: int = 0
    virtual_s: float = 0.0
    cost_usd: float = 0.0
    wait_s: float = 0.0
    train_s: float = 0.0
    tokens_trained: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    staleness: Counter[int] = field(default_factory=Counter)
    leases_lost: int = 0
    t_bcast_s: dict[Version, float] = field(default_factory=dict)
    worker_s: dict[str, float] = field(default_factory=dict)
    worker_usd: dict[str, float] = field(default_factory=dict)
    num_events: int = 0
    _here: dict[str, float] = field(default_factory=dict)

    def observe(self, event: str, fields: dict[str, Any], now: float) -> None:
        match event:
            case "group_ended":
                end = fields["end"]
                self.ends[end] += 1
                if end == "trained":
                    self.staleness[fields["trained_at"] - fields["min_version"]] += 1
                    self.tokens_trained += fields["tokens"]
            case "lease_revoked" | "lease_failed":
                self.leases_lost += 1
            case "worker_joined":
                self._here[fields["worker"]] = now
            case "worker_gone":
                self._gone(fields["worker"], now)

    def end(self, now: float, prices: dict[str, float]) -> None:
        """`prices` in $ per hour, by kind."""
        for worker in list(self._here):
            self._gone(worker, now)
        self.virtual_s = now
        for kind, price in prices.items():
            self.worker_s.setdefault(kind, 0.0)
            self.worker_usd[kind] = price * self.worker_s[kind] / 3600.0

    def _gone(self, worker: str, now: float) -> None:
        since = self._here.pop(worker, None)
        if since is not None:
            kind = worker.rpartition("-")[0]
            self.worker_s[kind] = self.worker_s.get(kind, 0.0) + now - since

    # ----------------------------------------------------------------------- derived

    @property
    def bubble_ratio(self) -> float:
        total = self.wait_s + self.train_s
        return self.wait_s / total if total > 0 else 0.0

    @property
    def staleness_mean(self) -> float | None:
        count = self.staleness.total()
        return sum(s * n for s, n in self.staleness.items()) / count if count else None

    @property
    def expired_share(self) -> float:
        judged = self.ends["trained"] + self.ends["expired"]
        return self.ends["expired"] / judged if judged else 0.0

    @property
    def cost_per_step_usd(self) -> float | None:
        return self.cost_usd / self.steps if self.steps else None

    def to_json(self) -> dict[str, Any]:
        """The same for the same configuration and seed."""
        hours = self.virtual_s / 3600.0
        t_bcast = sorted(self.t_bcast_s.values())
        return {
            "finished": self.finished,
            "reason": self.reason,
            "virtual_hours": hours,
            "steps": self.steps,
            "steps_per_h": self.steps / hours if hours > 0 else 0.0,
            "cost_usd": self.cost_usd,
            "cost_per_step_usd": self.cost_per_step_usd,
            "bubble_ratio": self.bubble_ratio,
            "wait_s": self.wait_s,
            "train_s": self.train_s,
            "staleness_mean": self.staleness_mean,
            "staleness": {str(steps): n for steps, n in sorted(self.staleness.items())},
            "expired_share": self.expired_share,
            "groups": dict(sorted(self.ends.items())),
            "leases_lost": self.leases_lost,
            "tokens_per_s": self.tokens_trained / self.virtual_s if self.virtual_s > 0 else 0.0,
            "t_bcast_s": {
                "versions": len(t_bcast),
                "mean": sum(t_bcast) / len(t_bcast) if t_bcast else None,
                "p95": t_bcast[math.ceil(0.95 * len(t_bcast)) - 1] if t_bcast else None,
            },
            "worker_hours": {kind: s / 3600.0 for kind, s in sorted(self.worker_s.items())},
            "worker_usd": dict(sorted(self.worker_usd.items())),
            "events": self.num_events,
        }
