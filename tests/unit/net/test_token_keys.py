"""What handshakes see of join tokens, from one moment to the next."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.net.keys import KeyPair
from echo2.net.token_book import RETRY_S, TokenBook, TokenRecord
from echo2.net.token_keys import TokenKeys, id_of_connection

NOW = 1_000_000.0
HOUR = 3600.0


def a_key() -> str:
    return KeyPair.generate().public


class Run:
    """Tokens of a run folder, what handshakes see of them, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.book = TokenBook(folder / "keys")
        self.now = NOW
        self.keys = TokenKeys(self.book, clock=lambda: self.now)

    def makes(self, **wish: int) -> TokenRecord:
        record, _ = self.book.make(expires_s=HOUR, now=self.now, **wish)
        return record


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_each_connection_of_a_token_has_a_name_of_its_own(run: Run) -> None:
    keys = run.keys
    token = run.makes(uses=2)
    first, second = keys.name_of(token.public_key), keys.name_of(token.public_key)
    assert first is not None
    assert second is not None
    assert first != second
    assert id_of_connection(first) == id_of_connection(second) == token.id
    assert keys.holds(first, token.public_key)
    assert not keys.holds(first, a_key())
    assert keys.names() == (token.id,)


def test_a_key_of_no_token_is_unknown(run: Run) -> None:
    keys, key = run.keys, a_key()
    run.makes()
    assert keys.name_of(key) is None
    assert keys.refusal(key) == "token_unknown"


def test_an_expired_token_does_not_open_the_socket_nor_keep_it_open(run: Run) -> None:
    keys, token = run.keys, run.makes()
    name = keys.name_of(token.public_key)
    assert name is not None
    run.now += HOUR
    assert keys.name_of(token.public_key) is None
    assert keys.refusal(token.public_key) == "token_expired"
    assert not keys.holds(name, token.public_key)


def test_a_used_up_token_opens_the_socket_only_for_those_whose_answer_may_be_lost(
    run: Run,
) -> None:
    keys, token = run.keys, run.makes()
    run.book.enrol(token.id, a_key(), now=run.now)
    run.now += RETRY_S - 1
    assert keys.name_of(token.public_key) is not None
    run.now += 1
    assert keys.name_of(token.public_key) is None
    assert keys.refusal(token.public_key) == "token_used_up"


def test_a_revoked_token_is_forgotten_at_once(run: Run) -> None:
    keys, token = run.keys, run.makes()
    name = keys.name_of(token.public_key)
    assert name is not None
    generation = keys.generation
    run.book.revoke(token.id)
    keys.refresh()
    assert keys.generation == generation + 1
    assert not keys.holds(name, token.public_key)
    assert keys.name_of(token.public_key) is None
