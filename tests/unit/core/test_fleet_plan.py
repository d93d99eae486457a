"""Plans of fleets: the paper's figures, levels, prices, words, remedies, both models."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from echo2.core.capacity import BUBBLE_MAX
from echo2.core.capacity_pool import WorkerKind
from echo2.core.capacity_spread import Weights
from echo2.core.fleet_case import FleetCase
from echo2.core.fleet_echo2 import Echo2Model
from echo2.core.fleet_paper import PaperModel
from echo2.core.fleet_plan import CapacityModel, fleet_plan, plan_row
from echo2.core.fleet_relaxed import Remedy, remedies
from echo2.core.fleet_terms import Machine, PlanRow, RunTerms

PAPER, ECHO2 = PaperModel(), Echo2Model()


def some_terms(**changed: Any) -> RunTerms:
    """A batch of 32 groups every 100 s, versions of 1 GB from 200 Mbit/s."""
    weights = {"num_bytes": 10**9, "origin_up_mbit": 200.0, **changed.pop("weights", {})}
    given = {"groups_per_step": 32, "train_s": 100.0, "learner_usd_per_h": 3.0, **changed}
    return RunTerms(weights=Weights(**weights), **given)


def machine(name: str = "m", count: int = 20, **changed: Any) -> Machine:
    """0.05 groups/s in one slot, 100 Mbit/s each way, $0.36 per hour."""
    own = {key: changed.pop(key) for key in ("availability", "egress_usd_per_gb") if key in changed}
    kind = {
        "rate_groups_per_s": 0.05,
        "slots": 1,
        "up_mbit": 100.0,
        "down_mbit": 100.0,
        "usd_per_h": 0.36,
        **changed,
    }
    return Machine(kind=WorkerKind(name=name, **kind), count=count, **own)


def a_row(terms: RunTerms, *machines: Machine, s: int = 3, model: CapacityModel = PAPER) -> PlanRow:
    row = plan_row(terms, machines, model, staleness_max=s)
    assert row is not None
    return row


def test_the_paper_s_example_needs_the_rate_that_its_equations_give() -> None:
    """Section 9.3: R = 2048, T_train = 1631.2 s, T_bcast = 1437 s, κ = 2: 2.24 rollouts/s."""
    terms = RunTerms(
        groups_per_step=2048,
        train_s=1631.2,
        weights=Weights(num_bytes=16_375_000_000, origin_up_mbit=1000.0),
        rate_margin=1.1,
    )
    rollouts = machine(rate_groups_per_s=0.275, install_s=127.0, usd_per_h=0.35)
    row = a_row(terms, rollouts)
    assert row.period == 2
    assert row.bcast_s == pytest.approx(1437.0)
    assert row.mu_min == pytest.approx(2.24, abs=0.005)
    assert row.counts == {"m": 9}
    assert row.is_cheapest
    assert row.bubble_ratio == 0.0
    assert row.bottleneck.startswith(
        "dissemination: 44% of the rate makes up for T_bcast, 1437 s, most of it for 16.4 GB over"
    )


def test_the_paper_has_no_plan_for_s_0_and_echo2_says_what_it_costs() -> None:
    terms = some_terms()
    assert plan_row(terms, [machine()], PAPER, staleness_max=0) is None
    assert [row.staleness_max for row in fleet_plan(terms, [machine()], PAPER, range(3))] == [1, 2]
    row = a_row(terms, machine(), s=0, model=ECHO2)
    assert not row.is_enough
    assert math.isinf(row.mu_min)
    assert row.bubble_ratio > 0.3


def test_the_cheapest_step_is_that_of_price_and_time() -> None:
    terms = some_terms(
        origin_egress_usd_per_gb=0.1, bytes_per_group=1e6, weights={"num_bytes": 10**8}
    )
    row = a_row(terms, machine(egress_usd_per_gb=0.02, availability=0.5), s=2)
    number = row.counts["m"]
    assert row.machines_usd_per_h == pytest.approx(0.36 * number * 0.5)
    versions_per_h = 3600 / (row.period * 100.0)
    results_gb = 0.05 * 3600 * 1e6 / 1e9
    sent = number * 0.5 * 0.02 * (versions_per_h * 0.1 + results_gb)
    origin = 0.1 * versions_per_h * min(number * 0.1, 200 * (row.bcast_s) / 8e3)
    assert row.egress_usd_per_h == pytest.approx(sent + origin)
    assert row.usd_per_h == pytest.approx(3.0 + row.machines_usd_per_h + row.egress_usd_per_h)
    assert row.usd_per_step == pytest.approx(row.usd_per_h * row.step_s / 3600)
    assert row.step_s == 100.0


@pytest.mark.parametrize("model", [PAPER, ECHO2])
def test_a_machine_on_a_slow_line_is_left_out_where_it_holds_up_all(model: CapacityModel) -> None:
    slow = machine("slow", down_mbit=20.0, usd_per_h=0.3)
    terms = some_terms(weights={"num_bytes": 250_000_000})
    row = a_row(terms, slow, machine("quick"), s=1, model=model)
    assert row.is_enough
    assert set(row.counts) == {"quick"}
    assert row.bcast_s == pytest.approx(20.0)
    tiny = some_terms(weights={"num_bytes": 10**6})
    assert set(a_row(tiny, slow, machine("quick"), s=2, model=model).counts) == {"slow"}


def test_long_groups_are_left_out_where_the_batch_would_wait_for_them() -> None:
    """As many groups per second, but each takes forty times as long: S = 1 cannot hide it."""
    terms = some_terms(latency_cv=0.3, weights={"num_bytes": 10**6})
    long = machine("long", count=16, slots=40, rate_groups_per_s=0.05, usd_per_h=0.1)
    short = machine("short", count=16, slots=1)
    assert set(a_row(terms, long, short, s=1, model=ECHO2).counts) == {"short"}


def test_too_few_machines_are_told_with_what_is_needed() -> None:
    row = a_row(some_terms(), machine(count=3))
    assert not row.is_enough
    assert row.counts == {"m": 3}
    assert row.bottleneck.startswith("the machines on offer: all 3 make 0.15 of the 0.")
    assert row.step_s > 100.0
    assert row.bubble_ratio == pytest.approx(1 - 100.0 / row.step_s)
    never = a_row(some_terms(weights={"num_bytes": 10**11}), machine(count=3))
    assert never.bottleneck.startswith("dissemination: no rate is enough, with all 3 machines T_b")
    assert math.isinf(never.mu_min)
    lacks = a_row(some_terms(rate_margin=2.0), machine(count=9), s=6, model=ECHO2)
    assert not lacks.is_enough
    assert lacks.bottleneck.startswith("the machines on offer: all 9 make 1.")
    assert lacks.bottleneck.endswith("and plan.rate_margin asks for 2 times")
    slow = a_row(some_terms(), machine(count=3), s=6, model=ECHO2)
    assert slow.bottleneck.startswith("the pool's rate: it delivers 0.15 groups/s")


def test_echo2_s_plan_hardly_waits_and_one_rate_below_would() -> None:
    terms = some_terms(latency_cv=0.5, weights={"num_bytes": 900_000_000})
    row = a_row(terms, machine(usd_per_h=0.2), s=2, model=ECHO2)
    assert row.is_enough
    assert row.bubble_ratio <= BUBBLE_MAX
    assert row.rate >= row.mu_min >= 0.99 * FleetCase(terms, [], 2, 1).bare_rate
    assert row.bottleneck.endswith(f"from {row.mu_min:.4g} groups/s on the learner hardly waits")
    terms = some_terms(learner_usd_per_h=0.0, weights={"num_bytes": 10**6})
    free = a_row(terms, machine(usd_per_h=0.0), s=6, model=ECHO2)
    assert free.bottleneck == "the learner: it hardly waits, and nothing has a price"


def test_a_period_is_lengthened_where_egress_costs() -> None:
    terms = some_terms(weights={"num_bytes": 10**8})
    assert a_row(terms, machine(), s=6, model=ECHO2).period == 1
    dear = replace(terms, origin_egress_usd_per_gb=1.0)
    assert a_row(dear, machine(), s=6, model=ECHO2).period > 1


def found(terms: RunTerms, *machines: Machine, s: int = 3) -> dict[str, Remedy]:
    row = a_row(terms, *machines, s=s)
    told = remedies(terms, machines, PAPER, row)
    assert all(each.makes_enough or each.saves_usd_per_step > 0 for each in told)
    return {each.what: each for each in told}


def test_a_remedy_saves_what_the_plan_with_it_costs_less() -> None:
    terms = some_terms(weights={"origin_up_mbit": 100.0, "num_bytes": 2 * 10**9, "encode_s": 20.0})
    wide = machine(up_mbit=1000.0, down_mbit=1000.0)
    told = found(terms, wide)
    what = "origin uplink 100 -> 200 Mbit/s"
    relaxed = replace(terms, weights=replace(terms.weights, origin_up_mbit=200.0))
    saved = a_row(terms, wide).usd_per_step - a_row(relaxed, wide).usd_per_step
    assert saved > 0
    assert told[what].saves_usd_per_step == pytest.approx(saved)
    assert "encoding 20 -> 10 s" in told
    assert "S 3 -> 4" in told
    assert "half the bytes of a version (delta share 1 -> 0.5)" in told
    assert "a line twice as wide at each machine" not in told
    values = [each.saves_usd_per_step for each in told.values()]
    assert values == sorted(values, reverse=True)


def test_what_makes_a_fleet_enough_is_told_first() -> None:
    told = found(some_terms(weights={"num_bytes": 10**7}), machine(count=4), s=2)
    what, remedy = next(iter(told.items()))
    assert what == "8 of m instead of 4"
    assert remedy.makes_enough


def test_installs_and_lines_are_among_the_remedies() -> None:
    told = found(some_terms(), machine(install_s=40.0), s=2)
    assert "an install in half the time" in told
    assert "a line twice as wide at each machine" in told


@pytest.mark.parametrize("model", [PAPER, ECHO2])
def test_only_a_cheaper_fleet_is_looked_for_below_a_price(model: CapacityModel) -> None:
    terms, pool = some_terms(weights={"num_bytes": 10**7}), [machine()]
    row = a_row(terms, *pool, model=model)

    def below(usd: float) -> PlanRow | None:
        return plan_row(terms, pool, model, staleness_max=3, below=usd)

    assert below(row.usd_per_step) is None
    found = below(1.001 * row.usd_per_step)
    assert found is not None
    assert found.usd_per_step <= row.usd_per_step


def test_many_kinds_that_are_alike_are_played_as_one() -> None:
    """Forty kinds with one machine each come to what forty machines of one kind come to."""
    terms = some_terms(latency_cv=0.5, weights={"num_bytes": 10**7})
    kinds = [machine(f"m{i}", count=1) for i in range(40)]
    apart = a_row(terms, *kinds, s=2, model=ECHO2)
    together = a_row(terms, machine(count=40), s=2, model=ECHO2)
    assert sum(apart.counts.values()) == together.counts["m"]
    assert apart.mu_min == together.mu_min
    assert apart.usd_per_step == pytest.approx(together.usd_per_step, rel=0.01)


class OnlyAlone(PaperModel):
    """Either kind is enough alone, the wide one at the bare rate."""

    def enough(self, case: FleetCase, allowed: Sequence[Machine], below: float) -> PlanRow | None:
        if len(allowed) > 1:
            return None
        name = allowed[0].kind.name
        fleet = case.these({name: allowed[0].count}, why="all of it")
        mu_min = case.bare_rate * (1.0 if name == "wide" else 1.5)
        return case.row(fleet, mu_min=mu_min, step_s=100.0, bottleneck="", is_enough=True)


def test_a_dear_set_that_needs_the_least_rate_hides_no_cheaper_one_of_other_machines() -> None:
    wide = machine("wide", 4, down_mbit=1000.0, usd_per_h=3.0)
    quick = machine("quick", 4, rate_groups_per_s=0.2, usd_per_h=0.5)
    assert a_row(some_terms(), wide, quick, model=OnlyAlone()).counts == {"quick": 4}
