"""A simulated learner: the production client of the protocol, and a learner's time around it.

    seated -> publish -> first eval -> [ batch -> train -> complete -> publish -> evals -> line
    -> checkpoint ] ... -> last eval -> goodbye                  (as `echo2_learner.loop`)

It has no weights: what it knows of a step is what it was given, and how long it took. Its wait is
measured as a real learner's: from asking for a batch to having it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from echo2.core import learner_client as client
from echo2.core.group import StoredResult
from echo2.errors import RunEndedError
from echo2.messages import (
    PROTOCOL,
    BatchGranted,
    EvalRequest,
    EvalResult,
    LearnerHello,
    Message,
    TasksSubmitted,
    VersionPublished,
)
from echo2.sim.timeline import Timeline
from echo2.sim.virtual.plan import RunPlan
from echo2.types import DeltaOffer, Task, Version

ORIGIN_ENDPOINT = "tcp://10.255.255.254:5700"
ORIGIN_KEY = "o" * 40


def version_digest(version: Version) -> str:
    """A stand-in for the digest of a version's bytes."""
    return f"{version.incarnation:032x}{version.step:032x}"


def delta_digest(version: Version) -> str:
    """Of the delta that leads to a version."""
    return f"d{version.incarnation:031x}{version.step:032x}"


class VirtualLearner:
    """`send` to the coordinator; `on_line` takes the line of metrics of each step; `result_of` a
    delivered group. `wait_s` and `train_s` are those of all steps."""

    def __init__(
        self,
        plan: RunPlan,
        timeline: Timeline,
        rng: Random,
        *,
        send: Callable[[Message], None],
        result_of: Callable[[str], StoredResult],
        on_line: Callable[[dict[str, Any]], None],
    ) -> None:
        self.wait_s = 0.0
        self.train_s = 0.0
        self.step = 0
        self._plan = plan
        self._timeline = timeline
        self._rng = rng
        self._send = send
        self._result_of = result_of
        self._on_line = on_line
        hello = LearnerHello(
            protocol=PROTOCOL,
            echo2_version="simulated",
            name="learner",
            resume_step=0,
            hello_id="simulated",
        )
        self._client = client.LearnerClientState(hello)
        self._published: Version | None = None
        self._then: Callable[[], None] | None = None
        """What a version that is durable, or an eval that is waited for, leads to."""
        self._asked_at: float | None = None
        self._step_wait_s = self._step_train_s = self._step_publish_s = 0.0
        self._granted: BatchGranted | None = None
        self._is_last = False
        self._time_is_up = False
        self._awaited_eval = ""
        self._last_eval_step: int | None = None
        self._results: deque[EvalResult] = deque()
        self._kept: list[int] = []

    def start(self) -> None:
        self._carry_out(self._client.start(self._timeline.now))
        self._tick()

    def receive(self, message: Message) -> None:
        self._carry_out(self._client.received(message, self._timeline.now))

    def time_is_up(self) -> None:
        """End with the step that is being trained; or now, if that is not to be had."""
        self._time_is_up = True
        if self._asked_at is not None:
            self._note_wait()
            self._end("the time of the simulation is over")

    @property
    def waited_s(self) -> float:
        """In all, the wait that goes on included."""
        now = self._timeline.now
        return self.wait_s + (now - self._asked_at if self._asked_at is not None else 0.0)

    # ------------------------------------------------------------------- the protocol

    def _tick(self) -> None:
        if self._client.state is not client.ClientState.CLOSED:
            self._carry_out(self._client.tick(self._timeline.now))
            self._timeline.after(self._client.heartbeat_interval_s, self._tick)

    def _carry_out(self, outcomes: list[client.Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case client.Transmit(message):
                    self._send(message)
                case client.Seated(first=True):
                    self._publish(final=False, then=self._first_eval)
                case client.BatchReady(granted):
                    self._train(granted)
                case client.StepDurable(step):
                    self._step_durable(step)
                case client.VersionDurable():
                    self._go_on()
                case client.TasksNeeded(start, count):
                    self._submit(start, count)
                case client.EvalDone(result):
                    self._eval_done(result)
                case client.RequestRefused(text):
                    raise RunEndedError(f"the coordinator refused the simulated learner: {text}")
                case _:
                    pass  # of the end the coordinator's own effects tell

    def _go_on(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()

    def _submit(self, start: int, count: int) -> None:
        tasks = tuple(Task(index, "{}") for index in range(start, start + count))
        message = TasksSubmitted(incarnation=self._client.incarnation, start=start, tasks=tasks)
        self._carry_out(self._client.submit_tasks(message))

    # ------------------------------------------------------------------------- steps

    def _next_batch(self) -> None:
        self._client.say(f"waits for the batch of step {self.step}")
        self._asked_at = self._timeline.now
        self._carry_out(self._client.request_batch(self.step))

    def _note_wait(self) -> None:
        assert self._asked_at is not None
        self._step_wait_s = self._timeline.now - self._asked_at
        self.wait_s += self._step_wait_s
        self._asked_at = None

    def _train(self, granted: BatchGranted) -> None:
        if self._asked_at is None:
            return  # it came after the time was up
        self._note_wait()
        if not granted.groups:
            self._end("the budget is spent")
            return
        self._granted = granted
        self._client.say(f"trains step {self.step}")
        table = self._plan.config.simulation
        seconds = table.learner_step_s
        if table.learner_step_cv > 0:
            shape = table.learner_step_cv**-2
            seconds = self._rng.gammavariate(shape, table.learner_step_s / shape)
        self._timeline.after(seconds, self._trained, seconds)

    def _trained(self, seconds: float) -> None:
        self.train_s += seconds
        self._step_train_s = seconds
        self._carry_out(
            self._client.complete(self.step, train_s=seconds, wait_s=self._step_wait_s, mismatch=())
        )

    def _step_durable(self, step: int) -> None:
        assert self._granted is not None
        self.step = step
        self._is_last = self._granted.last or step >= self._plan.steps or self._time_is_up
        last = self._published
        due = last is None or step - last.step >= self._plan.settings.period
        self._step_publish_s = 0.0
        if due or self._is_last:
            self._publish(final=self._is_last, then=self._evaluate)
        else:
            self._evaluate()

    def _recorded(self) -> None:
        """The step is done, and its version published."""
        self._on_line(self._line())
        checkpoint = self._plan.config.checkpoint
        if self.step % checkpoint.every_steps == 0 or self._is_last:
            self._kept = [*self._kept, self.step][-checkpoint.keep :]
            kept = tuple(self._kept)
            self._carry_out(self._client.checkpoint_saved(self.step, kept))
        if self._is_last:
            reason = "the time of the simulation is over" if self._time_is_up else ""
            self._close(reason or "all steps are done")
        else:
            self._next_batch()

    def _end(self, reason: str) -> None:
        """Without another step."""
        if self._published is None or self._published.step != self.step:
            self._publish(final=True, then=lambda: self._close(reason))
        else:
            self._close(reason)

    def _close(self, reason: str) -> None:
        self._carry_out(self._client.close(reason, finished=True))

    # ----------------------------------------------------------------------- versions

    def _publish(self, *, final: bool, then: Callable[[], None]) -> None:
        began = self._timeline.now
        self._timeline.after(
            self._plan.config.simulation.publish_s, self._write, final, then, began
        )

    def _write(self, final: bool, then: Callable[[], None], began: float) -> None:
        version, before = Version(self._client.incarnation, self.step), self._published
        message = VersionPublished(
            version=version,
            manifest_digest=version_digest(version),
            assets_digest="",
            num_bytes=max(1, self._plan.version_bytes),
            origin=ORIGIN_ENDPOINT,
            origin_key=ORIGIN_KEY,
            final=final,
            deltas=() if before is None else self._deltas(version, before),
        )
        self._published = version

        def durable() -> None:
            self._step_publish_s = self._timeline.now - began
            then()

        self._then = durable
        self._carry_out(self._client.publish(message))

    def _deltas(self, version: Version, before: Version) -> tuple[DeltaOffer, ...]:
        size = self._plan.delta_bytes
        if not size:
            return ()
        base = version_digest(before)
        return (DeltaOffer(manifest_digest=delta_digest(version), num_bytes=size, base=base),)

    # -------------------------------------------------------------------------- evals

    def _first_eval(self) -> None:
        if self._plan.config.eval.every_steps:
            self._start_eval(then=self._next_batch)
        else:
            self._next_batch()

    def _evaluate(self) -> None:
        every, published = self._plan.config.eval.every_steps, self._published
        assert published is not None
        if every and self._is_last:
            self._start_eval(then=self._recorded)
            return
        last = self._last_eval_step
        if (
            every
            and published.step == self.step
            and (last is None or self.step // every > last // every)
        ):
            self._start_eval(then=None)
        self._recorded()

    def _start_eval(self, *, then: Callable[[], None] | None) -> None:
        """With `then` the learner waits for it, eval.timeout_s at most."""
        config, version = self._plan.config, self._published
        assert version is not None
        self._last_eval_step = version.step
        request = EvalRequest(
            incarnation=self._client.incarnation,
            eval_id=f"{version}",
            version=version,
            tasks=tuple(Task(index, "{}") for index in range(config.eval.num_tasks)),
            sampling=replace(config.sampling.sampling(), temperature=config.eval.temperature),
            group_size=config.eval.group_size,
        )
        if then is not None:
            self._awaited_eval, self._then = request.eval_id, then
            self._timeline.after(config.eval.timeout_s, self._eval_missed, request.eval_id)
        self._carry_out(self._client.evaluate(request))

    def _eval_done(self, result: EvalResult) -> None:
        self._results.append(result)
        self._eval_missed(result.eval_id)

    def _eval_missed(self, eval_id: str) -> None:
        """It is waited for no longer."""
        if eval_id == self._awaited_eval:
            self._awaited_eval = ""
            self._go_on()

    # ------------------------------------------------------------------------ metrics

    def _line(self) -> dict[str, Any]:
        """Of metrics.jsonl: what a learner without weights can know."""
        granted = self._granted
        assert granted is not None
        results = [self._result_of(group) for group in granted.groups]
        staleness, tokens, rewards, count = [], 0, 0.0, 0
        for result in results:
            for header in result.trajectories:
                versions = (s.version.step for s in header.spans)
                admitted = [v for v in versions if v >= granted.loss_from_step]
                if admitted:
                    staleness.append(granted.step - min(admitted))
                tokens += header.num_sampled
                rewards += header.reward
                count += 1
        busy_s = self._step_wait_s + self._step_train_s
        evaluated = self._next_result()
        return {
            "step": granted.step + 1,
            "policy_version": granted.step,
            "incarnation": granted.incarnation,
            "simulated": True,
            "reward_mean": rewards / count,
            "staleness_mean": sum(staleness) / len(staleness) if staleness else 0.0,
            "staleness_max": max(staleness, default=0),
            "logprob_diff_mean": None,
            "logprob_diff_tokens": 0,
            "tokens": tokens,
            "tokens_per_s": tokens / busy_s if busy_s > 0 else 0.0,
            "train_s": self._step_train_s,
            "wait_s": self._step_wait_s,
            "bubble_ratio": self._step_wait_s / busy_s if busy_s > 0 else 0.0,
            "publish_s": self._step_publish_s,
            "updates": self._plan.config.learner.updates_per_step,
            "groups_trained": len(granted.groups),
            "groups_expired": granted.groups_expired,
            "groups_failed": granted.groups_failed,
            "groups_filtered": granted.groups_filtered,
            "workers_ready": granted.workers_ready,
            "rollout_tokens_per_s": granted.tokens_per_s,
            "t_bcast_s": granted.t_bcast_s,
            "install_pause_s": granted.install_pause_s,
            "cost_usd": granted.cost_usd,
            "eval_reward": None if evaluated is None else evaluated.reward_mean,
            "eval_version": None if evaluated is None else evaluated.version.step,
            "eval_num_done": None if evaluated is None else evaluated.num_done,
            "eval_num_asked": None if evaluated is None else evaluated.num_asked,
            "time": round(self._timeline.now, 6),
        }

    def _next_result(self) -> EvalResult | None:
        if not self._results:
            return None
        if not self._is_last:
            return self._results.popleft()
        newest = max(self._results, key=lambda found: found.version.step)
        self._results.clear()
        return newest
