"""Workers that were away fetch what they lack and no more: real daemons, a killed one, and one
that comes back ten versions later."""

from __future__ import annotations

import json
import random
import signal
import struct
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .fleet import ECHO2, WAIT_S, Fleet

CONFIG = """
[run]
name = "fleet"
learner_timeout_s = 1e7

[environment]
name = "null"

[heartbeat]
interval_s = 0.2
suspect_s = 2.0
gone_s = 5.0

[net]
origin_uplink_mbit = {origin_mbit}

[log]
format = "json"

[worker]
engine = "none"
model_folder = "model"
"""


class PublishingFleet(Fleet):
    """A coordinator, an origin, and workers that lay out what is published."""

    def __init__(self, folder: Path, *, size: int, origin_mbit: float = 0.0) -> None:
        super().__init__(folder, steps=1)
        self.config.write_text(CONFIG.format(origin_mbit=origin_mbit))
        self.model = folder / "model"
        self.model.mkdir()
        self.weights = bytearray(random.Random(0).randbytes(size))
        self.run_dir.mkdir()
        self.start("coordinator")
        self.start("origin")
        for file in ("coordinator.json", "origin.json"):
            self.until((self.run_dir / file).exists, file)

    def publish(self, *options: str) -> subprocess.Popen[bytes]:
        size = len(self.weights)
        header = {"weight": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
        head = json.dumps(header).encode()
        self.model.joinpath("model.safetensors").write_bytes(
            struct.pack("<Q", len(head)) + head + self.weights
        )
        words = ("publish", str(self.model), *options, "--timeout", str(WAIT_S), "--json")
        return subprocess.Popen(
            [*ECHO2, *words, "--run-dir", str(self.run_dir)], stdout=subprocess.PIPE
        )

    def published(self, *options: str) -> dict[str, Any]:
        with self.publish(*options) as publishing:
            out, _ = publishing.communicate(timeout=WAIT_S)
        assert publishing.returncode == 0, self.logs()
        told: dict[str, Any] = json.loads(out)
        return told

    def status(self) -> dict[str, Any]:
        coordinator = json.loads((self.run_dir / "coordinator.json").read_text())
        with urllib.request.urlopen(f"{coordinator['http']}/api/status", timeout=WAIT_S) as answer:
            told: dict[str, Any] = json.load(answer)
        return told

    def missing_share(self, name: str) -> float:
        """Of the version that the worker fetches, by its last heartbeat; 1 before that."""
        for worker in self.status()["workers"]:
            if worker["name"] == name and worker["fetch"] and worker["fetch"]["chunks"]:
                return float(worker["fetch"]["missing"] / worker["fetch"]["chunks"])
        return 1.0

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(WAIT_S)

    def worker(self, name: str) -> None:
        self.start("worker", "--name", name, name=name)

    def fetched(self, name: str) -> list[dict[str, Any]]:
        """What the worker's log says of its fetches, the bytes by source among it."""
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{")]
        return [line for line in found if line["event"] == "version_fetched"]

    def has(self, name: str) -> bool:
        path = self.run_dir / "workers" / name / "model" / "model.safetensors"
        return path.exists() and path.read_bytes().endswith(self.weights)


@pytest.fixture
def fleets(tmp_path: Path) -> Iterator[list[PublishingFleet]]:
    made: list[PublishingFleet] = []
    yield made
    for fleet in made:
        fleet.stop()


def test_a_worker_killed_at_seventy_percent_fetches_the_rest(
    tmp_path: Path, fleets: list[PublishingFleet]
) -> None:
    fleet = PublishingFleet(tmp_path, size=12_000_000, origin_mbit=10.0)
    fleets.append(fleet)
    fleet.worker("w-1")
    with fleet.publish("--workers", "1") as publishing:
        fleet.until(lambda: fleet.missing_share("w-1") <= 0.3, "70 % of the version")
        fleet.kill("w-1")
        assert not fleet.has("w-1")
        fleet.worker("w-1")
        assert publishing.wait(WAIT_S) == 0, fleet.logs()
    assert fleet.has("w-1")
    (fetch,) = fleet.fetched("w-1")
    assert 0 < sum(fetch["sources"].values()) <= 0.35 * len(fleet.weights)


def test_a_worker_ten_versions_behind_takes_the_cheapest_way(
    tmp_path: Path, fleets: list[PublishingFleet]
) -> None:
    fleet = PublishingFleet(tmp_path, size=3_000_000)
    fleets.append(fleet)
    for name in ("w-1", "w-2"):
        fleet.worker(name)
    fleet.published("--workers", "2")
    fleet.kill("w-2")
    num_fetched = len(fleet.fetched("w-2"))
    deltas = []
    for number in range(10):
        at = number * 10_000
        fleet.weights[at : at + 10_000] = random.Random(number + 1).randbytes(10_000)
        deltas.append(fleet.published("--workers", "1")["delta_bytes"])
    assert 0 < sum(deltas) < len(fleet.weights) / 5
    fleet.worker("w-2")
    fleet.until(lambda: fleet.has("w-2"), "the newest version at w-2")
    fetches = fleet.fetched("w-2")[num_fetched:]
    assert 0 < sum(sum(fetch["sources"].values()) for fetch in fetches) <= sum(deltas)
