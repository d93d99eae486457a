"""Books about a run that are kept from events and effects alone.

The checker of invariants reads these and nothing that the core counts, so that a miscount
there cannot hide itself. Each group is in one place; `held` and `out` count the places by
expiry (the last v at which a group may be trained).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from echo2.core.group import Lease, StoredResult
from echo2.core.settings import CoordinatorSettings
from echo2.messages import GroupResult
from echo2.types import GroupId, LeaseId, PeerId, TrajectoryHeader, Version


class Place(enum.Enum):
    QUEUED = "queued"
    LEASED = "leased"
    STORING = "storing"
    AUDITING = "auditing"
    BUFFERED = "buffered"
    TRAINING = "training"
    ENDED = "ended"


OUT = frozenset({Place.LEASED, Place.STORING, Place.AUDITING})
HELD = OUT | {Place.BUFFERED}
WITH_RESULT = frozenset({Place.STORING, Place.AUDITING, Place.BUFFERED})


@dataclass(slots=True)
class Track:
    """One group. `lease`: the live one, or that of the result; `expiry` of what it is held
    for; `end` and `trained_at` of the end that stands. `begun`: it must end before a run
    does. `truth`: the rewards that its tokens have, whatever its worker claims."""

    place: Place = Place.QUEUED
    lease: LeaseId | None = None
    worker: PeerId | None = None
    version: Version | None = None
    trajectories: tuple[TrajectoryHeader, ...] = ()
    truth: tuple[float, ...] = ()
    versions: frozenset[Version] = frozenset()
    record_id: int | None = None
    expiry: int = 0
    end: str = ""
    trained_at: int | None = None
    begun: bool = False

    def take(
        self, trajectories: tuple[TrajectoryHeader, ...], truth: tuple[float, ...] = ()
    ) -> None:
        """A result came (or, empty, is void)."""
        self.trajectories, self.truth = trajectories, truth
        self.versions = frozenset(span.version for t in trajectories for span in t.spans)

    def tokens_from(self, step: int) -> int:
        """Sampled tokens of versions at or above `step`."""
        return sum(
            span.end - span.start
            for t in self.trajectories
            for span in t.spans
            if span.version.step >= step
        )


@dataclass(slots=True)
class WorkerBook:
    slots: int
    installed: Version | None
    draining: bool = False
    leases: set[LeaseId] = field(default_factory=set)


@dataclass(slots=True)
class EvalBook:
    version: Version
    num_asked: int
    rewards: list[float] = field(default_factory=list)
    tasks_done: set[str] = field(default_factory=set)
    ended: bool = False


class Books:
    """`step` is v, `batch` the (step, groups) that the learner trains; `by_lease` names the
    group of every live lease, `eval_leases` the (eval, task) of those of evals; `verdicts` is of
    the audit of (group, lease), `quarantined` names what the learner had of each offender, and
    `withdrawn` the leases whose results are not believed."""

    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self.incarnation = 0
        self.step = 0
        self.starts: list[tuple[int, int]] = []
        self.kept: tuple[int, ...] = (0,)
        self.published: dict[Version, str] = {}
        self.last_published: dict[int, int] = {}
        self.tracks: dict[GroupId, Track] = {}
        self.held: Counter[int] = Counter()
        self.out: Counter[int] = Counter()
        self.batch: tuple[int, tuple[GroupId, ...]] | None = None
        self.by_lease: dict[LeaseId, GroupId] = {}
        self.workers: dict[PeerId, WorkerBook] = {}
        self.standby: set[PeerId] = set()
        self.lease_worker: dict[LeaseId, PeerId] = {}
        self.eval_leases: dict[LeaseId, tuple[str, str]] = {}
        self.evals: dict[str, EvalBook] = {}
        self.verdicts: dict[tuple[GroupId, LeaseId | None], str] = {}
        self.quarantined: dict[PeerId, frozenset[GroupId]] = {}
        self.withdrawn: set[LeaseId] = set()
        self.buffered: Counter[int] = Counter()
        self.num_places: Counter[Place] = Counter()

    # ------------------------------------------------------------------------ reading

    @property
    def next_step(self) -> int:
        """f: the version at which the next batch is trained."""
        return self.step + 1 if self.batch is not None and self.batch[1] else self.step

    def is_alive(self, version: Version) -> bool:
        return version.incarnation <= self.incarnation and all(
            version.step <= step
            for incarnation, step in self.starts
            if incarnation > version.incarnation
        )

    def are_alive(self, versions: Iterable[Version]) -> bool:
        return all(self.is_alive(version) for version in versions)

    @property
    def num_held(self) -> int:
        places = self.num_places
        return sum(places[place] for place in HELD)

    # -------------------------------------------------------------------------- moves

    def move(self, track: Track, place: Place, *, sampled: Version | None = None) -> None:
        """Take the group to `place`; `sampled` is what it is held for from now on."""
        before = track.place
        if before in HELD:
            _take(self.held, track.expiry)
            if before in OUT:
                _take(self.out, track.expiry)
            else:
                _take(self.buffered, track.expiry)
        if sampled is not None:
            track.expiry = sampled.step + self.settings.staleness_max
        track.place = place
        self.num_places[before] -= 1
        self.num_places[place] += 1
        if place in HELD:
            self.held[track.expiry] += 1
            if place in OUT:
                self.out[track.expiry] += 1
            else:
                self.buffered[track.expiry] += 1

    def track(self, group: GroupId) -> Track:
        found = self.tracks.get(group)
        if found is None:
            found = self.tracks[group] = Track()
            self.num_places[Place.QUEUED] += 1
        return found

    def begin_lease(self, group: GroupId, lease: LeaseId, peer: PeerId, version: Version) -> None:
        track = self.track(group)
        track.lease, track.worker, track.version, track.begun = lease, peer, version, True
        self.by_lease[lease] = group
        self.lease_worker[lease] = peer
        if peer in self.workers:
            self.workers[peer].leases.add(lease)
        self.move(track, Place.LEASED, sampled=version)

    def end_lease(self, lease: LeaseId) -> GroupId | None:
        """The lease is over, whatever became of it. Returns its group, if it was live."""
        peer = self.lease_worker.pop(lease, None)
        if peer is not None and peer in self.workers:
            self.workers[peer].leases.discard(lease)
        self.eval_leases.pop(lease, None)
        return self.by_lease.pop(lease, None)

    def lose_lease(self, lease: LeaseId) -> None:
        """The lease ended without a result: its group waits again, unless it ended."""
        group = self.end_lease(lease)
        if group is not None:
            track = self.tracks[group]
            if track.place is Place.LEASED:
                track.lease = None
                self.move(track, Place.QUEUED)

    def begin_eval_lease(self, lease: LeaseId, peer: PeerId, eval_id: str, task: str) -> None:
        self.eval_leases[lease] = (eval_id, task)
        self.lease_worker[lease] = peer
        self.workers[peer].leases.add(lease)

    def requeue(self, track: Track) -> None:
        """Its result is void; it waits for another one."""
        track.take(())
        track.record_id, track.lease = None, None
        self.move(track, Place.QUEUED)

    def rewind(self, incarnation: int, resume_step: int) -> None:
        """A learner took over: its batch is given back, what is dead waits again."""
        self.incarnation, self.step = incarnation, resume_step
        self.starts.append((incarnation, resume_step))
        if self.batch is not None:
            for group in self.batch[1]:
                track = self.tracks[group]
                if track.place is Place.TRAINING:
                    self.move(track, Place.BUFFERED)
            self.batch = None
        for track in self.tracks.values():
            with_result = track.place in WITH_RESULT
            if with_result and not self.are_alive(track.versions):
                self.requeue(track)

    def forget_all_open(
        self,
        restored: Mapping[GroupId, StoredResult],
        resumed: Iterable[Lease],
        trained: Container[GroupId],
    ) -> None:
        """The coordinator was started again: of what had not ended it knows what it restored,
        and that these were `trained`, which it tells at once. Whoever comes is active."""
        self.standby.clear()
        for group, track in self.tracks.items():
            if track.place is Place.ENDED or group in trained:
                continue
            self.requeue(track)
            result = restored.get(group)
            if result is not None:
                track.begun = True
                track.take(result.trajectories, truth_of(result.payload))
                track.lease, track.worker = result.lease, result.worker
                self.move(track, Place.BUFFERED, sampled=min(track.versions))
        if self.batch is not None and not all(group in trained for group in self.batch[1]):
            self.batch = None
        self.by_lease.clear()
        self.lease_worker.clear()
        self.eval_leases.clear()
        self.workers.clear()
        self.evals.clear()
        for lease in resumed:
            self.begin_lease(lease.group, lease.id, lease.worker, lease.version)


def _take(counts: Counter[int], key: int) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def truth_of(payload: object) -> tuple[float, ...]:
    """The rewards that a simulated group's tokens have: each trajectory's last one, 0 or 1."""
    assert isinstance(payload, GroupResult)
    found, end = [], 0
    for header in payload.trajectories:
        end += 4 * header.length
        found.append(float(int.from_bytes(payload.token_ids[end - 4 : end], "little")))
    return tuple(found)
