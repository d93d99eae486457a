"""A secret key is readable by its owner only, and only names in the allow-list get in.

keys/NAME.key            secret key of NAME on this machine: one comment, one line; mode 0600
keys/authorized/NAME.pub public key of a peer that may connect, and that is NAME from then on

Files are written aside and renamed: a reader sees a whole key or none. The allow-list is
re-read whenever its folder changes (a file added, removed or renamed into place); a file
that is edited in place is not noticed. Who connects is decided in `net.auth`, and every
message is checked again in `net.router`. Keys that let one enrol are in `net.token_keys`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

import structlog
import zmq

from echo2.errors import ConfigError
from echo2.folder_errors import folder_errors

log = structlog.get_logger()

NAME_PATTERN: Final = re.compile(r"[\w-][\w.-]{0,63}")
RESERVED_PATTERN: Final = re.compile(r"(coordinator|origin|learner)(-.*)?")
"""Names of the other parts: no worker has one, since a name decides what its key may say."""
_KEY_PATTERN: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_SETTLED_NS: Final = 50_000_000
"""A folder's time stamp moves in steps of a few ms: read so soon after a change, the folder
may change once more under the same stamp."""
_LOOK_AGAIN_S: Final = 0.02
"""So often it is read while that may be."""
_LOOKS_AT_ALL: Final = 8
"""So many looks after a change every file has been asked whether it is still the one it was."""
_LOOKED_AT_MIN: Final = 64
"""Files that a look asks at least."""


STRANGER: Final = "stranger"
"""Why a key is refused that is on no list."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair as Z85 text of 40 characters each."""

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if not (_KEY_PATTERN.fullmatch(self.public) and _KEY_PATTERN.fullmatch(self.secret)):
            raise ConfigError("a CURVE key is Z85 text of 40 characters; one of this pair is not")

    @classmethod
    def generate(cls) -> KeyPair:
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())

    @classmethod
    def from_secret(cls, secret: str) -> KeyPair:
        """The pair of a secret key in Z85. Raises ConfigError for what is none."""
        if not _KEY_PATTERN.fullmatch(secret):
            raise ConfigError("a secret CURVE key is Z85 text of 40 characters; this is none")
        return cls(zmq.curve_public(secret.encode()).decode(), secret)


def load_or_create_key(path: str | os.PathLike[str]) -> KeyPair:
    """The key pair in the file `path`, made on first use (two processes get the same one).

    Raises ConfigError when others can read the file, when it holds no key, and when it cannot
    be made.
    """
    path = Path(path)
    with folder_errors(path.parent, setting="net.keys_dir"):
        if not path.exists():
            _make_folder(path.parent)
            _create_key(path, KeyPair.generate())
    return _load_key(path)


class NameOrKeyTakenError(ConfigError):
    """The name has another key, or the key has another name."""


class KeyList(Protocol):
    """Whose keys are let in: `AllowList` (a folder), `PeerKeys` (told by the coordinator), or
    `TokenKeys` (join tokens). `refusal`: one word for why a key is not."""

    generation: int

    def refresh(self) -> None: ...
    def name_of(self, public_key: str) -> str | None: ...
    def refusal(self, public_key: str) -> str: ...
    def holds(self, name: str, public_key: str) -> bool: ...
    def names(self) -> tuple[str, ...]: ...


class PeerKeys:
    """Keys in memory, replaced as a whole."""

    def __init__(self) -> None:
        self.generation = 0
        self._key_of: dict[str, str] = {}
        self._name_of: dict[str, str] = {}

    def replace(self, key_of: Mapping[str, str]) -> None:
        """name -> public key. ConfigError when two have the same key, or one is none."""
        for name, key in key_of.items():
            check_name(name)
            check_public_key(key, owner=name)
        name_of = {key: name for name, key in key_of.items()}
        if len(name_of) != len(key_of):
            raise ConfigError("two peers have the same public key; each needs one of its own")
        if key_of != self._key_of:
            self._key_of, self._name_of = dict(key_of), name_of
            self.generation += 1

    def refresh(self) -> None:
        """It changes by `replace` alone."""

    def name_of(self, public_key: str) -> str | None:
        return self._name_of.get(public_key)

    def refusal(self, public_key: str) -> str:
        return STRANGER

    def holds(self, name: str, public_key: str) -> bool:
        return self._key_of.get(name) == public_key

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._key_of))


class FolderWatch:
    """Tells whether files were added to a folder, removed from it or renamed into place. Costs
    one stat."""

    def __init__(self, folder: Path) -> None:
        self.is_settled = False
        """A change since the last look would be told by the folder's time stamp."""
        self._folder = folder
        self._stamp: tuple[int, int] | None = None
        self._look_again_at = 0.0

    def changed(self) -> bool:
        """Since the last call; now and then True for a change that may go on under the same time
        stamp."""
        try:
            stat = self._folder.stat()
        except FileNotFoundError:
            stamp = (0, 0)
        else:
            stamp = (stat.st_mtime_ns, stat.st_ino)
        now = time.monotonic()
        if stamp == self._stamp and (self.is_settled or now < self._look_again_at):
            return False
        self._stamp = stamp
        self._look_again_at = now + _LOOK_AGAIN_S
        self.is_settled = abs(time.time_ns() - stamp[0]) > _SETTLED_NS
        return True

    def forget(self) -> None:
        """Let the next look find a change, whatever the time stamps say."""
        self._stamp = None


class AllowList:
    """The public keys in `folder` and their names. Made with mode 0700 if it is missing.

    Raises ConfigError when others could write to the folder, and so let themselves in.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        with folder_errors(self.folder, setting="net.keys_dir"):
            _make_folder(self.folder)
            mode = self.folder.stat().st_mode
        if mode & 0o022:
            raise ConfigError(
                f"allow-list {self.folder} can be written by others (mode {mode & 0o777:04o}), who "
                f"could let themselves in; only its owner may; run: chmod 700 {self.folder}"
            )
        self.generation = 0
        """Counts how often the list was read anew."""
        self._key_of: dict[str, str] = {}
        self._name_of: dict[str, str] = {}
        self._files: dict[str, _KeyFile] = {}
        self._num_read = -1
        """Files of which names and keys were made last."""
        self._to_look_at: dict[str, None] = {}
        """Files that are taken for what they were, by name and number, though their number may be
        that of one that was removed. Those that wait longest first."""
        self._looked_at = float("-inf")
        self._watch = FolderWatch(self.folder)
        self.refresh()

    def refresh(self) -> None:
        """Read the folder if it changed, of its files those that are new; the others are looked at
        in the next _LOOKS_AT_ALL calls. Costs one stat otherwise."""
        if self._watch.changed():
            self._read()
        elif self._to_look_at and time.monotonic() - self._looked_at > _LOOK_AGAIN_S:
            number = max(_LOOKED_AT_MIN, -(-len(self._files) // _LOOKS_AT_ALL))
            self._look_at(list(islice(self._to_look_at, number)))
            self._looked_at = time.monotonic()

    def name_of(self, public_key: str) -> str | None:
        """Who holds `public_key` now; None: a stranger."""
        if self._watch.changed() or not (self._watch.is_settled or self._is_settled(public_key)):
            self._read()  # it may have come or gone a moment ago
        name = self._name_of.get(public_key)
        if not self._to_look_at:
            return name
        if name is not None:
            self._look_at([f"{name}.pub"])
        else:
            self._look_at(list(self._to_look_at))
        return self._name_of.get(public_key)

    def refusal(self, public_key: str) -> str:
        return STRANGER

    def _is_settled(self, public_key: str) -> bool:
        """Whether its file is there as it was, whatever became of others a moment ago."""
        file_name = f"{self._name_of.get(public_key, '')}.pub"
        known = self._files.get(file_name)
        if known is None or known.stamp is None:
            return False
        return known.stamp == _stamp(f"{self.folder}/{file_name}")

    def holds(self, name: str, public_key: str) -> bool:
        """Whether `public_key` is that of `name`, as of the last `refresh`."""
        return self._key_of.get(name) == public_key

    def key_of(self, name: str) -> str | None:
        """The key of `name`, as of the last `refresh`; None: it is not on the list."""
        return self._key_of.get(name)

    def names(self) -> tuple[str, ...]:
        self.refresh()
        return tuple(sorted(self._key_of))

    def keys(self) -> dict[str, str]:
        """name -> public key, as of the last `refresh`."""
        return dict(self._key_of)

    def authorize(self, name: str, public_key: str, *, replace: bool = True) -> None:
        """Let the holder of `public_key` in as `name`; another key of that name is replaced.

        Raises NameOrKeyTakenError for a key that has another name, and without `replace` for a
        name that has another key, whoever was first; any other ConfigError for a bad name or key,
        and when the list cannot be written.
        """
        check_name(name)
        check_public_key(public_key, owner=name)
        holder = self.name_of(public_key)
        if holder not in (None, name):
            raise NameOrKeyTakenError(
                f"the key of {name} is already authorized as {holder}; each peer needs a key of "
                f"its own; revoke {holder} first or make a new key"
            )
        path = self.folder / f"{name}.pub"
        with folder_errors(self.folder, setting="net.keys_dir"):
            aside = _write_aside(path, f"{public_key}\n", mode=0o644)
            try:
                if replace:
                    aside.rename(path)
                else:
                    os.link(aside, path)  # unlike a rename, it never replaces another's key
            except FileExistsError:
                if holder != name:
                    raise NameOrKeyTakenError(
                        f"the name {name} has another key already; revoke it first (echo2 keys "
                        f"revoke {name}), or choose another name"
                    ) from None
            finally:
                aside.unlink(missing_ok=True)
                self._reread()

    def revoke(self, name: str) -> bool:
        """Take `name` off the list; False if it was not on it."""
        try:
            (self.folder / f"{name}.pub").unlink()
        except FileNotFoundError:
            return False
        finally:
            self._reread()
        return True

    def _reread(self) -> None:
        self._watch.forget()
        self.refresh()

    def _read(self) -> None:
        key_of: dict[str, str] = {}
        name_of: dict[str, str] = {}
        self._files, taken = _key_files(self.folder, self._files)
        waits = {name: None for name in self._to_look_at if name in taken}
        self._to_look_at = waits | dict.fromkeys(taken)
        if len(taken) == len(self._files) == self._num_read:
            return  # none is new and none is gone
        self._num_read = len(self._files)
        for file_name, file in sorted(self._files.items()):
            name, problem = file_name.removesuffix(".pub"), file.problem
            if not problem and file.key in name_of:
                problem = f"its key is already that of {name_of[file.key]}"
            if problem:
                path = str(self.folder / file_name)
                log.warning("public_key_ignored", path=path, reason=problem)
                continue
            key_of[name] = file.key
            name_of[file.key] = name
        if key_of != self._key_of:
            self._key_of, self._name_of = key_of, name_of
            self.generation += 1

    def _look_at(self, file_names: Sequence[str]) -> None:
        """Read the folder anew if one of these is not the file that it was."""
        others = []
        for file_name in file_names:
            self._to_look_at.pop(file_name, None)
            known = self._files.get(file_name)
            if known is not None and known.stamp != _stamp(f"{self.folder}/{file_name}"):
                others.append(file_name)
        if others:
            for file_name in others:
                del self._files[file_name]
            self._read()


@dataclass(frozen=True, slots=True)
class _KeyFile:
    """What a file held when it had this `stamp`, None: it may change under the one that it has;
    `problem`: why it could not be read."""

    stamp: tuple[int, int, int] | None
    key: str
    problem: str


def _key_files(folder: Path, known: Mapping[str, _KeyFile]) -> tuple[dict[str, _KeyFile], set[str]]:
    """Of the folder, by name, and which of them are taken for what they were. A file is asked for
    its times, and opened, when it is new: a list of a thousand keys is read while the coordinator
    serves their holders."""
    found: dict[str, _KeyFile] = {}
    taken: set[str] = set()
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return found, taken
    for entry in entries:
        if not entry.name.endswith(".pub"):
            continue
        before = known.get(entry.name)
        if before is not None and before.stamp is not None and before.stamp[2] == entry.inode():
            found[entry.name] = before
            taken.add(entry.name)
            continue
        path = Path(entry.path)
        key = problem = ""
        stamp = _stamp(path)
        try:
            key = path.read_text(encoding="ascii").strip()
        except FileNotFoundError:
            continue  # revoked while we read
        except (OSError, ValueError) as error:
            problem = str(error)
        if not NAME_PATTERN.fullmatch(path.stem):
            problem = problem or "its name cannot name a peer"
        elif not _KEY_PATTERN.fullmatch(key):
            problem = problem or "it holds no Z85 key of 40 characters"
        found[entry.name] = _KeyFile(stamp, key, problem)
    return found, taken


def _stamp(path: Path | str) -> tuple[int, int, int] | None:
    """By which a file is known again: when it was written, its size, its number in the file
    system. None while it may change under them, and where there is none."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    if abs(time.time_ns() - stat.st_mtime_ns) <= _SETTLED_NS:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


def check_name(name: str) -> None:
    """Raises ConfigError when `name` cannot name a peer."""
    if not NAME_PATTERN.fullmatch(name):
        raise ConfigError(
            f'"{name}" cannot name a peer; 1 to 64 letters, digits, "_", "-" and (not first) "." '
            f'are allowed, for example "w-1"'
        )


def check_public_key(key: str, *, owner: str) -> None:
    """Raises ConfigError when `key` cannot be the public key of `owner`."""
    if not _KEY_PATTERN.fullmatch(key):
        raise ConfigError(
            f"the public key of {owner} has {len(key)} characters or strange ones; it is Z85 "
            f"text of 40 characters"
        )


def _make_folder(folder: Path) -> None:
    if not folder.parent.exists():
        _make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


def _create_key(path: Path, keys: KeyPair) -> None:
    text = f"# Secret CURVE key of {path.stem}, for its owner only.\n{keys.secret}\n"
    aside = _write_aside(path, text, mode=0o600)
    try:
        os.link(aside, path)  # unlike a rename, it never replaces another's key
    except FileExistsError:
        pass  # another process was first; its key counts
    finally:
        aside.unlink()


def _load_key(path: Path) -> KeyPair:
    try:
        with path.open(encoding="ascii") as file:
            mode = os.fstat(file.fileno()).st_mode
            if mode & 0o077:
                raise ConfigError(
                    f"secret key {path} can be read by others (mode {mode & 0o777:04o}); only its "
                    f"owner may; run: chmod 600 {path}"
                )
            lines = file.read(4096).split("\n")
    except UnicodeDecodeError:
        lines = []  # no text at all
    except OSError as error:
        raise ConfigError(
            f"secret key {path} cannot be read ({error.strerror}); let this user, and nobody else, "
            "read it, or give another net.keys_dir"
        ) from error
    secrets = [line.strip() for line in lines if line.strip() and not line.startswith("# ")]
    if len(secrets) != 1 or not _KEY_PATTERN.fullmatch(secrets[0]):
        raise ConfigError(
            f"{path} holds no secret key; it has one line of Z85 text of 40 characters; remove "
            f"the file and a new key is made, to be authorized again"
        )
    return KeyPair.from_secret(secrets[0])


def _write_aside(path: Path, text: str, *, mode: int) -> Path:
    aside = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return aside
