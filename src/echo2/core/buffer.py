"""Every group that has not ended: the queue, the leases, the version-indexed buffer.

Promise: a group is in exactly one place, and the counts that pacing and holding read
(`held_by_expiry`, `leased_by_expiry`) are those of the places, after every transition.
Whether a transition is wise is decided elsewhere.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from echo2.core.group import Group, GroupState, Lease, StoredResult
from echo2.core.staleness import expiry_step
from echo2.types import GroupId, LeaseId, PeerId, Task, Version

_OUT = (GroupState.LEASED, GroupState.STORING, GroupState.AUDITING)
_HELD = (*_OUT, GroupState.BUFFERED)


class GroupBook:
    """Groups by id, and their place. `staleness_max` is S; `queue_bytes` those of the
    payloads of queued tasks; `awaiting` the tasks that groups in work wait for."""

    def __init__(self, *, staleness_max: int) -> None:
        self.staleness_max = staleness_max
        self.groups: dict[GroupId, Group] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.leases_by_worker: dict[PeerId, set[LeaseId]] = {}
        self.queue: deque[GroupId] = deque()
        self.queue_bytes = 0
        self.awaiting: set[int] = set()
        self.buffered: dict[int, dict[GroupId, None]] = {}
        self.held_by_expiry: Counter[int] = Counter()
        self.leased_by_expiry: Counter[int] = Counter()

    # ------------------------------------------------------------------ reading

    def expiry(self, group: Group) -> int:
        """The last v at which the group may be trained, of what it is held for now. While its
        result is being made durable, of the lease that it ended, if that expires earlier."""
        if group.result is not None:
            sampled = group.result.min_version.step
            if group.ended_step is not None:
                sampled = min(sampled, group.ended_step)
        elif group.lease is not None:
            sampled = group.lease.version.step
        else:
            raise AssertionError(f"group {group.id} is {group.state}: nothing was sampled")
        return expiry_step(sampled, staleness_max=self.staleness_max)

    def in_state(self, *states: GroupState) -> list[Group]:
        return [group for group in self.groups.values() if group.state in states]

    @property
    def num_held(self) -> int:
        """Groups leased, storing, auditing or buffered."""
        return self.held_by_expiry.total()

    @property
    def num_buffered(self) -> int:
        return sum(len(groups) for groups in self.buffered.values())

    def earliest_first(self) -> Iterator[Group]:
        """Buffered groups, earliest expiry first, then in order of arrival."""
        for expiry in sorted(self.buffered):
            for group in list(self.buffered[expiry]):
                yield self.groups[group]

    def leases_of(self, worker: PeerId) -> list[Lease]:
        return [self.leases[lease] for lease in sorted(self.leases_by_worker.get(worker, ()))]

    def num_leases(self, worker: PeerId) -> int:
        return len(self.leases_by_worker.get(worker, ()))

    # -------------------------------------------------------------- transitions

    def add(self, group: GroupId, task: Task) -> Group:
        """A new group at the end of the queue."""
        made = Group(id=group, task=task)
        self.groups[group] = made
        self.queue.append(group)
        self.queue_bytes += len(task.payload)
        return made

    def restore(self, group: GroupId, task: Task, result: StoredResult, *, attempts: int) -> None:
        """One that an earlier coordinator had acknowledged: it waits to be trained."""
        made = Group(id=group, task=task, state=GroupState.BUFFERED, result=result, begun=True)
        made.attempts = attempts
        # Its worker sends it again if the acknowledgement was lost.
        made.known_leases[result.lease] = Lease(
            id=result.lease,
            group=group,
            worker=result.worker,
            version=result.min_version,
            granted_at=0.0,
            progressed_at=0.0,
            revoke_after_s=0.0,
        )
        self.groups[group] = made
        self._enter(made)

    def resume(self, group: GroupId, task: Task, lease: Lease, *, attempts: int) -> None:
        """One that an earlier coordinator had leased. The payload of its task is not here."""
        made = Group(id=group, task=task, state=GroupState.LEASED, lease=lease, begun=True)
        made.attempts, made.awaits_task = attempts, True
        self.awaiting.add(task.index)
        made.known_leases[lease.id] = lease
        self.groups[group] = made
        self._enter_lease(made, lease)

    def take_task(self, group: Group, task: Task) -> None:
        """The task that a group in work has waited for."""
        group.task, group.awaits_task = task, False
        self.awaiting.discard(task.index)

    def lease(self, group: Group, lease: Lease) -> None:
        self._leave(group)
        group.move(GroupState.LEASED)
        group.lease = lease
        group.known_leases[lease.id] = lease
        group.begun = True
        self._enter_lease(group, lease)

    def store(self, group: Group, result: StoredResult, record_id: int) -> Lease | None:
        """A result is being made durable, or nothing is recorded of it (`record_id` 0). Returns
        the live lease that it ended, if any."""
        self._leave(group)
        group.move(GroupState.STORING)
        lease = self._end_lease(group)
        group.result = result
        group.record_id = record_id
        if lease is not None and record_id:
            group.ended_step = lease.version.step
        self._enter(group)
        return lease

    def note_durable(self, group: Group) -> bool:
        """The result is on the disk: the place of the lease that it ended is free. Whether that
        is another one than the result's own."""
        before = self.expiry(group)
        self._leave(group)
        group.ended_step = None
        self._enter(group)
        return self.expiry(group) != before

    def await_audit(self, group: Group) -> None:
        """Durable, and not to be trained before its verdict."""
        self._leave(group)
        group.move(GroupState.AUDITING)
        group.record_id = None
        self._enter(group)

    def admit(self, group: Group) -> None:
        """Durable and, if it had to be, audited (or given back by a batch): the group may be
        trained."""
        self._leave(group)
        group.move(GroupState.BUFFERED)
        group.record_id = None
        self._enter(group)

    def train(self, group: Group) -> None:
        self._leave(group)
        group.move(GroupState.TRAINING)

    def requeue(self, group: Group, reason: str) -> Lease | None:
        """Back to the front of the queue, its result forgotten. Returns the lease ended. One
        that awaits its task leaves the book: it is added when the task comes."""
        self._leave(group)
        group.move(GroupState.QUEUED)
        lease = self._end_lease(group)
        group.result = None
        group.record_id = group.ended_step = None
        group.audited = False
        group.last_reason = reason
        if group.awaits_task:
            self.awaiting.discard(group.task.index)
            del self.groups[group.id]
        else:
            self._queue_first(group)
        return lease

    def end(self, group: Group) -> Lease | None:
        """The group leaves the book. Returns the live lease that it ended, if any."""
        self._leave(group)
        group.move(GroupState.ENDED)
        group.ended_step = None
        lease = self._end_lease(group)
        self.awaiting.discard(group.task.index)
        del self.groups[group.id]
        return lease

    def revive(self, group: Group, *, with_result: bool) -> None:
        """An ended group comes back, to the buffer or to the front of the queue."""
        if group.id in self.groups:
            raise AssertionError(f"group {group.id} has not ended")
        group.attempts = 0
        group.known_leases.clear()
        self.groups[group.id] = group
        if with_result:
            group.move(GroupState.BUFFERED)
            self._enter(group)
        else:
            group.move(GroupState.QUEUED)
            group.result, group.audited = None, False
            self._queue_first(group)

    # ------------------------------------------------------------------ helpers

    def _queue_first(self, group: Group) -> None:
        self.queue.appendleft(group.id)
        self.queue_bytes += len(group.task.payload)

    def _enter_lease(self, group: Group, lease: Lease) -> None:
        self.leases[lease.id] = lease
        self.leases_by_worker.setdefault(lease.worker, set()).add(lease.id)
        self._enter(group)

    def _end_lease(self, group: Group) -> Lease | None:
        lease, group.lease = group.lease, None
        if lease is not None:
            del self.leases[lease.id]
            self.leases_by_worker[lease.worker].discard(lease.id)
            if not self.leases_by_worker[lease.worker]:
                del self.leases_by_worker[lease.worker]
        return lease

    def _enter(self, group: Group) -> None:
        expiry = self.expiry(group)
        self.held_by_expiry[expiry] += 1
        if group.state in _OUT:
            self.leased_by_expiry[expiry] += 1
        else:
            self.buffered.setdefault(expiry, {})[group.id] = None

    def _leave(self, group: Group) -> None:
        if group.state is GroupState.QUEUED:
            self.queue.remove(group.id)
            self.queue_bytes -= len(group.task.payload)
        if group.state not in _HELD:
            return
        expiry = self.expiry(group)
        _take(self.held_by_expiry, expiry)
        if group.state in _OUT:
            _take(self.leased_by_expiry, expiry)
        else:
            del self.buffered[expiry][group.id]
            if not self.buffered[expiry]:
                del self.buffered[expiry]


def _take(counts: Counter[int], key: int) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]


def buffered_by_version(book: GroupBook) -> dict[Version, int]:
    """Buffered groups by the oldest version that sampled them, for the operator."""
    counts: Counter[Version] = Counter()
    for group in book.earliest_first():
        if group.result is not None:
            counts[group.result.min_version] += 1
    return dict(sorted(counts.items()))
