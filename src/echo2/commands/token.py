"""`echo2 token create | list | revoke`: join tokens of a run, whether or not it runs now."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Final

from echo2.commands.access import Access
from echo2.commands.table import columns
from echo2.config_rules import is_loopback
from echo2.errors import ConfigError, Echo2Error
from echo2.net.auth import load_or_create_key
from echo2.net.join_token import JoinToken
from echo2.net.sockets import endpoint_of
from echo2.net.token_book import TokenBook, TokenRecord, utc

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def create(
    path: Path | None,
    run_dir: Path | None,
    overrides: list[str],
    *,
    name: str,
    prefix: str,
    uses: int,
    expires: str,
    as_json: bool,
) -> int:
    """The token alone goes to stdout, what follows from it to stderr."""
    access = Access.of(path, run_dir, overrides)
    endpoint = join_endpoint(access)
    server_key = load_or_create_key(access.keys_dir / "coordinator.key").public
    record, keys = TokenBook(access.keys_dir).make(
        name=name, prefix=prefix, uses=uses, expires_s=seconds(expires), now=time.time()
    )
    token = JoinToken(
        endpoint=endpoint,
        server_key=server_key,
        secret=keys.secret,
        expires_at=int(record.expires_at),
        uses=uses,
    )
    if as_json:
        print(json.dumps({"token": token.text(), "endpoint": endpoint, **_facts(record)}, indent=2))
        return 0
    print(token.text(), flush=True)
    called = name or f"{record.prefix}-1 and so on"
    where = "on this machine only" if _on_loopback(endpoint) else f"where {endpoint} is reached"
    print(
        f"token {record.id} lets {uses} worker(s) in, called {called}, until "
        f"{utc(record.expires_at)}; it works {where}\n"
        "there: echo2 worker --join TOKEN   (whoever has the line can use it: keep it secret)",
        file=sys.stderr,
    )
    return 0


def list_tokens(
    path: Path | None, run_dir: Path | None, overrides: list[str], *, as_json: bool
) -> int:
    records = TokenBook(Access.of(path, run_dir, overrides).keys_dir).records()
    if as_json:
        print(json.dumps([_facts(record) for record in records], indent=2))
        return 0
    if not records:
        print("no tokens; make one with: echo2 token create CONFIG")
        return 0
    rows = [
        (
            record.id,
            record.state(time.time()),
            f"{record.uses_left} of {record.uses}",
            utc(record.expires_at),
            record.name or f"{record.prefix}-N",
            ", ".join(use.name for use in record.enrolled.values()) or "-",
        )
        for record in records
    ]
    print("\n".join(columns(("id", "state", "left", "expires", "name", "let in"), rows)))
    return 0


def revoke(path: Path | None, run_dir: Path | None, overrides: list[str], *, token: str) -> int:
    access = Access.of(path, run_dir, overrides)
    found = token if len(token) == 12 else JoinToken.parse(token).id
    book = TokenBook(access.keys_dir)
    record = next((each for each in book.records() if each.id == found), None)
    if record is None or not book.revoke(found):
        raise Echo2Error(
            f"there is no token {found} in {book.folder}; those that are there: echo2 token list"
        )
    print(f"token {found} lets nobody in any more")
    if record.enrolled:
        names = ", ".join(use.name for use in record.enrolled.values())
        print(f"it let in {names}, who stay: echo2 keys revoke NAME")
    return 0


def join_endpoint(access: Access) -> str:
    """Where machines enrol in this run. Raises ConfigError when it cannot be told yet."""
    net = access.config.net
    if net.join_port:
        return endpoint_of(net.host, net.join_port)
    record = access.folder.coordinator() or {}
    endpoint = str(record.get("join") or "")
    if not endpoint:
        raise ConfigError(
            "net.join_port is 0, any free port, and no coordinator has taken one yet: start "
            f"echo2 coordinator with --run-dir {access.folder.path} first, or set net.join_port "
            "(e.g. 5703), which this machine must let in"
        )
    if _on_loopback(endpoint) != is_loopback(net.host):
        raise ConfigError(
            f'the coordinator listened at {endpoint}, and net.host is "{net.host}" now: start it '
            "again, so that it listens there"
        )
    return endpoint_of(net.host, int(endpoint.rpartition(":")[2]))


def seconds(text: str) -> float:
    """ "90s", "30m", "24h" or "7d" in seconds. Raises ConfigError."""
    match = re.fullmatch(r"(\d{1,9})([smhd])", text.strip())
    if match is None:
        raise ConfigError(
            f"--expires {text}: it is a number and s, m, h or d, for example 90s, 30m, 24h or 7d"
        )
    return float(int(match[1]) * _UNITS_S[match[2]])


def _facts(record: TokenRecord) -> dict[str, object]:
    return {
        "id": record.id,
        "state": record.state(time.time()),
        "name": record.name,
        "prefix": record.prefix,
        "uses": record.uses,
        "uses_left": record.uses_left,
        "made_at": utc(record.made_at),
        "expires_at": utc(record.expires_at),
        "enrolled": [
            {"name": use.name, "public_key": key, "at": utc(use.at)}
            for key, use in record.enrolled.items()
        ],
    }


def _on_loopback(endpoint: str) -> bool:
    return is_loopback(endpoint.removeprefix("tcp://").rpartition(":")[0])
