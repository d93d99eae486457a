"""Which chunks of one version to ask of whom: several sources at once, as a state machine.

Promise: every wanted chunk is asked for until it is verified, of the first source of its
stripe that works; nothing that is here is asked for again; what is asked of one source and
not here yet is bounded.

    wanted --ask s--> asked of s --arrived--> checking --verified--> done
      ^                   |                       `-- wrong: s is faulted --.
      `-- s silent, stuck, down, refusing, faulted, or too slow for its share

A stripe names its sources in order: the parent in its relay tree, the parent's parent, ...,
and last the origin. A source answers a request when it has the chunk itself, and says
meanwhile that it lives; one that is silent, or lives and never delivers, is passed over for a
while, and then has to show with one chunk that it works. A source is dialed when those before
it do not work; when a fetch begins, its first sources get time to come up before later ones
are asked. A source whose own link is the bottleneck and that delivers less than `SLOW_SHARE`
of what the plan gives it loses a part of what is left to the next one; when the rest is done,
or should be, it loses half of it to a source that has nothing to do. Chunk numbers inside;
bytes, sockets and the clock outside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Final

from echo2.core.relay_lot import Lot
from echo2.core.relay_source import ORIGIN, Limits, Source

__all__ = ["ORIGIN", "Ask", "Cancel", "Dial", "Limits", "RelayFetch", "Source"]

SLOW_SHARE: Final = 0.6
USELESS_SHARE: Final = 0.25
"""Who delivers less than so much of the plan loses all: what is left would wait for its rest."""
SLOW_FOR_S: Final = 1.0
"""So long must a source be slow before a part of its chunks goes to the next."""
LATE_SHARE: Final = 1.25
"""A fetch that takes so many times the planned time has sources to be helped."""
WEIGHED_EACH_S: Final = 0.25
REFILL_SHARE: Final = 0.25
"""Of a source's window must be free before it is asked for more."""
LAST_S: Final = 4.0
"""What is done sooner needs no help."""
OVERSLEPT_S: Final = 0.5
"""A decision so late was not made for want of sources but of time: nobody listened to them."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Request these chunks of `source`; they count as asked from now on."""

    source: str
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell `source`, if it can be told, that these are not wanted of it any more."""

    source: str
    indexes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dial:
    """Have a connection to `source` made: it is the next to be asked."""

    source: str


class RelayFetch:
    """`lots`: (sources without the origin, chunks in order), disjoint; together they are what
    is missing. `planned_s`: in which time the plan has all of it here, 0.0 without a plan.
    `helpers`, of each lot: who takes over what a slow source loses, before the others."""

    def __init__(
        self,
        lots: Iterable[tuple[Sequence[str], Iterable[int]]],
        *,
        chunk_bytes: int,
        limits: Limits,
        now: float,
        planned_s: float = 0.0,
        helpers: Sequence[Sequence[str]] = (),
    ) -> None:
        self.limits = limits
        self.sources: dict[str, Source] = {}
        self._chunk_bytes = chunk_bytes
        self._planned_s = planned_s
        self._began = now
        self._lots: list[Lot] = []
        self._lot_of: dict[int, Lot] = {}
        self._asked_of: dict[int, Source] = {}
        self._checking: dict[int, Source] = {}
        self._avoid: dict[int, set[str]] = {}
        self._again: set[int] = set()
        """Of those in `_avoid`, the ones that are asked of nobody now."""
        self._unsaid: list[Cancel] = []
        self._now = now
        self._weighed_at = now
        self._is_one_done = False
        for place, (names, chunks) in enumerate(lots):
            ahead = dict.fromkeys(helpers[place] if place < len(helpers) else ())
            others = [name for name in ahead if name not in names and name != ORIGIN]
            self._add_lot((*dict.fromkeys(names), ORIGIN), chunks, tuple(others))
        self.sources.setdefault(ORIGIN, Source(ORIGIN))
        self._planned = {name: self._share(name) for name in self.sources}
        for name, planned in self._planned.items():
            self.sources[name].spacing_s = chunk_bytes / planned if planned else 0.0

    @property
    def num_missing(self) -> int:
        return len(self._lot_of)

    @property
    def is_done(self) -> bool:
        return not self._lot_of

    @property
    def num_asked(self) -> int:
        return len(self._asked_of)

    # ------------------------------------------------------------------------ events
    # Those of peers that are no sources of this fetch change nothing.

    def connected(self, name: str, now: float) -> None:
        source = self.sources.get(name)
        if source is not None and not source.up:
            source.connected(now)

    def disconnected(self, name: str, now: float) -> None:
        """What was asked on the connection is lost with it."""
        source = self.sources.get(name)
        if source is not None:
            source.up, source.dialed_at = False, None
            self._take_back(source, source.asked, now)

    def unreachable(self, name: str, now: float) -> None:
        """A connection could not be made; it is tried again after a rest."""
        source = self.sources.get(name)
        if source is not None:
            source.up, source.dialed_at = False, None
            source.failed(now)
            self._take_back(source, source.asked, now)

    def refused(self, name: str, now: float) -> None:
        """It has nothing of this version, and expects nothing."""
        source = self.sources.get(name)
        if source is not None:
            source.refused(now)
            self._take_back(source, source.asked, now)

    def alive(self, name: str, num_held: int, now: float) -> None:
        source = self.sources.get(name)
        if source is not None:
            source.alive(num_held, now)

    def arrived(self, name: str, index: int, num_bytes: int, now: float) -> list[Cancel] | None:
        """A payload came; None when it is of no use: the chunk is here already or being
        checked, or the sender is not believed (any more, or in this chunk)."""
        source = self.sources.get(name)
        if source is None:
            return None
        source.arrived(num_bytes, now)
        lot = self._lot_of.get(index)
        asked = self._asked_of.get(index)
        if lot is None or index in self._checking or not source.trusted(self.limits):
            return None
        if asked is not source and name in self._avoid.get(index, ()):
            return None
        source.delivered(self.limits, now)
        if asked is not None:
            del self._asked_of[index]
            asked.let_off(index, now)
        elif index in self._again:
            self._again.remove(index)
        else:
            lot.wanted.remove(index)
        self._checking[index] = source
        return [Cancel(asked.name, (index,))] if asked not in (None, source) else []

    def verified(self, index: int) -> None:
        del self._checking[index]
        self._avoid.pop(index, None)
        lot = self._lot_of.pop(index)
        lot.num_left -= 1
        if not lot.num_left:
            self._lots.remove(lot)
            self._is_one_done = True

    def wrong(self, index: int, now: float) -> bool:
        """The payload was not the chunk. False when the origin has sent too many such."""
        source = self._checking.pop(index)
        source.num_faults += 1
        self._avoid.setdefault(index, set()).add(source.name)
        self._again.add(index)
        if not source.trusted(self.limits):
            self._unsaid += self._take_back(source, source.asked, now)
        return not source.is_origin or source.num_faults < self.limits.faults_max

    # --------------------------------------------------------------------- decisions

    def advance(self, now: float) -> list[Ask | Cancel | Dial]:
        """What to do now. To be called after events and at `next_at`."""
        self._now = now
        effects: list[Ask | Cancel | Dial] = [*self._unsaid]
        self._unsaid.clear()
        limits = self.limits
        quiet = [source for source in self.sources.values() if source.is_quiet(limits, now)]
        if any(now > source.due_at(limits) + OVERSLEPT_S for source in quiet):
            for source in quiet:
                source.excuse(limits, now)
        for source in quiet:
            if now >= source.due_at(limits):
                effects += self._pass_over(source, now)
        if now >= self._weighed_at + WEIGHED_EACH_S:
            self._weighed_at = now
            for source in self.sources.values():
                if source.asked and not source.is_origin:
                    effects += self._shed(source, now)
        effects += self._dials()
        effects += self._asks(now)
        return effects

    def can_ask(self, name: str) -> bool:
        """Whether there is reason to `advance` after this source delivered."""
        return self.is_done or self._has_room(self.sources[name], 0)

    def next_at(self) -> float | None:
        """When `advance` is due if nothing happens; None: nothing is asked, nobody rests."""
        now, silence_s = self._now, self.limits.silence_s
        due = []
        for source in self.sources.values():
            if source.asked:
                due.append(source.due_at(self.limits))
            if source.rests_until > now:
                due.append(source.rests_until)
            if source.dialed_at is not None and source.dialed_at + silence_s > now:
                due.append(source.dialed_at + silence_s)
        return min(due, default=None)

    def _pass_over(self, source: Source, now: float) -> list[Cancel]:
        """What the origin owes is asked of it again, since a full queue drops requests."""
        if not source.is_origin:
            source.failed(now)
        return self._take_back(source, source.asked, now)

    # ------------------------------------------------------------------- slow sources

    def _shed(self, source: Source, now: float) -> list[Cancel]:
        share, rate = self._excess(source, now)
        if not share:
            source.slow_since = None
            return []
        if source.slow_since is None:
            source.slow_since = now
        if now - source.slow_since < SLOW_FOR_S:
            return []
        source.slow_since = None
        moved: list[int] = []
        for lot in self._lots_of(source):
            asked = [index for index in source.asked if self._lot_of[index] is lot]
            other = lot.split(source.name, sorted(asked), share)
            if other is not None:
                self._lots.append(other)
                self._lot_of.update(dict.fromkeys(other.wanted, other))
                moved += other.wanted
                other.wanted = deque(i for i in other.wanted if i not in source.asked)
        self._lots = [lot for lot in self._lots if lot.num_left]
        if moved and self._planned[source.name]:
            self._planned[source.name] = rate
        return self._take_back(source, source.asked.intersection(moved), now)

    def _excess(self, source: Source, now: float) -> tuple[float, float]:
        """The part of what is left to it that it should lose, and its rate."""
        rate = source.bytes_per_s(now)
        if not source.is_warm(now) or not source.is_held_up(now):
            return 0.0, rate
        planned = self._planned[source.name]
        if rate < SLOW_SHARE * planned:
            return 1.0 if rate < USELESS_SHARE * planned else 1.0 - rate / planned, rate
        overdue = now - self._began > LATE_SHARE * self._planned_s
        if not (overdue if self._planned_s else self._is_one_done):
            return 0.0, rate
        left = sum(lot.num_left for lot in self._lots_of(source, idle_after=True))
        return (0.5 if left * self._chunk_bytes > LAST_S * rate else 0.0), rate

    def _lots_of(self, source: Source, *, idle_after: bool = False) -> list[Lot]:
        """Lots that it is the first to be asked for, and that another one could take over;
        `idle_after`: and has nothing to do."""
        found = []
        for lot in self._lots:
            working = (name for name in lot.sources if self._works(name))
            if next(working, None) == source.name:
                able = (name for name in lot.helpers if self._may_work(name))
                other = next(able, None) or next(working, None)
                if other is not None and not (idle_after and self.sources[other].asked):
                    found.append(lot)
        return found

    def _may_work(self, name: str) -> bool:
        """Nothing is known against it."""
        source = self.sources[name]
        return not source.failures and source.trusted(self.limits)

    # ------------------------------------------------------------------ whom to ask

    def _dials(self) -> list[Dial]:
        """Dial, for each lot, the next source that may work, until one does."""
        found = []
        ways: list[tuple[Sequence[str], Collection[str]]] = [
            (lot.sources, ()) for lot in self._lots if lot.wanted
        ]
        ways += [(self._lot_of[index].sources, self._avoid[index]) for index in self._again]
        for names, avoid in ways:
            for source in (self.sources[name] for name in names if name not in avoid):
                if self._now < source.rests_until or not source.trusted(self.limits):
                    continue
                if not source.up and source.dialed_at is None:
                    source.dialed_at = self._now
                    found.append(Dial(source.name))
                if (source.up and not source.failures) or self._is_coming(source):
                    break
        return found

    def _is_coming(self, source: Source) -> bool:
        """It was dialed just now, for the first time."""
        dialed_at = source.dialed_at
        if source.was_up or source.failures or dialed_at is None or source.is_origin:
            return False
        return self._now < dialed_at + self.limits.silence_s

    def _asks(self, now: float) -> list[Ask]:
        """Fill every source's window, in the order of the chunks."""
        found: dict[str, list[int]] = {}
        for index in sorted(self._again):
            source = self._next(self._lot_of[index], found, self._avoid[index])
            if source is not None:
                self._again.remove(index)
                found.setdefault(source.name, []).append(index)
        heads = [(lot.wanted[0], place) for place, lot in enumerate(self._lots) if lot.wanted]
        heapify(heads)
        while heads:
            place = heads[0][1]
            lot = self._lots[place]
            avoid = self._unproven(lot) if lot.num_left <= self.limits.window_chunks else ()
            source = self._next(lot, found, avoid)
            if source is not None:
                found.setdefault(source.name, []).append(lot.wanted.popleft())
            if source is not None and lot.wanted:
                heapreplace(heads, (lot.wanted[0], place))
            else:
                heappop(heads)
        for name, indexes in found.items():
            source = self.sources[name]
            source.ask(indexes, now)
            self._asked_of.update(dict.fromkeys(indexes, source))
        return [Ask(name, tuple(indexes)) for name, indexes in found.items()]

    def _next(
        self, lot: Lot, found: dict[str, list[int]], avoid: Collection[str] = ()
    ) -> Source | None:
        """The first source that works and has room; None also if one is worth waiting for: its
        window is full, or it is coming up, and the fetch has just begun or it is a helper. Of
        those to be avoided none but the origin."""
        is_new = self._now < self._began + 2.0 * self.limits.silence_s
        for place, name in enumerate(lot.sources):
            source = self.sources[name]
            if name in avoid and not source.is_origin:
                continue
            if self._works(name):
                if self._has_room(source, len(found.get(name, ()))):
                    return source
                if not source.failures or source.is_origin:
                    return None
            elif (is_new or place < lot.helped) and self._is_coming(source):
                return None
        return None

    def _unproven(self, lot: Lot) -> list[str]:
        """Sources on probation, where another one works: they get none of the last chunks."""
        works = [name for name in lot.sources if self._works(name)]
        unproven = [name for name in works if self.sources[name].on_probation]
        return unproven if len(unproven) < len(works) else []

    def _has_room(self, source: Source, num_found: int) -> bool:
        """Beside `num_found` chunks that it is about to be asked for. One who owes us chunks is
        asked for several more at once: each request costs both ends as much as a chunk."""
        left = source.window_left(self.limits)
        if num_found or not source.asked:
            return left > num_found
        return left >= max(1, int(self.limits.window_chunks * REFILL_SHARE))

    def _works(self, name: str) -> bool:
        return self.sources[name].works(self.limits, self._now)

    # ------------------------------------------------------------------------ chunks

    def _take_back(self, source: Source, indexes: Iterable[int], now: float) -> list[Cancel]:
        """Chunks that were asked of `source` are wanted again, in front."""
        taken = sorted(indexes)
        for index in reversed(taken):
            del self._asked_of[index]
            source.let_off(index, now)
            if index in self._avoid:
                self._again.add(index)
            else:
                self._lot_of[index].wanted.appendleft(index)
        return [Cancel(source.name, tuple(taken))] if taken else []

    def _add_lot(
        self, sources: tuple[str, ...], chunks: Iterable[int], helpers: tuple[str, ...]
    ) -> None:
        wanted = deque(chunks)
        lot = Lot(sources, wanted, len(wanted), helpers)
        for name in sources:
            self.sources.setdefault(name, Source(name))
        for name in helpers:
            self.sources.setdefault(name, Source(name)).is_helper = True
        if not wanted:
            return
        self._lots.append(lot)
        for index in wanted:
            if index in self._lot_of:
                raise ValueError(f"chunk {index} is in two lots; it follows one")
            self._lot_of[index] = lot

    def _share(self, name: str) -> float:
        """Bytes per second that the plan gives `name`; 0.0 where there is no plan."""
        if not self._planned_s:
            return 0.0
        chunks = sum(lot.num_left for lot in self._lots if lot.sources[0] == name)
        return chunks * self._chunk_bytes / self._planned_s
