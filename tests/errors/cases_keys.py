"""Keys, allow-lists and addresses: who is let in, and where somebody listens."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import structlog
from bad_input import Bench, Told, a_free_port, a_taken_port, case, run
from cases_folders import NULL

from echo2.audit_key import load_or_create_audit_key
from echo2.config import load_config
from echo2.errors import ConfigError
from echo2.messages import Lane, Role
from echo2.net.auth import AllowList, Authenticator, KeyPair, load_or_create_key
from echo2.net.dealer import Connection, Dealer
from echo2.net.router import Router
from echo2.net.sockets import check_endpoint, close_context, make_context
from echo2_workers.links import find_coordinator


def a_key(bench: Bench, name: str = "coordinator") -> Path:
    path = bench.run_dir / "keys" / f"{name}.key"
    load_or_create_key(path)
    return path


def started(bench: Bench, *settings: str) -> Told:
    words = [word for setting in settings for word in ("--set", setting)]
    return bench.command("coordinator", bench.config(*NULL), "--run-dir", bench.run_dir, *words)


@case("a secret key that others can read")
def _(bench: Bench) -> Told:
    a_key(bench).chmod(0o644)
    return started(bench)


@case("a secret key that is none")
def _(bench: Bench) -> Told:
    path = a_key(bench)
    path.write_text("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    told = started(bench)
    assert path.read_text() == "-----BEGIN OPENSSH PRIVATE KEY-----\n"
    return told


@case("a secret key that is no text")
def _(bench: Bench) -> Told:
    a_key(bench).write_bytes(bytes(range(128, 256)))
    return started(bench)


@case("a folder of keys where a file is")
def _(bench: Bench) -> Told:
    (bench.folder / "keys").touch()
    return started(bench, f"net.keys_dir={bench.folder / 'keys'}")


@case("an allow-list that others can write")
def _(bench: Bench) -> Told:
    a_key(bench)
    folder = bench.run_dir / "keys" / "authorized"
    folder.mkdir()
    folder.chmod(0o777)
    return started(bench)


def _ignored(bench: Bench, content: str) -> Told:
    """What the log says of a public key that is passed over; w-1 is on the list."""
    folder = bench.folder / "authorized"
    AllowList(folder).authorize("w-1", KeyPair.generate().public)
    one = (folder / "w-1.pub").read_text()
    (folder / "w-2.pub").write_text(content or one)
    with structlog.testing.capture_logs() as logs:
        names = AllowList(folder).names()
    assert names == ("w-1",)
    line = next(line for line in logs if line["event"] == "public_key_ignored")
    return bench.told("log", f"public_key_ignored path={line['path']} reason={line['reason']}")


@case("a public key in authorized/ that is none")
def _(bench: Bench) -> Told:
    return _ignored(bench, "ssh-ed25519 AAAA\n")


@case("a public key in authorized/ under two names")
def _(bench: Bench) -> Told:
    return _ignored(bench, "")


@case("authorizing one key under a second name")
def _(bench: Bench) -> Told:
    allow_list = AllowList(bench.folder / "authorized")
    key = KeyPair.generate().public
    allow_list.authorize("w-1", key)
    return bench.raised("ConfigError", ConfigError, lambda: allow_list.authorize("w-2", key))


@case("authorizing a name that is none")
def _(bench: Bench) -> Told:
    allow_list = AllowList(bench.folder / "authorized")
    key = KeyPair.generate().public
    return bench.raised("ConfigError", ConfigError, lambda: allow_list.authorize("../w-2", key))


@case("net.coordinator_key with a character missing")
def _(bench: Bench) -> Told:
    given = {
        "coordinator": "tcp://192.0.2.7:5700",
        "coordinator_rollouts": "tcp://192.0.2.7:5701",
        "coordinator_key": "k" * 39,
    }
    lines = (f'{key} = "{text}"' for key, text in given.items())
    return bench.command("check", bench.config("[net]", *lines))


@case("a coordinator elsewhere without its key")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[net]", 'coordinator = "tcp://192.0.2.7:5700"'))


@case("an address without tcp://")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[net]", 'coordinator = "192.0.2.7:5700"'))


@case("an endpoint without a port")
def _(bench: Bench) -> Told:
    def made() -> None:
        check_endpoint("tcp://192.0.2.7", encrypted=True)

    return bench.raised("ConfigError", ConfigError, made)


@case("an address that nobody can dial")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[net]", 'host = "0.0.0.0"'))


@case("plain sockets beyond loopback")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[net]", 'host = "192.0.2.7"', "curve = false"))


@case("HTTP beyond loopback without a token")
def _(bench: Bench) -> Told:
    return bench.command("check", bench.config("[http]", 'host = "192.0.2.7"'))


@case("one port for two lanes")
def _(bench: Bench) -> Told:
    lines = ("[net]", "control_port = 5700", "origin_port = 5700")
    return bench.command("check", bench.config(*lines))


@case("a port that is taken")
def _(bench: Bench) -> Told:
    with a_taken_port() as port:
        return started(bench, f"net.control_port={port}")


@case("an HTTP port that is taken")
def _(bench: Bench) -> Told:
    with a_taken_port() as port:
        return started(bench, f"http.port={port}")


@case("an address of another machine")
def _(bench: Bench) -> Told:
    return started(bench, "net.host=192.0.2.7", "http.enabled=false")


@case("status at an address where nobody is")
def _(bench: Bench) -> Told:
    return bench.command("status", "--url", f"http://127.0.0.1:{a_free_port()}")


@case("status at what is no address")
def _(bench: Bench) -> Told:
    return bench.command("status", "--url", "127.0.0.1")


@case("a worker whose coordinator was not started")
def _(bench: Bench) -> Told:
    words = ("--run-dir", bench.run_dir, "--set", "net.connect_timeout_s=0.3")
    return bench.command("worker", bench.config(*NULL), *words)


@case("a worker whose coordinator.json does not say where it is")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "coordinator.json").write_text(json.dumps({"pid": 1}))
    try:
        find_coordinator(load_config(bench.config(*NULL)), bench.run_dir)
    except Exception as error:
        return bench.told("log", error)
    raise AssertionError("it was found")


@contextlib.asynccontextmanager
async def a_server(bench: Bench) -> AsyncIterator[tuple[Router, KeyPair]]:
    """A control lane that lets in whoever is in DIR/authorized."""
    context = make_context()
    authenticator = Authenticator(context, AllowList(bench.folder / "authorized"))
    await authenticator.start()
    keys = KeyPair.generate()
    router = Router(
        context,
        lane=Lane.CONTROL,
        role=Role.COORDINATOR,
        bind="tcp://127.0.0.1:*",
        keys=keys,
        on_message=lambda peer, message: None,
    )
    try:
        await router.start()
        yield router, keys
    finally:
        await router.stop()
        await authenticator.stop()
        await close_context(context)


async def why_not_connected(
    bench: Bench, endpoint: str, says: str, *, server_key: str, keys: KeyPair | None
) -> Told:
    """The sentence with which a dealer that goes on dialing `says` so: a connection may also
    end before its handshake has failed, and then the next one tells."""
    context = make_context()
    known: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def changed(state: Connection, reason: str) -> None:
        assert state is not Connection.CONNECTED
        if says in reason and not known.done():
            known.set_result(reason)

    dealer = Dealer(
        context,
        lane=Lane.CONTROL,
        role=Role.WORKER,
        endpoint=endpoint,
        server_key=server_key,
        keys=keys,
        name="w-1",
        on_state=changed,
    )
    await dealer.start()
    try:
        return bench.told("cause of the wait", await known)
    finally:
        await dealer.stop()
        await close_context(context)


@case("a key that is not on the allow-list")
def _(bench: Bench) -> Told:
    async def scenario() -> Told:
        keys = KeyPair.generate()
        bench.hide(keys.public, "KEY")
        async with a_server(bench) as (router, server):
            return await why_not_connected(
                bench, router.endpoint, "refused", server_key=server.public, keys=keys
            )

    return run(scenario())


@case("a wrong public key of the server")
def _(bench: Bench) -> Told:
    async def scenario() -> Told:
        keys = KeyPair.generate()
        async with a_server(bench) as (router, _):
            AllowList(bench.folder / "authorized").authorize("w-1", keys.public)
            other = KeyPair.generate().public
            return await why_not_connected(
                bench, router.endpoint, "public key", server_key=other, keys=keys
            )

    return run(scenario())


@case("a peer without CURVE")
def _(bench: Bench) -> Told:
    async def scenario() -> Told:
        async with a_server(bench) as (router, _):
            return await why_not_connected(
                bench, router.endpoint, "protocol", server_key="", keys=None
            )

    return run(scenario())


@case("an address where nobody listens")
def _(bench: Bench) -> Told:
    endpoint = f"tcp://127.0.0.1:{a_free_port()}"
    return run(why_not_connected(bench, endpoint, "nothing", server_key="", keys=None))


@case("a public key of the server that is none")
def _(bench: Bench) -> Told:
    context = make_context()

    def made() -> None:
        Dealer(
            context,
            lane=Lane.CONTROL,
            role=Role.WORKER,
            endpoint="tcp://127.0.0.1:5700",
            server_key="none",
            keys=KeyPair.generate(),
            name="w-1",
        )

    told = bench.raised("ConfigError", ConfigError, made)
    context.term()
    return told


@case("an audit key that others can read")
def _(bench: Bench) -> Told:
    load_or_create_audit_key(bench.folder)
    (bench.folder / "audit.key").chmod(0o644)
    return bench.raised("exit 2", ConfigError, lambda: load_or_create_audit_key(bench.folder))


@case("a pardon of a worker that is not quarantined")
def _(bench: Bench) -> Told:
    return bench.command("keys", "pardon", "w-1", bench.config(), "--run-dir", bench.run_dir)
