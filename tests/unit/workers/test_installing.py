"""Installs on a scripted engine: what is done in which order, and what serves after."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from echo2.errors import EngineError, WeightsError
from echo2.types import Version
from echo2_workers.canary import (
    Probe,
    canary_problem,
    mean_difference,
    read_probe,
    tolerance_of,
)
from echo2_workers.engine import PoisonedEngineError
from echo2_workers.installing import Installed, InstallError, Weights, install

V1, V2 = Version(1, 1), Version(1, 2)
PROBE = Probe(np.ones((1, 3), np.int32), np.asarray([[0.0, -1.0, -2.0]], np.float32))


class ScriptedEngine:
    """Records calls; `errors` raises by (method, version), `off` is added to the scores."""

    def __init__(self, *, off: float = 0.0, has_model: bool = True, **errors: Exception) -> None:
        self.calls: list[Any] = []
        self.off = off
        self.has_model = has_model
        self.errors = errors

    async def pause(self, mode: str) -> None:
        self.calls.append(("pause", mode))

    async def load(self, tensors: Any, version: Version) -> None:
        self.calls.append(("load", version))
        if f"load_{version.step}" in self.errors:
            raise self.errors[f"load_{version.step}"]

    async def score(self, token_ids: Any) -> Any:
        self.calls.append("score")
        if "score" in self.errors:
            raise self.errors["score"]
        return PROBE.logprobs + np.float32(self.off) if self.has_model else None

    def resume(self) -> None:
        self.calls.append("resume")


def an_install(engine: ScriptedEngine, *, first: bool = False, probe: Probe | None = PROBE) -> Any:
    return asyncio.run(
        install(
            engine,  # type: ignore[arg-type]
            Weights(V2, {}),
            mode="finish",
            probe=probe,
            tolerance=1e-4,
            previous=None if first else Weights(V1, {}),
        )
    )


def test_a_version_is_scored_before_anything_is_sampled_with_it() -> None:
    engine = ScriptedEngine(off=1e-5)
    installed = an_install(engine)
    assert isinstance(installed, Installed)
    assert installed.canary_diff == pytest.approx(1e-5, rel=0.1)
    assert engine.calls == [("pause", "finish"), ("load", V2), "score", "resume"]


@pytest.mark.parametrize("probe", [PROBE, None])
def test_without_a_model_or_a_probe_there_is_no_canary(probe: Probe | None) -> None:
    engine = ScriptedEngine(has_model=probe is None)
    assert an_install(engine, probe=probe).canary_diff is None
    assert engine.calls[-1] == "resume"


FAILURES: list[tuple[dict[str, Any], str, bool, list[Any]]] = [
    ({"off": 1.0}, "canary", True, [("load", V1), "resume"]),
    ({"off": float("nan")}, "canary", True, [("load", V1), "resume"]),
    ({"score": EngineError("no")}, "install", True, [("load", V1), "resume"]),
    ({"load_2": EngineError("no such tensor")}, "install", True, ["resume"]),
    ({"load_2": PoisonedEngineError("torn")}, "install", True, [("load", V1), "resume"]),
    ({"off": 1.0, "load_1": EngineError("no")}, "canary", False, [("load", V1)]),
]


@pytest.mark.parametrize(("trouble", "stage", "restored", "after"), FAILURES)
def test_the_version_before_serves_again_after_a_failure(
    trouble: dict[str, Any], stage: str, restored: bool, after: list[Any]
) -> None:
    engine = ScriptedEngine(**trouble)
    with pytest.raises(InstallError) as failed:
        an_install(engine)
    assert (failed.value.stage, failed.value.restored) == (stage, restored)
    begun = 3 if "score" in engine.calls else 2
    assert engine.calls[begun:] == after


def test_a_first_version_that_fails_leaves_the_engine_paused() -> None:
    engine = ScriptedEngine(off=1.0)
    with pytest.raises(InstallError) as failed:
        an_install(engine, first=True)
    assert failed.value.restored
    assert "resume" not in engine.calls


# -------------------------------------------------------------------------- the canary


def test_a_probe_is_read_from_frames_of_whole_rows() -> None:
    tokens = np.arange(6, dtype=np.int32)
    logprobs = -np.arange(6, dtype=np.float32)
    probe = read_probe(3, tokens.tobytes(), logprobs.tobytes())
    assert probe is not None
    assert probe.token_ids.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read_probe(0, b"", b"") is None
    for broken in ((4, tokens.tobytes(), logprobs.tobytes()), (3, tokens.tobytes(), b"")):
        with pytest.raises(WeightsError, match="multiple of"):
            read_probe(*broken)


def test_the_difference_is_a_mean_over_all_but_the_given_first_tokens() -> None:
    scored = np.asarray([[9.0, -1.5, -2.0]], np.float32)
    assert mean_difference(PROBE, scored) == pytest.approx(0.25)
    assert (
        mean_difference(Probe(np.ones((1, 1), np.int32), np.zeros((1, 1), np.float32)), scored)
        is None
    )


def test_the_tolerance_is_that_of_the_precision_unless_it_is_set() -> None:
    assert tolerance_of("float32", None) == 1e-4
    assert tolerance_of("bfloat16", None) == 5e-2
    assert tolerance_of("float32", 0.5) == 0.5
    assert canary_problem(1e-4, 1e-4) == ""
    assert canary_problem(None, 1e-4) == ""
    assert "worker.canary_max_diff" in canary_problem(2e-4, 1e-4)
