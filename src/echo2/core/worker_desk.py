"""What workers tell the coordinator: hellos, heartbeats, installs, results, failures.

Each handler first checks the message against what is known and raises RemoteProtocolError
before anything changes; then it changes the state and leaves effects.
"""

from __future__ import annotations

from itertools import islice

from echo2.core.admission import settle
from echo2.core.audits import Quarantine
from echo2.core.group import Group, GroupState, StoredResult
from echo2.core.membership import Worker, WorkerState
from echo2.core.money import count_result
from echo2.core.records import GroupStored
from echo2.core.relay_desk import RelayDesk
from echo2.core.run_state import RunState
from echo2.core.staleness import ALLOWED, Verdict, expiry_step, pacing_verdict
from echo2.errors import RemoteProtocolError
from echo2.messages import (
    PROTOCOL,
    Draining,
    Goodbye,
    GroupAcknowledged,
    GroupResult,
    Heartbeat,
    HeartbeatEcho,
    InstallFailed,
    LeaseFailed,
    LeaseRevoked,
    VersionInstalled,
    WorkerHello,
    WorkerWelcome,
)
from echo2.types import PeerId

REST_S = 1.0
"""A worker that could not work on a lease gets no other one for so long."""
REVOKED_PER_HEARTBEAT_MAX = 64
"""Leases of one heartbeat that the worker is told are given up; the next heartbeat tells of
more. Else one message of a few kilobytes would be answered with thousands."""


def quarantined_text(peer: PeerId, quarantine: Quarantine) -> str:
    """Why the hello of `peer` is refused, and what lifts it."""
    return (
        f"{peer} is quarantined since step {quarantine.step}: {quarantine.reason}; the operator of "
        f"the run can lift it: echo2 keys pardon {peer} --run-dir RUN_DIR"
    )


class WorkerDesk:
    def __init__(self, state: RunState) -> None:
        self.state = state
        self.relays = RelayDesk(state)

    # --------------------------------------------------------------- coming, going

    def hello(self, peer: PeerId, hello: WorkerHello) -> None:
        state, settings = self.state, self.state.settings
        refusal = self._refusal(peer, hello) or self.relays.refusal(peer, hello)
        if refusal is not None:
            state.refuse(peer, *refusal)
            return
        known = state.members.get(peer)
        if known is None and len(state.members.workers) >= state.members.workers_max:
            state.refuse(
                peer, "full", f"{state.members.workers_max} workers are here, the most allowed"
            )
            return
        worker = Worker(
            peer=peer,
            engine=hello.engine,
            precision=hello.precision,
            on_update=hello.on_update,
            slots=hello.slots,
            price_usd_per_h=hello.price_usd_per_h,
            standby_usd_per_h=hello.standby_usd_per_h,
            environment_version=hello.environment_version,
            joined_at=state.now,
            heard_at=state.now,
            relay_endpoint=hello.relay_endpoint,
            relay_key=hello.relay_key,
            uplink_mbit=hello.uplink_mbit,
            downlink_mbit=hello.downlink_mbit,
            stored=hello.stored,
            replays=hello.replays,
        )
        if known is not None:
            worker.latency_s, worker.install_s = known.latency_s, known.install_s
            worker.slowest_rate, worker.mismatch = known.slowest_rate, known.mismatch
            worker.cost_usd, worker.num_trajectories = known.cost_usd, known.num_trajectories
            worker.active, worker.fetched = known.active, known.fetched
        elif not state.activation.joins_active(peer):
            worker.active = False
        if hello.installed is not None and hello.installed in state.lineage.published:
            worker.installed = hello.installed
            worker.state = WorkerState.READY
        state.members.workers[peer] = worker
        held = set(hello.held)
        alive = []
        for lease in state.book.leases_of(peer):
            if lease.id in held and worker.installed is not None:
                lease.progressed_at = state.now
                alive.append(lease.id)
            else:
                state.lose_lease(lease, f"{peer} came back without it", counted=True, tell=False)
        for eval_lease in state.evals.leases_of(peer):
            if eval_lease.id in held:
                eval_lease.progressed_at = state.now
                alive.append(eval_lease.id)
            else:
                state.evals.give_back(eval_lease.id, f"{peer} came back without it")
        newest = state.lineage.newest
        published = state.announcements.get(newest) if newest is not None else None
        state.send(
            peer,
            WorkerWelcome(
                protocol=PROTOCOL,
                run_id=settings.run_id,
                worker=peer,
                heartbeat_interval_s=settings.heartbeat_interval_s,
                silence_max_s=settings.gone_s,
                environment=settings.environment,
                settings=settings.environment_settings,
                assets_digest=published.assets_digest if published else "",
                origin=published.origin if published else "",
                origin_key=published.origin_key if published else "",
                alive=tuple(alive),
            ),
        )
        if known is None:
            state.emit(
                "worker_joined",
                worker=peer,
                engine=hello.engine,
                precision=hello.precision,
                slots=hello.slots,
            )
            if not worker.active:
                state.emit("worker_released", worker=peer, reason="came while enough are active")
        state.audits.auditor_left(peer)  # what it was asked before may be lost
        self.relays.joined(worker, was_here=known is not None)
        behind = newest is not None and (worker.installed is None or worker.installed < newest)
        if newest is not None and published is not None and behind:
            state.announce(newest, [peer])

    def _refusal(self, peer: PeerId, hello: WorkerHello) -> tuple[str, str] | None:
        settings = self.state.settings
        quarantine = self.state.audits.quarantined.get(peer)
        if quarantine is not None:
            return ("quarantined", quarantined_text(peer, quarantine))
        if hello.protocol != PROTOCOL:
            return (
                "protocol",
                f"this coordinator speaks protocol {PROTOCOL}, the worker (echo2 "
                f"{hello.echo2_version}) speaks {hello.protocol}; install the same echo2 on both",
            )
        if hello.run_id and hello.run_id != settings.run_id:
            return ("run", f"this is run {settings.run_id}, the worker belongs to {hello.run_id}")
        if hello.environment != settings.environment:
            return (
                "environment",
                f"this run's environment is {settings.environment!r}, the worker has "
                f"{hello.environment!r}; give it the run's configuration",
            )
        return self.environment_refusal(hello.environment_version)

    def environment_refusal(self, version: str) -> tuple[str, str] | None:
        """A worker must have the learner's version of the environment's package."""
        wanted = self.state.environment_version
        if wanted and version and version != wanted:
            return (
                "environment_version",
                f"environment {self.state.settings.environment!r}: the learner has version "
                f"{wanted}, the worker {version}; pip install the package at {wanted}",
            )
        return None

    def draining(self, peer: PeerId, message: Draining) -> None:
        worker = self._member(peer)
        worker.state = WorkerState.DRAINING
        self.state.emit("worker_draining", worker=peer, reason=message.reason)

    def goodbye(self, peer: PeerId, message: Goodbye) -> None:
        self._member(peer)
        self.leave(peer, message.reason)

    def leave(self, peer: PeerId, reason: str, *, counted: bool = True) -> None:
        """The worker is gone: its leases go to others, and are `counted` as attempts."""
        state = self.state
        del state.members.workers[peer]
        self.relays.left(peer)
        state.audits.auditor_left(peer)
        for lease in state.book.leases_of(peer):
            state.lose_lease(lease, f"{peer} is gone: {reason}", counted=counted, tell=False)
        for eval_lease in state.evals.leases_of(peer):
            state.evals.give_back(eval_lease.id, f"{peer} is gone: {reason}")
        state.emit("worker_gone", worker=peer, reason=reason)

    def heartbeat(self, peer: PeerId, message: Heartbeat) -> None:
        worker = self._member(peer)
        worker.tokens_per_s = message.tokens_per_s
        for lease in self.state.book.leases_of(peer):
            tokens = message.lease_tokens.get(lease.id, 0)
            if tokens > lease.tokens:
                lease.tokens, lease.progressed_at = tokens, self.state.now
        for eval_lease in self.state.evals.leases_of(peer):
            tokens = message.lease_tokens.get(eval_lease.id, 0)
            if tokens > eval_lease.tokens:
                eval_lease.tokens, eval_lease.progressed_at = tokens, self.state.now
        dead = (lease for lease in message.lease_tokens if not self.state.is_live(lease))
        for lease_id in islice(dead, REVOKED_PER_HEARTBEAT_MAX):
            self.state.send(peer, LeaseRevoked(lease=lease_id, reason="it was given up here"))
        self.state.send(peer, HeartbeatEcho(sequence=message.sequence))

    # -------------------------------------------------------------------- installs

    def installed(self, peer: PeerId, message: VersionInstalled) -> None:
        state = self.state
        worker = self._member(peer)
        digest = state.lineage.published.get(message.version)
        if digest is None and message.past:
            return  # it was so long ago that nothing of it can be trained any more
        if digest is None:
            raise RemoteProtocolError(
                f"{peer} installed version {message.version}, which was never published",
                reason="unknown_version",
            )
        if digest != message.manifest_digest:
            raise RemoteProtocolError(
                f"{peer} installed {message.manifest_digest[:16]} as version {message.version}, "
                f"which is {digest[:16]}",
                reason="wrong_digest",
            )
        if message.past:
            self._tell_installed(peer, message)
            return
        first = worker.installed is None
        worker.installed = message.version
        worker.install_s.add(message.install_s)
        state.pause_s.add(message.pause_s)
        if worker.state is WorkerState.SYNCING:
            worker.state = WorkerState.READY
        announced_at = state.published_at.get(message.version)
        if not first and announced_at is not None:
            state.bcast_s.add(state.now - announced_at)
        self._give_back_other_evals(worker)
        self._tell_installed(peer, message)
        if first:
            state.emit("worker_ready", worker=peer)
            state.activation.ready(peer, state.now)
        self.relays.installed(peer, message)
        newest = state.lineage.newest
        if newest in state.announcements and newest is not None and message.version < newest:
            state.announce(newest, [peer])  # now with the deltas that lead on from here

    def _tell_installed(self, peer: PeerId, message: VersionInstalled) -> None:
        self.state.emit(
            "version_installed",
            worker=peer,
            incarnation=message.version.incarnation,
            step=message.version.step,
            manifest_digest=message.manifest_digest,
            fetch_s=message.fetch_s,
            install_s=message.install_s,
            pause_s=message.pause_s,
            canary_diff=message.canary_diff,
        )

    def install_failed(self, peer: PeerId, message: InstallFailed) -> None:
        state = self.state
        worker = self._member(peer)
        serving = message.serving
        worker.installed = serving if serving in state.lineage.published else None
        if worker.installed is None and worker.state is WorkerState.READY:
            worker.state = WorkerState.SYNCING
        self._give_back_other_evals(worker)
        state.broadcasts.failed(message.version, peer, message.text)
        state.emit(
            "install_failed",
            worker=peer,
            incarnation=message.version.incarnation,
            step=message.version.step,
            stage=message.stage,
            text=message.text,
        )

    def _give_back_other_evals(self, worker: Worker) -> None:
        """Evals are pinned: what the worker serves no more, it cannot evaluate."""
        state = self.state
        for lease in state.evals.leases_of(worker.peer):
            found = state.evals.of_lease(lease.id)
            if found is not None and found.version != worker.installed:
                text = f"{worker.peer} serves {worker.installed or 'no version'} now"
                state.lose_eval_lease(lease, text, tell=True)

    # --------------------------------------------------------------------- results

    def may_deliver(self, peer: PeerId, message: GroupResult) -> bool:
        """Was this peer given the lease? Of any other result nothing is kept."""
        if self.state.evals.of_lease(message.lease) is not None:
            return True
        group = self.state.book.groups.get(message.group)
        lease = group.known_leases.get(message.lease) if group is not None else None
        return lease is not None and lease.worker == peer

    def result(self, peer: PeerId, message: GroupResult) -> None:
        state = self.state
        worker = self._member(peer)
        count_result(state, worker, message.trajectories)
        if state.evals.of_lease(message.lease) is not None:
            self._eval_result(peer, message)
            return
        group = state.book.groups.get(message.group)
        lease = group.known_leases.get(message.lease) if group is not None else None
        if group is None or lease is None:
            known = message.lease in state.recent_leases
            self._acknowledge(peer, message, "duplicate" if known else "superseded")
            return
        if lease.worker != peer:
            raise RemoteProtocolError(
                f"lease {message.lease} was granted to {lease.worker}, not to {peer}",
                reason="wrong_lease",
            )
        if group.state not in (GroupState.LEASED, GroupState.QUEUED):
            same = group.result is not None and group.result.lease == message.lease
            if same and group.state is GroupState.STORING:
                return  # the acknowledgement follows when it is durable
            self._acknowledge(peer, message, "duplicate" if same else "superseded")
            return
        if group.awaits_task:
            group.early = peer, message
            return
        result = StoredResult(lease.id, peer, message.trajectories, message)
        refusal = self._result_refusal(group, result)
        if not refusal:
            dead = any(
                version in state.lineage.published and not state.lineage.is_alive(version)
                for version in result.versions
            )
            self._acknowledge(peer, message, "superseded" if dead else "refused", refusal.reason)
            if not dead:
                worker.rests_until = state.now + REST_S
                state.emit("result_refused", group_id=group.id, worker=peer, reason=refusal.reason)
            if group.lease is lease:
                state.lose_lease(lease, refusal.reason, counted=not dead, tell=False)
            return
        if not self._has_place(group, result):
            self._late(peer, message, group, result)
            return
        if not lease.resumed:
            self._measure(lease.granted_at, group, result)
        ended = state.book.store(group, result, state.next_record_id)
        if ended is not None and ended.id != lease.id:
            state.revoke_at_worker(ended, f"{peer} delivered the group first")
        state.persist(GroupStored(group.id, lease.id, peer, group.task, message), group)

    def _result_refusal(self, group: Group, result: StoredResult) -> Verdict:
        """What no honest worker sends, but for tokens of a version that a rewind killed."""
        state = self.state
        if len(result.trajectories) != state.settings.group_size:
            return Verdict(
                ok=False,
                reason=f"{len(result.trajectories)} trajectories, a group has "
                f"{state.settings.group_size}",
            )
        for header in result.trajectories:
            if header.num_sampled > sum(span.end - span.start for span in header.spans):
                return Verdict(ok=False, reason="sampled tokens that no span names")
        verdict = state.lineage.all_verdict(result.versions, step=state.step)
        if not verdict:
            return verdict
        leased = group.known_leases[result.lease].version
        if result.min_version < leased:
            return Verdict(
                ok=False,
                reason=f"tokens of version {result.min_version}, but the lease began at {leased}",
            )
        return ALLOWED

    def _has_place(self, group: Group, result: StoredResult) -> bool:
        """Is the result admissible, and does pacing have room for it where it expires?

        A live lease has its room already. A revoked one's late result may bring an earlier
        expiry than what the group is counted for now.
        """
        state = self.state
        step = state.next_step
        expiry = expiry_step(result.min_version.step, staleness_max=state.settings.staleness_max)
        if state.settings.late == "mask":
            low = max(0, step - state.settings.staleness_max)
            if result.tokens_from(low) < state.settings.mask_min_tokens:
                return False
            expiry = max(expiry, step)
        if expiry < step:
            return False
        if group.lease is not None and group.lease.id == result.lease:
            return True
        held = dict(state.book.held_by_expiry)
        if group.lease is not None:
            held[state.book.expiry(group)] -= 1
        return bool(
            pacing_verdict(
                held,
                new_expiry=expiry,
                next_step=step,
                groups_per_step=state.settings.groups_per_step,
            )
        )

    def _late(self, peer: PeerId, message: GroupResult, group: Group, result: StoredResult) -> None:
        """A result without a place: expired if it was the group's own lease."""
        state = self.state
        own = group.lease is not None and group.lease.id == result.lease
        if own and state.settings.late != "wait":
            state.book.store(group, result, 0)
            state.end_group(group, "expired", state.expired_reason(group, state.next_step))
            self._acknowledge(peer, message, "accepted", "expired")
            state.note_settled(result.lease)
            return
        if own and group.lease is not None:
            state.lose_lease(
                group.lease,
                state.expired_reason(group, state.next_step),
                counted=False,
                tell=False,
            )
        self._acknowledge(peer, message, "superseded", "no batch has room for it any more")

    def _eval_result(self, peer: PeerId, message: GroupResult) -> None:
        state = self.state
        found = state.evals.of_lease(message.lease)
        assert found is not None
        lease = found.leases[message.lease]
        if lease.worker != peer:
            raise RemoteProtocolError(
                f"eval lease {lease.id} was granted to {lease.worker}, not to {peer}",
                reason="wrong_lease",
            )
        versions = {span.version for t in message.trajectories for span in t.spans}
        size, asked = len(message.trajectories), found.request.group_size
        if versions != {found.version} or size != asked:
            text = (
                f"evaluated {size} trajectories of {sorted(map(str, versions))}, asked were "
                f"{asked} of {found.version}"
            )
            state.evals.give_back(lease.id, text)
            self._acknowledge(peer, message, "refused", text)
            return
        state.evals.score(lease.id, message.trajectories)
        state.note_settled(lease.id)
        self._acknowledge(peer, message, "accepted")

    def stored(self, record_id: int, record: GroupStored, group: Group) -> bool:
        """The result is durable: acknowledge it, and let it into the buffer. Whether that is all:
        then no lease became possible."""
        state = self.state
        message = record.payload
        assert isinstance(message, GroupResult)
        if group.state is not GroupState.STORING or group.record_id != record_id:
            reason = group.last_reason or "the learner was rewound"
            self._acknowledge(record.worker, message, "superseded", reason)
            return False
        state.note_settled(record.lease)
        self._acknowledge(record.worker, message, "accepted")
        frees_a_place = state.book.note_durable(group)
        settle(state, group)
        return not frees_a_place and group.state in (GroupState.BUFFERED, GroupState.AUDITING)

    def judge_restored(self) -> None:
        """Of what an earlier coordinator had acknowledged, end what cannot be trained any more,
        or never could. Its verdicts are not known here: chosen groups are audited again."""
        for group in self.state.book.in_state(GroupState.BUFFERED):
            settle(self.state, group)
        self.state.audits.ask_later()

    def failed(self, peer: PeerId, message: LeaseFailed) -> None:
        state = self.state
        worker = self._member(peer)
        if message.stage in ("engine", "lost"):
            worker.rests_until = state.now + REST_S
        self.state.send(
            peer, GroupAcknowledged(group=message.group, lease=message.lease, outcome="accepted")
        )
        found = state.evals.of_lease(message.lease)
        if found is not None:
            if found.leases[message.lease].worker == peer:
                state.evals.give_back(message.lease, message.text)
            return
        lease = state.book.leases.get(message.lease)
        if lease is None or lease.worker != peer:
            return  # revoked meanwhile
        reason = f"{message.stage}: {message.text}"
        state.emit(
            "lease_failed",
            group_id=lease.group,
            lease=lease.id,
            worker=peer,
            stage=message.stage,
            reason=message.text,
            held_s=state.now - lease.granted_at,
        )
        leaves = message.stage == "draining" and worker.state is WorkerState.DRAINING
        state.lose_lease(lease, reason, counted=not leaves, tell=False, failed=True)

    # --------------------------------------------------------------------- helpers

    def _member(self, peer: PeerId) -> Worker:
        worker = self.state.members.heard(peer, self.state.now)
        if worker is None:
            raise RemoteProtocolError(
                f"{peer} is not known here: say hello first", reason="unknown_peer"
            )
        return worker

    def _acknowledge(
        self, peer: PeerId, message: GroupResult, outcome: str, reason: str = ""
    ) -> None:
        self.state.send(
            peer,
            GroupAcknowledged(
                group=message.group,
                lease=message.lease,
                outcome=outcome,  # type: ignore[arg-type]
                reason=reason[:2048],
            ),
        )

    def _measure(self, granted_at: float, group: Group, result: StoredResult) -> None:
        state = self.state
        worker = state.members.get(result.worker)
        seconds = max(1e-6, state.now - granted_at)
        state.turns_max = max([state.turns_max, *(t.num_turns for t in result.trajectories)])
        if worker is not None:
            worker.latency_s.add(seconds)
            worker.num_trajectories += len(result.trajectories)
            rate = result.tokens / seconds
            if rate > 0:
                worker.slowest_rate = min(rate, worker.slowest_rate or rate)
