from __future__ import annotations

import pytest

from echo2.core.dissemination import Host, RelayPlan, RelayTree, plan_problem

ORIGIN = Host("origin", 300.0, 1000.0, 0.0, accepts=True)
WORKERS = [
    Host("a", 100.0, 100.0, 0.01, accepts=True),
    Host("b", 100.0, 100.0, 0.01, accepts=False),
    Host("c", 100.0, 100.0, 0.01, accepts=False),
]
CHAIN = {"b": "origin", "a": "b", "c": "a"}
STAR = {"a": "origin", "b": "origin", "c": "origin"}


def a_plan(
    *trees: tuple[float, dict[str, str]],
    unreached: tuple[str, ...] = (),
    arrivals_s: dict[str, float] | None = None,
) -> RelayPlan:
    return RelayPlan(
        trees=tuple(RelayTree(weight, parents) for weight, parents in trees),
        predicted_s=1.0,
        bound_s=1.0,
        bound_by="a test",
        reason="a test",
        arrivals_s=arrivals_s or {},
        unreached=unreached,
    )


def test_a_chain_and_a_star_over_stripes_are_in_order() -> None:
    assert plan_problem(a_plan((0.75, CHAIN), (0.25, STAR)), ORIGIN, WORKERS) is None


@pytest.mark.parametrize(
    ("parents", "problem"),
    [
        ({"a": "origin", "b": "origin"}, "tree 0: c is missing"),
        (STAR | {"d": "origin"}, "tree 0: d is not a worker to reach"),
        (STAR | {"origin": "a"}, "tree 0: origin is not a worker to reach"),
        (STAR | {"c": "d"}, "tree 0: c has the parent d, which gets no chunks"),
        ({"b": "origin", "a": "c", "c": "a"}, "tree 0: a is on or below a cycle"),
        ({"b": "origin", "a": "a", "c": "a"}, "tree 0: a is on or below a cycle"),
        ({"a": "origin", "b": "a", "c": "b"}, "tree 0: b cannot send to c"),
    ],
)
def test_a_faulty_tree_is_named(parents: dict[str, str], problem: str) -> None:
    assert plan_problem(a_plan((1.0, parents)), ORIGIN, WORKERS) == problem


def test_a_blocked_connection_is_found_in_either_order() -> None:
    plan = a_plan((1.0, CHAIN))
    blocked = frozenset({("a", "b")})
    assert plan_problem(plan, ORIGIN, WORKERS, blocked=blocked) == "tree 0: b cannot send to a"


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ((0.5, 0.4), "the weights sum to 0.9, not to 1"),
        ((1.5, -0.5), "tree 0: its weight 1.5 is not in (0, 1]"),
        ((1.0, 0.0), "tree 1: its weight 0.0 is not in (0, 1]"),
        ((float("nan"), 1.0), "tree 0: its weight nan is not in (0, 1]"),
    ],
)
def test_weights_are_positive_and_sum_to_one(weights: tuple[float, float], problem: str) -> None:
    plan = a_plan((weights[0], CHAIN), (weights[1], STAR))
    assert plan_problem(plan, ORIGIN, WORKERS) == problem


def test_a_plan_without_trees_reaches_nobody() -> None:
    assert plan_problem(a_plan(), ORIGIN, WORKERS) == "there are no trees, and 3 workers to reach"
    assert plan_problem(a_plan(unreached=("a", "b", "c")), ORIGIN, WORKERS) is None
    assert plan_problem(a_plan(), ORIGIN, []) is None
    assert plan_problem(a_plan((1.0, {})), ORIGIN, []) == "there are trees but nobody to reach"


def test_unreached_workers_are_in_no_tree() -> None:
    plan = a_plan((1.0, {"a": "origin", "b": "origin"}), unreached=("c",))
    assert plan_problem(plan, ORIGIN, WORKERS) is None
    strange = a_plan((1.0, STAR), unreached=("d",))
    assert plan_problem(strange, ORIGIN, WORKERS) == "unreached d is not among the workers"


def test_hosts_of_one_name_are_no_fleet() -> None:
    twice = [*WORKERS, WORKERS[0]]
    assert plan_problem(a_plan((1.0, STAR)), ORIGIN, twice) == "two hosts have the same name"


def test_a_tree_knows_children_and_a_plan_its_connections() -> None:
    assert RelayTree(1.0, STAR).children() == {"origin": ["a", "b", "c"]}
    assert a_plan((0.5, CHAIN), (0.5, STAR)).connections == {
        ("origin", "a"), ("origin", "b"), ("origin", "c"), ("b", "a"), ("a", "c"),
    }  # fmt: skip


def test_a_plan_counts_who_is_behind_whom_in_any_tree_once() -> None:
    one = RelayTree(0.5, {"a": "origin", "b": "a", "c": "a", "d": "c"})
    other = RelayTree(0.5, {"d": "a", "b": "origin", "a": "b", "c": "b"})
    arrivals = dict.fromkeys("abcd", 1.0)
    plan = RelayPlan((one, other), 1.0, 1.0, "", "", arrivals_s=arrivals)
    assert list(plan.descendants().items()) == [("a", 3), ("b", 3), ("c", 1)]


def test_a_plan_says_when_a_share_of_the_workers_has_the_version() -> None:
    plan = a_plan((1.0, STAR), arrivals_s={"a": 1.0, "b": 3.0, "c": 2.0})
    assert [plan.reached_s(q) for q in (0.0, 1 / 3, 0.5, 1.0)] == [1.0, 1.0, 2.0, 3.0]
    assert a_plan().reached_s(0.9) == 0.0
