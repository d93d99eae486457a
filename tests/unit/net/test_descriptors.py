"""A daemon may open what the system allows, and says when that is little."""

from __future__ import annotations

import resource

import pytest
import structlog

from echo2.net import descriptors
from echo2.net.descriptors import raise_descriptor_limit


class Limits:
    def __init__(self, soft: int, hard: int) -> None:
        self.now = (soft, hard)


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> Limits:
    """The process's own, played: they can be lowered for good only."""
    found = Limits(256, 1024)
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda which: found.now)
    monkeypatch.setattr(
        descriptors.resource, "setrlimit", lambda which, new: setattr(found, "now", new)
    )
    return found


def test_the_soft_limit_becomes_the_hard_one_and_a_low_one_is_told(limits: Limits) -> None:
    with structlog.testing.capture_logs() as logs:
        assert raise_descriptor_limit() == 1024
    assert limits.now == (1024, 1024)
    assert [(line["event"], line["limit"]) for line in logs] == [("descriptor_limit_low", 1024)]


@pytest.mark.parametrize("hard", [descriptors.DESCRIPTORS_WANTED, resource.RLIM_INFINITY])
def test_a_high_limit_is_no_news(limits: Limits, hard: int) -> None:
    limits.now = (256, hard)
    with structlog.testing.capture_logs() as logs:
        assert raise_descriptor_limit() == hard
    assert limits.now == (hard, hard)
    assert not logs
