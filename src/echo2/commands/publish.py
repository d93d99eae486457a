"""`echo2 publish`: a folder of safetensors to every worker of a coordinator, no learner needed.

    look at the folder -> take the seat as a guest -> workers are here -> write RUN/versions
        -> an origin serves it -> announce -> wait until the workers have installed it -> leave

A guest gets the learner's seat only while no learner is in it, and leaves the run's step as it
is. What is published is the next version of the run: it replaces the one before at each worker.
The origin is the run's if one serves the folder, else one inside this process, which ends with
it. Fetching, relaying and installing is what workers do with every version.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import threading
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import uvloop

from echo2.commands.origin_process import answers
from echo2.commands.run_folder import RunFolder, is_alive
from echo2.commands.run_view import number
from echo2.config import Config, load_config
from echo2.config_loading import check_model
from echo2.config_overrides import apply_overrides
from echo2.config_rules import RULES
from echo2.core.broadcast import QUANTILES
from echo2.errors import ConfigError, Echo2Error, RefusedError, WaitTimeoutError
from echo2.learner_client import LearnerClient
from echo2.learner_transport import SocketTransport
from echo2.logs import setup_logging
from echo2.messages import LearnerWelcome, VersionPublished
from echo2.net.sockets import close_context, is_loopback, make_context
from echo2.net.tasks import OwnedTasks
from echo2.types import BroadcastWorker, Task, Version
from echo2.weights.origin import Origin
from echo2.weights.published_folder import PublishedFolder, Written
from echo2.weights.safetensors_file import read_safetensors_folder
from echo2.weights.threads import in_thread

ASK_S: Final = 0.2
SHOWN_MAX: Final = 64
"""Workers that are listed for people; --json has them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What to publish (`num_bytes` of tensors), and when it counts as done: when `wait_share`
    of the workers that were there have installed it, at least `workers_min` being there, all
    within `timeout_s`."""

    model: Path
    num_bytes: int
    workers_min: int
    wait_share: float
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How far a version came. `workers`: those that were there when it was published, the
    ones that have it first, in the order in which they got it."""

    version: Version
    written: Written
    workers: tuple[BroadcastWorker, ...]

    @property
    def seconds(self) -> list[float]:
        return sorted(w.seconds for w in self.workers if w.seconds is not None)

    def rank(self, share: float) -> int:
        """`share` of the workers, rounded up."""
        return math.ceil(share * len(self.workers) - 1e-9)

    def t_bcast_s(self, share: float) -> float | None:
        """T_bcast: from the publication until `share` of the workers had it."""
        rank = max(1, self.rank(share))
        return self.seconds[rank - 1] if len(self.seconds) >= rank else None

    @property
    def can_still_grow(self) -> bool:
        return any(w.seconds is None and w.is_here for w in self.workers)


def main(
    model: Path,
    path: Path | None,
    run_dir: Path | None,
    overrides: list[str],
    *,
    net: dict[str, str],
    workers_min: int,
    wait_share: float,
    timeout_s: float,
    as_json: bool,
) -> int:
    """0 when enough workers have it. Raises Echo2Error with the cause when not."""
    given = [f"net.{key}='{value}'" for key, value in net.items() if value]
    config, folder = _load(path, run_dir, [*overrides, *given])
    setup_logging("warning" if config.log.level == "info" else config.log.level, config.log.format)
    num_bytes = _bytes_of(model)
    _check_reachable(config, folder)
    order = Order(
        model=model,
        num_bytes=num_bytes,
        workers_min=workers_min,
        wait_share=wait_share,
        timeout_s=timeout_s,
    )
    outcome = uvloop.run(_publish(config, folder, order))
    if as_json:
        print(json.dumps(_plain(outcome), indent=2))
    else:
        print("\n".join(_told(outcome)), flush=True)
    problem = _problem(outcome, order)
    if problem:
        raise Echo2Error(problem)
    return 0


def _load(
    path: Path | None, run_dir: Path | None, overrides: list[str]
) -> tuple[Config, RunFolder]:
    """CONFIG, or what the run folder says, or the defaults and the overrides alone."""
    if path is None and run_dir is None:
        raise ConfigError(
            "echo2 publish needs --run-dir DIR (the folder of a run, or on another machine one "
            "for keys and versions) or a CONFIG"
        )
    if path is None and run_dir is not None:
        resolved = RunFolder(run_dir).resolved_config
        path = resolved if resolved.exists() else None
    if path is not None:
        config = load_config(path, overrides)
    else:
        tables: dict[str, Any] = {}
        problems = apply_overrides(tables, overrides)
        config = check_model(Config, tables, RULES, problems=problems)
    return config, RunFolder.of(config, run_dir)


def _check_reachable(config: Config, folder: RunFolder) -> None:
    """What can be said at once about coordinator and origin."""
    if config.net.coordinator:
        if not is_loopback(config.net.coordinator) and is_loopback(f"tcp://{config.net.host}:1"):
            raise ConfigError(
                f"the coordinator is at {config.net.coordinator}, and an origin at net.host = "
                f'"{config.net.host}" could not be reached from there: --set net.host=ADDRESS '
                "with this machine's address, and net.origin_port with an open port"
            )
        folder.make()
        return
    record = folder.coordinator()
    if record is None or not is_alive(record.get("pid")):
        found = "was not started" if record is None else f"(pid {record.get('pid')}) has ended"
        raise Echo2Error(
            f"the coordinator of {folder.path} {found}: start it with echo2 coordinator CONFIG "
            f"--run-dir {folder.path}, or name one elsewhere with --coordinator"
        )


async def _publish(config: Config, folder: RunFolder, order: Order) -> Outcome:
    return await _Publication(config, folder, order).run()


class _Publication:
    """One version on its way. `doing` is what it does or waits for now, in words."""

    def __init__(self, config: Config, folder: RunFolder, order: Order) -> None:
        self._config = config
        self._folder = folder
        self._order = order
        self._doing = ""
        self._origin_tasks = OwnedTasks("origin")
        self._transport = SocketTransport(config, folder.path)

    async def run(self) -> Outcome:
        deadline = asyncio.get_running_loop().time() + self._order.timeout_s
        client = LearnerClient(
            self._transport,
            tasks=_no_tasks,
            connect_timeout_s=self._config.net.connect_timeout_s,
            guest=True,
        )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(client.close, "it published", finished=False)
            try:
                async with asyncio.timeout_at(deadline):
                    published = await self._publish(client, stack)
            except TimeoutError:
                raise WaitTimeoutError(
                    f"nothing was published within {self._order.timeout_s:g} s (--timeout): "
                    f"{self._doing}"
                ) from None
            except RefusedError as error:
                raise RefusedError(f"nothing was published: {error}") from error
            return await self._until_installed(client, published, deadline)

    async def _publish(self, client: LearnerClient, stack: AsyncExitStack) -> Outcome:
        welcome = await self._take_seat(client)
        version = Version(welcome.incarnation, welcome.step)
        await self._until_workers(client)
        self._say(client, "waits for an origin")
        endpoint, key = await self._origin(stack)
        self._say(client, f"writes {self._order.num_bytes:,} bytes as version {version}")
        published = PublishedFolder(self._folder.path / "versions")
        await asyncio.to_thread(published.prepare)
        stop = threading.Event()
        write = partial(published.write, self._order.model, version, stop=stop)
        written = await in_thread(stop, partial(write, delta=self._config.learner.deltas))
        self._say(client, f"announces version {version}")
        await client.publish(
            VersionPublished(
                version=version,
                manifest_digest=written.manifest.manifest_digest,
                assets_digest=written.assets_digest,
                num_bytes=written.manifest.num_bytes,
                origin=endpoint,
                origin_key=key,
                deltas=() if written.delta is None else (written.delta,),
            )
        )
        return Outcome(version=version, written=written, workers=())

    async def _take_seat(self, client: LearnerClient) -> LearnerWelcome:
        self._say(client, "waits for the coordinator")
        limit_s = min(self._config.net.connect_timeout_s, self._order.timeout_s)
        seat = asyncio.create_task(client.start(resume_step=0, timeout_s=limit_s))
        try:
            # On the coordinator's own machine our key is let in as soon as it has seen it.
            while not seat.done() and not (
                self._config.net.coordinator and self._transport.refusal
            ):
                await asyncio.wait({seat}, timeout=ASK_S)
            if not seat.done():
                raise RefusedError(f"{self._transport.refusal}, as learner-NAME.pub")
            return await seat
        finally:
            seat.cancel()
            await asyncio.wait({seat})

    async def _until_workers(self, client: LearnerClient) -> None:
        least = self._order.workers_min
        while True:
            found = (await client.broadcast()).num_active
            if found >= least:
                return
            self._say(client, f"{found} of {least} workers are here (--workers {least})")
            await asyncio.sleep(ASK_S)

    async def _origin(self, stack: AsyncExitStack) -> tuple[str, str]:
        """Endpoint and public key of the one that serves the folder; maybe one of our own."""
        record = self._folder.origin() or {}
        endpoint = str(record.get("endpoint", ""))
        if is_alive(record.get("pid")) and await asyncio.to_thread(answers, endpoint):
            return endpoint, str(record.get("public_key", ""))
        context = make_context()
        stack.push_async_callback(close_context, context)
        origin = Origin(context, self._config, self._folder.path)
        stack.push_async_callback(origin.stop)
        await origin.start()
        self._origin_tasks.start(origin.wait(), name="serve")
        stack.push_async_callback(self._origin_tasks.stop)
        return origin.endpoint, origin.public_key

    async def _until_installed(
        self, client: LearnerClient, outcome: Outcome, deadline: float
    ) -> Outcome:
        """How far it has come when enough have it, nobody else can, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while True:
                    status = await client.broadcast()
                    if self._origin_tasks.crash is not None:
                        return outcome  # which the end of the origin's tasks raises
                    if status.version == outcome.version:
                        outcome = replace(outcome, workers=status.workers)
                    have, wanted = len(outcome.seconds), outcome.rank(self._order.wait_share)
                    if have >= wanted or not outcome.can_still_grow:
                        break
                    self._say(client, f"{have} of {len(outcome.workers)} workers have installed it")
                    await asyncio.sleep(ASK_S)
        return outcome

    def _say(self, client: LearnerClient, text: str) -> None:
        """On change: to whoever runs this, and to those who ask for the coordinator's status."""
        if text != self._doing:
            self._doing = text
            print(f"echo2 publish: {text}", file=sys.stderr, flush=True)
        if client.is_seated:
            client.say(text)


def _no_tasks(start: int, count: int) -> tuple[list[Task], bool]:
    raise AssertionError("a guest is asked for no tasks")


def _bytes_of(model: Path) -> int:
    """The bytes of a folder's tensors. Raises WeightsError when they could not be published."""
    if not model.is_dir():
        raise ConfigError(f"{model} is no folder: give one that holds *.safetensors files")
    return sum(memoryview(content).nbytes for *_, content in read_safetensors_folder(model))


def _problem(outcome: Outcome, order: Order) -> str:
    """Why the command failed; "" when it did not."""
    have, wanted = len(outcome.seconds), outcome.rank(order.wait_share)
    if not outcome.workers:
        if order.workers_min == 0:
            return ""
        return (
            f"version {outcome.version} is published, and nobody is known to have installed it: "
            "all workers left, or the coordinator was started again; see echo2 status"
        )
    if have >= wanted:
        return ""
    lacking = [worker for worker in outcome.workers if worker.seconds is None]
    waiting = [worker.name for worker in lacking if worker.is_here]
    told = next((w for w in lacking if w.problem), None)
    said = (
        f"version {outcome.version} is published, but only {have} of {len(outcome.workers)} "
        f"workers have installed it, and --wait-q {order.wait_share:g} asks for {wanted}"
    )
    if waiting:
        said += f"; not done within {order.timeout_s:g} s (--timeout): {_names(waiting)}"
    if told is not None:
        said += f"; {told.name} says: {told.problem}"
    return said


def _told(outcome: Outcome) -> list[str]:
    """For people."""
    written = outcome.written
    delta = f", {written.delta.num_bytes:,} as a delta" if written.delta is not None else ""
    lines = [
        f"version   {outcome.version}  {written.manifest.manifest_digest[:16]}  "
        f"{written.manifest.num_bytes:,} bytes{delta}"
    ]
    for worker in outcome.workers[:SHOWN_MAX]:
        if worker.seconds is not None:
            lines.append(
                f"worker    {worker.name}  {worker.seconds:.3f} s  (fetch {worker.fetch_s:.3f} s, "
                f"install {worker.install_s:.3f} s)"
            )
        else:
            state = "not yet" if worker.is_here else "left"
            lines.append(f"worker    {worker.name}  {state}  {worker.problem}".rstrip())
    if len(outcome.workers) > SHOWN_MAX:
        lines.append(f"          and {len(outcome.workers) - SHOWN_MAX} more; --json has them all")
    times = ", ".join(f"{number(outcome.t_bcast_s(share))} s" for share in QUANTILES)
    lines.append(f"t_bcast   {times} at half, 90 % and all of {len(outcome.workers)} workers")
    return lines


def _plain(outcome: Outcome) -> dict[str, Any]:
    """For programs."""
    written = outcome.written
    return {
        "version": str(outcome.version),
        "manifest_digest": written.manifest.manifest_digest,
        "assets_digest": written.assets_digest,
        "num_bytes": written.manifest.num_bytes,
        "delta_bytes": None if written.delta is None else written.delta.num_bytes,
        "t_bcast_s": {f"{share:g}": outcome.t_bcast_s(share) for share in QUANTILES},
        "workers": [asdict(worker) for worker in outcome.workers],
    }


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
