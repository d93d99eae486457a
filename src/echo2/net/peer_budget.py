"""What one peer may cost its router: who asks for more is not read, and keeps nobody waiting.

    message --> has its peer units left? --no--> dropped unread, counted as "flood"
                    | yes
                    '--> decoded --> its units are taken off

A unit is a millisecond of the processor, spent on decoding: what is done about a message is not
its sender's choice. Beside its milliseconds a message costs a fixed number of units, far more
when it was refused: a peer of the same release sends nothing that is. One that takes longer than
LONG_MS makes all others wait, and costs with the square of its time; if it was taken, at most a
whole burst, since the time may have been our own doing. What is dropped costs nothing, so a peer
that sends too much is heard less often, never not at all, and all that must arrive is sent again.
Pure: times and costs are arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from echo2.types import PeerId

PEERS_MAX: Final = 4096
"""Peers whose spending is remembered; of more, those that spent nothing lately are forgotten
first, then the oldest."""
LONG_MS: Final = 10.0


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """`burst` units at once, then `per_s` each second. A message that was taken costs `taken`
    units, one that was refused `refused`, and both `per_ms` for each millisecond up to LONG_MS."""

    per_s: float
    burst: float
    taken: float
    refused: float
    per_ms: float = 1.0


@dataclass(slots=True)
class _Account:
    left: float
    at: float


class PeerBudgets:
    """`limits_of` says what each peer may spend."""

    def __init__(self, limits_of: Callable[[PeerId], BudgetLimits]) -> None:
        self._limits_of = limits_of
        self._accounts: dict[PeerId, _Account] = {}

    def allows(self, peer: PeerId, now: float) -> bool:
        """Has it units left at `now` (seconds)?"""
        account = self._accounts.get(peer)
        if account is None or account.left > 0.0:
            return True
        self._fill(account, self._limits_of(peer), now)
        return account.left > 0.0

    def charge(self, peer: PeerId, now: float, *, refused: bool, seconds: float = 0.0) -> None:
        """Take off what a message cost. The balance may fall below zero: a message that was
        more costly than it looked is paid for before the next one."""
        limits = self._limits_of(peer)
        spent_ms = 1e3 * seconds
        units = limits.per_ms * spent_ms * max(1.0, spent_ms / LONG_MS)
        units += limits.refused if refused else limits.taken
        if not refused:
            units = min(units, limits.burst)
        if not units:
            return
        account = self._accounts.get(peer)
        if account is None:
            self._make_room(now)
            account = self._accounts[peer] = _Account(limits.burst, now)
        self._fill(account, limits, now)
        account.left -= units

    def limits_of(self, peer: PeerId) -> BudgetLimits:
        return self._limits_of(peer)

    def _fill(self, account: _Account, limits: BudgetLimits, now: float) -> None:
        gained = max(0.0, now - account.at) * limits.per_s
        account.left = min(limits.burst, account.left + gained)
        account.at = now

    def _make_room(self, now: float) -> None:
        if len(self._accounts) < PEERS_MAX:
            return
        for peer, account in list(self._accounts.items()):
            limits = self._limits_of(peer)
            self._fill(account, limits, now)
            if account.left >= limits.burst:
                del self._accounts[peer]
        while len(self._accounts) >= PEERS_MAX:
            del self._accounts[next(iter(self._accounts))]
