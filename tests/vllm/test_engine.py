"""The engine around vLLM: its thread, the canary over the tied head, and running out of memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from echo2.errors import EngineError
from echo2.types import Sampling, Version
from echo2_workers.canary import Probe
from echo2_workers.engine import GenerateRequest, RequestError
from echo2_workers.installing import InstallError, Weights, install

V1, V2 = Version(1, 1), Version(1, 2)
PROMPT = [1, 5, 9, 4]
ROWS = (np.arange(48, dtype=np.int32).reshape(4, 12) * 7) % 32


def an_engine(core: Any) -> Any:
    """A VllmEngine around a core that is already there."""
    from echo2_workers.engines.thread import EngineThread
    from echo2_workers.engines.vllm import MEMORY_HINT, VllmEngine

    engine = VllmEngine(dtype="float32")
    engine._core = core
    engine._thread = EngineThread(engine._turn, name="test", memory_hint=MEMORY_HINT)
    return engine


def a_request(seed: int = 0, *, max_tokens: int = 30) -> GenerateRequest:
    return GenerateRequest(token_ids=PROMPT, seed=seed, sampling=Sampling(max_tokens=max_tokens))


def a_probe(models: Any, seed: int) -> Probe:
    logprobs = np.zeros(ROWS.shape, np.float32)
    for i, row in enumerate(ROWS.tolist()):
        logprobs[i, 1:] = models.logprobs(seed, row)
    return Probe(ROWS, logprobs)


def ignore(_: int) -> None:
    """Token counts that a test does not look at."""


async def test_a_stale_tied_head_is_refused_and_the_version_before_serves_on(
    bench: Callable[..., Any], models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: vLLM's reload leaves the packed copy of a tied head as it was."""
    from echo2_workers.engines import vllm_worker

    engine = an_engine(bench().core)
    first, second = Weights(V1, models.stored(1)), Weights(V2, models.stored(2))
    how: dict[str, Any] = {"mode": "continue", "tolerance": 1e-4, "previous": first}
    monkeypatch.setattr(vllm_worker, "refresh_heads", lambda model: None)
    with pytest.raises(InstallError) as failed:
        await install(engine, second, probe=a_probe(models, 2), **how)
    assert failed.value.stage == "canary"
    assert failed.value.restored
    monkeypatch.undo()
    served = await engine.generate(a_request(), ignore)
    assert {span.version for span in served.spans} == {V1}
    assert models.difference(1, PROMPT, served) < 1e-4

    installed = await install(engine, second, probe=a_probe(models, 2), **how)
    assert installed.canary_diff is not None
    assert installed.canary_diff < 1e-5
    served = await engine.generate(a_request(), ignore)
    assert {span.version for span in served.spans} == {V2}
    assert models.difference(2, PROMPT, served) < 1e-4
    await engine.stop()


async def test_requests_run_together_and_one_that_is_cancelled_leaves(
    bench: Callable[..., Any], models: Any
) -> None:
    core = bench().core
    engine = an_engine(core)
    counts = [0] * 8

    def counted(i: int) -> Callable[[int], None]:
        def count(tokens: int) -> None:
            counts[i] += tokens

        return count

    begun = asyncio.Event()
    endless = asyncio.create_task(
        engine.generate(a_request(99, max_tokens=250), lambda _: begun.set())
    )
    several = [asyncio.create_task(engine.generate(a_request(i), counted(i))) for i in range(8)]
    await begun.wait()
    endless.cancel()
    with pytest.raises(asyncio.CancelledError):
        await endless
    for generated in await asyncio.gather(*several):
        assert models.difference(1, PROMPT, generated) < 1e-4
    assert counts == [30] * 8
    with pytest.raises(RequestError, match="empty"):
        await engine.generate(GenerateRequest(token_ids=[], sampling=Sampling(), seed=0), ignore)
    await engine.pause("finish")
    assert core.running == 0
    assert engine.busy is False
    await engine.stop()


async def test_load_and_score_need_a_pause(bench: Callable[..., Any], models: Any) -> None:
    engine = an_engine(bench().core)
    with pytest.raises(EngineError, match="pause first"):
        await engine.load(models.stored(2), V2)
    with pytest.raises(EngineError, match="pause first"):
        await engine.score(ROWS)
    await engine.stop()


@pytest.mark.parametrize("kind", ["host", "device"])
async def test_out_of_memory_fails_every_call_and_says_what_to_lower(
    bench: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import torch

    core = bench().core
    engine = an_engine(core)
    error = MemoryError() if kind == "host" else torch.OutOfMemoryError("tried to allocate 2 GiB")

    def no_room(*_: Any, **__: Any) -> None:
        raise error

    runner = core._llm.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    with monkeypatch.context() as planted:
        planted.setattr(runner.model, "compute_logits", no_room)
        for _ in range(2):
            with pytest.raises(EngineError, match=r"out of memory.*sequences_max"):
                await engine.generate(a_request(), ignore)
    await engine.stop()
    for name in list(core._inside):
        core._take_out(core._inside[name])
