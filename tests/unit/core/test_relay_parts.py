"""Plans cut into parts."""

from __future__ import annotations

import pytest

from echo2.core.dissemination import RelayPlan, RelayTree
from echo2.core.relay_parts import (
    MOST_NEEDED_MAX,
    SOURCES_MAX,
    followers,
    joiner_part,
    planned_fields,
    planned_parts,
    planned_shares,
    rate_beside_a_star,
    suppliers,
)
from echo2.core.relay_rates import ORIGIN
from echo2.messages import STRIPES_MAX
from echo2.types import PeerId, Stripe, Version


def a_plan(*trees: tuple[float, dict[str, str]]) -> RelayPlan:
    names = sorted(trees[0][1])
    return RelayPlan(
        tuple(RelayTree(weight, parents) for weight, parents in trees),
        predicted_s=2.0,
        bound_s=1.0,
        bound_by="",
        reason="",
        arrivals_s=dict.fromkeys(names, 2.0),
    )


def chain(*names: str) -> dict[str, str]:
    return dict(zip(names, (ORIGIN, *names), strict=False))


def test_a_stripe_names_the_way_up_without_the_origin() -> None:
    plan = a_plan((0.75, chain("a", "b", "c")), (0.25, chain("c", "a", "b")))
    parts = planned_parts(plan, {"a", "b", "c"}, 100)
    assert parts[PeerId("c")].stripes == (Stripe(75, ("b", "a")), Stripe(25, ()))
    assert parts[PeerId("a")].stripes == (Stripe(75, ()), Stripe(25, ("c",)))
    assert {part.planned_s for part in parts.values()} == {2.0}
    assert planned_shares(plan) == {"a": 1.0, "b": 0.75, "c": 0.25}


def test_helpers_have_uplink_to_spare_and_nobody_waits_in_a_circle_by_the_plan() -> None:
    plan = a_plan((1.0, chain("a1", "a2", "a3") | chain("b1", "b2", "b3") | chain("c1", "c2")))
    spare = {"a1": 0.1, "a3": 1.0, "b3": 1.0, "c2": 0.5}
    parts = planned_parts(plan, plan.arrivals_s, 10, spare=spare)
    helpers = {name: part.stripes[0].helpers for name, part in parts.items() if part.stripes}
    assert set(helpers["a2"]) == set(helpers["a3"]) == {"b3", "c2"}
    assert set(helpers["b2"]) == {"a3", "c2"}
    assert set(helpers["c2"]) == {"a3", "b3"}
    assert parts[PeerId("a1")].stripes == ()  # the origin needs none
    only_dials = planned_parts(plan, {"c2"}, 10, spare=spare)
    assert only_dials[PeerId("a2")].stripes[0].helpers == ("c2",)
    assert parts[PeerId("a2")].among({"a1", "c2"}).stripes[0].helpers == ("c2",)


def test_the_records_say_who_has_most_workers_behind() -> None:
    plan = a_plan((0.75, chain("a", "b", "c")), (0.25, chain("c", "b", "a")))
    assert planned_fields(Version(1, 0), plan)["most_needed"] == {"a": 2, "b": 2, "c": 2}
    names = [f"w{place}" for place in range(MOST_NEEDED_MAX + 2)]
    told = planned_fields(Version(1, 0), a_plan((1.0, chain(*names))))["most_needed"]
    assert list(told.items())[:2] == [("w0", 9), ("w1", 8)]
    assert len(told) == MOST_NEEDED_MAX


def test_a_star_is_told_as_no_stripes() -> None:
    plan = a_plan((1.0, {"a": ORIGIN, "b": ORIGIN}))
    assert planned_parts(plan, set(), 9)[PeerId("a")].stripes == ()


def test_a_tree_that_gets_no_chunk_is_nobodys_stripe() -> None:
    plan = a_plan((0.9, chain("a", "b")), (0.1, chain("b", "a")))
    assert planned_parts(plan, set(), 1)[PeerId("b")].stripes == (Stripe(1, ("a",)),)


def test_of_too_many_trees_the_heaviest_remain_and_take_all_chunks() -> None:
    light = [(0.5 / STRIPES_MAX, chain("b", "a"))] * STRIPES_MAX
    part = planned_parts(a_plan(*light, (0.5, chain("a", "b"))), set(), 10_000)[PeerId("b")]
    assert len(part.stripes) == STRIPES_MAX
    assert sum(stripe.num_chunks for stripe in part.stripes) == 10_000
    assert part.stripes[-1].sources == ("a",)


def test_a_deep_chain_names_the_nearest_only() -> None:
    names = [f"w{i}" for i in range(SOURCES_MAX + 9)]
    part = planned_parts(a_plan((1.0, chain(*names))), set(), 10)[PeerId(names[-1])]
    assert part.stripes[0].sources == tuple(names[-2 : -2 - SOURCES_MAX : -1])


def test_a_parent_that_only_dials_is_told_of_its_children() -> None:
    plan = a_plan(
        (0.5, {"d": ORIGIN, "a": "d", "b": "a"}), (0.5, {"a": ORIGIN, "d": "a", "b": "d"})
    )
    parts = planned_parts(plan, {"a", "b"}, 10)
    assert {name: part.serves for name, part in parts.items()} == {
        "a": (), "b": (), "d": ("a", "b"),
    }  # fmt: skip


def test_who_joins_late_gets_equal_stripes() -> None:
    part = joiner_part([PeerId("a"), PeerId("b")], 5)
    assert part.stripes == (Stripe(3, ("a", "b")), Stripe(2, ("b", "a")))
    assert joiner_part([PeerId("a"), PeerId("b")], 1).stripes == (Stripe(1, ("a", "b")),)
    three = joiner_part([PeerId("a"), PeerId("b"), PeerId("c")], 6)
    assert [stripe.sources for stripe in three.stripes] == [
        ("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"),
    ]  # fmt: skip
    assert joiner_part([], 5).stripes == joiner_part([PeerId("a")], 0).stripes == ()


def test_suppliers_are_the_parents_in_the_trees_that_lead_through_the_sender() -> None:
    plan = a_plan(
        (0.5, chain("a", "b", "c")), (0.3, chain("c", "b", "a")), (0.2, chain("b", "c", "a"))
    )
    parts = planned_parts(plan, {"a", "b", "c"}, 10)
    a, b, c = (parts[PeerId(name)] for name in "abc")
    assert suppliers(b, c, "b") == {"a", ORIGIN}
    assert suppliers(b, a, "b") == {"c"}
    assert suppliers(a, c, "a") == set()
    assert suppliers(b, joiner_part([PeerId("b")], 10), "b") is None


def test_followers_are_all_who_would_wait_for_it() -> None:
    parts = {PeerId("b"): joiner_part([PeerId("a")], 2), PeerId("c"): joiner_part([PeerId("b")], 2)}
    assert followers(parts, PeerId("a")) == {"b", "c"}
    assert followers(parts, PeerId("c")) == set()


@pytest.mark.parametrize(
    ("origin", "up", "down", "num_star", "left"),
    [
        (100.0, [50.0], [200.0], 0, 100.0),
        (100.0, [0.0, 0.0], [200.0, 200.0], 2, 50.0),  # nobody helps: a star of four
        (100.0, [900.0, 900.0], [200.0, 200.0], 1, 50.0),  # the origin sends it twice
        (100.0, [900.0, 900.0], [20.0, 200.0], 1, 80.0),  # nobody is faster than 20
    ],
)
def test_a_star_beside_the_plan_leaves_the_rest_of_the_origin(
    origin: float, up: list[float], down: list[float], num_star: int, left: float
) -> None:
    assert rate_beside_a_star(origin, up, down, num_star=num_star) == pytest.approx(left)
