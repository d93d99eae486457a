"""From durable to trainable: what ends unused, what waits for an audit, what may be trained."""

from __future__ import annotations

from echo2.core.audits import is_chosen
from echo2.core.group import Group, GroupState
from echo2.core.run_state import RunState


def settle(state: RunState, group: Group) -> None:
    """A group whose result is durable goes where it belongs: its end, an audit, the buffer."""
    if not state.is_admissible(group, state.next_step):
        _expire(state, group)
    elif group.audited or not is_chosen(
        group.id, run_id=state.settings.run_id, audit=state.settings.audit
    ):
        admit(state, group)
    else:
        await_audit(state, group)


def await_audit(state: RunState, group: Group) -> None:
    result = group.result
    assert result is not None
    state.book.await_audit(group)
    state.audits.begin(group, state.now)
    state.emit("audit_opened", group_id=group.id, lease=result.lease, worker=result.worker)


def admit(state: RunState, group: Group) -> None:
    """Nothing speaks against the result: into the buffer, unless it is too old or says nothing."""
    result = group.result
    assert result is not None
    group.audited = True
    if not state.is_admissible(group, state.next_step):
        _expire(state, group)
    elif state.settings.filter_zero_variance and not result.has_reward_variance:
        state.end_group(group, "filtered", "all rewards of the group are equal")
    elif group.state is not GroupState.BUFFERED:
        state.book.admit(group)
        state.failed_in_row = 0


def _expire(state: RunState, group: Group) -> None:
    state.end_group(group, "expired", state.expired_reason(group, state.next_step))
