"""The coordinator's end of the keeper of machines: orders out, what became of them in.

The keeper is started, and started again if it ends; each time it tells first which machines are
written down (MachinesFound), and no order is given before that: an order that an ended keeper may
not have read is made good by the core when it compares. It is never killed from here: whatever ends
the coordinator, the keeper sees the end of its pipe, and stops what must not stay on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog

from echo2.config import Config
from echo2.core.effects import StartMachine, StopMachine
from echo2.core.events import Event, MachineChanged, MachineFound, MachinesFound
from echo2.errors import ConfigError
from echo2.types import PeerId
from echo2.weights.files import make_folder

log = structlog.get_logger()

LOG_FILE: Final = "logs/machines.log"
RESTART_S: Final = 1.0
RESTART_MAX_S: Final = 60.0
ANSWER_S: Final = 120.0
"""For the first answer of a keeper: a class of the user's may import much."""
FAREWELL_S: Final = 10.0
"""At the end, besides the time-out of a stop."""


class KeeperLink:
    """`join`: (endpoint, server key) of the enrolment socket, for tokens."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        *,
        on_event: Callable[[Event], None],
        join: Callable[[], tuple[str, str]],
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._on_event = on_event
        self._join = join
        self._orders: asyncio.WriteTransport | None = None
        self._is_ready = False
        self._ending = False
        self._ended = asyncio.Event()
        self._told = ""
        self._problem = ""
        self._answered = asyncio.Event()

    async def accepted(self) -> None:
        """Raises ConfigError for a provisioner that cannot be made, which only the keeper tries."""
        async with asyncio.timeout(ANSWER_S):
            await self._answered.wait()
        if self._problem:
            raise ConfigError(self._problem)

    async def run(self) -> None:
        """Until the end was asked for."""
        pause_s = RESTART_S
        while not self._ending:
            code = await self._serve()
            if self._ending:
                break
            pause_s = RESTART_S if self._is_ready else min(RESTART_MAX_S, 2 * pause_s)
            self._is_ready = False
            log.error("keeper_ended", code=code, log=str(self._run_dir / LOG_FILE), again_s=pause_s)
            await asyncio.sleep(pause_s)
        self._ended.set()

    def carry_out(self, effect: StartMachine | StopMachine) -> None:
        if not self._is_ready:
            return
        if isinstance(effect, StopMachine):
            self._order({"do": "stop", "worker": effect.worker})
            return
        endpoint, server_key = self._join()
        self._order(
            {
                "do": "start",
                "worker": effect.worker,
                "offer": effect.offer,
                "endpoint": endpoint,
                "server_key": server_key,
            }
        )

    async def end(self) -> None:
        """Have every machine stopped, and wait a while for it; what takes longer the keeper does
        alone."""
        self._ending = True
        if self._orders is None:
            return
        self._order({"do": "end"})
        most_s = self._config.provisioner.stop_timeout_s + FAREWELL_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(most_s):
                await self._ended.wait()
        if not self._ended.is_set():
            log.error(
                "machines_not_stopped_yet",
                after_s=most_s,
                folder=str(self._run_dir / "machines"),
                log=str(self._run_dir / LOG_FILE),
            )

    def close(self) -> None:
        """The keeper is alone from now on."""
        if self._orders is not None:
            self._orders.close()
            self._orders = None

    # ----------------------------------------------------------------------- the process

    async def _serve(self) -> int | None:
        loop = asyncio.get_running_loop()
        process = self._spawned()
        lines = asyncio.StreamReader(limit=1 << 24)
        incoming, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(lines), process.stdout
        )
        self._orders, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, process.stdin)
        try:
            hello = {
                "config": self._config.model_dump(mode="json", exclude_none=True),
                "run_dir": str(self._run_dir.absolute()),
            }
            self._order(hello)
            while line := await lines.readline():
                self._take(json.loads(line))
        finally:
            incoming.close()
            self.close()
        return await asyncio.to_thread(process.wait)

    def _spawned(self) -> subprocess.Popen[bytes]:
        """Not one of asyncio's own subprocesses: those are killed when their transport closes."""
        path = self._run_dir / LOG_FILE
        make_folder(path.parent)
        with path.open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "echo2.provision.keeper"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                start_new_session=True,
            )

    def _order(self, line: dict[str, Any]) -> None:
        if self._orders is not None:
            self._orders.write(json.dumps(line).encode() + b"\n")

    def _take(self, line: dict[str, Any]) -> None:
        if "refused" in line or "accepted" in line:
            self._problem = str(line.get("refused", ""))
            self._answered.set()
        elif "ended" in line:
            self._ended.set()
        elif "machines" in line:
            self._is_ready = True
            found = (
                MachineFound(PeerId(each["worker"]), each["offer"], each["is_on"])
                for each in line["machines"]
            )
            self._on_event(MachinesFound(tuple(found)))
        else:
            text = line["text"]
            if text and text != self._told:
                self._told = text
                log.warning("machine_failed", worker=line["worker"], reason=text)
            self._on_event(MachineChanged(PeerId(line["worker"]), line["state"], text))
