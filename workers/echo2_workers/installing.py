"""Puts a version into an engine: all of it and checked, or the version before serves on.

pause -> load -> score the probe -> (canary above tolerance: load the version before) -> resume

No token is sampled between the load and the verdict, so none carries a version that failed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

from echo2.errors import Echo2Error
from echo2.types import Version
from echo2_workers.canary import Probe, canary_problem, mean_difference
from echo2_workers.engine import Engine, InstallMode, PoisonedEngineError, Tensors


@dataclass(frozen=True, slots=True)
class Weights:
    """The tensors of one version, mapped from disk; valid until the install is over."""

    version: Version
    tensors: Tensors


@dataclass(frozen=True, slots=True)
class Installed:
    install_s: float
    pause_s: float
    canary_diff: float | None


class InstallError(Echo2Error):
    """The version does not serve. `restored`: the one before does, or none did before."""

    def __init__(self, text: str, *, stage: Literal["install", "canary"], restored: bool) -> None:
        self.stage: Literal["install", "canary"] = stage
        self.restored = restored
        super().__init__(text)


async def install(
    engine: Engine,
    weights: Weights,
    *,
    mode: InstallMode,
    probe: Probe | None,
    tolerance: float,
    previous: Weights | None,
) -> Installed:
    """Raises InstallError; then sampling goes on only if it is `restored` and `previous`
    is not None (an engine without a version stays paused)."""
    began = time.monotonic()
    await engine.pause(mode)
    paused = time.monotonic()
    difference: float | None = None
    loaded = False
    try:
        await engine.load(weights.tensors, weights.version)
        loaded = True
        if probe is not None:
            scored = await engine.score(probe.token_ids)
            difference = None if scored is None else mean_difference(probe, scored)
    except Echo2Error as error:
        poisoned = loaded or isinstance(error, PoisonedEngineError)
        restored = await _restore(engine, previous, poisoned=poisoned)
        raise InstallError(str(error), stage="install", restored=restored) from error
    problem = canary_problem(difference, tolerance)
    if problem:
        restored = await _restore(engine, previous, poisoned=True)
        raise InstallError(problem, stage="canary", restored=restored)
    engine.resume()
    ended = time.monotonic()
    return Installed(ended - began, ended - paused, difference)


async def _restore(engine: Engine, previous: Weights | None, *, poisoned: bool) -> bool:
    """Whether the version before serves again; without one the engine stays paused."""
    if previous is None:
        return True
    try:
        if poisoned:
            await engine.load(previous.tensors, previous.version)
    except Echo2Error:
        return False
    engine.resume()
    return True
