"""The promises, checked after every event against books of our own.

`Invariants.observe(event, effects)` reads what went into the core and what came out, and
raises `Violation` at the first thing that breaks a promise. Of the core's own state it looks
only at the sizes of what it keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from echo2.core.effects import DeliverGroup, Effect, Emit, Finish, Persist, Send
from echo2.core.events import Event, Persisted, Received
from echo2.core.records import (
    GroupStored,
    LearnerRecorded,
    Record,
    StepRecorded,
    VersionRecorded,
)
from echo2.core.run_state import RunState
from echo2.core.settings import CoordinatorSettings
from echo2.messages import (
    BatchGranted,
    Draining,
    EvalRequest,
    EvalResult,
    GroupAcknowledged,
    GroupResult,
    InstallFailed,
    LeaseFailed,
    LeaseGranted,
    LeaseRevoked,
    LearnerWelcome,
    Message,
    PublishAcknowledged,
    StepAcknowledged,
    VersionAnnounced,
    VersionInstalled,
    VersionPublished,
    WorkerHello,
    WorkerWelcome,
)
from echo2.sim.books import Books, EvalBook, Place, Track, WorkerBook
from echo2.types import GroupId, LeaseId, PeerId, Version


class Violation(AssertionError):
    """A promise was broken; the text says which, with values."""


def require(holds: bool, text: str | Callable[[], str]) -> None:
    if not holds:
        raise Violation(text if isinstance(text, str) else text())


class Invariants:
    def __init__(self, settings: CoordinatorSettings) -> None:
        self.settings = settings
        self.books = Books(settings)
        self.num_checked = 0
        self.finished = False
        self._pending: dict[int, Record] = {}
        self._durable_results: set[LeaseId] = set()
        self._settled: set[LeaseId] = set()
        self._durable_incarnations: set[int] = set()
        self._final: dict[Version, bool] = {}
        self._returned: set[GroupId] = set()
        self._owed: dict[GroupId, str] = {}
        self._event: Event | None = None
        self._record: Record | None = None
        self._last = False
        self._effects: dict[type, Callable[[Any], None]] = {
            Emit: self._emit,
            Persist: self._persist,
            DeliverGroup: self._deliver,
            Finish: self._finish,
        }
        self._sends: dict[type, Callable[[PeerId, Any], None]] = {
            LeaseGranted: self._granted,
            GroupAcknowledged: self._acknowledged,
            LeaseRevoked: self._revoked,
            BatchGranted: self._batch,
            WorkerWelcome: self._welcome,
            VersionAnnounced: self._announced,
            LearnerWelcome: self._learner_welcome,
            StepAcknowledged: self._step_acknowledged,
            PublishAcknowledged: self._publish_acknowledged,
            EvalResult: self._eval_result,
        }
        self._emits: dict[str, Callable[[dict[str, Any]], None]] = {
            "group_ended": self._ended,
            "group_returned": self._group_returned,
            "lease_revoked": lambda fields: self.books.lose_lease(fields["lease"]),
            "lease_failed": lambda fields: self.books.lose_lease(fields["lease"]),
            "learner_joined": self._joined,
            "step_completed": self._completed,
            "version_published": self._published,
            "checkpoint_saved": self._checkpoint,
            "worker_gone": self._gone,
            "run_finished": self._run_finished,
        }

    def observe(self, event: Event, effects: list[Effect], state: RunState) -> None:
        """One event was handled; `state` is the core's, for its sizes alone."""
        self.num_checked += 1
        self._event, self._record = event, None
        self._before(event)
        for effect in effects:
            if isinstance(effect, Send):
                check = self._sends.get(type(effect.message))
                if check is not None:
                    check(effect.peer, effect.message)
            else:
                self._effects[type(effect)](effect)
        self._after(state)

    def coordinator_restarted(self) -> None:
        """Its memory is gone, but for what the records say."""
        self.books.forget_all_open()
        self._pending.clear()

    # ------------------------------------------------------------------ what went in

    def _before(self, event: Event) -> None:
        books = self.books
        if isinstance(event, Persisted):
            self._record = self._pending.pop(event.record_id, None)
            match self._record:
                case GroupStored(_, lease):
                    self._durable_results.add(lease)
                case LearnerRecorded(incarnation):
                    self._durable_incarnations.add(incarnation)
                case _:
                    pass
        elif isinstance(event, Received):
            worker = books.workers.get(event.peer)
            match event.message:
                case VersionInstalled(version=version) if worker is not None:
                    worker.installed = version
                case InstallFailed(serving=serving) if worker is not None:
                    worker.installed = serving if serving in books.published else None
                case Draining() if worker is not None:
                    worker.draining = True
                case VersionPublished(version=version, final=final):
                    self._final[version] = final
                case EvalRequest() as request if request.incarnation == books.incarnation:
                    books.evals.setdefault(
                        request.eval_id, EvalBook(request.version, len(request.tasks))
                    )
                case _:
                    pass

    # ----------------------------------------------------------------- after all of it

    def _after(self, state: RunState) -> None:
        books, settings = self.books, self.settings
        step, held = books.next_step, books.held
        if settings.late == "wait" and held and not self.finished:
            total, last = 0, max(held)
            require(min(held) >= step, lambda: f"held for {min(held)}, next batch {step}")
            for expiry in range(step, last + 1):
                total += held.get(expiry, 0)
                room = settings.groups_per_step * (expiry - step + 1)
                require(
                    total <= room,
                    lambda e=expiry, n=total, r=room: f"pacing: {n} groups expire by {e}, "  # type: ignore[misc]
                    f"batches from {step} on have room for {r}",
                )
        require(not self._owed or self.finished, lambda: f"not returned by a rewind: {self._owed}")
        self._check_sizes(state)

    def _check_sizes(self, state: RunState) -> None:
        """Memory does not grow with the run."""
        books, settings = self.books, self.settings
        if settings.late != "mask":
            require(
                books.num_held <= settings.buffer_max,
                lambda: f"{books.num_held} groups are held, R(S + 1) is {settings.buffer_max}",
            )
        trained = settings.groups_per_step * (books.step - min(books.kept))
        require(
            len(state.history.trained) <= max(0, trained),
            lambda: f"{len(state.history.trained)} trained groups are remembered, "
            f"{trained} were trained since the oldest checkpoint {min(books.kept)}",
        )
        in_work = settings.groups_per_step * (settings.staleness_max + 2 + settings.tasks_ahead)
        in_work += len(self._returned) + 256
        require(
            len(state.book.groups) <= in_work,
            lambda: f"the book holds {len(state.book.groups)} groups, at most {in_work}",
        )

    # ----------------------------------------------------------------- leases, results

    def _granted(self, peer: PeerId, granted: LeaseGranted) -> None:
        books = self.books
        worker = books.workers.get(peer)
        require(worker is not None, f"{granted.lease} was granted to {peer}, which is not here")
        assert worker is not None
        require(not worker.draining, f"{granted.lease} was granted to {peer}, which leaves")
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
            self._eval_granted(peer, granted)
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

    def _persist(self, effect: Persist) -> None:
        self._pending[effect.record_id] = effect.record
        if not isinstance(effect.record, GroupStored):
            return
        books, record = self.books, effect.record
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
        track.trajectories, track.record_id = message.trajectories, effect.record_id
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
        books.move(track, Place.STORING, sampled=track.min_version)

    def _acknowledged(self, peer: PeerId, told: GroupAcknowledged) -> None:
        books = self.books
        if isinstance(self._event, Received) and isinstance(self._event.message, LeaseFailed):
            if books.lease_worker.get(told.lease) == peer:
                books.lose_lease(told.lease)
            return
        if told.lease in books.eval_leases:
            self._eval_acknowledged(told)
            return
        track = books.tracks.get(told.group)
        if told.outcome == "accepted":
            assert track is not None
            require(
                told.lease in self._durable_results or track.end == "expired",
                f"{told.lease} was acknowledged before its result was durable",
            )
            self._settled.add(told.lease)
            if isinstance(self._record, GroupStored):
                require(
                    track.place is Place.STORING and track.lease == told.lease,
                    f"{told.group} was accepted while it is {track.place.value}",
                )
                books.move(track, Place.BUFFERED)
        elif told.outcome == "duplicate":
            require(
                told.lease in self._settled,
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
        event, books = self._event, self.books
        assert isinstance(event, Received)
        hello = event.message
        assert isinstance(hello, WorkerHello)
        installed = hello.installed if hello.installed in books.published else None
        before = books.workers.get(peer)
        books.workers[peer] = worker = WorkerBook(hello.slots, installed)
        if before is not None:
            worker.leases = before.leases
        for lease in list(worker.leases):
            if lease not in welcome.alive:
                books.lose_lease(lease)
        require(
            worker.leases == set(welcome.alive),
            f"{peer} may go on with {welcome.alive}, its leases are {sorted(worker.leases)}",
        )

    def _gone(self, fields: dict[str, Any]) -> None:
        worker = self.books.workers.pop(fields["worker"], None)
        for lease in list(worker.leases) if worker is not None else ():
            self.books.lose_lease(lease)

    # ------------------------------------------------------------------------ batches

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
        require(size == 0 or not self._last, "a batch was granted after the last one")
        require(size == len(set(granted.groups)), "a group is in its batch twice")
        require(
            size == settings.groups_per_step or (granted.last and size < settings.groups_per_step),
            f"the batch of {granted.step} has {size} groups, R is {settings.groups_per_step}",
        )
        tracks = [books.track(group) for group in granted.groups]
        for group, track in zip(granted.groups, tracks, strict=True):
            require(
                track.place is Place.BUFFERED, f"{group} is in a batch and {track.place.value}"
            )
            self._check_window(group, track, granted.step)
        self._check_order(tracks, granted.step)
        if settings.late == "wait" and size:
            self._check_hold(granted.step)
        books.batch = (granted.step, granted.groups)
        self._last = granted.last
        for track in tracks:
            books.move(track, Place.TRAINING)

    def _check_order(self, tracks: list[Track], step: int) -> None:
        """Earliest expiry first."""
        remaining = self.books.buffered.copy()
        for track in tracks:
            remaining[track.expiry] -= 1
        left = [expiry for expiry, count in remaining.items() if count > 0]
        latest = max((track.expiry for track in tracks), default=step)
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

    def _check_window(self, group: GroupId, track: Track, step: int) -> None:
        """Promise 1, for a group that is trained at `step`."""
        books, settings = self.books, self.settings
        low = max(0, step - settings.staleness_max)
        for version in track.versions:
            require(
                version in books.published and version.step <= step and books.is_alive(version),
                f"{group} is trained at {step} with tokens of {version}",
            )
            require(
                settings.late == "mask" or version.step >= low,
                f"{group} is trained at {step} with tokens of {version}: staleness "
                f"{step - version.step}, S is {settings.staleness_max}",
            )
        require(
            track.tokens_from(low) >= (settings.mask_min_tokens if settings.late == "mask" else 1),
            f"{group} is trained at {step} with no token of version {low} or later",
        )
        if settings.filter_zero_variance:
            require(
                len({t.reward for t in track.trajectories}) > 1,
                f"{group} has equal rewards and is trained",
            )

    def _deliver(self, effect: DeliverGroup) -> None:
        books = self.books
        require(
            books.batch is not None
            and effect.step == books.batch[0]
            and effect.group in books.batch[1],
            f"{effect.group} was delivered for {effect.step}, the batch is {books.batch}",
        )
        track = books.tracks[effect.group]
        require(
            effect.result.trajectories == track.trajectories and effect.result.lease == track.lease,
            f"{effect.group} was delivered with another result than the one that was stored",
        )

    def _completed(self, fields: dict[str, Any]) -> None:
        books, record = self.books, self._record
        require(
            isinstance(record, StepRecorded) and record.step == fields["step"],
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
            books.batch is not None and track.place is Place.TRAINING and group in books.batch[1],
            f"{group} ended trained while it is {track.place.value}",
        )
        require(
            fields["trained_at"] == books.step and fields["incarnation"] == books.incarnation,
            f"{group} was trained at {fields['trained_at']}, v is {books.step}",
        )
        self._check_window(group, track, books.step)
        low = max(0, books.step - self.settings.staleness_max)
        oldest = min(version for version in track.versions if version.step >= low)
        require(
            (fields["min_incarnation"], fields["min_version"]) == (oldest.incarnation, oldest.step),
            f"{group}: recorded as of version {fields['min_version']}, it is {oldest}",
        )

    def _check_expired(self, group: GroupId, track: Track) -> None:
        """Only what has no place in any batch any more expires."""
        books, settings = self.books, self.settings
        step, event = books.next_step, self._event
        trajectories = track.trajectories
        arrived = event.message if isinstance(event, Received) else None
        if track.place is Place.LEASED and isinstance(arrived, GroupResult):
            trajectories = arrived.trajectories if arrived.group == group else ()
        if settings.late == "mask":
            seen = Track(trajectories=trajectories)
            tokens = seen.tokens_from(max(0, step - settings.staleness_max))
            require(tokens < settings.mask_min_tokens, f"{group} expired with {tokens} tokens")
            return
        expiry = track.expiry
        if trajectories:
            expiry = Track(trajectories=trajectories).min_version.step + settings.staleness_max
        require(expiry < step, f"{group} of expiry {expiry} expired, the next batch is {step}")

    # --------------------------------------------------------------- learner, versions

    def _joined(self, fields: dict[str, Any]) -> None:
        books = self.books
        incarnation, resume_step = fields["incarnation"], fields["resume_step"]
        require(
            incarnation > books.incarnation, f"{incarnation} joined after {books.incarnation}"
        )
        require(
            resume_step <= books.step or not books.starts,
            f"a learner resumed at {resume_step}, v is {books.step}",
        )
        books.rewind(incarnation, resume_step)
        self._last = False
        books.kept = tuple(step for step in books.kept if step <= resume_step) or (resume_step,)
        for eval_book in books.evals.values():
            eval_book.ended = True
        for lease in list(books.eval_leases):
            books.end_lease(lease)
        self._owed = {
            group: f"trained at {track.trained_at}"
            for group, track in books.tracks.items()
            if track.end == "trained" and (track.trained_at or 0) >= resume_step
        }

    def _group_returned(self, fields: dict[str, Any]) -> None:
        books, group = self.books, fields["group_id"]
        track = books.track(group)
        require(
            self._owed.pop(group, None) is not None,
            f"{group} was returned, its end {track.end} at {track.trained_at} survives",
        )
        track.end, track.trained_at = "", None
        self._returned.add(group)
        if fields["to"] == "queue":
            books.requeue(track)
            return
        require(
            books.are_alive(track.versions) and track.expiry >= books.step,
            f"{group} was returned to the buffer at {books.step} with tokens of {track.versions}",
        )
        books.move(track, Place.BUFFERED)

    def _published(self, fields: dict[str, Any]) -> None:
        books = self.books
        version = Version(fields["incarnation"], fields["step"])
        require(
            isinstance(self._record, VersionRecorded) and self._record.version == version,
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
            or (version.step > last and self._final.get(version, False)),
            f"{version} follows {last}, the period is {self.settings.period}",
        )
        books.last_published[version.incarnation] = version.step
        books.published[version] = fields["manifest_digest"]

    def _announced(self, peer: PeerId, told: VersionAnnounced) -> None:
        digest = self.books.published.get(told.version)
        require(digest == told.manifest_digest, f"{told.version} was announced with other bytes")
        require(
            self.books.is_alive(told.version), f"{told.version} was announced, which is dead"
        )

    def _publish_acknowledged(self, peer: PeerId, told: PublishAcknowledged) -> None:
        books = self.books
        require(told.version in books.published, f"{told.version} was acknowledged too early")
        low = max(0, books.step - self.settings.staleness_max)
        require(told.keep_from <= low, f"keep_from is {told.keep_from}, {low} may be trained")

    def _learner_welcome(self, peer: PeerId, told: LearnerWelcome) -> None:
        require(
            told.incarnation in self._durable_incarnations,
            f"incarnation {told.incarnation} was welcomed before it was durable",
        )

    def _step_acknowledged(self, peer: PeerId, told: StepAcknowledged) -> None:
        require(told.step <= self.books.step, f"step {told.step} was acknowledged too early")

    def _checkpoint(self, fields: dict[str, Any]) -> None:
        self.books.kept = tuple(fields["kept"])

    # -------------------------------------------------------------------------- evals

    def _eval_granted(self, peer: PeerId, granted: LeaseGranted) -> None:
        books = self.books
        eval_id, _, task = granted.group[1:].rpartition("-")
        found = books.evals.get(eval_id)
        require(
            found is not None and found.version == granted.version and not found.ended,
            f"eval lease {granted.lease} of {granted.version} for {eval_id}",
        )
        live = [place for place in books.eval_leases.values() if place == (eval_id, task)]
        require(not live, f"task {task} of {eval_id} is leased twice")
        books.begin_eval_lease(granted.lease, peer, eval_id, task)

    def _eval_acknowledged(self, told: GroupAcknowledged) -> None:
        books, event = self.books, self._event
        eval_id, task = books.eval_leases[told.lease]
        books.end_lease(told.lease)
        if told.outcome != "accepted":
            return
        assert isinstance(event, Received)
        assert isinstance(event.message, GroupResult)
        found, trajectories = books.evals[eval_id], event.message.trajectories
        require(task not in found.tasks_done, f"task {task} of {eval_id} was scored twice")
        versions = {span.version for t in trajectories for span in t.spans}
        require(versions == {found.version}, f"{eval_id} scored tokens of {versions}")
        self._settled.add(told.lease)
        found.tasks_done.add(task)
        found.rewards.append(sum(t.reward for t in trajectories) / len(trajectories))

    def _eval_result(self, peer: PeerId, told: EvalResult) -> None:
        found = self.books.evals.get(told.eval_id)
        require(found is not None, f"{told.eval_id} ended, nobody asked for it")
        assert found is not None
        found.ended = True
        rewards = found.rewards
        require(
            (told.num_asked, told.num_done) == (found.num_asked, len(rewards)),
            f"{told.eval_id} reports {told.num_done} of {told.num_asked}, it is "
            f"{len(rewards)} of {found.num_asked}",
        )
        mean = sum(rewards) / len(rewards) if rewards else None
        same = mean == told.reward_mean or (
            mean is not None
            and told.reward_mean is not None
            and abs(mean - told.reward_mean) < 1e-9
        )
        require(same, f"{told.eval_id} reports a mean of {told.reward_mean}, it is {mean}")

    # ------------------------------------------------------------------------ the end

    def _emit(self, effect: Emit) -> None:
        check = self._emits.get(effect.event)
        if check is not None:
            check(effect.fields)

    def _run_finished(self, fields: dict[str, Any]) -> None:
        self.finished = True
        if not fields["finished"]:
            return
        still_open = [
            group
            for group, track in self.books.tracks.items()
            if track.begun and track.place is not Place.ENDED
        ]
        require(not still_open, f"the run finished, and these never ended: {still_open[:20]}")

    def _finish(self, effect: Finish) -> None:
        require(self.finished, "the coordinator ended without run_finished")


def messages_of(effects: Iterable[Effect], kind: type[Message]) -> list[Any]:
    """The messages of one kind among effects, for tests."""
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]
