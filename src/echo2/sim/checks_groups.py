"""Checks of leases, results and ends: promises 2 and 3."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echo2.core.events import Received
from echo2.core.records import GroupStored
from echo2.messages import (
    GroupAcknowledged,
    GroupResult,
    LeaseFailed,
    LeaseGranted,
    LeaseRevoked,
    WorkerHello,
    WorkerWelcome,
)
from echo2.sim.books import Place, Track, WorkerBook, truth_of
from echo2.sim.checks_evals import EvalChecks
from echo2.sim.moment import Moment, check_window, require
from echo2.types import GroupId, PeerId


class GroupChecks:
    def __init__(self, moment: Moment, evals: EvalChecks) -> None:
        self.moment = moment
        self.books = moment.books
        self.settings = moment.settings
        self.evals = evals
        self.sends: dict[type, Callable[[PeerId, Any], None]] = {
            LeaseGranted: self._granted,
            GroupAcknowledged: self._acknowledged,
            LeaseRevoked: self._revoked,
            WorkerWelcome: self._welcome,
        }
        self.emits: dict[str, Callable[[dict[str, Any]], None]] = {
            "group_ended": self._ended,
            "lease_revoked": self._lease_lost,
            "lease_failed": self._lease_lost,
            "worker_gone": self._gone,
            "worker_activated": lambda fields: self._turned(fields, active=True),
            "worker_released": lambda fields: self._turned(fields, active=False),
        }

    def _granted(self, peer: PeerId, granted: LeaseGranted) -> None:
        books = self.books
        worker = books.workers.get(peer)
        require(peer not in books.quarantined, f"{granted.lease} was granted to {peer}")
        require(worker is not None, f"{granted.lease} was granted to {peer}, which is not here")
        assert worker is not None
        require(not worker.draining, f"{granted.lease} was granted to {peer}, which leaves")
        require(
            peer not in books.standby, f"{granted.lease} was granted to {peer}, which stands by"
        )
        require(
            worker.installed == granted.version,
            f"{granted.lease} names {granted.version}, {peer} has {worker.installed}",
        )
        require(granted.lease not in books.lease_worker, f"{granted.lease} was granted twice")
        require(
            len(worker.leases) < worker.slots,
            f"{peer} has {worker.slots} slots, all leased, and got {granted.lease}",
        )
        if granted.kind == "eval":
            self.evals.granted(peer, granted)
            return
        track = books.track(granted.group)
        require(
            track.place is Place.QUEUED,
            f"{granted.group} was leased again while it is {track.place.value}",
        )
        require(
            books.is_alive(granted.version) and granted.version in books.published,
            f"{granted.group} was leased under {granted.version}, which leads nowhere",
        )
        require(
            granted.attempt <= self.settings.attempts_max,
            f"attempt {granted.attempt} of {granted.group}",
        )
        books.begin_lease(granted.group, granted.lease, peer, granted.version)
        self._check_pacing_of(granted.version.step + self.settings.staleness_max)

    def _check_pacing_of(self, new_expiry: int) -> None:
        """Granted only if the new lease has a place in time, whatever the policy."""
        books, settings = self.books, self.settings
        step = books.next_step
        require(new_expiry >= step, f"leased with expiry {new_expiry}, next batch {step}")
        total = sum(count for expiry, count in books.held.items() if expiry < new_expiry)
        for expiry in range(new_expiry, max(books.held) + 1):
            total += books.held.get(expiry, 0)
            room = settings.groups_per_step * (expiry - step + 1)
            require(total <= room, f"a lease made {total} groups expire by {expiry}, room {room}")

    def stored(self, record_id: int, record: GroupStored) -> None:
        books = self.books
        message = record.payload
        assert isinstance(message, GroupResult)
        track = books.track(record.group)
        require(
            track.place in (Place.LEASED, Place.QUEUED),
            f"a result of {record.group} is stored while it is {track.place.value}",
        )
        for lease in (track.lease, record.lease):
            if lease is not None:
                books.end_lease(lease)
        track.take(message.trajectories, truth_of(message))
        track.record_id = record_id
        track.lease, track.worker = record.lease, record.worker
        require(
            len(message.trajectories) == self.settings.group_size,
            f"{record.group} is stored with {len(message.trajectories)} trajectories",
        )
        for version in track.versions:
            require(
                version in books.published and version.step <= books.step,
                f"{record.group} is stored with tokens of {version}, v is {books.step}",
            )
            require(
                books.is_alive(version),
                f"{record.group} is stored with tokens of {version}, a dead version",
            )
        books.move(track, Place.STORING, sampled=min(track.versions))

    def _acknowledged(self, peer: PeerId, told: GroupAcknowledged) -> None:
        books = self.books
        if isinstance(self.moment.event, Received) and isinstance(
            self.moment.event.message, LeaseFailed
        ):
            if books.lease_worker.get(told.lease) == peer:
                books.lose_lease(told.lease)
            return
        if told.lease in books.eval_leases:
            self.evals.acknowledged(told)
            return
        track = books.tracks.get(told.group)
        if told.outcome == "accepted":
            assert track is not None
            require(
                told.lease in self.moment.durable_results or track.end == "expired",
                f"{told.lease} was acknowledged before its result was durable",
            )
            self.moment.settled.add(told.lease)
            if isinstance(self.moment.record, GroupStored):
                require(
                    track.place is Place.STORING and track.lease == told.lease,
                    f"{told.group} was accepted while it is {track.place.value}",
                )
                books.move(track, Place.BUFFERED)
        elif told.outcome == "duplicate":
            require(
                told.lease in self.moment.settled,
                f"{told.lease} is called a duplicate, but its result was never stored",
            )
        else:
            stored = track is not None and track.place is Place.STORING
            require(
                not stored or track is None or track.lease != told.lease,
                f"{told.lease}: a stored result was thrown away ({told.reason})",
            )
            if books.lease_worker.get(told.lease) == peer:
                books.lose_lease(told.lease)

    def _revoked(self, peer: PeerId, revoked: LeaseRevoked) -> None:
        if revoked.lease in self.books.eval_leases:
            self.books.end_lease(revoked.lease)

    def _welcome(self, peer: PeerId, welcome: WorkerWelcome) -> None:
        event, books = self.moment.event, self.books
        assert isinstance(event, Received)
        hello = event.message
        assert isinstance(hello, WorkerHello)
        installed = hello.installed if hello.installed in books.published else None
        books.workers[peer] = worker = WorkerBook(hello.slots, installed)
        worker.leases = {lease for lease, holder in books.lease_worker.items() if holder == peer}
        for lease in list(worker.leases):
            if lease not in welcome.alive:
                books.lose_lease(lease)
        require(
            worker.leases == set(welcome.alive),
            f"{peer} may go on with {welcome.alive}, its leases are {sorted(worker.leases)}",
        )

    def _lease_lost(self, fields: dict[str, Any]) -> None:
        self.books.lose_lease(fields["lease"])

    def _turned(self, fields: dict[str, Any], *, active: bool) -> None:
        standby, worker = self.books.standby, fields["worker"]
        require((worker in standby) is active, f"{worker} was so already: {active=}")
        standby.symmetric_difference_update({worker})

    def _gone(self, fields: dict[str, Any]) -> None:
        worker = self.books.workers.pop(fields["worker"], None)
        self.books.standby.discard(fields["worker"])
        kept = [lease for lease in worker.leases if lease in self.books.by_lease] if worker else []
        require(not kept, f"{fields['worker']} is gone, its leases {kept} were not given up")
        for lease in list(worker.leases) if worker is not None else ():
            self.books.lose_lease(lease)

    def _ended(self, fields: dict[str, Any]) -> None:
        books, group, end = self.books, fields["group_id"], fields["end"]
        track = books.track(group)
        require(
            track.place is not Place.ENDED, f"{group} ended {end}, but its end {track.end} stands"
        )
        require(end == "trained" or bool(fields["reason"]), f"{group} ended {end} without a reason")
        late = self.settings.late
        match end:
            case "trained":
                self._check_trained(group, track, fields)
            case "expired":
                require(late != "wait", f"{group} expired though late groups are waited for")
                self._check_expired(group, track)
            case "failed":
                require(
                    fields["attempts"] >= self.settings.attempts_max,
                    f"{group} failed after {fields['attempts']} attempts",
                )
            case "filtered":
                require(
                    self.settings.filter_zero_variance
                    and len({t.reward for t in track.trajectories}) == 1,
                    f"{group} was filtered",
                )
        track.end, track.trained_at = end, fields["trained_at"]
        if track.lease is not None:
            books.end_lease(track.lease)
        books.move(track, Place.ENDED)

    def _check_trained(self, group: GroupId, track: Track, fields: dict[str, Any]) -> None:
        books = self.books
        require(
            books.batch is not None and track.place is Place.TRAINING,
            f"{group} ended trained while it is {track.place.value}",
        )
        require(
            fields["trained_at"] == books.step and fields["incarnation"] == books.incarnation,
            f"{group} was trained at {fields['trained_at']}, v is {books.step}",
        )
        check_window(self.moment, group, track, books.step)
        low = max(0, books.step - self.settings.staleness_max)
        oldest = min(version for version in track.versions if version.step >= low)
        require(
            (fields["min_incarnation"], fields["min_version"]) == (oldest.incarnation, oldest.step),
            f"{group}: recorded as of version {fields['min_version']}, it is {oldest}",
        )

    def _check_expired(self, group: GroupId, track: Track) -> None:
        """Only what has no place in any batch any more expires."""
        books, settings = self.books, self.settings
        step, event = books.next_step, self.moment.event
        seen = track
        arrived = event.message if isinstance(event, Received) else None
        if track.place is Place.LEASED and isinstance(arrived, GroupResult):
            seen = Track()
            seen.take(arrived.trajectories if arrived.group == group else ())
        if settings.late == "mask":
            tokens = seen.tokens_from(max(0, step - settings.staleness_max))
            require(tokens < settings.mask_min_tokens, f"{group} expired with {tokens} tokens")
            return
        expiry = track.expiry
        if seen.versions:
            expiry = min(seen.versions).step + settings.staleness_max
        require(expiry < step, f"{group} of expiry {expiry} expired, the next batch is {step}")
