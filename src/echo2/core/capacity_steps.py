"""A fleet and its learner, step after step: the recursion behind `core/capacity.py`.

The rules of the coordinator on what decides about capacity, and nothing else: pacing and hold
(`core/staleness.py`), how far ahead and who waits for an install (`core/dispatch.py`), what is
late. All workers of a kind are one: their versions arrive and are installed at the same time.
Time is virtual; what is random is the time of a group, gamma distributed and drawn from a seed,
so that the same input gives the same output on every machine.

    group:    leased --its time--> buffered --R of them, earliest expiry first--> trained
                 '------ late = drop: f passes its expiry ------> expired
    version:  trained --period--> published --fetch_s--> paused --install_s--> installed

Expiries are kept relative to f, the version at which the next batch will be trained: place i
holds what may be trained at f + i at the latest, i from 0 to S.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Final, Literal

from echo2.core.capacity_times import QUANTILES, group_times, mean_deviation
from echo2.core.dispatch import STRAGGLER_RATIO
from echo2.core.estimates import Estimate
from echo2.core.install_wait import comes_too_late, has_time, is_short
from echo2.core.settings import Late
from echo2.core.worker_versions import KEEP_FETCH_ABOVE

MEASURED_MAX = 16
"""Workers of a kind whose measured latency is kept."""
MEASURE_WEIGHT = Estimate().weight
DEVIATION_NOISE = math.sqrt(2.0 / (2.0 - MEASURE_WEIGHT))
"""A mean with this weight is off itself: deviations from it are so much larger."""
_LEARNER: Final = -1
_FETCHED: Final = -2
_INSTALLED: Final = -3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the recursion goes by. Times in seconds, units as in docs/capacity.md."""

    groups_per_step: int
    train_s: float
    staleness_max: int
    period: int
    late: Late
    latency_cv: float
    lead_steps: float | None
    fetch_s: float


@dataclass(slots=True)
class Slots:
    """All workers of a kind: how many slots, how long a group takes in one, how long an install
    pauses them. `leased[i]`: groups in work at place i. `means`: what the coordinator has measured
    of each worker's latency (of at most MEASURED_MAX, which stand for all); `speed`: the sum of
    1 / mean. `paused_s`: the sum of all pauses so far."""

    count: int
    slots: int
    latency_s: float
    install_s: float
    leased: list[int]
    means: list[float] = field(init=False)
    speed: float = field(init=False)
    num_leased: int = 0
    version: int = 0
    paused_until_s: float = 0.0
    paused_s: float = 0.0
    turn: int = 0

    def __post_init__(self) -> None:
        self.means = [self.latency_s] * min(self.count, MEASURED_MAX)
        self.speed = len(self.means) / self.latency_s

    @property
    def rate(self) -> float:
        """Groups per second, as measured."""
        return self.slots * self.speed / len(self.means)

    def measured(self, seconds: float) -> None:
        """The next worker in turn took so long for a group (Estimate.add)."""
        turn = self.turn = (self.turn + 1) % len(self.means)
        mean = self.means[turn]
        changed = mean + MEASURE_WEIGHT * (seconds - mean)
        self.means[turn] = changed
        self.speed += 1.0 / changed - 1.0 / mean


Cause = Literal["rate", "tail", "install", "window"]
"""What the learner waits for: slots, all of which are busy; the slowest groups of its batch,
the others being there; an install; or the window and the lead, which let no more be leased."""


@dataclass(slots=True)
class Counts:
    """What was seen after the warm-up: how long the learner waited before each step, the groups
    that ended, the sum of staleness over the trained ones, seconds of waiting by cause."""

    step_waits_s: list[float] = field(default_factory=list)
    wait_s: float = 0.0
    train_s: float = 0.0
    trained: int = 0
    expired: int = 0
    staleness: int = 0
    waits_s: dict[Cause, float] = field(
        default_factory=lambda: {"rate": 0.0, "tail": 0.0, "install": 0.0, "window": 0.0}
    )


class StepRecursion:
    def __init__(self, rules: Rules, kinds: Sequence[Slots], *, seed: int) -> None:
        self.rules = rules
        self.kinds = list(kinds)
        self.now = 0.0
        self.f = 0
        """The version at which the next batch will be trained."""
        size = rules.staleness_max + 1
        self.leased = [0] * size
        self.buffered = [0] * size
        self.overdue = 0
        """With late = mask: in work, and past the expiry of what they began with."""
        self.num_leased = 0
        self.num_buffered = 0
        self.asked_at: float | None = 0.0
        self.counts = Counts()
        self._heap: list[tuple[float, int, int, float, float]] = []
        """(when, what, ...): of a group its kind, its expiry, its kind's paused_s and when it was
        leased; _LEARNER and _FETCHED with a version; _INSTALLED with a version and a kind."""
        self._times = group_times(rules.latency_cv, seed)
        self._num_begun = 0
        self._newest = 0
        self._fetching: tuple[int, float] | None = None
        self._counting = False
        self._slots = sum(kind.slots for kind in self.kinds)
        self._install_s = max(kind.install_s for kind in self.kinds)
        self._deviation_share = DEVIATION_NOISE * mean_deviation(rules.latency_cv)
        self._trained_at_s = 0.0
        """When the batch in training will be."""
        self._look_at_pace()

    def run(self, *, warmup: int, steps: int) -> Counts:
        """`steps` learner steps after `warmup` others; counts go on from an earlier run."""
        self._dispatch()
        heap, begin, end = self._heap, self.f + warmup, self.f + warmup + steps
        while self.f < end:
            before = self.now
            self.now, what, expiry, mark, began_s = heappop(heap)
            if self.asked_at is not None and self._counting:
                self.counts.waits_s[self._cause()] += self.now - before
            if what >= 0:
                self._finished(what, expiry, mark, began_s)
            elif what == _LEARNER:
                self._trained(expiry)
            elif what == _FETCHED:
                self._fetched(expiry)
            else:
                self.kinds[int(mark)].version = expiry
                self._dispatch()
            self._counting = self.f >= begin
        return self.counts

    def _cause(self) -> Cause:
        """Why the learner has waited since the last event."""
        if self.num_buffered >= self.rules.groups_per_step:
            return "tail"
        if self.num_leased >= self._slots:
            return "rate"
        if any(kind.version < self._newest for kind in self.kinds):
            return "install"
        is_full = self.num_leased + self.num_buffered >= self.target
        return "tail" if is_full and not self.is_lead_capped else "window"

    def _look_at_pace(self) -> None:
        """Dispatcher._measure, .target and what ._about_to_install asks of the fleet."""
        rules = self.rules
        rate = 0.0
        for kind in self.kinds:
            rate += kind.rate
        latency_s, pool_s = self._slots / rate, rules.groups_per_step / rate
        step_s = self.step_s = max(rules.train_s, pool_s)
        lead = rules.lead_steps
        if lead is None:
            lead = (latency_s + self._install_s) / step_s
        self.is_lead_capped = lead >= rules.staleness_max
        if self.is_lead_capped:
            lead = rules.staleness_max
        self.target = math.ceil(rules.groups_per_step * (1 + lead))
        usual_s = rules.fetch_s + self._install_s
        self.is_install_short = is_short(usual_s, step_s=step_s)
        self.has_time = has_time(
            usual_s,
            latency_s=latency_s,
            train_s=rules.train_s,
            pool_s=pool_s,
        )

    # ------------------------------------------------------------------------ groups

    def _finished(self, index: int, expiry: int, paused_s: float, began_s: float) -> None:
        kind = self.kinds[index]
        if kind.paused_s > paused_s:  # it stood still meanwhile
            late_s = kind.paused_s - paused_s
            heappush(self._heap, (self.now + late_s, index, expiry, kind.paused_s, began_s))
            return
        place = expiry - self.f
        if place >= 0:
            kind.leased[place] -= 1
            self.leased[place] -= 1
        elif self.rules.late == "mask":
            self.overdue -= 1
            place = 0
        else:
            return  # it expired, and its slot was given to another
        kind.num_leased -= 1
        kind.measured(self.now - began_s)
        self._look_at_pace()
        self.num_leased -= 1
        self.buffered[place] += 1
        self.num_buffered += 1
        if self.asked_at is not None:
            self._try_batch()
        self._dispatch()

    def _dispatch(self) -> None:
        room = self.target - self.num_leased - self.num_buffered
        if room < 1:
            return
        ready = []
        for index, kind in enumerate(self.kinds):
            free = kind.slots - kind.num_leased
            if free < 1:
                continue
            place = kind.version + self.rules.staleness_max - self.f
            if place < 0 or (kind.version < self._newest and self._awaits_install(kind, place)):
                continue
            until_s = (place + 1) * self.step_s
            if max(kind.means) > until_s:
                free = min(free, self._cap(kind, until_s) - kind.num_leased)
                if free < 1:
                    continue
            ready.append((-kind.version, kind.latency_s, index, free, place))
        if len(ready) > 1:
            ready.sort()
        for _, _, index, free, place in ready:
            granted = min(free, room, self._paced(place))
            if granted > 0:
                self._grant(index, place, granted)
                room -= granted
                if room < 1:
                    return

    def _awaits_install(self, kind: Slots, place: int) -> bool:
        """Dispatcher._about_to_install, of a kind with an older version."""
        if not self.is_install_short:
            return False
        is_training = self.asked_at is None
        if is_training and self.has_time:
            return True
        until_s = place * self.step_s
        if is_training:
            until_s += max(0.0, self._trained_at_s - self.now)
        return comes_too_late(
            latency_s=len(kind.means) / kind.speed,
            deviation_share=self._deviation_share,
            until_s=until_s,
        )

    def _cap(self, kind: Slots, until_s: float) -> int:
        """Dispatcher._cap, of all workers of the kind together."""
        slots, total = kind.slots / kind.count, 0.0
        longest_s = STRAGGLER_RATIO * min(min(other.means) for other in self.kinds)
        for mean in kind.means:
            if mean <= until_s:
                total += slots
            elif mean <= longest_s:
                total += max(1, math.floor(slots * until_s / mean))
        return math.ceil(total * kind.count / len(kind.means))

    def _paced(self, place: int) -> int:
        """How many groups more may be held at this place: the pacing rule."""
        total, rate = self.overdue, self.rules.groups_per_step
        allowed = rate * (self.rules.staleness_max + 1)
        leased, buffered, room = self.leased, self.buffered, 0
        for i in range(len(leased)):
            total += leased[i] + buffered[i]
            room += rate
            if i >= place and room - total < allowed:
                allowed = room - total
        return allowed

    def _grant(self, index: int, place: int, number: int) -> None:
        kind = self.kinds[index]
        now = self.now
        start = max(now, kind.paused_until_s)
        first, times, heap = self._num_begun, self._times, self._heap
        expiry, latency_s, mark = self.f + place, kind.latency_s, kind.paused_s
        for i in range(first, first + number):
            end_s = start + latency_s * times[i % QUANTILES]
            heappush(heap, (end_s, index, expiry, mark, now))
        self._num_begun += number
        kind.leased[place] += number
        kind.num_leased += number
        self.leased[place] += number
        self.num_leased += number

    # --------------------------------------------------------------------- the learner

    def _try_batch(self) -> None:
        rate = self.rules.groups_per_step
        if self.num_buffered < rate or (self.rules.late == "wait" and self._holds()):
            return
        assert self.asked_at is not None
        needed, buffered, stale = rate, self.buffered, 0
        for place in range(len(buffered)):
            taken = min(needed, buffered[place])
            buffered[place] -= taken
            needed -= taken
            stale += taken * (self.rules.staleness_max - place)
        self.num_buffered -= rate
        if self._counting:
            counts = self.counts
            counts.step_waits_s.append(self.now - self.asked_at)
            counts.wait_s += self.now - self.asked_at
            counts.train_s += self.rules.train_s
            counts.trained += rate
            counts.staleness += stale
        self.asked_at = None
        self._advance()
        self._trained_at_s = self.now + self.rules.train_s
        heappush(self._heap, (self._trained_at_s, _LEARNER, self.f, 0.0, 0.0))

    def _holds(self) -> bool:
        """The hold: more groups are out than later batches have room for."""
        total, room = 0, 0
        for number in self.leased:
            total += number
            if total > room:
                return True
            room += self.rules.groups_per_step
        return False

    def _advance(self) -> None:
        """f becomes f + 1, and what had to be trained by f has no place any more."""
        gone, late = self.buffered.pop(0), self.leased.pop(0)
        self.buffered.append(0)
        self.leased.append(0)
        self.num_buffered -= gone
        if self.rules.late == "mask":
            self.overdue += late
        else:
            self.num_leased -= late
            gone += late
        for kind in self.kinds:
            given_up = kind.leased.pop(0)
            kind.leased.append(0)
            if self.rules.late != "mask":
                kind.num_leased -= given_up
        if self._counting:
            self.counts.expired += gone
        self.f += 1

    def _trained(self, step: int) -> None:
        if step - self._newest >= self.rules.period:
            self._newest = step
            self._fetch()
        self.asked_at = self.now
        self._try_batch()
        self._dispatch()

    # ---------------------------------------------------------------------- versions

    def _fetch(self) -> None:
        """A newer version takes the place of a fetch of which half or less is here."""
        fetch_s = self.rules.fetch_s
        if self._fetching is not None:
            _, began = self._fetching
            if self.now - began > KEEP_FETCH_ABOVE * fetch_s:
                return
        self._fetching = (self._newest, self.now)
        heappush(self._heap, (self.now + fetch_s, _FETCHED, self._newest, 0.0, 0.0))

    def _fetched(self, version: int) -> None:
        if self._fetching is None or self._fetching[0] != version:
            return  # it was superseded
        self._fetching = None
        for index, kind in enumerate(self.kinds):
            kind.paused_until_s = self.now + kind.install_s
            kind.paused_s += kind.install_s
            heappush(self._heap, (kind.paused_until_s, _INSTALLED, version, float(index), 0.0))
        if version < self._newest:
            self._fetch()
