"""A sharded learner against one process: the same losses, a share of the memory each.

    python benchmarks/learner_ranks.py [--ranks 1 2 4] [--steps 20] [--model builtin:addition-1m]

Each number of ranks trains the same batches (random prompts and completions, rewards that
follow from them) from the same weights, in processes of its own. Prints one JSON object: the
machine, the parameters, and for each number of ranks how far its losses are from those of one
process at most, seconds of a step (median), and per rank the bytes held in weights, optimizer
and scratch, each with the share of what one process holds. On one machine's CPU the ranks share
its cores, so the seconds say what the coordination costs, not how it scales.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any


def train(options: argparse.Namespace) -> int:
    """One rank: train, and leave what was measured in OUT/RANK.json."""
    import torch

    from echo2.config import config_from_mapping
    from echo2_learner.rank_parts import build_rank_parts
    from echo2_learner.ranks import join
    from echo2_learner.shards import local

    torch.set_num_threads(options.threads)
    config = config_from_mapping(
        {
            "model": {"path": options.model},
            "learner": {
                "steps": options.steps,
                "learning_rate": 1e-4,
                "micro_batch_tokens": options.micro_batch_tokens,
                "threads": options.threads,
            },
        }
    )
    losses, seconds = [], []
    with join(config.learner) as ranks:
        parts = build_rank_parts(config, options.out / "run", resume=False, ranks=ranks)
        for step in range(options.steps):
            batch = make_batch(options, step, parts.policy.vocab_size)
            began = time.perf_counter()
            losses.append(parts.trainer.step(batch).loss)
            seconds.append(time.perf_counter() - began)
        held = {
            "weights": parts.policy.tensors(),
            "optimizer": parts.trainer.optimizer_tensors(),
            "scratch": parts.publisher.scratch.tensors(),
        }
        measured = {
            "losses": losses,
            "step_s": statistics.median(seconds[1:]),
            "bytes": {
                name: sum(local(tensor).nbytes for tensor in tensors.values())
                for name, tensors in held.items()
            },
        }
        (options.out / f"{ranks.rank}.json").write_text(json.dumps(measured))
        if not ranks.is_lead:
            ranks.next_order()  # the end
    return 0


def make_batch(options: argparse.Namespace, step: int, vocab_size: int) -> Any:
    """Groups of random tokens; the reward is the parity of their sum."""
    import numpy as np

    from echo2.types import Version
    from echo2_learner.batch import TrainingBatch, Trajectory

    rng = np.random.default_rng([11, step])
    groups = []
    for index in range(options.groups):
        prompt = rng.integers(3, vocab_size, options.prompt)
        group = []
        for _ in range(options.group_size):
            completion = rng.integers(3, vocab_size, rng.integers(2, options.completion + 1))
            tokens = np.concatenate([prompt, completion]).astype(np.int32)
            sampled = np.arange(len(tokens)) >= options.prompt
            reward = float(completion.sum() % 2)
            group.append(
                Trajectory(
                    group=f"g{index}",
                    worker="w",
                    token_ids=tokens,
                    logprobs=np.where(sampled, -np.log(vocab_size), 0.0).astype(np.float32),
                    sampled=sampled,
                    loss_mask=sampled,
                    versions=np.where(sampled, 0, -1).astype(np.int32),
                    reward=reward,
                    advantage=2 * reward - 1,
                )
            )
        groups.append(tuple(group))
    return TrainingBatch(step, (Version(1, step),), tuple(groups))


def measure(options: argparse.Namespace, num_ranks: int, out: Path) -> list[dict[str, Any]]:
    """What each rank left."""
    from echo2.commands.learner_ranks import run_ranks

    command = [sys.executable, __file__, "--out", str(out), *sys.argv[1:]]
    out.mkdir()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    if num_ranks == 1:
        code = subprocess.run(command, check=False).returncode
    else:
        code = run_ranks(command, num_ranks=num_ranks, logs=out)
    if code:
        raise SystemExit(f"{num_ranks} ranks ended with code {code}; see {out}")
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--model", default="builtin:addition-1m")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=8)
    parser.add_argument("--completion", type=int, default=8)
    parser.add_argument("--micro-batch-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        return train(options)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        single = measure(options, 1, Path(folder) / "1")[0]
        for num_ranks in options.ranks:
            found = [single]
            if num_ranks > 1:
                found = measure(options, num_ranks, Path(folder) / str(num_ranks))
            pairs = zip(found[0]["losses"], single["losses"], strict=True)
            results[num_ranks] = {
                "loss_diff_max": max(abs(a - b) for a, b in pairs),
                "step_s": found[0]["step_s"],
                "bytes_per_rank_max": {
                    name: max(rank["bytes"][name] for rank in found) for name in single["bytes"]
                },
                "share_of_one": {
                    name: round(max(rank["bytes"][name] for rank in found) / num_bytes, 4)
                    for name, num_bytes in single["bytes"].items()
                },
            }
    parameters = {k: v for k, v in vars(options).items() if k != "out"}
    machine = {"cpu_count": os.cpu_count(), "machine": platform.machine()}
    told = {"machine": machine, "parameters": parameters, "losses_of_one": single["losses"]}
    print(json.dumps({**told, "ranks": results}, indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
