"""`echo2 publish`: what it says, and when it counts as done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from echo2.commands import publish
from echo2.commands.publish import Order, Outcome
from echo2.config import Config
from echo2.core.manifest import TensorSpec
from echo2.errors import ConfigError, Echo2Error
from echo2.types import BroadcastWorker, DeltaOffer, Version
from echo2.weights.published_folder import Written
from echo2.weights.snapshot import Manifest, hex_digest

KEY = "k" * 40


def an_outcome(*workers: BroadcastWorker) -> Outcome:
    manifest = Manifest(
        kind="weights",
        tensors=(TensorSpec("w", "U8", (3,), 0, 3),),
        chunk_bytes=1 << 16,
        chunk_digests=(bytes(32),),
        num_bytes=3,
        digest=hex_digest(b"abc"),
        metadata={},
    )
    written = Written(manifest, "", DeltaOffer("0" * 64, "1" * 64, 2))
    return Outcome(version=Version(3, 0), written=written, workers=workers)


def an_order(**changes: Any) -> Order:
    values = {"model": Path(), "num_bytes": 3, "workers_min": 1, "wait_share": 1.0}
    return Order(**(values | {"timeout_s": 60.0} | changes))


def has(name: str, seconds: float) -> BroadcastWorker:
    return BroadcastWorker(name, seconds, 0.5, 0.25)


def a_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")
    return folder


def call(model: Path, run_dir: Path | None, **net: str) -> int:
    options = {"workers_min": 1, "wait_share": 1.0, "timeout_s": 5.0, "as_json": True}
    return publish.main(model, None, run_dir, [], net=net, **options)  # type: ignore[arg-type]


def test_it_is_done_when_the_share_of_the_workers_has_it() -> None:
    outcome = an_outcome(has("a", 2.0), has("b", 1.0), BroadcastWorker("c"))
    assert [outcome.t_bcast_s(q) for q in (0.3, 0.5, 1.0)] == [1.0, 2.0, None]
    assert publish._problem(outcome, an_order(wait_share=0.6)) == ""
    problem = publish._problem(outcome, an_order())
    assert problem == (
        "version 3.0 is published, but only 2 of 3 workers have installed it, and --wait-q 1 asks "
        "for 3; not done within 60 s (--timeout): c"
    )


def test_a_worker_that_left_for_a_full_disk_counts_and_says_so() -> None:
    lost = BroadcastWorker("b", problem="the disk is full", is_here=False)
    outcome = an_outcome(has("a", 1.0), lost)
    assert not outcome.can_still_grow
    problem = publish._problem(outcome, an_order())
    assert "only 1 of 2 workers" in problem
    assert problem.endswith("; b says: the disk is full")
    assert "--timeout" not in problem


def test_nobody_is_a_failure_unless_nobody_was_asked_for() -> None:
    assert "nobody is known to have installed it" in publish._problem(an_outcome(), an_order())
    assert publish._problem(an_outcome(), an_order(workers_min=0)) == ""


def test_people_are_told_each_workers_time_and_the_fleets() -> None:
    assert publish._told(an_outcome(has("a", 1.0), BroadcastWorker("b", problem="no route"))) == [
        "version   3.0  " + an_outcome().written.manifest.manifest_digest[:16] + "  3 bytes, "
        "2 as a delta",
        "worker    a  1.000 s  (fetch 0.500 s, install 0.250 s)",
        "worker    b  not yet  no route",
        "t_bcast   1 s, - s, - s at half, 90 % and all of 2 workers",
    ]
    assert publish._plain(an_outcome(has("a", 1.0)))["t_bcast_s"] == {"0.5": 1, "0.9": 1, "1": 1}


def test_a_folder_without_weights_and_one_that_is_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Echo2Error, match=r"has no \*.safetensors file"):
        call(tmp_path, tmp_path / "run")
    with pytest.raises(ConfigError, match="is no folder"):
        call(tmp_path / "absent", tmp_path / "run")


def test_a_coordinator_that_does_not_run_is_named(tmp_path: Path) -> None:
    model, run_dir = a_model(tmp_path / "model"), tmp_path / "run"
    with pytest.raises(ConfigError, match="needs --run-dir"):
        call(model, None)
    with pytest.raises(Echo2Error, match="was not started: start it with echo2 coordinator"):
        call(model, run_dir)
    run_dir.mkdir()
    (run_dir / "coordinator.json").write_text('{"pid": 0}')
    with pytest.raises(Echo2Error, match=r"\(pid 0\) has ended"):
        call(model, run_dir)


def test_a_coordinator_elsewhere_needs_an_origin_that_its_workers_reach(tmp_path: Path) -> None:
    far = {"coordinator": "tcp://203.0.113.7:5700", "coordinator_key": KEY}
    with pytest.raises(ConfigError, match=r"missing: net\.coordinator_rollouts"):
        call(a_model(tmp_path / "model"), tmp_path / "run", **far)
    far["coordinator_rollouts"] = "tcp://203.0.113.7:5701"
    with pytest.raises(ConfigError, match=r"--set net\.host=ADDRESS"):
        call(tmp_path / "model", tmp_path / "run", **far)


def test_the_configuration_of_the_run_folder_counts_and_options_over_it(tmp_path: Path) -> None:
    (tmp_path / "config.resolved.toml").write_text("[net]\norigin_port = 5702\n")
    config, folder = publish._load(None, tmp_path, ["net.curve=false"])
    assert (config.net.origin_port, config.net.curve) == (5702, False)
    assert folder.path == tmp_path
    assert publish._load(None, tmp_path / "other", [])[0] == Config()
    assert os.listdir(tmp_path) == ["config.resolved.toml"]
