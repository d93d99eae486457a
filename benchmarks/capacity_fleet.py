"""Fleets on a virtual clock for capacity_truth.py: the production core, nothing breaks.

A worker here differs from that of `echo2.sim` in what matters to capacity: a version takes
`bcast_s` to arrive while it samples on, a newer one replaces a transfer of which half or less is
here, and the install pauses everything in work for `install_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Literal

from echo2.core.settings import CoordinatorSettings
from echo2.core.worker_versions import KEEP_FETCH_ABOVE
from echo2.messages import LeaseGranted, VersionAnnounced
from echo2.sim.scenario import LearnerModel, NetworkModel, Scenario, WorkerModel
from echo2.sim.simulation import Simulation
from echo2.sim.worker import SimWorker
from echo2.types import LeaseId, PeerId

Late = Literal["wait", "drop", "mask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One fleet of equal workers. Times in virtual seconds."""

    groups_per_step: int
    train_s: float
    staleness_max: int
    period: int
    late: Late
    latency_s: float
    latency_cv: float
    bcast_s: float
    install_s: float = 0.0
    train_cv: float = 0.0
    num_workers: int = 8


@dataclass(frozen=True, slots=True)
class Truth:
    """Of the steps after the warm-up: bubble ratio, groups expired over ended, mean staleness of
    trained groups, T_bcast as the workers report it."""

    bubble: float
    expired_share: float
    staleness_mean: float
    steps: int


class CapacityWorker(SimWorker):
    """`bcast_s` to fetch a version, then a pause of `install_s`."""

    bcast_s = 0.0
    pause_s = 0.0

    def prepare(self, *, bcast_s: float, pause_s: float) -> CapacityWorker:
        self.bcast_s, self.pause_s = bcast_s, pause_s
        self.fetching: VersionAnnounced | None = None
        self.fetch_began_s = 0.0
        self.paused_until_s = 0.0
        self.owed_s: dict[LeaseId, float] = {}
        return self

    def _advance_install(self) -> None:
        wanted, now = self.announced, self.timeline.now
        if wanted is None or self.installing is not None:
            return
        if self.installed is not None and wanted.version <= self.installed:
            return
        if self.fetching is not None:
            share = (now - self.fetch_began_s) / self.bcast_s if self.bcast_s > 0 else 1.0
            if self.fetching.version == wanted.version or share > KEEP_FETCH_ABOVE:
                return
        self.fetching, self.fetch_began_s = wanted, now
        first = self.installed is None
        self.timeline.after(0.0 if first else self.bcast_s, self._fetched, wanted, first)

    def _fetched(self, announced: VersionAnnounced, first: bool) -> None:
        if self.fetching is not announced:
            return
        self.fetching, self.installing = None, announced
        seconds = 0.0 if first else self.pause_s
        self.paused_until_s = self.timeline.now + seconds
        for lease in self.running:
            self.owed_s[lease] = self.owed_s.get(lease, 0.0) + seconds
        self.timeline.after(seconds, self._install_done, announced, seconds)

    def _granted(self, granted: LeaseGranted) -> None:
        super()._granted(granted)
        if granted.lease in self.running and self.timeline.now < self.paused_until_s:
            self.owed_s[granted.lease] = self.paused_until_s - self.timeline.now

    def _done(self, lease: LeaseId) -> None:
        owed_s = self.owed_s.pop(lease, 0.0)
        if owed_s > 0 and lease in self.running:
            self.timeline.after(owed_s, self._done, lease)
            return
        super()._done(lease)


class CapacitySimulation(Simulation):
    """`warmup_steps` are not counted. Promises are checked by the simulation tests, not here."""

    def __init__(self, scenario: Scenario, cell: Cell, *, warmup_steps: int) -> None:
        super().__init__(scenario)
        self.cell = cell
        self.warmup_steps = warmup_steps
        self.before = (0.0, 0.0)
        self.counts = {"trained": 0, "expired": 0, "staleness": 0}
        self.invariants.observe = lambda *_: None  # type: ignore[method-assign]

    def start_worker(self, index: int) -> None:
        peer = PeerId(f"w{index}")
        worker = CapacityWorker(
            peer,
            self.scenario.workers[index],
            self.timeline,
            self,
            Random(f"worker {self.scenario.seed} {index}"),
        ).prepare(bcast_s=self.cell.bcast_s, pause_s=self.cell.install_s)
        self.processes[peer] = worker
        worker.start()

    def _emit(self, effect) -> None:  # type: ignore[no-untyped-def]
        super()._emit(effect)
        learner, fields = self.learner, effect.fields
        if learner is None:
            return
        if self.core.state.step < self.warmup_steps:
            self.before = (learner.wait_s, learner.train_s)
        elif effect.event == "group_ended" and fields["end"] in ("trained", "expired"):
            self.counts[fields["end"]] += 1
            if fields["end"] == "trained":
                self.counts["staleness"] += fields["trained_at"] - fields["min_version"]


def truth(cell: Cell, *, slots: int, steps: int, warmup_steps: int, seed: int = 0) -> Truth:
    """Plays the cell with `slots` in all, dealt evenly to its workers."""
    settings = CoordinatorSettings(
        run_id="capacity",
        staleness_max=cell.staleness_max,
        late=cell.late,
        period=cell.period,
        groups_per_step=cell.groups_per_step,
        stall_s=1e9,
        lease_max_s=1e9,
        heartbeat_interval_s=cell.train_s / 2,
        suspect_s=1e8,
        gone_s=1e9,
        learner_timeout_s=1e9,
        no_worker_timeout_s=1e9,
        disk_timeout_s=1e9,
        seed=seed,
    )
    num = min(cell.num_workers, slots)
    workers = tuple(
        WorkerModel(
            slots=slots // num + (1 if i < slots % num else 0),
            latency_s=cell.latency_s,
            latency_cv=cell.latency_cv,
            num_tokens=64,
        )
        for i in range(num)
    )
    scenario = Scenario(
        seed=seed,
        settings=settings,
        steps=steps,
        workers=workers,
        learner=LearnerModel(
            train_s=cell.train_s,
            train_cv=cell.train_cv,
            publish_s=0.0,
            retry_s=cell.train_s,
            checkpoint_every=1000,
        ),
        network=NetworkModel(delay_s=1e-5 * cell.train_s, jitter_s=0.0),
        persist_s=0.0,
        tick_s=cell.train_s / 20,
        patience_s=1e9,
    )
    simulation = CapacitySimulation(scenario, cell, warmup_steps=warmup_steps)
    simulation.run()
    learner, counts = simulation.learner, simulation.counts
    assert learner is not None
    wait_s = learner.wait_s - simulation.before[0]
    train_s = learner.train_s - simulation.before[1]
    ended = counts["trained"] + counts["expired"]
    return Truth(
        wait_s / (wait_s + train_s),
        counts["expired"] / ended,
        counts["staleness"] / counts["trained"],
        steps - warmup_steps,
    )
