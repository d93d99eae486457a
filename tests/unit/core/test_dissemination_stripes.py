from __future__ import annotations

import pytest

from echo2.core.dissemination import stripe_sizes, stripes


def test_stripes_have_sizes_in_proportion_to_the_weights() -> None:
    assert stripe_sizes(10, [0.5, 0.3, 0.2]) == [5, 3, 2]


def test_what_does_not_divide_goes_to_the_largest_remainders() -> None:
    assert stripe_sizes(10, [0.34, 0.33, 0.33]) == [4, 3, 3]
    assert stripe_sizes(2, [1.0, 1.0, 1.0]) == [1, 1, 0]


def test_weights_that_are_shares_of_the_chunks_give_those_chunks_back() -> None:
    chunks = [7, 101, 13, 135]
    assert stripe_sizes(256, [count / 256 for count in chunks]) == chunks
    assert stripe_sizes(2**24 + 1, [1 / (2**24 + 1), 2**24 / (2**24 + 1)]) == [1, 2**24]


def test_a_stripe_is_spread_over_the_version_each_chunk_as_early_as_its_share_allows() -> None:
    assert stripes(8, [0.5, 0.25, 0.25]) == [0, 1, 2, 0, 0, 1, 2, 0]


def test_one_tree_takes_every_chunk() -> None:
    assert stripes(5, [1.0]) == [0] * 5


def test_no_chunks_make_no_stripes() -> None:
    assert stripes(0, [0.5, 0.5]) == []
    assert stripes(0, []) == []


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [1.0, -0.5]])
def test_weights_that_say_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot be split"):
        stripes(4, weights)
