"""The engine without a model, on a virtual clock: rates, lengths, installs."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest

from echo2.types import Sampling, Span, Version
from echo2_workers.engine import Generated, GenerateRequest
from echo2_workers.engines.null import NullEngine

V1, V2 = Version(1, 1), Version(1, 2)


class _Leaping(selectors.DefaultSelector):
    """Waits for nothing: time leaps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self.now += timeout
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._leaping = _Leaping()
        super().__init__(self._leaping)

    def time(self) -> float:
        return self._leaping.now


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(coroutine)


def now() -> float:
    return asyncio.get_running_loop().time()


async def an_engine(**settings: Any) -> NullEngine:
    values = {"tokens_per_s": 100.0, "tokens_mean": 80.0} | settings
    engine = NullEngine(**values)
    await engine.start(None)
    await engine.pause("continue")
    await engine.load({}, V1)
    engine.resume()
    return engine


def a_request(
    *, index: int = 0, group_size: int = 1, max_tokens: int = 10_000, seed: int = 7
) -> GenerateRequest:
    return GenerateRequest(
        token_ids=[1],
        sampling=Sampling(max_tokens=max_tokens),
        seed=seed + index,
        group_seed=seed,
        group_size=group_size,
        index=index,
    )


async def a_group(engine: NullEngine, group_size: int, seed: int = 7) -> list[Generated]:
    return await asyncio.gather(
        *(
            engine.generate(a_request(index=i, group_size=group_size, seed=seed), lambda _: None)
            for i in range(group_size)
        )
    )


@pytest.mark.parametrize("group_size", [1, 3, 8])
def test_a_group_takes_its_length_over_the_rate_of_a_slot(group_size: int) -> None:
    async def scenario() -> None:
        engine = await an_engine()
        began = now()
        group = await a_group(engine, group_size)
        assert sum(len(each.token_ids) for each in group) == 80
        assert now() - began == pytest.approx(0.8, rel=0.05)
        assert {each.spans[0].version for each in group} == {V1}
        await engine.stop()

    run(scenario())


def test_slots_do_not_slow_each_other() -> None:
    async def scenario() -> None:
        engine = await an_engine()
        began = now()
        await asyncio.gather(*(a_group(engine, 4, seed) for seed in range(20)))
        assert now() - began == pytest.approx(0.8, rel=0.05)
        await engine.stop()

    run(scenario())


def test_lengths_are_gamma_distributed_and_seeded() -> None:
    async def scenario() -> None:
        engine = await an_engine(tokens_mean=200.0, tokens_cv=0.5)
        lengths = [
            sum(len(each.token_ids) for each in await a_group(engine, 2, seed))
            for seed in range(400)
        ]
        again = [
            sum(len(each.token_ids) for each in await a_group(engine, 2, seed)) for seed in range(5)
        ]
        assert lengths[:5] == again
        assert np.mean(lengths) == pytest.approx(200, rel=0.1)
        assert np.std(lengths) / np.mean(lengths) == pytest.approx(0.5, rel=0.15)
        await engine.stop()

    run(scenario())


def test_max_tokens_cuts() -> None:
    async def scenario() -> None:
        engine = await an_engine()
        generated = await engine.generate(a_request(max_tokens=5), lambda _: None)
        assert (len(generated.token_ids), generated.finish) == (5, "length")
        await engine.stop()

    run(scenario())


def test_progress_is_told_while_it_runs_and_adds_up() -> None:
    async def scenario() -> None:
        engine = await an_engine(tokens_mean=1000.0)
        told: list[tuple[float, int]] = []
        await engine.generate(a_request(), lambda n: told.append((now(), n)))
        assert sum(n for _, n in told) == 1000
        assert len(told) > 10
        await engine.stop()

    run(scenario())


@pytest.mark.parametrize("mode", ["continue", "finish", "abort"])
def test_an_install_pauses_and_each_mode_gives_its_spans(mode: Any) -> None:
    async def scenario() -> None:
        engine = await an_engine(install_s=3.0, tokens_mean=100.0)
        began = now()
        counted: list[int] = []
        running = asyncio.create_task(engine.generate(a_request(), counted.append))
        await asyncio.sleep(0.405)
        await engine.pause(mode)
        paused = now()
        late = asyncio.create_task(engine.generate(a_request(), lambda _: None))
        await engine.load({}, V2)
        engine.resume()
        generated = await running
        ended = now() - began
        if mode == "continue":
            assert generated.spans == (Span(V1, 0, 40), Span(V2, 40, 100))
            assert ended == pytest.approx(4.0, rel=0.02)
        elif mode == "finish":
            assert generated.spans == (Span(V1, 0, 100),)
            assert paused - began == pytest.approx(1.0, rel=0.02)
        else:
            assert generated.spans == (Span(V2, 0, 100),)
            assert ended == pytest.approx(0.405 + 3.0 + 1.0, rel=0.02)
            assert sum(counted) == 140, "what was thrown away stays counted"
        assert (await late).spans == (Span(V2, 0, 100),)
        await engine.stop()

    run(scenario())


def test_a_cancelled_call_frees_the_engine_to_finish() -> None:
    async def scenario() -> None:
        engine = await an_engine(tokens_mean=1e6)
        running = asyncio.create_task(engine.generate(a_request(), lambda _: None))
        await asyncio.sleep(0.1)
        pausing = asyncio.create_task(engine.pause("finish"))
        await asyncio.sleep(0.1)
        running.cancel()
        await pausing
        assert now() < 10.0
        await engine.stop()

    run(scenario())


@pytest.mark.parametrize("mode", ["continue", "finish", "abort"])
def test_installs_among_many_requests_end_and_every_request_is_answered(mode: Any) -> None:
    """Two hundred are under way whenever a version comes, ten times; nobody waits for ever."""

    async def scenario() -> None:
        engine = await an_engine(install_s=0.5, tokens_mean=400.0)
        groups = [asyncio.create_task(a_group(engine, 4, seed)) for seed in range(50)]
        for step in range(2, 12):
            await asyncio.sleep(0.3)
            await engine.pause(mode)
            late = asyncio.create_task(a_group(engine, 4, 1000 + step))
            await engine.load({}, Version(1, step))
            engine.resume()
            groups.append(late)
        answered = [each for group in await asyncio.gather(*groups) for each in group]
        assert len(answered) == 60 * 4
        assert all(len(each.token_ids) == 100 for each in answered)
        assert not engine._runs
        await engine.stop()

    run(scenario())
