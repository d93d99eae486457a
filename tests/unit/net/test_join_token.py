"""The one line: what comes back of it, and what is told when it does not."""

from __future__ import annotations

import re

import pytest

from echo2.errors import ConfigError
from echo2.net.join_token import TOKEN_CHARACTERS_MAX, JoinToken, token_id
from echo2.net.keys import KeyPair


def a_token(**changes: object) -> JoinToken:
    values: dict[str, object] = {
        "endpoint": "tcp://203.0.113.7:5703",
        "server_key": KeyPair.generate().public,
        "secret": KeyPair.generate().secret,
        "expires_at": 1_900_000_000,
        "uses": 3,
    }
    return JoinToken(**{**values, **changes})  # type: ignore[arg-type]


def test_a_token_comes_back_as_it_was_and_survives_a_shell() -> None:
    token = a_token()
    line = token.text()
    assert re.fullmatch(r"[\w-]+", line)
    assert JoinToken.parse(f"  {line}\n") == token
    assert token.id == token_id(token.keys.public)
    assert re.fullmatch(r"[0-9a-f]{12}", token.id)


def test_the_secret_is_not_shown() -> None:
    token = a_token()
    assert token.secret not in repr(token)
    assert token.secret not in token.text()


@pytest.mark.parametrize("cut", [1, 4, 50])
def test_a_line_that_was_cut_is_damaged(cut: int) -> None:
    with pytest.raises(ConfigError, match=r"damaged.*copy the whole line"):
        JoinToken.parse(a_token().text()[:-cut])


def test_a_line_with_one_wrong_character_is_damaged() -> None:
    line = a_token().text()
    middle = len(line) // 2
    other = "A" if line[middle] != "A" else "B"
    with pytest.raises(ConfigError, match="damaged"):
        JoinToken.parse(line[:middle] + other + line[middle + 1 :])


@pytest.mark.parametrize(
    "text", ["", "secret", "echo2join1_", "echo2join1_!!!!", "echo2join1_" + "A" * 9000]
)
def test_what_is_no_token_is_told_so(text: str) -> None:
    assert len(a_token().text()) < TOKEN_CHARACTERS_MAX
    with pytest.raises(ConfigError, match=r"no join token|damaged"):
        JoinToken.parse(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint", "http://203.0.113.7:80"),
        ("server_key", "short"),
        ("secret", "x" * 39),
    ],
)
def test_a_token_of_wrong_parts_cannot_be_made(field: str, value: str) -> None:
    with pytest.raises(ConfigError):
        a_token(**{field: value})
