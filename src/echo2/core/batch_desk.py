"""What the learner trains on: tasks in, batches out, completed steps.

A batch is granted once and delivered as often as it is asked for. What the learner says it
trained counts: after a restart of the coordinator its message is what is left of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from echo2.core.audit_desk import AuditDesk
from echo2.core.effects import DeliverGroup
from echo2.core.group import Group, GroupState
from echo2.core.records import StepRecorded
from echo2.core.run_state import Batch, RunState
from echo2.core.staleness import hold_verdict
from echo2.core.task_queue import group_of
from echo2.core.worker_desk import WorkerDesk
from echo2.errors import RemoteProtocolError
from echo2.messages import (
    BatchGranted,
    BatchRequest,
    StepAcknowledged,
    StepCompleted,
    TasksSubmitted,
)
from echo2.types import GroupId, GroupMismatch, PeerId, Task

_TRAINABLE = (GroupState.BUFFERED, GroupState.AUDITING)
"""What the learner may have had before a restart: audits of those begin anew with it."""


class BatchDesk:
    """`is_current`: does a message of this peer, under this incarnation, come from the learner
    in the seat?"""

    def __init__(self, state: RunState, is_current: Callable[[PeerId, int], bool]) -> None:
        self.state = state
        self._is_current = is_current

    # ----------------------------------------------------------------------- tasks

    def tasks(self, peer: PeerId, message: TasksSubmitted) -> None:
        if not self._is_current(peer, message.incarnation):
            return
        state = self.state
        try:
            tasks = state.stream.accept(message.start, message.tasks, exhausted=message.exhausted)
        except ValueError as error:
            raise RemoteProtocolError(str(error), reason="wrong_tasks") from error
        for task in tasks:
            group = state.book.groups.get(group_of(task.index))
            if group is None:
                state.book.add(group_of(task.index), task)
            elif group.awaits_task:
                self._task_is_here(group, task)
        if message.exhausted:
            self._end_without_task(message.start + len(message.tasks))

    def _task_is_here(self, group: Group, task: Task) -> None:
        """Of a group that was leased before the coordinator was started again."""

        early = group.early
        group.early = None
        self.state.book.take_task(group, task)
        if early is not None:
            WorkerDesk(self.state).result(*early)

    def _end_without_task(self, end: int) -> None:
        """The stream ends before tasks that it had: nothing can be made of their groups."""
        for group in self.state.book.in_state(GroupState.LEASED):
            if group.awaits_task and group.task.index >= end:
                self.state.end_group(group, "cancelled", "the stream of tasks ends before it")

    # --------------------------------------------------------------------- batches

    def batch_request(self, peer: PeerId, message: BatchRequest) -> None:
        if not self._is_current(peer, message.incarnation):
            return
        state, seat = self.state, self.state.seat
        if message.step != state.step:
            raise RemoteProtocolError(
                f"a batch was asked for version {message.step}, v is {state.step}",
                reason="wrong_step",
            )
        if seat.completing is not None:
            raise RemoteProtocolError(
                f"the step at version {state.step} is being completed", reason="wrong_order"
            )
        state.audits.learner_spoke = True
        if seat.batch is not None:
            self._deliver(seat.batch)
            return
        if seat.wanted_step is None:
            AuditDesk(state).withdraw_quarantined()
        if seat.wanted_step != message.step:
            seat.wanted_at = state.now
        seat.wanted_step = message.step
        seat.told_text = ""

    def try_batch(self) -> None:
        """Grant the batch that the learner waits for, if it can be formed now."""
        state, seat = self.state, self.state.seat
        if seat.wanted_step is None or not seat.welcomed or seat.batch is not None:
            return
        if state.audits.hold_restored and not self.is_over_budget:
            return
        groups, last = self._form()
        if groups is None:
            return
        seat.batch = Batch(state.step, groups, last)
        state.granted_at = state.now
        state.wait_s.add(state.now - seat.wanted_at)
        seat.wanted_step = None
        for group in groups:
            state.book.train(group)
        self._deliver(seat.batch)
        state.expire_late()

    def _form(self) -> tuple[list[Group] | None, bool]:
        """The groups of the next batch, or None while it must wait; and whether it is last."""
        state, settings = self.state, self.state.settings
        if self.is_over_budget:
            return [], True
        if settings.late == "wait" and not hold_verdict(
            state.book.leased_by_expiry,
            train_step=state.step,
            groups_per_step=settings.groups_per_step,
        ):
            return None, False
        out = bool(state.book.queue or state.book.leased_by_expiry)
        no_more = state.stream.exhausted and not out
        if state.book.num_buffered < settings.groups_per_step and not no_more:
            return None, False
        groups: list[Group] = []
        for group in state.book.earliest_first():
            if len(groups) == settings.groups_per_step:
                break
            if state.is_admissible(group, state.step):
                groups.append(group)
        if len(groups) == settings.groups_per_step:
            return groups, no_more and state.book.num_buffered == len(groups)
        if not no_more:
            return None, False
        if settings.partial_batch == "drop":
            for group in groups:
                state.end_group(group, "cancelled", "the last, partial batch is dropped")
            return [], True
        return groups, True

    @property
    def is_over_budget(self) -> bool:
        budget = self.state.settings.budget_usd
        return budget > 0 and self.state.cost_usd >= budget

    def _deliver(self, batch: Batch) -> None:
        state, seat = self.state, self.state.seat
        if seat.peer is None:
            return
        ready = state.members.ready()
        state.send(
            seat.peer,
            BatchGranted(
                incarnation=state.lineage.incarnation,
                step=batch.step,
                loss_from_step=max(0, batch.step - state.settings.staleness_max),
                groups=tuple(group.id for group in batch.groups),
                last=batch.last,
                workers_ready=len(ready),
                groups_leased=len(state.book.leases),
                groups_buffered=state.book.num_buffered,
                groups_expired=state.ends["expired"],
                groups_failed=state.ends["failed"],
                groups_filtered=state.ends["filtered"],
                tokens_per_s=sum(worker.tokens_per_s for worker in ready),
                cost_usd=state.cost_usd,
                t_bcast_s=state.broadcasts.t_bcast_s(),
                install_pause_s=state.pause_s.mean if state.pause_s.known else None,
            ),
        )
        for group in batch.groups:
            assert group.result is not None
            state.effects.append(
                DeliverGroup(
                    seat.peer,
                    state.lineage.incarnation,
                    batch.step,
                    group.id,
                    group.task,
                    group.result,
                )
            )

    def step_completed(self, peer: PeerId, message: StepCompleted) -> None:
        if not self._is_current(peer, message.incarnation):
            return
        state, seat = self.state, self.state.seat
        if message.step < state.step:
            self._acknowledge_step(peer)
            return
        is_empty = seat.batch is not None and not seat.batch.groups
        if message.step > state.step or is_empty:
            raise RemoteProtocolError(
                f"step {message.step} was completed without its batch, v is {state.step}",
                reason="wrong_order",
            )
        different, size = len(set(message.groups)), state.settings.groups_per_step
        if different < len(message.groups) or different > size:
            raise RemoteProtocolError(
                f"step {message.step} was completed with {len(message.groups)} groups, "
                f"{different} of them different; a batch has at most {size}, each once",
                reason="wrong_batch",
            )
        compared = [each.group for each in message.mismatch]
        if len(set(compared)) < len(compared) or not set(compared) <= set(message.groups):
            raise RemoteProtocolError(
                f"step {message.step} tells the mismatch of {len(compared)} groups; they must be "
                "groups of the batch, each once",
                reason="wrong_batch",
            )
        if seat.completing is not None:
            return
        lacks = self._seat_batch(message.groups)
        if lacks:
            state.refuse(
                peer,
                "batch_lost",
                f"the learner trained {lacks} at version {state.step}, which the coordinator does "
                "not have (was its run folder restored from a copy?); start the learner again "
                "with --resume",
            )
            return
        assert seat.batch is not None
        state.audits.learner_spoke = True
        seat.mismatch = self._by_worker(seat.batch, message.mismatch)
        for worker, diff in _mean_of_each(seat.mismatch).items():
            known = state.members.get(worker)
            if known is not None:
                known.mismatch = diff
        groups = tuple(group.id for group in seat.batch.groups)
        seat.completing = state.persist(
            StepRecorded(message.incarnation, message.step, groups, state.cost_usd)
        )
        state.expire_late()  # f moved, if an earlier coordinator had granted the batch

    def _seat_batch(self, named: tuple[GroupId, ...]) -> GroupId | None:
        """Make the groups that the learner trained its batch: an earlier coordinator may have
        granted them. Returns the first that cannot have been granted; then nothing changes."""
        state, seat = self.state, self.state.seat
        mine = {} if seat.batch is None else {group.id: group for group in seat.batch.groups}
        if mine and set(mine) == set(named):
            return None
        groups = []
        for group_id in named:
            group = state.book.groups.get(group_id)
            here = group is not None and (group_id in mine or group.state in _TRAINABLE)
            if not here or group is None or not state.is_admissible(group, state.step):
                return group_id
            groups.append(group)
        for group in mine.values():
            state.book.admit(group)
        for group in groups:
            state.audits.close(group.id)
            state.book.train(group)
        seat.batch, seat.wanted_step = Batch(state.step, groups, last=False), None
        return None

    def _by_worker(
        self, batch: Batch, mismatch: Iterable[GroupMismatch]
    ) -> list[tuple[PeerId, GroupMismatch]]:
        """Who sampled a group is known here."""
        workers = {group.id: group.result.worker for group in batch.groups if group.result}
        return [(workers[each.group], each) for each in mismatch if each.group in workers]

    def step_durable(self, record_id: int) -> None:
        """v advances."""
        state, seat = self.state, self.state.seat
        if seat.completing != record_id or seat.batch is None:
            return  # a new learner took over meanwhile and began before this step
        batch, seat.batch, seat.completing = seat.batch, None, None
        for group in batch.groups:
            if group.result is not None:
                state.audits.count_trained(group.result.worker)
            state.end_group(group, "trained", "", trained_at=batch.step)
        state.history.add(batch.step, batch.groups)
        state.step = batch.step + 1
        state.tell_step(batch.step)
        if state.granted_at is not None:
            state.busy_s.add(state.now - state.granted_at)
        compared, seat.mismatch = seat.mismatch, []
        AuditDesk(state).compared(compared)
        state.expire_late()
        state.forget_versions()
        if seat.peer is not None:
            self._acknowledge_step(seat.peer)

    def _acknowledge_step(self, peer: PeerId) -> None:
        state = self.state
        state.send(peer, StepAcknowledged(incarnation=state.lineage.incarnation, step=state.step))


def _mean_of_each(compared: Iterable[tuple[PeerId, GroupMismatch]]) -> dict[PeerId, float]:
    """Mean |logprob difference| of each worker over all its tokens that were compared."""
    sums: dict[PeerId, tuple[float, int]] = {}
    for worker, each in compared:
        total, tokens = sums.get(worker, (0.0, 0))
        sums[worker] = total + each.diff_mean * each.num_tokens, tokens + each.num_tokens
    return {worker: total / tokens for worker, (total, tokens) in sums.items()}
