"""Faults planted in the core are found by the simulation, each within a budget of seeds.

Each mutant is a copy of the package with one change, played in a process of its own; two
run at a time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

import echo2

from .mutants import MUTANTS, Mutant

PACKAGE = Path(echo2.__file__).parent
SEEDS = {"storm": 40}
SEEDS_ELSE = 60
TOGETHER = 2


def seeds_of(scenario: str) -> int:
    return SEEDS.get(scenario, SEEDS_ELSE)


def play(scenario: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Play seeds with the package in `folder`, up to the first broken promise."""
    return subprocess.run(
        [sys.executable, "-m", "echo2.sim", scenario, "--count", str(seeds_of(scenario))],
        env={**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
    )


def copy_package(folder: Path) -> Path:
    shutil.copytree(PACKAGE, folder / "echo2", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def play_mutant(mutant: Mutant, folder: Path) -> subprocess.CompletedProcess[str]:
    copy_package(folder)
    source = folder / "echo2" / mutant.package / mutant.file
    text = source.read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, (
        f"{mutant.file} holds the text that {mutant.name!r} changes {text.count(mutant.old)} "
        "times; bring the mutant up to date"
    )
    source.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
    return play(mutant.scenario, folder)


@pytest.fixture(scope="module")
def plays(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str]]]]:
    """What became of each mutant that is tested in this session."""
    chosen = {
        item.callspec.params["mutant"].name: item.callspec.params["mutant"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and "mutant" in item.callspec.params
    }
    with ThreadPoolExecutor(TOGETHER) as executor:
        yield {
            name: executor.submit(play_mutant, mutant, tmp_path_factory.mktemp("mutant"))
            for name, mutant in chosen.items()
        }
        executor.shutdown(wait=False, cancel_futures=True)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_simulation_finds(
    mutant: Mutant, plays: dict[str, Future[subprocess.CompletedProcess[str]]]
) -> None:
    played = plays[mutant.name].result()
    seeds = seeds_of(mutant.scenario)
    assert played.returncode == 1, (
        f"{seeds} seeds of {mutant.scenario} did not find it:\n{played.stdout[-500:]}"
        f"{played.stderr[-2000:]}"
    )
    again = f"again: python -m echo2.sim {mutant.scenario} --seed "
    assert again in played.stdout
    seed = int(played.stdout.split(again)[1].split()[0])
    print(f"\n{mutant.name}: {seed + 1} seeds of {mutant.scenario}")  # `pytest -s` shows it


@pytest.mark.parametrize("scenario", sorted({mutant.scenario for mutant in MUTANTS}))
def test_nothing_is_found_where_nothing_is_planted(scenario: str, tmp_path: Path) -> None:
    played = play(scenario, copy_package(tmp_path))
    assert played.returncode == 0, played.stdout[-3000:] + played.stderr[-2000:]


def test_the_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 15
