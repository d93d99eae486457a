"""Each worker gets a version in the fewest bytes; those who get the same are planned together."""

from __future__ import annotations

from echo2.core.delta_choice import OFFERS_MAX, DeltaOffers, Way, main_group
from echo2.messages import VersionPublished
from echo2.types import DeltaOffer, PeerId, Version

FULL = 1000


def a_digest(number: int) -> str:
    return f"{number:064x}"


def a_delta(number: int) -> str:
    """The one that leads to version `number`."""
    return f"{number:0>63x}d"


def a_version(number: int, *, delta_bytes: int | None = 100) -> VersionPublished:
    offers = ()
    if delta_bytes is not None and number:
        offers = (DeltaOffer(a_digest(number - 1), a_delta(number), delta_bytes),)
    return VersionPublished(
        version=Version(1, number),
        manifest_digest=a_digest(number),
        assets_digest="",
        num_bytes=FULL,
        origin="",
        origin_key="",
        deltas=offers,
    )


def offers_until(number: int, *, delta_bytes: int = 100) -> DeltaOffers:
    offers = DeltaOffers()
    for each in range(number + 1):
        offers.add(a_version(each, delta_bytes=delta_bytes))
    return offers


def test_the_next_version_comes_as_its_delta() -> None:
    assert offers_until(3).way(a_version(3), a_digest(2)) == Way((a_delta(3),), 100, 100)


def test_several_versions_behind_the_chain_is_taken_while_it_is_cheaper_than_the_whole() -> None:
    chain = (a_delta(2), a_delta(3), a_delta(4))
    assert offers_until(4).way(a_version(4), a_digest(1)) == Way(chain, 100, 300)
    dear = offers_until(4, delta_bytes=400)
    assert dear.way(a_version(4), a_digest(1)) == Way((), FULL, FULL)
    assert dear.way(a_version(4), a_digest(2)) == Way((a_delta(3), a_delta(4)), 400, 800)


def test_who_has_nothing_or_something_unknown_gets_the_whole() -> None:
    offers = offers_until(3)
    assert offers.way(a_version(3), None) == Way((), FULL, FULL)
    assert offers.way(a_version(3), "f" * 64) == Way((), FULL, FULL)


def test_old_offers_are_forgotten() -> None:
    offers = offers_until(OFFERS_MAX + 3)
    assert offers.way(a_version(5), a_digest(4)) == Way((a_delta(5),), 100, 100)
    assert offers.way(a_version(3), a_digest(2)) == Way((), FULL, FULL)


def test_the_largest_group_with_one_last_artifact_is_planned() -> None:
    a, b, c = (PeerId(name) for name in "abc")
    ways = {a: Way((), FULL, FULL), b: Way(("x", "y"), 5, 10), c: Way(("y",), 5, 5)}
    assert main_group(ways) == [b, c]
    assert main_group({}) == []
