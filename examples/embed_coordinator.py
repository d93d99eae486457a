"""A coordinator inside a program of yours, which is its own learner.

    python examples/embed_coordinator.py [--steps 4] [--run-dir runs/embedded]

The program submits prompts, takes batches of scored rollouts, and publishes weights; a worker
daemon, here a process on the same machine, samples with them and runs the environment of
`my_environment.py`. Settings are in `embed.toml`.

The learner is as small as one can be: it changes the weights at random a little, publishes
them, and keeps the change if the batch sampled by them earned more. Put yours in its place.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
from my_environment import NearSum

import echo2
from echo2.logs import setup_logging
from echo2.weights.safetensors_file import read_safetensors_folder
from echo2_workers.models import model_folder

HERE = Path(__file__).parent
CONFIG = HERE / "embed.toml"
Weights = dict[str, np.ndarray]


async def main(config: echo2.Config, *, steps: int, run_dir: Path) -> None:
    environment = NearSum(**config.environment.settings)
    model = model_folder(config.model.path)
    async with (
        echo2.Coordinator(config, run_dir=run_dir) as coordinator,
        a_worker(run_dir),
    ):
        prompts = steps * config.learner.groups_per_step
        await coordinator.submit([environment.task("train", index) for index in range(prompts)])
        await coordinator.end_of_tasks()
        learner = RandomSearch(read_weights(model))
        # The model's folder gives the run's assets: tokenizer and model configuration.
        await coordinator.publish(learner.tried, assets=model)
        while (batch := await coordinator.next_batch()) is not None:
            rewards = [t.reward for group in batch.groups for t in group.trajectories]
            kept = learner.learn(float(np.mean(rewards)))
            print(
                f"batch {batch.step}: {len(batch.groups)} groups, reward {np.mean(rewards):.3f}"
                f", {'kept' if kept else 'taken back'}",
                flush=True,
            )
            await coordinator.complete(batch)
            await coordinator.publish(learner.proposal())
    print(f"done: {steps} batches; records in {run_dir}")


class RandomSearch:
    """Keeps a change of the weights if the reward under it was not lower."""

    def __init__(self, weights: Weights) -> None:
        self.best = self.tried = weights
        self.best_reward = -np.inf
        self.rng = np.random.default_rng(0)

    def learn(self, reward: float) -> bool:
        """The batch that was sampled by `tried` earned this."""
        kept = reward >= self.best_reward
        if kept:
            self.best, self.best_reward = self.tried, reward
        return kept

    def proposal(self, scale: float = 1e-3) -> Weights:
        self.tried = {
            name: (array + scale * self.rng.standard_normal(array.shape)).astype(array.dtype)
            for name, array in self.best.items()
        }
        return self.tried


def read_weights(folder: Path) -> Weights:
    """The tensors of a safetensors folder in float32."""
    weights = {}
    for name, dtype, shape, content in read_safetensors_folder(folder):
        if dtype == "BF16":  # the upper half of a float32
            array = (np.frombuffer(content, "<u2").astype("<u4") << 16).view("<f4")
        else:
            array = np.frombuffer(content, "<f4")
        weights[name] = array.reshape(shape)
    return weights


@asynccontextmanager
async def a_worker(run_dir: Path) -> AsyncIterator[None]:
    """A worker daemon beside this program; elsewhere it would run on a machine with a GPU."""
    with (run_dir / "worker.log").open("wb") as log:
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "echo2.cli", "worker", str(CONFIG)),
            *("--run-dir", str(run_dir), "--name", "w-1"),
            stdout=log,
            stderr=log,
        )
    try:
        yield
    finally:
        if worker.returncode is None:
            worker.terminate()  # it drains, then ends
        await worker.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--run-dir", type=Path, default=Path("runs/embedded"))
    options = parser.parse_args()
    settings = echo2.load_config(CONFIG)
    setup_logging("warning", "console")
    asyncio.run(main(settings, steps=options.steps, run_dir=options.run_dir))
