"""What a worker was asked to audit. An order is answered once for each time that it comes.

Nothing is kept for a later session: the coordinator orders again what was not answered.
"""

from __future__ import annotations

from typing import Final

from echo2.core.worker_events import Effect, Log, Send, StartAudit
from echo2.messages import AuditDone, AuditFailed, AuditOrdered
from echo2.types import LeaseId

AUDITS_MAX: Final = 64
"""In work at once; a coordinator orders fewer."""


class Audits:
    """`live`: being played again."""

    def __init__(self) -> None:
        self.live: set[LeaseId] = set()

    def ordered(self, order: AuditOrdered, *, problem: str) -> list[Effect]:
        """`problem`: why this worker cannot audit now; "" when it can."""
        if order.lease in self.live:
            return [Log("debug", "audit_repeated", {"lease": order.lease})]
        if not problem and len(self.live) >= AUDITS_MAX:
            problem = f"{AUDITS_MAX} audits are in work, the most at once"
        if problem:
            return [Send(AuditFailed(lease=order.lease, group=order.group, text=problem[:2048]))]
        self.live.add(order.lease)
        return [StartAudit(order)]

    def ended(self, answer: AuditDone | AuditFailed, *, welcomed: bool) -> list[Effect]:
        self.live.discard(answer.lease)
        return [Send(answer)] if welcomed else []
