from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq.asyncio
from zmq.utils import z85

from echo2.errors import LocalProtocolError
from echo2.net.auth import AllowList, Authenticator, KeyPair
from echo2.net.keys import PeerKeys


@pytest.fixture
def authenticator(tmp_path: Path) -> Iterator[Authenticator]:
    """Not started: its answers need no socket."""
    with zmq.asyncio.Context() as context:
        yield Authenticator(context, AllowList(tmp_path / "authorized"))


def a_request(
    public_key: str, *, domain: bytes = b"echo2", mechanism: bytes = b"CURVE"
) -> list[bytes]:
    return [b"1.0", b"7", domain, b"10.0.0.9", b"", mechanism, z85.decode(public_key)]


def test_an_allowed_key_gets_its_name_and_keeps_its_key(authenticator: Authenticator) -> None:
    key = KeyPair.generate().public
    authenticator.allow_list.authorize("w-1", key)
    version, request_id, status, _, user, metadata = authenticator.answer(a_request(key))
    assert (version, request_id, status, user) == (b"1.0", b"7", b"200", b"w-1")
    assert metadata == b"\x09Echo2-Key\x00\x00\x00\x28" + key.encode()
    assert authenticator.admitted == 1
    assert not authenticator.refused


def test_a_stranger_is_refused_and_counted(authenticator: Authenticator) -> None:
    for _ in range(3):
        reply = authenticator.answer(a_request(KeyPair.generate().public))
        assert reply == [b"1.0", b"7", b"400", b"stranger", b"", b""]
    assert authenticator.refused == Counter(stranger=3)
    assert authenticator.admitted == 0


@pytest.mark.parametrize("domain", [b"", b"global", b"echo2 "])
def test_another_domain_is_refused(authenticator: Authenticator, domain: bytes) -> None:
    key = KeyPair.generate().public
    authenticator.allow_list.authorize("w-1", key)
    assert authenticator.answer(a_request(key, domain=domain))[2] == b"400"
    assert authenticator.refused == Counter(domain=1)


def test_a_domain_of_its_own_opens_to_its_own_keys_alone(authenticator: Authenticator) -> None:
    worker, guest = KeyPair.generate().public, KeyPair.generate().public
    guests = PeerKeys()
    guests.replace({"guest": guest})
    authenticator.allow_list.authorize("w-1", worker)  # type: ignore[attr-defined]
    authenticator.add_domain("door", guests)
    assert authenticator.answer(a_request(guest, domain=b"door"))[4] == b"guest"
    for key, domain in ((guest, b"echo2"), (worker, b"door")):
        assert authenticator.answer(a_request(key, domain=domain))[2] == b"400"
    assert authenticator.refused == Counter(stranger=2)
    assert authenticator.keys_of("door") is guests
    with pytest.raises(LocalProtocolError, match="no keys were given for the domain window"):
        authenticator.keys_of("window")


def test_a_flood_of_keys_is_counted_and_told_rarely(tmp_path: Path) -> None:
    told: list[tuple[str, str, str, int]] = []
    with zmq.asyncio.Context() as context:
        authenticator = Authenticator(
            context,
            AllowList(tmp_path / "authorized"),
            on_refused=lambda *fields: told.append(fields),
        )
        key = KeyPair.generate().public
        for _ in range(3):
            authenticator.answer(a_request(key))
        assert told == [("stranger", key, "10.0.0.9", 1)], "once per key"
        for _ in range(1000):
            authenticator.answer(a_request(KeyPair.generate().public))
    assert authenticator.refused == Counter(stranger=1003)
    assert 1 < len(told) < 100
    assert told[1][3] == 3, "the two that were not told, and this one"


def test_only_curve_keys_are_heard(authenticator: Authenticator) -> None:
    key = KeyPair.generate().public
    authenticator.allow_list.authorize("w-1", key)
    whole = a_request(key)
    requests = [
        a_request(key, mechanism=b"PLAIN"),
        whole[:-1],
        [*whole[:-1], b"short"],
        [*whole, b"more"],
        [b"2.0", *whole[1:]],
    ]
    assert [authenticator.answer(request)[2] for request in requests] == [b"400"] * 5
    assert authenticator.refused == Counter(mechanism=5)


def test_a_request_that_zeromq_would_not_make_is_our_own_bug(authenticator: Authenticator) -> None:
    with pytest.raises(LocalProtocolError, match="of 2 frames"):
        authenticator.answer([b"1.0", b"7"])
