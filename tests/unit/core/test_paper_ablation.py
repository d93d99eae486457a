"""The paper's ablation: its equations by hand, and its Table 2 out of the shipped inputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echo2.cli import app
from echo2.core.capacity_pool import WorkerKind
from echo2.core.paper_ablation import Scenario, Setting, ablation_outcome
from echo2.errors import ConfigError

CONFIG = Path(__file__).parents[3] / "configs" / "paper_table2.toml"


def a_pool(*prices: float, rate: float = 0.1) -> tuple[WorkerKind, ...]:
    return tuple(
        WorkerKind(name=f"w-{place}", rate_groups_per_s=rate, install_s=5.0, usd_per_h=price)
        for place, price in enumerate(prices)
    )


def a_setting(**changes: Any) -> Setting:
    values: dict[str, Any] = {
        "groups_per_step": 20,
        "train_s": 100.0,
        "period": 2,
        "size_mbit": 2000.0,  # 20 s at B_w = 100
        "origin_mbit": 200.0,
        "rtt_s": 0.0,
        "learner_usd_per_h": 10.0,
        "pool": a_pool(1.0, 4.0, 2.0, 3.0),
    }
    return Setting(**{**values, **changes})


def test_a_star_waits_for_what_eq_1_lacks_and_pays_for_it() -> None:
    found = ablation_outcome(a_setting(), Scenario(name="star", machines=3, peers=False))
    # max(20, 3·2000/200) + 5 = 35 s; 35 + 2·20/0.3 - 200 < 0: no wait; the cheapest three.
    assert (found.t_bcast_s, found.wait_s, found.machines) == (35.0, 0.0, 3)
    assert found.cost_per_step_usd == pytest.approx(16.0 * 100.0 / 3600.0)
    slow = ablation_outcome(
        a_setting(pool=a_pool(1.0, 2.0, 3.0, rate=0.05)),
        Scenario(name="star", machines=3, peers=False),
    )
    wait_s = 35.0 + 2 * 20 / 0.15 - 200.0
    assert slow.wait_s == pytest.approx(wait_s)
    assert slow.cost_per_step_usd == pytest.approx(16.0 * (100.0 + wait_s / 2) / 3600.0)


def test_chains_take_the_time_of_one_copy_and_are_filled() -> None:
    found = ablation_outcome(a_setting(rtt_s=0.2), Scenario(name="chains", machines=4))
    chunk_s = (256 << 10) * 8 / 1e6 / 100.0
    assert found.t_bcast_s == pytest.approx(25.0 + 1 * (chunk_s + 0.1))  # two chains of two


def test_the_rule_activates_the_cheapest_and_a_draw_costs_the_mean() -> None:
    by_price = ablation_outcome(a_setting(), Scenario(name="full"))
    drawn = ablation_outcome(a_setting(), Scenario(name="drawn", by_price=False))
    # 1.1 · 40/(200 - 25) = 0.2514 groups/s: three machines of 0.1
    assert by_price.machines == drawn.machines == 3
    assert by_price.cost_per_step_usd == pytest.approx(16.0 / 36.0)
    assert drawn.cost_per_step_usd == pytest.approx((10.0 + 3 * 2.5) / 36.0)


def test_a_pool_that_is_too_small_is_told() -> None:
    with pytest.raises(ConfigError, match=r"no set of the 2 workers satisfies Eq\. \(2\)"):
        ablation_outcome(a_setting(pool=a_pool(1.0, 2.0)), Scenario(name="full"))


def test_the_shipped_inputs_give_table_2() -> None:
    told = CliRunner().invoke(app, ["simulate", str(CONFIG), "--model", "paper", "--json"])
    assert told.exit_code == 0, told.output
    found = {each["name"]: each for each in json.loads(told.output)["scenarios"]}
    assert list(found) == ["full", "no_peers_9", "no_peers_10", "no_cost"]
    assert all(each.keys() == {*COLUMNS, "name"} for each in found.values())
    # Fitted on these two rows.
    for name, cost, bcast_s, wait_s in (
        ("full", 8.098, 1437.0, 0.0),
        ("no_peers_9", 8.432, 1830.0, 131.9),
    ):
        assert found[name]["cost_per_step_usd"] == pytest.approx(cost, abs=0.001)
        assert found[name]["t_bcast_s"] == pytest.approx(bcast_s, abs=0.5)
        assert found[name]["wait_s"] == pytest.approx(wait_s, abs=0.2)
        assert found[name]["machines"] == 9
    # Predicted: the paper has 8.630 and 9.339.
    assert found["no_peers_10"]["cost_per_step_usd"] == pytest.approx(8.630, rel=0.06)
    assert found["no_cost"]["cost_per_step_usd"] == pytest.approx(9.339, rel=0.03)
    assert found["no_cost"]["machines"] == 9


COLUMNS = ("cost_per_step_usd", "t_bcast_s", "wait_s", "machines")


def test_other_inputs_give_other_rows() -> None:
    asked = ["simulate", str(CONFIG), "--model", "paper", "--json", "--set"]
    told = CliRunner().invoke(app, [*asked, "cost.learner_usd_per_h=24.48"])
    full = json.loads(told.output)["scenarios"][0]
    assert full["cost_per_step_usd"] == pytest.approx(8.098 + 12.24 * 1598.99 / 3600, abs=0.001)
