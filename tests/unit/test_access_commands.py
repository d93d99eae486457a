"""`echo2 token` and `echo2 keys`: one line on stdout, tables for people, JSON for programs."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from echo2.commands.run_folder import RunFolder
from echo2.commands.token import seconds
from echo2.errors import ConfigError
from echo2.ledger.database import Database
from echo2.ledger.durable import FILE
from echo2.net.join_token import JoinToken
from echo2.net.keys import AllowList, KeyPair, load_or_create_key
from echo2.net.token_book import TokenBook
from echo2.pardons import read_pardons

from .command_line import Echo2

NOW = 1_000_000.0
REMOTE = '[net]\nhost = "203.0.113.7"\njoin_port = 5703\n'


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Path]:
    """(CONFIG, run folder) of a run that was never started."""
    path = tmp_path / "run.toml"
    path.write_text(REMOTE, encoding="utf-8")
    return path, tmp_path / "run"


def a_key() -> str:
    return KeyPair.generate().public


# ------------------------------------------------------------------------ token create


def test_nothing_but_the_token_goes_to_stdout(echo2: Echo2, run: tuple[Path, Path]) -> None:
    config, folder = run
    answer = echo2("token", "create", config, "--run-dir", folder, "--prefix", "far", "--uses", 4)
    assert answer.code == 0
    token = JoinToken.parse(answer.out)
    assert answer.out == token.text() + "\n"
    assert token.endpoint == "tcp://203.0.113.7:5703"
    assert token.server_key == load_or_create_key(folder / "keys" / "coordinator.key").public
    assert token.uses == 4
    assert f"token {token.id} lets 4 worker(s) in, called far-1 and so on" in answer.err
    assert token.secret not in answer.err


def test_a_token_as_json_says_what_it_is_good_for(echo2: Echo2, run: tuple[Path, Path]) -> None:
    config, folder = run
    answer = echo2("token", "create", config, "--run-dir", folder, "--name", "a100", "--json")
    told = json.loads(answer.out)
    assert JoinToken.parse(told["token"]).id == told["id"]
    assert (told["name"], told["uses"], told["uses_left"], told["state"]) == ("a100", 1, 1, "live")
    assert told["expires_at"].endswith("Z")
    assert answer.err == ""


def test_two_tokens_lead_to_the_same_server_with_other_secrets(
    echo2: Echo2, run: tuple[Path, Path]
) -> None:
    config, folder = run
    first, second = (
        JoinToken.parse(echo2("token", "create", config, "--run-dir", folder).out) for _ in range(2)
    )
    assert first.server_key == second.server_key
    assert first.secret != second.secret


def test_without_a_port_the_coordinator_must_have_taken_one(
    echo2: Echo2, run: tuple[Path, Path]
) -> None:
    config, folder = run
    arguments = ("token", "create", config, "--run-dir", folder, "--set", "net.join_port=0")
    answer = echo2(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert "net.join_port is 0, any free port, and no coordinator has taken one" in answer.err
    folder.mkdir(exist_ok=True)
    record = folder / "coordinator.json"
    record.write_text(json.dumps({"join": "tcp://203.0.113.7:40123"}))
    assert JoinToken.parse(echo2(*arguments).out).endpoint == "tcp://203.0.113.7:40123"
    record.write_text(json.dumps({"join": "tcp://127.0.0.1:40123"}))
    answer = echo2(*arguments)
    assert answer.code == 2
    assert 'listened at tcp://127.0.0.1:40123, and net.host is "203.0.113.7" now' in answer.err


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "::"])
def test_a_wildcard_is_no_address_for_a_token(
    echo2: Echo2, run: tuple[Path, Path], host: str
) -> None:
    config, folder = run
    answer = echo2("token", "create", config, "--run-dir", folder, "--set", f"net.host={host}")
    assert (answer.code, answer.out) == (2, "")
    assert "is no address that a peer can dial" in answer.err


def test_a_token_on_loopback_says_how_far_it_reaches(echo2: Echo2, run: tuple[Path, Path]) -> None:
    config, folder = run
    arguments = ("token", "create", config, "--run-dir", folder, "--set", "net.host=127.0.0.1")
    answer = echo2(*arguments)
    assert JoinToken.parse(answer.out).endpoint == "tcp://127.0.0.1:5703"
    assert "works on this machine only" in answer.err


def test_without_curve_there_are_no_tokens(echo2: Echo2, run: tuple[Path, Path]) -> None:
    config, folder = run
    settings = ("--set", "net.curve=false", "--set", "net.host=127.0.0.1")
    for command in (("token", "create"), ("keys", "list")):
        answer = echo2(*command, config, "--run-dir", folder, *settings)
        assert answer.code == 2
        assert "this run has neither keys nor tokens" in answer.err


@pytest.mark.parametrize(
    ("text", "expected"), [("90s", 90.0), ("30m", 1800.0), ("24h", 86_400.0), ("7d", 604_800.0)]
)
def test_times_are_read_with_their_unit(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "24", "h", "-1h", "1.5h", "24 hours", "1w"])
def test_a_time_without_a_unit_is_told_with_examples(text: str) -> None:
    with pytest.raises(ConfigError, match="for example 90s, 30m, 24h or 7d"):
        seconds(text)


def test_a_run_may_begin_in_a_folder_that_only_holds_keys(
    echo2: Echo2, run: tuple[Path, Path]
) -> None:
    config, folder = run
    echo2("token", "create", config, "--run-dir", folder)
    assert (folder / "keys").is_dir()
    assert not RunFolder(folder).is_used()
    (folder / "events.jsonl").touch()
    assert RunFolder(folder).is_used()


# ------------------------------------------------------------------------ token list, revoke


def test_tokens_are_listed_with_whom_they_let_in(echo2: Echo2, run: tuple[Path, Path]) -> None:
    config, folder = run
    answer = echo2("token", "list", config, "--run-dir", folder)
    assert answer.out == "no tokens; make one with: echo2 token create CONFIG\n"
    book = TokenBook(folder / "keys")
    now = time.time()
    record, _ = book.make(prefix="far", uses=2, expires_s=1e6, now=now)
    book.enrol(record.id, a_key(), now=now)
    old, _ = book.make(name="a100", expires_s=10, now=NOW)
    answer = echo2("token", "list", config, "--run-dir", folder)
    head, *rows = [line.split() for line in answer.out.splitlines()]
    assert head == ["id", "state", "left", "expires", "name", "let", "in"]
    assert [row[0] for row in rows] == [old.id, record.id]
    assert [rows[0][1], rows[0][-2:]] == ["expired", ["a100", "-"]]
    assert [rows[1][1], rows[1][-2:]] == ["live", ["far-N", "far-1"]]
    (first, second) = json.loads(echo2("token", "list", config, "--run-dir", folder, "--json").out)
    assert (first["id"], first["enrolled"]) == (old.id, [])
    assert (second["uses_left"], second["enrolled"][0]["name"]) == (1, "far-1")


def test_a_token_is_revoked_by_its_id_or_its_line(echo2: Echo2, run: tuple[Path, Path]) -> None:
    config, folder = run
    arguments = (config, "--run-dir", folder)
    line = echo2("token", "create", *arguments).out.strip()
    token = JoinToken.parse(line).id
    assert echo2("token", "revoke", line, *arguments).code == 0
    answer = echo2("token", "revoke", token, *arguments)
    assert answer.code == 1
    assert f"there is no token {token}" in answer.err
    assert TokenBook(folder / "keys").records() == []


# ------------------------------------------------------------------------ keys


def test_keys_are_listed_with_their_role_and_token(echo2: Echo2, run: tuple[Path, Path]) -> None:
    config, folder = run
    arguments = (config, "--run-dir", folder)
    assert echo2("keys", "list", *arguments).out.startswith("no key may connect")
    worker, learner = a_key(), a_key()
    book = TokenBook(folder / "keys")
    record, _ = book.make(expires_s=10, now=NOW)
    book.enrol(record.id, worker, now=NOW)
    assert echo2("keys", "authorize", "learner-2", learner, *arguments).code == 0
    rows = [line.split() for line in echo2("keys", "list", *arguments).out.splitlines()[1:]]
    assert rows == [
        ["joined-1", "worker", worker, record.id],
        ["learner-2", "learner", learner, "-"],
    ]
    told = json.loads(echo2("keys", "list", *arguments, "--json").out)
    assert told[0] == {
        "name": "joined-1",
        "role": "worker",
        "public_key": worker,
        "token": record.id,
    }
    assert told[1]["token"] is None


def test_a_key_is_authorized_and_no_name_is_taken_over(
    echo2: Echo2, run: tuple[Path, Path]
) -> None:
    config, folder = run
    arguments = (config, "--run-dir", folder)
    first, second = a_key(), a_key()
    answer = echo2("keys", "authorize", "w-far", first, *arguments)
    assert answer.out == "w-far may connect, as a worker\n"
    answer = echo2("keys", "authorize", "w-far", second, *arguments)
    assert answer.code == 2
    assert "has another key already; revoke it first (echo2 keys revoke w-far)" in answer.err
    assert AllowList(folder / "keys" / "authorized").keys() == {"w-far": first}


@pytest.mark.parametrize("start", ["-h", "--", "--x=", "-"])
def test_a_key_may_begin_like_an_option(echo2: Echo2, run: tuple[Path, Path], start: str) -> None:
    config, folder = run
    key = start.ljust(40, "h")
    answer = echo2("keys", "authorize", "w-far", key, config, "--run-dir", folder)
    assert answer.out == "w-far may connect, as a worker\n"
    assert AllowList(folder / "keys" / "authorized").keys() == {"w-far": key}


@pytest.mark.parametrize(
    ("name", "key", "said"),
    [
        ("../../etc/x", None, "cannot name a peer"),
        ("w-far", "short", "has 5 characters"),
        ("coordinator", None, "the coordinator's own name"),
    ],
)
def test_what_cannot_be_authorized_is_told(
    echo2: Echo2, run: tuple[Path, Path], name: str, key: str | None, said: str
) -> None:
    config, folder = run
    answer = echo2("keys", "authorize", name, key or a_key(), config, "--run-dir", folder)
    assert answer.code == 2
    assert said in answer.err


def test_a_revoked_key_is_gone_and_what_could_bring_it_back_is_told(
    echo2: Echo2, run: tuple[Path, Path]
) -> None:
    config, folder = run
    arguments = (config, "--run-dir", folder)
    book = TokenBook(folder / "keys")
    record, _ = book.make(uses=3, expires_s=10, now=NOW)
    book.enrol(record.id, a_key(), now=NOW)
    answer = echo2("keys", "revoke", "joined-1", *arguments)
    assert answer.code == 0
    assert answer.out.startswith("joined-1 may connect no more\n")
    assert f"echo2 token revoke {record.id}" in answer.out
    assert AllowList(folder / "keys" / "authorized").keys() == {}
    answer = echo2("keys", "revoke", "joined-1", *arguments)
    assert answer.code == 1
    assert "joined-1 is not on the allow-list" in answer.err


def test_a_local_worker_s_key_is_told_to_come_back_by_itself(
    echo2: Echo2, run: tuple[Path, Path]
) -> None:
    config, folder = run
    keys = load_or_create_key(folder / "keys" / "w-1.key")
    AllowList(folder / "keys" / "authorized").authorize("w-1", keys.public)
    answer = echo2("keys", "revoke", "w-1", config, "--run-dir", folder)
    assert "puts itself back; remove the file too" in answer.out


def test_a_run_folder_is_enough_once_it_was_started(echo2: Echo2, run: tuple[Path, Path]) -> None:
    config, folder = run
    answer = echo2("keys", "list", "--run-dir", folder)
    assert answer.code == 2
    assert "holds no config.resolved.toml" in answer.err
    folder.mkdir()
    (folder / "config.resolved.toml").write_text(config.read_text())
    assert echo2("keys", "list", "--run-dir", folder).code == 0
    assert echo2("token", "create", "--run-dir", folder).code == 0
    answer = echo2("keys", "list")
    assert answer.code == 2
    assert "give the CONFIG of the run, or its folder" in answer.err


# ------------------------------------------------------------------------- keys pardon


def quarantined(folder: Path, *names: str) -> None:
    """A run's ledger that has these workers in quarantine."""
    folder.mkdir(exist_ok=True)
    database = Database(folder / FILE)
    with database.transaction():
        for name in names:
            told = {"cause": "rewards", "reason": "2 of its groups were refuted", "step": 7}
            database.observe("worker_quarantined", {"worker": name, "in_training": [], **told}, 0)
    database.close()


def test_a_pardon_is_left_for_the_coordinator(echo2: Echo2, run: tuple[Path, Path]) -> None:
    config, folder = run
    quarantined(folder, "w-1", "w-2")
    answer = echo2("keys", "pardon", "w-1", config, "--run-dir", folder)
    assert answer.code == 0, answer.err
    assert answer.out.startswith("w-1 is pardoned; a coordinator that runs takes it up within a")
    assert "since step 7: 2 of its groups were refuted" in answer.out
    assert read_pardons(folder) == ["w-1"]


def test_who_is_not_quarantined_cannot_be_pardoned(echo2: Echo2, run: tuple[Path, Path]) -> None:
    config, folder = run
    answer = echo2("keys", "pardon", "w-1", config, "--run-dir", folder)
    assert answer.code == 1
    assert "w-1 is not quarantined in" in answer.err
    assert "quarantined are: nobody" in answer.err
    quarantined(folder, "w-2")
    assert "quarantined are: w-2" in echo2("keys", "pardon", "w-1", config, "--run-dir", folder).err
    assert read_pardons(folder) == []
    assert echo2("keys", "pardon", "../x", config, "--run-dir", folder).code == 2
