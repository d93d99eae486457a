"""Checks of batches, steps, versions and rewinds: promise 1, order, fences, κ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echo2.core.effects import DeliverGroup
from echo2.core.records import StepRecorded, VersionRecorded
from echo2.messages import (
    BatchGranted,
    LearnerWelcome,
    PublishAcknowledged,
    Refused,
    StepAcknowledged,
    VersionAnnounced,
)
from echo2.sim.books import Place, Track
from echo2.sim.checks_audits import AuditChecks
from echo2.sim.moment import Moment, check_window, require
from echo2.types import GroupId, PeerId, Version


class LearnerChecks:
    def __init__(self, moment: Moment, audits: AuditChecks) -> None:
        self.moment = moment
        self.audits = audits
        self.books = moment.books
        self.settings = moment.settings
        self.sends: dict[type, Callable[[PeerId, Any], None]] = {
            BatchGranted: self._batch,
            VersionAnnounced: self._announced,
            LearnerWelcome: self._learner_welcome,
            StepAcknowledged: self._step_acknowledged,
            PublishAcknowledged: self._publish_acknowledged,
            Refused: self._refused,
        }
        self.emits: dict[str, Callable[[dict[str, Any]], None]] = {
            "group_returned": self._group_returned,
            "learner_joined": self._joined,
            "step_completed": self._completed,
            "version_published": self._published,
            "checkpoint_saved": self._checkpoint,
        }

    def _batch(self, peer: PeerId, granted: BatchGranted) -> None:
        books, settings = self.books, self.settings
        require(
            granted.step == books.step and granted.incarnation == books.incarnation,
            f"batch {granted.incarnation}.{granted.step} was granted at "
            f"{books.incarnation}.{books.step}",
        )
        if books.batch is not None:
            require(books.batch == (granted.step, granted.groups), "a batch was granted twice")
            return
        size = len(granted.groups)
        require(size == 0 or not self.moment.last, "a batch was granted after the last one")
        require(size == len(set(granted.groups)), "a group is in its batch twice")
        require(
            size == settings.groups_per_step or (granted.last and size < settings.groups_per_step),
            f"the batch of {granted.step} has {size} groups, R is {settings.groups_per_step}",
        )
        tracks = [books.track(group) for group in granted.groups]
        for group, track in zip(granted.groups, tracks, strict=True):
            require(track.place is Place.BUFFERED, f"{group} is in a batch and {track.place.value}")
            self.audits.check_trained(group, track)
            check_window(self.moment, group, track, granted.step)
        self._check_order(tracks, granted.step)
        if settings.late == "wait" and size:
            self._check_hold(granted.step)
        books.batch = (granted.step, granted.groups)
        self.moment.last = granted.last
        for track in tracks:
            books.move(track, Place.TRAINING)

    def _check_order(self, tracks: list[Track], step: int) -> None:
        """Earliest expiry first."""
        if not tracks:
            return
        remaining = self.books.buffered.copy()
        for track in tracks:
            remaining[track.expiry] -= 1
        left = [expiry for expiry, count in remaining.items() if count > 0]
        latest = max(track.expiry for track in tracks)
        require(
            not left or latest <= min(left),
            f"the batch of {step} took a group of expiry {latest} before one of {min(left or [0])}",
        )

    def _check_hold(self, step: int) -> None:
        """Late = wait: what is still out has a place in the batches after this one."""
        total = 0
        for expiry in sorted(self.books.out):
            total += self.books.out[expiry]
            room = self.settings.groups_per_step * max(0, expiry - step)
            require(
                total <= room,
                f"the batch of {step} was formed while {total} groups that expire by {expiry} "
                f"were out, room is {room}",
            )

    def delivered(self, effect: DeliverGroup) -> None:
        books = self.books
        track = books.track(effect.group)
        require(
            books.batch is not None
            and effect.step == books.batch[0]
            and track.place is Place.TRAINING,
            f"{effect.group} was delivered for {effect.step}, it is {track.place.value}",
        )
        require(
            effect.result.trajectories == track.trajectories and effect.result.lease == track.lease,
            f"{effect.group} was delivered with another result than the one that was stored",
        )

    def recorded(self, step: StepRecorded) -> None:
        """The learner has trained these groups: what it was granted, or what an earlier
        coordinator had granted it."""
        books = self.books
        require(step.step == books.step, f"step {step.step} was recorded, v is {books.step}")
        if books.batch is not None and set(books.batch[1]) == set(step.groups):
            return
        for group in () if books.batch is None else books.batch[1]:
            books.move(books.track(group), Place.BUFFERED)
        size = len(step.groups)
        require(
            0 < size <= self.settings.groups_per_step and size == len(set(step.groups)),
            f"step {step.step} trained {step.groups}",
        )
        for group in step.groups:
            track = books.track(group)
            require(
                track.place in (Place.BUFFERED, Place.AUDITING),
                f"{group} was trained and {track.place.value}",
            )
            self.audits.check_trained(group, track)
            check_window(self.moment, group, track, step.step)
            books.move(track, Place.TRAINING)
        books.batch = (step.step, step.groups)

    @property
    def untold_groups(self) -> frozenset[GroupId]:
        """Groups of the batch whose step is durable and was not told yet."""
        books = self.books
        step = books.incarnation, books.step
        return next(
            (
                frozenset(record.groups)
                for record in self.moment.durable
                if isinstance(record, StepRecorded) and (record.incarnation, record.step) == step
            ),
            frozenset(),
        )

    def _completed(self, fields: dict[str, Any]) -> None:
        books = self.books
        require(
            any(
                isinstance(record, StepRecorded)
                and (record.incarnation, record.step) == (fields["incarnation"], fields["step"])
                for record in self.moment.durable
            ),
            f"step {fields['step']} was completed before it was durable",
        )
        require(
            (fields["incarnation"], fields["step"]) == (books.incarnation, books.step),
            f"{fields['incarnation']} completed {fields['step']}, the learner is "
            f"{books.incarnation} and v {books.step}",
        )
        batch = books.batch
        require(batch is not None, f"step {fields['step']} was completed without a batch")
        assert batch is not None
        for group in batch[1]:
            track = books.tracks[group]
            require(
                track.end == "trained" and track.trained_at == books.step,
                f"{group} of the completed step {books.step} is {track.place.value}",
            )
        books.step, books.batch = books.step + 1, None

    def _joined(self, fields: dict[str, Any]) -> None:
        books = self.books
        incarnation, resume_step = fields["incarnation"], fields["resume_step"]
        require(incarnation > books.incarnation, f"{incarnation} joined after {books.incarnation}")
        require(
            resume_step <= books.step or not books.starts,
            f"a learner resumed at {resume_step}, v is {books.step}",
        )
        books.rewind(incarnation, resume_step)
        self.moment.last = False
        books.kept = tuple(step for step in books.kept if step <= resume_step) or (resume_step,)
        for eval_book in books.evals.values():
            eval_book.ended = True
        for lease in list(books.eval_leases):
            books.end_lease(lease)
        self.moment.owed = {
            group: f"trained at {track.trained_at}"
            for group, track in books.tracks.items()
            if track.end == "trained" and (track.trained_at or 0) >= resume_step
        }

    def _group_returned(self, fields: dict[str, Any]) -> None:
        books, group = self.books, fields["group_id"]
        track = books.track(group)
        require(
            self.moment.owed.pop(group, None) is not None,
            f"{group} was returned, its end {track.end} at {track.trained_at} survives",
        )
        track.end, track.trained_at = "", None
        track.begun = True
        self.moment.returned.add(group)
        if fields["to"] == "queue":
            books.requeue(track)
            return
        check_window(self.moment, group, track, books.step)
        books.move(track, Place.BUFFERED)

    def _published(self, fields: dict[str, Any]) -> None:
        books = self.books
        version = Version(fields["incarnation"], fields["step"])
        require(
            any(
                isinstance(record, VersionRecorded) and record.version == version
                for record in self.moment.durable
            ),
            f"{version} was published before it was durable",
        )
        require(
            version.incarnation == books.incarnation and version.step <= books.step,
            f"{version} was published, the learner is {books.incarnation} and v {books.step}",
        )
        last = books.last_published.get(version.incarnation)
        require(
            last is None
            or version.step - last >= self.settings.period
            or (version.step > last and version in self.moment.final),
            f"{version} follows {last}, the period is {self.settings.period}",
        )
        books.last_published[version.incarnation] = version.step
        books.published[version] = fields["manifest_digest"]

    def _announced(self, peer: PeerId, told: VersionAnnounced) -> None:
        digest = self.books.published.get(told.version)
        require(digest == told.manifest_digest, f"{told.version} was announced with other bytes")
        require(self.books.is_alive(told.version), f"{told.version} was announced, which is dead")

    def _publish_acknowledged(self, peer: PeerId, told: PublishAcknowledged) -> None:
        books = self.books
        require(told.version in books.published, f"{told.version} was acknowledged too early")
        low = max(0, books.step - self.settings.staleness_max)
        require(told.keep_from <= low, f"keep_from is {told.keep_from}, {low} may be trained")

    def _learner_welcome(self, peer: PeerId, told: LearnerWelcome) -> None:
        require(
            told.incarnation in self.moment.durable_incarnations,
            f"incarnation {told.incarnation} was welcomed before it was durable",
        )

    def _step_acknowledged(self, peer: PeerId, told: StepAcknowledged) -> None:
        require(told.step <= self.books.step, f"step {told.step} was acknowledged too early")

    def _refused(self, peer: PeerId, refused: Refused) -> None:
        require(refused.reason != "batch_lost", f"{peer} trained in vain: {refused.text}")

    def _checkpoint(self, fields: dict[str, Any]) -> None:
        self.books.kept = tuple(fields["kept"])
