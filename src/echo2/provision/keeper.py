"""The keeper of machines: a process of its own, which starts, stops and outlives the coordinator.

    stdin:  {"config": …, "run_dir": …}, then {"do": "start" | "stop" | "end", …}
    stdout: {"refused"} or {"accepted"}, {"machines": […]}, then {"worker", "state", "text"}:
            "running", "stopping" or "gone"

    orders --stdin ends--> waits reap_after_s --nobody came--> stops every machine, ends
       |                        '--the keeper of a new coordinator waits--> ends; that one adopts
       '--"end"--> stops every machine, tells so, ends

A machine is written down before it is started, and taken off when it was stopped. A stop that fails
is tried again, ever more rarely. What of an earlier keeper was not finished, because that one was
killed too, is stopped. In a session of its own, so that no signal for the coordinator reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog

from echo2.config import Config, config_from_mapping
from echo2.errors import ConfigError
from echo2.logs import setup_logging
from echo2.net.join_token import JoinToken
from echo2.net.keys import AllowList
from echo2.net.token_book import EXPIRY_MAX_S, TokenBook
from echo2.provision import Machine, MachineOrder, Provisioner, ProvisionError, load_provisioner
from echo2.provision.book import MachineBook, MachineRecord

log = structlog.get_logger()

AT_ONCE_MAX: Final = 16
"""Starts and stops under way at the same time."""
RETRY_MAX_S: Final = 300.0
LOOK_EACH_S: Final = 0.1
LIST_TIMEOUT_S: Final = 60.0

Tell = Callable[[dict[str, Any]], None]


class Keeper:
    """`tell` gets each line for the coordinator. One task per machine at a time."""

    def __init__(
        self, config: Config, run_dir: Path, provisioner: Provisioner, book: MachineBook, tell: Tell
    ) -> None:
        self._table = config.provisioner
        self._offers = {offer.name: offer for offer in config.offers}
        keys_dir = Path(config.net.keys_dir) if config.net.keys_dir else run_dir / "keys"
        self._keys_dir = keys_dir
        self._run_dir = run_dir
        self._provisioner = provisioner
        self._book = book
        self._tell = tell
        self._records: dict[str, MachineRecord] = {}
        self._turns: dict[str, asyncio.Lock] = {}
        self._told: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(AT_ONCE_MAX)
        self._leaving = asyncio.Event()

    async def take_stock(self) -> None:
        """Read what is written down, and tell the coordinator."""
        records = await asyncio.to_thread(self._book.records)
        there = await self._listed() if records else None
        machines = []
        for record in records:
            self._records[record.worker] = record
            is_on = record.state == "running" and (there is None or record.worker in there)
            machines.append({"worker": record.worker, "offer": record.offer, "is_on": is_on})
        self._tell({"machines": machines})

    async def _listed(self) -> frozenset[str] | None:
        try:
            async with asyncio.timeout(LIST_TIMEOUT_S):
                found = await self._provisioner.list()
        except Exception as error:  # whatever a provisioner of the user's raises: go by the records
            log.warning("machines_not_listed", reason=_told(error))
            return None
        return None if found is None else frozenset(found)

    # ----------------------------------------------------------------------- orders

    def order_start(self, worker: str, offer: str, *, endpoint: str, server_key: str) -> None:
        self._spawn(self._start(worker, offer, endpoint, server_key))

    def order_stop(self, worker: str) -> None:
        self._spawn(self._stop(worker, ""))

    async def stop_all(self) -> None:
        """Every machine that is written down; returns when none is, or their tries are used up."""
        for worker in list(self._records):
            self.order_stop(worker)
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def settle(self) -> None:
        """Let what is under way end; nothing is tried again."""
        self._leaving.set()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("machine_task_failed", reason="".join(traceback.format_exception(error)))

    # ----------------------------------------------------------------------- machines

    async def _start(self, worker: str, offer: str, endpoint: str, server_key: str) -> None:
        text = ""
        async with self._turn(worker):
            record = MachineRecord(worker=worker, offer=offer)
            self._records[worker] = record
            await asyncio.to_thread(self._book.write, record)
            try:
                async with self._room, asyncio.timeout(self._table.start_timeout_s):
                    token = await asyncio.to_thread(self._token, worker, endpoint, server_key)
                    record = record.model_copy(update={"token": token.id})
                    await self._note(record)
                    order = MachineOrder(worker, self._offers[offer], token.text(), self._run_dir)
                    identity = await self._provisioner.start(order)
                await self._note(record.model_copy(update={"state": "running", "id": identity}))
            except TimeoutError:
                text = f"its start took longer than {self._table.start_timeout_s:g} s"
            except Exception as error:  # whatever a provisioner of the user's raises: it is stopped
                text = _told(error)
        if text:
            await self._stop(worker, text)
        else:
            self._say(worker, "running")

    async def _stop(self, worker: str, cause: str) -> None:
        """Until it is stopped. `cause`: why, if something went wrong before."""
        async with self._turn(worker):
            record = self._records.get(worker)
            if record is None:
                self._say(worker, "gone", cause)
                return
            await self._note(record.model_copy(update={"state": "stopping"}))
            self._say(worker, "stopping", cause)
            machine = Machine(worker, record.offer, record.id, self._run_dir)
            pause_s = self._table.retry_s
            for attempt in range(1, self._table.stop_attempts + 1):
                problem = await self._try_stop(machine)
                if not problem:
                    await asyncio.to_thread(self._forget, record)
                    del self._records[worker]
                    self._say(worker, "gone", cause)
                    return
                told = f"it cannot be stopped: {problem}"
                if self._told.get(worker) != told:
                    self._told[worker] = told
                    log.error("machine_not_stopped", worker=worker, attempt=attempt, reason=problem)
                    self._say(worker, "stopping", told)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._leaving.wait()
                if self._leaving.is_set():
                    return  # it is written down
                pause_s = min(RETRY_MAX_S, 2 * pause_s)
            log.error("machine_left", worker=worker, attempts=self._table.stop_attempts)

    async def _try_stop(self, machine: Machine) -> str:
        """What went wrong, or ""."""
        try:
            async with self._room, asyncio.timeout(self._table.stop_timeout_s):
                await self._provisioner.stop(machine)
        except TimeoutError:
            return f"its stop took longer than {self._table.stop_timeout_s:g} s"
        except Exception as error:  # whatever a provisioner of the user's raises: tried again
            return _told(error)
        return ""

    def _turn(self, worker: str) -> asyncio.Lock:
        return self._turns.setdefault(worker, asyncio.Lock())

    async def _note(self, record: MachineRecord) -> None:
        self._records[record.worker] = record
        await asyncio.to_thread(self._book.write, record)

    def _token(self, worker: str, endpoint: str, server_key: str) -> JoinToken:
        """For this one worker, and not for longer than it may take to come."""
        expires_s = self._table.start_timeout_s + self._table.ready_timeout_s
        record, keys = TokenBook(self._keys_dir).make(
            name=worker, expires_s=min(EXPIRY_MAX_S, max(1.0, expires_s)), now=time.time()
        )
        return JoinToken(
            endpoint=endpoint,
            server_key=server_key,
            secret=keys.secret,
            expires_at=int(record.expires_at),
            uses=1,
        )

    def _forget(self, record: MachineRecord) -> None:
        """Its token and its key open nothing any more."""
        if record.token:
            TokenBook(self._keys_dir).revoke(record.token)
            AllowList(self._keys_dir / "authorized").revoke(record.worker)
        self._book.remove(record.worker)

    def _say(self, worker: str, state: str, text: str = "") -> None:
        self._tell({"worker": worker, "state": state, "text": text[:2048]})


def _told(error: Exception) -> str:
    if isinstance(error, ProvisionError):
        return str(error)
    log.error("provisioner_failed", reason="".join(traceback.format_exception(error)))
    return f"{type(error).__name__}: {error}"


# ------------------------------------------------------------------------- the process


def _tell_stdout(line: dict[str, Any]) -> None:
    """Nobody may be there any more to read it."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(line).encode() + b"\n")


async def _serve(
    config: Config, run_dir: Path, provisioner: Provisioner, lines: asyncio.StreamReader
) -> None:
    book = MachineBook(run_dir)
    keeper = Keeper(config, run_dir, provisioner, book, _tell_stdout)
    await keeper.take_stock()
    while line := await lines.readline():
        order = json.loads(line)
        match order["do"]:
            case "start":
                keeper.order_start(
                    order["worker"],
                    order["offer"],
                    endpoint=order["endpoint"],
                    server_key=order["server_key"],
                )
            case "stop":
                keeper.order_stop(order["worker"])
            case "end":
                if await _stop_all(keeper, book, "the run's coordinator ended"):
                    _tell_stdout({"ended": True})
                return
    log.warning("coordinator_gone", reap_after_s=config.provisioner.reap_after_s)
    deadline = time.monotonic() + config.provisioner.reap_after_s
    while time.monotonic() < deadline and not book.has_successor():  # noqa: ASYNC110  a lock of files
        await asyncio.sleep(LOOK_EACH_S)
    await _stop_all(keeper, book, "no coordinator came back")


async def _stop_all(keeper: Keeper, book: MachineBook, reason: str) -> bool:
    """Whether all were stopped; else another keeper waits, and goes on with them."""
    if not book.has_successor():
        stopping = asyncio.create_task(keeper.stop_all())
        while not stopping.done() and not book.has_successor():
            await asyncio.wait({stopping}, timeout=LOOK_EACH_S)
        if stopping.done():
            await stopping
            log.info("machines_stopped", reason=reason)
            return True
        stopping.cancel()
    await keeper.settle()
    log.info("keeper_left", reason="another one takes over")
    return False


async def _main() -> None:
    lines = asyncio.StreamReader(limit=1 << 24)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    first = await lines.readline()
    if not first:
        return
    hello = json.loads(first)
    config = config_from_mapping(hello["config"])
    setup_logging(config.log.level, config.log.format)
    run_dir = Path(hello["run_dir"])
    try:  # before it takes over: the one before goes on with what it has to stop
        provisioner = load_provisioner(config)
    except ConfigError as error:
        _tell_stdout({"refused": str(error)})
        return
    _tell_stdout({"accepted": True})
    with contextlib.ExitStack() as stack:
        await asyncio.to_thread(stack.enter_context, MachineBook(run_dir).taken_over())
        await _serve(config, run_dir, provisioner, lines)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_main())
