"""Ranks of a learner as real processes: they follow one process, and each other's checkpoints.

The session is the one in memory of the unit tests, in rank 0. This file is also the program
of the ranks: `RUN CONFIG` of a learner whose death and checks the environment names.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from echo2.commands.learner_ranks import run_ranks
from echo2.commands.processes import last_lines

torch = pytest.importorskip("torch")

from torch.distributed import checkpoint as dcp  # noqa: E402  after the check for torch
from torch.distributed.checkpoint import HuggingFaceStorageReader  # noqa: E402
from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: E402

from echo2.config import FsdpTable, LearnerTable, load_config  # noqa: E402
from echo2.types import Version  # noqa: E402
from echo2_learner import main as learner_main  # noqa: E402
from echo2_learner.checkpoint import CheckpointStore  # noqa: E402
from echo2_learner.parts import Parts, build  # noqa: E402
from echo2_learner.policy import Policy  # noqa: E402
from echo2_learner.ranks import Ranks, join  # noqa: E402
from echo2_learner.sharding import Sharder, keep_gathered  # noqa: E402
from echo2_learner.shards import full  # noqa: E402
from echo2_learner.trainer import Trainer  # noqa: E402
from echo2_workers.models import model_folder  # noqa: E402

FAKE = Path(__file__).parents[1] / "unit" / "learner" / "fake_session.py"
CONFIG = """
[model]
path = "builtin:addition-1m"
[sampling]
max_tokens = 3
[dispatch]
group_size = 4
[learner]
steps = {steps}
groups_per_step = 4
learning_rate = 1e-4
micro_batch_tokens = 32
updates_per_step = 2
threads = 1
logprob_check_every_steps = 4
ranks = {ranks}
[learner.fsdp]
timeout_s = 120.0
[learner.loss]
kl_coefficient = 0.01
[checkpoint]
every_steps = 2
keep = 9
[net]
connect_timeout_s = 30.0
"""
STEPS = 8


def load_fake() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fake_session", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fake_session"] = module
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------------------ the program of the ranks


def learn(run_dir: Path, config_path: Path) -> int:
    """A learner, or one rank of it, as `echo2 learner` starts it; a session in memory."""
    torch.set_num_threads(1)
    fake = load_fake()
    incarnation = len(list(run_dir.glob("published-*"))) + 1

    class Session(fake.FakeSession):  # type: ignore[name-defined, misc]
        def __init__(self, config: Any, folder: Path, **_: Any) -> None:
            policy = Policy.load(model_folder(config.model.path))
            super().__init__(config, folder, policy, incarnation=incarnation)
            self._told = folder / f"published-{incarnation}"

        def publish(self, message: Any) -> int:
            kept = super().publish(message)
            with self._told.open("a") as file:
                probe = message.probe_logprobs.hex()
                file.write(f"{message.version.step} {message.manifest_digest} {probe}\n")
            return int(kept)

    learner_main.LearnerSession = Session  # type: ignore[misc, assignment]
    dies_at = os.environ.get("DIES_AT")
    if dies_at is not None and os.environ["RANK"] == "1":
        step = Trainer.step

        def dying(self: Trainer, batch: Any) -> Any:
            if batch.step == int(dies_at):
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, batch)

        Trainer.step = dying  # type: ignore[method-assign]
    if "GRADIENTS" in os.environ:
        learner_main.join = joined_and_checked  # type: ignore[attr-defined]
    resume = (run_dir / "checkpoints").exists()
    return learner_main.main(config_path, run_dir, resume)


@contextlib.contextmanager
def joined_and_checked(table: LearnerTable) -> Iterator[Ranks]:
    with join(table) as ranks:
        check_gradients(Path(os.environ["GRADIENTS"]), ranks)
        yield ranks


SHAPES: list[dict[str, Any]] = [
    {"hidden_size": 16, "vocab_size": 33, "tie_word_embeddings": True},
    {"hidden_size": 8, "vocab_size": 5, "tie_word_embeddings": False, "num_hidden_layers": 1},
    {"hidden_size": 24, "vocab_size": 32, "intermediate_size": 7, "tie_word_embeddings": True},
]


def check_gradients(folder: Path, ranks: Ranks) -> None:
    """Over a few shapes: the sharded gradient is that of one process, also where a rank has
    more to do than another; weights are those of the folder; computed in bfloat16, shards of
    float32 and of bfloat16 give the very logprobs of the plain model."""
    for index, shape in enumerate(SHAPES):
        path = folder / f"model-{index}"
        if ranks.is_lead:
            torch.manual_seed(index)
            made = {"num_hidden_layers": 2, "intermediate_size": 20, **shape}
            heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
            config = Qwen2Config(**made, **heads, initializer_range=0.3)
            Qwen2ForCausalLM(config).save_pretrained(path)
        ranks.collect(b"the folder is there")
        sharder = Sharder(ranks, torch.device("cpu"), FsdpTable())
        own = sharder.load(path, dtype=torch.float32)
        if index == 2:
            keep_gathered(own, torch.optim.SGD(own.trained_parameters().values()))
        plain = Policy.load(path)
        for name, tensor in plain.tensors().items():
            assert torch.equal(full(own.tensors()[name]), tensor), name
        torch.manual_seed(7)
        tokens = torch.randint(0, shape["vocab_size"], (2 * ranks.size + 1, 9))
        lengths = torch.full((len(tokens),), 9)
        is_last = ranks.rank + 1 == ranks.size
        mine = slice(2 * ranks.rank, 2 * ranks.rank + 2 + is_last)
        for policy, rows in ((own, mine), (plain, slice(None))):
            logprobs, _ = policy.logprobs(tokens[rows], lengths[rows], temperature=0.9)
            logprobs.sum().backward()
        for name, parameter in plain.trained_parameters().items():
            found = full(own.trained_parameters()[name].grad)  # type: ignore[arg-type]
            scale = parameter.grad.abs().max()  # type: ignore[union-attr]
            worst = (found - parameter.grad).abs().max() / scale  # type: ignore[operator]
            assert worst < 1e-5, (shape, name, float(worst))
        half, rounded = (
            sharder.load(path, dtype=dtype, compute_dtype=torch.bfloat16)
            for dtype in (torch.bfloat16, torch.float32)
        )
        with torch.no_grad():
            exact = Policy.load(path, dtype=torch.bfloat16)
            one, two, three = (
                policy.logprobs(tokens, lengths, temperature=1.0)[0]
                for policy in (exact, half, rounded)
            )
        assert torch.equal(one, two)
        assert torch.equal(one, three)


# ------------------------------------------------------------------------------ the tests


class Bench:
    """Learners over run folders below `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def config(self, *, steps: int, ranks: int) -> Path:
        path = self.folder / f"config-{steps}-{ranks}.toml"
        path.write_text(CONFIG.format(steps=steps, ranks=ranks), encoding="utf-8")
        return path

    def run_dir(self, name: str) -> Path:
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            origin = {"endpoint": "tcp://127.0.0.1:5555", "public_key": "k" * 40, "pid": 1}
            (folder / "origin.json").write_text(json.dumps(origin))
        return folder

    def learn(self, name: str, *, steps: int, ranks: int, **environment: str) -> int:
        folder, config = self.run_dir(name), self.config(steps=steps, ranks=ranks)
        if ranks == 1:
            original = learner_main.LearnerSession
            try:
                return learn(folder, config)
            finally:
                learner_main.LearnerSession = original  # type: ignore[misc]
        with pytest.MonkeyPatch.context() as patch:
            for variable, value in {"OMP_NUM_THREADS": "1", **environment}.items():
                patch.setenv(variable, value)
            command = [sys.executable, __file__, str(folder), str(config)]
            return run_ranks(command, num_ranks=ranks, logs=folder / "logs")

    def lines(self, name: str) -> list[dict[str, Any]]:
        text = (self.folder / name / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def published(self, name: str, incarnation: int) -> dict[int, tuple[str, str]]:
        lines = (self.folder / name / f"published-{incarnation}").read_text().splitlines()
        return {int(step): (digest, probe) for step, digest, probe in map(str.split, lines)}

    def checkpoint_steps(self, name: str) -> list[int]:
        return CheckpointStore(self.folder / name, keep=9).complete_steps(STEPS)

    def resumed(self, name: str, checkpoint: str) -> Parts:
        """One process that resumed from a copy of that checkpoint, in a folder of its own."""
        folder = self.run_dir(f"from-{checkpoint}")
        copied = folder / "checkpoints" / checkpoint
        shutil.copytree(self.folder / name / "checkpoints" / checkpoint, copied)
        return build(load_config(self.config(steps=STEPS, ranks=1)), folder, resume=True)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def same(lines: list[dict[str, Any]], straight: list[dict[str, Any]]) -> None:
    for line, expected in zip(lines, straight, strict=True):
        for key in ("loss", "grad_norm", "entropy", "clip_fraction", "mismatch_kl", "ess"):
            assert line[key] == pytest.approx(expected[key], abs=1e-4), (line["step"], key)
        for key in ("step", "tokens", "updates", "reward_mean", "learning_rate", "staleness_max"):
            assert line[key] == expected[key], (line["step"], key)
        assert (line["logprob_diff_mean"] is None) == (expected["logprob_diff_mean"] is None)


def test_ranks_follow_one_process_and_each_others_checkpoints(
    bench: Bench, capfd: pytest.CaptureFixture[str]
) -> None:
    """One process; the same steps by one, four, two (of which one dies) and one again."""
    assert bench.learn("straight", steps=STEPS, ranks=1) == 0
    straight = bench.lines("straight")
    assert len({line["loss"] for line in straight}) == STEPS

    assert bench.learn("chain", steps=2, ranks=1) == 0
    (bench.folder / "models").mkdir()
    code = bench.learn("chain", steps=4, ranks=4, GRADIENTS=str(bench.folder / "models"))
    assert code == 0, told(bench.folder / "chain")
    capfd.readouterr()
    assert bench.learn("chain", steps=STEPS, ranks=2, DIES_AT="7") == 1
    said = capfd.readouterr().err
    assert "rank 1 of 2 ended with signal SIGKILL, and the learner's other ranks with it" in said
    assert bench.checkpoint_steps("chain") == [2, 4, 6]
    assert bench.learn("chain", steps=STEPS, ranks=1) == 0
    newest = {line["step"]: line for line in bench.lines("chain")}
    same([newest[step] for step in sorted(newest)], straight)
    final, expected = (Policy.load(bench.folder / n / "final") for n in ("chain", "straight"))
    for name, tensor in expected.tensors().items():
        assert torch.allclose(final.tensors()[name], tensor, atol=1e-4), name

    # What four and two ranks published when they had resumed, one process publishes too.
    for incarnation, step in ((2, 2), (3, 4)):
        parts = bench.resumed("chain", f"step-{step:08d}-i{incarnation - 1}")
        message = parts.publisher.publish(Version(incarnation, step))
        published = (message.manifest_digest, message.probe_logprobs.hex())
        assert published == bench.published("chain", incarnation)[step]

    # PyTorch's own reader of distributed checkpoints reads the four ranks' files.
    assert parts.resumed is not None
    folder = parts.resumed.folder
    wanted = {name: torch.zeros_like(t) for name, t in parts.policy.tensors().items()}
    dcp.load(wanted, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    for name, tensor in parts.policy.tensors().items():
        assert torch.equal(wanted[name], tensor), name

    # A torn file of one rank makes the checkpoint torn.
    path = folder / "policy-00003-of-00004.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert CheckpointStore(folder.parents[1], keep=2).newest() is None


def told(folder: Path) -> str:
    logs = sorted((folder / "logs").glob("*.log"))
    return "\n".join(line for log in logs for line in last_lines(log, 30))


if __name__ == "__main__":
    raise SystemExit(learn(*map(Path, sys.argv[1:])))
