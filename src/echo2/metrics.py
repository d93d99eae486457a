"""Prometheus metrics of the coordinator: fed by its events, its state and its sockets."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

STALENESS_BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32)
SECONDS_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
LAG_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.3, 1, 3)


class CoordinatorMetrics:
    """`observe` takes events as they are written; `render` reads the state at a scrape."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.groups = Counter("echo2_groups_ended", "Groups by end", ["end"], registry=registry)
        self.returned = Counter(
            "echo2_groups_returned", "Groups that a rewind gave back", registry=registry
        )
        self.leases_lost = Counter(
            "echo2_leases_lost", "Leases revoked or failed", ["how"], registry=registry
        )
        self.staleness = Histogram(
            "echo2_staleness_steps",
            "Staleness of the oldest token in the loss of each trained group, learner steps",
            buckets=STALENESS_BUCKETS,
            registry=registry,
        )
        self.install = Histogram(
            "echo2_install_seconds",
            "Installation of a version on a worker",
            buckets=SECONDS_BUCKETS,
            registry=registry,
        )
        self.refused = Counter(
            "echo2_messages_refused", "Messages refused, by reason", ["reason"], registry=registry
        )
        self.step = Gauge("echo2_step", "Completed learner steps (v)", registry=registry)
        self.incarnation = Gauge("echo2_incarnation", "Learner incarnation", registry=registry)
        self.leases = Gauge("echo2_leases", "Live leases", registry=registry)
        self.queue = Gauge("echo2_tasks_queued", "Tasks ready", registry=registry)
        self.buffer = Gauge(
            "echo2_buffer_groups", "Buffered groups by version", ["version"], registry=registry
        )
        self.workers = Gauge("echo2_workers", "Workers by state", ["state"], registry=registry)
        self.worker_tokens = Gauge(
            "echo2_worker_tokens_per_second", "Tokens/s", ["worker"], registry=registry
        )
        self.worker_mismatch = Gauge(
            "echo2_worker_mismatch",
            "Mean |learner - worker| logprob difference",
            ["worker"],
            registry=registry,
        )
        self.audits = Counter(
            "echo2_audits", "Groups whose audit ended, by verdict", ["verdict"], registry=registry
        )
        self.withdrawn = Counter(
            "echo2_groups_withdrawn", "Results that were not believed", registry=registry
        )
        self.quarantined = Gauge(
            "echo2_workers_quarantined", "Workers that are quarantined", registry=registry
        )
        self.cost = Gauge("echo2_cost_usd", "Dollars spent", registry=registry)
        self.lag = Gauge("echo2_loop_lag_seconds", "Event loop lag, smoothed", registry=registry)
        self.lag_max = Gauge(
            "echo2_loop_lag_max_seconds", "Largest lag since the last scrape", registry=registry
        )
        self.lag_samples = Histogram(
            "echo2_loop_lag_samples_seconds",
            "Event loop lag, ten samples a second",
            buckets=LAG_BUCKETS,
            registry=registry,
        )
        self.tasks = Gauge("echo2_tasks", "Tasks of the event loop", registry=registry)
        self._refused_seen: dict[str, int] = {}

    def observe(self, event: str, fields: dict[str, Any]) -> None:
        match event:
            case "group_ended":
                self.groups.labels(fields["end"]).inc()
                if fields["trained_at"] is not None and fields["min_version"] is not None:
                    self.staleness.observe(fields["trained_at"] - fields["min_version"])
            case "group_returned":
                self.returned.inc()
            case "group_audited":
                self.audits.labels(fields["verdict"]).inc()
            case "group_withdrawn":
                self.withdrawn.inc()
            case "lease_revoked":
                self.leases_lost.labels("revoked").inc()
            case "lease_failed":
                self.leases_lost.labels(fields["stage"]).inc()
            case "version_installed":
                self.install.observe(fields["install_s"])

    def render(
        self,
        status: dict[str, Any],
        refused: dict[str, int],
        *,
        lag_s: float,
        lag_max_s: float,
        num_tasks: int,
    ) -> bytes:
        """The text exposition, with gauges as of `status`."""
        self.step.set(status["step"])
        self.incarnation.set(status["incarnation"])
        self.leases.set(status["leases"])
        self.queue.set(status["queue"])
        self.cost.set(status["cost_usd"])
        self.quarantined.set(len(status["quarantined"]))
        self.lag.set(lag_s)
        self.lag_max.set(lag_max_s)
        self.tasks.set(num_tasks)
        for gauge in (self.buffer, self.workers, self.worker_tokens, self.worker_mismatch):
            gauge.clear()
        for version, count in status["buffer"]["by_version"].items():
            self.buffer.labels(version).set(count)
        for worker in status["workers"]:
            self.workers.labels(worker["state"]).inc()
            self.worker_tokens.labels(worker["name"]).set(worker["tokens_per_s"])
            if worker["mismatch"] is not None:
                self.worker_mismatch.labels(worker["name"]).set(worker["mismatch"])
        for reason, count in refused.items():
            self.refused.labels(reason).inc(count - self._refused_seen.get(reason, 0))
            self._refused_seen[reason] = count
        return generate_latest(self.registry)
