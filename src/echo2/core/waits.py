"""Who waits for what, since when, and what ends it: read by the watchdog, the learner, the status.

Every wait of the coordinator is in the list of `waits`, with an owner that ends it at its deadline.
The sentences hold no ages, so that one that differs is another cause.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from echo2.core.dispatch import TASKS_PATIENCE_S
from echo2.core.group import Lease
from echo2.core.run_state import RunState
from echo2.types import PeerId

NAMED_MAX = 8
"""Most peers that one sentence names."""
QUIET_SHARE = 4
"""A lease is told of when it made no token for this part of what is allowed."""


@dataclass(frozen=True, slots=True)
class Wait:
    """`key` stays the same while it lasts. `owner` ends it at `deadline`, by what `then` says; a
    deadline of None is that of another wait in the list, or the owner's own. Times as `now`."""

    key: str
    owner: str
    text: str
    since: float
    deadline: float | None
    then: str


def waits(state: RunState, dispatch_reason: str) -> list[Wait]:
    """Every wait of the coordinator and of the peers that it hears of."""
    return [
        *_of_the_learner(state, dispatch_reason),
        *_of_evals(state),
        *_of_audits(state),
        *_of_the_disk(state),
        *_of_workers(state),
        *_of_leases(state),
        *_of_the_version(state),
    ]


def waiting_text(state: RunState, dispatch_reason: str, *, ages: bool = True) -> str:
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
        age = f", the oldest {_rounded(state.now - oldest.since)} s" if ages else ""
        parts.append(f"{len(audits)} wait for their audit{age}, asked: {at}")
    if book.leases:
        slowest = _slowest(state)
        age = f" {_rounded(state.now - slowest.granted_at)} s" if ages else ""
        parts.append(f"slowest lease{age} on {slowest.worker}")
    elif dispatch_reason:
        parts.append(dispatch_reason)
    return "; ".join(parts)


def _of_the_learner(state: RunState, dispatch_reason: str) -> Iterator[Wait]:
    seat, settings = state.seat, state.settings
    if seat.peer is None or seat.silent:
        since = seat.vacant_since
        text = "the run waits for a learner"
        if seat.peer is not None:
            text = f"learner {seat.peer} is silent"
        ends_at = since + settings.learner_timeout_s
        yield Wait("learner", "coordinator", text, since, ends_at, "the run ends with code 1")
    elif seat.wanted_step is not None:
        text = waiting_text(state, dispatch_reason, ages=False)
        yield Wait("batch", "coordinator", text, seat.wanted_at, *_batch_ends(state))
    asked = state.stream.outstanding
    if asked is not None and seat.peer is not None:
        text = f"the coordinator waits for {asked.count} tasks from g{asked.start} on"
        asked_at, first_at = state.stream.asked_at, state.stream.waits_since
        since = asked_at if first_at is None else first_at
        again_at = asked_at + TASKS_PATIENCE_S
        owner = f"learner {seat.peer}"
        yield Wait("tasks", owner, text, since, again_at, "they are asked for again")


def _batch_ends(state: RunState) -> tuple[float | None, str]:
    if state.no_worker_since is not None:
        deadline = state.no_worker_since + state.settings.no_worker_timeout_s
        return deadline, "the run ends with code 1"
    if state.book.leases:
        slowest = _slowest(state)
        return _ends_at(state, slowest), f"its lease on {slowest.worker} is given to another"
    return None, "as soon as a worker has work"


def _of_evals(state: RunState) -> Iterator[Wait]:
    for eval_id, running in state.evals.evals.items():
        text = (
            f"eval {eval_id} of version {running.version}: {len(running.rewards)} of "
            f"{len(running.request.tasks)} done, {len(running.leases)} in flight"
        )
        ends = [
            min(
                lease.progressed_at + state.settings.stall_s,
                lease.granted_at + state.settings.lease_max_s,
            )
            for lease in running.leases.values()
        ]
        deadline, then = min(ends, default=None), "its slowest lease is given to another"
        if deadline is None and state.no_worker_since is not None:
            deadline = state.no_worker_since + state.settings.no_worker_timeout_s
            then = "the run ends with code 1"
        yield Wait(f"eval {eval_id}", "coordinator", text, running.begun_at, deadline, then)


def _of_audits(state: RunState) -> Iterator[Wait]:
    audits = list(state.audits.open.values())
    if audits:
        oldest = min(audits, key=lambda audit: audit.since)
        text = f"{len(audits)} groups wait for their audit by {oldest.auditor or 'nobody yet'}"
        deadline = oldest.since + state.settings.audit.wait_s
        then = "the oldest is trained without it"
        yield Wait("audits", "coordinator", text, oldest.since, deadline, then)


def _of_the_disk(state: RunState) -> Iterator[Wait]:
    since = state.recording_since
    if since is not None:
        text = "what was delivered or trained waits for the disk of the run folder"
        deadline = since + state.settings.disk_timeout_s
        yield Wait("disk", "ledger", text, since, deadline, "the run ends with code 1")


def _of_workers(state: RunState) -> Iterator[Wait]:
    for worker in state.members.workers.values():
        if worker.suspect:
            deadline = worker.heard_at + state.settings.gone_s
            yield Wait(
                f"worker {worker.peer}",
                "coordinator",
                f"worker {worker.peer} is silent",
                worker.heard_at,
                deadline,
                "its leases are given to others",
            )
        elif worker.installed is None:
            text = f"worker {worker.peer} has no version yet"
            again = state.announced_again_at(worker) if state.lineage.newest is not None else None
            yield Wait(
                f"worker {worker.peer}",
                f"worker {worker.peer}",
                text,
                worker.joined_at,
                again,
                "waits for the first version" if again is None else "it is told of it again",
            )


def _of_leases(state: RunState) -> Iterator[Wait]:
    """Those without news, by worker: of a restart before which it had them, or stalled."""
    settings, members = state.settings, state.members.workers
    quiet: defaultdict[PeerId, list[Lease]] = defaultdict(list)
    for lease in state.book.leases.values():
        away = lease.worker not in members
        idle_s = state.now - lease.progressed_at
        if away or idle_s > settings.stall_s / QUIET_SHARE:
            quiet[lease.worker].append(lease)
    for peer, leases in quiet.items():
        since = min(lease.progressed_at for lease in leases)
        if peer in members:
            text = f"worker {peer} makes no token for {len(leases)} of its leases"
            deadline = min(_ends_at(state, lease) for lease in leases)
        else:
            text = f"worker {peer}, which has {len(leases)} leases, did not come back yet"
            deadline = min(lease.granted_at for lease in leases) + settings.gone_s
        then = "they are given to others"
        yield Wait(f"leases {peer}", "coordinator", text, since, deadline, then)


def _of_the_version(state: RunState) -> Iterator[Wait]:
    newest = state.lineage.newest
    if newest is None or newest not in state.announcements:
        return
    behind = [
        worker
        for worker in state.members.workers.values()
        if worker.installed is not None and worker.installed < newest and not worker.suspect
    ]
    if not behind:
        return
    named = ", ".join(worker.peer for worker in behind[:NAMED_MAX])
    more = f" and {len(behind) - NAMED_MAX} more" if len(behind) > NAMED_MAX else ""
    since = state.published_at.get(newest, min(worker.announced_at for worker in behind))
    yield Wait(
        f"version {newest}",
        "workers",
        f"version {newest} is not installed by {named}{more}",
        since,
        min(state.announced_again_at(worker) for worker in behind),
        "they are told of it again",
    )


def _slowest(state: RunState) -> Lease:
    return min(state.book.leases.values(), key=lambda lease: lease.granted_at)


def _ends_at(state: RunState, lease: Lease) -> float:
    stalled = lease.progressed_at + state.settings.stall_s
    return min(stalled, lease.granted_at + lease.revoke_after_s)


def _rounded(age_s: float) -> int:
    """Whole seconds, from ten on whole tens: a sentence that changes is told anew."""
    return int(age_s) if age_s < 10 else int(age_s) // 10 * 10
