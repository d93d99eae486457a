"""The processes of `echo2 run`: watched, started again, ended in order, none left over.

The parts here are small programs that behave like the real ones towards their parent; the
real ones run in test_run.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from echo2.commands import local_run
from echo2.commands.local_run import LocalRun
from echo2.commands.origin_process import answers, end_origin, ensure_origin
from echo2.commands.processes import LocalProcess
from echo2.commands.run_folder import RunFolder, is_alive
from echo2.commands.run_view import RunView
from echo2.config import config_from_mapping
from echo2.errors import Echo2Error
from echo2.net.child import PARENT_VARIABLE

PART = """
import json, os, pathlib, signal, sys
part, folder = sys.argv[1], pathlib.Path(sys.argv[2])
name = sys.argv[sys.argv.index("--name") + 1] if "--name" in sys.argv else part
lives = folder / f"{name}.lives"
lives.open("a").write(f"{os.getpid()} {' '.join(sys.argv[3:])}\\n")
life = len(lives.read_text().splitlines())
def record(event):
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\\n")
def order(number, frame=None):
    with (folder / "order").open("a") as file:
        file.write(f"{name} {signal.Signals(number).name}\\n")
    if part == "coordinator":
        record({"event": "run_finished", "finished": False, "reason": "stopped"})
        (folder / "coordinator.done").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, order)
signal.signal(signal.SIGINT, order)
def serve(**more):
    aside = folder / f"{part}.aside"
    aside.write_text(json.dumps({"pid": os.getpid(), "endpoint": "tcp://127.0.0.1:5", **more}))
    aside.rename(folder / f"{part}.json")
def until(path):
    import time
    while not (folder / path).exists():
        time.sleep(0.01)
print(f"{name} lives for the {life}. time", flush=True)
"""

FAITHFUL = {
    "coordinator": """
serve()
until("learner.done")
record({"event": "group_ended", "group_id": "g-1", "end": "trained"})
record({"event": "run_finished", "finished": True, "reason": "all steps done"})
(folder / "coordinator.done").touch()
""",
    "origin": "serve()\nsignal.pause()\n",
    "learner": """
until("origin.json")
(folder / "metrics.jsonl").open("a").write(
    json.dumps({"step": 3, "incarnation": 1, "reward_mean": 0.5}) + "\\n")
(folder / "learner.done").touch()
""",
    "worker": 'until("coordinator.done")\n',
}
PAUSING = {**FAITHFUL, "learner": "(folder / 'learner.up').touch()\nsignal.pause()\n"}


class Heard:
    """A display that keeps what was said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.view: RunView | None = None

    def update(self, view: RunView) -> None:
        self.view = view

    def say(self, text: str) -> None:
        self.said.append(text)

    def close(self) -> None:
        pass


class Outcome:
    def __init__(self, folder: Path, code: int, run: LocalRun, heard: Heard) -> None:
        self.code = code
        self.said = "\n".join(heard.said)
        self.summary = "\n".join(run.summary("run.toml"))
        lives = {path.stem: path.read_text().splitlines() for path in folder.glob("*.lives")}
        self.lives = {name: len(lines) for name, lines in lives.items()}
        self.arguments = {name: lines[-1] for name, lines in lives.items()}
        order = folder / "order"
        self.order = order.read_text().splitlines() if order.exists() else []
        self.alive = [
            pid
            for lines in lives.values()
            for line in lines
            if is_alive(pid := int(line.split()[0]))
        ]


Run = Callable[..., Outcome]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs parts to the end; `meanwhile` is called in a thread with the run folder."""

    def call(
        parts: dict[str, str],
        meanwhile: Callable[[Path], None] = lambda folder: None,
        *,
        restarts_max: int = 2,
    ) -> Outcome:
        for part, code in parts.items():
            (tmp_path / f"{part}.py").write_text(PART + code)

        def command_line(command: str, *arguments: str) -> list[str]:
            return [
                sys.executable,
                str(tmp_path / f"{command}.py"),
                command,
                str(tmp_path),
                *arguments,
            ]

        monkeypatch.setattr(local_run, "command_line", command_line)
        config = config_from_mapping(
            {
                "run": {"restarts_max": restarts_max, "learner_timeout_s": 20.0},
                "learner": {"steps": 3},
                "worker": {"drain_timeout_s": 5.0},
                "http": {"enabled": False},
            }
        )
        folder, heard = RunFolder(tmp_path), Heard()
        folder.prepare(config)
        local = LocalRun(config, folder, ["w-1", "w-2"], heard, resume=False, import_path=tmp_path)

        async def both() -> int:
            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                group.create_task(asyncio.to_thread(meanwhile, tmp_path))
                return await local.run()
            raise AssertionError

        return Outcome(tmp_path, asyncio.run(both()), local, heard)

    return call


def eventually(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited 30 s in vain until {what}"
        time.sleep(0.01)


def interrupt(folder: Path) -> None:
    eventually((folder / "learner.up").exists, "the learner is up")
    os.kill(os.getpid(), signal.SIGINT)


def test_a_run_that_finishes_ends_with_0_and_leaves_nothing(run: Run) -> None:
    outcome = run(FAITHFUL)
    assert outcome.code == 0
    assert outcome.lives == dict.fromkeys(["coordinator", "origin", "learner", "w-1", "w-2"], 1)
    assert outcome.order == ["origin SIGTERM"]
    assert outcome.alive == []
    assert "finished: 3 of 3 steps" in outcome.summary
    assert "groups: 1 trained" in outcome.summary
    assert "echo2 verify" in outcome.summary
    assert "--resume" not in outcome.summary


def test_a_learner_and_a_worker_that_die_are_started_again_the_learner_to_resume(run: Run) -> None:
    dies = "if life == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\n"
    dies += '(folder / f"{name}.second").touch()\n'
    both = 'until("w-1.second")\nuntil("w-2.second")\n'
    once = {"learner": dies + both + FAITHFUL["learner"], "worker": dies + FAITHFUL["worker"]}
    outcome = run({**FAITHFUL, **once})
    assert outcome.code == 0
    assert outcome.lives == {"coordinator": 1, "origin": 1, "learner": 2, "w-1": 2, "w-2": 2}
    assert outcome.arguments["learner"].endswith("--resume")
    assert "learner ended with signal SIGKILL; started from its newest checkpoint, 1 of 2" in (
        outcome.said
    )
    assert "learner lives for the 1. time" in outcome.said


def test_an_origin_that_dies_comes_back(run: Run) -> None:
    dies = """
serve()
if life == 1:
    until("w-2.lives")
    sys.exit(1)
(folder / "origin.second").touch()
signal.pause()
"""
    waits = 'until("origin.second")\n' + FAITHFUL["learner"]
    outcome = run({**FAITHFUL, "origin": dies, "learner": waits})
    assert outcome.code == 0
    assert outcome.lives == {"coordinator": 1, "origin": 2, "learner": 1, "w-1": 1, "w-2": 1}


def test_a_learner_that_keeps_dying_fails_the_run_with_its_last_lines(run: Run) -> None:
    dies = "print('RuntimeError: no memory', flush=True)\nsys.exit(1)\n"
    outcome = run({**FAITHFUL, "learner": dies}, restarts_max=1)
    assert outcome.code == 1
    assert outcome.lives["learner"] == 2
    assert "failed: learner ended with exit code 1 and was started again 1 times" in outcome.summary
    assert "RuntimeError: no memory" in outcome.summary
    assert outcome.alive == []


def test_a_coordinator_that_does_not_come_up_is_told_at_once(run: Run) -> None:
    outcome = run({**FAITHFUL, "coordinator": "print('port taken', flush=True)\nsys.exit(1)\n"})
    assert outcome.code == 1
    assert outcome.lives == {"coordinator": 1}
    assert "coordinator ended while it started" in outcome.summary
    assert "port taken" in outcome.summary


def test_a_coordinator_that_is_killed_is_started_again_and_the_run_goes_on(run: Run) -> None:
    dies = "until('learner.up')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    again = "serve()\nif life == 1:\n    " + dies.replace("\n", "\n    ")
    again += "\n(folder / 'coordinator.second').touch()\n" + FAITHFUL["coordinator"]
    waits = "(folder / 'learner.up').touch()\nuntil('coordinator.second')\n"
    outcome = run({**FAITHFUL, "coordinator": again, "learner": waits + FAITHFUL["learner"]})
    assert outcome.code == 0
    assert outcome.lives == {"coordinator": 2, "origin": 1, "learner": 1, "w-1": 1, "w-2": 1}
    assert "coordinator ended with signal SIGKILL; started from its ledger, 1 of 2" in outcome.said


def test_a_coordinator_that_keeps_being_killed_ends_the_run(run: Run) -> None:
    dies = "serve()\nuntil('learner.up')\nos.kill(os.getpid(), signal.SIGKILL)\n"
    outcome = run({**PAUSING, "coordinator": dies})
    assert outcome.code == 1
    assert outcome.lives["coordinator"] == 3
    assert "failed: coordinator ended with signal SIGKILL and was started again 2 times" in (
        outcome.summary
    )
    assert outcome.alive == []


def test_a_coordinator_that_fails_ends_the_run(run: Run) -> None:
    fails = "serve()\nuntil('learner.up')\nsys.exit(1)\n"
    outcome = run({**PAUSING, "coordinator": fails})
    assert outcome.code == 1
    assert outcome.lives["coordinator"] == 1
    assert "failed: the coordinator ended with exit code 1" in outcome.summary
    assert outcome.alive == []


def test_a_fenced_learner_is_not_started_again(run: Run) -> None:
    def another_learner_finishes(folder: Path) -> None:
        lives = folder / "learner.lives"
        eventually(lambda: lives.exists() and bool(lives.read_text()), "the learner began")
        pid = int(lives.read_text().split()[0])
        eventually(lambda: not is_alive(pid), "the learner was fenced")
        (folder / "learner.done").touch()

    outcome = run({**FAITHFUL, "learner": "sys.exit(3)\n"}, another_learner_finishes)
    assert outcome.code == 0
    assert outcome.lives["learner"] == 1
    assert "a newer learner took over" in outcome.said


def test_a_run_without_any_worker_left_fails_at_once(run: Run) -> None:
    outcome = run({**PAUSING, "worker": "until('learner.up')\nsys.exit(1)\n"}, restarts_max=0)
    assert outcome.code == 1
    assert "no worker is left" in outcome.summary
    assert outcome.alive == []


def test_an_interrupt_ends_the_learner_first_and_says_how_to_go_on(run: Run) -> None:
    outcome = run(PAUSING, interrupt)
    assert outcome.code == 130
    assert outcome.order == ["learner SIGINT", "coordinator SIGTERM", "origin SIGTERM"]
    assert "asked the learner to checkpoint and close" in outcome.said
    assert "not finished (stopped)" in outcome.summary
    assert "echo2 run run.toml --run-dir" in outcome.summary
    assert "--resume" in outcome.summary
    assert outcome.alive == []


def test_a_second_interrupt_kills(run: Run) -> None:
    deaf = """
signal.signal(signal.SIGINT, lambda *_: (folder / "learner.deaf").touch())
(folder / "learner.up").touch()
while True:
    signal.pause()
"""

    def twice(folder: Path) -> None:
        interrupt(folder)
        eventually((folder / "learner.deaf").exists, "the learner was asked to close")
        os.kill(os.getpid(), signal.SIGINT)

    outcome = run({**PAUSING, "learner": deaf}, twice)
    assert outcome.code == 130
    assert outcome.alive == []


CHILD = """
import asyncio, pathlib, sys
from echo2.commands.processes import LocalProcess, command_line
async def parent():
    folder = pathlib.Path(sys.argv[1])
    command = command_line("origin", str(folder / "run.toml"), "--run-dir", str(folder))
    child = LocalProcess("origin", command, folder / "origin.log")
    await child.start()
    print(child.pid, flush=True)
    await child.wait()
asyncio.run(parent())
"""


def test_children_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    parent = subprocess.Popen(
        [sys.executable, "-c", CHILD, tmp_path], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    eventually((tmp_path / "origin.json").exists, "the child is up")
    assert is_alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    eventually(lambda: not is_alive(pid), f"child {pid} ended with its parent")


def test_a_child_whose_parent_died_before_it_began_ends_too(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "echo2.cli", "--version"],
        env={**os.environ, PARENT_VARIABLE: "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 1
    assert "ended before its child began" in ran.stderr


def test_a_log_is_appended_and_only_the_last_life_is_quoted(tmp_path: Path) -> None:
    async def twice() -> list[str]:
        process = LocalProcess(
            "child",
            [sys.executable, "-c", "import os; print('life', os.getpid())"],
            tmp_path / "log",
        )
        for _ in range(2):
            await process.start()
            assert await process.wait() == 0
        return [f"life {process.pid}", *process.last_lines()]

    expected, *quoted = asyncio.run(twice())
    assert quoted == [expected]
    assert len((tmp_path / "log").read_text().splitlines()) == 2


def test_two_runs_cannot_share_a_folder(tmp_path: Path) -> None:
    code = (
        "import pathlib, sys\nfrom echo2.commands.run_folder import RunFolder\n"
        "with RunFolder(pathlib.Path(sys.argv[1])).locked(): pass"
    )
    with RunFolder(tmp_path).locked():
        ran = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=60
        )
    assert f"is in use by another echo2 run (pid {os.getpid()})" in ran.stderr
    assert json.dumps(str(tmp_path))[1:-1] in ran.stderr


def test_an_origin_is_started_once_answers_and_outlives_who_started_it(tmp_path: Path) -> None:
    (tmp_path / "run.toml").touch()
    folder = RunFolder(tmp_path)
    code = (
        "import pathlib, sys\nfrom echo2.commands.origin_process import ensure_origin\n"
        "from echo2.commands.run_folder import RunFolder\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "arguments = [str(folder / 'run.toml'), '--run-dir', str(folder)]\n"
        "ensure_origin(RunFolder(folder), arguments, timeout_s=60)\n"
    )
    pids = []
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code, tmp_path], check=True, timeout=60)
        record = folder.origin()
        assert record is not None
        pids.append(record["pid"])
        assert answers(record["endpoint"])
    assert pids[0] == pids[1]
    end_origin(folder)
    eventually(lambda: not is_alive(pids[0]), "the origin ended")
    end_origin(folder)  # there is none any more: nothing to do
    assert not answers(record["endpoint"])


def test_an_origin_that_does_not_come_up_is_told_with_its_last_lines(tmp_path: Path) -> None:
    arguments = [str(tmp_path / "none.toml"), "--run-dir", str(tmp_path)]
    with pytest.raises(Echo2Error, match=r"did not come up .*exit code 2(.|\n)*none.toml does not"):
        ensure_origin(RunFolder(tmp_path), arguments, timeout_s=60)
