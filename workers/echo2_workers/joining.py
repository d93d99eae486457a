"""`echo2 worker --join TOKEN`: from one line to a worker that its coordinator knows.

    token -> a berth in the folder (a key of its own, made once) -> enrolled, once -> settings

    DIR/keys/berth-N.key      secret key of this machine's Nth worker of the folder; mode 0600
    DIR/keys/berth-N.lock     held by the process that is this worker now
    DIR/berths/berth-N.json   what the coordinator answered to it; mode 0600
    DIR/workers/NAME/         as with any worker: chunk store, assets

DIR is --run-dir, by default runs/join-ID. The same command again takes the same berth: its key
is known already, nothing is asked and no use of the token is spent, so it may have expired by
then. The same command at once on one machine takes the next berth, which enrols for itself.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Final

import structlog
import zmq.asyncio
from pydantic import TypeAdapter, ValidationError

from echo2 import __version__
from echo2.config import Config
from echo2.errors import ConfigError, Echo2Error, RefusedError, WaitTimeoutError
from echo2.join_settings import joined_config
from echo2.messages import PROTOCOL, Enrol, Enrolled, EnrolRefused, Lane, Message, Role
from echo2.net.dealer import Dealer
from echo2.net.join_token import JoinToken
from echo2.net.keys import KeyPair, check_name, load_or_create_key
from echo2.net.sockets import close_context, make_context
from echo2.net.token_book import utc
from echo2.weights.files import disk_errors, write_whole
from echo2_workers.identity import Identity, take_locks

log = structlog.get_logger(__name__)

BERTHS_MAX: Final = 64
ENROL_TIMEOUT_S: Final = 120.0
ANSWER_S: Final = 10.0
"""Without an answer for so long it is asked again."""
AGAIN_S: Final = 1.0
_AGAIN: Final = ("busy", "unavailable")
_ANSWERS: Final = TypeAdapter(Enrolled)


@dataclass(frozen=True, slots=True)
class Joined:
    """A worker that is about to start. `identity` is released by whoever serves with it."""

    config: Config
    run_dir: Path
    identity: Identity


@dataclass(frozen=True, slots=True)
class _Berth:
    name: str
    keys: KeyPair
    record: Path
    locks: list[IO[str]]


def join_run(
    token_text: str, run_dir: Path | None, *, wanted: str, overrides: Sequence[str]
) -> Joined:
    """Enrol if this berth has not yet. Raises ConfigError for what is no token and for settings
    that cannot be, Echo2Error with the coordinator's reason when it refuses."""
    token = JoinToken.parse(token_text)
    run_dir = (run_dir or Path("runs") / f"join-{token.id}").absolute()
    berth = _take_berth(run_dir)
    try:
        enrolled = _earlier_answer(berth, token)
        if enrolled is None:
            enrolled = asyncio.run(enrol(token, berth.keys, wanted=wanted))
            _keep_answer(berth, token, enrolled)
            log.info("worker_enrolled", worker=enrolled.name, token=token.id, folder=str(run_dir))
        config = joined_config(enrolled, overrides)
        folder = run_dir / "workers" / enrolled.name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except BaseException:
        for lock in berth.locks:
            lock.close()
        raise
    return Joined(config, run_dir, Identity(enrolled.name, berth.keys, folder, berth.locks))


async def enrol(
    token: JoinToken, keys: KeyPair, *, wanted: str = "", timeout_s: float = ENROL_TIMEOUT_S
) -> Enrolled:
    """Have the public half of `keys` let in by `token`; its secret half stays here. Raises
    Echo2Error: with the reason when it is refused, with the cause after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    cause = "it did not answer"
    request = Enrol(
        protocol=PROTOCOL, echo2_version=__version__, public_key=keys.public, name=_wish(wanted)
    )
    context = make_context()
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            answer = await _ask(context, token, request, left_s)
            if isinstance(answer, Enrolled):
                return _checked(answer, token)
            if isinstance(answer, EnrolRefused):
                cause = f"{answer.text} ({answer.reason})"
                if answer.reason not in _AGAIN:
                    raise Echo2Error(f"the coordinator does not let this machine in: {cause}")
            await asyncio.sleep(AGAIN_S)
        raise WaitTimeoutError(
            f"the coordinator at {token.endpoint} was reached, but did not let this machine in "
            f"within {timeout_s:g} s: {cause}"
        )
    finally:
        await close_context(context)


async def _ask(
    context: zmq.asyncio.Context, token: JoinToken, request: Enrol, timeout_s: float
) -> Message | None:
    """One connection: the request is its first message. None without an answer in time."""
    dealer = Dealer(
        context,
        lane=Lane.ENROLMENT,
        role=Role.WORKER,
        endpoint=token.endpoint,
        server_key=token.server_key,
        keys=token.keys,
        name=f"token {token.id}",
        greeting=lambda: request,
    )
    await dealer.start()
    try:
        await dealer.wait_connected(timeout_s)
        async with asyncio.timeout(ANSWER_S):
            return await dealer.receive()
    except RefusedError:
        raise Echo2Error(
            f"the coordinator at {token.endpoint} does not take token {token.id}: it expired (it "
            f"is good until {utc(token.expires_at)}), was used up ({token.uses} in all) or was "
            "revoked; make another one there with: echo2 token create"
        ) from None
    except TimeoutError:
        return None
    finally:
        await dealer.stop(flush_s=0.0)


def _checked(enrolled: Enrolled, token: JoinToken) -> Enrolled:
    if enrolled.protocol != PROTOCOL or enrolled.server_key != token.server_key:
        raise Echo2Error(
            "the coordinator let this machine in, but speaks another protocol or names another "
            "key than the token; install the same echo2 on both machines, and make a new token"
        )
    check_name(enrolled.name)  # a folder gets it
    return enrolled


def _wish(wanted: str) -> str:
    """A name that the message can carry; what cannot be one is told at once."""
    try:
        Enrol(protocol=PROTOCOL, echo2_version="", public_key="0" * 40, name=wanted)
    except ValidationError:
        raise ConfigError(
            f"--name {wanted}: 1 to 64 of the characters A-Z a-z 0-9 _ - and (not first) . are "
            "allowed; it is heeded if it begins with the token's prefix, for example joined-a100"
        ) from None
    return wanted


def _take_berth(run_dir: Path) -> _Berth:
    """The first that no process holds; its key is made if it has none yet."""
    keys_dir, berths = run_dir / "keys", run_dir / "berths"
    with disk_errors("making the folder of this worker", run_dir):
        for folder in (keys_dir, berths):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(1, BERTHS_MAX + 1):
            name = f"berth-{number}"
            locks = take_locks([keys_dir], name)
            if locks is not None:
                keys = load_or_create_key(keys_dir / f"{name}.key")
                return _Berth(name, keys, berths / f"{name}.json", locks)
    raise ConfigError(f"{BERTHS_MAX} workers of {run_dir} run already; give another --run-dir")


def _earlier_answer(berth: _Berth, token: JoinToken) -> Enrolled | None:
    """What was answered to this berth's key, by this token; None if it has yet to enrol."""
    try:
        found = json.loads(berth.record.read_text(encoding="utf-8"))
        if found["token"] != token.id or found["public_key"] != berth.keys.public:
            return None
        return _checked(_ANSWERS.validate_python(found["answer"]), token)
    except (FileNotFoundError, ValueError, KeyError, TypeError, Echo2Error):
        return None  # asked again, which costs nothing: the key is known there


def _keep_answer(berth: _Berth, token: JoinToken, enrolled: Enrolled) -> None:
    found = {"token": token.id, "public_key": berth.keys.public, "answer": asdict(enrolled)}
    with disk_errors("keeping the coordinator's answer", berth.record.parent):
        write_whole(berth.record, json.dumps(found).encode(), mode=0o600)
