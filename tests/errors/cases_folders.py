"""Run folders: where one cannot be, whose it is, and a disk that takes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from bad_input import Bench, Told, a_place_without_rights, case

from echo2.commands.run_folder import RunFolder
from echo2.errors import Echo2Error
from echo2.ledger.events_log import EventsLog
from echo2.service import _only_coordinator_of

NULL = ("[environment]", 'name = "null"', "[worker]", 'engine = "null"')


def a_dead_pid() -> int:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return ended.pid


def a_full_disk(path: Path) -> None:
    """Whatever is written to `path` finds no space."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to("/dev/full")


@case("a run folder where a file is (echo2 coordinator)")
def _(bench: Bench) -> Told:
    bench.run_dir.touch()
    return bench.command("coordinator", bench.config(*NULL), "--run-dir", bench.run_dir)


@case("a run folder where a file is (echo2 run)")
def _(bench: Bench) -> Told:
    bench.run_dir.touch()
    return bench.command("run", bench.config(*NULL), "--run-dir", bench.run_dir)


@case("a run folder where a file is (echo2 worker)")
def _(bench: Bench) -> Told:
    bench.run_dir.touch()
    return bench.command("worker", bench.config(*NULL), "--run-dir", bench.run_dir)


@case("a run folder where a file is (echo2 origin)")
def _(bench: Bench) -> Told:
    bench.run_dir.touch()
    return bench.command("origin", bench.config(), "--run-dir", bench.run_dir)


@case("a run folder that this user may not make")
def _(bench: Bench) -> Told:
    bench.command("origin", bench.folder)  # what is imported, is imported with all rights
    with a_place_without_rights(bench) as folder:
        return bench.command("origin", folder / "run.toml", "--run-dir", folder / "run")


@case("a run folder that holds a run")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "events.jsonl").touch()
    return bench.command("run", bench.config(*NULL), "--run-dir", bench.run_dir)


@case("--resume of a folder without a run")
def _(bench: Bench) -> Told:
    return bench.command("run", bench.config(*NULL), "--run-dir", bench.run_dir, "--resume")


@case("a run folder in which another echo2 run is at work")
def _(bench: Bench) -> Told:
    folder = RunFolder(bench.run_dir)
    folder.make()
    folder.resolved_config.touch()
    with folder.locked():
        told = bench.command("run", bench.config(*NULL), "--run-dir", bench.run_dir, "--resume")
    assert folder.resolved_config.read_text() == ""
    return told


@case("a run folder that has a coordinator")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    resolved = bench.run_dir / "config.resolved.toml"
    resolved.write_text("# of the one that is at work\n")
    with _only_coordinator_of(bench.run_dir):
        told = bench.command("coordinator", bench.config(*NULL), "--run-dir", bench.run_dir)
    assert resolved.read_text() == "# of the one that is at work\n", "it was overwritten"
    return told


@case("two workers of one name")
def _(bench: Bench) -> Told:
    from echo2.config import load_config
    from echo2_workers.identity import claim_identity

    config = bench.config(*NULL)
    identity = claim_identity(load_config(config), bench.run_dir, "w-1")
    try:
        return bench.command("worker", config, "--run-dir", bench.run_dir, "--name", "w-1")
    finally:
        identity.release()


@case("a worker with the name of another part")
def _(bench: Bench) -> Told:
    config = bench.config(*NULL)
    return bench.command("worker", config, "--run-dir", bench.run_dir, "--name", "learner-2")


@case("a full disk at the start")
def _(bench: Bench) -> Told:
    a_full_disk(bench.run_dir / f"config.resolved.{os.getpid()}")
    resolved = bench.run_dir / "config.resolved.toml"
    resolved.write_text("# of the run before\n")
    told = bench.command("coordinator", bench.config(*NULL), "--run-dir", bench.run_dir)
    assert resolved.read_text() == "# of the run before\n"
    return told


@case("a full disk under events.jsonl")
def _(bench: Bench) -> Told:
    a_full_disk(bench.run_dir / "events.jsonl")
    log = EventsLog(bench.run_dir / "events.jsonl")
    log.open()
    log.write("run_started", {})
    try:
        return bench.raised("exit 1", Echo2Error, log.flush)
    finally:
        log.close()


@case("a coordinator.json that is not JSON (echo2 status)")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "coordinator.json").write_text('{"run_id": "r')
    return bench.command("status", "--run-dir", bench.run_dir)


@case("a coordinator.json that is not JSON (echo2 coordinator)")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "coordinator.json").write_text('{"run_id": "r')
    told = bench.command("coordinator", bench.config(*NULL), "--run-dir", bench.run_dir)
    assert (bench.run_dir / "coordinator.json").read_text() == '{"run_id": "r'
    return told


@case("status of a folder without a run")
def _(bench: Bench) -> Told:
    return bench.command("status", "--run-dir", bench.folder)


@case("status of a run whose coordinator has ended")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    record = {"pid": a_dead_pid(), "http": "http://127.0.0.1:1"}
    (bench.run_dir / "coordinator.json").write_text(json.dumps(record))
    return bench.command("status", "--run-dir", bench.run_dir)


@case("status of a run without HTTP")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    record = {"pid": os.getpid(), "http": ""}
    (bench.run_dir / "coordinator.json").write_text(json.dumps(record))
    return bench.command("status", "--run-dir", bench.run_dir)


@case("status of nothing")
def _(bench: Bench) -> Told:
    return bench.command("status")


@case("verify of a folder that is not there")
def _(bench: Bench) -> Told:
    return bench.command("verify", bench.run_dir)


@case("verify of a folder that is no run")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    return bench.command("verify", bench.run_dir)


@case("rollouts of a run that saved none")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    return bench.command("rollouts", bench.run_dir)


@case("rollouts of a step that is not kept")
def _(bench: Bench) -> Told:
    folder = bench.run_dir / "rollouts"
    folder.mkdir(parents=True)
    for step in (3, 4, 5, 9):
        (folder / f"step-{step:08d}.safetensors").touch()
    return bench.command("rollouts", bench.run_dir, "--step", "7")


@case("rollouts of a torn file")
def _(bench: Bench) -> Told:
    folder = bench.run_dir / "rollouts"
    folder.mkdir(parents=True)
    (folder / "step-00000003.safetensors").write_bytes(b"\x10")
    return bench.command("rollouts", bench.run_dir)


@case("setup of what is nothing to set up")
def _(bench: Bench) -> Told:
    return bench.command("setup", "cuda")


@case("setup into a folder that holds something else")
def _(bench: Bench) -> Told:
    bench.run_dir.mkdir()
    (bench.run_dir / "thesis.tex").touch()
    return bench.command("setup", "vllm-cpu", "--dir", bench.run_dir)
