"""An agent with the real `openai` client, played by real daemons, trained, and replayed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("openai")

from echo2.commands import learner as command
from echo2.errors import ConfigError
from echo2.types import LeaseId, Sampling, Task, Version
from echo2.verify import verify_run
from echo2.weights.safetensors_file import read_safetensors_folder
from echo2_learner.rollout_files import read_saved_batch, saved_steps
from echo2_workers.engines.transformers import TransformersEngine
from echo2_workers.environment import RolloutBuilder, load_environment
from echo2_workers.models import model_folder
from echo2_workers.playing import GroupJob, GroupPlayed, play_group
from echo2_workers.tokenizer import BOS, decode, encode

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIG = EXAMPLES / "openai_agent.toml"
SETTINGS = [
    *("learner.steps=4", "learner.groups_per_step=4", "dispatch.group_size=4"),
    *("workers.local=1", "rollouts.keep_steps=4", "trackers.tensorboard=true"),
]
EXACT = ("step", "loss", "grad_norm", "entropy", "mismatch_kl", "ess", "tokens", "reward_mean")
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `echo2 run examples/openai_agent.toml`, of four small steps."""
    folder = tmp_path_factory.mktemp("agent") / "run"
    ran = subprocess.run(
        [
            *(sys.executable, "-m", "echo2.cli", "run", str(CONFIG), "--run-dir", str(folder)),
            *(word for setting in SETTINGS for word in ("--set", setting)),
        ],
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_learner_trains_on_what_agents_did_in_three_turns(run_dir: Path) -> None:
    assert [line["step"] for line in lines(run_dir)] == [1, 2, 3, 4]
    report = verify_run(run_dir)
    assert report.ok, report.to_text()
    saved = [read_saved_batch(path) for path in saved_steps(run_dir / "rollouts").values()]
    assert [batch.step for batch in saved] == [1, 2, 3, 4]
    turns = [
        row.num_turns for batch in saved for group in batch.groups for row in group.trajectories
    ]
    assert len(turns) == 64
    assert max(turns) == 3
    assert set(turns) <= {1, 2, 3}
    assert any((run_dir / "tensorboard").iterdir())


def test_a_replay_of_the_run_computes_the_same_without_any_daemon(run_dir: Path) -> None:
    def replay(source: Path, *, to: Path | None = None, resume: bool = False) -> int:
        return command.main(CONFIG, to, SETTINGS, resume=resume, with_origin=True, replay=source)

    assert replay(run_dir) == 0
    target = run_dir.with_name("run-replay")
    trained, replayed = lines(run_dir), lines(target)
    for name in EXACT:
        assert [line[name] for line in replayed] == [line[name] for line in trained], name
    assert (target / "config.resolved.toml").exists()
    assert not (target / "origin.json").exists()
    with pytest.raises(ConfigError, match="give another --run-dir"):
        replay(run_dir, to=run_dir)
    with pytest.raises(ConfigError, match="leave --resume out"):
        replay(run_dir, resume=True)


class Direct:
    """What CheckedSum's agent does, played with tokens by hand."""

    name, version = "direct", "1"

    def num_tasks(self, split: str) -> int | None:
        return None

    def task(self, split: str, index: int) -> str:
        return "{}"

    async def rollout(self, task: Task, generate: Any) -> Any:
        numbers = json.loads(task.payload)
        question, wanted = f"{numbers['a']:02d}+{numbers['b']:02d}=", numbers["a"] + numbers["b"]
        rollout = RolloutBuilder([BOS, *encode(question)])
        for turn in range(3):
            completion = await generate(rollout.token_ids)
            rollout.add_completion(completion)
            said = decode(completion.token_ids)
            if said.isdecimal() and int(said) == wanted:
                return rollout.finish(1.0 - 0.25 * turn)
            if not said.isdecimal() or turn == 2:
                break
            rollout.add_observation(encode(f"\n{question}"))
        return rollout.finish(0.0)


async def test_the_agents_trajectories_are_those_of_the_same_turns_played_directly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    model = model_folder("builtin:addition-1m")
    engine = TransformersEngine(dtype="float32", device="cpu", sequences_max=16)
    await engine.start(model)
    await engine.pause("continue")
    tensors = {}
    for name, dtype, shape, content in read_safetensors_folder(model):
        assert dtype == "BF16"  # the upper half of a float32, in which order of sums matters less
        wide = (np.frombuffer(content, "<u2").astype("<u4") << 16).tobytes()
        tensors[name] = ("F32", shape, memoryview(wide))
    await engine.load(tensors, Version(1, 0))
    engine.resume()

    async def played(environment: Any, job: GroupJob) -> GroupPlayed:
        async with asyncio.timeout(TIMEOUT_S):
            return await play_group(environment, job, lambda r: engine.generate(r, lambda _: None))

    agent = load_environment("openai_agent:CheckedSum", {}, model)
    masks = []
    for seed, (a, b) in enumerate([(58, 67), (77, 88), (9, 4)]):
        job = GroupJob(
            lease=LeaseId("l"),
            task=Task(0, json.dumps({"a": a, "b": b})),
            group_size=4,
            sampling=Sampling(1.5, 1.0, 5),
            seed=1000 * seed,
        )
        found, expected = await played(agent, job), await played(Direct(), job)
        assert found.trajectories == expected.trajectories
        assert found.token_ids == expected.token_ids
        differ = np.frombuffer(found.logprobs, "<f4") - np.frombuffer(expected.logprobs, "<f4")
        assert np.abs(differ).max() < 1e-5  # whoever shares its batch rounds it otherwise
        assert found.loss_mask == expected.loss_mask
        masks.append(np.frombuffer(found.loss_mask, np.uint8).mean())
        turns = {header.num_turns for header in found.trajectories}
        assert seed == 2 or 3 in turns
    assert 0 < min(masks) < max(masks) < 1
    await engine.stop()
