"""Who gets the next group: pacing is the law, lead and freshness are the preference.

A lease needs a ready worker with a free slot and a verdict of `pacing_verdict`. Among what
the law allows, the dispatcher works only `lead_steps` ahead of the next batch, prefers
workers with fresh weights, waits a moment for one that is about to install where that costs
nothing (`core/install_wait.py`), and gives a slow worker no more than it can finish before expiry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice

from echo2.core.evals import EvalLease
from echo2.core.group import Group, Lease
from echo2.core.install_wait import comes_too_late, has_time, is_short
from echo2.core.membership import Worker
from echo2.core.run_state import RunState
from echo2.core.staleness import expiry_step, pacing_verdict
from echo2.messages import LeaseGranted, TasksWanted
from echo2.types import LeaseId, Sampling, Version

INSTALL_PATIENCE = 1.5
"""How many usual times to installation a worker is waited for."""
LATENCY_FLOOR_S = 1e-3
TASKS_PATIENCE_S = 5.0
"""Tasks that did not come by then are asked for again: the request may be lost."""
STRAGGLER_RATIO = 4.0
"""A worker so many times slower than the fastest is a straggler, if it also misses expiry."""
PROBE_LATENCIES = 30.0
"""A straggler is tried again after so many of its latencies: it may have become faster."""
PACE_AGE_S = 0.5
"""Rates of the fleet change slowly; they are looked at so often, not at each event."""
GRANTS_AT_ONCE = 32
"""Groups that are granted before other events have their turn."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The fleet as measured at `at`: its fastest worker's latency, that of its slots and its mean
    deviation over its mean; its longest usual install; what the pool needs for a learner step."""

    at: float
    num_workers: int
    fastest_s: float
    latency_s: float
    deviation_share: float
    install_s: float
    pool_s: float


def lease_seed(run_seed: int, task_index: int, attempt: int) -> int:
    """Differs between tasks and attempts, the same in every run of the same seed."""
    value = run_seed
    for part in (task_index, attempt):
        value = (value * 6364136223846793005 + part + 1442695040888963407) % 2**63
    return value


class Dispatcher:
    def __init__(self, state: RunState) -> None:
        self.state = state
        self.reason = ""
        self.tasks_asked_at = 0.0
        self._pace: Pace | None = None

    # ---------------------------------------------------------------------- tasks

    def request_tasks(self) -> None:
        """Keep `tasks_ahead` batches of tasks ready, within the bound on their bytes; before all
        others those of groups that are in work without them."""
        state, settings = self.state, self.state.settings
        seat = state.seat
        if seat.peer is None or not seat.welcomed or seat.silent:
            return
        if state.now - self.tasks_asked_at > TASKS_PATIENCE_S:
            state.stream.forget_request()
        room = settings.tasks_ahead * settings.groups_per_step - len(state.book.queue)
        if state.book.queue_bytes >= settings.tasks_bytes_max:
            room = 0
        if room < 1 and not state.book.awaiting:
            return
        wanted = state.stream.request(room, state.book.awaiting)
        if wanted is not None:
            self.tasks_asked_at = state.stream.asked_at = state.now
            if state.stream.waits_since is None:
                state.stream.waits_since = state.now
            state.send(
                seat.peer,
                TasksWanted(
                    incarnation=state.lineage.incarnation, start=wanted.start, count=wanted.count
                ),
            )

    # --------------------------------------------------------------------- leases

    def dispatch(self) -> bool:
        """Grant what may be granted now, GRANTS_AT_ONCE at most, and `reason` says why it stopped.
        Whether it stopped only since those were enough at once."""
        state = self.state
        if state.lineage.newest is None:
            self.reason = "no version is published yet"
            return False
        if state.evals.evals:
            self._dispatch_evals()
        if not state.book.queue:
            self.reason = "no task is ready"
            return False
        held = state.book.num_held
        room = self.target - held
        if room < 1:
            self.reason = f"{held} groups are held, {self.target} is far enough ahead"
            return False
        self._dispatch_groups(min(room, GRANTS_AT_ONCE))
        return room > GRANTS_AT_ONCE and state.book.num_held == held + GRANTS_AT_ONCE

    def _dispatch_groups(self, room: int) -> None:
        """Round after round one group to each worker that may have one, the best first."""
        book, newest = self.state.book, self.state.lineage.newest
        if newest is None or not self._paced(newest):
            return  # then no older version is either: its groups expire earlier
        self.reason = "no ready worker has a free slot"
        able = self._able()
        first_two = list(islice(able, 2))
        others = len(first_two) > 1
        workers: Iterable[Worker] = chain(first_two, able)
        while room > 0 and book.queue:
            again = []
            for worker in workers:
                group = self._next_group(worker, others=others)
                assert worker.installed is not None
                if group is None or self._free(worker) < 1 or not self._paced(worker.installed):
                    continue
                self._grant(worker, group)
                room -= 1
                again.append(worker)
                if room < 1 or not book.queue:
                    break
            if not again:
                break
            workers = again

    def _able(self) -> Iterator[Worker]:
        """Who may have a group now, the best first. Of many with a free slot few get one: the rest
        is looked at no closer."""
        state, leases = self.state, self.state.book.leases_by_worker
        workers = [
            worker
            for worker in state.members.workers.values()
            if len(leases.get(worker.peer, ())) < worker.slots
            and worker.may_lease
            and worker.rests_until <= state.now
        ]
        workers.sort(key=lambda w: (-(w.installed or Version(0, 0)).step, w.latency_s.mean, w.peer))
        serves: dict[Version, bool] = {}
        for worker in workers:
            version = worker.installed
            assert version is not None
            if version not in serves:
                serves[version] = self._serves(version)
            if serves[version] and self._free(worker) > 0 and not self._about_to_install(worker):
                yield worker

    def _serves(self, version: Version) -> bool:
        """May anyone be granted a group under `version`?"""
        if not self.state.lineage.is_alive(version):
            self.reason = f"version {version} is served, which leads nowhere any more"
            return False
        return self._paced(version)

    def _paced(self, version: Version) -> bool:
        state, settings = self.state, self.state.settings
        verdict = pacing_verdict(
            state.book.held_by_expiry,
            new_expiry=expiry_step(version.step, staleness_max=settings.staleness_max),
            next_step=state.next_step,
            groups_per_step=settings.groups_per_step,
        )
        if not verdict:
            self.reason = verdict.reason
        return bool(verdict)

    @property
    def target(self) -> int:
        """Groups to hold: the next batch, and `lead_steps` batches more."""
        settings = self.state.settings
        lead = settings.lead_steps
        if lead is None:
            lead = self.lead_steps_auto
        return math.ceil(settings.groups_per_step * (1 + min(lead, settings.staleness_max)))

    @property
    def lead_steps_auto(self) -> float:
        """Just enough to hide what keeps a slot from delivering: group latency and install.

        By Little's law the slots hold rate x latency groups; that many beyond the next batch
        keep every slot busy. T_bcast itself hides: workers sample on until the flip.
        """
        if not self.state.busy_s.known:
            return 0.0
        pace = self._measured()
        return (pace.latency_s + pace.install_s) / max(self._step_s(pace), LATENCY_FLOOR_S)

    def _step_s(self, pace: Pace) -> float:
        """Of a learner step that nothing holds: the learner's own time, or the pool's."""
        return max(self.state.busy_s.mean, pace.pool_s)

    def _measured(self) -> Pace:
        """The fleet's rates, looked at again when they are old or workers came or went."""
        state, pace = self.state, self._pace
        num_workers = len(state.members.workers)
        if pace is None or pace.num_workers != num_workers or state.now - pace.at >= PACE_AGE_S:
            pace = self._pace = self._measure()
        return pace

    def _measure(self) -> Pace:
        state = self.state
        rate, slots, install_s, fastest_s, deviations = 0.0, 0, 0.0, math.inf, 0.0
        workers = [worker for worker in state.members.ready() if worker.latency_s.known]
        version, is_usable = None, False
        for worker in workers:
            if worker.installed is not None and worker.installed != version:
                version = worker.installed  # mostly that of the worker before
                is_usable = self.is_usable(version)
            if is_usable:
                latency_s = max(worker.latency_s.mean, LATENCY_FLOOR_S)
                rate += worker.slots / latency_s
                slots += worker.slots
                install_s = max(install_s, worker.install_s.mean)
                fastest_s = min(fastest_s, latency_s)
                deviations += worker.slots * worker.latency_s.deviation / latency_s
        return Pace(
            at=state.now,
            num_workers=len(state.members.workers),
            fastest_s=fastest_s,
            latency_s=slots / rate if rate > 0 else 0.0,
            deviation_share=deviations / max(1, slots),
            install_s=install_s,
            pool_s=state.settings.groups_per_step / rate if rate > 0 else 0.0,
        )

    @property
    def can_progress(self) -> bool:
        """Is anything in flight, or is there a worker whose version could still be trained?"""
        state = self.state
        if state.book.leases or state.evals.lease_eval:
            return True
        return any(
            worker.installed is not None and self.is_usable(worker.installed)
            for worker in state.members.ready()
        )

    def is_usable(self, version: Version) -> bool:
        """Could what `version` samples now still be trained?"""
        state = self.state
        expiry = expiry_step(version.step, staleness_max=state.settings.staleness_max)
        return expiry >= state.next_step and state.lineage.is_alive(version)

    def _free(self, worker: Worker) -> int:
        """Slots that the worker may still fill with what it can finish before expiry."""
        state = self.state
        leases = state.book.num_leases(worker.peer) + state.evals.num_leases(worker.peer)
        return self._cap(worker) - leases

    def _cap(self, worker: Worker) -> int:
        """Concurrency in proportion to the time until expiry; a straggler gets nothing but a
        probe now and then, while faster workers are here."""
        state = self.state
        latency_s = worker.latency_s.mean
        if not worker.latency_s.known or worker.installed is None or not state.busy_s.known:
            return worker.slots
        expiry = expiry_step(worker.installed.step, staleness_max=state.settings.staleness_max)
        pace = self._measured()
        until_s = max(1, expiry - state.next_step + 1) * self._step_s(pace)
        if latency_s <= until_s:
            return worker.slots
        if latency_s > STRAGGLER_RATIO * pace.fastest_s:
            return 1 if state.now - worker.leased_at > PROBE_LATENCIES * latency_s else 0
        return max(1, math.floor(worker.slots * until_s / latency_s))

    def _about_to_install(self, worker: Worker) -> bool:
        """Is it worth waiting a moment, so that the next group comes from fresh weights?"""
        state = self.state
        if worker.announced is None or worker.installed is None:
            return False
        if worker.announced <= worker.installed or not state.bcast_s.known:
            return False
        usual_s, pace = state.bcast_s.high, self._measured()
        if not state.busy_s.known or not is_short(usual_s, step_s=self._step_s(pace)):
            return False
        if not self._has_time(usual_s, pace) and not self._comes_too_late(worker, pace):
            return False
        since = state.now - state.published_at.get(worker.announced, state.now)
        return since <= INSTALL_PATIENCE * usual_s

    def _has_time(self, usual_s: float, pace: Pace) -> bool:
        state = self.state
        if state.seat.wanted_step is not None:
            return False  # the learner waits
        return has_time(
            usual_s,
            latency_s=pace.latency_s,
            train_s=state.busy_s.mean,
            pool_s=pace.pool_s,
        )

    def _comes_too_late(self, worker: Worker, pace: Pace) -> bool:
        """May what it begins now, under the version that it has, outlast its expiry?"""
        state = self.state
        assert worker.installed is not None
        expiry = expiry_step(worker.installed.step, staleness_max=state.settings.staleness_max)
        until_s = (expiry - state.next_step) * self._step_s(pace)
        if state.next_step > state.step and state.granted_at is not None:
            until_s += max(0.0, state.busy_s.mean - (state.now - state.granted_at))
        return comes_too_late(
            latency_s=worker.latency_s.mean,
            deviation_share=pace.deviation_share,
            until_s=until_s,
        )

    def _next_group(self, worker: Worker, *, others: bool) -> Group | None:
        """The first in the queue; one that this worker lost before goes to another."""
        book = self.state.book
        for group_id in book.queue:
            group = book.groups[group_id]
            if not others or group.avoid != worker.peer:
                return group
        return None

    def _grant(self, worker: Worker, group: Group) -> None:
        state, settings = self.state, self.state.settings
        assert worker.installed is not None
        group.attempts += 1
        lease = Lease(
            id=self._lease_id(),
            group=group.id,
            worker=worker.peer,
            version=worker.installed,
            granted_at=state.now,
            progressed_at=state.now,
            revoke_after_s=self._revoke_after_s(worker, settings.sampling, settings.group_size),
        )
        state.book.lease(group, lease)
        worker.leased_at = state.now
        state.emit(
            "lease_granted",
            group_id=group.id,
            lease=lease.id,
            worker=worker.peer,
            incarnation=lease.version.incarnation,
            step=lease.version.step,
            attempt=group.attempts,
            revoke_after_s=lease.revoke_after_s,
        )
        state.send(
            worker.peer,
            LeaseGranted(
                lease=lease.id,
                group=group.id,
                attempt=group.attempts,
                kind="train",
                version=lease.version,
                task=group.task,
                group_size=settings.group_size,
                sampling=settings.sampling,
                seed=lease_seed(settings.seed, group.task.index, group.attempts),
                revoke_after_s=lease.revoke_after_s,
            ),
        )

    def _revoke_after_s(self, worker: Worker, sampling: Sampling, group_size: int) -> float:
        """The cap on a lease: max_tokens at the slowest rate that was measured."""
        settings = self.state.settings
        if worker.slowest_rate is None:
            return settings.lease_max_s
        tokens = group_size * sampling.max_tokens * self.state.turns_max
        return min(settings.lease_max_s, max(settings.stall_s, tokens / worker.slowest_rate))

    def _lease_id(self) -> LeaseId:
        state = self.state
        lease = LeaseId(f"l{state.settings.life}.{state.next_lease}")
        state.next_lease += 1
        return lease

    # ---------------------------------------------------------------------- evals

    def _dispatch_evals(self) -> None:
        """Evals go first, to workers that serve the very version."""
        state, settings = self.state, self.state.settings
        versions = state.evals.pending_versions()
        if not versions:
            return
        for worker in state.members.ready():
            if worker.installed not in versions or worker.rests_until > state.now:
                continue
            assert worker.installed is not None
            leases = state.book.num_leases(worker.peer) + state.evals.num_leases(worker.peer)
            for _ in range(worker.slots - leases):
                found = state.evals.next_for(worker.installed)
                if found is None:
                    break
                task = found.pending.popleft()
                lease = EvalLease(
                    id=self._lease_id(),
                    eval_id=found.request.eval_id,
                    task=task,
                    worker=worker.peer,
                    granted_at=state.now,
                    progressed_at=state.now,
                )
                state.evals.grant(found, lease)
                state.send(
                    worker.peer,
                    LeaseGranted(
                        lease=lease.id,
                        group=f"e{found.request.eval_id}-{task.index}"[:64],  # type: ignore[arg-type]
                        attempt=found.attempts.get(task.index, 0) + 1,
                        kind="eval",
                        version=found.version,
                        task=task,
                        group_size=found.request.group_size,
                        sampling=found.request.sampling,
                        seed=lease_seed(settings.seed, task.index, 0),
                        revoke_after_s=settings.lease_max_s,
                        hold_s=settings.eval_hold_s,
                    ),
                )
