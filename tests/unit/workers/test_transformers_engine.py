"""The engine around the sampler: its thread, pauses, cancelled calls, and its death."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo2.errors import EngineError
from echo2.types import Version
from echo2_workers.canary import Probe
from echo2_workers.engine import Generated, RequestError
from echo2_workers.engines.transformers import TransformersEngine
from echo2_workers.installing import InstallError, Weights, install

V1, V2 = Version(1, 1), Version(1, 2)
DEADLINE_S = 60.0


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    async def within_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await coroutine

    asyncio.run(within_deadline())


async def an_engine(assets: Path, tiny: Any, seed: int | None = 1) -> TransformersEngine:
    """Started, with the weights of `seed` as version 1.1."""
    engine = TransformersEngine(dtype="float32", device="cpu", sequences_max=16)
    await engine.start(assets)
    if seed is not None:
        await engine.pause("continue")
        await engine.load(tiny.tensors(seed), V1)
        engine.resume()
    return engine


def ignore(_: int) -> None:
    """Token counts that a test does not look at."""


def check(tiny: Any, prompt: list[int], generated: Generated, seed: int) -> None:
    full = tiny.logprobs(seed, [*prompt, *generated.token_ids.tolist()])
    assert np.abs(full[len(prompt) - 1 :] - generated.logprobs).max() < 1e-5


def test_many_requests_are_answered_and_their_tokens_counted(assets: Path, tiny: Any) -> None:
    async def scenario() -> None:
        engine = await an_engine(assets, tiny)
        counts = [0] * 12

        async def one(i: int) -> None:
            def count(tokens: int) -> None:
                counts[i] += tokens

            prompt = [1, *range(3, 3 + i)]
            generated = await engine.generate(tiny.request(prompt, seed=i, max_tokens=10), count)
            check(tiny, prompt, generated, 1)
            assert counts[i] == len(generated.token_ids)

        await asyncio.gather(*(one(i) for i in range(12)))
        assert engine.steps > 0
        assert not engine.busy
        await engine.stop()

    run(scenario())


@pytest.mark.parametrize("mode", ["continue", "finish", "abort"])
def test_each_mode_of_update_gives_its_spans(assets: Path, tiny: Any, mode: Any) -> None:
    async def scenario() -> None:
        engine = await an_engine(assets, tiny)
        engine._live_sampler()._eos_ids = frozenset()  # so that nothing ends early
        sampled = asyncio.Event()
        request = tiny.request([1, 5], seed=1, max_tokens=60)
        running = asyncio.create_task(engine.generate(request, lambda _: sampled.set()))
        await sampled.wait()
        await engine.pause(mode)
        late = asyncio.create_task(engine.generate(tiny.request([1, 6], seed=2), ignore))
        await engine.load(tiny.tensors(2), V2)
        assert engine.busy is False, "paused"
        engine.resume()
        first, second = await running, await late
        versions = [span.version for span in first.spans]
        assert (
            versions
            == {
                # the last tokens may have been sampled before the pause came through
                "continue": [V1, V2] if len(versions) == 2 else [V1],
                "finish": [V1],
                "abort": [V2] if versions == [V2] else [V1],
            }[mode]
        )
        assert [span.version for span in second.spans] == [V2]
        check(tiny, [1, 6], second, 2)
        await engine.stop()

    run(scenario())


def test_a_cancelled_call_leaves_the_batch(assets: Path, tiny: Any) -> None:
    async def scenario() -> None:
        engine = await an_engine(assets, tiny)
        await engine.pause("continue")
        cancelled = asyncio.create_task(engine.generate(tiny.request([1, 5]), ignore))
        kept = asyncio.create_task(engine.generate(tiny.request([1, 6], seed=5), ignore))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        engine.resume()
        check(tiny, [1, 6], await kept, 1)
        assert engine._live_sampler().waiting == 0
        await engine.stop()

    run(scenario())


def test_a_bad_request_fails_alone_and_a_stopped_engine_fails_all(assets: Path, tiny: Any) -> None:
    async def scenario() -> None:
        engine = await an_engine(assets, tiny)
        with pytest.raises(RequestError, match="vocabulary"):
            await engine.generate(tiny.request([1, 99]), ignore)
        await engine.generate(tiny.request([1, 5]), ignore)
        await engine.pause("continue")
        waiting = asyncio.create_task(engine.generate(tiny.request([1, 5]), ignore))
        await asyncio.sleep(0)
        await engine.stop()
        with pytest.raises(EngineError, match="stopped"):
            await waiting
        with pytest.raises(EngineError, match="stopped"):
            await engine.generate(tiny.request([1, 5]), ignore)

    run(scenario())


def test_a_model_that_breaks_in_a_step_fails_every_call(assets: Path, tiny: Any) -> None:
    async def scenario() -> None:
        engine = await an_engine(assets, tiny)
        with np.errstate(invalid="ignore"):
            broken = {
                name: (dtype, shape, memoryview(b"\xff" * len(content)))
                for name, (dtype, shape, content) in tiny.tensors(1).items()
            }
        await engine.pause("continue")
        await engine.load(broken, V2)
        engine.resume()
        with pytest.raises(EngineError, match="no numbers"):
            await engine.generate(tiny.request([1, 5]), ignore)
        with pytest.raises(EngineError):
            await engine.generate(tiny.request([1, 5]), ignore)
        await engine.stop()

    run(scenario())


def test_load_and_score_need_a_pause(assets: Path, tiny: Any) -> None:
    async def scenario() -> None:
        engine = await an_engine(assets, tiny)
        with pytest.raises(EngineError, match="pause first"):
            await engine.load(tiny.tensors(2), V2)
        with pytest.raises(EngineError, match="pause first"):
            await engine.score(np.ones((1, 3), np.int32))
        await engine.stop()

    run(scenario())


def test_a_failed_canary_serves_the_version_before_bit_for_bit(assets: Path, tiny: Any) -> None:
    rows = np.arange(8, dtype=np.int32).reshape(2, 4) + 3

    def probe(seed: int) -> Probe:
        logprobs = np.zeros((2, 4), np.float32)
        for i, row in enumerate(rows.tolist()):
            logprobs[i, 1:] = tiny.logprobs(seed, row)
        return Probe(rows, logprobs)

    async def scenario() -> None:
        engine = await an_engine(assets, tiny, seed=None)
        first = Weights(V1, tiny.tensors(1))
        installed = await install(
            engine, first, mode="continue", probe=probe(1), tolerance=1e-4, previous=None
        )
        assert installed.canary_diff is not None
        assert installed.canary_diff < 1e-5
        with pytest.raises(InstallError) as failed:
            await install(
                engine,
                Weights(V2, tiny.tensors(2)),
                mode="continue",
                probe=probe(3),
                tolerance=1e-4,
                previous=first,
            )
        assert (failed.value.stage, failed.value.restored) == ("canary", True)
        generated = await engine.generate(tiny.request([1, 5]), ignore)
        assert {span.version for span in generated.spans} == {V1}
        check(tiny, [1, 5], generated, 1)
        await engine.stop()

    run(scenario())


def test_an_engine_without_usable_assets_says_what_is_missing(tmp_path: Path) -> None:
    async def scenario() -> None:
        engine = TransformersEngine(dtype="float32")
        with pytest.raises(EngineError, match="no assets"):
            await engine.start(None)
        with pytest.raises(EngineError):
            await engine.start(tmp_path)
        await engine.stop()

    run(scenario())
