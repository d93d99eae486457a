"""The engine on PyTorch and Hugging Face transformers: any attention-only causal model.

One thread owns the model and runs `Sampler` step by step; calls from the event loop are
handed to it between two steps, so a load or a score meets no half-sampled token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo2.errors import EngineError
from echo2.types import Sampling, Version
from echo2_workers.engine import (
    Generated,
    GenerateRequest,
    InstallMode,
    Logprobs,
    Tensors,
    Tokens,
)
from echo2_workers.engines.dtypes import MODEL_DTYPES
from echo2_workers.engines.sampler import Sampler
from echo2_workers.engines.thread import EngineThread

REPORT_STEPS: Final = 8
"""Sampled tokens are reported to the event loop every so many steps."""
WARM_UP = Version(0, 0)
MEMORY_HINT: Final = "worker.transformers.sequences_max or sampling.max_tokens"


class TransformersEngine:
    def __init__(
        self,
        *,
        dtype: str,
        weights_dtype: str = "",
        device: str = "auto",
        threads: int = 1,
        sequences_max: int = 256,
    ) -> None:
        """Layers compute in `dtype`; versions hold weights in `weights_dtype` ("": the same)."""
        self._dtype = MODEL_DTYPES[dtype]
        self._weights_dtype = MODEL_DTYPES[weights_dtype or dtype]
        self._device = _device(device)
        self._threads = threads
        self._sequences_max = sequences_max
        self._sampler: Sampler | None = None
        self._thread: EngineThread | None = None
        # Owned by the thread:
        self._pausing: tuple[InstallMode, Callable[[], None]] | None = None
        self._paused = False

    @property
    def steps(self) -> int:
        return 0 if self._sampler is None else self._sampler.steps

    @property
    def busy(self) -> bool:
        sampler = self._sampler
        return sampler is not None and not self._paused and sampler.running + sampler.waiting > 0

    # ------------------------------------------------- called from the event loop

    async def start(self, assets: Path | None) -> None:
        if assets is None:
            raise EngineError("the run has no assets; the learner must publish config.json")
        self._thread = EngineThread(self._turn, name="sampler", memory_hint=MEMORY_HINT)
        await self._thread.call(lambda: self._build(assets))

    async def pause(self, mode: InstallMode) -> None:
        thread = self._live_thread()
        paused = thread.future()

        def begin() -> None:
            if self._paused:
                thread.settle(paused, None)
            else:
                self._pausing = (mode, lambda: thread.settle(paused, None))

        thread.command(begin)
        await paused

    async def load(self, tensors: Tensors, version: Version) -> None:
        await self._live_thread().call(lambda: self._paused_sampler().load(tensors, version))

    async def score(self, token_ids: Tokens) -> Logprobs | None:
        return await self._live_thread().call(lambda: self._paused_sampler().score(token_ids))

    def resume(self) -> None:
        def go_on() -> None:
            self._paused, self._pausing = False, None

        self._live_thread().command(go_on)

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[int], None]
    ) -> Generated:
        thread = self._live_thread()
        done = thread.future()
        counter = _Counter(thread, on_tokens)
        row: list[Any] = []

        def finished(generated: Generated) -> None:
            counter.flush()
            thread.settle(done, generated)

        def add() -> None:
            try:
                row.append(self._live_sampler().add(request, counter.count, finished))
            except EngineError as error:
                thread.settle(done, error)

        thread.command(add)
        try:
            generated: Generated = await done
            return generated
        except asyncio.CancelledError:
            thread.command(lambda: self._live_sampler().remove(row[0]) if row else None)
            raise

    async def stop(self) -> None:
        if self._thread is not None:
            await self._thread.stop()

    # ------------------------------------------------------ called from the thread

    def _turn(self) -> bool:
        """One step, or one towards a pause; whether there is more to do."""
        if self._pausing is not None:
            self._advance_pause(self._pausing[0])
        elif self.busy:
            self._live_sampler().step()
        return self.busy or self._pausing is not None

    def _advance_pause(self, mode: InstallMode) -> None:
        sampler = self._live_sampler()
        if mode == "finish" and sampler.running:
            sampler.step(admit=False)
            return
        if mode == "abort":
            sampler.restart_running()
        assert self._pausing is not None
        tell = self._pausing[1]
        self._paused, self._pausing = True, None
        tell()

    def _build(self, assets: Path) -> None:
        """Make the model from config.json, without weights, and warm it up."""
        if self._threads:
            torch.set_num_threads(self._threads)
        config = AutoConfig.from_pretrained(assets, local_files_only=True)
        model = AutoModelForCausalLM.from_config(config, dtype=self._dtype)  # type: ignore[no-untyped-call]
        model.to(self._device).eval().requires_grad_(False)
        _make_logits_exact(model)
        sampler = Sampler(
            model,
            eos_ids=_eos_ids(config, assets),
            sequences_max=self._sequences_max,
            device=self._device,
            weights_dtype=self._weights_dtype,
        )
        sampler.version = WARM_UP
        for length in (2, 3):
            request = GenerateRequest(
                token_ids=[0] * length, sampling=Sampling(max_tokens=3), seed=length
            )
            sampler.add(request, lambda _: None, lambda _: None)
        while sampler.waiting or sampler.running:
            sampler.step()
        sampler.score(np.zeros((2, 3), np.int32))
        sampler.version = None
        self._sampler, self._paused = sampler, True

    def _live_sampler(self) -> Sampler:
        if self._sampler is None:
            raise EngineError("the engine was not started")
        return self._sampler

    def _paused_sampler(self) -> Sampler:
        if not self._paused:
            raise EngineError("load and score need a paused engine; call pause first")
        return self._live_sampler()

    def _live_thread(self) -> EngineThread:
        if self._thread is None:
            raise EngineError("the engine was not started")
        return self._thread


class _Counter:
    """Counts a request's tokens in the thread, reports them to the loop now and then."""

    def __init__(self, thread: EngineThread, on_tokens: Callable[[int], None]) -> None:
        self._thread = thread
        self._on_tokens = on_tokens
        self._unreported = 0

    def count(self, tokens: int) -> None:
        self._unreported += tokens
        if self._unreported >= REPORT_STEPS:
            self.flush()

    def flush(self) -> None:
        if self._unreported:
            tokens, self._unreported = self._unreported, 0
            self._thread.post(lambda: self._on_tokens(tokens))


def _device(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _make_logits_exact(model: Any) -> None:
    """Logits in float32, whatever the layers compute in, as the learner's: those of bfloat16
    are rounded too coarsely (a logit of 20 to a sixteenth)."""
    head = model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or head.weight.dtype == torch.float32:
        return

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        bias = None if head.bias is None else head.bias.float()
        return torch.nn.functional.linear(hidden.float(), head.weight.float(), bias)

    setattr(head, "forward", forward)  # noqa: B010  mypy takes methods for fixed


def _eos_ids(config: Any, assets: Path) -> list[int]:
    """Tokens that end a sequence: generation_config.json names them, else config.json."""
    path = assets / "generation_config.json"
    named = None
    if path.exists():
        named = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    if named is None:
        named = config.eos_token_id
    if named is None:
        raise EngineError("neither generation_config.json nor config.json names an eos_token_id")
    return [named] if isinstance(named, int) else list(named)
