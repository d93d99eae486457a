"""One source of a fetch, as its receiver knows it: is it heard, does it deliver, how fast.

    down --connected--> up --silent, stuck, refuses--> resting --> on probation --delivers--> up

Resting: nothing is asked of it, 1, 2, 4 ... 2^5 s with each failure in a row. On probation:
one chunk at a time, until one comes soon after it was asked for. Too many wrong payloads:
distrusted, for the rest of the fetch. Whom to ask for what decides `core.relay_fetch`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

ORIGIN: Final = "origin"
RATE_WINDOW_S: Final = 2.0
RESTS_DOUBLED_MAX: Final = 5
QUIET_SPANS: Final = 2.0
"""A source is silent after so many times the longest that it was quiet lately, if that is more
than the limit: on a slow link a sign of life waits behind chunks."""
SIGNS_LATE_S: Final = 1.0
"""Signs of life are sent each 0.5 s; with so long between two they stood behind chunks."""
QUIET_DECAY: Final = 0.8
"""Of the longest quiet time, with each payload."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`window_chunks`: most chunks asked of one source at once. `faults_max`: wrong payloads
    after which a source is asked no more (the origin: after which the fetch fails)."""

    window_chunks: int
    silence_s: float = 1.5
    origin_silence_s: float = 10.0
    stuck_s: float = 10.0
    """A relay that holds chunks, says that it lives and delivers none for so long is passed
    over."""
    awaiting_s: float = 30.0
    """The same for one that has none of them itself: the trouble is further up."""
    faults_max: int = 3


@dataclass(slots=True, eq=False)
class Source:
    """One peer, as this fetch knows it. `num_bytes` arrived, `busy_s` with something asked.
    `silences`: how often it was taken for dead; `failures`: of these, since it last worked.
    `spacing_s`: time between two of its chunks by the plan, 0.0 without one."""

    name: str
    spacing_s: float = 0.0
    up: bool = False
    asked: set[int] = field(default_factory=set)
    heard_at: float = 0.0
    delivered_at: float = 0.0
    rests_until: float = float("-inf")
    dialed_at: float | None = None
    was_up: bool = False
    num_faults: int = 0
    silences: int = 0
    failures: int = 0
    is_helper: bool = False
    """Not on the way up our trees: it may wait, through others, for us."""
    num_bytes: int = 0
    busy_s: float = 0.0
    busy_since: float | None = None
    num_held: int = 0
    """Of what is asked, as it said last: what waits for the link to us."""
    told_at: float = 0.0
    """When it said so, or began to owe."""
    told_after_s: float = 0.0
    """Since it had said so before."""
    slow_since: float | None = None
    quiet_s: float = 0.0
    is_origin: bool = field(init=False)
    _arrivals: deque[tuple[float, int]] = field(default_factory=deque)
    _recent_bytes: int = 0

    def __post_init__(self) -> None:
        self.is_origin = self.name == ORIGIN

    def trusted(self, limits: Limits) -> bool:
        return self.is_origin or self.num_faults < limits.faults_max

    def works(self, limits: Limits, now: float) -> bool:
        """May it be asked?"""
        return self.up and now >= self.rests_until and self.trusted(limits)

    def window_left(self, limits: Limits) -> int:
        return (1 if self.on_probation else limits.window_chunks) - len(self.asked)

    @property
    def on_probation(self) -> bool:
        return bool(self.failures) and not self.is_origin

    # ------------------------------------------------------------------------ events

    def connected(self, now: float) -> None:
        """A handshake shows that it lives, however often it did not before."""
        self.up = self.was_up = True
        self.dialed_at = None
        self.heard_at = now
        self.failures = 0
        self.rests_until = float("-inf")

    def failed(self, now: float) -> None:
        """It was taken for dead."""
        self.silences += 1
        self._rest(now)

    def refused(self, now: float) -> None:
        """It lives, and has nothing."""
        self.heard_at = now
        self._rest(now)

    def alive(self, num_held: int, now: float) -> None:
        self.told_after_s = now - self.told_at
        self.heard_at = self.told_at = now
        self.num_held = num_held

    def arrived(self, num_bytes: int, now: float) -> None:
        if self.asked:
            self.quiet_s = max(now - self.heard_at, self.quiet_s * QUIET_DECAY)
        self.heard_at = now
        self.num_bytes += num_bytes
        self._arrivals.append((now, num_bytes))
        self._recent_bytes += num_bytes
        self._drop_old(now)

    def delivered(self, limits: Limits, now: float) -> None:
        """What arrived is of use. Late, it shows that the source lives, and no more: one that
        was cut off is behind, and would keep us waiting for all that it was asked for."""
        self.delivered_at = now
        soon_s = max(limits.silence_s, QUIET_SPANS * self.spacing_s)
        is_prompt = self.busy_since is not None and now <= self.busy_since + soon_s
        self.failures = 0 if is_prompt else min(self.failures, 1)

    def ask(self, indexes: list[int], now: float) -> None:
        if not self.asked:
            self.heard_at = self.delivered_at = self.told_at = self.busy_since = now
            self.num_held = 0
            self.told_after_s = 0.0
        self.asked.update(indexes)

    def let_off(self, index: int, now: float) -> None:
        """A chunk is not asked of it any more: it came, or is taken back."""
        self.asked.remove(index)
        if not self.asked and self.busy_since is not None:
            self.busy_s += now - self.busy_since
            self.busy_since = self.slow_since = None

    def excuse(self, limits: Limits, now: float) -> None:
        """Nobody listened for a while: it gets half of its time again."""
        self.heard_at = max(self.heard_at, now - self._silence_s(limits) / 2)
        self.delivered_at = max(self.delivered_at, now - limits.stuck_s / 2)

    # ------------------------------------------------------------------------ verdicts

    def is_quiet(self, limits: Limits, now: float) -> bool:
        """Owes something, and was quiet for so long that `due_at` is worth a look."""
        stuck_s = min(limits.stuck_s, self._patience_s(limits))
        return bool(self.asked) and (
            now >= self.heard_at + limits.silence_s or now >= self.delivered_at + stuck_s
        )

    def due_at(self, limits: Limits) -> float:
        """When it will have been silent, or stuck, for too long."""
        silent_at = self.heard_at + self._silence_s(limits)
        if self.is_origin:  # behind it there is nobody: slow is better than nothing
            return silent_at
        return min(silent_at, self.delivered_at + self._patience_s(limits))

    def _silence_s(self, limits: Limits) -> float:
        least_s = limits.origin_silence_s if self.is_origin else limits.silence_s
        most_s = float("inf") if self.is_origin else max(least_s, limits.stuck_s)
        return min(most_s, max(least_s, QUIET_SPANS * max(self.quiet_s, self.spacing_s)))

    def _patience_s(self, limits: Limits) -> float:
        patience_s = limits.stuck_s if self.num_held else limits.awaiting_s
        if (self.on_probation or self.is_helper) and not self.num_held:
            patience_s = QUIET_SPANS * limits.silence_s
        return max(patience_s, 2.0 * QUIET_SPANS * self.spacing_s)

    def bytes_per_s(self, now: float) -> float:
        """Over the last RATE_WINDOW_S."""
        self._drop_old(now)
        return self._recent_bytes / RATE_WINDOW_S

    def is_warm(self, now: float) -> bool:
        """Was it busy for all of the time that its rate is measured over?"""
        return self.busy_since is not None and now - self.busy_since > RATE_WINDOW_S

    def is_held_up(self, now: float) -> bool:
        """Is the link to us what it waits for? It says so; or would have to say that it is not,
        and its signs of life are late."""
        return bool(self.num_held) or max(now - self.told_at, self.told_after_s) > SIGNS_LATE_S

    def busy_until(self, now: float) -> float:
        return self.busy_s + (0.0 if self.busy_since is None else now - self.busy_since)

    def _rest(self, now: float) -> None:
        """The longer, the more often it failed."""
        rest_s = 2.0 ** min(self.failures, RESTS_DOUBLED_MAX)
        self.rests_until = max(self.rests_until, now + rest_s)
        self.failures += 1

    def _drop_old(self, now: float) -> None:
        while self._arrivals and self._arrivals[0][0] < now - RATE_WINDOW_S:
            self._recent_bytes -= self._arrivals.popleft()[1]
