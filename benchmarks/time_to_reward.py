"""Seconds until the quickstart's model solves 75 % of the held-out tasks, by system.

    python benchmarks/time_to_reward.py [--steps 60] [--systems async,sync,trl] [--out FILE]

Three systems train the same model from the same weights on the same task, with the same
batch (32 prompts x 8), learning rate, optimizer and clip:

    async   echo2 with S = 2; learner, coordinator and origin pinned to one core, one worker
            to the other, as two machines would be
    sync    the same with S = 0
    trl     TRL's GRPOTrainer with transformers' generation, both cores for each of its parts

The clock starts when everything is up (a worker has installed version 0; TRL's model is
loaded and one step was taken to warm up on a copy), and runs until the step is done whose
weights first reach the goal. Every version is scored afterwards, off the clock, by one and
the same greedy evaluation, so no system pays for evals. Prints one JSON object; needs
`trl` and `datasets` for the third system. Machine: two cores or more, nothing else running.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echo2.config import Config, config_to_toml, load_config

GOAL = 0.75
NUM_EVAL_TASKS = 512
ROOT = Path(__file__).parent.parent
PROCESS_TIMEOUT_S = 1800.0


# ------------------------------------------------------------------------------ echo2


def run_echo2(staleness_max: int, steps: int, engine: str, python: str) -> dict[str, Any]:
    """One run of daemons; what it trained, scored afterwards."""
    overrides = [
        f"staleness.max={staleness_max}",
        f"learner.steps={steps}",
        "eval.every_steps=0",
        "checkpoint.every_steps=100000",
        f'worker.engine="{engine}"',
        "learner.logprob_check_every_steps=1000000",
        "rollouts.keep_steps=0",
        "worker.slots=32",  # a whole batch at once, as TRL generates it
    ]
    if python:
        overrides.append(f'worker.python="{python}"')
    config = load_config(ROOT / "configs/quickstart.toml", overrides)
    with tempfile.TemporaryDirectory(prefix="time-to-reward-") as name:
        folder = Path(name)
        path = folder / "config.toml"
        path.write_text(config_to_toml(config), encoding="utf-8")
        run_dir = folder / "run"
        run_dir.mkdir()
        with _keeping(run_dir / "versions", folder / "kept"):
            _run_daemons(path, run_dir)
        started = min(
            e["time"] for e in _lines(run_dir / "events.jsonl") if e["event"] == "version_installed"
        )
        lines = _lines(run_dir / "metrics.jsonl")
        done = {line["step"]: line["time"] - started for line in lines}
        rewards = _rewards_of_versions(config, folder / "kept")
    points = [(step, done.get(step, 0.0), reward) for step, reward in sorted(rewards.items())]
    mean = {
        key: sum(line[key] for line in lines) / len(lines)
        for key in ("train_s", "wait_s", "publish_s", "staleness_mean")
    }
    return {**_reached(points), "step_s": lines[-1]["time"] - lines[0]["time"], **mean}


def _run_daemons(config: Path, run_dir: Path) -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    with contextlib.ExitStack() as stack:
        coordinator = _start(stack, "coordinator", config, run_dir, core=first)
        _until(run_dir / "coordinator.json", coordinator)
        origin = _start(stack, "origin", config, run_dir, core=first)
        _until(run_dir / "origin.json", origin)
        _start(stack, "worker", config, run_dir, "--name", "w-1", core=second)
        learner = _start(stack, "learner", config, run_dir, "--no-origin", core=first)
        if learner.wait(PROCESS_TIMEOUT_S):
            raise RuntimeError((run_dir / "learner.out").read_text()[-2000:])


def _start(
    stack: contextlib.ExitStack, command: str, config: Path, run_dir: Path, *more: str, core: int
) -> subprocess.Popen[bytes]:
    log = stack.enter_context((run_dir / f"{command}.out").open("wb"))
    process = subprocess.Popen(
        [
            *("taskset", "-c", str(core), sys.executable, "-m", "echo2.cli", command),
            *(str(config), "--run-dir", str(run_dir), *more),
        ],
        stdout=log,
        stderr=log,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )

    def end() -> None:
        try:
            process.wait(5)  # they end by themselves when the run is over
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(60)

    stack.callback(end)
    return process


def _until(path: Path, process: subprocess.Popen[bytes]) -> None:
    while not path.exists():
        if process.poll() is not None:
            raise RuntimeError(f"{path.name} was never written; see {path.parent}")
        time.sleep(0.05)


@contextlib.contextmanager
def _keeping(versions: Path, kept: Path) -> Iterator[None]:
    """Hard links of every published version: the run itself removes old ones."""
    kept.mkdir()
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            if versions.is_dir():
                link()

    def link() -> None:
        for path in versions.iterdir():
            if not path.name.startswith(".") and not (kept / path.name).exists():
                with contextlib.suppress(FileNotFoundError):
                    os.link(path, kept / path.name)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        link()


def _rewards_of_versions(config: Config, folder: Path) -> dict[int, float]:
    import torch

    from echo2.weights.store import open_version

    scorer = Scorer(config)
    rewards = {}
    for path in folder.glob("*.manifest"):
        stored = open_version(folder, path.stem)
        if stored is None or stored.manifest.kind != "weights":
            continue
        step = int(stored.manifest.metadata["version"].split(".")[1])
        tensors = {
            name: torch.frombuffer(bytearray(content), dtype=torch.float32).reshape(shape)
            for name, (_, shape, content) in stored.tensors().items()
        }
        rewards[step] = scorer.reward(tensors)
    return rewards


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# -------------------------------------------------------------------------------- TRL


def run_trl(steps: int) -> dict[str, Any]:
    """TRL in this process. Its weights are copied after each step, off the clock."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from echo2_workers.environments.addition import Addition
    from echo2_workers.models import model_folder
    from echo2_workers.tokenizer import EOS, encode

    torch.set_num_threads(2)
    config = load_config(ROOT / "configs/quickstart.toml")
    folder = model_folder(config.model.path)
    learner, group_size = config.learner, config.dispatch.group_size
    environment = Addition()
    tasks = [
        json.loads(environment.task("train", i)) for i in range(learner.groups_per_step * steps)
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    for task in tasks:
        task["prompt"] = tokenizer.bos_token + task["prompt"]

    def reward(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        return [
            float(list(ids) == [*encode(text), EOS])
            for ids, text in zip(completion_ids, answer, strict=True)
        ]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.off_s, self.started, self.versions = 0.0, 0.0, list[tuple[int, float, Any]]()

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, _: Any, state: Any, __: Any, model: Any = None, **___: Any) -> None:
            now = time.perf_counter()
            weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
            self.versions.append((state.global_step, now - self.started - self.off_s, weights))
            self.off_s += time.perf_counter() - now

    def trainer(num_steps: int, clock: Clock) -> Any:
        return GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=tempfile.mkdtemp(prefix="trl-"),
                per_device_train_batch_size=learner.groups_per_step * group_size,
                num_generations=group_size,
                max_completion_length=config.sampling.max_tokens,
                learning_rate=learner.learning_rate,
                lr_scheduler_type="constant",
                adam_beta1=learner.beta1,
                adam_beta2=learner.beta2,
                weight_decay=learner.weight_decay,
                max_grad_norm=learner.grad_norm_max,
                max_steps=num_steps,
                beta=0.0,
                loss_type="grpo",
                temperature=1.0,
                report_to=[],
                logging_steps=1000,
                save_strategy="no",
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(tasks),
            processing_class=tokenizer,
            callbacks=[clock],
        )

    trainer(1, Clock()).train()
    clock = Clock()
    trainer(steps, clock).train()
    scorer = Scorer(config)
    points = [(step, s, scorer.reward(weights)) for step, s, weights in clock.versions]
    return {**_reached(points), "step_s": points[-1][1] - points[0][1]}


# ---------------------------------------------------------------------------- scoring


class Scorer:
    """Greedy answers of a policy to the same held-out tasks, by plain forward passes."""

    def __init__(self, config: Config) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from echo2_workers.environments.addition import Addition
        from echo2_workers.models import model_folder
        from echo2_workers.tokenizer import BOS, EOS, encode

        environment = Addition()
        tasks = [json.loads(environment.task("eval", i)) for i in range(NUM_EVAL_TASKS)]
        self._prompts = torch.tensor([[BOS, *encode(task["prompt"])] for task in tasks])
        self._answers = torch.tensor([[*encode(task["answer"]), EOS] for task in tasks])
        folder = model_folder(config.model.path)
        self._model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        )
        self._model.eval()

    def reward(self, weights: dict[str, Any]) -> float:
        """Share of the tasks answered exactly. All prompts and answers are of equal length."""
        import torch

        self._model.load_state_dict(weights, strict=False)
        self._model.tie_weights()
        tokens = self._prompts
        with torch.no_grad():
            for _ in range(self._answers.shape[1]):
                logits = self._model(tokens, use_cache=False).logits[:, -1]
                tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
        answers = tokens[:, self._prompts.shape[1] :]
        return float((answers == self._answers).all(dim=1).double().mean())


def _reached(points: list[tuple[int, float, float]]) -> dict[str, Any]:
    """When the goal was reached first, and what the curve looks like."""
    first = next(((step, seconds) for step, seconds, reward in points if reward >= GOAL), None)
    return {
        "seconds": first[1] if first else None,
        "steps": first[0] if first else None,
        "reward_first": points[0][2],
        "reward_last": points[-1][2],
        "seconds_last": points[-1][1],
        "curve": [
            [s, round(t, 2), round(r, 3)] for s, t, r in points[:: max(1, len(points) // 12)]
        ],
    }


def machine() -> dict[str, Any]:
    import torch

    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return {"cpu": model, "cores": os.cpu_count(), "torch": torch.__version__}


def _alone(system: str, options: argparse.Namespace) -> dict[str, Any]:
    """One system in a process of its own, so that none inherits threads or memory."""
    command = [sys.executable, __file__, "--inner", system, "--steps", str(options.steps)]
    command += ["--engine", options.engine, "--python", options.python]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip()[-1500:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--systems", default="async,sync,trl")
    parser.add_argument("--engine", default="transformers", help="the worker's engine")
    parser.add_argument("--python", default="", help="worker.python, for the vllm engine")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inner", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        bound = {"async": 2, "sync": 0}
        found = (
            run_trl(options.steps)
            if options.inner == "trl"
            else run_echo2(bound[options.inner], options.steps, options.engine, options.python)
        )
        print(json.dumps(found))
        return
    systems = {name: _alone(name, options) for name in options.systems.split(",")}
    seconds = {name: found.get("seconds") for name, found in systems.items()}
    ours = seconds.get("async")
    ratios = {
        f"async over {name}": round(value / ours, 2)
        for name, value in seconds.items()
        if name != "async" and ours and value
    }
    report = {
        "benchmark": "time_to_reward",
        "goal": GOAL,
        "engine": options.engine,
        "machine": machine(),
        "systems": systems,
        "times_faster": ratios,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
