"""The engine without a model: it takes the time that sampling would take, and no more.

For load and capacity tests, light enough for a hundred workers on one machine: it runs
inside the daemon's event loop.

A group's length in tokens is drawn from a gamma distribution with mean `tokens_mean` and
coefficient of variation `tokens_cv`, by the group's seed, and divided evenly over its
trajectories (at least one token each; `max_tokens` cuts it). A group, which is one slot,
produces `tokens_per_s`, so a group of n tokens takes n / tokens_per_s seconds however many
trajectories it has. Tokens carry the version that was installed when they were produced.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from echo2.errors import EngineError
from echo2.group_lengths import group_tokens, trajectory_tokens
from echo2.types import Span, Version
from echo2_workers.engine import (
    Generated,
    GenerateRequest,
    InstallMode,
    Logprobs,
    Tensors,
    Tokens,
    add_span,
)
from echo2_workers.tokenizer import FIRST_CHARACTER

REPORT_S: Final = 0.5
TOKEN_KINDS: Final = 18


@dataclass(slots=True, eq=False)
class _Run:
    """One sequence being produced: `produced` tokens until `since`, then `rate` a second."""

    total: int
    rate: float
    on_tokens: Callable[[int], None]
    since: float
    produced: float = 0.0
    reported: int = 0
    spans: list[Span] = field(default_factory=list)

    def count(self, now: float) -> int:
        return min(self.total, int(self.produced + (now - self.since) * self.rate))

    def report(self, count: int) -> None:
        if count > self.reported:
            self.on_tokens(count - self.reported)
            self.reported = count

    def mark(self, version: Version, end: int) -> None:
        """Tokens up to `end` that no span names yet are of `version`."""
        add_span(self.spans, version, self.spans[-1].end if self.spans else 0, end)


class NullEngine:
    def __init__(
        self,
        *,
        tokens_per_s: float,
        tokens_mean: float,
        tokens_cv: float = 0.0,
        install_s: float = 0.0,
    ) -> None:
        self.version: Version | None = None
        self._tokens_per_s = tokens_per_s
        self._tokens_mean = tokens_mean
        self._tokens_cv = tokens_cv
        self._install_s = install_s
        self._runs: set[_Run] = set()
        self._open = asyncio.Event()
        """Set while sampling goes on; cleared from a pause until `resume`."""
        self._drained = asyncio.Event()
        self._frozen = True
        self._stopped = False
        self._reporter: asyncio.Task[None] | None = None

    @property
    def steps(self) -> int:
        return 0

    @property
    def busy(self) -> bool:
        return False

    async def start(self, assets: Path | None) -> None:
        self._reporter = asyncio.create_task(self._report(), name="null_engine.report")

    async def pause(self, mode: InstallMode) -> None:
        self._open.clear()
        while mode == "finish" and self._runs:
            self._drained.clear()
            await self._drained.wait()
        if self._frozen:
            return
        self._frozen = True
        now = asyncio.get_running_loop().time()
        for run in self._runs:
            run.report(run.count(now))
            if mode == "abort":
                run.produced, run.reported, run.spans = 0.0, 0, []
            else:
                run.produced = min(run.total, run.produced + (now - run.since) * run.rate)
                assert self.version is not None
                run.mark(self.version, int(run.produced))

    async def load(self, tensors: Tensors, version: Version) -> None:
        if not self._frozen:
            raise EngineError("load needs a paused engine; call pause first")
        await asyncio.sleep(self._install_s)
        self.version = version

    async def score(self, token_ids: Tokens) -> Logprobs | None:
        return None

    def resume(self) -> None:
        if self.version is None:
            raise EngineError("no version is installed; nothing can be sampled")
        now = asyncio.get_running_loop().time()
        if self._frozen:
            for run in self._runs:
                run.since = now
        self._frozen = False
        self._open.set()

    async def generate(
        self, request: GenerateRequest, on_tokens: Callable[[int], None]
    ) -> Generated:
        await self._open.wait()
        self._check_alive()
        loop = asyncio.get_running_loop()
        length = self._length(request)
        total = min(length, request.sampling.max_tokens)
        run = _Run(total, self._tokens_per_s / request.group_size, on_tokens, loop.time())
        self._runs.add(run)
        try:
            while True:
                if self._frozen:
                    await self._open.wait()
                self._check_alive()
                left_s = (total - run.produced) / run.rate - (loop.time() - run.since)
                if left_s <= 1e-6:  # rounding
                    break
                await asyncio.sleep(left_s)
            assert self.version is not None
            run.report(total)
            run.mark(self.version, total)
        finally:
            self._runs.discard(run)
            if not self._runs:
                self._drained.set()
        tokens = np.random.default_rng(request.seed).integers(0, TOKEN_KINDS, total, np.int32)
        return Generated(
            tokens + np.int32(FIRST_CHARACTER),
            np.full(total, -math.log(TOKEN_KINDS), np.float32),
            tuple(run.spans),
            "stop" if total == length else "length",
        )

    async def stop(self) -> None:
        self._stopped = True
        self._open.set()
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.gather(self._reporter, return_exceptions=True)

    def _length(self, request: GenerateRequest) -> int:
        """Tokens of this trajectory: its share of the group's length."""
        group = group_tokens(request.group_seed, mean=self._tokens_mean, cv=self._tokens_cv)
        return trajectory_tokens(group, index=request.index, group_size=request.group_size)

    def _check_alive(self) -> None:
        if self._stopped:
            raise EngineError("the engine was stopped")

    async def _report(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(REPORT_S)
            if not self._frozen:
                for run in self._runs:
                    run.report(run.count(loop.time()))
