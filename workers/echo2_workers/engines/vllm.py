"""The engine on vLLM, on CPUs and GPUs alike.

vLLM's core runs in this process, in a thread of its own, rather than behind vLLM's
asynchronous front end, which would start a second process for it. `docs/vllm.md` holds the
measurements behind that: a quarter of the start-up time, one process to watch and to kill,
and installs at an exact token boundary. Ranks beyond the first (tensor or pipeline
parallelism) are processes that vLLM starts; they die with this one.

Importing this module imports neither torch nor vLLM: the thread does, once it is asked to
start, so that the host answers pings meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from echo2.errors import ConfigError, EngineError
from echo2.types import Version
from echo2_workers.engine import (
    Generated,
    GenerateRequest,
    InstallMode,
    Logprobs,
    StoredTensors,
    Tensors,
    Tokens,
)
from echo2_workers.engines.thread import EngineThread
from echo2_workers.engines.vllm_arguments import (
    VllmSettings,
    engine_arguments,
    eos_ids,
    set_environment,
)
from echo2_workers.playing import told

if TYPE_CHECKING:
    from echo2_workers.engines.vllm_core import VllmCore

REPORT_S: Final = 0.2
"""Sampled tokens are reported to the event loop so often."""

MEMORY_HINT: Final = (
    "worker.vllm.sequences_max, max_model_len, kv_cache_gb or gpu_memory_utilization, or run "
    "fewer workers on this machine"
)


class VllmEngine:
    """Keyword arguments are those of `VllmSettings`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = VllmSettings(**settings)
        self._core: VllmCore | None = None
        self._thread: EngineThread | None = None
        self._pausing: tuple[InstallMode, Callable[[], None]] | None = None  # the thread's

    @property
    def steps(self) -> int:
        return 0 if self._core is None else self._core.steps

    @property
    def busy(self) -> bool:
        core = self._core
        return core is not None and not core.paused and core.running > 0

    async def start(self, assets: Path | None) -> None:
        if assets is None:
            raise EngineError("the run has no assets; the learner must publish config.json")
        folder = assets
        self._thread = EngineThread(self._turn, name="vllm", memory_hint=MEMORY_HINT)
        await self._thread.call(lambda: self._build(folder))

    async def pause(self, mode: InstallMode) -> None:
        thread = self._live_thread()
        paused = thread.future()

        def begin() -> None:
            self._pausing = (mode, lambda: thread.settle(paused, None))

        thread.command(begin)
        await paused

    async def load(self, tensors: Tensors, version: Version) -> None:
        if not isinstance(tensors, StoredTensors):
            raise EngineError("this engine loads versions that are stored on disk")
        await self._live_thread().call(lambda: self._paused_core().load(tensors, version))

    async def score(self, token_ids: Tokens) -> Logprobs | None:
        return await self._live_thread().call(lambda: self._paused_core().score(token_ids))

    def resume(self) -> None:
        def go_on() -> None:
            self._pausing = None
            self._live_core().resume()

        self._live_thread().command(go_on)

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[int], None]
    ) -> Generated:
        thread = self._live_thread()
        done = thread.future()
        counter = _Counter(thread, on_tokens)
        taken: list[Any] = []

        def finished(generated: Generated) -> None:
            counter.flush()
            thread.settle(done, generated)

        def add() -> None:
            try:
                sequence = self._live_core().add(request, counter.count, finished)
            except EngineError as error:
                thread.settle(done, error)
            else:
                taken.append(sequence)

        thread.command(add)
        try:
            generated: Generated = await done
            return generated
        finally:
            if done.cancelled():
                thread.command(lambda: self._live_core().remove(taken[0]) if taken else None)

    async def stop(self) -> None:
        if self._thread is not None:
            await self._thread.stop()

    # ------------------------------------------------------ called in the thread

    def _turn(self) -> bool:
        """One step, or one towards a pause; whether there is more to do."""
        core = self._core
        if core is None:
            return False
        if self._pausing is not None:
            mode, tell = self._pausing
            if core.pause(mode):
                self._pausing = None
                tell()
                return False
        if core.paused or not core.running:
            return False
        core.step()
        return True

    def _build(self, assets: Path) -> None:
        """Make the model from config.json, with weights of no meaning, and warm it up."""
        set_environment(self._settings)
        from vllm import LLMEngine

        from echo2_workers.engines.dtypes import MODEL_DTYPES
        from echo2_workers.engines.vllm_core import VllmCore
        from echo2_workers.engines.vllm_tensors import expected_tensors

        settings = self._settings
        try:
            llm = LLMEngine.from_engine_args(engine_arguments(settings, assets))
        except ValueError as error:
            if "memory" in str(error):  # it may be there at the next try
                raise
            raise ConfigError(f"vLLM refuses worker.vllm: {told(error)}") from error
        core = VllmCore(
            llm,
            expected=expected_tensors(
                assets, MODEL_DTYPES[settings.weights_dtype or settings.dtype]
            ),
            eos_ids=(*eos_ids(assets), *settings.stop_token_ids),
            stop=tuple(settings.stop),
            kv_on_update=settings.kv_on_update,
            on_failure=lambda text: self._live_thread().fail(EngineError(text)),
        )
        core.warm_up()
        self._core = core

    def _live_thread(self) -> EngineThread:
        if self._thread is None:
            raise EngineError("the engine was not started")
        return self._thread

    def _live_core(self) -> VllmCore:
        if self._core is None:
            raise EngineError("the engine was not started")
        return self._core

    def _paused_core(self) -> VllmCore:
        core = self._live_core()
        if not core.paused:
            raise EngineError("load and score need a paused engine; call pause first")
        return core


class _Counter:
    """Counts a request's tokens in the thread, and reports them to the loop now and then."""

    def __init__(self, thread: EngineThread, on_tokens: Callable[[int], None]) -> None:
        self._thread = thread
        self._on_tokens = on_tokens
        self._unreported = 0
        self._reported_at = float("-inf")

    def count(self, tokens: int) -> None:
        self._unreported += tokens
        if time.monotonic() - self._reported_at >= REPORT_S:
            self.flush()

    def flush(self) -> None:
        tokens, self._unreported = self._unreported, 0
        self._reported_at = time.monotonic()
        if tokens:
            self._thread.post(lambda: self._on_tokens(tokens))
