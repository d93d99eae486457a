"""Tokens on the disk: who is let in, how often, under which name, and who is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo2.errors import ConfigError
from echo2.net import token_book as module
from echo2.net.keys import AllowList, KeyPair
from echo2.net.token_book import (
    TOKENS_MAX,
    EnrolmentRefusedError,
    TokenBook,
    TokenRecord,
)

NOW = 1_000_000.0
HOUR = 3600.0


def a_key() -> str:
    return KeyPair.generate().public


class Run:
    """A run folder's keys, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.book = TokenBook(folder / "keys")
        self.now = NOW

    def makes(self, **wish: object) -> TokenRecord:
        record, _ = self.book.make(**{"expires_s": HOUR, "now": self.now, **wish})  # type: ignore[arg-type]
        return record

    def enrols(self, token: TokenRecord, key: str, wanted: str = "") -> str:
        return self.book.enrol(token.id, key, wanted=wanted, now=self.now).name

    def refuses(self, token: TokenRecord, key: str) -> str:
        """The reason."""
        before = self.allowed
        with pytest.raises(EnrolmentRefusedError) as refusal:
            self.enrols(token, key)
        assert self.allowed == before
        return refusal.value.reason

    def record(self, token: TokenRecord) -> TokenRecord:
        return next(each for each in self.book.records() if each.id == token.id)

    @property
    def allowed(self) -> dict[str, str]:
        return AllowList(self.book.keys_dir / "authorized").keys()


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


# ------------------------------------------------------------------------ enrolling


def test_a_key_gets_the_next_number_of_the_prefix(run: Run) -> None:
    token, first, second = run.makes(prefix="far", uses=2), a_key(), a_key()
    assert run.enrols(token, first) == "far-1"
    assert run.enrols(token, second) == "far-2"
    assert run.allowed == {"far-1": first, "far-2": second}


def test_a_token_of_one_name_gives_that_name(run: Run) -> None:
    assert run.enrols(run.makes(name="a100"), a_key()) == "a100"


def test_a_name_that_is_given_by_hand_comes_by_no_prefix(tmp_path: Path) -> None:
    """An auditor's name makes its holder trusted."""
    run = Run(tmp_path)
    run.book = TokenBook(run.book.keys_dir, given_by_hand=("far-1", "far-aud"))
    token = run.makes(prefix="far", uses=2)
    assert run.enrols(token, a_key(), "far-aud") == "far-2"
    assert run.enrols(token, a_key(), "far-1") == "far-3"
    assert run.enrols(run.makes(name="far-aud"), a_key()) == "far-aud"


def test_a_wish_is_heeded_where_it_fits_the_prefix(run: Run) -> None:
    token = run.makes(prefix="far", uses=5)
    assert run.enrols(token, a_key(), "far-a100") == "far-a100"
    assert run.enrols(token, a_key(), "far-a100") == "far-1", "it is taken"
    assert run.enrols(token, a_key(), "learner") == "far-2"
    assert run.enrols(token, a_key(), "far-/../x") == "far-3"


def test_who_asks_again_gets_the_same_answer_and_spends_nothing(run: Run) -> None:
    token, key = run.makes(uses=2), a_key()
    assert [run.book.enrol(token.id, key, now=run.now).is_new for _ in range(3)] == [
        True, False, False
    ]  # fmt: skip
    assert run.record(token).uses_left == 1


def test_a_used_up_token_refuses_others_and_still_answers_the_one_it_let_in(run: Run) -> None:
    token, key = run.makes(), a_key()
    name = run.enrols(token, key)
    assert run.refuses(token, a_key()) == "token_used_up"
    assert run.enrols(token, key) == name


def test_an_expired_token_lets_nobody_in(run: Run) -> None:
    token = run.makes(uses=5)
    early = a_key()
    run.enrols(token, early)
    run.now += HOUR
    assert run.refuses(token, a_key()) == "token_expired"
    assert run.refuses(token, early) == "token_expired"


def test_a_revoked_token_is_unknown(run: Run) -> None:
    token = run.makes()
    assert run.book.revoke(token.id)
    assert not run.book.revoke(token.id)
    assert run.refuses(token, a_key()) == "token_unknown"


@pytest.mark.parametrize("token", ["", "..", "../../x", "ABCDEF012345", "0123456789ab"])
def test_what_is_no_token_s_id_is_unknown(run: Run, token: str) -> None:
    with pytest.raises(EnrolmentRefusedError, match="ask for another one"):
        run.book.enrol(token, a_key(), now=NOW)
    assert not run.book.revoke(token)


def test_a_key_that_is_in_already_keeps_its_name_and_spends_nothing(run: Run) -> None:
    key = a_key()
    run.enrols(run.makes(prefix="far"), key)
    other = run.makes(prefix="near")
    assert run.enrols(other, key) == "far-1"
    assert run.record(other).uses_left == 1


def test_a_key_of_another_part_is_no_worker_s(run: Run) -> None:
    key = a_key()
    AllowList(run.book.keys_dir / "authorized").authorize("learner", key)
    assert run.refuses(run.makes(), key) == "key_taken"


def test_a_revoked_key_does_not_come_back_by_its_token(run: Run) -> None:
    token, key = run.makes(uses=3), a_key()
    name = run.enrols(token, key)
    AllowList(run.book.keys_dir / "authorized").revoke(name)
    assert run.refuses(token, key) == "revoked"
    assert run.enrols(token, a_key()) == "joined-2", "its name is nobody else's"


def test_a_name_with_another_key_is_not_taken_over(run: Run) -> None:
    token, theirs = run.makes(name="a100"), a_key()
    AllowList(run.book.keys_dir / "authorized").authorize("a100", theirs)
    assert run.refuses(token, a_key()) == "name_taken"
    assert run.allowed == {"a100": theirs}
    assert run.record(token).uses_left == 1


def test_a_name_that_a_worker_of_this_machine_has_a_key_for_is_not_given(run: Run) -> None:
    run.book.keys_dir.mkdir(parents=True)
    (run.book.keys_dir / "w-1.key").touch()
    assert run.enrols(run.makes(prefix="w"), a_key()) == "w-2"


# ------------------------------------------------------------------------ crashes


@pytest.mark.parametrize("dies_at", ["after the use", "after the key"])
def test_a_coordinator_that_died_between_two_steps_finishes_when_it_is_asked_again(
    run: Run, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    token, key = run.makes(), a_key()

    def dies(*_: object, **__: object) -> None:
        raise OSError("the power went")

    with monkeypatch.context() as patch:
        if dies_at == "after the use":
            patch.setattr(AllowList, "authorize", dies)
        else:
            write, written = module.write_whole, []

            def dies_at_second(path: Path, content: bytes, *, mode: int) -> None:
                written.append(path)
                if len(written) > 1:
                    dies()
                write(path, content, mode=mode)

            patch.setattr(module, "write_whole", dies_at_second)
        with pytest.raises(OSError, match="the power went"):
            run.enrols(token, key)
    assert run.record(token).uses_left == 0, "counted before anything was promised"
    assert run.refuses(token, a_key()) == "token_used_up"
    assert run.enrols(token, key) == "joined-1"
    assert run.allowed == {"joined-1": key}


def test_a_name_that_was_taken_by_hand_this_very_moment_is_replaced_by_another(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, key, theirs = run.makes(), a_key(), a_key()
    authorize = AllowList.authorize

    def somebody_is_first(self: AllowList, name: str, public_key: str, **how: bool) -> None:
        if name == "joined-1":
            authorize(self, name, theirs)
        authorize(self, name, public_key, **how)

    monkeypatch.setattr(AllowList, "authorize", somebody_is_first)
    assert run.enrols(token, key) == "joined-2"
    assert run.allowed == {"joined-1": theirs, "joined-2": key}
    assert run.record(token).uses_left == 0


# ------------------------------------------------------------------------ files


def test_the_folder_keeps_no_secret_and_only_its_owner_reads_it(run: Run) -> None:
    record, keys = run.book.make(expires_s=HOUR, now=NOW)
    path = run.book.folder / f"{record.id}.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert run.book.folder.stat().st_mode & 0o777 == 0o700
    assert keys.secret not in path.read_text()
    assert record.public_key == keys.public


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"id": "x"}', "null", '{"id": "0123456789ab", "uses": 1e999}']
)
def test_a_file_that_is_no_token_lets_nobody_in(run: Run, text: str) -> None:
    token = run.makes()
    (run.book.folder / f"{token.id}.json").write_text(text)
    assert run.book.records() == []
    assert run.refuses(token, a_key()) == "token_unknown"


def test_a_token_under_another_s_name_lets_nobody_in(run: Run) -> None:
    token, other = run.makes(), run.makes()
    path = run.book.folder / f"{token.id}.json"
    path.write_text((run.book.folder / f"{other.id}.json").read_text())
    assert [record.id for record in run.book.records()] == [other.id]


def test_uses_that_are_written_by_hand_are_bounded(run: Run) -> None:
    token = run.makes()
    path = run.book.folder / f"{token.id}.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "uses": 10**9}))
    assert run.book.records() == []


@pytest.mark.parametrize(
    ("wish", "said"),
    [
        ({"name": "a", "prefix": "b"}, "not both"),
        ({"name": "a", "uses": 2}, "one worker's only"),
        ({"name": "learner"}, "belongs to another part"),
        ({"name": "origin-2"}, "belongs to another part"),
        ({"prefix": "coordinator"}, "belongs to another part"),
        ({"name": "../x"}, "cannot name a peer"),
        ({"prefix": "p" * 60}, "at most 56"),
        ({"uses": 0}, "allowed are 1 to 1000"),
        ({"uses": 5000}, "allowed are 1 to 1000"),
        ({"expires_s": 0.5}, "allowed are 1 s to 366 days"),
        ({"expires_s": 1e9}, "allowed are 1 s to 366 days"),
    ],
)
def test_a_token_that_nobody_could_use_as_it_is_meant_is_not_made(
    run: Run, wish: dict[str, object], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run.makes(**wish)
    assert run.book.records() == []


def test_a_token_for_a_name_that_is_taken_is_not_made(run: Run) -> None:
    AllowList(run.book.keys_dir / "authorized").authorize("a100", a_key())
    with pytest.raises(ConfigError, match="echo2 keys revoke a100"):
        run.makes(name="a100")


def test_tokens_are_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOKENS_MAX", 2)
    assert TOKENS_MAX > 2
    run.makes()
    run.makes()
    with pytest.raises(ConfigError, match=r"the most allowed.*echo2 token revoke"):
        run.makes()


def test_an_allow_list_that_cannot_be_written_is_told_and_the_use_is_not_lost(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, key = run.makes(uses=1), a_key()

    def full(*arguments: object, **options: object) -> None:
        raise ConfigError("the folder cannot be used (No space left on device)")

    with monkeypatch.context() as patch:
        patch.setattr(AllowList, "authorize", full)
        with pytest.raises(ConfigError, match="No space left"):
            run.book.enrol(record.id, key, now=NOW)
    assert run.book.enrol(record.id, key, now=NOW).is_new
    (found,) = run.book.records()
    assert len(found.enrolled) == 1
