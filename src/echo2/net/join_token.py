"""A join token is one line that lets a rented machine enrol as a worker, and nothing else.

It holds the address of the enrolment socket, the coordinator's public key (so that nobody else
can answer in its place), a CURVE secret made for this token alone, the expiry and the number
of uses. The run folder keeps the public half (`net.token_book`), so a copy of the folder lets
nobody in. The line survives a shell and a chat window: letters, digits, "-" and "_", with a
check of its own, so that one that was cut is told from one that was refused.
"""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass, field
from typing import Final

from blake3 import blake3

from echo2.errors import ConfigError
from echo2.net.keys import KeyPair, check_public_key
from echo2.net.sockets import check_endpoint

TOKEN_CHARACTERS_MAX: Final = 2048
_HEAD: Final = "echo2join1_"
_CHECK_BYTES: Final = 4
_ID_BYTES: Final = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinToken:
    """`expires_at` in Unix seconds. `endpoint` and `server_key`: the enrolment socket's."""

    endpoint: str
    server_key: str
    secret: str = field(repr=False)
    expires_at: int
    uses: int

    def __post_init__(self) -> None:
        check_endpoint(self.endpoint, encrypted=True)
        check_public_key(self.server_key, owner="the coordinator")
        _ = self.keys

    @property
    def keys(self) -> KeyPair:
        """The pair with which one enrols."""
        return KeyPair.from_secret(self.secret)

    @property
    def id(self) -> str:
        return token_id(self.keys.public)

    def text(self) -> str:
        """The one line."""
        values = [self.endpoint, self.server_key, self.secret, self.expires_at, self.uses]
        payload = json.dumps(values, separators=(",", ":")).encode()
        whole = payload + _check(payload)
        return _HEAD + base64.urlsafe_b64encode(whole).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Raises ConfigError for whatever `text` did not make."""
        text = text.strip()
        if not text.startswith(_HEAD) or len(text) > TOKEN_CHARACTERS_MAX:
            raise ConfigError(
                f"this is no join token: one begins with {_HEAD} and has at most "
                f"{TOKEN_CHARACTERS_MAX} characters; make one with: echo2 token create CONFIG"
            )
        try:
            payload = _payload(text.removeprefix(_HEAD))
            endpoint, server_key, secret, expires_at, uses = json.loads(payload)
            if not (type(expires_at) is int and type(uses) is int):
                raise ValueError("expiry and uses are no integers")
            return cls(
                endpoint=str(endpoint),
                server_key=str(server_key),
                secret=str(secret),
                expires_at=expires_at,
                uses=uses,
            )
        except (ValueError, RecursionError, ConfigError) as error:
            raise ConfigError(
                f"this join token is damaged ({error}); copy the whole line once more"
            ) from None


def token_id(public_key: str) -> str:
    """What people and records call a token: 12 characters that reveal nothing of its secret."""
    return blake3(public_key.encode()).digest(_ID_BYTES).hex()


def _payload(text: str) -> bytes:
    padded = text + "=" * (-len(text) % 4)
    try:
        whole = base64.b64decode(padded, altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError("it was cut, or holds strange characters") from error
    payload, check = whole[:-_CHECK_BYTES], whole[-_CHECK_BYTES:]
    if check != _check(payload):
        raise ValueError("its characters do not fit each other")
    return payload


def _check(payload: bytes) -> bytes:
    return blake3(payload).digest(_CHECK_BYTES)
