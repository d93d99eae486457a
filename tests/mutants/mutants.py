"""Faults planted in the coordinator's core and ledger: each a small change of one line or a few.

The simulation must find every one of them, or its checks are weaker than they look.
`old` must occur exactly once in `file`, so that a mutant cannot rot unnoticed.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`file` is inside echo2/`package`; `scenario` the kind of run that shows it."""

    name: str
    file: str
    old: str
    new: str
    scenario: str = "faulty"
    package: str = "core"


MUTANTS = (
    Mutant(
        "the window is one step wider",
        "staleness.py",
        "    return sampled_step + staleness_max\n",
        "    return sampled_step + staleness_max + 1\n",
    ),
    Mutant(
        "pacing allows one batch more",
        "staleness.py",
        "room = groups_per_step * (expiry - next_step + 1)",
        "room = groups_per_step * (expiry - next_step + 2)",
    ),
    Mutant(
        "pacing looks at the expiry of the new lease only",
        "staleness.py",
        "if expiry >= new_expiry and held > room:",
        "if expiry == new_expiry and held > room:",
        scenario="silent",
    ),
    Mutant(
        "the hold lets one batch overtake",
        "staleness.py",
        "room = groups_per_step * max(0, expiry - train_step)",
        "room = groups_per_step * max(0, expiry - train_step + 1)",
    ),
    Mutant(
        "the hold is ignored",
        "batch_desk.py",
        'if settings.late == "wait" and not hold_verdict(',
        'if settings.late == "never" and not hold_verdict(',
    ),
    Mutant(
        "the period is one step shorter",
        "staleness.py",
        "if step - last_step < period and not final:",
        "if step - last_step < period - 1 and not final:",
    ),
    Mutant(
        "the fence is forgotten",
        "learner_desk.py",
        "        if incarnation < current:\n            state.send(peer, Fenced(",
        "        if incarnation < 0:\n            state.send(peer, Fenced(",
    ),
    Mutant(
        "batches take the latest expiry first",
        "buffer.py",
        "for expiry in sorted(self.buffered):",
        "for expiry in sorted(self.buffered, reverse=True):",
    ),
    Mutant(
        "a batch is one group too small",
        "batch_desk.py",
        "            if len(groups) == settings.groups_per_step:\n                break\n",
        "            if len(groups) == max(1, settings.groups_per_step - 1):\n                break\n",
    ),
    Mutant(
        "a result is acknowledged before it is durable",
        "worker_desk.py",
        "        state.persist(GroupStored(group.id, lease.id, peer, group.task, message), group)\n",
        "        state.persist(GroupStored(group.id, lease.id, peer, group.task, message), group)\n"
        '        self._acknowledge(peer, message, "accepted")\n',
    ),
    Mutant(
        "a repeated result is settled while the first is being stored",
        "worker_desk.py",
        "if same and group.state is GroupState.STORING:",
        "if same and group.state is GroupState.ENDED:",
    ),
    Mutant(
        "what is being stored counts as buffered",
        "buffer.py",
        "_OUT = (GroupState.LEASED, GroupState.STORING, GroupState.AUDITING)\n"
        "_HELD = (*_OUT, GroupState.BUFFERED)",
        "_OUT = (GroupState.LEASED, GroupState.AUDITING)\n"
        "_HELD = (*_OUT, GroupState.STORING, GroupState.BUFFERED)",
    ),
    Mutant(
        "leases of a dead worker are kept",
        "worker_desk.py",
        "        for lease in state.book.leases_of(peer):\n"
        '            state.lose_lease(lease, f"{peer} is gone: {reason}"',
        "        for lease in state.book.leases_of(peer)[1:]:\n"
        '            state.lose_lease(lease, f"{peer} is gone: {reason}"',
    ),
    Mutant(
        "tokens of a dead version are admitted",
        "lineage.py",
        "        if not self.is_alive(version):\n            return Verdict(",
        "        if version.incarnation < 0:\n            return Verdict(",
    ),
    Mutant(
        "a dead version is leased",
        "dispatch.py",
        '        if not self.state.lineage.is_alive(version):\n            self.reason = f"version',
        '        if version.incarnation < 0:\n            self.reason = f"version',
    ),
    Mutant(
        "one step after the checkpoint survives",
        "lineage.py",
        "            version.step <= resume_step\n",
        "            version.step <= resume_step + 1\n",
    ),
    Mutant(
        "versions that were never published are admitted",
        "lineage.py",
        "        if version not in self.published:\n",
        "        if version.step < 0:\n",
    ),
    Mutant(
        "a late result enters without pacing",
        "worker_desk.py",
        "        if group.lease is not None and group.lease.id == result.lease:\n"
        "            return True\n",
        "        if group is not None:\n            return True\n",
        scenario="silent",
    ),
    Mutant(
        "a late result replaces one that is buffered or trained",
        "worker_desk.py",
        "        if group.state not in (GroupState.LEASED, GroupState.QUEUED):\n",
        "        if group.state is GroupState.STORING:\n",
    ),
    Mutant(
        "a rewind forgets the batch in training",
        "learner_desk.py",
        "        for group in batch.groups if batch is not None else []:\n",
        "        for group in []:\n",
    ),
    Mutant(
        "a rewind returns nothing",
        "learner_desk.py",
        "for entry in reversed(state.history.rewind(resume_step)):",
        "for entry in state.history.rewind(resume_step)[:0]:",
    ),
    Mutant(
        "a rewind returns groups, and keeps them to return them again",
        "history.py",
        "        self.trained = [entry for entry in self.trained if entry.step < resume_step]\n",
        "",
    ),
    Mutant(
        "what was trained at the oldest checkpoint is forgotten",
        "history.py",
        "if entry.step >= self.oldest_kept]",
        "if entry.step > self.oldest_kept]",
    ),
    Mutant(
        "buffered groups of dead versions stay",
        "learner_desk.py",
        "in state.book.in_state(*WITH_RESULT):\n            if not self._is_alive(group):",
        "in state.book.in_state(*WITH_RESULT[:2]):\n            if not self._is_alive(group):",
    ),
    Mutant(
        "an eval of another version is scored",
        "worker_desk.py",
        "if versions != {found.version} or size != asked:",
        "if size != asked:",
    ),
    Mutant(
        "a repeated eval is done again",
        "learner_desk.py",
        "if ended is not None and ended.incarnation == message.incarnation:",
        "if ended is not None and ended.incarnation < 0:",
        scenario="lossy",
    ),
    Mutant(
        "a completed step is acknowledged only once",
        "batch_desk.py",
        "        if message.step < state.step:\n            self._acknowledge_step(peer)\n",
        "        if message.step < state.step:\n",
        scenario="lossy",
    ),
    Mutant(
        "v moves before the step is durable",
        "batch_desk.py",
        "        seat.completing = state.persist(\n"
        "            StepRecorded(message.incarnation, message.step, groups, state.cost_usd)\n"
        "        )\n",
        "        seat.completing = state.persist(\n"
        "            StepRecorded(message.incarnation, message.step, groups, state.cost_usd)\n"
        "        )\n"
        "        self.step_durable(seat.completing)\n",
    ),
    Mutant(
        "a version is announced before it is durable",
        "learner_desk.py",
        "        state.persist(VersionRecorded(message.version, message.manifest_digest), message)\n",
        "        self.version_durable(message)\n",
    ),
    Mutant(
        "a learner is welcomed before its takeover is durable",
        "learner_desk.py",
        "        state.persist(LearnerRecorded(incarnation, resume_step), peer)\n",
        "        state.persist(LearnerRecorded(incarnation, resume_step), peer)\n"
        "        self._welcome(peer)\n",
    ),
    Mutant(
        "groups without variance count towards R",
        "admission.py",
        "    elif state.settings.filter_zero_variance and not result.has_reward_variance:\n",
        "    elif state.settings.filter_zero_variance and state.step < 0:\n",
    ),
    Mutant(
        "attempts are not counted",
        "run_state.py",
        "if counted and group.attempts >= self.settings.attempts_max:",
        "if counted and group.attempts >= 10 * self.settings.attempts_max:",
    ),
    Mutant(
        "a group ends twice when its batch expires",
        "run_state.py",
        "        self.ends[end] += 1\n",
        '        self.ends[end] += 1\n        if end == "expired":\n'
        '            self.emit("group_ended", group_id=group.id, end=end, reason=reason, '
        "trained_at=None, attempts=0)\n",
    ),
    Mutant(
        "masked tokens at the old edge do not count",
        "group.py",
        "            s.end - s.start for t in self.trajectories for s in t.spans "
        "if s.version.step >= step\n",
        "            s.end - s.start for t in self.trajectories for s in t.spans "
        "if s.version.step > step\n",
    ),
    Mutant(
        "groups that were begun stay open at the end",
        "run_state.py",
        "if group.begun or index_of(group.id) < self.first_new_index:",
        "if group.attempts or group.result is not None:",
        scenario="rewinding",
    ),
    Mutant(
        "lost requests for tasks are not repeated",
        "dispatch.py",
        "        if state.now - self.tasks_asked_at > TASKS_PATIENCE_S:\n",
        "        if state.now < 0:\n",
        scenario="lossy",
    ),
    Mutant(
        "lost announcements are not repeated",
        "coordinator.py",
        "        state.announce_again()\n",
        "",
        scenario="lossy",
    ),
    Mutant(
        "a worker gets one eval more than it has slots",
        "dispatch.py",
        "for _ in range(worker.slots - leases):",
        "for _ in range(worker.slots - leases + 1):",
    ),
    Mutant(
        "a batch that an earlier coordinator granted is not believed",
        "batch_desk.py",
        "group_id in mine or group.state in _TRAINABLE",
        "group_id in mine",
    ),
    Mutant(
        "the ledger forgets who has what in work",
        "database.py",
        "            leases=self._leases(),\n",
        "",
        package="ledger",
    ),
    Mutant(
        "the ledger forgets that a group has ended",
        "database.py",
        "row.ended, row.trained_at, row.told = end, trained_at, int(told)",
        "row.trained_at, row.told = trained_at, int(told)",
        package="ledger",
    ),
    Mutant(
        "the ledger does not open again what a rewind returned",
        "database.py",
        "row.ended, row.trained_at, row.told = None, None, 1",
        "row.trained_at, row.told = None, 1",
        package="ledger",
    ),
    Mutant(
        "the ledger lets go of a payload that may still be trained",
        "database.py",
        "unneeded = \"ended IS NOT NULL AND (ended != 'trained' OR trained_at < ?)\"",
        "unneeded = \"(ended IS NULL OR ended != 'trained' OR trained_at < ?)\"",
        package="ledger",
    ),
    Mutant(
        "the ledger keeps v when a learner goes on from an earlier step",
        "database.py",
        '        self._set("step", record.resume_step)\n',
        "",
        package="ledger",
    ),
    Mutant(
        "a step that was recorded before a kill is never told",
        "run_state.py",
        "            self.tell_step(self.told_step)\n",
        "            pass\n",
        scenario="storm",
    ),
    Mutant(
        "groups that were trained before a kill are never told",
        "run_state.py",
        '            self._tell_end(group, "trained", "", self.told_step)\n',
        "            pass\n",
        scenario="storm",
    ),
    Mutant(
        "what is to be audited is trained meanwhile",
        "admission.py",
        "    state.book.await_audit(group)\n",
        "    state.book.admit(group)\n",
        scenario="lying",
    ),
    Mutant(
        "a refuted group is trained",
        "audit_desk.py",
        '        if verdict == "refuted":\n',
        '        if verdict == "never":\n',
        scenario="lying",
    ),
    Mutant(
        "a worker audits its own groups",
        "audit_desk.py",
        "able = [p for p in auditors if p != audit.worker and p not in audit.tried and free[p] > 0]",
        "able = [p for p in auditors if p not in audit.tried and free[p] > 0]",
        scenario="lying",
    ),
    Mutant(
        "what a quarantined worker delivered before stays in the buffer",
        "audit_desk.py",
        '            state.withdraw(group, f"{peer} is quarantined: {reason}")\n',
        "            pass\n",
        scenario="lying",
    ),
    Mutant(
        "one odd observation is enough",
        "suspicion.py",
        "if value < self.rule.needed or not observation.is_odd:",
        "if not self.rule.needed or not observation.is_odd:",
        scenario="lying",
    ),
    Mutant(
        "the ledger forgets who is quarantined",
        "database.py",
        'self._fact(QUARANTINED, {}) | {fields["worker"]: told}',
        "self._fact(QUARANTINED, {})",
        scenario="lying",
        package="ledger",
    ),
    Mutant(
        "the ledger keeps a result that was withdrawn",
        "database.py",
        'if known is not None and known.lease == fields["lease"] and known.ended is None:',
        "if known is not None and known.lease is None:",
        scenario="lying",
        package="ledger",
    ),
)
