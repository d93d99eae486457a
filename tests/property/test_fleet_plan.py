"""Of any pool each plan is enough; of one whose uplinks are no narrower than the origin's, a
relaxed term never makes the planned step dearer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.core.capacity_pool import Pool, WorkerKind
from echo2.core.capacity_spread import Weights, fluid_bcast_s
from echo2.core.fleet_case import FleetCase
from echo2.core.fleet_paper import PaperModel
from echo2.core.fleet_plan import plan_row
from echo2.core.fleet_terms import Machine, PlanRow, RunTerms

MODEL = PaperModel()
links = st.sampled_from([20.0, 50.0, 100.0, 200.0, 1000.0])


@st.composite
def machines_of(draw: st.DrawFn) -> list[Machine]:
    """One to four kinds."""
    number = draw(st.integers(1, 4))
    found = []
    for index in range(number):
        found.append(
            Machine(
                kind=WorkerKind(
                    name=f"m{index}",
                    rate_groups_per_s=draw(st.integers(1, 100)) / 100,
                    slots=draw(st.integers(1, 8)),
                    install_s=5.0,
                    up_mbit=draw(links),
                    down_mbit=draw(links),
                    usd_per_h=draw(st.integers(1, 300)) / 100,
                ),
                count=draw(st.integers(1, 12)),
                availability=draw(st.sampled_from([1.0, 0.8])),
            )
        )
    return found


@st.composite
def terms_of(draw: st.DrawFn) -> RunTerms:
    return RunTerms(
        groups_per_step=draw(st.integers(1, 128)),
        train_s=draw(st.sampled_from([20.0, 100.0, 500.0])),
        weights=Weights(
            num_bytes=draw(st.sampled_from([10**6, 10**8, 10**9])),
            origin_up_mbit=draw(links),
            encode_s=draw(st.sampled_from([0.0, 8.0])),
        ),
        learner_usd_per_h=3.0,
        rate_margin=1.1,
    )


def planned(terms: RunTerms, machines: list[Machine], staleness_max: int) -> PlanRow:
    row = plan_row(terms, machines, MODEL, staleness_max=staleness_max)
    assert row is not None
    return row


@given(terms_of(), machines_of(), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_a_fleet_that_is_enough_is_on_offer_and_bears_its_own_t_bcast(
    terms: RunTerms, machines: list[Machine], staleness_max: int
) -> None:
    row = planned(terms, machines, staleness_max)
    on_offer = {machine.kind.name: machine.count for machine in machines}
    assert all(0 < count <= on_offer[name] for name, count in row.counts.items())
    pool = Pool(
        tuple(
            (machine.on_average, row.counts[machine.kind.name])
            for machine in machines
            if machine.kind.name in row.counts
        )
    )
    assert row.bcast_s == pytest.approx(fluid_bcast_s(terms.weights, pool))
    needed = MODEL.mu_min(FleetCase(terms, machines, staleness_max, row.period), row.bcast_s)
    assert row.mu_min == needed
    if row.is_enough:
        assert pool.rate_groups_per_s >= 1.1 * needed * (1 - 1e-6)
        assert row.bubble_ratio == pytest.approx(0.0, abs=1e-9)
    else:
        assert row.counts == on_offer
        assert pool.rate_groups_per_s < 1.1 * needed


def _kinds(machines: list[Machine], **changed: Any) -> list[Machine]:
    return [replace(m, kind=replace(m.kind, **changed)) for m in machines]


RELAXED = {
    "S": lambda t, m, s: (t, m, s + 1),
    "origin uplink": lambda t, m, s: (
        replace(t, weights=replace(t.weights, origin_up_mbit=3 * t.weights.origin_up_mbit)),
        m,
        s,
    ),
    "delta share": lambda t, m, s: (
        replace(t, weights=replace(t.weights, delta_share=0.1)),
        m,
        s,
    ),
    "encoding": lambda t, m, s: (replace(t, weights=replace(t.weights, encode_s=0.0)), m, s),
    "install": lambda t, m, s: (t, _kinds(m, install_s=0.0), s),
    "margin": lambda t, m, s: (replace(t, rate_margin=1.0), m, s),
    "learner's price": lambda t, m, s: (replace(t, learner_usd_per_h=1.0), m, s),
    "a price": lambda t, m, s: (t, [*_kinds(m[:1], usd_per_h=0.001), *m[1:]], s),
    "a count": lambda t, m, s: (t, [replace(m[0], count=2 * m[0].count), *m[1:]], s),
    "all lines": lambda t, m, s: (
        t,
        [
            replace(
                each,
                kind=replace(
                    each.kind, up_mbit=4 * each.kind.up_mbit, down_mbit=4 * each.kind.down_mbit
                ),
            )
            for each in m
        ],
        s,
    ),
}


@pytest.mark.parametrize("name", RELAXED)
@given(terms=terms_of(), machines=machines_of(), staleness_max=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_a_relaxed_term_never_makes_the_step_dearer(
    name: str, terms: RunTerms, machines: list[Machine], staleness_max: int
) -> None:
    wide = 3 * terms.weights.origin_up_mbit  # of every origin below
    machines = [m.with_kind(up_mbit=max(m.kind.up_mbit, wide)) for m in machines]
    row = planned(terms, machines, staleness_max)
    relaxed = planned(*RELAXED[name](terms, machines, staleness_max))
    assert relaxed.is_enough >= row.is_enough
    if row.is_enough:
        assert relaxed.usd_per_step <= row.usd_per_step * (1 + 1e-9)
