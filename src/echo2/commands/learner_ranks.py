"""Starts the ranks of a learner on this machine, and ends all when one ends.

Rank 0 keeps the output of the command; each of the others writes RUN/logs/learner-rank-N.log.
Signals go on to rank 0 alone, which brings all to their end in order. When a rank dies, the
others end by themselves or are killed, and the one that began is named. No rank outlives this
process (`net.child`).

The ranks find each other as under torchrun, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
the socket on which rank 0 serves their store is bound here and inherited, so no port is ever
free for a moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from echo2.commands.processes import ended_how, last_lines, open_log
from echo2.net.child import PARENT_VARIABLE

EXIT_FAILED: Final = 1
EXIT_RANK_LOST: Final = 4
"""Of a rank that ended because another one had (`echo2_learner.main`)."""
STORE_VARIABLE: Final = "ECHO2_STORE_FD"
LOST_S: Final = 15.0
"""After a rank failed: time for the others to end by themselves, and to say why."""
END_S: Final = 60.0
"""After rank 0 ended in good order: time for the others to follow."""


def is_rank() -> bool:
    """Whether this process was started as one of several ranks, by us or by torchrun."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_lead() -> bool:
    """Whether this process is rank 0, or no rank at all."""
    return not is_rank() or os.environ["RANK"] == "0"


def run_ranks(command: Sequence[str], *, num_ranks: int, logs: Path) -> int:
    """Run `command` as so many ranks; the exit code of the rank that ended the learner."""
    return asyncio.run(_Ranks(command, num_ranks, logs).run())


def cause_of(ends: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """(rank, code) of the end that the others followed, of all ends in their order; None when
    rank 0 ended in good order: the learner did then.

    The first that a signal ended, else rank 0 if it failed itself (what all find wrong, it
    tells), else the first that did not end for another's sake.
    """
    if (0, 0) in ends:
        return None
    failed = [end for end in ends if end[1] not in (0, EXIT_RANK_LOST)]
    by_signal = [end for end in failed if end[1] < 0]
    of_lead = [end for end in failed if end[0] == 0]
    lost = [end for end in ends if end[1]]
    return next(iter([*by_signal, *of_lead, *failed, *lost]), None)


class _Ranks:
    def __init__(self, command: Sequence[str], num_ranks: int, logs: Path) -> None:
        self._command = list(command)
        self._num_ranks = num_ranks
        self._logs = logs
        self._processes: dict[int, Process] = {}
        self._log_starts: dict[int, int] = {}
        self._ends: list[tuple[int, int]] = []

    async def run(self) -> int:
        try:
            with self._signals():
                await self._start()
                await self._until_over()
        finally:
            for process in self._processes.values():
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        cause = cause_of(self._ends)
        if cause is None:
            return 0
        rank, code = cause
        if rank != 0 or code < 0:  # rank 0 has told its own failures
            print(f"echo2: {self._told(rank, code)}", file=sys.stderr, flush=True)
        return code if code > 0 else EXIT_FAILED

    async def _start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            for rank in range(self._num_ranks):
                inherited = (listener.fileno(),) if rank == 0 else ()
                with self._output(rank) as output:
                    self._processes[rank] = await asyncio.create_subprocess_exec(
                        *self._command,
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=None if output is None else subprocess.STDOUT,
                        start_new_session=True,
                        pass_fds=inherited,
                        env=self._environment(rank, port, listener.fileno()),
                    )

    async def _until_over(self) -> None:
        """Until all have ended, or those that should have did not in time."""
        waits = {asyncio.create_task(p.wait()): rank for rank, p in self._processes.items()}
        clock = asyncio.get_running_loop().time
        deadline: float | None = None
        while waits:
            timeout_s = None if deadline is None else max(0.0, deadline - clock())
            done, _ = await asyncio.wait(
                waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                for wait in waits:
                    wait.cancel()
                return
            for task in done:
                rank = waits.pop(task)
                self._ends.append((rank, task.result()))
            if deadline is None and any(code for _, code in self._ends):
                deadline = clock() + LOST_S
            elif deadline is None and any(rank == 0 for rank, _ in self._ends):
                deadline = clock() + END_S

    def _environment(self, rank: int, port: int, store: int) -> Mapping[str, str]:
        threads = max(1, (os.cpu_count() or 1) // self._num_ranks)
        return {
            "OMP_NUM_THREADS": str(threads),  # else each rank takes all cores
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # a wait that looks up now and then is no warning
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self._num_ranks),
            "LOCAL_WORLD_SIZE": str(self._num_ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            STORE_VARIABLE: str(store),
            PARENT_VARIABLE: str(os.getpid()),
        }

    @contextlib.contextmanager
    def _output(self, rank: int) -> Iterator[int | None]:
        if rank == 0:
            yield None
            return
        with open_log(self._log(rank)) as file:
            self._log_starts[rank] = file.tell()
            yield file.fileno()

    def _log(self, rank: int) -> Path:
        return self._logs / f"learner-rank-{rank}.log"

    def _told(self, rank: int, code: int) -> str:
        told = (
            f"rank {rank} of {self._num_ranks} ended with {ended_how(code)}, and the learner's "
            "other ranks with it; go on with --resume"
        )
        if rank == 0:
            return told
        lines = last_lines(self._log(rank), 12, start=self._log_starts[rank])
        if not lines:
            return f"{told} ({self._log(rank)} has nothing to say)"
        return "\n    ".join([f"{told}. The end of {self._log(rank)}:", *lines])

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handled = (signal.SIGINT, signal.SIGTERM)
        for number in handled:
            loop.add_signal_handler(number, self._forward, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)

    def _forward(self, number: signal.Signals) -> None:
        lead = self._processes.get(0)
        if lead is not None and lead.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                lead.send_signal(number)
