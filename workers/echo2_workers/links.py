"""The worker's two connections to the coordinator: control and rollouts.

Opened together and dropped together: a session of the protocol needs both. Where the
coordinator is gets looked up anew at each opening, since its ports may have changed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog
import zmq.asyncio

from echo2.config import Config
from echo2.errors import Echo2Error
from echo2.messages import Lane, LaneOpened, Message, Role
from echo2.net.dealer import Connection, Dealer
from echo2_workers.identity import Identity

log = structlog.get_logger(__name__)

CONNECT_S: Final = 10.0
"""One try; the state machine says for how long tries go on."""


@dataclass(frozen=True, slots=True)
class Address:
    control: str
    rollouts: str
    key: str


def find_coordinator(config: Config, run_dir: Path) -> Address:
    """From [net], or as the coordinator wrote it to the run folder. Raises Echo2Error."""
    net = config.net
    if net.coordinator:
        return Address(net.coordinator, net.coordinator_rollouts, net.coordinator_key)
    path = run_dir / "coordinator.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return Address(record["control"], record["rollouts"], record["public_key"])
    except FileNotFoundError:
        raise Echo2Error(
            f"there is no {path}: start the coordinator of this run, or set net.coordinator"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Echo2Error(
            f"{path} does not say where the coordinator is ({type(error).__name__}: {error}); "
            "start the coordinator again"
        ) from error


class Links:
    """`on_lost(reason)` is called once for each opening that ended by itself."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        *,
        config: Config,
        run_dir: Path,
        identity: Identity,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._context = context
        self._config = config
        self._run_dir = run_dir
        self._identity = identity
        self._on_message = on_message
        self._on_lost = on_lost
        self._dealers: dict[Lane, Dealer] = {}
        self._readers: list[asyncio.Task[None]] = []
        self._is_open = False

    async def open(self) -> None:
        """Dial both lanes and wait for the handshakes. Raises Echo2Error with the cause."""
        address = find_coordinator(self._config, self._run_dir)
        try:
            for lane, endpoint in (
                (Lane.CONTROL, address.control),
                (Lane.ROLLOUTS, address.rollouts),
            ):
                dealer = Dealer(
                    self._context,
                    lane=lane,
                    role=Role.WORKER,
                    endpoint=endpoint,
                    server_key=address.key,
                    keys=self._identity.keys,
                    name=self._identity.name,
                    greeting=LaneOpened if lane is Lane.ROLLOUTS else None,
                    on_state=self._state_changed,
                )
                await dealer.start()
                self._dealers[lane] = dealer
            for dealer in self._dealers.values():
                await dealer.wait_connected(CONNECT_S)
        except BaseException:
            await self.close()
            raise
        self._is_open = True
        for dealer in self._dealers.values():
            self._readers.append(asyncio.create_task(self._read(dealer)))
        for dealer in self._dealers.values():
            if dealer.state is not Connection.CONNECTED:  # the first one, meanwhile
                self._state_changed(dealer.state, dealer.reason)

    def send(self, message: Message) -> bool:
        """Queue a message on its lane; False when it is not open or its queue is full."""
        dealer = self._dealers.get(message.LANE)
        return self._is_open and dealer is not None and dealer.send(message)

    async def close(self, *, flush_s: float = 0.0) -> None:
        """Close both; with `flush_s`, what is queued may leave for so long."""
        self._is_open = False
        readers, self._readers = self._readers, []
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        dealers, self._dealers = list(self._dealers.values()), {}
        await asyncio.gather(*(dealer.stop(flush_s=flush_s) for dealer in dealers))

    def _state_changed(self, state: Connection, reason: str) -> None:
        if state is not Connection.CONNECTED:
            self._lost(reason)

    def _lost(self, reason: str) -> None:
        if self._is_open:
            self._is_open = False
            self._on_lost(reason)

    async def _read(self, dealer: Dealer) -> None:
        try:
            while True:
                self._on_message(await dealer.receive())
        except Echo2Error as error:
            self._lost(str(error))
