"""The coordinator's state as plain values: what `/api/status` and `echo2 status` show."""

from __future__ import annotations

from typing import Any

from echo2.core.broadcast import QUANTILES, Broadcast
from echo2.core.buffer import buffered_by_version
from echo2.core.membership import Worker
from echo2.core.money import usd_per_1000
from echo2.core.run_state import RunState
from echo2.core.waits import waits
from echo2.core.watchdog import wait_fields


def status(state: RunState, dispatch_reason: str) -> dict[str, Any]:
    """JSON-able; times in seconds, rates in tokens/s and Mbit/s, money in dollars."""
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
                "active": worker.active,
                "engine": worker.engine,
                "version": str(worker.installed) if worker.installed is not None else None,
                "slots": worker.slots,
                "leases": state.book.num_leases(worker.peer)
                + len(state.evals.leases_of(worker.peer)),
                "tokens_per_s": round(worker.tokens_per_s, 1),
                "mismatch": worker.mismatch,
                "price_usd_per_h": worker.price_usd_per_h,
                "cost_usd": round(worker.cost_usd, 6),
                "usd_per_1000_rollouts": _rounded(usd_per_1000(worker), 6),
                "silent_s": round(state.now - worker.heard_at, 3),
                "latency_s": round(worker.latency_s.mean, 3),
                "install_s": round(worker.install_s.mean, 3),
                "relay": _relay(state, worker),
                "fetch": _fetch(state, worker),
            }
            for worker in state.members.workers.values()
        ],
        "buffer": {
            "total": state.book.num_buffered,
            "max": state.settings.buffer_max,
            "by_version": {str(v): n for v, n in buffered_by_version(state.book).items()},
        },
        "quarantined": {
            peer: {"cause": found.cause, "reason": found.reason, "step": found.step}
            for peer, found in state.audits.quarantined.items()
        },
        "audits": {
            "open": len(state.audits.open),
            **{v: state.audits.verdicts[v] for v in ("confirmed", "refuted", "unaudited")},
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
        "links": _links(state),
        "broadcasts": [_broadcast(found) for found in state.broadcasts.broadcasts.values()],
        "install_pause_s": round(state.pause_s.mean, 6) if state.pause_s.known else None,
        "origin_mbit": _rounded(state.relays.origin_mbit),
        "waits": [wait_fields(wait, state.now) for wait in waits(state, dispatch_reason)],
        "cost_usd": round(state.cost_usd, 6),
        "activation": _activation(state),
        "tokens_per_s": round(sum(worker.tokens_per_s for worker in ready), 1),
    }


def _activation(state: RunState) -> dict[str, Any] | None:
    """The latest decision and the machines; None where there is nothing to decide."""
    activation = state.activation
    if not activation.is_on:
        return None
    workers = state.members.workers.values()
    return {
        "policy": activation.terms.policy,
        "decision": activation.reason,
        "wanted_groups_per_s": _rounded(activation.wanted_rate),
        "boost": round(activation.boost, 3),
        "active": sum(worker.active for worker in workers),
        "standby": sum(not worker.active for worker in workers),
        "machines": [
            {
                "worker": machine.worker,
                "offer": machine.offer,
                "state": machine.state_name,
                "text": machine.text,
            }
            for machine in (activation.machines or {}).values()
        ],
        "lead_s": {
            name: round(record.lead_s.mean, 3)
            for name, record in activation.records.items()
            if record.lead_s.known
        },
    }


def _relay(state: RunState, worker: Worker) -> dict[str, Any] | None:
    """None for a worker that has no relay."""
    relays = state.relays
    if not relays.has_relay(worker):
        return None
    standing = relays.standing(worker.peer)
    forwards = relays.forward_verdict(worker, state.now)
    return {
        "endpoint": worker.relay_endpoint,
        "accepts": standing.accepts,
        "forwards": forwards.ok,
        "reason": forwards.reason or standing.reason,
        "up_mbit": _rounded(relays.up_mbit(worker)),
        "down_mbit": _rounded(relays.down_mbit(worker)),
        "rtt_s": _rounded(standing.rtt_s),
        "reports_ignored": standing.reports_ignored,
    }


def _fetch(state: RunState, worker: Worker) -> dict[str, Any] | None:
    """How far the worker's latest fetch is; None before the first."""
    fetch = state.relays.rates.host(worker.peer).fetch
    if fetch is None:
        return None
    return {
        "digest": fetch.digest,
        "missing": fetch.num_missing,
        "chunks": fetch.num_chunks,
        "seconds": round(fetch.seconds, 3),
    }


def _links(state: RunState) -> list[dict[str, Any]]:
    """What came over each link, in the latest fetch of its receiver."""
    found = []
    for peer in state.members.workers:
        fetch = state.relays.rates.host(peer).fetch
        for link in fetch.links.values() if fetch is not None else ():
            found.append(
                {
                    "from": link.peer,
                    "to": peer,
                    "mbit": _rounded(link.num_bytes * 8 / 1e6 / max(link.seconds, 1e-3)),
                    "bytes": link.num_bytes,
                    "seconds": round(link.seconds, 3),
                    "faults": link.num_faults,
                }
            )
    return found


def _broadcast(found: Broadcast) -> dict[str, Any]:
    """T_bcast at each share q that was reached, null for the others."""
    return {
        "version": str(found.version),
        "workers": found.num_workers,
        "installed": len(found.installations),
        **{f"t{q * 100:.0f}_s": _rounded(found.t_bcast_s(q)) for q in QUANTILES},
        "fetch_share": _rounded(found.fetch_share),
        "install_share": _rounded(found.install_share),
        "predicted_s": _rounded(found.predicted_s),
        "bound_s": _rounded(found.bound_s),
    }


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)


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
