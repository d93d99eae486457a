"""`echo2 plan --calibrate`: from what was timed to the terms of a plan, and what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from echo2.commands.plan_calibrate import Times, calibration_text, measured
from echo2.config import Config, config_from_mapping
from echo2_learner.calibrating import StepTimes

from .command_line import Echo2


def a_config(**tables: Any) -> Config:
    worker = {"engine": "null", "price_usd_per_h": 0.25, "slots": 4}
    return config_from_mapping({"worker": worker, "workers": {"local": 2}, **tables})


def some_times(**changes: Any) -> Times:
    steps = [
        StepTimes(train_s=train_s, publish_s=1.0, num_bytes=4096, delta_bytes=1024)
        for train_s in (9.0, 9.0, 8.0, 10.0, 30.0)
    ]
    values: dict[str, Any] = {
        "steps": steps,
        "rates": [90.0, 110.0, 90.0, 110.0],
        "groups": [80, 120],
        "pauses_s": [0.5, 0.25, 0.5],
        "fetches": [(1_000_000, 1.0), (1_000_000, 2.0), (1_000_000, 1.0)],
    }
    return Times(**{**values, **changes})


def test_medians_of_what_was_timed_are_the_terms() -> None:
    found = measured(a_config(), some_times())
    assert found.run_dir is None
    assert found.values == {
        "train_s": 10.0,
        "encode_s": 1.0,
        "tokens_per_group": 100.0,
        "group_tokens_cv": pytest.approx(0.2),
        "version_bytes": 4096,
        "delta_share": 0.25,
        "install_s": 0.5,
        "origin_uplink_mbit": 8.0,
    }
    (offer,) = found.offers
    assert (offer.tokens_per_s, offer.count, offer.slots) == (100.0, 2, 4)
    assert offer.price_usd_per_h == 0.25
    assert offer.uplink_mbit == offer.downlink_mbit == 8.0
    assert found.errors["rate"] == pytest.approx(11.547 / 2 / 100, rel=1e-3)
    assert found.errors["train"] > 0.1


def test_without_a_delta_and_with_a_configured_link_nothing_is_said_of_them() -> None:
    steps = [StepTimes(train_s=1.0, publish_s=0.0, num_bytes=10, delta_bytes=None)] * 3
    found = measured(a_config(), some_times(steps=steps, fetches=[]))
    assert found.values["delta_share"] == 1.0
    assert "origin_uplink_mbit" not in found.values
    assert "train" not in found.errors  # three steps tell no spread


def test_what_is_printed_can_be_pasted() -> None:
    config = a_config()
    found = measured(config, some_times())
    tables = tomllib.loads("\n".join(calibration_text(config, found)))
    assert tables["plan"] == pytest.approx(dict(found.values))
    pasted = config_from_mapping(tables)
    assert pasted.offers == found.offers


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('worker.engine="none"', "which samples nothing"),
        ("learner.ranks=2", "times one learner process"),
    ],
)
def test_what_cannot_be_measured_is_told(echo2: Echo2, setting: str, said: str) -> None:
    path = Path(__file__).parents[2] / "configs" / "quickstart.toml"
    answer = echo2("plan", path, "--calibrate", "--set", setting)
    assert answer.code == 2
    assert said in answer.err


def test_a_run_and_a_calibration_do_not_go_together(echo2: Echo2, tmp_path: Path) -> None:
    path = Path(__file__).parents[2] / "configs" / "quickstart.toml"
    answer = echo2("plan", path, "--calibrate", "--from-run", tmp_path)
    assert answer.code == 2
    assert "--calibrate" in answer.err
