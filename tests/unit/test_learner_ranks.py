"""The launcher of a learner's ranks, with small programs in the place of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echo2.commands import learner_ranks
from echo2.commands.learner_ranks import cause_of, is_lead, is_rank, run_ranks
from echo2.config import config_from_mapping
from echo2.errors import ConfigError


def ranks(folder: Path, program: str, *, num_ranks: int = 3) -> int:
    code = f"import os, sys, time, signal, socket\nrank = int(os.environ['RANK'])\n{program}"
    return run_ranks([sys.executable, "-c", code], num_ranks=num_ranks, logs=folder)


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ([(1, 0), (0, 0)], None),
        ([(0, 0), (1, -11)], None),
        ([(2, -9), (0, 4), (1, 4)], (2, -9)),
        ([(0, 4), (2, -9), (1, 4)], (2, -9)),
        ([(1, 4), (0, 2)], (0, 2)),
        ([(1, 4), (0, 4)], (1, 4)),
        ([(1, 1), (0, 1)], (0, 1)),
        ([(1, 1), (0, 4)], (1, 1)),
        ([(0, 1), (1, -9)], (1, -9)),
    ],
)
def test_the_cause_is_the_end_that_the_others_followed(
    ends: list[tuple[int, int]], cause: tuple[int, int] | None
) -> None:
    assert cause_of(ends) == cause


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lora": {"rank": 8}}, "adapters are trained by one process"),
        ({"device": "cuda:0"}, "each rank has a device of its own"),
    ],
)
def test_what_ranks_cannot_do_is_refused_early(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config_from_mapping({"learner": {"ranks": 2, **settings}})
    config_from_mapping({"learner": {"ranks": 1, **settings}})


def test_ranks_are_told_who_they_are_and_rank_0_inherits_the_socket(tmp_path: Path) -> None:
    program = f"""
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR"]
said = [os.environ[name] for name in names]
if rank == 0:
    listener = socket.socket(fileno=int(os.environ["ECHO2_STORE_FD"]))
    assert listener.getsockname() == ("127.0.0.1", int(os.environ["MASTER_PORT"]))
open(os.path.join({str(tmp_path)!r}, str(rank)), "w").write(" ".join(said))
"""
    assert ranks(tmp_path, program) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == [
        f"{rank} {rank} 3 127.0.0.1" for rank in range(3)
    ]


def test_a_rank_that_dies_ends_the_others_and_its_last_words_are_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_ranks, "LOST_S", 0.2)
    program = """
if rank == 2:
    print("no memory left", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    assert ranks(tmp_path, program) == 1
    said = capfd.readouterr().err
    assert "rank 2 of 3 ended with signal SIGKILL, and the learner's other ranks with it" in said
    assert "go on with --resume" in said
    assert "no memory left" in said


def test_rank_0_tells_its_own_failure_and_gives_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = """
if rank == 0:
    print("echo2: bad key", file=sys.stderr)
sys.exit(2 if rank == 0 else 4)
"""
    assert ranks(tmp_path, program) == 2
    assert capfd.readouterr().err == "echo2: bad key\n"


def test_ranks_that_do_not_follow_rank_0_to_its_end_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learner_ranks, "END_S", 0.2)
    assert ranks(tmp_path, "time.sleep(600 * rank)") == 0


def test_a_signal_goes_on_to_rank_0_alone(tmp_path: Path) -> None:
    program = f"""
import os, sys
from pathlib import Path
from echo2.commands.learner_ranks import run_ranks
rank = '''
import os, signal, sys, time
from pathlib import Path
folder = Path({str(tmp_path)!r})
def said(number, frame):
    (folder / ("heard-" + os.environ["RANK"])).touch()
    sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, said)
(folder / ("up-" + os.environ["RANK"])).touch()
while not (folder / "heard-0").exists():
    time.sleep(0.01)
'''
sys.exit(run_ranks([sys.executable, "-c", rank], num_ranks=2, logs=Path({str(tmp_path)!r})))
"""
    launcher = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    deadline = time.monotonic() + 60
    while not all((tmp_path / f"up-{rank}").exists() for rank in range(2)):
        assert launcher.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(launcher.pid, signal.SIGTERM)
    assert launcher.wait(60) == 0
    assert (tmp_path / "heard-0").exists()
    assert not (tmp_path / "heard-1").exists()


def test_a_process_is_a_rank_when_a_launcher_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not is_rank()
    assert is_lead()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert is_rank()
    assert not is_lead()
    monkeypatch.setenv("RANK", "0")
    assert is_lead()
