"""Who this worker is: a name that no other daemon here has, and its key.

A name belongs to the process that holds the lock on its file; it is free again when that
process ends, however it ends. A worker that finds its coordinator through the run folder is
on the coordinator's machine and puts itself on the allow-list; one that dials elsewhere has
to be authorized there.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from echo2.config import Config
from echo2.errors import ConfigError
from echo2.folder_errors import folder_errors
from echo2.net.keys import (
    NAME_PATTERN,
    RESERVED_PATTERN,
    AllowList,
    KeyPair,
    load_or_create_key,
)

NAMES_MAX: Final = 4096


@dataclass(slots=True)
class Identity:
    """`keys` is None without CURVE. `folder` is this worker's own in the run folder."""

    name: str
    keys: KeyPair | None
    folder: Path
    locks: list[IO[str]]

    def release(self) -> None:
        """Let another process have the name."""
        for lock in self.locks:
            lock.close()
        self.locks.clear()


def claim_identity(config: Config, run_dir: Path, name: str) -> Identity:
    """Take `name`, or a free one made from the host's; make and authorize its key.

    Raises ConfigError when the name is in use here or cannot name a worker, and when the
    folders cannot be written.
    """
    with folder_errors(run_dir):
        return _claim(config, run_dir, name)


def _claim(config: Config, run_dir: Path, name: str) -> Identity:
    keys_dir = Path(config.net.keys_dir) if config.net.keys_dir else run_dir / "keys"
    folders = [run_dir / "workers", *([keys_dir] if config.net.curve else [])]
    for folder in folders:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if name:
        if not NAME_PATTERN.fullmatch(name) or RESERVED_PATTERN.fullmatch(name):
            raise ConfigError(
                f"worker.name = {name!r}: 1 to 64 letters, digits, _, - and . are allowed, and "
                'no name of another part (coordinator, origin, learner); for example "w-1"'
            )
        locks = take_locks(folders, name)
        if locks is None:
            raise ConfigError(
                f"worker.name = {name!r}: another daemon on this machine has this name "
                f"({_holder(folders[0], name)}); give each its own with --name, or none at all"
            )
    else:
        name, locks = _free_name(folders)
    keys = None
    if config.net.curve:
        keys = load_or_create_key(keys_dir / f"{name}.key")
        if not config.net.coordinator:
            allow_list = AllowList(keys_dir / "authorized")
            if allow_list.name_of(keys.public) != name:
                # A name is one worker's: that of another, who enrolled, is not taken over.
                allow_list.authorize(name, keys.public, replace=False)
    folder = run_dir / "workers" / name
    folder.mkdir(exist_ok=True)
    return Identity(name, keys, folder, locks)


def _free_name(folders: list[Path]) -> tuple[str, list[IO[str]]]:
    """HOST-1, HOST-2 ...: the first that nobody holds."""
    host = re.sub(r"[^\w-]+", "-", socket.gethostname().partition(".")[0])[:48].strip("-")
    if not host or RESERVED_PATTERN.fullmatch(host):
        host = f"w-{host}".rstrip("-")
    for number in range(1, NAMES_MAX + 1):
        name = f"{host}-{number}"
        locks = take_locks(folders, name)
        if locks is not None:
            return name, locks
    raise ConfigError(f"{NAMES_MAX} workers of this machine hold a name already; end some of them")


def take_locks(folders: list[Path], name: str) -> list[IO[str]] | None:
    """The locked files, which name this process; None when another one holds one."""
    locks: list[IO[str]] = []
    for folder in folders:
        file = (folder / f"{name}.lock").open("a+", encoding="ascii")
        locks.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            for lock in locks:
                lock.close()
            return None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    return locks


def _holder(folder: Path, name: str) -> str:
    pid = (folder / f"{name}.lock").read_text(encoding="ascii").strip()
    return f"process {pid}" if pid else "its process is not known"
