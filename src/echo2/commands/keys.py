"""`echo2 keys list | authorize | revoke | pardon`: who may connect to a run, whether or not it
runs now."""

from __future__ import annotations

import json
import re
from pathlib import Path

from echo2.commands.access import Access
from echo2.commands.table import columns
from echo2.errors import ConfigError, Echo2Error
from echo2.ledger.database import quarantined_workers
from echo2.ledger.durable import FILE as LEDGER
from echo2.net.keys import AllowList, check_name, check_public_key
from echo2.net.token_book import TokenBook
from echo2.pardons import write_pardon


def list_keys(
    path: Path | None, run_dir: Path | None, overrides: list[str], *, as_json: bool
) -> int:
    access = Access.of(path, run_dir, overrides)
    keys = _keys(access)
    came_by = {
        key: record.id for record in TokenBook(access.keys_dir).records() for key in record.enrolled
    }
    if as_json:
        told = [
            {"name": name, "role": _role(name), "public_key": key, "token": came_by.get(key)}
            for name, key in sorted(keys.items())
        ]
        print(json.dumps(told, indent=2))
        return 0
    if not keys:
        print("no key may connect; workers on this machine put theirs here when they start")
        return 0
    rows = [(name, _role(name), key, came_by.get(key, "-")) for name, key in sorted(keys.items())]
    print("\n".join(columns(("name", "role", "public key", "token"), rows)))
    return 0


def authorize(
    path: Path | None, run_dir: Path | None, overrides: list[str], *, name: str, public_key: str
) -> int:
    """Another key of the name is not replaced: its holder would be locked out unasked."""
    access = Access.of(path, run_dir, overrides)
    check_name(name)
    check_public_key(public_key, owner=name)
    if re.fullmatch(r"coordinator(-.*)?", name):
        raise ConfigError(f'"{name}" is the coordinator\'s own name; nobody connects by it')
    _allow_list(access).authorize(name, public_key, replace=False)
    print(f"{name} may connect, as a {_role(name)}")
    return 0


def revoke(path: Path | None, run_dir: Path | None, overrides: list[str], *, name: str) -> int:
    access = Access.of(path, run_dir, overrides)
    check_name(name)
    key = _keys(access).get(name)
    if key is None or not _allow_list(access).revoke(name):
        raise Echo2Error(
            f"{name} is not on the allow-list in {access.keys_dir}; those that are: echo2 keys list"
        )
    print(f"{name} may connect no more")
    record = TokenBook(access.keys_dir).enrolled_by(key)
    if record is not None and record.uses_left:
        print(
            f"it came by token {record.id}, which lets in {record.uses_left} more: its machine "
            f"can come again with a new key, unless you run: echo2 token revoke {record.id}"
        )
    if (access.keys_dir / f"{name}.key").exists():
        print(
            f"its secret key lies in {access.keys_dir}: a worker of that name started on this "
            "machine puts itself back; remove the file too"
        )
    return 0


def pardon(path: Path | None, run_dir: Path | None, overrides: list[str], *, name: str) -> int:
    folder = Access.of(path, run_dir, overrides, needs_curve=False).folder
    check_name(name)
    known = quarantined_workers(folder.path / LEDGER)
    if name not in known:
        told = ", ".join(sorted(known)) or "nobody"
        raise Echo2Error(f"{name} is not quarantined in {folder.path}; quarantined are: {told}")
    write_pardon(folder.path, name)
    print(
        f"{name} is pardoned; a coordinator that runs takes it up within a second, another one "
        "when it starts. It was quarantined since step "
        f"{known[name]['step']}: {known[name]['reason']}"
    )
    return 0


def _allow_list(access: Access) -> AllowList:
    return AllowList(access.keys_dir / "authorized")


def _keys(access: Access) -> dict[str, str]:
    """name -> public key; none, and nothing is made, for a run that was never started."""
    return _allow_list(access).keys() if access.keys_dir.is_dir() else {}


def _role(name: str) -> str:
    """What a key of this name may speak as."""
    return "learner" if re.fullmatch(r"learner(-.*)?", name) else "worker"
