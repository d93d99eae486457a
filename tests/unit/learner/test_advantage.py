"""Eq. 21: rewards of one group, centred and scaled."""

from __future__ import annotations

import numpy as np
import pytest

from echo2.config_loss import LossTable
from echo2_learner.advantage import group_advantages, loss_advantages, overlong_penalty


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


def test_without_scaling_rewards_are_only_centred() -> None:
    found = group_advantages([0.0, 1.0, 1.0, 0.0], epsilon=1e-6, scale=False)
    assert found.tolist() == [-0.5, 0.5, 0.5, -0.5]


def test_long_answers_lose_reward_up_to_one_and_short_ones_none() -> None:
    found = overlong_penalty([10, 80, 85, 90, 100, 120], tokens_max=100, share=0.2)
    assert found.tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1])
    assert overlong_penalty([10, 200], tokens_max=100, share=0.0).tolist() == [0, 0]


def test_the_loss_settings_decide_what_an_advantage_is() -> None:
    dapo = LossTable(name="dapo", scale_advantages=False)
    found = loss_advantages([1.0, 1.0], [10, 100], dapo, tokens_max=100)
    assert found.tolist() == [0.5, -0.5]
    assert loss_advantages([1.0, 1.0], [10, 100], LossTable(), tokens_max=100).tolist() == [0, 0]
