"""Two DEALERs from a learner to its coordinator: how `LearnerClient` reaches one over sockets."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final

import structlog

from echo2.config import Config
from echo2.errors import (
    LearnerError,
    WaitTimeoutError,
)
from echo2.folder_errors import folder_errors
from echo2.messages import (
    Lane,
    LaneOpened,
    Message,
    Role,
)
from echo2.net.auth import AllowList, load_or_create_key
from echo2.net.dealer import Connection, Dealer
from echo2.net.sockets import close_context, make_context

log = structlog.get_logger()

TICK_S: Final = 0.2


class SocketTransport:
    """Two DEALERs to the coordinator. Its addresses come from RUN/coordinator.json or [net].

    The key is RUN/keys/NAME.key; NAME is "learner", or "learner-2" and so on while another
    process of this machine holds that name. A coordinator that moved is found again.
    """

    def __init__(self, config: Config, run_dir: Path) -> None:
        self._config = config
        self._run_dir = run_dir
        self._keys_dir = Path(config.net.keys_dir) if config.net.keys_dir else run_dir / "keys"
        self._context = make_context()
        self._dealers: dict[Lane, Dealer] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._address: tuple[str, str, str] | None = None
        self._on_message: Callable[[Message], None] | None = None
        self._on_failure: Callable[[BaseException], None] | None = None
        self._name, self._lock = self._take_name()

    def _take_name(self) -> tuple[str, int]:
        with folder_errors(self._keys_dir):
            self._keys_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        for number in range(1, 1000):
            name = "learner" if number == 1 else f"learner-{number}"
            with folder_errors(self._keys_dir):
                lock = os.open(self._keys_dir / f"{name}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            return name, lock
        raise LearnerError(f"999 learners hold a name in {self._keys_dir}; end some of them")

    def _find(self) -> tuple[str, str, str] | None:
        """(control, rollouts, key), or None while there is no coordinator."""
        net = self._config.net
        if net.coordinator:
            return net.coordinator, net.coordinator_rollouts, net.coordinator_key
        path = self._run_dir / "coordinator.json"
        try:
            record = json.loads(path.read_text())
            return record["control"], record["rollouts"], record["public_key"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LearnerError(
                f"{path} does not say where the coordinator is ({type(error).__name__}: {error}); "
                "start the coordinator again"
            ) from error

    async def start(
        self, on_message: Callable[[Message], None], on_failure: Callable[[BaseException], None]
    ) -> None:
        self._on_message, self._on_failure = on_message, on_failure
        deadline = time.monotonic() + self._config.net.connect_timeout_s
        while (address := self._find()) is None:
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"no {self._run_dir / 'coordinator.json'} after "
                    f"{self._config.net.connect_timeout_s:g} s; start the coordinator first"
                )
            await asyncio.sleep(TICK_S)
        await self._connect(address)
        self._own(self._follow())

    async def _connect(self, address: tuple[str, str, str]) -> None:
        self._address = address
        control, rollouts, server_key = address
        keys = None
        if self._config.net.curve:
            keys = load_or_create_key(self._keys_dir / f"{self._name}.key")
            if not self._config.net.coordinator:
                allow_list = AllowList(self._keys_dir / "authorized")
                if allow_list.name_of(keys.public) != self._name:
                    allow_list.authorize(self._name, keys.public)
        for lane, endpoint in ((Lane.CONTROL, control), (Lane.ROLLOUTS, rollouts)):
            dealer = Dealer(
                self._context,
                lane=lane,
                role=Role.LEARNER,
                endpoint=endpoint,
                server_key=server_key,
                keys=keys,
                name=self._name,
                greeting=LaneOpened if lane is Lane.ROLLOUTS else None,
            )
            await dealer.start()
            self._dealers[lane] = dealer
            self._own(self._receive(dealer))

    def _own(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.append(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._on_failure is not None:
            self._on_failure(error)

    async def _receive(self, dealer: Dealer) -> None:
        assert self._on_message is not None
        while True:
            message = await dealer.receive()
            self._on_message(message)

    async def _follow(self) -> None:
        """Dial anew when the coordinator came back under another address."""
        while True:
            await asyncio.sleep(1.0)
            if all(d.state is Connection.CONNECTED for d in self._dealers.values()):
                continue
            address = self._find()
            if address is not None and address != self._address:
                log.info("coordinator_moved", control=address[0])
                await self._disconnect()
                await self._connect(address)

    async def _disconnect(self) -> None:
        current = asyncio.current_task()
        stopped = [task for task in self._tasks if task is not current]
        self._tasks = [task for task in self._tasks if task is current]
        for task in stopped:
            task.cancel()
        await asyncio.gather(*stopped, return_exceptions=True)
        dealers, self._dealers = self._dealers, {}
        for dealer in dealers.values():
            await dealer.stop()

    @property
    def trouble(self) -> str:
        """Why a lane is not connected; "" while both are."""
        dealers = self._dealers.values()
        return next((d.reason for d in dealers if d.state is not Connection.CONNECTED), "")

    @property
    def refusal(self) -> str:
        """Why the coordinator lets nobody with our key in; "" while it does."""
        dealers = self._dealers.values()
        return next((d.reason for d in dealers if d.state is Connection.REFUSED), "")

    async def stop(self) -> None:
        await self._disconnect()
        await close_context(self._context)
        with contextlib.suppress(OSError):
            os.close(self._lock)

    def send(self, message: Message) -> None:
        dealer = self._dealers.get(message.LANE)
        if dealer is None or dealer.state is not Connection.CONNECTED:
            return  # asked again after the next welcome
        if not dealer.send(message):
            log.warning("message_dropped", message=type(message).__name__, lane=message.LANE)
