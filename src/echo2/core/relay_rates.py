"""What links carry, and what that says of the capacity of the hosts at their ends.

Receivers report, of each fetch and link, B bytes and the s seconds in which something was owed
them. T is how long a fetch runs; a link is *busy* if s ≥ BUSY_SHARE · T.

    one link carries      r = 8B/s
    an uplink reads       U = max(8ΣB/W, max r), over the sender's links of one version that
                              overlap in time; W from the first to the last second owed
    a downlink reads      D = max(8ΣB/T, max r), over the receiver's links of one version

That much was carried, so it can be. A reading is a *measurement*, which can lower what is known
too, if this host was what held the transfer up:

- U, if on a busy link the sender had what it owed, and the receiver's downlink was not full:
  neither measured nor told, or D < FULL_SHARE · d. The origin has all; so has a worker that
  serves the version, whose own fetch was done in HELD_SHARE of the s of that link, or whose
  links for the same tree were. A relay that waits for its own parent says nothing of its uplink.
- D, if on every busy link the sender had what it owed, and room: Σ r over all its links, the
  most that it can have sent at once, is below FULL_SHARE of what it is proven to carry. In
  doubt it was the sender, since few links are slower downwards.

A measurement is taken as it is where it is above what was known or nothing was, and moves that
by FORGET of the way where it is below: once a version, so that what was seen k versions ago
weighs (1 - FORGET)^k. Other readings only raise: to themselves, and if they come within
FULL_SHARE of what was counted on (the planner's default where nothing is known) of a host that
was never measured, to RAISE times that. Nothing has held that host up yet, and a plan that
never asks for more would never learn of more.

What was known is what was known before this version. So it does not matter how often a fetch
is reported: the last report of a version counts. Fetches below READING_S_MIN say nothing: they
are round trips and buffers. Caps are left to whoever asks: they belong to the settings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Final

from echo2.core.dissemination import DEFAULT_DOWN_MBIT, DEFAULT_UP_MBIT
from echo2.messages import RelayReport, Role
from echo2.types import Digest, LinkReport, Name

ORIGIN: Final = Role.ORIGIN.value
"""The origin's name in plans and reports."""
BUSY_SHARE: Final = 0.6
HELD_SHARE: Final = 0.75
FULL_SHARE: Final = 0.8
FORGET: Final = 0.5
RAISE: Final = 1.5
READING_S_MIN: Final = 0.5
MBIT_MIN: Final = 0.01
MBIT_MAX: Final = 1e6
CLOSED_MAX: Final = 8


@dataclass(slots=True)
class Rate:
    """One direction of one host's link, in Mbit/s. The version that is measured now counts
    with its latest reading; those before are folded into what was known."""

    default: float
    before: float | None = None
    """What was known before the version that is measured now, on which that is judged."""
    is_full_at: float | None = None
    """The same, if it was a measurement; None if it was no more than a lower bound."""
    proven: float = 0.0
    """What was measured or carried before."""
    _reading: float | None = None
    _measures: bool = False
    _digest: str = ""
    _closed: deque[str] = field(default_factory=lambda: deque(maxlen=CLOSED_MAX))

    @property
    def mbit(self) -> float | None:
        """None: never measured, nor seen above the default."""
        known, reading = self.before, self._reading
        if reading is None:
            return known
        if self._measures:
            return reading if known is None else max(reading, known + FORGET * (reading - known))
        counted = self.default if known is None else known
        if self.is_full_at is None and reading >= FULL_SHARE * counted:
            return max(reading, RAISE * counted)
        return reading if reading > counted else known

    def begin(self, digest: Digest) -> None:
        """The version `digest` is measured from now on, unless others have followed it."""
        if digest == self._digest or digest in self._closed:
            return
        known, reading = self.mbit, self._reading
        if known is not None and self._measures:
            self.is_full_at = self.proven = known
        elif reading is not None:
            self.is_full_at = self.is_full_at if known == self.before else None
            self.proven = max(self.proven, reading)
        self.before, self._reading = known, None
        self._closed.append(self._digest)
        self._digest = digest

    def read(self, digest: Digest, mbit: float, *, measured: bool) -> None:
        """Note a reading of the version that is measured now, in place of its last one. One of
        another version comes too late."""
        self.begin(digest)
        if digest != self._digest:
            return
        self._reading = min(max(mbit, MBIT_MIN), MBIT_MAX)
        self._measures = measured


@dataclass(slots=True)
class Fetch:
    """A worker's latest fetch, as it reports it. `done_at` is None while chunks are missing."""

    digest: Digest
    began_at: float
    reported_at: float
    num_chunks: int
    num_missing: int
    done_at: float | None = None
    links: dict[Name, LinkReport] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """T"""
        return max(1e-3, self.ended_at - self.began_at)

    @property
    def ended_at(self) -> float:
        return self.reported_at if self.done_at is None else self.done_at

    def is_busy(self, link: LinkReport) -> bool:
        return link.seconds >= BUSY_SHARE * self.seconds

    @property
    def in_mbit(self) -> float:
        """D"""
        links = self.links.values()
        total = sum(link.num_bytes for link in links)
        return max([_mbit(total, self.seconds), *map(_owed, links)])


@dataclass(slots=True)
class HostRates:
    up: Rate = field(default_factory=lambda: Rate(DEFAULT_UP_MBIT))
    down: Rate = field(default_factory=lambda: Rate(DEFAULT_DOWN_MBIT))
    fetch: Fetch | None = None


Suppliers = Callable[[Name, Name, Digest], Collection[Name] | None]
"""(sender, receiver, digest) -> from whom the plan has the sender get what it sends there; None
where there is no such plan."""


ToldDownMbit = Callable[[Name], float | None]
"""What a worker said of its own downlink; None if it said nothing, or is not here."""


class RelayRates:
    """The rates of the origin and of all workers that were heard of, by name."""

    def __init__(self, suppliers: Suppliers, told_down_mbit: ToldDownMbit) -> None:
        self.hosts: dict[Name, HostRates] = {ORIGIN: HostRates()}
        self._suppliers = suppliers
        self._told_down_mbit = told_down_mbit
        self._receivers: dict[Name, set[Name]] = {}

    def host(self, name: Name) -> HostRates:
        """To read. Nothing is known of a host that was never heard of."""
        return self.hosts.get(name) or HostRates()

    def left(self, name: Name) -> None:
        """The worker is gone, and what it fetched with it; its rates stay."""
        host = self.hosts.get(name)
        if host is not None and host.fetch is not None:
            self._unlink(name, host.fetch)
            host.fetch = None

    def forget(self, name: Name) -> None:
        self.left(name)
        self.hosts.pop(name, None)

    def report(
        self, receiver: Name, report: RelayReport, *, holders: Collection[Name], now: float
    ) -> list[tuple[Name, int, int]]:
        """Take a (checked) report in. `holders`: workers that serve the version. Returns
        (sender, new faults, new silences) where there are any."""
        host = self.hosts.setdefault(receiver, HostRates())
        before = host.fetch
        fetch = before if before is not None and _goes_on(before, report) else None
        old = {} if fetch is None else fetch.links
        new = {link.peer: link for link in report.links}
        if fetch is None:
            if before is not None:
                self._unlink(receiver, before)
            began_at = now - max((link.seconds for link in report.links), default=0.0)
            fetch = Fetch(report.manifest_digest, began_at, now, report.num_chunks, 0)
            host.fetch = fetch
        if report.num_missing:
            fetch.done_at = None
        elif fetch.done_at is None:
            fetch.done_at = _ended_at(fetch, report, now)
        fetch.reported_at, fetch.num_missing = now, report.num_missing
        fetch.links = new
        for name in new:
            self._receivers.setdefault(name, set()).add(receiver)
        self._read(receiver, fetch, holders)
        found = []
        for name, link in new.items():
            last = old.get(name)
            faults = _increase(last.num_faults if last else 0, link.num_faults)
            silences = _increase(last.silences if last else 0, link.silences)
            if faults or silences:
                found.append((name, faults, silences))
        return found

    def installed(self, name: Name, digests: Collection[Digest], now: float) -> None:
        """Nothing of these, a version and the deltas that make it, is missing there, whether or
        not the last report came."""
        host = self.hosts.get(name)
        if host is not None and host.fetch is not None and host.fetch.digest in digests:
            host.fetch.num_missing = 0
            if host.fetch.done_at is None:
                host.fetch.done_at = now

    # --------------------------------------------------------------------- readings

    def _read(self, receiver: Name, fetch: Fetch, holders: Collection[Name]) -> None:
        """Senders first: in doubt the transfer waited for them."""
        if fetch.seconds < READING_S_MIN:
            return
        out = {name: self._out_mbit(name, fetch) for name in fetch.links}
        self.hosts[receiver].down.begin(fetch.digest)
        for name in out:
            self.hosts.setdefault(name, HostRates()).up.begin(fetch.digest)
        for name, mbit in out.items():
            if mbit > 0:
                measured = self._held_up_by_uplink(name, fetch, holders)
                self.hosts[name].up.read(fetch.digest, mbit, measured=measured)
        busy = [name for name, link in fetch.links.items() if fetch.is_busy(link)]
        measured = bool(busy) and all(
            self._had(name, receiver, fetch, holders)
            and self._most_out_mbit(name, fetch) < FULL_SHARE * self.host(name).up.proven
            for name in busy
        )
        if fetch.in_mbit > 0:
            self.hosts[receiver].down.read(fetch.digest, fetch.in_mbit, measured=measured)

    def _overlapping(self, sender: Name, fetch: Fetch) -> Iterator[tuple[Name, Fetch, LinkReport]]:
        """The sender's links of this version at the time of `fetch`, its own among them."""
        for name in self._receivers.get(sender, ()):
            other = self.hosts[name].fetch
            if (
                other is not None
                and other.digest == fetch.digest
                and sender in other.links
                and other.began_at < fetch.ended_at
                and other.ended_at > fetch.began_at
            ):
                yield name, other, other.links[sender]

    def _out_mbit(self, sender: Name, fetch: Fetch) -> float:
        """U"""
        found = [(other.began_at, link) for _, other, link in self._overlapping(sender, fetch)]
        begin = min(began_at for began_at, _ in found)
        end = max(began_at + link.seconds for began_at, link in found)
        num_bytes = sum(link.num_bytes for _, link in found)
        return max(_mbit(num_bytes, end - begin), *(_owed(link) for _, link in found))

    def _most_out_mbit(self, sender: Name, fetch: Fetch) -> float:
        """Σ r: no less than U was at any time."""
        return sum(_owed(link) for _, _, link in self._overlapping(sender, fetch))

    def _held_up_by_uplink(self, sender: Name, fetch: Fetch, holders: Collection[Name]) -> bool:
        return any(
            other.is_busy(link)
            and self._had(sender, name, other, holders)
            and not self._is_full(name, other)
            for name, other, link in self._overlapping(sender, fetch)
        )

    def _is_full(self, receiver: Name, fetch: Fetch) -> bool:
        """Was its downlink, as far as that is known?"""
        limits = (self.hosts[receiver].down.is_full_at, self._told_down_mbit(receiver))
        return any(mbit is not None and fetch.in_mbit >= FULL_SHARE * mbit for mbit in limits)

    def _had(self, sender: Name, receiver: Name, fetch: Fetch, holders: Collection[Name]) -> bool:
        """Did the sender have what it owed, for the most of the time?"""
        if sender == ORIGIN:
            return True
        own = self.host(sender).fetch
        if own is None or own.digest != fetch.digest:
            return sender in holders
        limit_at = fetch.began_at + HELD_SHARE * fetch.links[sender].seconds
        if own.done_at is not None and own.done_at <= limit_at:
            return True
        found = self._suppliers(sender, receiver, fetch.digest)
        return bool(found) and all(
            name in own.links and own.began_at + own.links[name].seconds <= limit_at
            for name in found or ()
        )

    def _unlink(self, receiver: Name, fetch: Fetch) -> None:
        for name in fetch.links:
            found = self._receivers.get(name)
            if found is not None:
                found.discard(receiver)
                if not found:
                    del self._receivers[name]


def _goes_on(fetch: Fetch, report: RelayReport) -> bool:
    """Is it the fetch that was reported last? One that began anew counts from 0."""
    return (
        fetch.digest == report.manifest_digest
        and fetch.num_chunks == report.num_chunks
        and all(
            link.peer not in fetch.links or link.num_bytes >= fetch.links[link.peer].num_bytes
            for link in report.links
        )
        and {link.peer for link in report.links} >= set(fetch.links)
    )


def _ended_at(fetch: Fetch, report: RelayReport, now: float) -> float:
    """A delta is applied before its last report leaves: what comes after the last second in
    which anything was owed is no part of the fetch. Of one that is told at once, now."""
    if not fetch.links:
        return now
    grown = [
        link.seconds - (fetch.links[link.peer].seconds if link.peer in fetch.links else 0.0)
        for link in report.links
    ]
    return min(now, fetch.reported_at + max(0.0, *grown))


def _mbit(num_bytes: int, seconds: float) -> float:
    return num_bytes * 8 / 1e6 / max(seconds, READING_S_MIN)


def _owed(link: LinkReport) -> float:
    """r"""
    return _mbit(link.num_bytes, link.seconds)


def _increase(before: int, after: int) -> int:
    return after - before if after >= before else after
