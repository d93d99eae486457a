"""What the coordinator wants done: the outputs of `CoordinatorState.handle`.

A shell carries them out in order and knows nothing of their meaning.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from echo2.core.group import StoredResult
from echo2.core.records import Record
from echo2.messages import AuditOrdered, GroupResult, Message
from echo2.types import GroupId, PeerId, Sampling, Task


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message; its lane is the message's own. Loss is allowed: peers ask again."""

    peer: PeerId
    message: Message


@dataclass(frozen=True, slots=True)
class DeliverGroup:
    """Send one group of a granted batch to the learner, with the frames of its payload; from the
    ledger, where the result is without."""

    peer: PeerId
    incarnation: int
    step: int
    group: GroupId
    task: Task
    result: StoredResult


@dataclass(frozen=True, slots=True)
class OrderAudit:
    """Have `peer` recompute the rewards of a group: AuditOrdered, with its payload's frames; from
    the ledger, where the result is without."""

    peer: PeerId
    group: GroupId
    task: Task
    result: StoredResult
    sampling: Sampling

    def message(self, payload: object) -> AuditOrdered:
        assert isinstance(payload, GroupResult)
        return AuditOrdered(
            lease=self.result.lease,
            group=self.group,
            task=self.task,
            sampling=self.sampling,
            trajectories=self.result.trajectories,
            token_ids=payload.token_ids,
            loss_mask=payload.loss_mask,
        )


@dataclass(frozen=True, slots=True)
class Persist:
    """Make the record durable, then answer with `Persisted(record_id)`."""

    record_id: int
    record: Record


@dataclass(frozen=True, slots=True)
class Emit:
    """Write one line of events.jsonl and log it."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProbeRelay:
    """Find out whether `endpoint` accepts connections, then answer with `RelayProbed`."""

    peer: PeerId
    endpoint: str


@dataclass(frozen=True, slots=True)
class StartMachine:
    """Start a machine of the offer, whose worker is called `worker`; `MachineChanged` follows."""

    worker: PeerId
    offer: str


@dataclass(frozen=True, slots=True)
class StopMachine:
    """Stop it, until it is stopped; `MachineChanged` follows."""

    worker: PeerId


@dataclass(frozen=True, slots=True)
class Finish:
    """The coordinator's work is over: flush, then end. `ok` False is an error."""

    ok: bool
    finished: bool
    reason: str


Effect = (
    Send
    | DeliverGroup
    | OrderAudit
    | Persist
    | Emit
    | ProbeRelay
    | StartMachine
    | StopMachine
    | Finish
)
