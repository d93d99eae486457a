"""Join tokens as the run folder knows them: who may enrol until when, and who has.

    keys/tokens/ID.json     public key of a token, its name or prefix, expiry, uses, and the keys
                            that it let in; mode 0600, written aside and renamed
    keys/tokens/.lock       held by whoever changes one: the coordinator, or `echo2 token`

    made -> a use for each new key -> used up          (a use is on the disk before the answer)
       '--> expired, or revoked: the file is gone

An enrolment has three steps, each durable: the use is noted, the key goes to the allow-list, the
use is noted as done. Whoever asks again with the same key, because an answer was lost or the
coordinator died between two steps, gets the same answer and uses up nothing. A key that was
taken off the allow-list afterwards does not come back by its token.

What ZeroMQ's handshakes see of it is `net.token_keys`.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from echo2.errors import ConfigError, Echo2Error
from echo2.net.join_token import token_id
from echo2.net.keys import (
    NAME_PATTERN,
    RESERVED_PATTERN,
    AllowList,
    KeyPair,
    NameOrKeyTakenError,
    check_name,
)
from echo2.types import PublicKey
from echo2.weights.files import remove_stale, sync_folder, write_whole

log = structlog.get_logger()

TOKENS_MAX: Final = 256
USES_MAX: Final = 1000
EXPIRY_MAX_S: Final = 366 * 86_400
RETRY_S: Final = 600.0
"""For so long after its last use a used-up token still opens the socket, for those whose answer
was lost: a key that it let in gets its answer, any other is refused."""
DEFAULT_PREFIX: Final = "joined"
_PREFIX_MAX: Final = 56
_FILE_MAX_BYTES: Final = 1 << 20

Moment = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class EnrolmentRefusedError(Echo2Error):
    """Whoever asked is not let in; `reason` is one word, counted."""

    def __init__(self, reason: str, text: str) -> None:
        self.reason = reason
        super().__init__(text)


@dataclass(frozen=True, slots=True)
class Admission:
    """A key is on the allow-list as `name`; `is_new`: since now."""

    name: str
    is_new: bool


class TokenUse(BaseModel):
    """A key that a token let in. `is_done`: it was put on the allow-list."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(pattern=r"^[\w.-]{1,64}$")]
    at: Moment
    is_done: bool = False


class TokenRecord(BaseModel):
    """One file. Exactly one of `name` and `prefix` is not ""."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    public_key: PublicKey
    name: Annotated[str, Field(pattern=r"^[\w.-]{0,64}$")] = ""
    prefix: Annotated[str, Field(pattern=r"^[\w.-]{0,56}$")] = ""
    uses: Annotated[int, Field(ge=1, le=USES_MAX)]
    made_at: Moment
    expires_at: Moment
    enrolled: Annotated[dict[PublicKey, TokenUse], Field(max_length=USES_MAX)] = {}

    @property
    def uses_left(self) -> int:
        return max(0, self.uses - len(self.enrolled))

    def state(self, now: float) -> str:
        """ "live", "expired" or "used up"."""
        if now >= self.expires_at:
            return "expired"
        return "live" if self.uses_left else "used up"

    def refusal(self, now: float) -> str:
        """Why it does not open the enrolment socket at `now`; "" when it does."""
        if now >= self.expires_at:
            return "token_expired"
        last = max((use.at for use in self.enrolled.values()), default=now)
        return "" if self.uses_left or now < last + RETRY_S else "token_used_up"


class TokenBook:
    """The tokens of `keys_dir`. Its methods read and write files: no event loop calls them.

    `given_by_hand`: names that no machine gets by a token for several, since they mean more than
    those of other workers (auditors); a token of that very name may give one."""

    def __init__(self, keys_dir: Path, *, given_by_hand: Collection[str] = ()) -> None:
        self._given_by_hand = frozenset(given_by_hand)
        self.keys_dir = keys_dir
        self.folder = keys_dir / "tokens"

    def make(
        self, *, name: str = "", prefix: str = "", uses: int = 1, expires_s: float, now: float
    ) -> tuple[TokenRecord, KeyPair]:
        """A new token and its secret, which is kept nowhere. Raises ConfigError."""
        if not name and not prefix:
            prefix = DEFAULT_PREFIX
        _check_wish(name=name, prefix=prefix, uses=uses, expires_s=expires_s)
        keys = KeyPair.generate()
        record = TokenRecord(
            id=token_id(keys.public),
            public_key=keys.public,
            name=name,
            prefix=prefix,
            uses=uses,
            made_at=float(now),
            expires_at=float(now + expires_s),
        )
        with self._locked():
            if name in self._taken(AllowList(self.keys_dir / "authorized")):
                raise ConfigError(str(_name_taken(name)))
            if len(self.records()) >= TOKENS_MAX:
                raise ConfigError(
                    f"{self.folder} holds {TOKENS_MAX} tokens, the most allowed; remove those that "
                    "are used up or expired with: echo2 token revoke ID"
                )
            remove_stale(self.folder)
            self._write(record)
        return record, keys

    def records(self) -> list[TokenRecord]:
        """All that are there, the oldest first. A file that is no token is passed over."""
        paths = sorted(self.folder.glob("*.json"))[: 2 * TOKENS_MAX]
        found = [record for path in paths if (record := _read(path)) is not None]
        return sorted(found, key=lambda record: (record.made_at, record.id))

    def revoke(self, token: str) -> bool:
        """Forget a token; False when there is none of this id."""
        with self._locked():
            path = self._path(token)
            if path is None or not path.exists():
                return False
            path.unlink()
            sync_folder(self.folder)
        return True

    def enrol(self, token: str, public_key: str, *, wanted: str = "", now: float) -> Admission:
        """Put `public_key` on the allow-list, under a name. Raises EnrolmentRefusedError.

        `wanted` is heeded where it is free and begins with the token's prefix.
        """
        with self._locked():
            record = self._live(token, now)
            allow_list = AllowList(self.keys_dir / "authorized")
            holder = allow_list.name_of(public_key)
            use = record.enrolled.get(public_key)
            if holder is not None and (use is None or use.is_done):
                return Admission(_known(holder), is_new=False)
            if use is not None and use.is_done:
                raise EnrolmentRefusedError(
                    "revoked",
                    f"this key was revoked: it is {use.name}'s no more; whoever should come back "
                    "needs a new key (a folder of its own, --run-dir) and a new token",
                )
            if use is None and not record.uses_left:
                raise EnrolmentRefusedError(
                    "token_used_up",
                    f"token {record.id} is for {record.uses} worker(s), and as many have enrolled; "
                    "make another one with: echo2 token create",
                )
            name = self._let_in(record, public_key, wanted, allow_list, now)
            return Admission(name, is_new=True)

    def enrolled_by(self, public_key: str) -> TokenRecord | None:
        """The token that let this key in."""
        return next((r for r in self.records() if public_key in r.enrolled), None)

    # ---------------------------------------------------------------------- helpers

    def _live(self, token: str, now: float) -> TokenRecord:
        path = self._path(token)
        record = None if path is None else _read(path)
        if record is None:
            raise EnrolmentRefusedError(
                "token_unknown", "this token was revoked; ask for another one"
            )
        if now >= record.expires_at:
            raise EnrolmentRefusedError(
                "token_expired",
                f"token {record.id} expired at {utc(record.expires_at)}; make another one with: "
                "echo2 token create",
            )
        return record

    def _let_in(
        self,
        record: TokenRecord,
        public_key: str,
        wanted: str,
        allow_list: AllowList,
        now: float,
    ) -> str:
        """The three steps. What an earlier try noted is taken up."""
        use = record.enrolled.get(public_key)
        while True:
            if use is None:
                name = self._free_name(record, wanted, allow_list)
                use = TokenUse(name=name, at=float(now))
                self._write(_with_use(record, public_key, use))
            try:
                allow_list.authorize(use.name, public_key, replace=False)
            except NameOrKeyTakenError:  # by hand, this very moment
                holder = allow_list.name_of(public_key)
                if holder is not None:
                    return _known(holder)
                if record.name:
                    raise _name_taken(record.name) from None
                use = None
                continue
            self._write(_with_use(record, public_key, use.model_copy(update={"is_done": True})))
            return use.name

    def _free_name(self, record: TokenRecord, wanted: str, allow_list: AllowList) -> str:
        taken = self._taken(allow_list)
        if record.name:
            if record.name in taken:
                raise _name_taken(record.name)
            return record.name
        taken |= self._given_by_hand
        starts_well = wanted.startswith(f"{record.prefix}-") and NAME_PATTERN.fullmatch(wanted)
        if starts_well and not RESERVED_PATTERN.fullmatch(wanted) and wanted not in taken:
            return wanted
        number = 1
        while f"{record.prefix}-{number}" in taken:
            number += 1
        return f"{record.prefix}-{number}"

    def _taken(self, allow_list: AllowList) -> set[str]:
        """Names that another key has, or had by a token, or that a worker of this machine has
        a key for."""
        taken = set(allow_list.names()) | {path.stem for path in self.keys_dir.glob("*.key")}
        return taken | {use.name for other in self.records() for use in other.enrolled.values()}

    def _path(self, token: str) -> Path | None:
        """Where a token of this id would be; None for what is no id."""
        is_id = len(token) == 12 and all(c in "0123456789abcdef" for c in token)
        return self.folder / f"{token}.json" if is_id else None

    def _write(self, record: TokenRecord) -> None:
        path = self.folder / f"{record.id}.json"
        write_whole(path, record.model_dump_json(indent=1).encode(), mode=0o600)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        AllowList(self.keys_dir / "authorized")  # makes the folders, and refuses a list of others'
        self.folder.mkdir(mode=0o700, exist_ok=True)
        with (self.folder / ".lock").open("a", encoding="ascii") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def utc(moment: float) -> str:
    """Unix seconds for people: 2026-01-31T12:00:00Z."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(moment))


def _check_wish(*, name: str, prefix: str, uses: int, expires_s: float) -> None:
    """Raises ConfigError for a token that nobody could use as it is meant."""
    if name and prefix:
        raise ConfigError("a token has a name for one worker or a prefix for several, not both")
    if name and uses != 1:
        raise ConfigError(
            f"{uses} uses of one name: {name} can be one worker's only; give a prefix instead "
            "(--prefix), under which names are numbered"
        )
    check_name(name or prefix)
    if RESERVED_PATTERN.fullmatch(name or f"{prefix}-1"):
        raise ConfigError(
            f'"{name or prefix}" belongs to another part (coordinator, origin, learner), which no '
            f'worker may be called; for example "{DEFAULT_PREFIX}"'
        )
    if len(prefix) > _PREFIX_MAX:
        raise ConfigError(
            f"the prefix has {len(prefix)} characters; at most {_PREFIX_MAX} are allowed, so that "
            "a number has room"
        )
    if not 1 <= uses <= USES_MAX:
        raise ConfigError(f"{uses} uses; allowed are 1 to {USES_MAX}")
    if not 1 <= expires_s <= EXPIRY_MAX_S:
        raise ConfigError(
            f"a token that expires after {expires_s:g} s; allowed are 1 s to "
            f"{EXPIRY_MAX_S // 86_400} days"
        )


def _known(holder: str) -> str:
    """A key that has a name already keeps it; it came by hand or by another token."""
    if RESERVED_PATTERN.fullmatch(holder):
        raise EnrolmentRefusedError(
            "key_taken", "this key is that of another part of the run; a worker makes its own"
        )
    return holder


def _name_taken(name: str) -> EnrolmentRefusedError:
    return EnrolmentRefusedError(
        "name_taken",
        f"the name {name} has, or had, another key; revoke that one (echo2 keys revoke {name}, and "
        "the token that it came by), or make a token for another name",
    )


def _with_use(record: TokenRecord, public_key: str, use: TokenUse) -> TokenRecord:
    return record.model_copy(update={"enrolled": {**record.enrolled, public_key: use}})


def _read(path: Path) -> TokenRecord | None:
    try:
        with path.open("rb") as file:
            content = file.read(_FILE_MAX_BYTES)
        record = TokenRecord.model_validate_json(content)
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, ValueError) as error:
        problem = str(error).splitlines()[0]
        log.warning("token_ignored", path=str(path), reason=problem)
        return None
    if record.id != path.stem or token_id(record.public_key) != record.id:
        log.warning("token_ignored", path=str(path), reason="its name is not that of its key")
        return None
    return record
