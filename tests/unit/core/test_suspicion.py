"""When logprobs are odd, how many odd ones make a suspicion, and who is never condemned."""

from __future__ import annotations

from random import Random

import pytest

from echo2.core import suspicion
from echo2.core.suspicion import (
    ALONE_FACTOR,
    NEWEST,
    EvidenceSum,
    MismatchRule,
    MismatchWatch,
    Suspicion,
)
from echo2.types import GroupId, GroupMismatch, PeerId

HONEST = 0.01


def a_watch(**changes: object) -> MismatchWatch:
    return MismatchWatch(MismatchRule(run_precision="bfloat16", **changes))  # type: ignore[arg-type]


def observed(
    watch: MismatchWatch, precision: str = "bfloat16", tokens: int = 64, **diffs: float
) -> list[Suspicion]:
    """One step in which one group of each worker was compared."""
    compared = [
        (PeerId(worker), GroupMismatch(GroupId(f"g-{worker}"), tokens, diff))
        for worker, diff in diffs.items()
    ]
    return watch.note(compared, lambda peer: precision)


def steps_until_suspected(watch: MismatchWatch, steps: int = 200, **diffs: float) -> int | None:
    for step in range(1, steps + 1):
        if observed(watch, **diffs):
            return step
    return None


def test_a_worker_that_is_always_odd_is_suspected_at_the_third_observation() -> None:
    watch = a_watch()
    honest = dict.fromkeys(("a", "b", "c"), HONEST)
    assert not observed(watch, **honest, liar=1.0)
    assert not observed(watch, **honest, liar=1.0)
    (found,) = observed(watch, **honest, liar=1.0)
    assert (found.worker, found.confirmed, len(found.odd)) == ("liar", True, 3)
    last = found.odd[-1]
    assert last.groups == ("g-liar",)
    assert last.centre == pytest.approx(HONEST)
    assert last.threshold == 0.05
    assert "1 over 64 tokens of g-liar" in found.reason
    assert "at most 0.05 is allowed (the fleet's centre 0.01" in found.reason


def test_an_honest_fleet_is_never_suspected() -> None:
    rng, watch = Random(1), a_watch()
    for _ in range(3000):
        diffs = {f"w{i}": HONEST * rng.lognormvariate(0, 0.4) for i in range(6)}
        assert not observed(watch, **diffs)


def test_odd_ones_that_are_rare_fade_and_those_of_a_third_do_not() -> None:
    honest = dict.fromkeys(("a", "b", "c"), HONEST)
    for every, suspected in ((12, False), (3, True)):
        watch = a_watch()
        found = False
        for step in range(240):
            found |= bool(observed(watch, **honest, some=1.0 if step % every == 0 else HONEST))
        assert found is suspected


def test_the_sum_forgets_a_tenth_for_each_that_is_not_odd() -> None:
    evidence = EvidenceSum()
    assert [evidence.note(odd=odd) for odd in (True, True, False, False, True)] == [
        pytest.approx(value) for value in (1.0, 2.0, 1.9, 1.8, 2.8)
    ]
    for _ in range(40):
        evidence.note(odd=False)
    assert evidence.value == 0.0


def test_the_floor_is_that_of_the_declared_precision() -> None:
    honest = dict.fromkeys(("a", "b", "c"), 1e-5)
    for precision, diff, suspected in (
        ("float32", 2e-4, True),
        ("bfloat16", 2e-2, False),
        ("int4", 0.2, False),
        ("int4", 0.4, True),
    ):
        watch = MismatchWatch(MismatchRule(run_precision="float32"))
        found: list[Suspicion] = []
        for _ in range(4):
            found += observed(watch, precision, **honest, w=diff)
        assert bool(found) is suspected, (precision, diff)


def test_an_unknown_precision_and_none_count_as_the_runs() -> None:
    rule = MismatchRule(run_precision="bfloat16")
    assert rule.floor_of("none") == rule.floor_of("what?") == rule.floor_of("bfloat16") == 0.05
    assert MismatchRule(run_precision="bfloat16", floor=0.02).floor_of("int4") == 0.02


def test_nothing_is_odd_in_a_run_without_a_model() -> None:
    watch = MismatchWatch(MismatchRule())
    assert steps_until_suspected(watch, a=1.0, b=1.0, c=1.0, d=100.0) is None


def test_the_only_worker_is_reported_and_never_confirmed() -> None:
    watch = a_watch()
    for _ in range(2):
        observed(watch, only=1.0)
    (found,) = observed(watch, only=1.0)
    assert not found.confirmed
    assert "no other worker shows that the learner is right" in found.reason


def test_one_of_two_is_confirmed_only_if_the_other_agrees_with_the_learner() -> None:
    watch = a_watch()
    for _ in range(3):
        found = observed(watch, honest=HONEST, liar=1.0)
    assert [(each.worker, each.confirmed) for each in found] == [("liar", True)]
    watch = a_watch()
    for _ in range(3):
        found = observed(watch, one=1.0, other=1.2)
    assert [each.confirmed for each in found] == [False, False]


def test_few_workers_are_held_against_four_times_the_floor() -> None:
    below, above = 0.05 * ALONE_FACTOR * 0.99, 0.05 * ALONE_FACTOR * 1.01
    assert steps_until_suspected(a_watch(), a=HONEST, b=below) is None
    assert steps_until_suspected(a_watch(), a=HONEST, b=above) == 3


def test_a_fleet_that_differs_as_a_whole_condemns_nobody_and_is_told() -> None:
    watch = a_watch()
    diffs = {f"w{i}": 0.2 + 0.01 * i for i in range(6)}
    assert steps_until_suspected(watch, steps=50, **diffs) is None
    fleet = watch.fleet()
    assert fleet is not None
    assert fleet[0] > fleet[1] == 0.05
    assert steps_until_suspected(watch, steps=50, **diffs, worse=3.0) == 3


def test_small_groups_are_put_together_until_they_have_tokens_enough() -> None:
    watch = a_watch()
    honest = dict.fromkeys(("a", "b", "c"), HONEST)
    steps = [bool(observed(watch, tokens=24, **honest, liar=1.0)) for _ in range(9)]
    assert steps == [False] * 8 + [True]  # three groups are an observation


def test_what_was_forgotten_begins_anew() -> None:
    watch = a_watch()
    honest = dict.fromkeys(("a", "b", "c"), HONEST)
    for _ in range(2):
        observed(watch, **honest, liar=1.0)
    watch.forget(PeerId("liar"))
    assert steps_until_suspected(watch, **honest, liar=1.0) == 3


def test_evidence_and_workers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspicion, "WORKERS_MAX", 100)
    watch = a_watch()
    for _ in range(3 * NEWEST):
        found = observed(watch, a=HONEST, b=HONEST, c=HONEST, liar=1.0)
    assert len(found[0].odd) == NEWEST
    for i in range(110):
        watch.note([(PeerId(f"n{i}"), GroupMismatch(GroupId("g0"), 64, HONEST))], lambda _: "")
    assert len(watch._records) == 100


def test_in_a_large_fleet_a_liar_is_found_as_in_a_small_one() -> None:
    honest = {f"w{i}": HONEST for i in range(100)}
    assert steps_until_suspected(a_watch(), **honest, liar=1.0) == 3
