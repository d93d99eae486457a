"""The command line: one clear message and an exit code for whatever goes wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from echo2 import __version__
from echo2.errors import FencedError

from .command_line import Echo2

COMMANDS = [
    *("run", "coordinator", "learner", "worker", "origin"),
    *("check", "plan", "status", "verify", "rollouts", "simulate", "setup"),
]


@pytest.fixture
def a_config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "tiny"\n[http]\ntoken = "secret"\n', encoding="utf-8")
    return path


def test_help_names_every_command(echo2: Echo2) -> None:
    answer = echo2("--help")
    assert answer.code == 0
    assert all(f" {name} " in answer.out for name in [*COMMANDS, "token", "keys"])


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_and_a_module(echo2: Echo2, command: str) -> None:
    assert echo2(command, "--help").code == 0
    assert callable(import_module(f"echo2.commands.{command}").main)


@pytest.mark.parametrize(
    "command",
    ["token create", "token list", "token revoke", "keys list", "keys authorize", "keys revoke"],
)
def test_every_command_about_access_has_help(echo2: Echo2, command: str) -> None:
    answer = echo2(*command.split(), "--help")
    assert answer.code == 0
    assert "--run-dir" in answer.out


def test_a_worker_has_a_configuration_or_a_token(echo2: Echo2, a_config: Path) -> None:
    for arguments in ((), (a_config, "--join", "x")):
        answer = echo2("worker", *arguments)
        assert answer.code == 2
        assert "give either a CONFIG or --join TOKEN" in answer.err
    answer = echo2("worker", "--join", "x")
    assert (answer.code, "this is no join token" in answer.err) == (2, True)


def test_the_version_is_printed(echo2: Echo2) -> None:
    assert echo2("--version").out == f"echo2 {__version__}\n"


@pytest.mark.parametrize("command", ["run", "coordinator", "learner", "worker", "origin", "check"])
def test_a_wrong_configuration_ends_any_command_with_2_and_one_message(
    echo2: Echo2, tmp_path: Path, command: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[learner]\nstep = 3\n[staleness]\nmax = 1\nperiod = 5\n", encoding="utf-8")
    answer = echo2(command, path, "--run-dir", tmp_path / "run", "--set", "log.level=loud")
    assert answer.code == 2
    assert answer.err.startswith(f"echo2: {path}: 3 problems\n")
    assert "Traceback" not in answer.err
    assert not (tmp_path / "run").exists()


def test_a_missing_configuration_ends_with_2(echo2: Echo2, tmp_path: Path) -> None:
    answer = echo2("check", tmp_path / "none.toml")
    assert (answer.code, answer.out) == (2, "")
    assert "none.toml does not exist" in answer.err


def test_check_prints_what_resolves_and_what_follows(echo2: Echo2, a_config: Path) -> None:
    answer = echo2(
        "check",
        a_config,
        "--set", "staleness.max=3",
        "--set", "staleness.period=2",
        "--set", "learner.groups_per_step=16",
        "--set", "dispatch.group_size=4",
        "--set", "learner.steps=120",
        "--set", "eval.every_steps=50",
        "--set", "worker.downlink_mbit=200",
    )  # fmt: skip
    assert answer.code == 0
    for told in (
        "[staleness]\nmax = 3\n",
        "S = 3: no token is trained more than 3 learner steps after the version",
        "a group sampled from version u is trained by u + 3",
        "κ = 2: a version is published after every 2 learner steps (allowed 1 to 4)",
        "R·(S + 1) = 16·4 = 64 groups (256 trajectories) buffered or leased at most",
        "R·G = 16·4 = 64 trajectories",
        "R·G·max_tokens = 1024 sampled tokens per step at most",
        "3 written (every 50 steps and at the end), the newest 2 kept",
        "4 of 256 trajectories each: at step 0, every 50 steps and at the end",
        "control 127.0.0.1:any free port",
        "join 127.0.0.1:any free port",
        "CURVE on every socket, allow-list in",
        "workers forward what their uplinks carry and receive 200 Mbit/s at most",
        "no prices given",
        "runs/tiny",
    ):
        assert told in answer.out
    assert "secret" not in answer.out


def test_check_prints_the_same_facts_as_json(echo2: Echo2, a_config: Path) -> None:
    answer = echo2("check", a_config, "--json", "--run-dir", "here", "--set", "learner.steps=101")
    told = json.loads(answer.out)
    assert told["config"]["learner"]["steps"] == 101
    assert told["facts"]["groups_max"] == 96
    assert told["facts"]["checkpoints"] == 3
    assert told["facts"]["run_folder"].endswith("/here")
    assert "secret" not in answer.out


def test_check_prints_the_schema_without_a_file(echo2: Echo2) -> None:
    answer = echo2("check", "--schema")
    assert json.loads(answer.out)["title"] == "echo2 configuration"
    assert echo2("check").code == 2


def test_status_needs_a_run_that_is_there(echo2: Echo2, tmp_path: Path) -> None:
    answer = echo2("status", "--run-dir", tmp_path)
    assert answer.code == 1
    assert "has no coordinator.json" in answer.err
    assert echo2("status").code == 2
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / "coordinator.json").write_text(json.dumps({"pid": dead.pid, "http": "x"}))
    answer = echo2("status", "--run-dir", tmp_path)
    assert answer.code == 1
    assert f"(pid {dead.pid}) is not running" in answer.err


def test_verify_needs_a_folder(echo2: Echo2, tmp_path: Path) -> None:
    answer = echo2("verify", tmp_path / "none")
    assert answer.code == 2
    assert "is not a folder" in answer.err


def test_run_refuses_a_used_folder_and_an_empty_one_to_resume(
    echo2: Echo2, a_config: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    arguments = ("run", a_config, "--run-dir", folder, "--set", "worker.engine=null")
    answer = echo2(*arguments, "--resume")
    assert answer.code == 1
    assert "holds no run to go on with" in answer.err
    folder.mkdir()
    (folder / "something").touch()
    answer = echo2(*arguments)
    assert answer.code == 1
    assert "holds a run already: go on with it by --resume" in answer.err


def test_a_missing_extra_is_told_with_the_pip_line_that_mends_it(
    echo2: Echo2, a_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.commands.extras.find_spec", lambda name: None)
    for command in ("run", "learner", "worker"):
        answer = echo2(command, a_config, "--run-dir", tmp_path / "run")
        assert answer.code == 1
        assert 'pip install "echo2[' in answer.err
    assert not (tmp_path / "run").exists()


def test_a_fenced_learner_ends_with_3(
    echo2: Echo2, a_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fenced(*arguments: object, **options: object) -> int:
        raise FencedError("incarnation 3 was fenced by 4")

    monkeypatch.setattr("echo2.commands.check.main", fenced)
    answer = echo2("check", a_config)
    assert (answer.code, answer.err) == (3, "echo2: incarnation 3 was fenced by 4\n")
