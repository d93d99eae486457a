from __future__ import annotations

import random
from itertools import permutations

import pytest

from echo2.core.delta_paths import Artifact, cheapest_path


def full(version: str, num_bytes: int = 1000) -> Artifact:
    return Artifact(digest=version, target=version, num_bytes=num_bytes)


def delta(base: str, target: str, num_bytes: int) -> Artifact:
    return Artifact(digest=f"{base}>{target}", target=target, num_bytes=num_bytes, base=base)


def names(path: list[Artifact] | None) -> list[str]:
    assert path is not None
    return [artifact.digest for artifact in path]


CHAIN = [delta("1", "2", 10), delta("2", "3", 10), delta("3", "4", 10)]


def test_what_is_here_needs_nothing() -> None:
    assert cheapest_path("4", "4", []) == []


def test_who_has_nothing_fetches_the_full_version() -> None:
    assert names(cheapest_path(None, "4", [*CHAIN, full("4")])) == ["4"]


def test_a_worker_behind_takes_the_chain_while_it_is_cheapest() -> None:
    assert names(cheapest_path("1", "4", [*CHAIN, full("4")])) == ["1>2", "2>3", "3>4"]
    assert names(cheapest_path("3", "4", [*CHAIN, full("4")])) == ["3>4"]


def test_a_direct_delta_wins_when_it_is_smaller_than_the_chain() -> None:
    assert names(cheapest_path("1", "4", [*CHAIN, delta("1", "4", 29)])) == ["1>4"]
    assert names(cheapest_path("1", "4", [*CHAIN, delta("1", "4", 31)])) == ["1>2", "2>3", "3>4"]


def test_of_equal_bytes_fewer_artifacts_win() -> None:
    assert names(cheapest_path("1", "4", [*CHAIN, delta("1", "4", 30)])) == ["1>4"]


def test_the_full_version_wins_over_deltas_that_are_not_smaller() -> None:
    assert names(cheapest_path("1", "4", [*CHAIN, full("4", 30)])) == ["4"]


def test_an_anchor_and_deltas_from_it_may_beat_everything() -> None:
    artifacts = [full("3", 20), full("4", 1000), delta("1", "2", 900), *CHAIN[2:]]
    assert names(cheapest_path("1", "4", artifacts)) == ["3", "3>4"]
    assert names(cheapest_path(None, "4", artifacts)) == ["3", "3>4"]


def test_a_chain_has_a_bounded_length() -> None:
    artifacts = [*CHAIN, full("4")]
    assert names(cheapest_path("1", "4", artifacts, steps_max=2)) == ["4"]
    assert cheapest_path("1", "4", CHAIN, steps_max=2) is None
    assert cheapest_path("1", "4", artifacts, steps_max=0) is None


def test_a_step_must_save_the_bytes_that_it_counts_for() -> None:
    artifacts = [*CHAIN, delta("1", "4", 100)]
    assert names(cheapest_path("1", "4", artifacts, step_bytes=34)) == ["1>2", "2>3", "3>4"]
    assert names(cheapest_path("1", "4", artifacts, step_bytes=35)) == ["1>4"]


def test_deltas_of_versions_that_nobody_has_lead_nowhere() -> None:
    assert cheapest_path("9", "4", CHAIN) is None
    assert cheapest_path(None, "4", CHAIN) is None


def test_deltas_in_circles_do_no_harm() -> None:
    artifacts = [delta("1", "2", 0), delta("2", "1", 0), delta("2", "3", 5)]
    assert names(cheapest_path("1", "3", artifacts)) == ["1>2", "2>3"]


def test_everyone_who_asks_gets_the_same() -> None:
    artifacts = [delta("1", "2", 5), delta("1", "3", 5), delta("2", "4", 5), delta("3", "4", 5)]
    found = {tuple(names(cheapest_path("1", "4", order))) for order in permutations(artifacts)}
    assert found == {("1>2", "2>4")}


def test_no_path_is_cheaper() -> None:
    """Against a search of all paths."""
    rng = random.Random(0)
    for _ in range(200):
        versions = "abcde"
        artifacts = [full(v, rng.randrange(20)) for v in versions if rng.random() < 0.3]
        artifacts += [
            delta(a, b, rng.randrange(10))
            for a, b in permutations(versions, 2)
            if rng.random() < 0.4
        ]
        steps_max = rng.randrange(1, 4)
        path = cheapest_path("a", "e", artifacts, steps_max=steps_max, step_bytes=1)
        best = min(all_costs("a", "e", artifacts, steps_max), default=None)
        if path is None:
            assert best is None
            continue
        assert len(path) <= steps_max
        assert (sum(a.num_bytes + 1 for a in path), len(path)) == best
        have: str | None = "a"
        for artifact in path:
            assert artifact.base in (None, have)
            have = artifact.target
        assert have == "e"


def all_costs(
    have: str, want: str, artifacts: list[Artifact], steps_max: int
) -> list[tuple[int, int]]:
    """(cost, artifacts) of every path."""
    found = []
    for artifact in artifacts if steps_max else []:
        if artifact.base not in (None, have):
            continue
        rest = [(0, 0)] if artifact.target == want else []
        rest += all_costs(artifact.target, want, artifacts, steps_max - 1)
        found += [(artifact.num_bytes + 1 + cost, 1 + num) for cost, num in rest]
    return found


def test_an_artifact_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="-1 bytes"):
        full("1", -1)
    with pytest.raises(ValueError, match="it is a version itself"):
        Artifact(digest="x", target="1", num_bytes=1)
