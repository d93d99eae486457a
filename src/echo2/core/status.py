"""The coordinator's state as plain values: what `/api/status` and `echo2 status` show."""

from __future__ import annotations

from typing import Any

from echo2.core.buffer import buffered_by_version
from echo2.core.run_state import RunState
from echo2.core.waits import waits


def status(state: RunState, dispatch_reason: str) -> dict[str, Any]:
    """JSON-able; times in seconds, rates in tokens/s, money in dollars."""
    seat, newest = state.seat, state.lineage.newest
    learner = None
    if seat.peer is not None:
        learner = {
            "name": seat.peer,
            "state": "silent" if seat.silent else seat.text or "joining",
            "silent_s": round(state.now - seat.heard_at, 3),
        }
    ready = state.members.ready()
    return {
        "run_id": state.settings.run_id,
        "step": state.step,
        "incarnation": state.lineage.incarnation,
        "state": _run_state(state),
        "learner": learner,
        "workers": [
            {
                "name": worker.peer,
                "state": worker.state_name,
                "engine": worker.engine,
                "version": str(worker.installed) if worker.installed is not None else None,
                "slots": worker.slots,
                "leases": state.book.num_leases(worker.peer)
                + len(state.evals.leases_of(worker.peer)),
                "tokens_per_s": round(worker.tokens_per_s, 1),
                "mismatch": worker.mismatch,
                "price_usd_per_h": worker.price_usd_per_h,
                "silent_s": round(state.now - worker.heard_at, 3),
                "latency_s": round(worker.latency_s.mean, 3),
                "install_s": round(worker.install_s.mean, 3),
            }
            for worker in state.members.workers.values()
        ],
        "buffer": {
            "total": state.book.num_buffered,
            "max": state.settings.buffer_max,
            "by_version": {str(v): n for v, n in buffered_by_version(state.book).items()},
        },
        "leases": len(state.book.leases),
        "queue": len(state.book.queue),
        "groups": {
            end: state.ends[end]
            for end in ("trained", "expired", "failed", "filtered", "cancelled")
        },
        "versions": {
            "published": str(newest) if newest is not None else None,
            "digest": state.lineage.published[newest] if newest is not None else None,
            "bcast_s": round(state.bcast_s.mean, 3) if state.bcast_s.known else None,
        },
        "waits": waits(state, dispatch_reason),
        "cost_usd": round(state.cost_usd, 6),
        "tokens_per_s": round(sum(worker.tokens_per_s for worker in ready), 1),
    }


def _run_state(state: RunState) -> str:
    if state.finished is not None:
        return "finished" if state.finished.finished else "stopped"
    if state.seat.peer is None:
        return "no learner"
    if state.seat.silent:
        return "learner silent"
    if state.seat.batch is not None:
        return "training"
    return "waiting" if state.seat.wanted_step is not None else "learner busy"
