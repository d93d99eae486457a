"""A learner at its start: its model, its checkpoints, its data, and where it finds its run."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import structlog
from bad_input import Bench, Told, a_free_port, case

from echo2.config import LearnerTable
from echo2.errors import LearnerError
from echo2_learner.checkpoint import CheckpointState, CheckpointStore
from echo2_learner.metrics import MetricsFile
from echo2_learner.parts import _disk_errors
from echo2_learner.policy import Policy
from echo2_learner.trainer import Trainer
from echo2_workers.models import model_folder

QUIET = ("[net]", "connect_timeout_s = 1", "[log]", 'level = "error"')


def started(bench: Bench, *lines: str, resume: bool = False) -> Told:
    """What `echo2 learner` says, with these lines more in its configuration."""
    words = ["--run-dir", bench.run_dir, "--no-origin", *(["--resume"] if resume else [])]
    return bench.command("learner", bench.config(*QUIET, *lines), *words)


@cache
def _shipped() -> tuple[Policy, Trainer]:
    policy = Policy.load(model_folder("builtin:addition-1m"), trained=True)
    return policy, Trainer(policy, LearnerTable(), temperature=1.0)


def a_checkpoint(bench: Bench, step: int = 4) -> Path:
    """Of the model that is shipped, and of the run "r"."""
    policy, trainer = _shipped()
    bench.run_dir.mkdir(exist_ok=True)
    store = CheckpointStore(bench.run_dir, keep=3)
    store.claim(1)
    state = CheckpointState(step=step, incarnation=1, run_id="r", starts=((1, 0),))
    store.save(state, policy, trainer)
    return store.folder / f"step-{step:08d}-i1"


# -------------------------------------------------------------------------- the model


@case("a model that is not shipped")
def _(bench: Bench) -> Told:
    return started(bench, "[model]", 'path = "builtin:qwen3-4b"')


@case("a model folder without config.json")
def _(bench: Bench) -> Told:
    (bench.folder / "model").mkdir()
    return started(bench, "[model]", f'path = "{bench.folder / "model"}"')


@case("a model folder without weights")
def _(bench: Bench) -> Told:
    folder = bench.folder / "model"
    shutil.copytree(model_folder("builtin:addition-1m"), folder)
    (folder / "model.safetensors").unlink()
    told = started(bench, "[model]", f'path = "{folder}"')
    head, colon, words = told.text.partition("language model: ")
    assert words
    return Told(told.by, f"{head}{colon}TRANSFORMERS' WORDS")


@case("a model folder that lacks a tensor")
def _(bench: Bench) -> Told:
    folder = bench.folder / "model"
    shutil.copytree(model_folder("builtin:addition-1m"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 5
    config["layer_types"] = ["full_attention"] * 5
    (folder / "config.json").write_text(json.dumps(config))
    return started(bench, "[model]", f'path = "{folder}"')


@case("a device that torch does not know")
def _(bench: Bench) -> Told:
    told = started(bench, "[learner]", 'device = "gpu"')
    before, bracket, after = told.text.partition(" (")
    assert bracket, "torch's own words stand in brackets"
    return Told(told.by, f"{before} (TORCH'S WORDS){after[after.index('); use') + 1 :]}")


# -------------------------------------------------------------------- checkpoints, records


@case("checkpoints of an earlier start, without --resume")
def _(bench: Bench) -> Told:
    a_checkpoint(bench)
    return started(bench)


@case("a checkpoint of another model")
def _(bench: Bench) -> Told:
    a_checkpoint(bench)
    told = started(bench, "[model]", 'path = "builtin:ascii-1m"', resume=True)
    assert (bench.run_dir / "checkpoints" / "step-00000004-i1" / "state.json").exists()
    return told


def _skipped(bench: Bench, damage: Callable[[Path], None]) -> Told:
    """The log of a learner that passes over a damaged checkpoint and takes the one before."""
    a_checkpoint(bench, step=2)
    folder = a_checkpoint(bench, step=4)
    damage(folder)
    with structlog.testing.capture_logs() as logs:
        newest = CheckpointStore(bench.run_dir, keep=3).newest()
    assert newest is not None
    assert newest.state.step == 2
    [line] = [line for line in logs if line["event"] == "checkpoint_skipped"]
    said = f"checkpoint_skipped folder={line['folder']} reason={line['reason']}"
    return bench.told("log, and the one before is used", said)


@case("a checkpoint that lacks a file")
def _(bench: Bench) -> Told:
    return _skipped(bench, lambda folder: (folder / "optimizer.safetensors").unlink())


@case("a checkpoint with a torn file")
def _(bench: Bench) -> Told:
    def damage(folder: Path) -> None:
        os.truncate(folder / "policy.safetensors", 1000)

    told = _skipped(bench, damage)
    head, has, tail = told.text.partition(" and state.json says ")
    assert has
    assert int(tail) > 1000
    return Told(told.by, f"{head}{has}N")


@case("a checkpoint with one wrong bit")
def _(bench: Bench) -> Told:
    def damage(folder: Path) -> None:
        content = bytearray((folder / "policy.safetensors").read_bytes())
        content[-1] ^= 1
        (folder / "policy.safetensors").write_bytes(content)

    return _skipped(bench, damage)


@case("a checkpoint of a newer format")
def _(bench: Bench) -> Told:
    return _skipped(bench, lambda folder: (folder / "state.json").write_text('{"format": 99}'))


@case("a full disk under metrics.jsonl")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "metrics.jsonl").symlink_to("/dev/full")

    def write() -> None:
        with _disk_errors("the line of step 3", bench.run_dir):
            MetricsFile(bench.run_dir / "metrics.jsonl").append({"step": 3})

    return bench.raised("exit 1", LearnerError, write)


# --------------------------------------------------------------------------- the run


@case("a learner whose coordinator was not started")
def _(bench: Bench) -> Told:
    return started(bench)


@case("a learner whose coordinator.json is torn")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "coordinator.json").write_text('{"control": "tcp://127')
    return started(bench)


@case("a learner whose coordinator does not answer")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    endpoint = f"tcp://127.0.0.1:{a_free_port()}"
    record = {"control": endpoint, "rollouts": endpoint, "public_key": "k" * 40}
    (bench.run_dir / "coordinator.json").write_text(json.dumps(record))
    return started(bench)


@case("replay of a run that saved no rollouts")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    return bench.command("learner", bench.config(*QUIET), "--replay", bench.run_dir)


@case("replay into the run itself")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    words = ("--replay", bench.run_dir, "--run-dir", bench.run_dir)
    return bench.command("learner", bench.config(*QUIET), *words)


@case("replay with --resume")
def _(bench: Bench) -> Told:
    words = ("--replay", bench.run_dir, "--resume")
    return bench.command("learner", bench.config(*QUIET), *words)


# ----------------------------------------------------------------------------- data


def problems(bench: Bench, *lines: str) -> Told:
    """A learner with the environment jsonl, and a file of these lines."""
    path = bench.folder / "problems.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return _with_jsonl(bench, path)


def _with_jsonl(bench: Bench, path: Path | str) -> Told:
    lines = ("[model]", 'path = "builtin:ascii-1m"', "[environment]", 'name = "jsonl"')
    return started(bench, *lines, f'settings = {{ path = "{path}", score = "exact" }}')


@case("a file of problems that is not there")
def _(bench: Bench) -> Told:
    return _with_jsonl(bench, "problems.jsonl")


@case("a prompt that is not text")
def _(bench: Bench) -> Told:
    return problems(bench, '{"prompt": "1 + 1", "answer": "2"}', '{"prompt": 3, "answer": "3"}')


@case("a prompt that is empty")
def _(bench: Bench) -> Told:
    return problems(bench, '{"prompt": "", "answer": "3"}')


@case("a line of problems that is no JSON")
def _(bench: Bench) -> Told:
    return problems(bench, "{'prompt': '1 + 1'}")


@case("a file of problems that is empty")
def _(bench: Bench) -> Told:
    return problems(bench)


@case("an environment that is not known")
def _(bench: Bench) -> Told:
    return started(bench, "[environment]", 'name = "countdown"')


@case("an environment's module that is not installed")
def _(bench: Bench) -> Told:
    return started(bench, "[environment]", 'name = "countdown_game.core:Countdown"')


@case("an environment's class that its module does not have")
def _(bench: Bench) -> Told:
    (bench.folder / "my_sums.py").write_text("class Sums:\n    pass\n")
    return started(bench, "[environment]", 'name = "my_sums:Countdown"')


@case("an environment without a version")
def _(bench: Bench) -> Told:
    (bench.folder / "my_plain_sums.py").write_text("class Sums:\n    pass\n")
    return started(bench, "[environment]", 'name = "my_plain_sums:Sums"')


@case("an environment without a rollout")
def _(bench: Bench) -> Told:
    text = 'class Sums:\n    name = "sums"\n    version = "1"\n'
    (bench.folder / "my_half_sums.py").write_text(text)
    return started(bench, "[environment]", 'name = "my_half_sums:Sums"')


@case("a setting that the environment does not take")
def _(bench: Bench) -> Told:
    return started(bench, "[environment]", 'name = "addition"', "settings = { digitz = 3 }")


@case("audits of an environment of one's own that does not say that it replays")
def _(bench: Bench) -> Told:
    (bench.folder / "sums.py").write_text(
        "from echo2_workers.environments.addition import Addition\n"
        "class Sums(Addition):\n    name, version, replays = 'sums', '1', False\n"
    )
    lines = ("[environment]", 'name = "sums:Sums"', "[audit]", "share = 0.1", 'workers = ["w-1"]')
    return started(bench, *lines)
