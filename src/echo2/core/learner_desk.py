"""What the learner tells the coordinator: hello, versions, checkpoints, evals, goodbye.

One learner sits in the seat; each hello without an incarnation opens a higher one and
fences the one before. Whatever the fenced learner still sends is answered with `Fenced` and
changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from echo2.core.admission import settle
from echo2.core.batch_desk import BatchDesk
from echo2.core.evals import EVALS_MAX
from echo2.core.group import WITH_RESULT, Group
from echo2.core.records import (
    CheckpointRecorded,
    LearnerRecorded,
    VersionRecorded,
)
from echo2.core.run_state import Batch, RunState, Seat
from echo2.core.staleness import pacing_verdict, publish_verdict
from echo2.core.task_queue import index_of
from echo2.core.worker_desk import WorkerDesk
from echo2.errors import RemoteProtocolError
from echo2.messages import (
    PROTOCOL,
    BroadcastRequest,
    BroadcastStatus,
    CheckpointSaved,
    EvalRequest,
    Fenced,
    Goodbye,
    HeartbeatEcho,
    LearnerHeartbeat,
    LearnerHello,
    LearnerWelcome,
    PublishAcknowledged,
    VersionPublished,
)
from echo2.types import PeerId


class LearnerDesk:
    def __init__(self, state: RunState) -> None:
        self.state = state
        self.batches = BatchDesk(state, self.is_current)

    # --------------------------------------------------------------- coming, going

    def hello(self, peer: PeerId, hello: LearnerHello) -> None:
        state, settings = self.state, self.state.settings
        if hello.protocol != PROTOCOL:
            state.refuse(
                peer,
                "protocol",
                f"this coordinator speaks protocol {PROTOCOL}, the learner (echo2 "
                f"{hello.echo2_version}) speaks {hello.protocol}; install the same echo2 on both",
            )
            return
        if hello.run_id and hello.run_id != settings.run_id:
            state.refuse(
                peer, "run", f"this is run {settings.run_id}, the learner's is {hello.run_id}"
            )
            return
        current = state.lineage.incarnation
        if hello.incarnation > current:
            state.refuse(
                peer,
                "incarnation",
                f"incarnation {hello.incarnation} is unknown here (newest: {current}); "
                "start the learner again with --resume",
            )
            return
        if hello.incarnation and hello.incarnation < current:
            state.send(peer, Fenced(incarnation=hello.incarnation, by=current))
            return
        seat = state.seat
        repeated = bool(hello.hello_id) and (seat.peer, seat.hello_id) == (peer, hello.hello_id)
        if (hello.incarnation or repeated) and self._is_taking_over:
            return  # the welcome follows when the takeover is durable
        if hello.incarnation and seat.peer not in (None, peer):
            state.refuse(
                peer,
                "seat",
                f"incarnation {current} is {seat.peer}, not {peer}; start it again with --resume",
            )
            return
        if hello.incarnation or repeated:
            self._reseat(peer)
            return
        if hello.hello_id and hello.hello_id in state.past_hellos:
            state.send(peer, Fenced(incarnation=hello.incarnation, by=current))
            return
        if hello.guest:
            self._welcome_guest(peer, hello)
            return
        if hello.resume_step < state.history.complete_from:
            state.refuse(
                peer,
                "resume_step",
                f"a checkpoint of step {hello.resume_step} is older than the oldest that was "
                f"kept, of step {state.history.complete_from}; resume from a kept one, or start "
                "another run",
            )
            return
        if hello.resume_step > state.step and not state.is_fresh:
            state.refuse(
                peer,
                "resume_step",
                f"a checkpoint of step {hello.resume_step} is ahead of this run, whose v is "
                f"{state.step}; use this run's own checkpoints",
            )
            return
        self._take_over(peer, hello)

    @property
    def _is_taking_over(self) -> bool:
        """Is the newest incarnation still being made durable?"""
        newest = self.state.lineage.incarnation
        return any(
            isinstance(record, LearnerRecorded) and record.incarnation == newest
            for record, _ in self.state.pending.values()
        )

    def _reseat(self, peer: PeerId) -> None:
        """The same learner came back after a lost connection."""
        seat = self.state.seat
        seat.peer, seat.welcomed, seat.silent = peer, True, False
        seat.heard_at = self.state.now
        self.state.stream.forget_request()
        self._welcome(peer)

    def _welcome_guest(self, peer: PeerId, hello: LearnerHello) -> None:
        """It changes neither v nor what a learner may resume from."""
        state, seat = self.state, self.state.seat
        if seat.peer is not None and not seat.silent:
            silent_s = state.now - seat.heard_at
            state.refuse(
                peer,
                "seat",
                f"{seat.peer} is the learner of this run and was heard {silent_s:.1f} s ago; only "
                "it may publish until it ends; one that died gives way after "
                f"heartbeat.gone_s = {state.settings.gone_s:g} s",
            )
            return
        kept = state.history.kept
        self._take_over(peer, replace(hello, resume_step=state.step, checkpoint_steps=kept))

    def _take_over(self, peer: PeerId, hello: LearnerHello) -> None:
        state = self.state
        incarnation, resume_step = state.lineage.incarnation + 1, hello.resume_step
        old = state.seat
        if old.peer is not None and old.peer != peer:
            state.send(old.peer, Fenced(incarnation=incarnation - 1, by=incarnation))
            state.emit("learner_fenced", incarnation=incarnation - 1, by=incarnation)
        if old.hello_id:
            state.past_hellos.append(old.hello_id)
        state.seat = Seat(peer=peer, hello_id=hello.hello_id, heard_at=state.now)
        state.stream.forget_request()
        state.lineage.begin(incarnation, resume_step)
        state.emit(
            "learner_joined", incarnation=incarnation, resume_step=resume_step, digest=hello.digest
        )
        for eval_id in list(state.evals.evals):
            state.end_eval(state.cancel_eval(eval_id, "a new learner took over"))
            del state.evals.evals[eval_id]
        state.step = resume_step
        state.is_fresh = False
        state.granted_at = None
        state.history.kept = tuple(
            step
            for step in hello.checkpoint_steps
            if state.history.complete_from <= step <= resume_step
        ) or (resume_step,)
        self._rewind(old.batch, resume_step)
        if hello.environment_version:
            self._set_environment_version(hello.environment_version)
        state.persist(LearnerRecorded(incarnation, resume_step), peer)

    def _rewind(self, batch: Batch | None, resume_step: int) -> None:
        """Give back what the resumed checkpoint has not seen; drop what is not in its line."""
        state = self.state
        for group in batch.groups if batch is not None else []:
            state.book.admit(group)
        dead = "sampled after the checkpoint that was resumed"
        for lease in list(state.book.leases.values()):
            if not state.lineage.is_alive(lease.version):
                state.lose_lease(lease, dead, counted=False, tell=True)
        state.audits.learner_spoke = True
        for group in state.book.in_state(*WITH_RESULT):
            if not self._is_alive(group):
                state.audits.close(group.id)
                state.book.requeue(group, dead)
                group.attempts = 0  # the leases were not at fault
        for entry in reversed(state.history.rewind(resume_step)):
            group = entry.group
            is_known_bad = entry.worker in state.audits.quarantined
            buffered = entry.has_result and self._is_alive(group) and self._fits(group)
            buffered &= not is_known_bad
            state.book.revive(group, with_result=buffered)
            self._returned(group.id, to="buffer" if buffered else "queue")
            if buffered:
                settle(state, group)
        for group_id, trained_at in state.restored_trained:
            if trained_at >= resume_step:
                state.stream.put_back(index_of(group_id))
                self._returned(group_id, to="queue")
        state.restored_trained = [e for e in state.restored_trained if e[1] < resume_step]
        state.expire_late()

    def _returned(self, group_id: str, *, to: str) -> None:
        self.state.ends["trained"] -= 1
        self.state.emit(
            "group_returned",
            group_id=group_id,
            incarnation=self.state.lineage.incarnation,
            reason="the learner resumed from a checkpoint before it",
            to=to,
        )

    def _is_alive(self, group: Group) -> bool:
        return group.result is not None and all(
            self.state.lineage.is_alive(span.version)
            for trajectory in group.result.trajectories
            for span in trajectory.spans
        )

    def _fits(self, group: Group) -> bool:
        """Admissible at v, with room for its expiry."""
        state = self.state
        if not state.is_admissible(group, state.step):
            return False
        return bool(
            pacing_verdict(
                state.book.held_by_expiry,
                new_expiry=max(state.book.expiry(group), state.step),
                next_step=state.step,
                groups_per_step=state.settings.groups_per_step,
            )
        )

    def _set_environment_version(self, version: str) -> None:
        state = self.state
        state.environment_version = version
        desk = WorkerDesk(state)
        for worker in list(state.members.workers.values()):
            refusal = desk.environment_refusal(worker.environment_version)
            if refusal is not None:
                state.refuse(worker.peer, *refusal)
                desk.leave(worker.peer, refusal[1])

    def seated(self, record: LearnerRecorded, peer: PeerId) -> None:
        """The takeover is durable."""
        seat = self.state.seat
        if record.incarnation == self.state.lineage.incarnation and seat.peer == peer:
            seat.welcomed = True
            self._welcome(peer)

    def _welcome(self, peer: PeerId) -> None:
        state = self.state
        state.send(
            peer,
            LearnerWelcome(
                protocol=PROTOCOL,
                run_id=state.settings.run_id,
                incarnation=state.lineage.incarnation,
                step=state.step,
                heartbeat_interval_s=state.settings.heartbeat_interval_s,
                silence_max_s=state.settings.gone_s,
            ),
        )

    def heartbeat(self, peer: PeerId, message: LearnerHeartbeat) -> None:
        if not self.is_current(peer, message.incarnation):
            return
        self.state.seat.text = message.state
        self.state.send(peer, HeartbeatEcho(sequence=message.sequence))

    def goodbye(self, peer: PeerId, message: Goodbye) -> None:
        state = self.state
        named = message.incarnation
        if state.seat.peer != peer or (named and named != state.lineage.incarnation):
            return  # a fenced one leaves
        state.emit("learner_left", incarnation=state.lineage.incarnation, reason=message.reason)
        if message.finished:
            ok, reason = message.missing_steps == 0, message.reason
            if self.batches.is_over_budget:
                reason += (
                    f"; budget.max_usd = {state.settings.budget_usd:g} is spent: "
                    f"${state.cost_usd:.4f}"
                )
            state.finish(ok=ok, finished=True, reason=reason)
            return
        state.seat.peer, state.seat.wanted_step = None, None
        state.seat.vacant_since = state.now

    # ------------------------------------------------- versions, checkpoints, evals

    def published(self, peer: PeerId, message: VersionPublished) -> None:
        if not self.is_current(peer, message.version.incarnation):
            return
        state = self.state
        known = state.lineage.published.get(message.version)
        if known is not None and known == message.manifest_digest:
            state.announcements[message.version] = message  # the origin may have moved
            state.deltas.add(message)
            self._announce(message)
            return
        if message.version.step > state.step:
            raise RemoteProtocolError(
                f"version {message.version} was published, v is only {state.step}",
                reason="wrong_version",
            )
        if known is not None:
            raise RemoteProtocolError(
                f"version {message.version} is {known[:16]} already, not "
                f"{message.manifest_digest[:16]}",
                reason="wrong_digest",
            )
        incarnation = message.version.incarnation
        storing = [
            record.version
            for record, _ in state.pending.values()
            if isinstance(record, VersionRecorded) and record.version.incarnation == incarnation
        ]
        if message.version in storing:
            return
        last_step = state.lineage.last_published_step(incarnation)
        verdict = publish_verdict(
            message.version.step,
            last_step=max((version.step for version in storing), default=last_step),
            period=state.settings.period,
            final=message.final,
        )
        if not verdict:
            raise RemoteProtocolError(verdict.reason, reason="wrong_version")
        state.persist(VersionRecorded(message.version, message.manifest_digest), message)

    def version_durable(self, message: VersionPublished) -> None:
        state = self.state
        version = message.version
        if version.incarnation != state.lineage.incarnation:
            return
        state.lineage.publish(version, message.manifest_digest)
        state.announcements[version] = message
        state.deltas.add(message)
        state.published_at[version] = state.now
        state.unplanned = version
        state.emit(
            "version_published",
            incarnation=version.incarnation,
            step=version.step,
            manifest_digest=message.manifest_digest,
            num_bytes=message.num_bytes,
        )
        state.forget_versions()
        self._announce(message)

    def _announce(self, message: VersionPublished) -> None:
        state = self.state
        version = message.version
        if version == state.lineage.newest:
            state.announce(
                version, [w.peer for w in state.members.workers.values() if w.installed != version]
            )
        if state.seat.peer is not None:
            state.send(
                state.seat.peer, PublishAcknowledged(version=version, keep_from=state.keep_from)
            )

    def broadcast(self, peer: PeerId, message: BroadcastRequest) -> None:
        if not self.is_current(peer, message.incarnation):
            return
        state, newest = self.state, self.state.lineage.newest
        state.send(
            peer,
            BroadcastStatus(
                incarnation=message.incarnation,
                version=newest,
                num_active=len(state.members.active(list(state.members.workers))),
                workers=() if newest is None else state.broadcasts.workers(newest),
            ),
        )

    def checkpoint(self, peer: PeerId, message: CheckpointSaved) -> None:
        if not self.is_current(peer, message.incarnation):
            return
        state = self.state
        if message.step < max(state.history.kept):
            return  # overtaken by a later one
        if any(step > state.step for step in message.kept) or message.step not in message.kept:
            raise RemoteProtocolError(
                f"checkpoints of steps {list(message.kept)} were kept, v is {state.step}",
                reason="wrong_step",
            )
        state.history.keep(message.kept)
        state.restored_trained = [
            entry for entry in state.restored_trained if entry[1] >= min(message.kept)
        ]
        state.persist(CheckpointRecorded(message.incarnation, message.kept))
        state.emit(
            "checkpoint_saved",
            incarnation=message.incarnation,
            step=message.step,
            kept=list(message.kept),
        )
        state.forget_versions()

    def eval_request(self, peer: PeerId, message: EvalRequest) -> None:
        if not self.is_current(peer, message.incarnation):
            return
        state = self.state
        if message.eval_id in state.evals.evals:
            return
        ended = state.evals.ended.get(message.eval_id)
        if ended is not None and ended.incarnation == message.incarnation:
            state.send(peer, ended)  # the answer was lost
            return
        if message.version not in state.lineage.published:
            raise RemoteProtocolError(
                f"an eval of version {message.version} was asked for, which is not published",
                reason="wrong_version",
            )
        if len(state.evals.evals) >= EVALS_MAX:
            raise RemoteProtocolError(
                f"{EVALS_MAX} evals are under way, the most allowed", reason="too_many"
            )
        state.evals.begin(message, peer, state.now)

    # --------------------------------------------------------------------- helpers

    def is_current(self, peer: PeerId, incarnation: int) -> bool:
        """Does the message come from the learner in the seat? A fenced one is told so."""
        state, seat = self.state, self.state.seat
        current = state.lineage.incarnation
        if incarnation < current:
            state.send(peer, Fenced(incarnation=incarnation, by=current))
            return False
        if seat.peer != peer or incarnation > current or not seat.welcomed:
            raise RemoteProtocolError(
                f"{peer} is not the learner here: say hello first", reason="unknown_peer"
            )
        seat.heard_at = max(seat.heard_at, state.now)
        if seat.silent:
            seat.silent = False
            state.emit("learner_returned", incarnation=current)
        return True
