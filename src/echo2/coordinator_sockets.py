"""The coordinator's sockets: a lane each for control and rollouts, the enrolment socket, and
the keys that open them.

Every message of a peer on the allow-list goes to `on_message`, and `on_turn` follows on those that
came together; a key that leaves the list is told to `on_revoked`, before any later message; what
knocks and is not let in is counted (`refused`), and told to `on_event` as often as a disk bears.
Decides nothing else.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

import structlog
import zmq.asyncio

from echo2.config import Config
from echo2.enrolment import Enrolment
from echo2.errors import ConfigError, ProtocolError
from echo2.join_settings import shared_settings
from echo2.messages import PROTOCOL, Enrolled, Lane, Message, Role
from echo2.net.auth import AllowList, Authenticator, KeyPair, load_or_create_key
from echo2.net.rate_limit import RateLimit
from echo2.net.router import Router
from echo2.net.sockets import LANES, endpoint_of
from echo2.net.tasks import OwnedTasks
from echo2.types import PeerId

log = structlog.get_logger()

_FAILED: Final = "handshake_failed"
"""Who spoke no CURVE at all, or broke off: counted by ZeroMQ, and nobody knows a key."""
_TOLD_BURST: Final = 100
_TOLD_INTERVAL_S: Final = 1.0
"""Messages that are refused are all counted, and logged as often as this."""
_RECORDED_BURST: Final = 4
_RECORDED_INTERVAL_S: Final = 10.0
"""And so often those of one reason, of all peers together, stand in events.jsonl."""
_LEARNER_BUDGETS: Final = {
    lane: replace(LANES[lane].budget, taken=0, per_ms=0) for lane in (Lane.CONTROL, Lane.ROLLOUTS)
}
"""A learner has the whole training in its hand: only what is refused is held against it."""
_LEARNS: Final = frozenset({Role.LEARNER})
_SAMPLES: Final = frozenset({Role.WORKER})
Listening = TypeVar("Listening")


class CoordinatorSockets:
    """`start` them, `wait` beside the coordinator, `stop` them."""

    def __init__(
        self,
        context: zmq.asyncio.Context,
        config: Config,
        run_dir: Path,
        *,
        on_message: Callable[[PeerId, Message], None],
        on_turn: Callable[[], None],
        on_revoked: Callable[[PeerId], None],
        on_event: Callable[[str, dict[str, Any]], None],
    ) -> None:
        self.public_key = ""
        """"" without CURVE."""
        self.join_endpoint = ""
        self._context = context
        self._config = config
        self._run_dir = run_dir
        self._on_message = on_message
        self._on_turn = on_turn
        self._on_revoked = on_revoked
        self._on_event = on_event
        self._before = _record_before(run_dir)
        self._keys: KeyPair | None = None
        self._allow_list: AllowList | None = None
        self._allowed: dict[str, str] = {}
        self._generation = 0
        self._authenticator: Authenticator | None = None
        self._enrolment: Enrolment | None = None
        self._logged = RateLimit(_TOLD_BURST, _TOLD_INTERVAL_S)
        self._recorded: defaultdict[str, RateLimit] = defaultdict(
            lambda: RateLimit(_RECORDED_BURST, _RECORDED_INTERVAL_S)
        )
        self._tasks = OwnedTasks("sockets")
        self._exit = contextlib.AsyncExitStack()

    @property
    def control_endpoint(self) -> str:
        return self._control.endpoint

    @property
    def rollouts_endpoint(self) -> str:
        return self._rollouts.endpoint

    @property
    def refused(self) -> Counter[str]:
        """Handshakes, enrolments and messages that were refused, by reason."""
        found = self._control.refused + self._rollouts.refused
        failed = self._control.counters[_FAILED] + self._rollouts.counters[_FAILED]
        found += Counter({_FAILED: failed})
        for part in (self._authenticator, self._enrolment):
            if part is not None:
                found += part.refused
        return found

    async def start(self, run_id: str) -> None:
        """Listen on all. ConfigError when one cannot be bound; `stop` is called then too."""
        self._exit.push_async_callback(self._tasks.stop)
        net = self._config.net
        keys_dir = Path(net.keys_dir) if net.keys_dir else self._run_dir / "keys"
        if net.curve:
            await self._let_in(keys_dir)
        self._control = await self._open(Lane.CONTROL, net.control_port)
        self._rollouts = await self._open(Lane.ROLLOUTS, net.rollouts_port)
        if self._keys is not None:
            await self._enrol(self._keys, keys_dir, run_id)

    async def stop(self) -> None:
        await self._exit.aclose()

    async def wait(self) -> None:
        """Until stopped; raises what crashed."""
        await self._tasks.wait()

    def key_of(self, peer: PeerId) -> str | None:
        """The verified key of a peer; None without CURVE."""
        return None if self._allow_list is None else self._allow_list.key_of(peer)

    def send(self, peer: PeerId, message: Message) -> None:
        """Queue a message on its lane; whoever cannot be reached asks again."""
        router = self._rollouts if message.LANE is Lane.ROLLOUTS else self._control
        router.send(peer, message)

    def forget(self, peer: PeerId) -> None:
        """It has left. Who comes under ever new names would be remembered for ever."""
        self._control.forget(peer)
        self._rollouts.forget(peer)

    def refused_by_core(self, peer: PeerId, message: Message, error: ProtocolError) -> None:
        """A message that the coordinator's state could not take: told as others are, and held
        against the peer."""
        router = self._rollouts if message.LANE is Lane.ROLLOUTS else self._control
        router.charge_refusal(peer)
        self._message_refused(peer, error)

    def look_at_keys(self) -> None:
        """Read the allow-list if it changed, and tell of the keys that left it. To be called a
        few times a second."""
        if self._allow_list is not None:
            self._allow_list.refresh()
            self._tell_of_revoked(self._allow_list)

    # ---------------------------------------------------------------------- helpers

    async def _let_in(self, keys_dir: Path) -> None:
        """Handshakes are answered from now on, by the allow-list."""
        self._keys = load_or_create_key(keys_dir / "coordinator.key")
        self.public_key = self._keys.public
        self._allow_list = AllowList(keys_dir / "authorized")
        self._allowed = self._allow_list.keys()
        self._generation = self._allow_list.generation
        self._authenticator = Authenticator(
            self._context, self._allow_list, on_refused=self._handshake_refused
        )
        await self._authenticator.start()
        self._exit.push_async_callback(self._authenticator.stop)
        self._tasks.start(self._authenticator.wait(), name="authenticator")

    async def _open(self, lane: Lane, port: int) -> Router:
        budget, learners_budget = LANES[lane].budget, _LEARNER_BUDGETS[lane]

        async def listen(bind: str) -> Router:
            router = Router(
                self._context,
                lane=lane,
                role=Role.COORDINATOR,
                bind=bind,
                keys=self._keys,
                on_message=self._take,
                on_turn=self._on_turn,
                on_refused=self._message_refused,
                client_roles=_client_roles,
                budget_of=lambda peer: learners_budget if _is_learner(peer) else budget,
            )
            await router.start()
            return router

        router = await self._on_port(listen, lane.value, port)
        self._exit.push_async_callback(router.stop)
        self._tasks.start(router.wait(), name=f"router.{lane}")
        return router

    async def _enrol(self, keys: KeyPair, keys_dir: Path, run_id: str) -> None:
        settings = shared_settings(self._config)

        def offer(name: str) -> Enrolled:
            return Enrolled(
                protocol=PROTOCOL,
                name=name,
                run_id=run_id,
                control=self._told(self.control_endpoint),
                rollouts=self._told(self.rollouts_endpoint),
                server_key=keys.public,
                settings=settings,
            )

        async def listen(bind: str) -> Enrolment:
            enrolment = Enrolment(
                self._context,
                keys=keys,
                keys_dir=keys_dir,
                given_by_hand=self._config.audit.workers,
                bind=bind,
                offer=offer,
                on_event=self._on_event,
            )
            await enrolment.start()
            return enrolment

        self._enrolment = await self._on_port(listen, "join", self._config.net.join_port)
        self._exit.push_async_callback(self._enrolment.stop)
        self._tasks.start(self._enrolment.wait(), name="enrolment")
        self.join_endpoint = self._enrolment.endpoint

    def _told(self, endpoint: str) -> str:
        """As `net.host` names this machine: what that resolves to here may be another's own."""
        return endpoint_of(self._config.net.host, _port_of(endpoint))

    async def _on_port(
        self, listen: Callable[[str], Awaitable[Listening]], what: str, port: int
    ) -> Listening:
        """Listen on the configured port; if that is 0 on the one that this folder's coordinator
        had before, so that tokens and joined workers outlive a restart, or else on any."""
        host = self._config.net.host
        before = 0 if port else _port_of(self._before.get(what))
        if before:
            try:
                return await listen(f"tcp://{host}:{before}")
            except ConfigError as error:
                log.warning("port_taken", lane=what, port=before, reason=str(error))
        return await listen(f"tcp://{host}:{port or '*'}")

    def _take(self, peer: PeerId, message: Message) -> None:
        if self._allow_list is not None:
            self._tell_of_revoked(self._allow_list)
        self._on_message(peer, message)

    def _tell_of_revoked(self, allow_list: AllowList) -> None:
        if allow_list.generation == self._generation:
            return
        self._generation = allow_list.generation
        before, self._allowed = self._allowed, allow_list.keys()
        for name, key in before.items():
            if self._allowed.get(name) != key:
                log.info("key_revoked", peer=name, public_key=key)
                self._on_revoked(PeerId(name))

    def _message_refused(self, peer: PeerId | None, error: ProtocolError) -> None:
        now = time.monotonic()
        fields = {"peer": peer or "", "reason": error.reason, "text": str(error)}
        if num_since := self._logged.note(now):
            log.warning("message_refused", **fields, num_since=num_since)
        if num_since := self._recorded[error.reason].note(now):
            self._on_event("message_refused", {**fields, "num_since": num_since})

    def _handshake_refused(
        self, reason: str, public_key: str, address: str, num_since: int
    ) -> None:
        fields = {"reason": reason, "public_key": public_key, "address": address}
        self._on_event("handshake_refused", {**fields, "num_since": num_since})


def _client_roles(peer: PeerId) -> frozenset[Role]:
    """A key named learner or learner-N learns; every other samples."""
    return _LEARNS if _is_learner(peer) else _SAMPLES


def _is_learner(peer: PeerId) -> bool:
    return peer == "learner" or peer.startswith("learner-")


def _record_before(run_dir: Path) -> dict[str, Any]:
    """What the coordinator that served this folder last wrote about itself; {} for none."""
    try:
        found = json.loads((run_dir / "coordinator.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _port_of(endpoint: object) -> int:
    """The port of "tcp://HOST:PORT"; 0 for what is none."""
    port = endpoint.rpartition(":")[2] if isinstance(endpoint, str) else ""
    return int(port) if port.isdecimal() and 0 < int(port) < 65536 else 0
