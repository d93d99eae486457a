"""`echo2 publish` against a coordinator and workers that only lay out what arrives."""

from __future__ import annotations

import asyncio
import json
import os
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import echo2
from echo2.verify import verify_run
from echo2.weights.safetensors_file import read_safetensors_folder

EXAMPLE = Path(__file__).parents[2] / "examples" / "publish_folder" / "fleet.toml"
DEADLINE_S = 240.0
NAMES = ("w-1", "w-2")
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def write_model(folder: Path, *, seed: int) -> Path:
    """Two files of tensors, their index, and two files beside them."""
    folder.mkdir(exist_ok=True)
    placed = {}
    for number in (1, 2):
        name, content = f"layers.{number}.weight", bytes([seed, number]) * 300_000
        entry = {"dtype": "BF16", "shape": [600, 500], "data_offsets": [0, len(content)]}
        header = json.dumps({name: entry}).encode()
        file = f"model-{number:05}-of-00002.safetensors"
        (folder / file).write_bytes(struct.pack("<Q", len(header)) + header + content)
        placed[name] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    (folder / "config.json").write_text(json.dumps({"seed": seed}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def read_model(folder: Path) -> Tensors:
    read = read_safetensors_folder(folder)
    return {name: (dtype, shape, bytes(view)) for name, dtype, shape, view in read}


async def start(*words: str | Path) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", *map(str, words)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


async def publish(*words: str | Path) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    process = await start("echo2.cli", "publish", *words)
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def a_worker(run_dir: Path, name: str) -> AsyncIterator[asyncio.subprocess.Process]:
    worker = await start("echo2_workers", EXAMPLE, "--run-dir", run_dir, "--name", name)
    try:
        yield worker
    finally:
        if worker.returncode is None:
            worker.terminate()
        try:
            async with asyncio.timeout(30.0):
                _, err = await worker.communicate()
        except TimeoutError:
            worker.kill()
            _, err = await worker.communicate()
        print(err.decode(), file=sys.stderr)


def run(coroutine: Any) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await coroutine

    asyncio.run(within_deadline())


def test_a_folder_spreads_to_the_fleet_and_the_next_one_replaces_it(tmp_path: Path) -> None:
    """Bit by bit, with its files; and a learner in the seat is left alone."""
    run_dir, model = tmp_path / "run", write_model(tmp_path / "model", seed=1)
    config = echo2.load_config(EXAMPLE)
    folders = [run_dir / "workers" / name / "model" for name in NAMES]

    async def published(seed: int) -> dict[str, Any]:
        write_model(model, seed=seed)
        wait = ("--workers", str(len(NAMES)), "--timeout", str(DEADLINE_S), "--json")
        code, out, err = await publish(model, "--run-dir", run_dir, *wait)
        assert code == 0, err
        for folder in folders:
            assert read_model(folder) == read_model(model)
            for file in ("config.json", "tokenizer.json"):
                assert (folder / file).read_bytes() == (model / file).read_bytes()
            files = {path.name for path in folder.iterdir()}
            assert files == {
                *("config.json", "tokenizer.json"),
                *("model.safetensors", "echo2_version.json"),
            }
        told: dict[str, Any] = json.loads(out)
        return told

    async def scenario() -> None:
        async with AsyncExitStack() as stack:
            coordinator = await stack.enter_async_context(
                echo2.Coordinator(config, run_dir=run_dir)
            )
            for name in NAMES:
                await stack.enter_async_context(a_worker(run_dir, name))
            first = await published(1)
            assert first["version"] == "1.0"
            assert sorted(worker["name"] for worker in first["workers"]) == list(NAMES)
            assert 0.0 < first["t_bcast_s"]["0.5"] <= first["t_bcast_s"]["1"]
            second = await published(2)
            assert second["version"] == "2.0"
            assert second["delta_bytes"] < second["num_bytes"] / 10
            await a_learner_is_left_alone(coordinator)

    async def a_learner_is_left_alone(coordinator: echo2.Coordinator) -> None:
        version = await coordinator.publish(model)
        code, out, err = await publish(model, "--run-dir", run_dir)
        assert (code, out) == (1, "")
        assert "is the learner of this run" in err
        assert coordinator.status()["versions"]["published"] == str(version) == "3.0"

    run(scenario())
    report = verify_run(run_dir)
    assert report.ok, report.to_text()
