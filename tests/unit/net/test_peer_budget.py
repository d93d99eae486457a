"""Who asks too much is not read; who does not, is; and nobody is cut off for good."""

from __future__ import annotations

import pytest

from echo2.messages import Lane
from echo2.net import peer_budget
from echo2.net.peer_budget import BudgetLimits, PeerBudgets
from echo2.net.sockets import LANES
from echo2.types import PeerId

W1, W2 = PeerId("w-1"), PeerId("w-2")


def budgets(**limits: float) -> PeerBudgets:
    made = BudgetLimits(**{"per_s": 10.0, "burst": 20.0, "taken": 1.0, "refused": 5.0, **limits})
    return PeerBudgets(lambda peer: made)


def read_of(found: PeerBudgets, peer: PeerId, times: int, *, refused: bool, at: float = 0.0) -> int:
    """How many of so many messages are read."""
    num_read = 0
    for _ in range(times):
        if found.allows(peer, at):
            num_read += 1
            found.charge(peer, at, refused=refused)
    return num_read


def test_a_peer_is_read_up_to_its_burst_and_then_at_its_rate() -> None:
    found = budgets()
    assert read_of(found, W1, 100, refused=False) == 20
    assert read_of(found, W1, 100, refused=False, at=1.0) == 10
    assert read_of(found, W1, 100, refused=False, at=1000.0) == 20, "rest gives back the burst"


def test_what_is_refused_costs_more() -> None:
    found = budgets()
    assert read_of(found, W1, 100, refused=True) == 4
    assert read_of(found, W1, 100, refused=True, at=1.0) == 2


def test_one_peer_s_spending_is_not_another_s() -> None:
    found = budgets()
    read_of(found, W1, 100, refused=True)
    assert not found.allows(W1, 0.0)
    assert read_of(found, W2, 100, refused=False) == 20


def test_time_counts_and_a_costly_message_is_paid_for_before_the_next() -> None:
    found = budgets()
    found.charge(W1, 0.0, refused=True, seconds=0.01)
    assert found.allows(W1, 0.0), "15 units were spent, 20 were there"
    found.charge(W1, 0.0, refused=True, seconds=0.03)
    assert not found.allows(W1, 8.9), "15 + 5 + 3 * 30 were spent, 10 a second come"
    assert found.allows(W1, 9.1)


def test_a_long_message_that_was_taken_costs_a_burst_at_most() -> None:
    """The collector of garbage may have run in it: that is not its sender's doing."""
    found = budgets()
    found.charge(W1, 0.0, refused=False, seconds=5.0)
    assert not found.allows(W1, 0.0)
    assert found.allows(W1, 0.1)
    found.charge(W1, 0.1, refused=False, seconds=5.0)
    assert not found.allows(W1, 1.9), "the next one is paid for in full"
    assert found.allows(W1, 2.2)


def test_a_clock_that_steps_back_gives_and_takes_nothing() -> None:
    found = budgets()
    read_of(found, W1, 100, refused=False, at=100.0)
    assert not found.allows(W1, 50.0)


def test_spending_is_remembered_of_a_bounded_number_of_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_budget, "PEERS_MAX", 3)
    found = budgets()
    read_of(found, W1, 100, refused=True)
    for number in range(50):
        found.charge(PeerId(f"idle-{number}"), 0.1 * number, refused=False)
    assert len(found._accounts) <= 3
    assert found.allows(PeerId("idle-0"), 5.0)


def test_a_lane_reads_every_peer_again_within_seconds() -> None:
    """A worker that was refused much, of a coordinator that does not know it yet, is heard."""
    for lane in Lane:
        limits = LANES[lane].budget
        found = PeerBudgets(lambda peer, limits=limits: limits)
        assert read_of(found, W1, 32, refused=True) == 32, f"{lane}: a few mistakes cost nothing"
        read_of(found, W1, 100_000, refused=True)
        assert found.allows(W1, 5.0), lane
