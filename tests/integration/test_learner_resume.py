"""A learner process that is killed with SIGKILL goes on bit by bit.

The session is the one in memory of the unit tests (it samples with what was published and
decides everything by seed and step), the process, its files and its death are real. This
file is also the program of that process.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402  after the check for torch

from echo2_learner import checkpoint  # noqa: E402
from echo2_learner.main import run  # noqa: E402
from echo2_learner.parts import build  # noqa: E402
from echo2_learner.policy import Policy  # noqa: E402
from echo2_learner.stop import StopSignal  # noqa: E402
from echo2_workers.models import model_folder  # noqa: E402

FAKE = Path(__file__).parents[1] / "unit" / "learner" / "fake_session.py"
STEPS = 8
TIMEOUT_S = 240


def load_fake() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_session", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_session"] = module
    spec.loader.exec_module(module)
    return module


def learn(run_dir: Path, *, incarnation: int, dies_at: str = "") -> int:
    """Run a learner; `dies_at` is "CALL:STEP", or "state.json:STEP" for the moment in which
    the last file of a checkpoint is about to be written."""
    torch.set_num_threads(1)
    name, _, step = dies_at.partition(":")

    def die(called: str, called_step: int) -> None:
        if dies_at and (called, called_step) == (name, int(step)):
            os.kill(os.getpid(), signal.SIGKILL)

    write_json = checkpoint._write_json

    def dying_write(path: Path, content: dict[str, Any]) -> None:
        if path.name == "state.json":
            die("state.json", content["state"]["step"])
        write_json(path, content)

    checkpoint._write_json = dying_write
    fake = load_fake()
    model = model_folder("builtin:addition-1m")
    config = fake.make_config(
        model,
        learner={"steps": STEPS, "updates_per_step": 2, "schedule": "linear", "threads": 1},
        dispatch={"group_size": 2},
    )
    run_dir.mkdir(exist_ok=True)
    origin = {"endpoint": "tcp://127.0.0.1:5555", "public_key": "k" * 40, "pid": 1}
    (run_dir / "origin.json").write_text(json.dumps(origin))
    with StopSignal() as stop:
        parts = build(config, run_dir, resume=incarnation > 1)
        session = fake.FakeSession(
            config, run_dir, Policy.load(model), incarnation=incarnation, on_call=die
        )
        code = run(parts, session, stop, again="")
    checkpoint._write_json = write_json
    return code


def learner_process(run_dir: Path, incarnation: int, dies_at: str) -> int:
    ended = subprocess.run(
        [sys.executable, __file__, str(run_dir), str(incarnation), dies_at],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=TIMEOUT_S,
        check=False,
    )
    return ended.returncode


def last_checkpoint(run_dir: Path) -> dict[str, Any]:
    found = checkpoint.CheckpointStore(run_dir, keep=2).newest()
    assert found is not None
    assert found.state.step == STEPS
    return {
        f"{file}/{name}": tensor
        for file in (checkpoint.POLICY, checkpoint.OPTIMIZER, checkpoint.RNG)
        for name, tensor in load_file(found.folder / file).items()
    }


def test_killed_three_times_the_learner_ends_with_the_same_bits(tmp_path: Path) -> None:
    straight, broken = tmp_path / "straight", tmp_path / "broken"
    assert learn(straight, incarnation=1) == 0
    deaths = ["complete:3", "state.json:4", "publish:7"]
    for incarnation, dies_at in enumerate(deaths, 1):
        assert learner_process(broken, incarnation, dies_at) == -signal.SIGKILL
    assert learner_process(broken, len(deaths) + 1, "") == 0
    expected, actual = last_checkpoint(straight), last_checkpoint(broken)
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name
    lines = [json.loads(line) for line in (broken / "metrics.jsonl").read_text().splitlines()]
    assert [(line["incarnation"], line["step"]) for line in lines] == [
        *((1, step) for step in (1, 2, 3)),  # killed in step 4; the checkpoint is of step 2
        *((2, step) for step in (3, 4)),  # killed while it wrote the checkpoint of step 4
        *((3, step) for step in (3, 4, 5, 6)),
        *((4, step) for step in (7, 8)),
    ]
    assert not list((broken / "checkpoints").glob(".aside-*"))
    straight_file, broken_file = (
        load_file(folder / "final" / "model.safetensors") for folder in (straight, broken)
    )
    assert all(torch.equal(straight_file[name], broken_file[name]) for name in straight_file)


if __name__ == "__main__":
    raise SystemExit(learn(Path(sys.argv[1]), incarnation=int(sys.argv[2]), dies_at=sys.argv[3]))
