"""Everything the coordinator knows, in one place, and the few operations that all desks share.

`WorkerDesk`, `LearnerDesk` and `Dispatcher` decide; this holds what they decide over, and
collects the effects of the event under way.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from echo2.core.audits import Audits
from echo2.core.broadcast import Broadcasts
from echo2.core.buffer import GroupBook
from echo2.core.delta_choice import DeltaOffers, Way, main_group
from echo2.core.effects import Effect, Emit, Finish, Persist, Send
from echo2.core.estimates import Estimate
from echo2.core.evals import Eval, EvalLease, Evals
from echo2.core.group import WITH_RESULT, End, Group, GroupState, Lease
from echo2.core.history import TrainedHistory
from echo2.core.lineage import Lineage
from echo2.core.machines import Activation
from echo2.core.membership import Members, Worker
from echo2.core.records import Record
from echo2.core.relay_parts import RelayPart, announcement, planned_fields
from echo2.core.relay_standing import FIRST_PROBE_PATIENCE_S
from echo2.core.relays import Relays
from echo2.core.restored import Restored, RestoredGroup, RestoredLease
from echo2.core.settings import CoordinatorSettings
from echo2.core.task_queue import TaskStream, group_of, index_of
from echo2.messages import (
    LeaseRevoked,
    Message,
    Refused,
    Shutdown,
    VersionPublished,
)
from echo2.types import GroupId, GroupMismatch, LeaseId, PeerId, Task, Version

RECENT_LEASES_MAX = 16_384
PAST_HELLOS_MAX = 256


@dataclass(slots=True)
class Batch:
    """Groups leased to the learner step that trains at version `step`."""

    step: int
    groups: list[Group]
    last: bool


@dataclass(slots=True)
class Seat:
    """The learner's place. `peer` is None while nobody sits there; `wanted_step` is the
    batch that it waits for; `completing` names the record that makes its step durable, and
    `mismatch` is what the learner compared in it."""

    peer: PeerId | None = None
    hello_id: str = ""
    welcomed: bool = False
    silent: bool = False
    heard_at: float = 0.0
    vacant_since: float = 0.0
    text: str = ""
    wanted_step: int | None = None
    wanted_at: float = 0.0
    batch: Batch | None = None
    completing: int | None = None
    mismatch: list[tuple[PeerId, GroupMismatch]] = field(default_factory=list)
    told_text: str = ""
    told_at: float = 0.0


class RunState:
    """`step` is v. `pending` holds records that are not durable yet, by id. `verified_key` is
    that of the message that is handled now."""

    def __init__(self, settings: CoordinatorSettings, restored: Restored | None = None) -> None:
        self.settings = settings
        self.now = 0.0
        self.verified_key: str | None = None
        self.step = 0
        self.lineage = Lineage()
        self.book = GroupBook(staleness_max=settings.staleness_max)
        self.history = TrainedHistory(staleness_max=settings.staleness_max)
        self.members = Members()
        self.relays = Relays(settings, self.members)
        self.broadcasts = Broadcasts()
        self.deltas = DeltaOffers()
        self.evals = Evals()
        self.audits = Audits(settings.audit)
        self.activation = Activation(settings.activation, auditors=settings.audit.workers)
        self.seat = Seat()
        self.past_hellos: deque[str] = deque(maxlen=PAST_HELLOS_MAX)
        self.stream = TaskStream()
        self.announcements: dict[Version, VersionPublished] = {}
        self.published_at: dict[Version, float] = {}
        self.unplanned: Version | None = None
        self.plan_waits: tuple[Version, float] | None = None
        self.pending: dict[int, tuple[Record, Any]] = {}
        self.recorded_at: dict[int, float] = {}
        """When each of `pending` was given to the ledger, in order."""
        self.next_record_id = 1
        self.next_lease = 1
        self.recent_leases: OrderedDict[LeaseId, None] = OrderedDict()
        self.ends: Counter[str] = Counter()
        self.failed_in_row = 0
        self.cost_usd = 0.0
        self.costed_at: float | None = None
        self.environment_version = ""
        self.finished: Finish | None = None
        self.no_worker_since: float | None = None
        self.busy_s = Estimate()
        self.wait_s = Estimate()
        """Of the learner, from asking for a batch until it is granted."""
        self.bcast_s = Estimate()
        self.pause_s = Estimate()
        self.turns_max = 1
        self.granted_at: float | None = None
        self.is_fresh = restored is None
        self.first_new_index = 0
        self.restored_trained: list[tuple[GroupId, int]] = []
        self.untold_groups: list[Group] = []
        self.told_step = 0
        self.effects: list[Effect] = []
        if restored is not None:
            self._restore(restored)

    def _restore(self, restored: Restored) -> None:
        self.step = restored.step
        self.lineage.starts = list(restored.starts)
        # A version of which nobody was told is none until its learner publishes it again.
        told = (entry for entry in restored.published if entry[0] not in restored.untold)
        self.lineage.published = dict(sorted(told))
        self.first_new_index = restored.next_index
        self.history.keep(restored.kept)
        dead = []
        for group in restored.groups:
            if group.trained_at is not None:
                made = self._trained(group)
                self.history.add(group.trained_at, [made])
                if not group.told:
                    self.untold_groups.append(self._trained(group))
            elif self.lineage.all_verdict(group.result.versions, step=self.step):
                self.book.restore(group.id, group.task, group.result, attempts=group.attempt)
            else:  # sampled by versions that a rewind has killed
                dead.append(group.task.index)
        again = tuple(sorted((*restored.open_indexes, *dead)))
        self.stream = TaskStream(next_index=restored.next_index, again=again)
        self.ends.update(restored.ends)
        self.cost_usd = restored.cost_usd
        self.restored_trained = list(restored.trained)
        self.told_step = restored.told_step
        self.audits.restore(dict(restored.quarantined))
        for lease in restored.leases:
            self._resume(lease)

    def _trained(self, group: RestoredGroup) -> Group:
        return Group(
            id=group.id,
            task=group.task,
            state=GroupState.ENDED,
            attempts=group.attempt,
            result=group.result,
            begun=True,
        )

    def _resume(self, lease: RestoredLease) -> None:
        """Its worker may still work on it; once it says hello it is known."""
        version = lease.version
        if version not in self.lineage.published or not self.lineage.is_alive(version):
            return
        resumed = Lease(
            id=lease.id,
            group=lease.group,
            worker=lease.worker,
            version=version,
            granted_at=0.0,
            progressed_at=0.0,
            revoke_after_s=lease.revoke_after_s,
            resumed=True,
        )
        task = Task(index_of(lease.group), "")
        self.book.resume(lease.group, task, resumed, attempts=lease.attempt)

    def begin(self) -> None:
        """The clock runs: what an earlier coordinator had leased is as old as this one; and what
        it recorded, but was killed before it told, is told."""
        for lease in self.book.leases.values():
            lease.granted_at = lease.progressed_at = self.now
        for group in self.untold_groups:
            self._tell_end(group, "trained", "", self.told_step)
        if self.told_step < self.step:
            self.tell_step(self.told_step)
        self.untold_groups.clear()

    def tell_step(self, step: int) -> None:
        num_groups = sum(entry.step == step for entry in self.history.trained)
        self.emit(
            "step_completed",
            incarnation=self.lineage.incarnation,
            step=step,
            num_groups=num_groups,
        )

    # ------------------------------------------------------------------ reading

    @property
    def next_step(self) -> int:
        """f: the version at which the next batch will be trained. An empty last batch is
        not trained."""
        batch = self.seat.batch
        return self.step + 1 if batch is not None and batch.groups else self.step

    @property
    def recording_since(self) -> float | None:
        """Since when the oldest of the records that wait for the disk waits for it."""
        return next(iter(self.recorded_at.values()), None)

    def is_admissible(self, group: Group, step: int) -> bool:
        """Has the group enough inside the window to be trained at version `step`?"""
        result = group.result
        if result is None:
            return False
        if self.settings.late == "mask":
            low = max(0, step - self.settings.staleness_max)
            return result.tokens_from(low) >= self.settings.mask_min_tokens
        return self.book.expiry(group) >= step

    # ------------------------------------------------------------------ effects

    def send(self, peer: PeerId, message: Message) -> None:
        self.effects.append(Send(peer, message))

    def emit(self, event: str, **fields: Any) -> None:
        self.effects.append(Emit(event, fields))

    def persist(self, record: Record, context: Any = None) -> int:
        record_id = self.next_record_id
        self.next_record_id += 1
        self.pending[record_id] = (record, context)
        self.recorded_at[record_id] = self.now
        self.effects.append(Persist(record_id, record))
        return record_id

    def refuse(self, peer: PeerId, reason: str, text: str) -> None:
        """Refuse a hello for good."""
        self.send(peer, Refused(reason=reason, text=text[:2048], fatal=True))
        self.emit("peer_refused", peer=peer, reason=reason, text=text)

    # ---------------------------------------------------------- groups and leases

    def end_group(
        self, group: Group, end: End, reason: str, *, trained_at: int | None = None
    ) -> None:
        """The group ends, once; its live lease, if any, is revoked."""
        self._tell_end(group, end, reason, trained_at)
        self.audits.close(group.id)
        self.ends[end] += 1
        self.failed_in_row = self.failed_in_row + 1 if end == "failed" else 0
        if group.awaits_task:
            self.stream.forget(group.task.index)
        lease = self.book.end(group)
        if lease is not None:
            self.revoke_at_worker(lease, reason)

    def _tell_end(self, group: Group, end: End, reason: str, trained_at: int | None) -> None:
        result = group.result
        low = 0 if trained_at is None else max(0, trained_at - self.settings.staleness_max)
        oldest = result.min_version_from(low) if result is not None else None
        newest = result.max_version if result is not None else None
        tokens = result.tokens if result is not None else (group.lease.tokens if group.lease else 0)
        worker = (
            result.worker if result is not None else (group.lease.worker if group.lease else None)
        )
        self.emit(
            "group_ended",
            group_id=group.id,
            end=end,
            reason=reason,
            worker=worker,
            incarnation=self.lineage.incarnation,
            min_version=oldest.step if oldest else None,
            max_version=newest.step if newest else None,
            min_incarnation=oldest.incarnation if oldest else None,
            max_incarnation=newest.incarnation if newest else None,
            trained_at=trained_at,
            tokens=tokens,
            reward_mean=result.reward_mean if result is not None else None,
            attempts=group.attempts,
        )

    def lose_lease(
        self, lease: Lease, reason: str, *, counted: bool, tell: bool, failed: bool = False
    ) -> None:
        """A lease ended without a result: the group is leased again, or has failed.

        `counted`: it used up one of the group's attempts. `tell`: the worker may still work
        on it and is told to stop. That it was lost is told as an event, of the worker's own
        failure (LeaseFailed) by the caller.
        """
        group = self.book.groups[lease.group]
        group.avoid = lease.worker if counted else None
        if not counted:
            group.attempts -= 1
        if not failed:
            self.emit(
                "lease_revoked",
                group_id=group.id,
                lease=lease.id,
                worker=lease.worker,
                reason=reason,
                held_s=self.now - lease.granted_at,
            )
        if counted and group.attempts >= self.settings.attempts_max:
            self.end_group(group, "failed", f"{group.attempts} attempts, the last: {reason}")
        else:
            self.book.requeue(group, reason)
            if tell:
                self.revoke_at_worker(lease, reason)

    def withdraw(self, group: Group, reason: str) -> None:
        """A result that is not believed: its group is queued for another worker, and no attempt
        is counted."""
        result = group.result
        assert result is not None
        self.emit(
            "group_withdrawn",
            group_id=group.id,
            lease=result.lease,
            worker=result.worker,
            reason=reason,
        )
        self.audits.close(group.id)
        group.known_leases.pop(result.lease, None)  # sent again, it is not taken again
        self.book.requeue(group, reason)
        group.avoid, group.attempts = result.worker, max(0, group.attempts - 1)

    def is_live(self, lease: LeaseId) -> bool:
        return lease in self.book.leases or lease in self.evals.lease_eval

    def lose_eval_lease(self, lease: EvalLease, reason: str, *, tell: bool) -> None:
        """An eval lease ended without a result: its task waits again, or has failed."""
        self.evals.give_back(lease.id, reason)
        if tell:
            self.revoke_at_worker(lease, reason)

    def cancel_eval(self, eval_id: str, reason: str) -> Eval:
        """What is not done of the eval stays undone."""
        for lease in list(self.evals.evals[eval_id].leases.values()):
            self.revoke_at_worker(lease, reason)
        return self.evals.cancel(eval_id, reason)

    def revoke_at_worker(self, lease: Lease | EvalLease, reason: str) -> None:
        if self.members.get(lease.worker) is not None:
            self.send(lease.worker, LeaseRevoked(lease=lease.id, reason=reason[:2048]))

    def note_settled(self, lease: LeaseId) -> None:
        """Remember an accepted lease, so that a repeated result is called a duplicate."""
        self.recent_leases[lease] = None
        while len(self.recent_leases) > RECENT_LEASES_MAX:
            self.recent_leases.popitem(last=False)

    def expire_late(self) -> None:
        """f moved: end or revoke what has no place in any batch any more."""
        step = self.next_step
        for group in list(self.book.earliest_first()):
            if not self.is_admissible(group, step):
                self.end_group(group, "expired", self.expired_reason(group, step))
        if self.settings.late == "mask":
            return
        for expiry in [e for e in self.book.leased_by_expiry if e < step]:
            for lease in [
                lease
                for lease in self.book.leases.values()
                if self.book.expiry(self.book.groups[lease.group]) == expiry
            ]:
                group = self.book.groups[lease.group]
                reason = self.expired_reason(group, step)
                if self.settings.late == "drop":
                    self.end_group(group, "expired", reason)
                else:
                    self.lose_lease(lease, reason, counted=False, tell=True)

    def expired_reason(self, group: Group, step: int) -> str:
        sampled = self.book.expiry(group) - self.settings.staleness_max
        low = max(0, step - self.settings.staleness_max)
        return (
            f"sampled by version {sampled}, window is [{low}, {step}]; "
            "raise staleness.max or add workers"
        )

    # ------------------------------------------------------------------ versions

    def announce(self, version: Version, peers: list[PeerId]) -> None:
        """Tell these of the version, each with its part of the plan: made for the first. While
        it cannot be planned yet nobody is told, for FIRST_PROBE_PATIENCE_S at most:
        `announce_again` comes back to it."""
        if self.relays.planned_version != version:
            if self.plan_waits is None or self.plan_waits[0] != version:
                self.plan_waits = version, self.now
            waited_s = self.now - self.plan_waits[1]
            if waited_s < FIRST_PROBE_PATIENCE_S and not self.relays.plan_verdict(self.now):
                return
            self._plan(version, peers, self._ways(version, peers))
        ways = self._ways(version, peers)
        told: tuple[RelayPart, Way] | None = None
        for peer in peers:
            worker = self.members.get(peer)
            part = self.relays.part(version, peer, self.now)
            if worker is not None:
                again = worker.announced == version
                worker.announced_times = worker.announced_times + 1 if again else 1
                worker.announced, worker.announced_at = version, self.now
            if part.stripes or part.serves:
                self.tell_relays(peer)
            way = ways[peer]
            if told != (part, way):  # without a plan all are told the same
                told = part, way
                message = announcement(self.announcements[version], part, way)
            self.send(peer, message)

    def _plan(self, version: Version, peers: list[PeerId], ways: Mapping[PeerId, Way]) -> None:
        group = main_group(ways)
        published = self.announcements[version]
        way = ways[group[0]] if group else Way((), 0, 0)
        digest = way.last or published.manifest_digest
        artifact = replace(published, num_bytes=way.num_bytes, manifest_digest=digest)
        plan = self.relays.plan(artifact, group, self.now)
        if plan is not None:
            self.emit("dissemination_planned", **planned_fields(version, plan))
        if version == self.unplanned:
            self.unplanned = None
            active = self.members.active(peers)
            self.broadcasts.begin(version, active=active, now=self.published_at[version], plan=plan)

    def _ways(self, version: Version, peers: Sequence[PeerId]) -> dict[PeerId, Way]:
        """Deltas from what each worker has, or the whole version. Most have the same."""
        published = self.announcements[version]
        found: dict[PeerId, Way] = {}
        from_what: dict[tuple[str | None, ...], Way] = {}
        for peer in peers:
            worker = self.members.get(peer)
            if worker is None:
                has: tuple[str | None, ...] = (None,)
            elif worker.installed is None:
                has = (None, *worker.stored)
            else:
                has = (self.lineage.published.get(worker.installed),)
            if has not in from_what:
                ways = (self.deltas.way(published, have) for have in has)
                from_what[has] = min(ways, key=lambda way: way.total_bytes)
            found[peer] = from_what[has]
        return found

    def tell_relays(self, peer: PeerId) -> None:
        """The list of relays, if the worker has not been told of it."""
        message = self.relays.take_list(peer)
        if message is not None:
            self.send(peer, message)

    def announce_again(self) -> None:
        """Tell workers that have not installed the newest version of it, once more, ever more
        rarely: it may not have been planned before, an announcement may be lost, and an install
        may take long."""
        newest = self.lineage.newest
        if newest is None or newest not in self.announcements:
            return
        due = []
        for worker in self.members.workers.values():
            if worker.installed is not None and worker.installed >= newest:
                continue
            if self.now > self.announced_again_at(worker):
                due.append(worker.peer)
        if due:
            self.announce(newest, due)

    def announced_again_at(self, worker: Worker) -> float:
        """When a worker that has not installed the newest version is told of it once more."""
        times = worker.announced_times if worker.announced == self.lineage.newest else 0
        patience_s = self.settings.gone_s * 2 ** min(times, 10) if times else 0.0
        return worker.announced_at + patience_s

    @property
    def keep_from(self) -> int:
        """Versions below this step are needed by no lease, eval or recomputation."""
        newest = self.lineage.newest
        low = self.step - self.settings.staleness_max
        if newest is not None:
            low = min(low, newest.step)
        low = min([low, *(e.version.step for e in self.evals.evals.values())])
        return max(0, low)

    def forget_versions(self) -> None:
        """Drop what the registry of versions needs no more."""
        low = min(self.step, self.history.oldest_kept) - self.settings.staleness_max - 1
        low = min([low, *(lease.version.step for lease in self.book.leases.values())])
        low = min([low, *(e.version.step for e in self.evals.evals.values())])
        if self.settings.late == "mask":
            for group in self.book.in_state(*WITH_RESULT):
                if group.result is not None:
                    low = min(low, group.result.min_version.step)
        self.lineage.forget_below(low)
        for version in [v for v in self.announcements if v not in self.lineage.published]:
            del self.announcements[version]
            self.published_at.pop(version, None)

    # ------------------------------------------------------------------- the end

    def finish(self, *, ok: bool, finished: bool, reason: str) -> None:
        """End the coordinator's work; with `finished` the run itself is over."""
        if self.finished is not None:
            return
        if finished:
            for index in self.stream.again:
                if group_of(index) not in self.book.groups:
                    self.book.add(group_of(index), Task(index, "")).begun = True
            for group in list(self.book.groups.values()):
                if group.begun or index_of(group.id) < self.first_new_index:
                    self.end_group(group, "cancelled", "the run is over")
        for eval_id in list(self.evals.evals):
            self.end_eval(self.cancel_eval(eval_id, "the run is over"))
        self.evals.evals.clear()
        message = Shutdown(reason=reason[:2048], finished=finished)
        for peer in self.members.workers:
            self.send(peer, message)
        if self.seat.peer is not None:
            self.send(self.seat.peer, message)
        self.emit("run_finished", reason=reason, finished=finished)
        self.finished = Finish(ok=ok, finished=finished, reason=reason)
        self.effects.append(self.finished)

    def end_eval(self, found: Eval) -> None:
        result = found.result()
        self.evals.remember(result)
        self.send(found.learner, result)
        self.emit(
            "eval_ended",
            eval_id=result.eval_id,
            incarnation=result.version.incarnation,
            step=result.version.step,
            num_asked=result.num_asked,
            num_done=result.num_done,
            reward_mean=result.reward_mean,
            reason=result.reason,
        )
