"""The origin: serves every version of a run folder to the peers on its allow-list.

    python -m echo2.weights.origin CONFIG --run-dir RUN        (or: echo2 origin CONFIG)

A process of its own on the learner's host, so that it outlives the learner's restarts. It
writes RUN/origin.json when it listens, keeps its key (RUN/keys/origin.key), and after a
restart takes up the port that it had before, so that what was announced stays true: kill it
at any moment, start it again, and fetches go on. Ends on SIGTERM or SIGINT.

Serving is `echo2.weights.serving`; this module is its shell.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import structlog
import uvloop
import zmq.asyncio

from echo2.config import Config, load_config
from echo2.errors import ConfigError, Echo2Error
from echo2.logs import setup_logging
from echo2.messages import Lane, Role
from echo2.net.auth import AllowList, Authenticator, KeyPair, load_or_create_key
from echo2.net.descriptors import raise_descriptor_limit
from echo2.net.router import Router
from echo2.net.sockets import close_context, make_context
from echo2.weights.files import disk_errors, write_whole
from echo2.weights.serving import ChunkServer

log = structlog.get_logger(__name__)

CREDIT_BYTES: Final = 4 << 20
"""Bytes that wait here for one peer, beside what its connection has under way."""
REPORT_INTERVAL_S: Final = 60.0


class Origin:
    """Serves RUN/versions. `endpoint` and `public_key` are known once it has started."""

    def __init__(self, context: zmq.asyncio.Context, config: Config, run_dir: Path) -> None:
        self.endpoint = ""
        self.public_key = ""
        self._context = context
        self._config = config
        self._run_dir = run_dir
        self._authenticator: Authenticator | None = None
        self._router: Router | None = None
        self.server: ChunkServer | None = None

    async def start(self) -> None:
        """Listen, then write origin.json. ConfigError when it cannot listen."""
        keys = self._keys()
        if keys is not None:
            self.public_key = keys.public
            folder = _keys_folder(self._config, self._run_dir) / "authorized"
            if Authenticator.of(self._context) is None:  # else the embedding process has one
                self._authenticator = Authenticator(self._context, AllowList(folder))
                await self._authenticator.start()
        self._router = await self._listen(keys)
        self.endpoint = self._router.endpoint
        record = {"endpoint": self.endpoint, "public_key": self.public_key, "pid": os.getpid()}
        with disk_errors("writing origin.json", self._run_dir):
            write_whole(self._run_dir / "origin.json", json.dumps(record).encode())
        log.info("origin_started", endpoint=self.endpoint, run_dir=str(self._run_dir))

    async def wait(self) -> None:
        """Until cancelled; raises what crashed."""
        assert self._router is not None, "start it first"
        assert self.server is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._router.wait())
            group.create_task(self.server.wait())
            group.create_task(self._report())

    async def stop(self) -> None:
        """Close. origin.json stays, with the port for the next start."""
        for part in (self._router, self.server, self._authenticator):
            if part is not None:
                await part.stop()
        log.info("origin_stopped", **self._served())

    async def _listen(self, keys: KeyPair | None) -> Router:
        """On the configured port; if that is 0 on the one it had before, or any."""
        port = self._config.net.origin_port
        before = _port_before(self._run_dir) if port == 0 else 0
        if before:
            try:
                return await self._bound_router(keys, before)
            except ConfigError as error:
                log.warning("origin_port_taken", port=before, reason=str(error))
        return await self._bound_router(keys, port)

    async def _bound_router(self, keys: KeyPair | None, port: int) -> Router:
        server: ChunkServer
        router = Router(
            self._context,
            lane=Lane.CHUNKS,
            role=Role.ORIGIN,
            bind=f"tcp://{self._config.net.host}:{port or '*'}",
            keys=keys,
            on_message=lambda peer, message: server.handle(peer, message),
            on_room=lambda peer: server.look(),
            client_roles=lambda peer: frozenset({Role.WORKER}),
            credit_bytes=CREDIT_BYTES,
        )
        server = ChunkServer(
            self._run_dir / "versions",
            send=router.send,
            credit=router.credit,
            credit_bytes=CREDIT_BYTES,
            uplink_mbit=self._config.net.origin_uplink_mbit,
        )
        await router.start()
        server.start()
        self.server = server
        return router

    async def _report(self) -> None:
        """What was served, now and then, if anything was."""
        before = self._served()
        while True:
            await asyncio.sleep(REPORT_INTERVAL_S)
            now = self._served()
            if now != before:
                log.info("origin_served", **now)
                before = now

    def _served(self) -> dict[str, int]:
        served = dict(self.server.counters) if self.server is not None else {}
        if self._router is not None:
            served |= {f"refused_{reason}": n for reason, n in self._router.refused.items()}
        if self._authenticator is not None:
            served["strangers_refused"] = self._authenticator.refused.total()
        return served

    def _keys(self) -> KeyPair | None:
        if not self._config.net.curve:
            return None
        return load_or_create_key(_keys_folder(self._config, self._run_dir) / "origin.key")


def _keys_folder(config: Config, run_dir: Path) -> Path:
    return Path(config.net.keys_dir) if config.net.keys_dir else run_dir / "keys"


def _port_before(run_dir: Path) -> int:
    """The port of the origin that served this folder last; 0 when there was none."""
    try:
        record = json.loads((run_dir / "origin.json").read_bytes())
        port = int(record["endpoint"].rpartition(":")[2])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return 0  # absent or not ours: any port will do
    return port if 0 < port < 65536 else 0


async def serve(config: Config, run_dir: Path) -> None:
    """Serve until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    context = make_context()
    origin = Origin(context, config, run_dir)
    try:
        await origin.start()
        serving = asyncio.create_task(origin.wait(), name="origin")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if serving.done():
            await serving
        serving.cancel()
        await asyncio.wait({serving})
    finally:
        await origin.stop()
        await close_context(context)


def run_origin(config: Config, run_dir: Path) -> int:
    """The whole process but its arguments; returns the exit code."""
    run_dir.mkdir(parents=True, exist_ok=True)
    raise_descriptor_limit()
    uvloop.run(serve(config, run_dir))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m echo2.weights.origin`: 0 after a signal, 2 for a wrong configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m echo2.weights.origin",
        description="Serves the published versions of a run to its workers.",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file of the run")
    parser.add_argument(
        "--run-dir", type=Path, metavar="RUN", help="run folder; by default run.dir/run.name"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=VALUE",
        help="override one setting; may be repeated",
    )
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, options.settings)
        setup_logging(config.log.level, config.log.format)
        run_dir = options.run_dir or Path(config.run.dir) / config.run.name
        return run_origin(config, run_dir)
    except Echo2Error as error:
        print(f"echo2 origin: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
