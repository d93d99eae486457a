"""What the core knows of a configuration."""

from __future__ import annotations

import pytest
from core_builders import settings


@pytest.mark.parametrize(("staleness_max", "most"), [(0, 4), (1, 8), (3, 16)])
def test_no_more_groups_are_held_than_the_batches_until_expiry(
    staleness_max: int, most: int
) -> None:
    assert settings(staleness_max=staleness_max, groups_per_step=4).buffer_max == most
