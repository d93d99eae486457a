"""Starts the origin beside a learner that was started by hand, unless one serves already.

It runs in a session of its own with its own log, so that it outlives the learner, and ends
when the run is over; before that, SIGTERM to the process id in RUN/origin.json ends it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from typing import Final

import structlog

from echo2.commands.processes import command_line, ended_how, last_lines, open_log
from echo2.commands.run_folder import RunFolder, is_alive
from echo2.errors import Echo2Error

log = structlog.get_logger()

ANSWER_TIMEOUT_S: Final = 2.0
_ZMTP_SIGNATURE: Final = b"\xff"
"""First byte that a ZeroMQ socket sends to whoever connects."""


def ensure_origin(folder: RunFolder, arguments: Sequence[str], *, timeout_s: float) -> None:
    """Returns when an origin serves the folder; one is started if none does.

    `arguments` are those of `echo2 origin`. Raises Echo2Error when it does not come up.
    """
    record = folder.origin() or {}
    if is_alive(record.get("pid")) and answers(str(record.get("endpoint", ""))):
        log.info("origin_found", pid=record["pid"], endpoint=record["endpoint"])
        return
    path = folder.logs / "origin.log"
    with open_log(path) as file:
        begin = file.tell()
        process = subprocess.Popen(
            command_line("origin", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_s
    while (folder.origin() or {}).get("pid") != process.pid:
        if time.monotonic() > deadline:
            process.kill()
        try:
            code = process.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        lines = "\n    ".join(last_lines(path, 12, start=begin))
        raise Echo2Error(
            f"the origin did not come up within {timeout_s:g} s ({ended_how(code)}); the end of "
            f"{path}:\n    {lines}"
        )
    log.info("origin_started", pid=process.pid, log=str(path))


def end_origin(folder: RunFolder) -> None:
    """Ask the origin that serves the folder, if there is one, to end."""
    record = folder.origin() or {}
    if is_alive(record.get("pid")) and answers(str(record.get("endpoint", ""))):
        os.kill(int(record["pid"]), signal.SIGTERM)
        log.info("origin_ended", pid=record["pid"])


def answers(endpoint: str) -> bool:
    """Whether a ZeroMQ socket listens at "tcp://HOST:PORT"."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    try:
        address = (host.strip("[]"), int(port))
        with socket.create_connection(address, timeout=ANSWER_TIMEOUT_S) as connection:
            return connection.recv(1) == _ZMTP_SIGNATURE
    except (OSError, ValueError):
        return False
