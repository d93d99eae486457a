"""One run on this machine: its processes started, watched, started again, ended.

Life-cycle: coordinator up -> origin up -> learner and workers -> watch until the run is over
-> learner, coordinator, workers, origin ended in this order. Ctrl-C (or SIGTERM, SIGHUP)
ends it in the same order after the learner wrote a checkpoint; a second one kills.
Whatever happens, no process is left when `run` returns.

What to do about a process that ended is decided in `supervision`; what a run is about
(versions, leases, staleness) is none of this module's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from echo2.commands.display import Display, duration
from echo2.commands.memory import MemoryWatch, told_peaks
from echo2.commands.processes import LocalProcess, command_line, ended_how
from echo2.commands.run_folder import RunFolder
from echo2.commands.run_records import (
    RecordTail,
    read_ends,
    size_of,
    surviving_lines,
)
from echo2.commands.run_view import RunView, fetch_status, number, told_ends
from echo2.commands.supervision import Action, Part, verdict_on_end, was_killed
from echo2.config import Config
from echo2.errors import Echo2Error

EXIT_INTERRUPTED = 130
REFRESH_S = 0.5
STATUS_EVERY_S = 1.0
STATUS_SILENT_S = 10.0
"""Without an answer for so long, which is said it is said (it falls silent at its end too)."""
FAREWELL_S = 60.0
"""After the learner or the coordinator ended in good order: time for the others to follow."""
COORDINATOR_FIRST_S = 0.5
"""After another process failed: time for the coordinator's end, the cause, to show."""
COORDINATOR_END_S = 30.0
ORIGIN_END_S = 15.0
WORKER_END_S = 15.0
"""Besides the drain time of the configuration."""


class LocalRun:
    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        workers: list[str],
        display: Display,
        *,
        resume: bool,
        import_path: Path,
    ) -> None:
        """`import_path`: folder of the configuration, where a user's environment may lie."""
        self._config = config
        self._import_path = import_path
        self._folder = folder
        self._display = display
        self._resume = resume
        self._parts = {"coordinator": Part.COORDINATOR, "origin": Part.ORIGIN}
        self._parts |= {"learner": Part.LEARNER} | dict.fromkeys(workers, Part.WORKER)
        self._processes = {name: self._process(name) for name in self._parts}
        self._coordinator = self._processes["coordinator"]
        self._origin = self._processes["origin"]
        self._learner = self._processes["learner"]
        self._workers = [self._processes[name] for name in workers]
        self._view = RunView(config.run.name, config.learner.steps)
        self._metrics = RecordTail(folder.metrics)
        self._stop = asyncio.Event()
        self._kill = asyncio.Event()
        self._failure = ""
        self._finished = False
        self._reason = ""
        self._ends: Counter[str] = Counter()
        self._memory = MemoryWatch()
        self._events_start = 0
        self._began = time.monotonic()

    async def run(self) -> int:
        """0 if the run finished, 130 if it was interrupted, 1 otherwise."""
        self._metrics.skip()
        self._events_start = size_of(self._folder.events)
        try:
            async with (
                self._signals(),
                aiohttp.ClientSession() as session,
                asyncio.TaskGroup() as group,
            ):
                poll = group.create_task(self._poll_status(session))
                try:
                    await self._start()
                    await self._watch()
                except Echo2Error as error:
                    self._failure = str(error)
                await self._end_in_order()
                poll.cancel()
                self._view.status = {**self._view.status, "waits": [], "learner": None}
                self._refresh()
        finally:
            await self._kill_all()
        self._take_events()
        if self._finished:
            return 0
        return EXIT_INTERRUPTED if self._stop.is_set() and not self._failure else 1

    def summary(self, config_path: str) -> list[str]:
        """What to print after `run`, cause of a failure first."""
        again = f"echo2 run {config_path} --run-dir {self._folder.path} --resume"
        lines = [f"failed: {self._failure}"] if self._failure else []
        kept = surviving_lines(self._folder.metrics)
        evals = [line for line in kept if line.get("eval_reward") is not None]
        rewards = [line["reward_mean"] for line in kept if line.get("reward_mean") is not None]
        state = "finished" if self._finished else "not finished"
        if self._reason and not self._finished:
            state += f" ({self._reason})"
        lines.append(
            f"{state}: {kept[-1]['step'] if kept else 0} of {self._config.learner.steps} steps "
            f"in {duration(time.monotonic() - self._began)}"
        )
        if evals:
            first, last = evals[0], evals[-1]
            lines.append(
                f"eval: {number(first['eval_reward'])} at version {first.get('eval_version')}, "
                f"{number(last['eval_reward'])} at version {last.get('eval_version')}"
            )
        if rewards:
            lines.append(f"mean reward: {number(sum(rewards) / len(rewards))}")
        lines.append(f"groups: {told_ends(self._ends)}; cost {self._view.cost}")
        if peaks := self._memory.peaks():
            lines.append(f"peak memory: {told_peaks(peaks)}")
        lines.append(f"run folder: {self._folder.path}")
        lines.append(f"check it:   echo2 verify {self._folder.path}")
        if not self._finished:
            lines.append(f"go on with: {again}")
        return lines

    # ------------------------------------------------------------------------- start

    def _process(self, name: str) -> LocalProcess:
        part = self._parts[name]
        arguments = [str(self._folder.resolved_config), "--run-dir", str(self._folder.path)]
        if part is Part.WORKER:
            arguments += ["--name", name]
        if part is Part.LEARNER:
            arguments += ["--no-origin"] + (["--resume"] if self._resume else [])
        return LocalProcess(
            name,
            command_line(part.value, *arguments),
            self._folder.logs / f"{name}.log",
            import_path=self._import_path,
        )

    async def _start(self) -> None:
        for process in self._processes.values():
            if self._stop.is_set():
                return
            await process.start()
            if process is self._coordinator:
                await self._until_serving(process, self._folder.coordinator)
            if process is self._origin:
                await self._until_serving(process, self._folder.origin)

    async def _until_serving(
        self, process: LocalProcess, record: Callable[[], dict[str, Any] | None]
    ) -> None:
        """Wait until the process wrote its endpoints; its early end is the cause then."""
        timeout_s = self._config.net.connect_timeout_s
        deadline = time.monotonic() + timeout_s
        while not self._stop.is_set():
            if (record() or {}).get("pid") == process.pid:
                return
            if not process.running:
                raise Echo2Error(self._cause(process, f"{process.name} ended while it started"))
            if time.monotonic() > deadline:
                raise Echo2Error(
                    self._cause(process, f"{process.name} was not up after {timeout_s:g} s")
                )
            await process.ended_within(0.05)

    # ------------------------------------------------------------------------- watch

    async def _watch(self) -> None:
        """Until the run is over, was interrupted, or failed (Echo2Error)."""
        stop = asyncio.create_task(self._stop.wait())
        waits = {asyncio.create_task(p.wait()): p for p in self._processes.values() if p.started}
        try:
            while not self._stop.is_set():
                done, _ = await asyncio.wait(
                    {stop, *waits}, timeout=REFRESH_S, return_when=asyncio.FIRST_COMPLETED
                )
                self._refresh()
                ended = [waits.pop(task) for task in done if task in waits]
                # What became of the others is told before the coordinator's end ends the run.
                for process in sorted(ended, key=lambda each: each is self._coordinator):
                    action = await self._on_end(process)
                    if action is Action.FINISH:
                        return
                    if action is Action.RESTART:
                        waits[asyncio.create_task(process.wait())] = process
        finally:
            for task in (stop, *waits):
                task.cancel()

    async def _on_end(self, process: LocalProcess) -> Action:
        if process.code and await self._coordinator.ended_within(COORDINATOR_FIRST_S):
            # without it the others fail too: if it failed, it is the cause
            cause = self._coordinator.code or 0
            process = self._coordinator if cause and not was_killed(cause) else process
        code = process.code
        assert code is not None
        verdict = verdict_on_end(
            self._parts[process.name],
            code,
            name=process.name,
            restarts=process.restarts,
            restarts_max=self._config.run.restarts_max,
        )
        match verdict.action:
            case Action.FAIL:
                raise Echo2Error(self._cause(process, verdict.reason))
            case Action.RESTART:
                self._display.say(self._cause(process, verdict.reason, count=3))
                await self._restart(process)
            case Action.LEAVE:
                self._display.say(verdict.reason)
                process.given_up = code != 0
                self._refuse_without_workers(process)
            case Action.FINISH:
                self._display.say(verdict.reason)
        return verdict.action

    async def _restart(self, process: LocalProcess) -> None:
        process.restarts += 1
        if process is self._learner and "--resume" not in process.command:
            process.command.append("--resume")
        await process.start()

    def _refuse_without_workers(self, last: LocalProcess) -> None:
        """With every local worker gone and no other connected, waiting is of no use."""
        if not all(worker.given_up for worker in self._workers):
            return
        local = {worker.name for worker in self._workers}
        others = [w for w in self._view.workers if w.get("name") not in local]
        if not others:
            raise Echo2Error(self._cause(last, "no worker is left: every local one stays away"))

    def _cause(self, process: LocalProcess, text: str, *, count: int = 12) -> str:
        lines = process.last_lines(count)
        if not lines:
            return f"{text}; {process.log} has nothing to say"
        return "\n    ".join([f"{text}; the end of {process.log}:", *lines])

    async def _poll_status(self, session: aiohttp.ClientSession) -> None:
        """Ask the coordinator for its state, as long as this run lasts."""
        heard, said = time.monotonic(), False
        while True:
            try:
                record = self._folder.coordinator() or {}
                if record.get("pid") == self._coordinator.pid and record.get("http"):
                    self._view.status = await fetch_status(
                        session, str(record["http"]), self._config.http.token
                    )
                    heard, said = time.monotonic(), False
            except Echo2Error as error:
                silent_s = time.monotonic() - heard
                if silent_s > STATUS_SILENT_S and not said:
                    said = True
                    self._display.say(f"no status for {silent_s:.0f} s: {error}")
            self._memory.sample({p.name: p.pid if p.running else None for p in self._trees()})
            await asyncio.sleep(STATUS_EVERY_S)

    def _trees(self) -> list[LocalProcess]:
        """Those whose memory grows with the model."""
        return [self._learner, *self._workers]

    def _refresh(self) -> None:
        for line in self._metrics.read():
            self._view.take_line(line)
        self._display.update(self._view)

    # --------------------------------------------------------------------------- end

    async def _end_in_order(self) -> None:
        """Learner first (it writes a checkpoint), then those that it needs."""
        failed = bool(self._failure)
        interrupted = self._stop.is_set()
        if interrupted and self._learner.running:
            self._display.say("asked the learner to checkpoint and close; Ctrl-C again kills all")
        orderly = not failed and not interrupted
        learner_s = COORDINATOR_END_S if failed else self._config.run.learner_timeout_s
        await self._end(
            self._learner, signal.SIGINT, grace_s=FAREWELL_S * orderly, most_s=learner_s
        )
        await self._end(
            self._coordinator,
            signal.SIGTERM,
            grace_s=FAREWELL_S * orderly,
            most_s=COORDINATOR_END_S,
        )
        told_s = WORKER_END_S if self._coordinator.code == 0 else 0.0
        worker_s = WORKER_END_S + self._config.worker.drain_timeout_s
        async with asyncio.TaskGroup() as group:
            for worker in self._workers:
                group.create_task(
                    self._end(worker, signal.SIGTERM, grace_s=told_s, most_s=worker_s)
                )
        await self._end(self._origin, signal.SIGTERM, grace_s=0.0, most_s=ORIGIN_END_S)

    async def _end(
        self, process: LocalProcess, number: signal.Signals, *, grace_s: float, most_s: float
    ) -> None:
        """Give it `grace_s` to end by itself, then the signal and `most_s`, then kill it."""
        if not process.running or await self._ended(process, grace_s):
            return
        process.send(number)
        if not await self._ended(process, most_s):
            if not self._kill.is_set():
                self._display.say(f"{process.name} did not end within {most_s:g} s; killed")
            process.send(signal.SIGKILL)
            await process.wait()
        if process.code and not self._failure and not self._stop.is_set():
            said = self._cause(process, f"{process.name} ended with {ended_how(process.code)}")
            if process in (self._coordinator, self._learner):
                self._failure = said
            else:
                self._display.say(said)

    async def _ended(self, process: LocalProcess, timeout_s: float) -> bool:
        """Whether it ended in time; a second interrupt cuts the time short."""
        deadline = time.monotonic() + timeout_s
        while process.running and not self._kill.is_set() and time.monotonic() < deadline:
            await process.ended_within(min(REFRESH_S, max(0.0, deadline - time.monotonic())))
            self._refresh()
        return not process.running

    def _take_events(self) -> None:
        """The ends of groups and of the run, from the coordinator's record."""
        self._ends, end = read_ends(self._folder.events, since=self._events_start)
        self._reason = str(end.get("reason", ""))
        self._finished = bool(end.get("finished")) and not (self._stop.is_set() or self._failure)

    async def _kill_all(self) -> None:
        for process in self._processes.values():
            process.send(signal.SIGKILL)
        for process in self._processes.values():
            if process.running:
                await process.wait()

    @contextlib.asynccontextmanager
    async def _signals(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for each in handled:
            loop.add_signal_handler(each, self._interrupt)
        try:
            yield
        finally:
            for each in handled:
                loop.remove_signal_handler(each)

    def _interrupt(self) -> None:
        if self._stop.is_set():
            self._kill.set()
        self._stop.set()
