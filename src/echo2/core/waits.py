"""Who waits for what: the sentences that the watchdog, the learner and the status show."""

from __future__ import annotations

from echo2.core.run_state import RunState


def waiting_text(state: RunState, dispatch_reason: str) -> str:
    """Why the learner has no batch, e.g. "step 41 waits for groups: 12 of 16 admissible;
    9 in flight at 3 workers; slowest lease 83 s on w-2"."""
    book, settings = state.book, state.settings
    admissible = sum(1 for group in book.earliest_first() if state.is_admissible(group, state.step))
    parts = [
        f"step {state.step} waits for groups: {admissible} of "
        f"{settings.groups_per_step} admissible",
        f"{len(book.leases)} in flight at {len(book.leases_by_worker)} workers",
    ]
    audits = list(state.audits.open.values())
    if audits:
        oldest = min(audits, key=lambda audit: audit.since)
        at = oldest.auditor or "nobody yet"
        age_s = _rounded(state.now - oldest.since)
        parts.append(f"{len(audits)} wait for their audit, the oldest {age_s} s, asked: {at}")
    if book.leases:
        slowest = min(book.leases.values(), key=lambda lease: lease.granted_at)
        age_s = _rounded(state.now - slowest.granted_at)
        parts.append(f"slowest lease {age_s} s on {slowest.worker}")
    elif dispatch_reason:
        parts.append(dispatch_reason)
    return "; ".join(parts)


def waits(state: RunState, dispatch_reason: str) -> list[str]:
    """Every wait of the coordinator, each with its owner and cause."""
    seat, found = state.seat, []
    if seat.peer is None:
        found.append(f"the run waits for a learner since {state.now - seat.vacant_since:.0f} s")
    elif seat.silent:
        found.append(f"learner {seat.peer} is silent since {state.now - seat.heard_at:.0f} s")
    elif seat.wanted_step is not None:
        found.append(waiting_text(state, dispatch_reason))
    for running in state.evals.evals.values():
        found.append(
            f"eval {running.request.eval_id} of version {running.version}: "
            f"{len(running.rewards)} of {len(running.request.tasks)} done, "
            f"{len(running.leases)} in flight"
        )
    for peer, quarantine in state.audits.quarantined.items():
        found.append(f"worker {peer} is quarantined since step {quarantine.step}")
    for worker in state.members.workers.values():
        if worker.suspect:
            found.append(
                f"worker {worker.peer} is silent since {state.now - worker.heard_at:.0f} s"
            )
        elif worker.installed is None:
            found.append(
                f"worker {worker.peer} has no version yet, it joined "
                f"{state.now - worker.joined_at:.0f} s ago"
            )
    return found


def _rounded(age_s: float) -> int:
    """Whole seconds, from ten on whole tens: a sentence that changes is told anew."""
    return int(age_s) if age_s < 10 else int(age_s) // 10 * 10
