"""The engine process with vLLM in it: killed, stopped, mistaken, and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from echo2.errors import ConfigError, EngineError
from echo2.types import Sampling, Version
from echo2_workers.engine import Generated, GenerateRequest
from echo2_workers.engine_process import EngineProcess, InstallOrder

V1, V2 = Version(1, 1), Version(1, 2)
PROMPT = [1, 5, 9, 4]
SETTINGS: dict[str, Any] = {"dtype": "float32", "kv_cache_gb": 0.1, "sequences_max": 32}


class Life:
    """One engine process, and what it said at its end."""

    def __init__(self, models: Any, **settings: Any) -> None:
        self.models = models
        self.deaths: list[str] = []
        self.process = EngineProcess(
            "vllm", SETTINGS | settings, on_died=self.deaths.append, python=sys.executable
        )

    @property
    def pid(self) -> int:
        child = self.process._child
        assert child is not None
        return child.pid

    async def install(self, seed: int, version: Version, *, mode: Any = "continue") -> None:
        announced = SimpleNamespace(
            manifest_digest=self.models.stored(seed).digest,
            version=version,
            probe_length=0,
            probe_tokens=b"",
            probe_logprobs=b"",
        )
        await self.process.install(
            InstallOrder(
                announced=announced,  # type: ignore[arg-type]
                previous=None,
                folder=self.models.folder,
                mode=mode,
                tolerance=1e-4,
            )
        )

    def generate(self, seed: int = 0, *, on_tokens: Callable[[int], None] | None = None) -> Any:
        request = GenerateRequest(
            token_ids=PROMPT, seed=seed, sampling=Sampling(max_tokens=250, temperature=1.3)
        )
        return self.process.generate(request, on_tokens or (lambda _: None))


@asynccontextmanager
async def a_life(models: Any, **settings: Any) -> AsyncIterator[Life]:
    life = Life(models, **settings)
    try:
        await life.process.start(models.assets)
        await life.install(1, V1)
        yield life
    finally:
        await life.process.stop()


async def dies(call: Awaitable[Any]) -> str:
    with pytest.raises(EngineError) as died:
        await call
    return str(died.value)


async def test_a_killed_engine_names_the_signal_to_everyone_who_waits(models: Any) -> None:
    async with a_life(models) as life:
        begun = asyncio.Event()
        across = asyncio.create_task(life.generate(7, on_tokens=lambda _: begun.set()))
        await begun.wait()
        await life.install(2, V2)
        generated = await across
        assert [span.version for span in generated.spans] in ([V1, V2], [V1])
        first = generated.spans[0].end
        own = models.logprobs(1, [*PROMPT, *generated.token_ids.tolist()], temperature=1.3)
        assert abs(own[len(PROMPT) - 1 :] - generated.logprobs)[:first].max() < 1e-4

        begun.clear()
        waiting = [
            asyncio.create_task(life.generate(seed, on_tokens=lambda _: begun.set()))
            for seed in range(64)
        ]
        await begun.wait()
        os.kill(life.pid, signal.SIGKILL)
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        failed = [end for end in ends if not isinstance(end, Generated)]  # a short one was done
        assert failed
        assert all("killed by SIGKILL: out of memory?" in str(end) for end in failed)
        assert all(isinstance(end, EngineError) for end in failed)
        assert "SIGKILL" in await dies(life.generate())
        assert len(life.deaths) == 1
        assert "SIGKILL" in life.deaths[0]


async def test_a_stopped_engine_is_noticed_and_ended(models: Any) -> None:
    async with a_life(models) as life:
        life.process._silence_max_s = 3.0
        os.kill(life.pid, signal.SIGSTOP)
        assert "silent for 3 s" in await dies(life.generate())
        assert life.deaths == ["the engine process was silent for 3 s"]
        child = life.process._child
        assert child is not None
        assert await child.wait() == -signal.SIGKILL


async def test_settings_that_cannot_work_are_told_at_once(models: Any) -> None:
    life = Life(models, engine_args={"block_sise": 32})
    try:
        with pytest.raises(ConfigError, match="block_sise; did you mean block_size"):
            await life.process.start(models.assets)
        assert life.deaths == [], "nothing to try again"
    finally:
        await life.process.stop()
