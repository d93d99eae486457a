"""Eq. 21: rewards of one group, centred and scaled."""

from __future__ import annotations

import numpy as np
import pytest

from echo2_learner.advantage import group_advantages


def test_advantages_are_centred_and_divided_by_the_standard_deviation() -> None:
    rewards = [0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0, 0.5]
    mean = sum(rewards) / 8
    std = (sum((reward - mean) ** 2 for reward in rewards) / 8) ** 0.5
    expected = [(reward - mean) / (std + 1e-6) for reward in rewards]
    assert group_advantages(rewards, epsilon=1e-6).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("rewards", [[0.1] * 3, [1.0], [0.0] * 8, [1e9] * 7])
def test_a_group_without_variance_has_no_advantage_at_all(rewards: list[float]) -> None:
    assert group_advantages(rewards, epsilon=1e-6).tolist() == [0.0] * len(rewards)


def test_epsilon_keeps_a_tiny_spread_from_being_blown_up() -> None:
    found = group_advantages([0.0, 1e-9], epsilon=1e-6)
    assert np.abs(found).max() < 1e-3
