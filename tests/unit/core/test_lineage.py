"""Which versions exist, and which of them lead somewhere."""

from __future__ import annotations

import pytest
from core_builders import a_digest

from echo2.core.lineage import Lineage
from echo2.types import Version


def a_lineage(*starts: tuple[int, int], published: str = "") -> Lineage:
    lineage = Lineage(starts=list(starts))
    for text in published.split():
        lineage.publish(Version.parse(text), a_digest(Version.parse(text)))
    return lineage


def of(text: str) -> Version:
    return Version.parse(text)


def test_before_any_learner_nothing_exists() -> None:
    lineage = Lineage()
    assert lineage.incarnation == 0
    assert lineage.newest is None
    assert lineage.last_published_step(1) is None


def test_each_learner_opens_a_higher_incarnation() -> None:
    lineage = a_lineage((1, 0))
    lineage.begin(2, 3)
    assert lineage.incarnation == 2
    with pytest.raises(ValueError, match="incarnation 2 is not above 2"):
        lineage.begin(2, 3)
    assert lineage.starts == [(1, 0), (2, 3)]


def test_a_version_after_a_later_resume_is_dead() -> None:
    lineage = a_lineage((1, 0), (2, 2), (3, 4))
    assert lineage.is_alive(of("1.2"))
    assert not lineage.is_alive(of("1.3"))
    assert lineage.is_alive(of("2.4"))
    assert not lineage.is_alive(of("2.5"))
    assert lineage.is_alive(of("3.9"))
    assert not lineage.is_alive(of("4.0")), "that incarnation does not exist"


def test_the_newest_version_is_one_that_is_alive() -> None:
    lineage = a_lineage((1, 0), published="1.0 1.1 1.2")
    assert lineage.newest == of("1.2")
    lineage.begin(2, 1)
    assert lineage.newest == of("1.1")
    lineage.publish(of("2.1"), "d")
    assert lineage.newest == of("2.1")
    assert lineage.last_published_step(1) == 2
    assert lineage.last_published_step(2) == 1


def test_versions_that_become_durable_out_of_order_stay_sorted() -> None:
    lineage = a_lineage((1, 0), published="1.0 1.2 1.1")
    assert list(lineage.published) == [of("1.0"), of("1.1"), of("1.2")]
    assert lineage.newest == of("1.2")


def test_a_rollout_of_a_published_living_version_is_believed() -> None:
    lineage = a_lineage((1, 0), published="1.0 1.1")
    assert lineage.verdict(of("1.1"), step=1)


@pytest.mark.parametrize(
    ("version", "step", "reason"),
    [
        ("1.2", 1, "version 1.2 is above v = 1"),
        ("1.5", 9, "version 1.5 was never published"),
        ("1.2", 9, "version 1.2 is not in the line of incarnation 2"),
    ],
)
def test_a_rollout_that_can_not_be_is_refused(version: str, step: int, reason: str) -> None:
    lineage = a_lineage((1, 0), (2, 1), published="1.0 1.1 1.2")
    verdict = lineage.verdict(of(version), step=step)
    assert not verdict
    assert verdict.reason == reason


def test_every_version_of_a_group_must_be_believed() -> None:
    lineage = a_lineage((1, 0), published="1.0 1.1")
    assert lineage.all_verdict((of("1.0"), of("1.1")), step=1)
    verdict = lineage.all_verdict((of("1.0"), of("1.3")), step=5)
    assert verdict.reason == "version 1.3 was never published"


def test_old_versions_are_forgotten_but_never_the_newest() -> None:
    lineage = a_lineage((1, 0), published="1.0 1.1 1.2")
    lineage.forget_below(2)
    assert list(lineage.published) == [of("1.2")]
    lineage.forget_below(9)
    assert list(lineage.published) == [of("1.2")]


def test_starts_of_forgotten_incarnations_are_forgotten_but_the_last_is_kept() -> None:
    lineage = a_lineage((1, 0), (2, 3), (3, 5), published="1.0 2.3 3.5")
    lineage.forget_below(4)
    assert lineage.starts == [(3, 5)]
    empty = a_lineage((1, 0), (2, 3))
    empty.forget_below(4)
    assert empty.starts == [(2, 3)]
    assert empty.incarnation == 2
