"""What a worker does with an order to audit."""

from __future__ import annotations

from typing import Any

from test_worker import V, Worker, a_lease, a_result, a_welcome, announced

from echo2.core import worker_audits
from echo2.core import worker_events as events
from echo2.core.worker_events import AuditEnded, StartAudit
from echo2.messages import AuditDone, AuditFailed, AuditOrdered
from echo2.types import GroupId, LeaseId, Sampling, Task


def an_order(name: str = "l9") -> AuditOrdered:
    result = a_result(name)
    return AuditOrdered(
        lease=LeaseId(name),
        group=GroupId(f"g-{name}"),
        task=Task(0, "{}"),
        sampling=Sampling(),
        trajectories=result.trajectories,
        token_ids=result.token_ids,
        loss_mask=result.loss_mask,
    )


def a_done(name: str = "l9") -> AuditDone:
    return AuditDone(lease=LeaseId(name), group=GroupId(f"g-{name}"), rewards=(1.0,))


def said(worker: Worker) -> list[Any]:
    kinds = (AuditDone, AuditFailed)
    return [
        effect.message
        for effect in worker.effects
        if isinstance(effect, events.Send) and isinstance(effect.message, kinds)
    ]


def started(worker: Worker) -> list[AuditOrdered]:
    return [effect.order for effect in worker.effects if isinstance(effect, StartAudit)]


def an_auditor(**settings: Any) -> Worker:
    return Worker(**{"replays": True, **settings}).ready()


def test_an_order_is_played_and_its_answer_sent() -> None:
    worker = an_auditor()
    worker.on(an_order())
    assert started(worker) == [an_order()]
    worker.on(AuditEnded(a_done()))
    assert said(worker) == [a_done()]


def test_an_order_that_comes_twice_is_played_once_and_after_its_answer_again() -> None:
    worker = an_auditor()
    worker.on(an_order())
    worker.on(an_order())
    assert not started(worker)
    worker.on(AuditEnded(a_done()))
    worker.on(an_order())
    assert started(worker) == [an_order()]


def test_a_worker_that_cannot_audit_says_so() -> None:
    worker = an_auditor(replays=False)
    worker.on(an_order())
    assert "environment 'addition' cannot be played again" in said(worker)[0].text
    worker = an_auditor()
    worker.on(a_lease())
    worker.on(events.DrainRequested("SIGTERM"))
    worker.on(an_order())
    assert "this worker leaves: SIGTERM" in said(worker)[0].text


def test_without_a_version_nothing_is_played() -> None:
    worker = Worker(replays=True)
    worker.on(events.Started())
    worker.on(events.ConnectionRestored())
    worker.on(a_welcome())
    worker.on(an_order())
    assert "no version is installed" in said(worker)[0].text


def test_orders_in_work_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(worker_audits, "AUDITS_MAX", 2)
    worker = an_auditor()
    for name in ("l1", "l2", "l3"):
        worker.on(an_order(name))
    assert "2 audits are in work" in said(worker)[0].text


def test_without_a_session_an_answer_is_dropped_for_it_is_asked_again() -> None:
    worker = an_auditor()
    worker.on(an_order())
    worker.on(events.ConnectionLost("cut"))
    worker.on(AuditEnded(a_done()))
    assert not said(worker)
    worker.on(events.ConnectionRestored())
    worker.on(an_order())
    assert not started(worker)  # before the welcome
    worker.on(a_welcome())
    worker.on(announced(V[0]))
    worker.on(an_order())
    assert started(worker) == [an_order()]
