"""What breaks, when: each kind of fault as a Poisson process over the whole run.

Peers die, fall silent, leave and come back; a learner crashes, or is stopped and woken;
the coordinator is killed; its clock jumps; messages are repeated, or say what no honest
peer says. All of it stops at `Faults.until_s`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from echo2.core.task_queue import group_of
from echo2.messages import (
    PROTOCOL,
    BatchRequest,
    CheckpointSaved,
    EvalRequest,
    Goodbye,
    GroupResult,
    Heartbeat,
    LearnerHello,
    LeaseFailed,
    Message,
    StepCompleted,
    TasksSubmitted,
    VersionInstalled,
    VersionPublished,
)
from echo2.sim.learner import SimLearner, digest_of
from echo2.sim.network import DIRECTIONS, Direction
from echo2.sim.worker import SimWorker
from echo2.types import GroupId, GroupMismatch, LeaseId, PeerId, Sampling, Span, Task, Version

if TYPE_CHECKING:
    from echo2.sim.simulation import Simulation


class FaultInjector:
    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.faults = simulation.scenario.faults
        self.timeline = simulation.timeline
        self.rng = Random(f"faults {simulation.scenario.seed}")

    def start(self) -> None:
        faults = self.faults
        for mean_s, fault in (
            (faults.worker_death_s, self._worker_death),
            (faults.worker_silence_s, self._worker_silence),
            (faults.worker_drain_s, self._worker_drain),
            (faults.engine_death_s, self._engine_death),
            (faults.wrong_message_s, self._wrong_message),
            (faults.replay_s, self._replay),
            (faults.learner_crash_s, self._learner_crash),
            (faults.learner_stop_s, self._learner_stop),
            (faults.learner_silence_s, self._learner_silence),
            (faults.coordinator_restart_s, self._coordinator_restart),
            (faults.coordinator_crash_s, self._coordinator_crash),
            (faults.disk_full_s, self._disk_full),
            (faults.clock_jump_s, self._clock_jump),
            (faults.one_way_s, self._one_way),
            (faults.partition_s, self._partition),
        ):
            if mean_s:
                self._next(mean_s, fault)

    def _next(self, mean_s: float, fault: Callable[[], None]) -> None:
        delay_s = self.rng.expovariate(1.0 / mean_s)
        self.timeline.after(delay_s, self._strike, mean_s, fault)

    def _strike(self, mean_s: float, fault: Callable[[], None]) -> None:
        if self.timeline.now < self.faults.until_s:
            self.simulation.outcome.faults[fault.__name__.lstrip("_")] += 1
            fault()
            self._next(mean_s, fault)

    # ---------------------------------------------------------------------- workers

    def _any_worker(self) -> SimWorker | None:
        alive = [
            process
            for process in self.simulation.processes.values()
            if isinstance(process, SimWorker) and process.alive
        ]
        return self.rng.choice(alive) if alive else None

    def _come_back(self, worker: SimWorker) -> None:
        """A new process of the same name, after a rest; at once, sometimes."""
        rest_s = worker.model.rest_s * self.rng.random()
        index = int(worker.peer[1:])
        self.timeline.after(rest_s, self._start_again, worker, index)

    def _start_again(self, worker: SimWorker, index: int) -> None:
        if worker.alive:  # it still drains
            self.timeline.after(1.0, self._start_again, worker, index)
        else:
            self.simulation.start_worker(index)

    def _worker_death(self) -> None:
        if (worker := self._any_worker()) is not None:
            self.simulation.note(f"{worker.peer} dies")
            worker.die()
            self._come_back(worker)

    def _worker_drain(self) -> None:
        worker = self._any_worker()
        if worker is not None and not worker.leaving:
            self.simulation.note(f"{worker.peer} drains")
            worker.drain()
            self._come_back(worker)

    def _engine_death(self) -> None:
        if (worker := self._any_worker()) is not None:
            self.simulation.note(f"the engine of {worker.peer} dies")
            worker.lose_engine()

    def _worker_silence(self) -> None:
        if (worker := self._any_worker()) is not None:
            self._cut(worker.peer, self.rng.choice((2.0, 8.0, 40.0)))

    def _cut(self, peer: PeerId, seconds: float, *directions: Direction) -> None:
        network = self.simulation.network
        for direction in directions or DIRECTIONS:
            self.simulation.note(f"{peer} is cut off ({direction}) for {seconds:g} s")
            network.cut.add((peer, direction))
            self.timeline.after(seconds, network.cut.discard, (peer, direction))

    def _any_peer(self) -> PeerId:
        return self.rng.choice(sorted(self.simulation.processes))

    def _one_way(self) -> None:
        self._cut(self._any_peer(), self.rng.choice((2.0, 8.0, 40.0)), self.rng.choice(DIRECTIONS))

    def _partition(self) -> None:
        peers = sorted(self.simulation.processes)
        seconds = self.rng.choice((2.0, 8.0, 40.0))
        for peer in self.rng.sample(peers, self.rng.randint(1, len(peers))):
            self._cut(peer, seconds)

    # ------------------------------------------------------------ learner, coordinator

    def _learner_crash(self) -> None:
        learner = self.simulation.learner
        if learner is not None and learner.alive and not learner.stopped:
            self.simulation.note(f"{learner.peer} crashes")
            learner.die()
            rest_s = self.simulation.scenario.learner.rest_s * self.rng.random()
            self.timeline.after(rest_s, self.simulation.start_learner)

    def _learner_stop(self) -> None:
        """It is frozen, another one takes over, and then it wakes up."""
        learner = self.simulation.learner
        if learner is None or not learner.alive or learner.stopped:
            return
        self.simulation.note(f"{learner.peer} is stopped")
        learner.stop()
        self.timeline.after(self.rng.uniform(0.0, 10.0), self.simulation.start_learner)
        self.timeline.after(self.rng.uniform(0.0, 40.0), self._wake, learner)

    def _wake(self, learner: SimLearner) -> None:
        self.simulation.note(f"{learner.peer} wakes up")
        learner.wake()

    def _learner_silence(self) -> None:
        learner = self.simulation.learner
        if learner is not None and learner.alive:
            self._cut(learner.peer, self.rng.choice((2.0, 8.0, 40.0)))

    def _coordinator_restart(self) -> None:
        self.simulation.restart_coordinator()

    def _coordinator_crash(self) -> None:
        self.simulation.crash_at_next_event()

    def _disk_full(self) -> None:
        self.simulation.fill_disk()

    def _clock_jump(self) -> None:
        jump_s = self.rng.choice((-30.0, -1.0, 3.0, 20.0, 120.0))
        self.simulation.note(f"the clock jumps by {jump_s:g} s")
        self.simulation.clock_offset_s += jump_s

    # -------------------------------------------------------------- messages that lie

    def _replay(self) -> None:
        """A result comes once more, as it was."""
        if self.simulation.recent:
            peer, result = self.rng.choice(self.simulation.recent)
            self.simulation.send(None, peer, result)

    def _wrong_message(self) -> None:
        """What no honest peer says; it must be refused or ignored."""
        peer, message = self.rng.choice((self._wrong_of_worker, self._wrong_of_learner))()
        if message is not None:
            self.simulation.note(f"wrong: {peer} {type(message).__name__}")
            self.simulation.send(None, peer, message)

    def _wrong_of_worker(self) -> tuple[PeerId, Message | None]:
        worker, rng = self._any_worker(), self.rng
        stranger = PeerId("stranger")
        if worker is None:
            return stranger, Heartbeat(sequence=1, state="ready", lease_tokens={})
        version = self._wrong_version()
        kind = rng.randrange(6)
        if kind == 0:
            return stranger, Heartbeat(sequence=1, state="ready", lease_tokens={})
        if kind == 1:
            digest = digest_of(version) if rng.random() < 0.5 else "f" * 64
            return worker.peer, VersionInstalled(
                version=version, manifest_digest=digest, fetch_s=0, install_s=0, pause_s=0
            )
        if kind == 2:
            return worker.peer, LeaseFailed(
                lease=LeaseId("l9.999"), group=GroupId("g0"), stage="lost", text="never granted"
            )
        if not worker.running:
            return worker.peer, None
        running = rng.choice(list(worker.running.values()))
        result = worker.result_of(running)
        if kind == 3:
            return PeerId("w0"), result  # of another worker's lease, unless it is w0
        if kind == 4:
            return worker.peer, self._short_of_one(result)
        return worker.peer, self._sampled_by(result, version)

    def _wrong_version(self) -> Version:
        state, rng = self.simulation.core.state, self.rng
        if rng.random() < 0.4:  # v itself, which may not be published yet
            return Version(state.lineage.incarnation, state.step)
        incarnation = max(0, state.lineage.incarnation - rng.randrange(3))
        return Version(incarnation, max(0, state.step + rng.randrange(-6, 3)))

    def _short_of_one(self, result: GroupResult) -> GroupResult:
        last = result.trajectories[-1]
        return replace(
            result,
            trajectories=(*result.trajectories, last),
            token_ids=result.token_ids + bytes(4 * last.length),
            logprobs=result.logprobs + bytes(4 * last.length),
            loss_mask=result.loss_mask + bytes(last.length),
        )

    def _sampled_by(self, result: GroupResult, version: Version) -> GroupResult:
        """It claims to be of `version`, which may be unpublished, dead, old or too new."""
        told = tuple(
            replace(t, spans=tuple(Span(version, s.start, s.end) for s in t.spans))
            for t in result.trajectories
        )
        books = self.simulation.invariants.books
        is_eval = result.group.startswith("e") and version != result.trajectories[0].max_version
        exists = version in books.published and version.step <= books.step
        if exists and books.is_alive(version) and not is_eval:
            return self._short_of_one(result)  # that would be believed
        return replace(result, trajectories=told)

    def _wrong_of_learner(self) -> tuple[PeerId, Message | None]:
        state, rng = self.simulation.core.state, self.rng
        learner = self.simulation.learner
        peer = learner.peer if learner is not None else PeerId("learner")
        incarnation = max(0, state.lineage.incarnation - rng.randrange(3))
        old = incarnation < state.lineage.incarnation
        step = max(0, state.step + rng.choice((-2, -1, 0, 1, 2, 5)))
        if step == state.step and not old:
            step += 1  # the step under way would be believed
        version = Version(incarnation, state.step + rng.randrange(0 if old else 1, 3))
        choices: tuple[Message, ...] = (
            StepCompleted(
                incarnation=incarnation,
                step=step,
                groups=(group_of(step),) * 2,  # by the time it comes that step may be under way
                train_s=0,
                wait_s=0,
                mismatch=(GroupMismatch(group_of(step), 64, 0.5),),
            ),
            BatchRequest(incarnation=incarnation, step=step),
            TasksSubmitted(
                incarnation=incarnation, start=step, tasks=(Task(step, "{}"), Task(step + 2, "{}"))
            ),
            _publication(version),
            self._early_publication(),
            CheckpointSaved(incarnation=incarnation, step=state.step + 3, kept=(state.step + 3,)),
            EvalRequest(
                incarnation=incarnation,
                eval_id="wrong",
                version=version,
                tasks=(Task(0, "{}"),),
                sampling=Sampling(),
            ),
            LearnerHello(
                protocol=PROTOCOL,
                echo2_version="simulated",
                name="learner",
                incarnation=state.lineage.incarnation + 5,
                resume_step=0,
            ),
            Goodbye(
                reason="a fenced learner leaves",
                finished=True,
                incarnation=max(1, state.lineage.incarnation - 1),
            ),
        )
        message = rng.choice(choices)
        if isinstance(message, LearnerHello):
            peer = PeerId("stranger")
        elif isinstance(message, Goodbye) and state.lineage.incarnation < 2:
            return peer, None  # nobody is fenced yet
        return peer, message

    def _early_publication(self) -> VersionPublished:
        """v of the learner in the seat, whether it is due or not."""
        state = self.simulation.core.state
        return _publication(Version(state.lineage.incarnation, state.step))


def _publication(version: Version) -> VersionPublished:
    return VersionPublished(
        version=version,
        manifest_digest=digest_of(version),
        assets_digest="",
        num_bytes=1,
        origin="",
        origin_key="",
    )
