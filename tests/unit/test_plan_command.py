"""`echo2 plan`: the shipped examples, the shape of --json, a measured run, what is missing."""

from __future__ import annotations

import json
import math
import statistics
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from echo2.cli import PlanModel
from echo2.commands.plan import MODELS
from echo2.commands.plan_measured import measure_run
from echo2.config import Config, config_from_mapping, config_to_toml
from echo2.core.capacity import BUBBLE_MAX
from echo2.weights.delta import write_delta
from echo2.weights.versions import open_version, write_version

from .command_line import Echo2

EXAMPLES = Path(__file__).parents[2] / "configs" / "examples"
PLANS = sorted(EXAMPLES.glob("plan_*.toml"))
QUICK = ["--set", "plan.staleness_min=2", "--set", "plan.staleness_max=3"]
ONE = ["--set", "plan.staleness_min=3", "--set", "plan.staleness_max=3"]


def planned(echo2: Echo2, *arguments: object) -> dict[str, Any]:
    answer = echo2("plan", *arguments, "--json")
    assert answer.err == ""
    found: dict[str, Any] = json.loads(answer.out)
    return found


def test_there_is_a_plan_for_big_middling_and_small() -> None:
    assert len(PLANS) == 3
    assert [model.value for model in PlanModel] == list(MODELS)


@pytest.mark.parametrize("model", list(MODELS))
@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_each_shipped_plan_has_a_row_that_adds_up(echo2: Echo2, path: Path, model: str) -> None:
    found = planned(echo2, path, "--model", model, *ONE)
    assert found["model"] == model
    assert [row["staleness_max"] for row in found["rows"]] == [3]
    offers = {offer["name"]: offer["count"] for offer in found["offers"]}
    for row in found["rows"]:
        assert 1 <= row["period"] <= row["staleness_max"] + 1
        assert all(0 < count <= offers[name] for name, count in row["machines"].items())
        assert row["usd_per_h"] == pytest.approx(
            row["learner_usd_per_h"] + row["machines_usd_per_h"] + row["egress_usd_per_h"]
        )
        assert row["usd_per_step"] == pytest.approx(row["usd_per_h"] * row["step_s"] / 3600)
        assert row["usd_per_1000_steps"] == pytest.approx(1000 * row["usd_per_step"])
        if row["is_enough"]:
            assert row["bubble_ratio"] <= BUBBLE_MAX
            assert row["rate_groups_per_s"] >= row["mu_min_groups_per_s"] * 1.0999
            assert row["is_cheapest"]
    told = [row["staleness_max"] for row in found["rows"] if row["remedies"] is not None]
    configured = found["configured"]["staleness_max"]
    assert set(told) == {configured, found["cheapest_staleness_max"]} & {3}


def test_the_paper_needs_more_machines_than_echo2(echo2: Echo2) -> None:
    """It takes nothing that is sampled during a broadcast for usable."""
    path = EXAMPLES / "plan_7b_a100_5090.toml"
    needed = {
        model: planned(echo2, path, "--model", model, *ONE)["rows"][0]["mu_min_groups_per_s"]
        for model in MODELS
    }
    assert needed["paper"] > 1.2 * needed["echo2"]


def test_the_text_has_the_terms_the_table_and_what_holds_it_back(echo2: Echo2) -> None:
    path = EXAMPLES / "plan_7b_a100_5090.toml"
    answer = echo2("plan", path, "--model", "paper", *QUICK, "--set", "offers.rtx-5090.count=7")
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert lines[0] == "model     paper; 1.1 times the rate that is needed at least"
    assert lines[3] == (
        "offer     7 rtx-5090: $0.35 per hour, 0.017 groups/s, 100 up and 100 down Mbit/s"
    )
    head = next(line for line in lines if line.startswith("S "))
    assert head.split() == [
        *("S", "κ", "T_bcast", "μ_min", "μ", "machines"),
        *("$/h", "$/step", "$/1000", "steps", "bubble"),
    ]
    row = next(line for line in lines if line.startswith("3*  2  1348 s"))
    assert "7 rtx-5090 + " in row
    held = lines.index(next(line for line in lines if line.startswith("S = 3: dissemination: ")))
    assert lines[held + 1].startswith(
        "    half the bytes of a version (delta share 1 -> 0.5) saves"
    )
    assert lines[-1].startswith("Cheapest step: S = 3 with κ = 2, 7 rtx-5090 + ")


def test_what_is_uncertain_gives_the_rows_that_matter_an_interval(echo2: Echo2) -> None:
    path = EXAMPLES / "plan_7b_a100_5090.toml"
    assert all(row["interval"] is None for row in planned(echo2, path, *QUICK)["rows"])
    before = [0.0, 0.0]
    for error in (0.02, 0.1, 0.3):
        setting = ["--set", f"plan.uncertainty={error}"]
        found = planned(echo2, path, *QUICK, *setting)
        assert found["standard_errors"] == {
            name: {"value": error, "source": "given"} for name in ("train", "rate", "bcast")
        }
        other, row = found["rows"]
        chosen = {found["configured"]["staleness_max"], found["cheapest_staleness_max"]}
        assert chosen == {row["staleness_max"]}
        assert other["interval"] is None
        widths = []
        for name, value in (("bubble", "bubble_ratio"), ("usd_per_step", "usd_per_step")):
            low, high = row["interval"][name]
            assert low <= row[value] <= high
            widths.append(high - low)
        assert all(width > least for width, least in zip(widths, before, strict=True))
        before = widths
    text = echo2("plan", path, *QUICK, *setting).out
    (bubble_low, bubble_high), (low, high) = row["interval"].values()
    assert "\nerrors    T_train 30%, rates 30%, T_bcast 30%\n" in text
    assert f"{row['usd_per_step']:.4g} ({low:.4g} to {high:.4g})  " in text
    assert f"% ({100 * bubble_low:.1f} to {100 * bubble_high:.1f})\n" in text
    assert "\n(low to high) holds the true value in 90 % of cases, if the model is right\n" in text
    assert "(low to high)" not in echo2("plan", path, *QUICK).out


def test_a_picture_has_the_costs_of_the_rows_and_the_bubble_by_workers(
    echo2: Echo2, tmp_path: Path
) -> None:
    picture = tmp_path / "plan.svg"
    path = EXAMPLES / "plan_laptop.toml"
    found = planned(echo2, path, *QUICK, "--model", "paper", "--picture", picture)
    lines = [
        [float(pair.split(",")[1]) for pair in each.attrib["points"].split()]
        for each in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}polyline")
    ]
    whole, learner, machines, *bubbles = lines
    usd = [row["usd_per_step"] for row in found["rows"]]
    assert (whole[0] > whole[1]) == (usd[0] < usd[1])  # SVG counts downwards
    assert all(top <= min(parts) for top, *parts in zip(whole, learner, machines, strict=True))
    assert len(bubbles) == len(found["rows"])
    for heights in bubbles:
        assert heights[0] <= heights[-1]  # more workers, less waiting
    told = "".join(ElementTree.parse(picture).getroot().itertext())
    assert "cost against S" in told
    assert "bubble against workers" in told


def test_a_picture_that_cannot_be_written_is_told(echo2: Echo2, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "plan.svg"
    path = EXAMPLES / "plan_laptop.toml"
    answer = echo2("plan", path, *ONE, "--model", "paper", "--picture", missing)
    assert answer.code == 2
    assert "cannot be written" in answer.err


def test_a_plan_without_a_fleet_that_is_enough_exits_with_1(echo2: Echo2) -> None:
    path = EXAMPLES / "plan_laptop.toml"
    answer = echo2("plan", path, "--set", "offers.core.count=1", *QUICK)
    assert answer.code == 1
    assert answer.out.endswith("No set of these machines is enough at any of these S.\n")
    assert "1 core (not enough)" in answer.out
    answer = echo2("plan", path, "--model", "paper", "--set", "plan.staleness_max=0")
    assert answer.code == 1
    assert "no S from 0 to 0 has a period in this model" in answer.out


def test_check_tells_of_offers(echo2: Echo2) -> None:
    answer = echo2("check", EXAMPLES / "plan_laptop.toml", "--json")
    assert json.loads(answer.out)["facts"]["offers"] == {"core": 6}


# ---------------------------------------------------------------------- a measured run


def a_run(folder: Path, config: Config) -> Path:
    """Nine steps of 8 + 2 s; three workers of two kinds, of which one is twice as fast; versions
    of 4096 bytes with deltas; a first step and a first version that took long."""
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "config.resolved.toml").write_text(config_to_toml(config), encoding="utf-8")
    lines = [
        {
            "step": step,
            "incarnation": 1,
            "train_s": 8.0 if step > 1 else 100.0,
            "publish_s": 2.0,
            "wait_s": 1.0,
            "bubble_ratio": 0.125,
            "workers_ready": 3,
            "rollout_tokens_per_s": 270.0 + 3 * step,
        }
        for step in range(1, 10)
    ]
    versions = run_dir / "versions"
    bases = [
        write_version(versions, [("w", "F32", (1024,), bytes([fill, 0, 0, 0]) * 1024)])
        for fill in (1, 2)
    ]
    base, target = (open_version(versions, each.manifest_digest) for each in bases)
    assert base is not None
    assert target is not None
    with base, target:
        delta = write_delta(versions, base, target)
    assert delta is not None
    kinds = {"w-1": ("vllm", "bfloat16", 4), "w-2": ("vllm", "bfloat16", 4)}
    kinds["w-3"] = ("transformers", "float32", 2)
    events: list[dict[str, Any]] = [
        {
            "event": "worker_joined",
            "worker": worker,
            "engine": engine,
            "precision": precision,
            "slots": slots,
        }
        for worker, (engine, precision, slots) in kinds.items()
    ]
    for step in (0, 1, 2):
        events.append({"event": "version_published", "step": step, "num_bytes": 4096})
        slow = 60.0 if step == 0 else 0.0
        events += [
            {"event": "version_installed", "step": step, "pause_s": 0.5, "fetch_s": 0.1 + slow},
            {"event": "version_disseminated", "step": step, "t90_s": 3.0 + slow},
        ]
    for worker, groups in (("w-1", 10), ("w-2", 10), ("w-3", 5)):
        events += [
            {"event": "group_ended", "end": "trained", "worker": worker, "tokens": tokens}
            for tokens in (90, 110) * (groups // 2)
        ]
    events.append({"event": "group_ended", "end": "failed", "worker": "w-3", "tokens": 7})
    for name, records in (("metrics", lines), ("events", events)):
        text = "".join(json.dumps(record) + "\n" for record in records)
        (run_dir / f"{name}.jsonl").write_text(text, encoding="utf-8")
    return run_dir


def a_config(**tables: Any) -> Config:
    worker = {"engine": "null", "price_usd_per_h": 0.25}
    return config_from_mapping({"worker": worker, "learner": {"groups_per_step": 4}, **tables})


def test_a_run_s_records_give_all_that_a_plan_assumes(tmp_path: Path) -> None:
    measured = measure_run(a_run(tmp_path, a_config()))
    assert measured.num_steps == 8
    assert measured.bubble_ratio == 0.125
    assert measured.bcast_s == 3.0
    share = measured.values["delta_share"]
    assert 0 < share < 1
    assert measured.values == {
        "train_s": 10.0,
        "encode_s": 2.0,
        "tokens_per_group": pytest.approx(100.0, abs=1),
        "group_tokens_cv": pytest.approx(0.1, abs=0.01),
        "version_bytes": 4096,
        "delta_share": share,
        "install_s": 0.5,
        "origin_uplink_mbit": pytest.approx(4096 * share * 8e-6 / 0.1),
    }
    slow, quick = measured.offers
    assert (slow.name, slow.count, slow.slots) == ("transformers-float32-1", 1, 2)
    assert (quick.name, quick.count, quick.slots) == ("vllm-bfloat16-2", 2, 4)
    assert slow.price_usd_per_h == quick.price_usd_per_h == 0.25
    assert slow.tokens_per_s is not None
    assert quick.tokens_per_s is not None
    per_worker = (270.0 + 3 * 8) / 3  # nine tenths of the way through steps 2 to 9
    assert slow.tokens_per_s + 2 * quick.tokens_per_s == pytest.approx(3 * per_worker, rel=1e-3)
    assert quick.tokens_per_s == pytest.approx(per_worker * 20 / 24 * 1.5, rel=1e-3)


def test_what_the_file_gives_stands_before_what_was_measured(echo2: Echo2, tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, a_config())
    path = tmp_path / "plan.toml"
    path.write_text("[learner]\ngroups_per_step = 4\n[plan]\ntrain_s = 20.0\n", encoding="utf-8")
    found = planned(echo2, path, "--from-run", run_dir, *QUICK)
    assert found["assumptions"]["train_s"] == {"value": 20.0, "source": "given"}
    assert found["assumptions"]["encode_s"] == {"value": 2.0, "source": "measured"}
    assert found["offers_source"] == "measured"
    assert found["run"]["bcast_s"] == 3.0
    assert found["run"]["bcast_s_of_the_plan"] > 2.5
    text = echo2("plan", path, "--from-run", run_dir, *QUICK).out
    assert "T_train 20 s, R = 4 groups of 100 tokens (measured)" in text
    assert "measured  2 vllm-bfloat16-2: $0.25 per hour" in text
    assert f"run       {run_dir}: 8 steps, bubble 12.5%, T_bcast 3 s (this plan's for the" in text


def test_the_spread_of_a_run_s_records_gives_an_interval(echo2: Echo2, tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, a_config())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["train_s"] = 7.0 if line["step"] % 2 else 9.0  # with publish_s 9 and 11, median 10
    events = [
        {"event": "version_disseminated", "step": step, "t90_s": 3.0 + (step % 2)}
        for step in range(3, 7)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text, encoding="utf-8")
    measured = measure_run(run_dir)
    rates = [(270.0 + 3 * step) / 3 for step in range(2, 10)]
    assert measured.errors == {
        "train": pytest.approx(1.25 * statistics.stdev([9, 11] * 4) / math.sqrt(8) / 10),
        "rate": pytest.approx(1.71 * statistics.stdev(rates) / math.sqrt(8) / rates[-2]),
    }  # two versions tell no spread
    with (run_dir / "events.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    spread = measure_run(run_dir).errors["bcast"]
    bcasts = [3.0, 3.0, 4.0, 3.0, 4.0, 3.0]
    assert spread == pytest.approx(1.25 * statistics.stdev(bcasts) / math.sqrt(6) / 3.0)

    path = tmp_path / "plan.toml"
    path.write_text(
        "[learner]\ngroups_per_step = 4\n[cost]\nlearner_usd_per_h = 1.0\n", encoding="utf-8"
    )
    wide = ["--set", "plan.staleness_min=6", "--set", "plan.rate_margin=1"]
    found = planned(echo2, path, "--from-run", run_dir, *wide)
    sources = {name: each["source"] for name, each in found["standard_errors"].items()}
    assert sources == dict.fromkeys(("train", "rate", "bcast"), "measured")
    (row,) = found["rows"]
    low, high = row["interval"]["usd_per_step"]
    assert low < row["usd_per_step"] < high
    told = echo2("plan", path, "--from-run", run_dir, *wide).out
    assert "\nerrors    T_train 4.7% (measured), rates 1.5% (measured), T_bcast 8.8% (" in told

    typed = ["--set", "plan.train_s=10", "--set", "plan.uncertainty=0.2"]
    found = planned(echo2, path, "--from-run", run_dir, *wide, *typed)
    assert found["standard_errors"]["train"] == {"value": 0.2, "source": "given"}
    assert found["standard_errors"]["bcast"] == {"value": spread, "source": "measured"}


def test_a_torn_manifest_and_a_run_without_versions_are_no_obstacle(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, a_config())
    for path in (run_dir / "versions").glob("*.manifest"):
        path.write_bytes(b"torn")
    values = measure_run(run_dir).values
    assert "delta_share" not in values
    assert values["version_bytes"] == 4096
    (run_dir / "events.jsonl").unlink()
    measured = measure_run(run_dir)
    assert measured.values.keys() == {"train_s", "encode_s"}
    assert measured.offers == []
    assert measured.bcast_s is None
