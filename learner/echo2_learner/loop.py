"""The learner's loop: made to be read in one go, and to be edited.

    resume or start -> publish -> first eval -> [ batch -> train -> complete -> publish
    -> evals -> metrics line -> checkpoint ] ... -> last eval -> final weights

Order within a step: `complete` returns when the coordinator has recorded it durably; only
then is the new version published. The line of a step is written before its checkpoint, so
no resumed run lacks a line; the line of the last step after the last eval, so it tells it.
"""

from __future__ import annotations

import enum
import time

import structlog

from echo2.errors import RunEndedError
from echo2_learner.evals import Evals
from echo2_learner.logprob_check import CheckResult
from echo2_learner.metrics import eval_fields, metrics_line
from echo2_learner.parts import Parts
from echo2_learner.session import Session
from echo2_learner.stop import StopRequested, StopSignal

log = structlog.get_logger(__name__)


class End(enum.Enum):
    """How training came to its end."""

    FINISHED = "finished"
    STOPPED = "stopped"
    OUT_OF_TASKS = "out of tasks"
    """Before the last step: the final weights are those of the steps that were done."""


def train(parts: Parts, session: Session, stop: StopSignal) -> End:
    """Train to the last step or the end of the data, or until a signal comes.

    Raises RunEndedError when the coordinator ended (after a checkpoint), and FencedError when
    a newer learner took over (nothing more is written).
    """
    with stop.interruptible():
        welcome = session.start(
            resume_step=parts.resume_step,
            digest=parts.resumed.digest if parts.resumed else "",
            checkpoint_steps=parts.checkpoints.complete_steps(parts.resume_step),
        )
    parts.begin(welcome)
    loop = Loop(parts, session, stop)
    try:
        loop.run()
    except StopRequested:
        log.info("learner_stopped", signal=stop.requested, step=loop.step)
    except RunEndedError as error:
        log.warning("run_ended", reason=str(error), step=loop.step)
        if loop.is_recorded:
            parts.save_checkpoint(None, loop.step)
        if error.finished:
            parts.save_final()
        raise
    if loop.is_recorded:
        parts.save_checkpoint(session, loop.step)
    if not loop.finished:
        session.close(f"stopped by {stop.requested}", finished=False)
        return End.STOPPED
    parts.save_final()
    steps = parts.config.learner.steps
    done = f"{loop.step} of {steps} steps are done"
    if loop.step < steps and session.tasks_ended:
        reason = f"the tasks are used up: {done}; give more, or set learner.steps to {loop.step}"
        session.close(reason, finished=True, missing_steps=steps - loop.step)
        return End.OUT_OF_TASKS
    session.close("all steps are done" if loop.step >= steps else done, finished=True)
    return End.FINISHED


class Loop:
    """`step` is v. `is_recorded`: the policy is that of v, and all lines up to v are written."""

    def __init__(self, parts: Parts, session: Session, stop: StopSignal) -> None:
        self.parts = parts
        self.session = session
        self.stop = stop
        self.step = parts.resume_step
        self.finished = False
        self.is_recorded = True
        table = parts.config.eval
        self.evals = Evals(
            session,
            parts.tasks.evals(table.num_tasks) if table.every_steps else [],
            table,
            sampling=parts.config.sampling.sampling(),
            resume_step=parts.resume_step,
        )

    def run(self) -> None:
        steps = self.parts.config.learner.steps
        if self.step >= steps:
            self.finished = True  # killed after the last checkpoint: only the end is missing
            return
        with self.stop.interruptible():
            self.parts.publish(self.session, self.step)
            if self.step == 0:
                self.evals.run(self.parts.version(0))
        while not self.finished and not self.stop.requested:
            self.finished = not self.do_step()

    def do_step(self) -> bool:
        """One learner step; False when it was the last, or when there is no more data."""
        parts, session, step = self.parts, self.session, self.step
        session.say(f"waits for the batch of step {step}")
        asked = time.perf_counter()
        with self.stop.interruptible():
            granted = session.next_batch(step)
        received = time.perf_counter()
        if granted is None:
            self.end_of_data()
            return False
        session.say(f"trains step {step}")
        batch = parts.read(granted, step)
        self.is_recorded = False
        trained = parts.train(batch)
        checked = parts.compare(batch) if parts.check.is_due(step) else CheckResult()
        trained_at = time.perf_counter()
        train_s, wait_s = trained_at - received, received - asked
        with self.stop.patient(parts.config.heartbeat.gone_s):
            session.complete(step, train_s=train_s, wait_s=wait_s, mismatch=checked.by_group)
            parts.count(granted.groups)
            self.step = step + 1
            is_last = granted.last or self.step >= parts.config.learner.steps
            publish_s = self.publish_if_due(final=is_last)
        interrupted = self.evaluate(final=is_last)
        line = metrics_line(
            batch,
            trained,
            checked,
            granted.granted,
            version=parts.version(step),
            train_s=train_s,
            wait_s=wait_s,
            publish_s=publish_s,
            time=time.time(),
        )
        parts.write_line(line | eval_fields(self.evals.next_result(newest=is_last)))
        parts.save_rollouts(granted, batch, checked)
        self.is_recorded = True
        if interrupted is not None:
            raise interrupted
        if self.step % parts.config.checkpoint.every_steps == 0:
            parts.save_checkpoint(session, self.step)
        return not is_last

    def publish_if_due(self, *, final: bool) -> float:
        """Publish when κ steps have passed since the last version; returns the time it took."""
        last = self.parts.published
        period = self.parts.config.staleness.period
        if not final and last is not None and self.step - last.step < period:
            return 0.0
        started = time.perf_counter()
        self.parts.publish(self.session, self.step, final=final)
        return time.perf_counter() - started

    def evaluate(self, *, final: bool) -> StopRequested | None:
        """Ask for an eval when it is due. The last one is waited for, unless a signal comes:
        then that is returned, and the step is put on record first."""
        version = self.parts.published
        assert version is not None
        if not final:
            if version.step == self.step and self.evals.is_due(version.step):
                self.evals.start(version)
            return None
        try:
            with self.stop.interruptible():
                self.evals.run(version)
        except StopRequested as stopped:
            return stopped
        return None

    def end_of_data(self) -> None:
        """The data ended without a last batch (partial_batch = "drop"): no line is left to
        tell the last eval, so it is logged (the coordinator records it too)."""
        if self.parts.published != self.parts.version(self.step):
            self.parts.publish(self.session, self.step, final=True)
        with self.stop.interruptible():
            self.evals.run(self.parts.version(self.step))
        if (result := self.evals.next_result(newest=True)) is not None:
            log.info("eval_ended", version=str(result.version), reward_mean=result.reward_mean)
