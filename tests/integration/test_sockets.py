"""Routers and dealers over real sockets on 127.0.0.1, with CURVE unless a name says plain."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket as stdlib_socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest
import uvloop
import zmq
import zmq.asyncio

from echo2 import wire
from echo2.errors import (
    ConfigError,
    LocalProtocolError,
    ProtocolError,
    RefusedError,
    WaitTimeoutError,
)
from echo2.messages import (
    BatchGroup,
    Goodbye,
    GroupAcknowledged,
    GroupResult,
    Heartbeat,
    HeartbeatEcho,
    Lane,
    LearnerHeartbeat,
    Message,
    Role,
    Shutdown,
)
from echo2.net.auth import AllowList, Authenticator, KeyPair
from echo2.net.dealer import Connection, Dealer
from echo2.net.peer_budget import BudgetLimits
from echo2.net.router import FLOOD, MESSAGES_PER_TURN, Router
from echo2.net.sockets import close_context, make_context
from echo2.types import GroupId, LeaseId, PeerId, Span, Task, TrajectoryHeader, Version

DEADLINE_S = 30.0


NewLoop = Callable[[], asyncio.AbstractEventLoop]


def run(coroutine: Coroutine[Any, Any, None], new_loop: NewLoop) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await coroutine

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(within_deadline())


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that the other end does in its own time."""
    while not condition():  # noqa: ASYNC110  what it looks at is plain data
        await asyncio.sleep(0.005)


def a_heartbeat(sequence: int = 1) -> Heartbeat:
    return Heartbeat(sequence=sequence, state="ready", lease_tokens={})


def a_group(group: str, *, tokens: int) -> GroupResult:
    span = Span(Version(1, 0), 0, tokens)
    header = TrajectoryHeader(tokens, 0, tokens, 1.0, "stop", 1, (span,))
    return GroupResult(
        lease=LeaseId("lease"),
        group=GroupId(group),
        attempt=1,
        trajectories=(header,),
        generate_s=1.0,
        environment_s=0.5,
        token_ids=bytes(4 * tokens),
        logprobs=random.Random(tokens).randbytes(4 * tokens),
        loss_mask=b"\1" * tokens,
    )


def a_batch_group(group: GroupResult) -> BatchGroup:
    return BatchGroup(
        incarnation=1,
        step=0,
        group=group.group,
        worker="w-1",
        task=Task(0, "{}"),
        trajectories=group.trajectories,
        token_ids=group.token_ids,
        logprobs=group.logprobs,
        loss_mask=group.loss_mask,
    )


class Net:
    """A server process in small: context, allow-list, authenticator; and clients' keys."""

    def __init__(self, folder: Path, *, curve: bool = True) -> None:
        self.context = make_context()
        self.allow_list = AllowList(folder / "authorized")
        self.authenticator = Authenticator(self.context, self.allow_list)
        self.server_keys = KeyPair.generate() if curve else None
        self.got: list[tuple[PeerId, Message]] = []
        self.refused: list[tuple[PeerId | None, ProtocolError]] = []
        self.stack = contextlib.AsyncExitStack()

    def key_for(self, name: str) -> KeyPair:
        keys = KeyPair.generate()
        self.allow_list.authorize(name, keys.public)
        return keys

    async def router(
        self,
        lane: Lane = Lane.CONTROL,
        *,
        bind: str = "tcp://127.0.0.1:*",
        on_message: Callable[[PeerId, Message], None] | None = None,
        **more: Any,
    ) -> Router:
        router = Router(
            self.context,
            lane=lane,
            role=Role.COORDINATOR,
            bind=bind,
            keys=self.server_keys,
            on_message=on_message or (lambda peer, message: self.got.append((peer, message))),
            on_refused=lambda peer, error: self.refused.append((peer, error)),
            **more,
        )
        await router.start()
        self.stack.push_async_callback(router.stop)
        return router

    async def dealer(
        self,
        router: Router | str,
        name: str,
        lane: Lane = Lane.CONTROL,
        *,
        keys: KeyPair | None = None,
        role: Role = Role.WORKER,
        **more: Any,
    ) -> Dealer:
        dealer = Dealer(
            self.context,
            lane=lane,
            role=role,
            endpoint=router if isinstance(router, str) else router.endpoint,
            server_key="" if self.server_keys is None else self.server_keys.public,
            keys=None if self.server_keys is None else keys or self.key_for(name),
            name=name,
            **more,
        )
        await dealer.start()
        self.stack.push_async_callback(dealer.stop)
        return dealer

    def raw_dealer(self, router: Router, keys: KeyPair | None) -> zmq.Socket[bytes]:
        """A peer that speaks ZeroMQ and nothing else of ours."""
        context = cast("zmq.Context[zmq.Socket[bytes]]", self.context)
        socket = context.socket(zmq.DEALER, socket_class=zmq.Socket)
        socket.setsockopt(zmq.LINGER, 0)
        if keys is not None and self.server_keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_keys.public.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        socket.connect(router.endpoint)
        self.stack.callback(socket.close)
        return socket

    @property
    def messages(self) -> list[Message]:
        return [message for _, message in self.got]


@contextlib.asynccontextmanager
async def a_net(folder: Path, *, curve: bool = True) -> AsyncIterator[Net]:
    net = Net(folder, curve=curve)
    if curve:
        await net.authenticator.start()
    try:
        yield net
    finally:
        await net.stack.aclose()
        if curve:
            await net.authenticator.stop()
        await close_context(net.context)


def with_net(
    scenario: Callable[[Net], Awaitable[None]],
    folder: Path,
    *,
    curve: bool = True,
    new_loop: NewLoop = asyncio.new_event_loop,
) -> None:
    async def play() -> None:
        async with a_net(folder, curve=curve) as net:
            await scenario(net)

    run(play(), new_loop)


# ------------------------------------------------------------------------ who gets in


def test_a_peer_is_known_by_the_name_of_its_key_and_gets_its_reply(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        dealer = await net.dealer(router, "w-1")
        assert dealer.send(a_heartbeat(7))
        await until(lambda: net.got)
        assert net.got == [("w-1", a_heartbeat(7))]
        assert router.send(PeerId("w-1"), HeartbeatEcho(sequence=7))
        assert await dealer.receive() == HeartbeatEcho(sequence=7)
        assert dealer.state is Connection.CONNECTED

    with_net(scenario, tmp_path)


def test_a_turn_is_over_after_the_messages_that_came_together(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        turns: list[int] = []

        def on_turn() -> None:
            if len(net.got) > sum(turns):
                turns.append(len(net.got) - sum(turns))

        router = await net.router(on_turn=on_turn)
        dealer = await net.dealer(router, "w-1")
        sequences = range(1, 201)
        for sequence in sequences:
            assert dealer.send(a_heartbeat(sequence))
        await until(lambda: sum(turns) == len(sequences))
        assert [message for _, message in net.got] == [a_heartbeat(n) for n in sequences]
        assert max(turns) <= MESSAGES_PER_TURN

    with_net(scenario, tmp_path)


def test_a_plain_peer_on_loopback_is_known_by_its_own_name(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        dealer = await net.dealer(router, "w-1")
        dealer.send(a_heartbeat())
        await until(lambda: net.got)
        assert net.got[0][0] == "w-1"
        router.send(PeerId("w-1"), HeartbeatEcho(sequence=1))
        assert await dealer.receive() == HeartbeatEcho(sequence=1)

        nameless = net.raw_dealer(router, None)
        nameless.send_multipart(wire.encode(a_heartbeat()))
        await until(lambda: router.refused)
        assert router.refused == Counter(unauthenticated=1)

    with_net(scenario, tmp_path, curve=False)


def test_a_stranger_is_refused_counted_and_told(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        stranger = await net.dealer(router, "w-1", keys=KeyPair.generate())
        stranger.send(a_heartbeat())
        with pytest.raises(RefusedError, match="not in its allow-list"):
            await stranger.wait_connected(10)
        assert net.authenticator.refused["stranger"] >= 1
        assert stranger.state is Connection.REFUSED
        assert net.got == []
        assert not router.send(PeerId("w-1"), HeartbeatEcho(sequence=1))
        assert router.counters["unknown_peer"] == 1

    with_net(scenario, tmp_path)


def test_a_refused_peer_gets_in_once_its_key_is_authorized(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        keys = KeyPair.generate()
        dealer = await net.dealer(router, "w-1", keys=keys, greeting=a_heartbeat)
        with pytest.raises(RefusedError):
            await dealer.wait_connected(10)
        net.allow_list.authorize("w-1", keys.public)
        while dealer.state is not Connection.CONNECTED:
            with contextlib.suppress(RefusedError):  # of a dial before
                await dealer.wait_connected(20)
        await until(lambda: net.got)

    with_net(scenario, tmp_path)


def test_a_revoked_key_is_ignored_at_once_and_refused_at_its_next_handshake(
    tmp_path: Path,
) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        keys = net.key_for("w-1")
        dealer = await net.dealer(router, "w-1", keys=keys)
        dealer.send(a_heartbeat(1))
        await until(lambda: net.got)
        (net.allow_list.folder / "w-1.pub").unlink()  # as another process would
        dealer.send(a_heartbeat(2))
        await until(lambda: router.refused)
        assert router.refused == Counter(revoked=1)
        assert net.messages == [a_heartbeat(1)]
        assert not router.send(PeerId("w-1"), HeartbeatEcho(sequence=2))
        again = await net.dealer(router, "w-1", keys=keys)
        with pytest.raises(RefusedError):
            await again.wait_connected(10)

    with_net(scenario, tmp_path)


def test_a_revoked_peer_is_forgotten_while_nothing_comes_in(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        gone: list[PeerId] = []
        router = await net.router(on_gone=gone.append)
        dealer = await net.dealer(router, "w-1")
        await dealer.wait_connected(10)
        await until(lambda: router.knows(PeerId("w-1")))
        (net.allow_list.folder / "w-1.pub").unlink()  # as another process would
        await until(lambda: gone)
        assert gone == ["w-1"]
        assert not router.knows(PeerId("w-1"))
        assert net.got == []

    with_net(scenario, tmp_path)


def test_a_peer_that_is_forgotten_is_known_again_when_it_speaks(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        dealer = await net.dealer(router, "w-1")
        await until(lambda: router.knows(PeerId("w-1")))
        router.forget(PeerId("w-1"))
        router.forget(PeerId("w-1"))
        assert not router.send(PeerId("w-1"), HeartbeatEcho(sequence=1))
        dealer.send(a_heartbeat(2))
        await until(lambda: net.got)
        assert router.send(PeerId("w-1"), HeartbeatEcho(sequence=2))
        assert await dealer.receive() == HeartbeatEcho(sequence=2)

    with_net(scenario, tmp_path)


def test_what_is_for_a_name_that_moved_to_another_key_does_not_go_to_the_old_one(
    tmp_path: Path,
) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        old = await net.dealer(router, "w-1")
        await until(lambda: router.knows(PeerId("w-1")))
        keys = net.key_for("w-1")
        await until(lambda: not router.knows(PeerId("w-1")))
        assert not router.send(PeerId("w-1"), HeartbeatEcho(sequence=1))
        new = await net.dealer(router, "w-1", keys=keys)
        await until(lambda: router.knows(PeerId("w-1")))
        assert router.send(PeerId("w-1"), HeartbeatEcho(sequence=2))
        assert await new.receive() == HeartbeatEcho(sequence=2)
        assert old.counters["received"] == 0

    with_net(scenario, tmp_path)


def test_the_oldest_of_too_many_peers_gives_its_place_where_that_is_wanted(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        full = await net.router(peers_max=2)
        kind = await net.router(peers_max=2, forgets_oldest=True)
        for name in ("w-1", "w-2", "w-3"):
            keys = net.key_for(name)
            for router in (full, kind):
                before = router.counters["connections"] + router.refused.total()
                await net.dealer(router, name, keys=keys)
                await until(
                    lambda: router.counters["connections"] + router.refused.total() > before  # noqa: B023
                )
        assert full.refused == Counter(too_many_peers=1)
        assert full.peers() == ("w-1", "w-2")
        assert kind.peers() == ("w-2", "w-3")

    with_net(scenario, tmp_path)


def test_a_name_that_moved_to_another_key_does_not_keep_the_old_connection(
    tmp_path: Path,
) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        old = await net.dealer(router, "w-1")
        old.send(a_heartbeat(1))
        await until(lambda: net.got)
        new = await net.dealer(router, "w-1", keys=net.key_for("w-1"))
        old.send(a_heartbeat(2))
        new.send(a_heartbeat(3))
        await until(lambda: len(net.got) > 1 and router.refused)
        assert net.messages == [a_heartbeat(1), a_heartbeat(3)]

    with_net(scenario, tmp_path)


def test_a_plaintext_peer_gets_nothing_and_is_counted(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        plain = net.raw_dealer(router, None)
        plain.send_multipart(wire.encode(a_heartbeat()))
        await until(lambda: router.counters["handshake_failed"])
        assert net.got == []
        assert net.authenticator.admitted == 0

    with_net(scenario, tmp_path)


def test_a_wrong_server_key_is_named_as_the_cause(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        dealer = Dealer(
            net.context,
            lane=Lane.CONTROL,
            role=Role.WORKER,
            endpoint=router.endpoint,
            server_key=KeyPair.generate().public,
            keys=net.key_for("w-1"),
            name="w-1",
        )
        await dealer.start()
        net.stack.push_async_callback(dealer.stop)
        await until(lambda: "public key" in dealer.reason)
        with pytest.raises(WaitTimeoutError, match="public key"):
            await dealer.wait_connected(0)

    with_net(scenario, tmp_path)


def test_without_an_authenticator_nothing_is_bound(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        await net.authenticator.stop()
        with pytest.raises(LocalProtocolError, match="no Authenticator"):
            await net.router()

    with_net(scenario, tmp_path)


def test_when_the_authenticator_is_gone_nobody_gets_in(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        keys = net.key_for("w-1")
        await net.authenticator.stop()
        raw = net.raw_dealer(router, keys)
        monitor = raw.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        raw.send_multipart(wire.encode(a_heartbeat()))
        await until(lambda: monitor.poll(0))
        raw.disable_monitor()
        monitor.close()
        assert net.got == []

    with_net(scenario, tmp_path)


def test_a_second_authenticator_of_a_context_is_our_own_mistake(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        with pytest.raises(LocalProtocolError, match="already has an Authenticator"):
            await Authenticator(net.context, net.allow_list).start()

    with_net(scenario, tmp_path)


def test_curve_off_is_a_config_error_beyond_loopback(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        with pytest.raises(ConfigError, match="only loopback is allowed"):
            await net.router(bind="tcp://0.0.0.0:*")
        with pytest.raises(ConfigError, match="only loopback is allowed"):
            await net.dealer("tcp://192.0.2.1:5700", "w-1")
        with pytest.raises(ConfigError, match="cannot name a peer"):
            await net.dealer("tcp://127.0.0.1:5700", "not a name")

    with_net(scenario, tmp_path, curve=False)


# ------------------------------------------------------------------------ bad input


def test_bad_messages_of_an_allowed_peer_are_refused_by_reason(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router(client_roles=lambda peer: frozenset({Role.WORKER}))
        raw = net.raw_dealer(router, net.key_for("w-1"))
        bad = {
            "malformed": [b"\xc1"],
            "unknown_message": [wire.pack(["Heartbeart", {}])],
            "wrong_lane": wire.encode(a_group("g", tokens=10)),
            "wrong_sender": wire.encode(LearnerHeartbeat(incarnation=1, sequence=1, state="")),
            "frames": [*wire.encode(a_heartbeat()), b"more"],
            "oversized": [bytes((4 << 20) + 1)],
        }
        for frames in bad.values():
            raw.send_multipart(frames)
        raw.send_multipart([b"x"] * 1000)
        raw.send_multipart(wire.encode(a_heartbeat(9)))
        await until(lambda: net.got)
        assert router.refused == Counter([*bad, "frames"])
        assert [(peer, error.reason) for peer, error in net.refused] == [
            ("w-1", reason) for reason in [*bad, "frames"]
        ]
        assert net.messages == [a_heartbeat(9)]

    with_net(scenario, tmp_path)


def test_a_frame_beyond_any_message_ends_its_connection_and_no_other(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        good = await net.dealer(router, "w-2")
        raw = net.raw_dealer(router, net.key_for("w-1"))
        monitor = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        raw.send(bytes(32 << 20))
        await until(lambda: monitor.poll(0))
        raw.disable_monitor()
        monitor.close()
        good.send(a_heartbeat())
        await until(lambda: net.got)
        assert [peer for peer, _ in net.got] == ["w-2"]

    with_net(scenario, tmp_path)


def test_random_bytes_on_the_port_change_nothing(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        rng = random.Random(0)
        port = int(router.endpoint.rpartition(":")[2])
        greetings = [b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f\x03", b""]
        for index in range(30):
            raw = stdlib_socket.create_connection(("127.0.0.1", port))
            net.stack.callback(raw.close)
            with contextlib.suppress(OSError):  # it may have been thrown out already
                raw.sendall(greetings[index % 3] + rng.randbytes(rng.randrange(2000)))
        dealer = await net.dealer(router, "w-1")
        dealer.send(a_heartbeat())
        await until(lambda: net.got)
        assert len(net.got) == 1

    with_net(scenario, tmp_path)


def test_a_callback_that_fails_stops_the_router_and_its_owner_hears_of_it(
    tmp_path: Path,
) -> None:
    def fail(peer: PeerId, message: Message) -> None:
        raise ZeroDivisionError

    async def scenario(net: Net) -> None:
        router = await net.router(on_message=fail)
        dealer = await net.dealer(router, "w-1")
        dealer.send(a_heartbeat())
        with pytest.raises(ZeroDivisionError) as caught:
            await router.wait()
        assert "w-1's Heartbeat" in caught.value.__notes__[0]

    with_net(scenario, tmp_path)


def test_a_bad_message_of_the_server_is_dropped_and_counted(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        # A learner's key: the server may send it both, but it is a worker that listens.
        dealer = await net.dealer(router, "w-1")
        dealer.send(a_heartbeat())
        await until(lambda: net.got)
        router.send(PeerId("w-1"), Shutdown(reason="over", finished=True))
        assert await dealer.receive() == Shutdown(reason="over", finished=True)
        dealer._role = Role.ORIGIN  # the server has no bad message to send
        router.send(PeerId("w-1"), HeartbeatEcho(sequence=1))
        await until(lambda: dealer.refused)
        assert dealer.refused == Counter(wrong_receiver=1)

    with_net(scenario, tmp_path)


# ------------------------------------------------------------------------ load


def test_groups_of_200_kb_travel_both_ways(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router(Lane.ROLLOUTS)
        worker = await net.dealer(router, "w-1", Lane.ROLLOUTS)
        learner = await net.dealer(router, "learner", Lane.ROLLOUTS, role=Role.LEARNER)
        groups = [a_group(f"g-{index}", tokens=22_000 + index) for index in range(100)]
        for group in groups:
            assert worker.send(group)
        await until(lambda: len(net.got) == 100)
        assert net.messages == groups
        # The learner has nothing to say on this lane, and is reached all the same.
        await until(lambda: PeerId("learner") in router.peers())
        for group in groups:
            assert router.send(PeerId("learner"), a_batch_group(group))
        for group in groups:
            assert await learner.receive() == a_batch_group(group)

    with_net(scenario, tmp_path)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("curve", [False, True])
def test_no_wake_up_is_lost_in_traffic_both_ways(
    tmp_path: Path, new_loop: NewLoop, curve: bool
) -> None:
    """Bursts of random size cross each other; each side waits for all before the next."""

    async def scenario(net: Net) -> None:
        rng = random.Random(1)
        names = [f"w-{index}" for index in range(4)]
        expected = 0
        router = await net.router()
        dealers = [await net.dealer(router, name) for name in names]
        await until(lambda: len(router.peers()) == len(names))
        for _ in range(80):
            sizes = [rng.randrange(8) for _ in names]
            for dealer, size in zip(dealers, sizes, strict=True):
                for sequence in range(size):
                    dealer.send(a_heartbeat(sequence))
                    router.send(PeerId(dealer._name), HeartbeatEcho(sequence=sequence))
                    if rng.random() < 0.3:
                        await asyncio.sleep(0)
            expected += sum(sizes)
            for dealer, size in zip(dealers, sizes, strict=True):
                for sequence in range(size):
                    assert await dealer.receive() == HeartbeatEcho(sequence=sequence)
            await until(lambda: len(net.got) == expected)  # noqa: B023

    with_net(scenario, tmp_path, curve=curve, new_loop=new_loop)


def test_a_peer_that_does_not_read_uses_up_its_own_credit_only(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        told: dict[PeerId, int] = {}
        router = await net.router(
            Lane.ROLLOUTS,
            credit_bytes=8 << 20,
            on_room=lambda peer: told.update({peer: router.credit(peer)}),
        )
        slow = await net.dealer(router, "slow", Lane.ROLLOUTS, role=Role.LEARNER)
        fast = await net.dealer(router, "fast", Lane.ROLLOUTS, role=Role.LEARNER)
        await until(lambda: len(router.peers()) == 2)
        message = a_batch_group(a_group("g", tokens=110_000))
        await until(lambda: not router.send(PeerId("slow"), message))
        assert router.counters["no_credit"] == 1
        assert router.credit(PeerId("slow")) < 1 << 20
        for _ in range(20):
            assert router.send(PeerId("fast"), message)
            assert await fast.receive() == message
        assert router.credit(PeerId("fast")) == 8 << 20
        for _ in range(router.counters["sent"] - 20):
            assert await slow.receive() == message
        await until(lambda: router.credit(PeerId("slow")) == 8 << 20)
        assert told == {PeerId("slow"): 8 << 20, PeerId("fast"): 8 << 20}

    with_net(scenario, tmp_path)


def test_a_dealer_tells_when_its_queue_got_shorter(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router(Lane.ROLLOUTS)
        told: list[int] = []
        worker = await net.dealer(
            router,
            "w-1",
            Lane.ROLLOUTS,
            queue_bytes=8 << 20,
            on_room=lambda: told.append(worker.credit),
        )
        for index in range(3):
            assert worker.send(a_group(f"g-{index}", tokens=22_000))
        assert worker.credit < 8 << 20
        await until(lambda: len(net.got) == 3)
        assert told[-1] == 8 << 20

    with_net(scenario, tmp_path)


def test_a_flood_leaves_the_loop_to_others(tmp_path: Path) -> None:
    """Between two turns of any other task, a router takes in a bounded number of messages."""

    async def scenario(net: Net) -> None:
        free = BudgetLimits(per_s=0, burst=1, taken=0, refused=0, per_ms=0)
        router = await net.router(budget_of=lambda peer: free)
        dealers = [await net.dealer(router, f"w-{index}") for index in range(3)]
        for sequence in range(2000):
            for dealer in dealers:
                dealer.send(a_heartbeat(sequence))
        most = 0
        while len(net.got) < 6000:
            before = len(net.got)
            await asyncio.sleep(0)
            most = max(most, len(net.got) - before)
        assert 0 < most <= MESSAGES_PER_TURN

    with_net(scenario, tmp_path)


def test_who_sends_more_than_is_read_of_one_is_counted_and_the_others_are_read(
    tmp_path: Path,
) -> None:
    async def scenario(net: Net) -> None:
        small = BudgetLimits(per_s=0, burst=10, taken=1, refused=5, per_ms=0)
        router = await net.router(budget_of=lambda peer: small)
        much, wrong, little = [await net.dealer(router, f"w-{index}") for index in range(3)]
        raw = net.raw_dealer(router, net.key_for("w-3"))
        for sequence in range(100):
            much.send(a_heartbeat(sequence))
            raw.send_multipart([b"\xc1"])
        await until(lambda: router.refused[FLOOD] == 90 + 98)
        assert router.refused["malformed"] == 2
        little.send(a_heartbeat(7))
        await until(lambda: len(net.got) == 11)
        assert net.got[-1] == ("w-2", a_heartbeat(7))
        router.charge_refusal(PeerId("w-1"))
        router.charge_refusal(PeerId("w-1"))
        wrong.send(a_heartbeat(8))
        await until(lambda: router.refused[FLOOD] == 90 + 98 + 1)

    with_net(scenario, tmp_path)


# ------------------------------------------------------------------------ coming back


def test_a_dealer_comes_back_when_the_router_restarts_on_its_port(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        states: list[Connection] = []
        first = await net.router()
        dealer = await net.dealer(
            first,
            "w-1",
            greeting=lambda: a_heartbeat(100),
            on_state=lambda state, reason: states.append(state),
        )
        dealer.send(a_heartbeat(1))
        await until(lambda: len(net.got) == 2)
        await first.stop()
        await until(lambda: dealer.state is Connection.CONNECTING)
        dealer.send(a_heartbeat(2))
        second = await net.router(bind=first.endpoint)
        assert second.endpoint == first.endpoint
        await until(lambda: len(net.got) == 4)
        assert net.messages == [a_heartbeat(n) for n in (100, 1, 100, 2)]
        assert second.send(PeerId("w-1"), HeartbeatEcho(sequence=2))
        assert await dealer.receive() == HeartbeatEcho(sequence=2)
        assert states[0] is Connection.CONNECTING
        assert [s for s in states if s is Connection.CONNECTED] == [Connection.CONNECTED] * 2

    with_net(scenario, tmp_path)


def test_a_restarted_worker_is_reached_at_its_new_connection(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        keys = net.key_for("w-1")
        old = await net.dealer(router, "w-1", keys=keys)
        old.send(a_heartbeat(1))
        await until(lambda: net.got)
        await old.stop()
        new = await net.dealer(router, "w-1", keys=keys)
        new.send(a_heartbeat(2))
        await until(lambda: len(net.got) == 2)
        router.send(PeerId("w-1"), HeartbeatEcho(sequence=2))
        assert await new.receive() == HeartbeatEcho(sequence=2)

    with_net(scenario, tmp_path)


def test_of_two_connections_with_one_key_the_last_speaker_is_answered(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        keys = net.key_for("w-1")
        twins = [await net.dealer(router, "w-1", keys=keys) for _ in range(2)]
        await until(lambda: router.counters["connections"] == 2)
        for sequence in range(6):
            twin = twins[sequence % 2]
            twin.send(a_heartbeat(sequence))
            await until(lambda: len(net.got) == sequence + 1)  # noqa: B023
            router.send(PeerId("w-1"), HeartbeatEcho(sequence=sequence))
            assert await twin.receive() == HeartbeatEcho(sequence=sequence)

    with_net(scenario, tmp_path)


def test_a_peer_that_is_gone_is_counted_and_its_queue_dropped(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        dealer = await net.dealer(router, "w-1")
        dealer.send(a_heartbeat())
        await until(lambda: net.got)
        await dealer.stop()
        while not router.counters["unreachable"]:
            router.send(PeerId("w-1"), HeartbeatEcho(sequence=1))
            router.send(PeerId("w-1"), HeartbeatEcho(sequence=2))
            await asyncio.sleep(0.005)
        assert router.counters["dropped"] >= 1
        assert not router.send(PeerId("w-1"), HeartbeatEcho(sequence=3))

    with_net(scenario, tmp_path)


def test_what_was_sent_last_before_a_stop_arrives(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router(Lane.ROLLOUTS)
        control = await net.router()
        worker = await net.dealer(router, "w-1", Lane.ROLLOUTS)
        farewell = await net.dealer(control, "w-2")
        await worker.wait_connected(10)
        await farewell.wait_connected(10)
        groups = [a_group(f"g-{index}", tokens=20_000) for index in range(50)]
        for group in groups:
            worker.send(group)
        farewell.send(Goodbye(reason="done"))
        await asyncio.gather(worker.stop(flush_s=10), farewell.stop(flush_s=10))
        await until(lambda: len(net.got) == 51)

        listener = await net.dealer(control, "w-3")
        await until(lambda: PeerId("w-3") in control.peers())
        control.send(PeerId("w-3"), Shutdown(reason="over", finished=True))
        await control.stop(flush_s=10)
        assert await listener.receive() == Shutdown(reason="over", finished=True)

    with_net(scenario, tmp_path)


def test_a_dealers_queue_is_bounded_while_nobody_answers(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        with stdlib_socket.socket() as reserved:  # bound, never listening
            reserved.bind(("127.0.0.1", 0))
            endpoint = f"tcp://127.0.0.1:{reserved.getsockname()[1]}"
            dealer = await net.dealer(endpoint, "w-1", Lane.ROLLOUTS, queue_bytes=1 << 20)
            group = a_group("g", tokens=40_000)
            assert [dealer.send(group) for _ in range(4)] == [True, True, False, False]
            assert dealer.counters["no_credit"] == 2
            await until(lambda: "nothing answers" in dealer.reason)
            with pytest.raises(WaitTimeoutError, match=r"rollouts lane.*nothing answers at tcp"):
                await dealer.wait_connected(0.01)

    with_net(scenario, tmp_path)


def test_a_taken_port_is_a_config_error_that_names_it(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        other = Router(
            net.context,
            lane=Lane.CONTROL,
            role=Role.COORDINATOR,
            bind=router.endpoint,
            keys=net.server_keys,
            on_message=lambda peer, message: None,
        )
        with pytest.raises(ConfigError, match=f"{router.endpoint}: Address already in use"):
            await other.start(bind_timeout_s=0.1)

    with_net(scenario, tmp_path)


def test_a_cancelled_receive_loses_nothing(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        dealer = await net.dealer(router, "w-1")
        await until(lambda: router.peers())
        for sequence in range(50):
            receiving = asyncio.create_task(dealer.receive())
            await asyncio.sleep(0)
            router.send(PeerId("w-1"), HeartbeatEcho(sequence=sequence))
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
            assert receiving.cancelled()
            assert await dealer.receive() == HeartbeatEcho(sequence=sequence)

    with_net(scenario, tmp_path)


def test_sending_what_is_not_ours_to_send_is_our_own_mistake(tmp_path: Path) -> None:
    async def scenario(net: Net) -> None:
        router = await net.router()
        dealer = await net.dealer(router, "w-1")
        with pytest.raises(LocalProtocolError, match="HeartbeatEcho is not sent by worker"):
            dealer.send(HeartbeatEcho(sequence=1))
        acknowledged = GroupAcknowledged(group=GroupId("g"), lease=LeaseId("l"), outcome="accepted")
        with pytest.raises(LocalProtocolError, match="on lane control"):
            router.send(PeerId("w-1"), acknowledged)

    with_net(scenario, tmp_path)
