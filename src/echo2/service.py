"""The coordinator's shell: sockets, clock, files and HTTP around `CoordinatorState`.

`Coordinator` is what the daemon runs and what a program embeds; there is no other. It
receives, decodes, hands the event to the core, and carries out the effects in order: lines
of events.jsonl first, then messages. What came together, messages of one turn of a socket or
records of one commit, is taken event by event and settled once. It decides nothing about versions,
groups or leases.

    async with Coordinator(config, run_dir=...) as coordinator:
        await coordinator.run_until_finished()               # a daemon
        await coordinator.submit(tasks)                      # or embedded: this program learns
        batch = await coordinator.next_batch()
        await coordinator.complete(batch)
        await coordinator.publish(snapshot)
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import sqlite3
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import structlog

from echo2 import wire
from echo2.audit_key import load_or_create_audit_key
from echo2.config import Config, config_to_toml
from echo2.config_settings import settings_of
from echo2.coordinator_sockets import CoordinatorSockets
from echo2.core.coordinator import CoordinatorState
from echo2.core.effects import (
    DeliverGroup,
    Effect,
    Emit,
    Finish,
    OrderAudit,
    Persist,
    ProbeRelay,
    Send,
    StartMachine,
    StopMachine,
)
from echo2.core.events import (
    Event,
    KeyRevoked,
    PardonRequested,
    Persisted,
    Received,
    RelayProbed,
    StopRequested,
    Tick,
)
from echo2.core.restored import Restored
from echo2.core.status import status as core_status
from echo2.embedding import EmbeddedLearner, Tensors
from echo2.errors import ConfigError, ProtocolError, RemoteProtocolError
from echo2.folder_errors import folder_errors
from echo2.frames import frames_problem
from echo2.http_api import HttpApi
from echo2.learner_client import Batch
from echo2.ledger import durable as ledger
from echo2.ledger.durable import DurableLedger
from echo2.ledger.events_log import EventsLog
from echo2.messages import (
    BatchGroup,
    Goodbye,
    GroupResult,
    LaneOpened,
    LeaseFailed,
    Message,
    Refused,
    VersionPublished,
)
from echo2.metrics import CoordinatorMetrics
from echo2.net.probe import probe_endpoint
from echo2.net.sockets import close_context, endpoint_of, make_context
from echo2.net.tasks import LoopLag, OwnedTasks
from echo2.pardons import read_pardons, remove_pardon
from echo2.provision.book import MachineBook
from echo2.provision.link import KeeperLink
from echo2.types import PeerId, Task, Version
from echo2.weights.files import make_folder, write_whole

log = structlog.get_logger()

TICK_S: Final = 0.1
PERSISTED_PER_TURN: Final = 32
PERSISTED_TURN_S: Final = 0.002
"""Records that the core takes before others have their turn, and how long it may take them."""
LEAVE_S: Final = 5.0
"""At the end learner and workers may take so long to read that it is the end, and why."""
QUIET_EVENTS: Final = frozenset(
    {
        *("group_ended", "lease_granted", "version_installed", "step_completed"),
        *("audit_opened", "group_audited"),
    }
)
"""Events too frequent for the log at level info; even to say nothing of them takes its time."""
LOCAL_LEARNER: Final = PeerId("learner:embedded")
UNREADABLE: Final = (
    *(sqlite3.Error, ProtocolError),
    *(ValueError, TypeError, LookupError, AttributeError),  # of a line that lacks a field
)
"""What comes of records that were damaged, or are another program's."""


class Coordinator:
    """Serves workers and a learner. Use as an async context manager on one event loop.

    `run_dir` is the run's folder (run.dir/run.name by default): keys, addresses, records.
    An earlier coordinator's records in it are taken up.
    """

    def __init__(self, config: Config, *, run_dir: Path | None = None) -> None:
        self.config = config
        self.run_dir = Path(run_dir) if run_dir is not None else _default_run_dir(config)
        self.control_endpoint = ""
        self.rollouts_endpoint = ""
        self.public_key = ""
        self.http_url = ""
        self.run_id = ""
        self.refused: Counter[str] = Counter()
        self._is_debugging = config.log.level == "debug"
        self._ledger = DurableLedger(self.run_dir)
        self._metrics = CoordinatorMetrics()
        self._lag = LoopLag(on_sample=self._metrics.lag_samples.observe)
        self._context = make_context()
        self._tasks = OwnedTasks("coordinator")
        self._finished = asyncio.Event()
        self._finish: Finish | None = None
        self._events: deque[Event] = deque()
        """Those that came of effects, while these are carried out."""
        self._turn: list[list[Effect]] = []
        """Of each event that was taken and is not settled yet: its effects."""
        self._carrying_out = self._settles_on = False
        self._persisted: deque[int] = deque()
        """Records that are on the disk, and the core has not been told so."""
        self._left: set[PeerId] = set()
        self._vocab_size = 0
        self._goodbye = asyncio.Event()
        self._local: Callable[[Message], None] | None = None
        self._machines: KeeperLink | None = None
        self._exit = contextlib.AsyncExitStack()

    # ------------------------------------------------------------------- life-cycle

    async def __aenter__(self) -> Coordinator:
        try:
            await self._start()
        except BaseException:  # also when it is cancelled: nothing that was started is left
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self._embedded.stop()
            if self._finish is None:
                self.stop("the coordinator is closed")
            await self._let_peers_leave()
            if self._machines is not None:
                await self._machines.end()
        finally:  # also when the records cannot be written any more
            await self._exit.aclose()

    async def _let_peers_leave(self) -> None:
        """Keep the sockets open until all have read their Shutdown and said goodbye."""
        seat = self._core.state.seat
        peers = set(self._core.state.members.workers)
        if seat.peer is not None and seat.peer != LOCAL_LEARNER and not seat.silent:
            peers.add(seat.peer)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                while peers - self._left:
                    self._goodbye.clear()
                    await self._goodbye.wait()

    async def _start(self) -> None:
        self._exit.push_async_callback(close_context, self._context)
        with folder_errors(self.run_dir):
            make_folder(self.run_dir)
        self._exit.enter_context(_only_coordinator_of(self.run_dir))
        self._log = EventsLog(self.run_dir / ledger.EVENTS)
        self._exit.push_async_callback(self._ledger.stop)
        self._exit.callback(self._log.close)
        restored = await asyncio.to_thread(self._restored)
        self._log.open()
        self.run_id = self._known_run_id()
        audit_key = load_or_create_audit_key(self.run_dir) if self.config.audit.share else b""
        settings = settings_of(self.config, self.run_id, audit_key)
        self._core = CoordinatorState(settings, restored)
        resolved = self.run_dir / "config.resolved.toml"
        if not resolved.exists():
            with folder_errors(self.run_dir):  # it may hold a token
                write_whole(resolved, config_to_toml(self.config).encode(), mode=0o600)
        with folder_errors(self.run_dir):
            await self._ledger.start(self._on_persisted)
        await self._listen()
        await self._serve_http()
        self._embedded = EmbeddedLearner(self)
        self._exit.push_async_callback(self._tasks.stop)
        self._exit.push_async_callback(self._embedded.stop)
        self._tasks.start(self._ticks(), name="ticks")
        self._tasks.start(self._lag.run(), name="lag")
        self._tasks.start(self._ledger.wait(), name="ledger")
        self._tasks.start(self._sockets.wait(), name="sockets")
        self.feed(Tick())
        await self._keep_machines()
        record = {
            "run_id": self.run_id,
            "control": self.control_endpoint,
            "rollouts": self.rollouts_endpoint,
            "join": self._sockets.join_endpoint,
            "http": self.http_url,
            "public_key": self.public_key,
            "pid": os.getpid(),
        }
        with folder_errors(self.run_dir):
            write_whole(self.run_dir / "coordinator.json", json.dumps(record).encode())
        log.info(
            "coordinator_started",
            run_id=self.run_id,
            control=self.control_endpoint,
            http=self.http_url,
            step=self._core.state.step,
        )

    def _restored(self) -> Restored | None:
        """What an earlier coordinator left. ConfigError when it cannot be read."""
        index, payloads = self.run_dir / ledger.FILE, self.run_dir / ledger.FOLDER
        if not index.exists() and payloads.is_dir() and any(payloads.iterdir()):
            raise ConfigError(
                f"{index} is gone, and {payloads} holds groups that it knew of; restore it from a "
                "copy; or remove that folder, and the groups in it are sampled again"
            )
        try:
            return self._ledger.restored()
        except UNREADABLE as error:
            raise ConfigError(
                f"what an earlier coordinator left in {self.run_dir} ({ledger.FILE}, "
                f"{ledger.FOLDER}/, events.jsonl) cannot be read ({type(error).__name__}: "
                f"{error}); restore the folder from a copy, or give another --run-dir"
            ) from error

    def _known_run_id(self) -> str:
        """The id that this folder's run has, or a new one. ConfigError for a file that does not
        say: under another id all that belongs to the run would be refused."""
        path = self.run_dir / "coordinator.json"
        try:
            return str(json.loads(path.read_text())["run_id"])
        except FileNotFoundError:
            return uuid.uuid4().hex[:16]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} does not say which run this is ({type(error).__name__}: {error}); restore "
                "it from a copy, or remove it: the run gets a new id then, and its learner and "
                "workers must be started again"
            ) from error

    async def _listen(self) -> None:
        self._sockets = CoordinatorSockets(
            self._context,
            self.config,
            self.run_dir,
            on_message=self._on_message,
            on_turn=self._settle,
            on_revoked=lambda peer: self.feed(KeyRevoked(peer)),
            on_event=self._on_socket_event,
        )
        self._exit.push_async_callback(self._sockets.stop)
        await self._sockets.start(self.run_id)
        self.public_key = self._sockets.public_key
        self.control_endpoint = self._sockets.control_endpoint
        self.rollouts_endpoint = self._sockets.rollouts_endpoint

    async def _serve_http(self) -> None:
        http = self.config.http
        if not http.enabled:
            return
        api = HttpApi(
            host=http.host,
            port=http.port,
            token=http.token,
            status=self.status,
            metrics=self._render_metrics,
        )
        await api.start()
        self._exit.push_async_callback(api.stop)
        self.http_url = api.url

    async def _keep_machines(self) -> None:
        """Have a keeper start and stop machines, if any are to be."""
        if self.config.provisioner.kind == "static":
            left = MachineBook(self.run_dir).records()
            if left:
                raise ConfigError(
                    f"{self.run_dir / 'machines'} names {len(left)} machine(s) that may be on, "
                    f'{left[0].worker} first, and provisioner.kind is "static": start the '
                    "coordinator with the [provisioner] that started them, and it stops them"
                )
            return
        self._machines = KeeperLink(
            self.config,
            self.run_dir,
            on_event=self.feed,
            join=lambda: (self._join_endpoint(), self.public_key),
        )
        self._exit.callback(self._machines.close)
        self._tasks.start(self._machines.run(), name="machines")
        await self._machines.accepted()

    def _join_endpoint(self) -> str:
        """As peers are told it."""
        port = int(self._sockets.join_endpoint.rpartition(":")[2])
        return endpoint_of(self.config.net.host, port)

    async def run_until_finished(self) -> int:
        """Serve until the run is over or `stop` is called. Returns the exit code: 0 when the
        run finished or was stopped on request, 1 when it could not go on."""
        waiting = asyncio.create_task(self._finished.wait())
        crash = asyncio.create_task(self._tasks.wait())
        try:
            await asyncio.wait({waiting, crash}, return_when=asyncio.FIRST_COMPLETED)
            if crash.done():
                await crash
        finally:
            for task in (waiting, crash):
                task.cancel()
            await asyncio.gather(waiting, crash, return_exceptions=True)
        assert self._finish is not None
        return 0 if self._finish.ok else 1

    def stop(self, reason: str) -> None:
        """End the coordinator; the run can be resumed."""
        self.feed(StopRequested(reason))

    @property
    def next_task_index(self) -> int:
        """The position in the stream of tasks."""
        return self._core.state.stream.next_index

    @property
    def finish(self) -> Finish | None:
        """How it ended, once it did."""
        return self._finish

    # -------------------------------------------------------------------- embedding

    async def submit(self, tasks: list[Task] | list[str]) -> None:
        """Prompts in. A str is a task's payload and follows those submitted before; a Task
        keeps its index (to submit again what a former run of the folder left open)."""
        await self._embedded.submit(tasks)

    async def end_of_tasks(self) -> None:
        """No more tasks will come: `next_batch` returns None after the last."""
        await self._embedded.end_of_tasks()

    async def next_batch(self) -> Batch | None:
        """Admissible groups, leased to this step; None when all tasks are used up."""
        return await self._embedded.next_batch()

    async def complete(self, batch: Batch) -> int:
        """The step is done. Returns v, which is batch.step + 1, durable."""
        return await self._embedded.complete(batch)

    async def publish(
        self, snapshot: Path | str | Tensors, *, assets: Path | str | None = None
    ) -> Version:
        """Publish tensors (name -> array) or a safetensors folder as version v.

        `assets`: a folder with the tokenizer and the model's configuration, which workers
        need before the first version; the snapshot's own folder by default.
        """
        return await self._embedded.publish(snapshot, assets=assets)

    # ------------------------------------------------------------------------ status

    def status(self) -> dict[str, Any]:
        """JSON-able: what /api/status shows."""
        found = core_status(self._core.state, self._core.dispatcher.reason)
        found["loop_lag_s"] = round(self._lag.ewma_s, 6)
        found["refused"] = dict(self._all_refused())
        return found

    def _all_refused(self) -> Counter[str]:
        return self.refused + self._sockets.refused

    async def _render_metrics(self) -> bytes:
        """In a thread: of a thousand workers there is much to write."""
        return await asyncio.to_thread(
            self._metrics.render,
            self.status(),
            dict(self._all_refused()),
            lag_s=self._lag.ewma_s,
            lag_max_s=self._lag.take_max_s(),
            num_tasks=len(asyncio.all_tasks()),
        )

    # ------------------------------------------------------------------------ events

    def feed(self, event: Event) -> None:
        """Hand an event to the core; effects are carried out before the next one."""
        if self._carrying_out:
            self._events.append(event)
            return
        self._take(event)
        self._settle()

    def own(self, coroutine: Coroutine[Any, Any, None], *, name: str) -> None:
        """Run beside the coordinator; its crash is the coordinator's."""
        self._tasks.start(coroutine, name=name)

    def connect_local(self, on_message: Callable[[Message], None]) -> Callable[[Message], None]:
        """The transport of the embedding program's learner. Returns its way to send."""
        self._local = on_message

        def send(message: Message) -> None:
            event = self._received(LOCAL_LEARNER, message)
            if event is not None:
                self.feed(event)

        return send

    def _take(self, event: Event) -> None:
        """Let the core take an event; `_settle` follows."""
        try:
            self._turn.append(self._core.take(event, time.monotonic()))
        except RemoteProtocolError as error:
            assert isinstance(event, Received)
            self.refused[error.reason] += 1
            self._sockets.refused_by_core(event.peer, event.message, error)
            refusal = Refused(reason=error.reason, text=str(error)[:2048], fatal=False)
            self._turn.append([Send(event.peer, refusal)])

    def _settle(self) -> None:
        """Let the core settle what it took, and carry out what follows from all of it. What it
        puts off is done once others on the event loop had their turn."""
        self._carrying_out = True
        try:
            while self._turn:
                turn, self._turn = self._turn, []
                turn.append(self._core.settle(grants=not self._settles_on))
                self._carry_out(turn)
                while self._events:
                    self._take(self._events.popleft())
        finally:
            self._carrying_out = False
        if not self._core.is_settled and not self._settles_on:
            self._settles_on = True
            self._tasks.call_soon(self._settle_on, name="settle")

    def _settle_on(self) -> None:
        self._settles_on = False
        self._turn.append([])
        self._settle()

    def _on_message(self, peer: PeerId, message: Message) -> None:
        """`_settle` is called when the socket's turn is over."""
        event = self._received(peer, message)
        if event is not None:
            self._take(event)

    def _on_persisted(self, record_ids: Sequence[int]) -> None:
        if not self._persisted:
            self._tasks.call_soon(self._take_persisted, name="persisted")
        self._persisted.extend(record_ids)

    def _take_persisted(self) -> None:
        """A few at a time: a commit may hold a thousand."""
        until_s = time.monotonic() + PERSISTED_TURN_S
        for _ in range(min(PERSISTED_PER_TURN, len(self._persisted))):
            self._take(Persisted(self._persisted.popleft()))
            if time.monotonic() > until_s:
                break
        self._settle()
        if self._persisted:
            self._tasks.call_soon(self._take_persisted, name="persisted")

    def _received(self, peer: PeerId, message: Message) -> Event | None:
        if isinstance(message, Goodbye) and (self._finish is not None or message.finished):
            self._left.add(peer)
            self._goodbye.set()
        if isinstance(message, VersionPublished):
            self._vocab_size = message.vocab_size
        if (
            isinstance(message, GroupResult)
            # The frames of one that nobody waits for may be large, and are not looked at.
            and self._core.workers.may_deliver(peer, message)
            and (problem := frames_problem(message, vocab_size=self._vocab_size))
        ):
            self.refused["frames"] += 1
            log.warning("result_refused", peer=peer, lease=message.lease, reason=problem)
            message = LeaseFailed(
                lease=message.lease, group=message.group, stage="engine", text=problem
            )
        if isinstance(message, LaneOpened):
            return None
        return Received(peer, message, self._sockets.key_of(peer))

    def _on_socket_event(self, event: str, fields: dict[str, Any]) -> None:
        """Between the run's own first and last event."""
        if self._core.started_at is not None and self._finish is None:
            self._carry_out([[Emit(event, fields)]])

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._sockets.look_at_keys()
            self._look_at_pardons()
            self.feed(Tick())

    def _look_at_pardons(self) -> None:
        for peer in read_pardons(self.run_dir):
            self.feed(PardonRequested(peer))
            remove_pardon(self.run_dir, peer)

    # ----------------------------------------------------------------------- effects

    def _carry_out(self, turn: list[list[Effect]]) -> None:
        """All lines of events.jsonl first; then, in order, what each event made of them: the ledger
        is told of a record before it is told of what later events did with it."""
        told: list[tuple[list[tuple[Emit, int]], list[Effect]]] = []
        for effects in turn:
            lines = [
                (effect, self._write(effect)) for effect in effects if isinstance(effect, Emit)
            ]
            told.append((lines, effects))
        self._log.flush()
        for lines, effects in told:
            for emit, position in lines:  # what the ledger takes in is in the file
                self._ledger.observe(emit.event, emit.fields, position)
            for effect in effects:
                self._carry_out_one(effect)

    def _write(self, emit: Emit) -> int:
        """Write and log it; where in events.jsonl it ends."""
        position = self._log.write(emit.event, emit.fields)
        self._metrics.observe(emit.event, emit.fields)
        if emit.event not in QUIET_EVENTS:
            log.info(emit.event, **emit.fields)
        elif self._is_debugging:
            log.debug(emit.event, **emit.fields)
        return position

    def _carry_out_one(self, effect: Effect) -> None:
        match effect:
            case Send(peer, message):
                self._send(peer, message)
            case DeliverGroup() | OrderAudit():
                if effect.result.payload is None:
                    self._tasks.start(self._send_stored(effect), name="stored group")
                else:
                    self._send(effect.peer, _with_payload(effect, effect.result.payload))
            case Persist(record_id, record):
                self._ledger.append(record_id, record)
            case ProbeRelay(peer, endpoint):
                self._tasks.start(self._probe(peer, endpoint), name="probe")
            case StartMachine() | StopMachine():
                assert self._machines is not None
                self._machines.carry_out(effect)
            case Finish():
                self._finish = effect
                self._finished.set()
            case Emit("worker_gone", fields):
                self._sockets.forget(PeerId(fields["worker"]))
            case Emit():
                pass  # written above

    async def _send_stored(self, effect: DeliverGroup | OrderAudit) -> None:
        payload = await self._ledger.read(effect.group, effect.result.lease)
        self._send(effect.peer, _with_payload(effect, payload))

    async def _probe(self, peer: PeerId, endpoint: str) -> None:
        probe = await probe_endpoint(endpoint)
        self.feed(RelayProbed(peer, endpoint, probe.ok, probe.rtt_s, probe.reason))

    def _send(self, peer: PeerId, message: Message) -> None:
        if peer == LOCAL_LEARNER:
            if self._local is not None:
                self._tasks.call_soon(partial(self._local, message), name="local learner")
            return
        self._sockets.send(peer, message)


@contextlib.contextmanager
def _only_coordinator_of(run_dir: Path) -> Iterator[None]:
    """Two on one folder would hand out the same tasks and mix their records."""
    with contextlib.ExitStack() as stack:
        with folder_errors(run_dir):
            file = stack.enter_context((run_dir / "coordinator.lock").open("a+", encoding="ascii"))
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"{run_dir} has a coordinator already (pid {file.read().strip()}); end that one, "
                "or give another --run-dir"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def _with_payload(effect: DeliverGroup | OrderAudit, payload: object) -> Message:
    if isinstance(effect, OrderAudit):
        return effect.message(payload)
    assert isinstance(payload, GroupResult)
    group = BatchGroup(
        incarnation=effect.incarnation,
        step=effect.step,
        group=effect.group,
        worker=effect.result.worker,
        task=effect.task,
        trajectories=effect.result.trajectories,
        token_ids=payload.token_ids,
        logprobs=payload.logprobs,
        loss_mask=payload.loss_mask,
    )
    wire.hand_on(group, payload, "trajectories")
    return group


def _default_run_dir(config: Config) -> Path:
    return Path(config.run.dir) / config.run.name
