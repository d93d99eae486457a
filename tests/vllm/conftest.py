"""Real vLLM on a tiny model. Collected only where vLLM is installed (`tox run -e vllm`).

One LLMEngine serves all tests of a session that step by hand; `core` makes a fresh VllmCore
on it. Versions are real files, as a worker's store has them.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from echo2.types import Sampling, Version
from echo2.weights.adapter import LORA_A, LORA_B, AdapterBase
from echo2.weights.versions import open_version, write_version
from echo2_workers.engine import Generated, GenerateRequest, StoredTensors

HERE = find_spec("vllm") is not None
collect_ignore_glob = [] if HERE else ["test_*.py"]

V1, V2, V3 = Version(1, 1), Version(1, 2), Version(1, 3)
POSITIONS = 256
BLOCK = 32
BLOCKS = 64
"""Of KV cache, in all: so few that many long sequences fill it."""
CONFIG = {
    "vocab_size": 32,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 96,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


class Models:
    """Models by seed, as transformers computes them and as stored versions. Their logits are
    far from uniform and differ much from each other, so that a wrong weight shows."""

    def __init__(self, folder: Path) -> None:
        self.assets = folder / "assets"
        self.folder = folder / "store"
        self.assets.mkdir(parents=True)
        self.folder.mkdir()
        self._models: dict[int, Any] = {}
        self._stored: dict[int, StoredTensors] = {}
        self.config().save_pretrained(self.assets)
        import echo2_workers

        shipped = Path(echo2_workers.__file__).parent / "models" / "addition-1m"
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(shipped / name, self.assets / name)

    def config(self) -> Any:
        from transformers import Qwen2Config

        return Qwen2Config(**CONFIG, architectures=["Qwen2ForCausalLM"])

    def model(self, seed: int) -> Any:
        import torch
        from transformers import Qwen2ForCausalLM

        if seed not in self._models:
            generator = torch.Generator().manual_seed(seed)
            model = Qwen2ForCausalLM(self.config()).eval().requires_grad_(False)
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.2, generator=generator)
            self._models[seed] = model
        return self._models[seed]

    def rounded(self, seed: int) -> StoredTensors:
        """Model `seed` from now on: its weights are bfloat16's, and so stored."""
        import torch

        tensors = []
        for name, parameter in self.model(seed).named_parameters():
            half = parameter.bfloat16()
            parameter.copy_(half)
            content = memoryview(half.view(torch.uint8).numpy().tobytes())
            tensors.append((name, "BF16", tuple(half.shape), content))
        digest = write_version(self.folder, tensors, kind="weights", metadata={}).manifest_digest
        stored = open_version(self.folder, digest)
        assert stored is not None
        return StoredTensors(stored.tensors(), folder=self.folder, digest=digest)

    def stored(self, seed: int) -> StoredTensors:
        if seed not in self._stored:
            tensors = [
                (name, "F32", tuple(tensor.shape), memoryview(tensor.detach().numpy().tobytes()))
                for name, tensor in self.model(seed).named_parameters()
            ]
            digest = write_version(
                self.folder, tensors, kind="weights", metadata={}
            ).manifest_digest
            stored = open_version(self.folder, digest)
            assert stored is not None
            self._stored[seed] = StoredTensors(stored.tensors(), folder=self.folder, digest=digest)
        return self._stored[seed]

    def adapter(self, seed: int, *, onto: int) -> StoredTensors:
        """Model `seed` from now on: model `onto` with an adapter on its queries."""
        import torch

        from echo2_workers.engines.stored import stored_tensors

        generator = torch.Generator().manual_seed(seed)
        model = copy.deepcopy(self.model(onto))
        pairs = []
        for layer in range(CONFIG["num_hidden_layers"]):
            name = f"model.layers.{layer}.self_attn.q_proj"
            a, b = (torch.randn(s, generator=generator) for s in ((2, 64), (64, 2)))
            model.get_submodule(name).weight += 0.5 * (b @ a)
            pairs += [(name + LORA_A, a), (name + LORA_B, b)]
        self._models[seed] = model
        base = AdapterBase(self.stored(onto).digest, 0.5)
        digest = write_version(
            self.folder,
            ((name, "F32", tuple(t.shape), memoryview(t.numpy().tobytes())) for name, t in pairs),
            kind="adapter",
            metadata=base.metadata(),
        ).manifest_digest
        return stored_tensors(self.folder, digest)

    def logprobs(
        self, seed: int, token_ids: Sequence[int], *, temperature: float = 1.0
    ) -> npt.NDArray[np.float32]:
        """Logprob of each token but the first, over the whole vocabulary."""
        import torch

        with torch.inference_mode():
            ids = torch.tensor([list(token_ids)])
            logits = self.model(seed)(input_ids=ids, use_cache=False).logits[0, :-1]
            logprobs = torch.log_softmax(logits.float() / temperature, -1)
            return np.asarray(logprobs.gather(-1, ids[0, 1:, None])[:, 0])

    def difference(
        self, seed: int, prompt: Sequence[int], generated: Generated, **how: Any
    ) -> float:
        """Largest |logprob difference| over the generated tokens."""
        full = self.logprobs(seed, [*prompt, *generated.token_ids.tolist()], **how)
        return float(np.abs(full[len(prompt) - 1 :] - generated.logprobs).max())


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def llm(models: Models) -> Any:
    from echo2_workers.engines.vllm_arguments import (
        VllmSettings,
        engine_arguments,
        set_environment,
    )

    settings = VllmSettings(
        dtype="float32",
        kv_cache_gb=0.1,
        sequences_max=32,
        stop=("=",),
        engine_args={
            "block_size": BLOCK,
            "num_gpu_blocks_override": BLOCKS,
            "max_num_batched_tokens": POSITIONS,
        },
    )
    set_environment(settings)
    from vllm import LLMEngine

    return LLMEngine.from_engine_args(engine_arguments(settings, models.assets))


class Bench:
    """A VllmCore, and words to drive it with."""

    def __init__(self, core: Any) -> None:
        self.core = core
        self.done: dict[int, Generated] = {}
        self.counts: dict[int, int] = {}

    def ask(self, prompt: Sequence[int], *, seed: int = 0, max_tokens: int = 40, **how: Any) -> int:
        """Add a request; the result names it in `done`."""
        number = len(self.counts)
        self.counts[number] = 0

        def count(tokens: int) -> None:
            self.counts[number] += tokens

        request = GenerateRequest(
            token_ids=prompt, seed=seed, sampling=Sampling(max_tokens=max_tokens, **how)
        )
        self.core.add(request, count, lambda generated: self.done.__setitem__(number, generated))
        return number

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.core.step()

    def finish(self) -> None:
        while self.core.running:
            self.core.step()

    def install(self, tensors: StoredTensors, version: Version, mode: Any = "continue") -> None:
        while not self.core.pause(mode):
            self.core.step()
        self.core.load(tensors, version)
        self.core.resume()


@pytest.fixture
def bench(llm: Any, models: Models) -> Iterator[Callable[..., Bench]]:
    """Makes a core with version 1.1 (the model of seed 1) installed and sampling."""
    import torch

    from echo2_workers.engines.vllm_core import VllmCore
    from echo2_workers.engines.vllm_tensors import expected_tensors

    made: list[Bench] = []

    def make(*, endless: bool = True, **how: Any) -> Bench:
        core = VllmCore(
            llm,
            expected=expected_tensors(models.assets, torch.float32),
            eos_ids=() if endless else (2,),
            **how,
        )
        made.append(Bench(core))
        core.load(models.stored(1), V1)
        core.resume()
        return made[-1]

    yield make
    for each in made:
        each.core.pause("abort")
        each.core._llm.reset_prefix_cache(reset_running_requests=True)


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
