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
from echo2.core.paper_reduction import System, mean_of, reductions
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


def paper(*settings: str, steps: int = 0) -> Any:
    """The shipped inputs with these, played for so many steps."""
    asked = ["simulate", str(CONFIG), "--model", "paper", "--json"]
    for each in (f"simulation.production_steps={steps}", *settings):
        asked += ["--set", each]
    told = CliRunner().invoke(app, asked)
    assert told.exit_code == 0, told.output
    return json.loads(told.output)


def test_copies_in_turn_add_up_whatever_the_uplink() -> None:
    found = ablation_outcome(a_setting(copy_s=3.0), Scenario(name="star", machines=3, peers=False))
    assert found.t_bcast_s == 20.0 + 3 * 3.0 + 5.0


def test_the_shipped_inputs_give_table_2() -> None:
    whole = paper()
    found = {each["name"]: each for each in whole["scenarios"]}
    assert whole["production"] == whole["additions"] == []
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
    # Predicted: the paper has 8.630 with 1872 s and 84.1 s, and 9.339.
    assert found["no_peers_10"]["cost_per_step_usd"] == pytest.approx(8.630, rel=0.01)
    assert found["no_peers_10"]["t_bcast_s"] == pytest.approx(1872.0, rel=0.01)
    assert found["no_cost"]["cost_per_step_usd"] == pytest.approx(9.339, rel=0.03)
    assert found["no_cost"]["machines"] == 9
    for printed in whole["printed"]:
        own = found[printed["name"]]
        above = own["cost_per_step_usd"] / printed["cost_per_step_usd"] - 1
        assert printed["cost_above"] == pytest.approx(above)
        assert printed["wait_above_s"] == pytest.approx(own["wait_s"] - printed["wait_s"])


COLUMNS = ("cost_per_step_usd", "t_bcast_s", "wait_s", "machines")


def test_other_inputs_give_other_rows() -> None:
    full = paper("cost.learner_usd_per_h=24.48")["scenarios"][0]
    assert full["cost_per_step_usd"] == pytest.approx(8.098 + 12.24 * 1598.99 / 3600, abs=0.001)
    at_once = paper("simulation.copy_s=0")["scenarios"]
    assert at_once[1]["t_bcast_s"] == pytest.approx(1830.0, abs=0.5)  # B_0 is fitted to it
    assert at_once[2]["t_bcast_s"] == pytest.approx(126.6 + 10 / 9 * (1830.0 - 126.6), rel=1e-3)


def test_the_production_core_plays_the_scenarios_and_what_echo2_adds() -> None:
    told = paper("simulation.production_delta_shares=[0.02]", steps=2)
    played = {each["name"]: each for each in told["production"]}
    assert {name: each["machines"] for name, each in played.items()} == {
        each["name"]: each["machines"] for each in told["scenarios"]
    }
    # Trees take about the time of one copy; a star of ten as many times its share of the uplink.
    assert played["full"]["t_bcast_s"] == pytest.approx(1437.0, rel=0.03)
    assert played["no_peers_10"]["t_bcast_s"] == pytest.approx(2019.0, rel=0.03)
    assert played["no_cost"]["cost_per_step_usd"] > played["full"]["cost_per_step_usd"]
    added = told["additions"]
    assert [each["name"] for each in added] == [
        "nothing (full)", "deltas of 2%", "exact activation", "capacity model",
    ]  # fmt: skip
    assert added[1]["t_bcast_s"] < 200.0
    assert added[1]["machines"] < added[0]["machines"]
    usd = [each["cost_per_step_usd"] for each in added]
    assert sum(each["saves_usd"] or 0.0 for each in added) == pytest.approx(usd[0] - usd[-1])
    assert usd[-1] < usd[0]


def test_the_shipped_inputs_give_figure_3() -> None:
    config = CONFIG.parent / "paper_figure3.toml"
    asked = ["simulate", str(config), "--model", "paper"]
    told = CliRunner().invoke(app, [*asked, "--json"])
    assert told.exit_code == 0, told.output
    found = json.loads(told.output)
    usd = {each["name"]: each["cost_per_step_usd"] for each in found["systems"]}
    assert usd["sync"] == pytest.approx(8 * 3.06 * 1508.2 / 3600)
    assert usd["echo2_S4"] == pytest.approx((4 * 3.06 + 8 * 0.35) * 1649.3 / 3600)
    shares = {(each["system"], each["baseline"]): each["share"] for each in found["reductions"]}
    assert shares["echo2_S3", "sync"] == pytest.approx(1 - usd["echo2_S3"] / usd["sync"])
    assert [100 * share for share in found["reduction_mean"].values()] == pytest.approx(
        found["printed_reduction_percent"], abs=0.2
    )
    ruled = {each["name"]: each["machines"] for each in found["by_the_rule"]["systems"]}
    assert ruled == {"sync": 0, "async": 0, "echo2_S3": 9, "echo2_S4": 7}
    text = CliRunner().invoke(app, asked).output
    assert "the paper prints 33.3 to 36.3 %" in text
    assert "Eqs. (2) to (4) activate: echo2_S3 9, echo2_S4 7" in text


def test_eight_workers_come_nearest_to_figure_3() -> None:
    """As configs/paper_figure3.toml says of its choice."""
    baselines = {
        name: System(name=name, step_s=step_s, usd_per_h=24.48, is_baseline=True)
        for name, step_s in (("sync", 1508.2), ("async", 1582.3))
    }

    def off(workers: int) -> float:
        own = [
            System(name=name, step_s=step_s, usd_per_h=12.24 + 0.35 * workers)
            for name, step_s in (("S3", 1631.2), ("S4", 1649.3))
        ]
        found = reductions([*baselines.values(), *own])
        return max(
            abs(100 * mean_of(found, name) - printed)
            for name, printed in (("sync", 33.3), ("async", 36.3))
        )

    assert min(range(1, 17), key=off) == 8
