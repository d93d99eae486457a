"""The worker daemon: sockets, processes and a clock around `WorkerState`.

It decides nothing: every message, outcome and tick goes to the state machine, and its
effects are carried out in order. It imports no torch; the engine and the environments run
in processes of their own, except the null engine with a built-in environment, which are
light and trusted.

    claim a name -> Started -> (events in, effects out) -> Exit -> everything is ended
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import structlog
import uvloop

from echo2.config import Config, load_config
from echo2.config_vllm import precision_of
from echo2.core import worker_events as events
from echo2.core.worker import WorkerState
from echo2.errors import ConfigError, Echo2Error, EngineError, RemoteProtocolError
from echo2.logs import setup_logging
from echo2.messages import Message
from echo2.net.descriptors import raise_descriptor_limit
from echo2.net.sockets import close_context, make_context
from echo2.net.tasks import Backoff, LoopLag, OwnedTasks
from echo2_workers.audits import Audits
from echo2_workers.canary import tolerance_of
from echo2_workers.downloads import Downloads
from echo2_workers.engine_process import EngineHandle, InstallOrder
from echo2_workers.environment import BUILTIN, About, about_environment, add_import_paths
from echo2_workers.environment_pool import describe_environment
from echo2_workers.groups import Groups
from echo2_workers.identity import Identity, claim_identity
from echo2_workers.installing import InstallError
from echo2_workers.links import Links
from echo2_workers.parts import (
    doubts,
    make_engine,
    make_environments,
    make_model_folder,
    relay_bind,
    settings_of,
)

log = structlog.get_logger(__name__)

TICK_S: Final = 0.2
FLUSH_S: Final = 3.0
"""At the end, queued messages (results, a goodbye) may leave for so long."""
RECONNECT_BASE_S: Final = 0.2
RECONNECT_MAX_S: Final = 10.0


def main(config_path: Path | str, run_dir: Path | None, name: str, overrides: Sequence[str]) -> int:
    """Run a worker until it is drained or the run is over: 0. Raises Echo2Error with the
    cause when it cannot go on."""
    config = load_config(config_path, overrides)
    setup_logging(config.log.level, config.log.format)
    run_dir = Path(config.run.dir) / config.run.name if run_dir is None else Path(run_dir)
    identity = claim_identity(config, run_dir.absolute(), name or config.worker.name)
    return serve(config, run_dir, identity, [Path(config_path).absolute().parent, Path.cwd()])


def serve(config: Config, run_dir: Path, identity: Identity, import_paths: Sequence[Path]) -> int:
    """What `main` does once it is known who this worker is. Releases `identity`."""
    add_import_paths(*import_paths)
    raise_descriptor_limit()
    try:
        return uvloop.run(_run(config, run_dir.absolute(), identity, import_paths))
    finally:
        identity.release()


async def _run(
    config: Config, run_dir: Path, identity: Identity, import_paths: Sequence[Path]
) -> int:
    with structlog.contextvars.bound_contextvars(worker=identity.name):
        if config.worker.engine == "none":
            about = About("")  # it plays nothing, so the environment need not be installed
        elif config.environment.name in BUILTIN:
            about = about_environment(config.environment.name)
        else:
            about = await describe_environment(
                config.environment.name, folder=identity.folder, import_paths=import_paths
            )
        daemon = WorkerDaemon(config, run_dir, identity, about, import_paths)
        return await daemon.run()


class WorkerDaemon:
    def __init__(
        self,
        config: Config,
        run_dir: Path,
        identity: Identity,
        about: About,
        import_paths: Sequence[Path],
    ) -> None:
        self._config = config
        self._identity = identity
        self._settings = settings_of(config, identity.name, about)
        self._core = WorkerState(self._settings)
        self._events: deque[events.Event] = deque()
        self._handling = False
        self._exit: asyncio.Future[events.Exit] = asyncio.get_running_loop().create_future()
        self._tasks = OwnedTasks("worker")
        self._lag = LoopLag()
        self._backoff = Backoff(random.Random(), base_s=RECONNECT_BASE_S, max_s=RECONNECT_MAX_S)
        self._context = make_context()
        self._links = Links(
            self._context,
            config=config,
            run_dir=run_dir,
            identity=identity,
            on_message=self._post,
            on_lost=lambda reason: self._post(events.ConnectionLost(reason)),
        )
        self._connecting: asyncio.Task[None] | None = None
        self._downloads = Downloads(
            self._context,
            identity,
            bytes_max=config.worker.store_bytes_max,
            timeout_s=config.worker.fetch_timeout_s,
            relay_bind=relay_bind(config),
            uplink_mbit=config.worker.uplink_mbit,
            post=self._post,
        )
        self._engine: EngineHandle | None = None
        self._environments = make_environments(
            config,
            folder=identity.folder,
            import_paths=import_paths,
            on_fatal=lambda text: self._post(events.StartFailed(text)),
        )
        self._environments_up = False
        self._groups = Groups(
            self._environments,
            engine=self._live_engine,
            rollout_timeout_s=config.environment.rollout_timeout_s,
            post=self._post,
        )
        self._audits = Audits(
            self._environments,
            rollout_timeout_s=config.environment.rollout_timeout_s,
            post=self._post,
        )

    async def run(self) -> int:
        """Until the state machine says Exit. Raises Echo2Error with its reason for code 1."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        crash = asyncio.create_task(self._tasks.wait())
        try:
            log.info(
                "worker_started",
                engine=self._config.worker.engine,
                slots=self._config.worker.slots,
                environment=self._config.environment.name,
                folder=str(self._identity.folder),
            )
            for event, reason in doubts(self._config).items():
                log.warning(event, reason=reason)
            self._tasks.start(self._lag.run(), name="lag")
            self._tasks.start(self._tick(), name="tick")
            await self._start_relay()
            self._tasks.start(self._downloads.wait(), name="downloads")
            self._post(events.Started())
            ends: set[asyncio.Future[Any]] = {self._exit, crash}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not self._exit.done():
                await crash
            ended = await self._exit
        finally:
            crash.cancel()
            await asyncio.gather(crash, return_exceptions=True)
            await self._close()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        log.info("worker_stopped", code=ended.code, reason=ended.reason)
        if ended.code:
            raise Echo2Error(ended.reason)
        return 0

    async def _start_relay(self) -> None:
        """Before the hello, which tells where it listens and what is here already."""
        listens_at = await self._downloads.start()
        stored = await asyncio.to_thread(self._downloads.stored)
        settings = replace(self._settings, stored=stored)
        if self._config.worker.relay:
            keys = self._identity.keys
            settings = replace(
                settings,
                relay_endpoint=self._config.worker.relay_endpoint or listens_at,
                relay_key="" if keys is None else keys.public,
            )
            log.info("relay_started", endpoint=settings.relay_endpoint)
        self._core = WorkerState(settings)

    async def _close(self) -> None:
        """Messages first, so that the goodbye leaves before anything can take time; each
        part is ended whatever happened to the one before."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        async with contextlib.AsyncExitStack() as stack:  # the last one first
            stack.push_async_callback(close_context, self._context)
            stack.push_async_callback(self._downloads.close)
            if self._engine is not None:
                stack.push_async_callback(self._engine.stop)
            stack.push_async_callback(self._environments.stop)
            stack.push_async_callback(self._groups.stop)
            stack.push_async_callback(self._audits.stop)
            stack.push_async_callback(self._tasks.stop)
            stack.push_async_callback(self._links.close, flush_s=FLUSH_S)

    # ------------------------------------------------------------------------ events

    def _post(self, event: events.Event) -> None:
        """Hand an event to the state machine; its effects go before the next event."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                self._handle(self._events.popleft())
        except Exception as error:  # our own bug: whoever called us must not swallow it
            if not self._exit.done():
                self._exit.set_exception(error)
        finally:
            self._handling = False

    def _handle(self, event: events.Event) -> None:
        try:
            effects = self._core.handle(event, time.monotonic())
        except RemoteProtocolError as error:
            log.warning("message_refused", reason=error.reason, text=str(error))
            return
        for effect in effects:
            self._carry_out(effect)

    def _signalled(self, number: signal.Signals) -> None:
        self._post(events.DrainRequested(signal.Signals(number).name))

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            for progress in self._downloads.progress():
                self._post(progress)
            tick = events.Tick(
                lease_tokens=dict(self._groups.tokens),
                tokens_per_s=self._groups.tokens_per_s(time.monotonic()),
                loop_lag_s=self._lag.ewma_s,
            )
            self._post(tick)

    # ----------------------------------------------------------------------- effects

    def _carry_out(self, effect: events.Effect) -> None:
        match effect:
            case events.Send(message):
                self._send(message)
            case events.Reconnect(attempt):
                self._reconnect(attempt)
            case events.Fetch():
                self._downloads.fetch(effect)
            case events.SetPeers(peers):
                self._downloads.set_peers(peers)
            case events.CancelFetch(manifest_digest):
                self._downloads.cancel(manifest_digest)
            case events.StartEngine():
                self._own(self._start_engine(effect), "start_engine")
            case events.Install():
                self._own(self._install(effect), "install")
            case events.Keep(manifest_digests):
                self._downloads.keep(manifest_digests)
            case events.StartGroup(granted):
                self._groups.start(granted)
            case events.StartAudit(order):
                self._audits.start(order)
            case events.AbortGroup(lease, reason):
                log.info("group_aborted", lease=lease, reason=reason)
                self._groups.abort(lease)
            case events.Exit():
                if not self._exit.done():
                    self._exit.set_result(effect)
            case events.Log(level, event, fields):
                getattr(log, level)(event, **fields)

    def _own(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._tasks.start(coroutine, name=name)

    def _send(self, message: Message) -> None:
        if not self._links.send(message):
            log.warning("message_dropped", message=type(message).__name__, lane=message.LANE)

    def _reconnect(self, attempt: int) -> None:
        before = self._connecting
        if before is not None:
            before.cancel()
        self._connecting = self._own(self._connect(attempt, before), "connect")

    async def _connect(self, attempt: int, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        await self._links.close()
        if attempt == 0:
            self._backoff.reset()
        else:
            await asyncio.sleep(self._backoff.next_s())
        while True:
            try:
                await self._links.open()
            except ConfigError as error:
                self._post(events.StartFailed(str(error)))
                return
            except Echo2Error as error:
                log.debug("connect_failed", reason=str(error))
                self._post(events.ConnectFailed(str(error)))
                await asyncio.sleep(self._backoff.next_s())
            else:
                self._backoff.reset()
                self._post(events.ConnectionRestored())
                return

    async def _start_engine(self, start: events.StartEngine) -> None:
        if self._engine is not None:
            await self._engine.stop()
        try:
            if not self._environments_up and self._settings.takes_leases:
                await self._environments.start(start.settings, self._downloads.assets)
                self._environments_up = True
            if self._settings.takes_leases:
                self._engine = make_engine(
                    self._config,
                    on_died=lambda text: self._post(events.EngineDied(start.epoch, text)),
                )
            else:
                self._engine = make_model_folder(
                    self._config, self._identity.folder, self._downloads.fetch_assets
                )
            await self._engine.start(self._downloads.assets)
        except ConfigError as error:
            self._post(events.StartFailed(str(error)))
        except EngineError as error:
            self._post(events.EngineDied(start.epoch, str(error)))
        else:
            self._post(events.EngineReady(start.epoch))

    async def _install(self, install: events.Install) -> None:
        announced = install.announced
        order = InstallOrder(
            announced=announced,
            previous=install.previous,
            folder=self._downloads.folder,
            mode=self._config.worker.on_update,
            tolerance=tolerance_of(precision_of(self._config), self._config.worker.canary_max_diff),
        )
        try:
            installed = await self._live_engine().install(order)
        except InstallError as error:
            self._post(
                events.InstallFailed(
                    epoch=install.epoch,
                    version=announced.version,
                    stage=error.stage,
                    text=str(error),
                    restored=error.restored,
                )
            )
        except EngineError as error:
            self._post(events.EngineDied(install.epoch, str(error)))
        else:
            self._post(
                events.InstallDone(
                    epoch=install.epoch,
                    version=announced.version,
                    install_s=installed.install_s,
                    pause_s=installed.pause_s,
                    canary_diff=installed.canary_diff,
                )
            )

    def _live_engine(self) -> EngineHandle:
        if self._engine is None:
            raise EngineError("the engine was not started")
        return self._engine
