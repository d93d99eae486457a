"""The learner's connection to the coordinator, for asyncio.

`LearnerClient` is the shell around `core.learner_client` over any transport: sockets for a
learner process, a mailbox in memory for a program that embeds the coordinator. Every call
is a request that is asked until it is answered; each has a deadline or says, once a change,
what it waits for.

`learner_session.LearnerSession` blocks on it; `learner_transport` carries it over sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, cast

import structlog

import echo2
from echo2.core.learner_client import (
    BatchReady,
    BroadcastKnown,
    Ended,
    EvalDone,
    LearnerClientState,
    Outcome,
    RequestRefused,
    Seated,
    StepDurable,
    TasksNeeded,
    Transmit,
    VersionDurable,
    WaitingFor,
)
from echo2.errors import (
    Echo2Error,
    EnvironmentError_,
    FencedError,
    LearnerError,
    RefusedError,
    RunEndedError,
    WaitTimeoutError,
)
from echo2.messages import (
    PROTOCOL,
    BatchGranted,
    BatchGroup,
    BroadcastStatus,
    EvalRequest,
    EvalResult,
    LearnerHello,
    LearnerWelcome,
    Message,
    TasksSubmitted,
    VersionPublished,
)
from echo2.types import GroupMismatch, Sampling, Task, Version

log = structlog.get_logger()

TICK_S: Final = 0.2
ASK_AGAIN_S: Final = 2.0
T = TypeVar("T")
TaskSource = Callable[[int, int], tuple[list[Task], bool]]
"""(start, count) -> tasks [start, start + len) and whether there are none after them."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Admissible groups, leased to the learner step at version `step`.

    Tokens of versions below `loss_from_step` must leave the loss. `last`: no further batch
    will come.
    """

    step: int
    loss_from_step: int
    groups: list[BatchGroup]
    granted: BatchGranted
    last: bool


class Transport(Protocol):
    """Carries messages; may lose them. `on_message` is called on the event loop, and
    `on_failure` once when the transport itself broke. `trouble`: why nothing gets through now;
    "" when nothing is known to be wrong."""

    @property
    def trouble(self) -> str: ...

    async def start(
        self, on_message: Callable[[Message], None], on_failure: Callable[[BaseException], None]
    ) -> None: ...
    async def stop(self) -> None: ...
    def send(self, message: Message) -> None: ...


class LearnerClient:
    """One learner's requests, as coroutines. Use it on one event loop, one call of a kind at
    a time."""

    def __init__(
        self,
        transport: Transport,
        *,
        tasks: TaskSource,
        name: str = "learner",
        run_id: str = "",
        environment_version: str = "",
        connect_timeout_s: float | None = None,
        guest: bool = False,
        tasks_timeout_s: float | None = None,
    ) -> None:
        """`connect_timeout_s`: a coordinator that is away for so long ends the session, and
        `tasks_timeout_s` a source of tasks that gives none for so long.
        `guest`: it publishes only, takes the seat only from nobody, and leaves v as it is."""
        self._transport = transport
        self._tasks = tasks
        self._name = name
        self._run_id = run_id
        self._environment_version = environment_version
        self._connect_timeout_s = connect_timeout_s
        self._guest = guest
        self._tasks_timeout_s = tasks_timeout_s
        self.tasks_ended = False
        """The last of the tasks was handed over."""
        self._client: LearnerClientState | None = None
        self._waiters: dict[object, asyncio.Future[Any]] = {}
        self._evals_done: list[EvalResult] = []
        self._ended: Echo2Error | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._submitting: set[int] = set()
        self.waiting = ""
        """What the last call waits for, in a sentence."""

    # ------------------------------------------------------------------------ calls

    async def start(
        self,
        *,
        resume_step: int,
        digest: str = "",
        checkpoint_steps: Sequence[int] = (),
        timeout_s: float = 120.0,
    ) -> LearnerWelcome:
        """Say hello and take the seat. WaitTimeoutError if no coordinator answers."""
        hello = LearnerHello(
            protocol=PROTOCOL,
            echo2_version=echo2.__version__,
            name=self._name,
            run_id=self._run_id,
            resume_step=resume_step,
            digest=digest,
            checkpoint_steps=tuple(checkpoint_steps),
            environment_version=self._environment_version,
            hello_id=uuid.uuid4().hex,
            guest=self._guest,
        )
        self._client = LearnerClientState(hello, connect_timeout_s=self._connect_timeout_s)
        await self._transport.start(self._on_message, self._failed)
        self._spawn(self._ticks())
        self.waiting = "the coordinator's welcome"
        answer = self._expect(Seated)
        self._carry_out(self._client.start(time.monotonic()))
        seated: Seated = await self._await(Seated, answer, timeout_s)
        return seated.welcome

    async def next_batch(self, step: int) -> Batch | None:
        """The batch to train at version `step`; None when the data is exhausted.

        Waits as long as it takes: the coordinator ends what cannot make progress.
        """
        answer = self._expect(BatchReady)
        self._carry_out(self._state.request_batch(step))
        ready: BatchReady = await self._await(BatchReady, answer, None)
        if not ready.groups:
            return None
        granted = ready.granted
        return Batch(
            granted.step, granted.loss_from_step, list(ready.groups), granted, granted.last
        )

    async def complete(
        self, step: int, *, train_s: float, wait_s: float, mismatch: Sequence[GroupMismatch]
    ) -> None:
        """The batch of `step` was applied; returns when that is durable and v is step + 1."""
        answer = self._expect(StepDurable)
        self._carry_out(
            self._state.complete(step, train_s=train_s, wait_s=wait_s, mismatch=mismatch)
        )
        self.waiting = f"step {step} to be recorded by the coordinator"
        await self._await(StepDurable, answer, None)

    async def publish(self, message: VersionPublished) -> int:
        """Announce a version that the origin serves. Returns the step below which versions
        may leave the origin."""
        answer = self._expect(message.version)
        self._carry_out(self._state.publish(message))
        self.waiting = f"version {message.version} to be announced"
        durable: VersionDurable = await self._await(message.version, answer, None)
        return durable.keep_from

    async def broadcast(self) -> BroadcastStatus:
        """How far the newest version has come, now. Waits while the coordinator is away."""
        answer = self._expect(BroadcastKnown)
        self.waiting = "the coordinator to say how far the version has come"
        while not answer.done():
            self._carry_out(self._state.ask_broadcast())
            await asyncio.wait({answer}, timeout=ASK_AGAIN_S)
        known: BroadcastKnown = await answer
        return known.status

    async def checkpoint_saved(self, step: int, kept: Sequence[int]) -> None:
        self._carry_out(self._state.checkpoint_saved(step, tuple(kept)))

    async def evaluate(
        self, version: Version, tasks: Sequence[Task], sampling: Sampling, group_size: int
    ) -> str:
        """Ask for an eval of a published version; its result comes later."""
        eval_id = f"e{version.incarnation}.{version.step}"
        request = EvalRequest(
            incarnation=self._state.incarnation,
            eval_id=eval_id,
            version=version,
            tasks=tuple(tasks),
            sampling=sampling,
            group_size=group_size,
        )
        self._carry_out(self._state.evaluate(request))
        return eval_id

    async def wait_eval(self, eval_id: str, timeout_s: float) -> EvalResult:
        """The result of one eval. WaitTimeoutError after `timeout_s`."""
        for result in self._evals_done:
            if result.eval_id == eval_id:
                self._evals_done.remove(result)
                return result
        answer = self._expect(eval_id)
        self.waiting = f"eval {eval_id}"
        done: EvalDone = await self._await(eval_id, answer, timeout_s)
        return done.result

    async def poll_evals(self) -> list[EvalResult]:
        done, self._evals_done = self._evals_done, []
        return done

    @property
    def is_seated(self) -> bool:
        """Whether `start` has returned, and nothing has ended it since."""
        client = self._client
        return client is not None and client.incarnation > 0 and self._ended is None

    def say(self, text: str) -> None:
        self._state.say(text)

    async def close(self, reason: str, *, finished: bool, missing_steps: int = 0) -> None:
        """Say goodbye and close the transport. `missing_steps`: not done for want of tasks."""
        if self._client is not None and self._ended is None:
            self._carry_out(
                self._client.close(reason, finished=finished, missing_steps=missing_steps)
            )
        for task in self._background:
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._transport.stop()

    # ---------------------------------------------------------------------- helpers

    @property
    def _state(self) -> LearnerClientState:
        if self._client is None:
            raise LearnerError("the learner's session was not started; call start first")
        if self._ended is not None:
            raise self._ended
        return self._client

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._background.add(task)
        task.add_done_callback(self._background_ended)

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        log.error("learner_client_failed", exc_info=error)
        failed = LearnerError(f"the learner's session with the coordinator failed: {error}")
        failed.__cause__ = error
        self._end(failed)

    async def _ticks(self) -> None:
        assert self._client is not None
        while True:
            await asyncio.sleep(TICK_S)
            self._carry_out(self._client.tick(time.monotonic()))

    def _on_message(self, message: Message) -> None:
        assert self._client is not None
        self._carry_out(self._client.received(message, time.monotonic()))

    def _carry_out(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            match outcome:
                case Transmit(message):
                    self._transport.send(message)
                case Seated(welcome, first):
                    log.info(
                        "learner_seated",
                        incarnation=welcome.incarnation,
                        step=welcome.step,
                        again=not first,
                    )
                    self._answer(Seated, outcome)
                case BatchReady():
                    self._answer(BatchReady, outcome)
                case StepDurable():
                    self._answer(StepDurable, outcome)
                case VersionDurable(version, _):
                    self._answer(version, outcome)
                case BroadcastKnown():
                    self._answer(BroadcastKnown, outcome)
                case EvalDone(result):
                    if not self._answer(result.eval_id, outcome):
                        self._evals_done.append(result)
                case TasksNeeded(start, count):
                    # Asked again while the source still waits: it would take a thread more.
                    if start not in self._submitting:
                        self._submitting.add(start)
                        self._spawn(self._submit_tasks(start, count))
                case WaitingFor(text):
                    if text != self.waiting:
                        log.info("learner_waits", what=text)
                    self.waiting = text
                case RequestRefused(text):
                    self._fail_waiters(
                        RefusedError(f"the coordinator refused the learner's request: {text}")
                    )
                case Ended(kind, text, finished):
                    self._end(_ended_error(kind, text, finished))

    async def _submit_tasks(self, start: int, count: int) -> None:
        """User code makes the tasks: off the event loop, and its failure ends the session."""
        assert self._client is not None
        limit_s = self._tasks_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                tasks, exhausted = await _in_daemon_thread(lambda: self._tasks(start, count))
        except TimeoutError:
            raise EnvironmentError_(
                f"the environment made no task for {limit_s:g} s "
                f"(environment.rollout_timeout_s), asked for {count} from index {start} on; see "
                "what its task() waits for"
            ) from None
        finally:
            self._submitting.discard(start)
        self.tasks_ended |= exhausted
        message = TasksSubmitted(
            incarnation=self._client.incarnation,
            start=start,
            tasks=tuple(tasks),
            exhausted=exhausted,
        )
        self._carry_out(self._client.submit_tasks(message))

    def _expect(self, key: object) -> asyncio.Future[Any]:
        if self._ended is not None:
            raise self._ended
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiters[key] = future
        return future

    def _answer(self, key: object, outcome: Outcome) -> bool:
        future = self._waiters.pop(key, None)
        if future is None or future.done():
            return False
        future.set_result(outcome)
        return True

    async def _await(
        self, key: object, future: asyncio.Future[Any], timeout_s: float | None
    ) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            trouble = self._transport.trouble
            cause = f": {trouble}" if trouble else "; is the coordinator running and reachable?"
            raise WaitTimeoutError(f"waited {timeout_s:g} s for {self.waiting}{cause}") from None
        finally:
            self._waiters.pop(key, None)

    def _end(self, error: Echo2Error) -> None:
        self._ended = self._ended or error
        self._fail_waiters(self._ended)

    def _fail_waiters(self, error: Echo2Error) -> None:
        waiters, self._waiters = self._waiters, {}
        for future in waiters.values():
            if not future.done():
                future.set_exception(error)


def _ended_error(kind: str, text: str, finished: bool) -> Echo2Error:
    if kind == "fenced":
        return FencedError(text)
    if kind == "refused":
        return RefusedError(f"the coordinator refused this learner: {text}")
    if kind == "lost":
        return RunEndedError(text, finished=False)
    return RunEndedError(f"the coordinator ended: {text}", finished=finished)


async def _in_daemon_thread(work: Callable[[], T]) -> T:
    """User code that may never return must not keep the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(made: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, made))

    def run() -> None:
        made, error = None, None
        try:
            made = work()
        except BaseException as raised:  # raised again where it is waited for
            error = raised
        with contextlib.suppress(RuntimeError):  # nobody waits: the loop is closed
            loop.call_soon_threadsafe(settle, made, error)

    threading.Thread(target=run, name="tasks", daemon=True).start()
    return await future
