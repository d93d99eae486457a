"""One GRPO step of the learner against the step of TRL's GRPOTrainer, on the same batch.

    python benchmarks/learner_step.py [--model builtin:addition-1m] [--groups 32] [--steps 8]
    python benchmarks/learner_step.py --model DIR --groups 4 --prompt 32 --completion 32
                                      --micro-batch-tokens 512 --trl-batch 8 --steps 3

Prints one JSON object: the machine, the parameters, seconds and processor seconds of a step
(median), tokens per second, peak resident memory of each process, how far the gradients of
the first step are apart, and the ratios. Sides run in processes of their own and take turns,
`--rounds` times. What is measured is the training step alone: forward, backward, clipping and
AdamW on given prompts and completions (echo2: also the packing of the batch). TRL is set up for
speed as its documentation says: no gradient checkpointing, fused AdamW, no reference model, old
logprobs not computed apart. Needs `pip install trl` besides the learner's extra.

Prompts and completions of `builtin:addition-1m` are those of the quickstart, sampled from the
model; those of other models are random tokens, with completions of `completion`/2 to
`completion` tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

LEARNING_RATE = 1e-4
NO_CLIP = 1e6
"""A gradient norm that is never reached, so that gradients can be compared."""


def make_batch(options: argparse.Namespace, path: Path) -> None:
    """Write prompts [P, L], completions [P, G, C], their lengths and advantages."""
    import torch

    from echo2_learner.policy import Policy
    from echo2_workers.environments.addition import Addition
    from echo2_workers.models import model_folder
    from echo2_workers.tokenizer import BOS, EOS, encode

    rng = np.random.default_rng(0)
    policy = Policy.load(model_folder(options.model))
    shape = (options.groups, options.group_size)
    if options.model.startswith("builtin:"):
        environment = Addition(seed=0)
        tasks = [json.loads(environment.task("train", i)) for i in range(options.groups)]
        prompts = np.array([[BOS, *encode(task["prompt"])] for task in tasks])
        torch.manual_seed(0)
        model: Any = policy.module
        sampled = model.generate(
            torch.from_numpy(np.repeat(prompts, options.group_size, axis=0)),
            max_new_tokens=options.completion,
            do_sample=True,
            top_k=0,
            top_p=1.0,
        )[:, prompts.shape[1] :].numpy()
        completions = sampled.reshape(*shape, -1)
        ended = completions == EOS
        width = completions.shape[2]
        lengths = np.where(ended.any(-1), ended.argmax(-1) + 1, width)
        right = [encode(task["answer"]) for task in tasks]
        rewards = np.array(
            [[float(list(row[:3]) == right[i]) for row in completions[i]] for i in range(shape[0])]
        )
    else:
        vocabulary = policy.vocab_size
        prompts = rng.integers(10, vocabulary, (options.groups, options.prompt))
        completions = rng.integers(10, vocabulary, (*shape, options.completion))
        lengths = rng.integers(options.completion // 2, options.completion + 1, shape)
        rewards = rng.integers(0, 2, shape).astype(float)
    deviation = rewards.std(axis=1, keepdims=True)
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / (deviation + 1e-6)
    np.savez(
        path,
        prompts=prompts,
        completions=completions,
        lengths=lengths,
        advantages=np.where(deviation > 0, advantages, 0.0),
    )


def echo2_side(options: argparse.Namespace, batch: Any, gradients: Path) -> dict[str, Any]:
    import torch

    from echo2.config import LearnerTable
    from echo2.types import Version
    from echo2_learner.batch import TrainingBatch, Trajectory
    from echo2_learner.policy import Policy
    from echo2_learner.trainer import Trainer
    from echo2_workers.engines.dtypes import MODEL_DTYPES
    from echo2_workers.models import model_folder

    torch.set_num_threads(options.threads)
    groups = []
    for i, prompt in enumerate(batch["prompts"]):
        rows = []
        for j, length in enumerate(batch["lengths"][i]):
            token_ids = np.concatenate([prompt, batch["completions"][i, j, :length]])
            mask = np.arange(len(token_ids)) >= len(prompt)
            rows.append(
                Trajectory(
                    group=f"g{i}",
                    worker="w",
                    token_ids=token_ids.astype(np.int32),
                    logprobs=np.zeros(len(token_ids), dtype=np.float32),
                    sampled=mask,
                    loss_mask=mask,
                    versions=np.where(mask, 0, -1).astype(np.int32),
                    reward=0.0,
                    advantage=float(batch["advantages"][i, j]),
                )
            )
        groups.append(tuple(rows))
    table = LearnerTable.model_validate(
        {
            "learning_rate": LEARNING_RATE,
            "grad_norm_max": NO_CLIP,
            "micro_batch_tokens": options.micro_batch_tokens,
            "packing": not options.no_packing,
            "dtype": options.dtype,
            "loss": {"correction": "none"},
        }
    )
    policy = Policy.load(
        model_folder(options.model), dtype=MODEL_DTYPES[options.dtype], trained=True
    )
    trainer = Trainer(policy, table, temperature=1.0)
    saver = trainer.optimizer.register_step_pre_hook(
        lambda *_: save_gradients(gradients, policy.trained_parameters())
    )
    meter = Meter()
    for step in range(options.steps + 1):
        meter.start()
        trainer.step(TrainingBatch(step, (Version(1, 0),), tuple(groups)))
        meter.stop()
        saver.remove()
    return meter.result()


def trl_side(options: argparse.Namespace, batch: Any, gradients: Path) -> dict[str, Any]:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from echo2_learner.warm_start import make_tokenizer
    from echo2_workers.models import model_folder

    torch.set_num_threads(options.threads)
    num_groups, group_size, width = batch["completions"].shape
    num_rows = num_groups * group_size
    mask = np.arange(width) < batch["lengths"].reshape(-1, 1)
    prompts = torch.from_numpy(np.repeat(batch["prompts"], group_size, axis=0))
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": torch.from_numpy(batch["completions"].reshape(num_rows, width) * mask),
        "completion_mask": torch.from_numpy(mask.astype(np.int64)),
        "advantages": torch.from_numpy(batch["advantages"].reshape(-1).astype(np.float32)),
        "num_items_in_batch": torch.tensor(int(mask.sum())),
    }

    class Given(GRPOTrainer):  # type: ignore[misc]
        """Trains on the given batch instead of generating one."""

        def _generate_and_score_completions(self, _: Any) -> dict[str, torch.Tensor]:
            return dict(inputs)

    meter = Meter()

    class Timed(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            meter.start()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter.stop()

        def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
            if not gradients.exists():
                save_gradients(gradients, dict(model.named_parameters()))

    folder = model_folder(options.model)
    dtype = torch.float32 if options.dtype == "float32" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    tokenizer = (
        make_tokenizer()
        if options.model.startswith("builtin:")
        else AutoTokenizer.from_pretrained(folder, local_files_only=True)
    )
    per_device = options.trl_batch or num_rows
    with tempfile.TemporaryDirectory() as out:
        trainer = Given(
            model=model,
            reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            args=GRPOConfig(
                output_dir=out,
                per_device_train_batch_size=per_device,
                gradient_accumulation_steps=num_rows // per_device,
                num_generations=group_size,
                max_completion_length=width,
                learning_rate=LEARNING_RATE,
                lr_scheduler_type="constant",
                adam_beta2=0.95,
                max_grad_norm=NO_CLIP,
                max_steps=options.steps + 1,
                loss_type="grpo",
                beta=0.0,
                use_cpu=True,
                bf16=options.dtype == "bfloat16",
                gradient_checkpointing=False,
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([{"prompt": "1"}] * num_rows),
            processing_class=tokenizer,
            callbacks=[Timed()],
        )
        trainer.train()
    return meter.result()


class Meter:
    """Seconds of steps; the first, in which memory is allocated, is left out."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.resident_before = 0

    def start(self) -> None:
        self.resident_before = self.resident_before or resident_bytes()
        self._started = time.perf_counter(), time.process_time()

    def stop(self) -> None:
        wall, cpu = self._started
        self.wall.append(time.perf_counter() - wall)
        self.cpu.append(time.process_time() - cpu)

    def result(self) -> dict[str, Any]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "wall_s": self.wall[1:],
            "cpu_s": self.cpu[1:],
            "peak_bytes": peak,
            "peak_above_model_bytes": peak - self.resident_before,
        }


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def save_gradients(path: Path, parameters: dict[str, Any]) -> None:
    np.savez(
        path,
        **{name: p.grad.float().numpy() for name, p in parameters.items() if p.grad is not None},
    )


def gradient_difference(one: Path, other: Path) -> float:
    """|g - g'| / |g'| over all parameters."""
    first, second = np.load(one), np.load(other)
    if set(first) != set(second):
        raise SystemExit(f"gradients of different tensors: {sorted(set(first) ^ set(second))[:5]}")
    apart = sum(float(((first[name] - second[name]) ** 2).sum()) for name in first)
    whole = sum(float((second[name] ** 2).sum()) for name in second)
    return (apart / whole) ** 0.5


def run_side(side: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    started = subprocess.run(
        [sys.executable, __file__, "--side", side, "--folder", str(folder), *sys.argv[1:]],
        env={**os.environ, "OMP_NUM_THREADS": str(options.threads), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        check=True,
    )
    found: dict[str, Any] = json.loads(started.stdout.splitlines()[-1])
    return found


def compare(options: argparse.Namespace) -> dict[str, Any]:
    sides = ["echo2"] if options.alone else ["echo2", "trl"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_batch(options, folder / "batch.npz")
        batch = np.load(folder / "batch.npz")
        tokens = int(batch["lengths"].sum() + batch["lengths"].size * batch["prompts"].shape[1])
        # The others are measured only: echo2 computes no gradient for them, TRL one of zero.
        with_gradient = int(batch["advantages"].any(axis=1).sum())
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(options.rounds):
            for side in sides:
                runs[side].append(run_side(side, options, folder))
        found: dict[str, Any] = {
            "machine": {"processor": platform.processor() or platform.machine()},
            "parameters": vars(options) | {"tokens": tokens, "groups_with_gradient": with_gradient},
        }
        for side in sides:
            wall, cpu = (
                statistics.median(s for run in runs[side] for s in run[key])
                for key in ("wall_s", "cpu_s")
            )
            found[side] = {
                "wall_s": round(wall, 4),
                "wall_min_s": round(min(s for run in runs[side] for s in run["wall_s"]), 4),
                "cpu_s": round(cpu, 4),
                "tokens_per_s": round(tokens / wall, 1),
                "peak_mb": round(max(run["peak_bytes"] for run in runs[side]) / 1e6, 1),
                "peak_above_model_mb": round(
                    max(run["peak_above_model_bytes"] for run in runs[side]) / 1e6, 1
                ),
            }
        if len(sides) == 2:
            one, other = found["echo2"], found["trl"]
            found["ratios"] = {
                f"trl / echo2, {key}": round(other[key] / one[key], 3)
                for key in ("wall_s", "wall_min_s", "cpu_s", "peak_mb", "peak_above_model_mb")
            }
            found["gradient_difference"] = gradient_difference(
                folder / "echo2.npz", folder / "trl.npz"
            )
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="builtin:addition-1m")
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=32, help="tokens; of random prompts")
    parser.add_argument("--completion", type=int, default=5, help="most tokens")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--trl-batch", type=int, default=0, help="rows of a forward; 0: all")
    parser.add_argument("--no-packing", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="without TRL")
    parser.add_argument("--side", choices=["echo2", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.side:
        print(json.dumps(compare(options), indent=2, default=str))
        return
    batch = np.load(options.folder / "batch.npz")
    measure = {"echo2": echo2_side, "trl": trl_side}[options.side]
    print(json.dumps(measure(options, batch, options.folder / f"{options.side}.npz")))


if __name__ == "__main__":
    main()
