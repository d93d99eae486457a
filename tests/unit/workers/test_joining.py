"""The berth of a machine that joined: made once, taken again, never by two."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo2.config import Config
from echo2.errors import ConfigError, Echo2Error
from echo2.join_settings import shared_settings
from echo2.messages import PROTOCOL, Enrolled
from echo2.net.join_token import JoinToken
from echo2.net.keys import KeyPair
from echo2_workers import joining
from echo2_workers.joining import join_run

SERVER = KeyPair.generate()


def a_token() -> JoinToken:
    return JoinToken(
        endpoint="tcp://127.0.0.1:5703",
        server_key=SERVER.public,
        secret=KeyPair.generate().secret,
        expires_at=1_900_000_000,
        uses=1,
    )


class Coordinator:
    """Answers every request, and remembers whose keys came."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str = "joined") -> None:
        self.keys: list[str] = []
        self._name = name
        monkeypatch.setattr(joining, "enrol", self.enrol)

    async def enrol(self, token: JoinToken, keys: KeyPair, *, wanted: str) -> Enrolled:
        if keys.public not in self.keys:
            self.keys.append(keys.public)
        number = self.keys.index(keys.public) + 1
        answer = Enrolled(
            protocol=PROTOCOL,
            name=f"{self._name}-{number}" if self._name else "..",
            run_id="r",
            control="tcp://127.0.0.1:5700",
            rollouts="tcp://127.0.0.1:5701",
            server_key=SERVER.public,
            settings=shared_settings(Config()),
        )
        return joining._checked(answer, token)


def test_the_same_command_again_is_the_same_worker_and_asks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, token = Coordinator(monkeypatch), a_token()
    first = join_run(token.text(), tmp_path, wanted="", overrides=())
    assert first.identity.name == "joined-1"
    assert first.identity.folder == tmp_path / "workers" / "joined-1"
    assert first.identity.keys is not None
    assert first.config.net.coordinator == "tcp://127.0.0.1:5700"
    first.identity.release()
    coordinator.keys.clear()
    again = join_run(token.text(), tmp_path, wanted="", overrides=("worker.slots=2",))
    assert again.identity.keys == first.identity.keys
    assert again.config.worker.slots == 2
    assert coordinator.keys == []
    again.identity.release()


def test_the_same_command_at_once_is_another_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Coordinator(monkeypatch)
    token = a_token().text()
    first, second = (join_run(token, tmp_path, wanted="", overrides=()) for _ in range(2))
    assert [first.identity.name, second.identity.name] == ["joined-1", "joined-2"]
    for joined in (first, second):
        joined.identity.release()


def test_another_token_enrols_the_same_key_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(monkeypatch)
    for _ in range(2):
        joined = join_run(a_token().text(), tmp_path, wanted="", overrides=())
        joined.identity.release()
    assert len(coordinator.keys) == 1


def test_secrets_are_for_their_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Coordinator(monkeypatch)
    join_run(a_token().text(), tmp_path, wanted="", overrides=()).identity.release()
    for path in (tmp_path / "keys" / "berth-1.key", tmp_path / "berths" / "berth-1.json"):
        assert path.stat().st_mode & 0o077 == 0


def test_an_answer_that_was_torn_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, token = Coordinator(monkeypatch), a_token().text()
    join_run(token, tmp_path, wanted="", overrides=()).identity.release()
    (tmp_path / "berths" / "berth-1.json").write_text("{")
    coordinator.keys.clear()
    join_run(token, tmp_path, wanted="", overrides=()).identity.release()
    assert len(coordinator.keys) == 1


def test_a_berth_is_free_again_when_nothing_came_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Coordinator(monkeypatch)
    token = a_token().text()
    with pytest.raises(ConfigError, match="no such setting"):
        join_run(token, tmp_path, wanted="", overrides=("worker.slot=3",))
    joined = join_run(token, tmp_path, wanted="", overrides=())
    assert joined.identity.name == "joined-1"
    joined.identity.release()


def test_a_name_that_leads_out_of_the_folder_is_not_taken_from_anyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Coordinator(monkeypatch, name="")
    with pytest.raises(Echo2Error, match="cannot name a peer"):
        join_run(a_token().text(), tmp_path / "here", wanted="", overrides=())
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["berths", "keys"]


@pytest.mark.parametrize("name", ["../x", "a b", ".hidden", "x" * 65, "ä"])
def test_a_wish_that_is_no_name_is_told_before_anything_is_sent(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--name .*are allowed"):
        joining._wish(name)
