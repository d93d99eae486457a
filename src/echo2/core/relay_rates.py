"""What links carry, and what that says of the capacity of the hosts at their ends.

Receivers report, of each fetch and link, B bytes and the s seconds in which something was owed
them. T is how long the fetch runs. A link is *busy* if s ≥ BUSY_SHARE · T.

    a busy link carries      r = 8B / s          (any other: 8B / T)
    an uplink reads          U = Σ r over the sender's links of the version that overlap in time
    a downlink reads         D = Σ r over the receiver's links of the version

A reading is a *measurement* if the host was what held the transfer up, else a lower bound:

- U, if on a busy link the sender had what it owed (the origin; a worker whose own fetch was
  done within HELD_SHARE of the receiver's) and the receiver's downlink was not full: never
  measured, or D < FULL_SHARE · d. One that waits for its own parent says nothing of its uplink.
- D, if on every busy link the sender had what it owed and is known to have uplink to spare
  (U < FULL_SHARE · u). In doubt it was the sender, since few links are slower downwards.

u and d are what was known before this version, so that it does not matter how often a fetch is
reported: the last report of a version counts.

What was carried can be carried: a reading above what is known is taken as it is. A measurement
below it moves it by FORGET of the way, once a version, so that what was seen k versions ago
weighs (1 - FORGET)^k; a lower bound below it says nothing. Where nothing is known, a measurement
is taken as it is, a lower bound if it is above the default of the planner.
Readings of less than READING_S_MIN are dropped: round trips and buffers, no rates.

Leaves caps to whoever asks: they belong to the settings, not to the links.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
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
        known = self.mbit
        if known != self.before:
            self.is_full_at = known if self._measures else None
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

    def mbit(self, link: LinkReport) -> float:
        """r"""
        seconds = link.seconds if self.is_busy(link) else self.seconds
        return min(link.num_bytes * 8 / 1e6 / max(seconds, 1e-3), MBIT_MAX)

    @property
    def in_mbit(self) -> float:
        """D"""
        return max(
            sum(self.mbit(link) for link in self.links.values()),
            max((_owed_mbit(link) for link in self.links.values()), default=0.0),
        )


@dataclass(slots=True)
class HostRates:
    up: Rate = field(default_factory=lambda: Rate(DEFAULT_UP_MBIT))
    down: Rate = field(default_factory=lambda: Rate(DEFAULT_DOWN_MBIT))
    fetch: Fetch | None = None


class RelayRates:
    """The rates of the origin and of all workers that were heard of, by name."""

    def __init__(self) -> None:
        self.hosts: dict[Name, HostRates] = {ORIGIN: HostRates()}
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
        fetch.reported_at, fetch.num_missing = now, report.num_missing
        if report.num_missing:
            fetch.done_at = None
        elif fetch.done_at is None:
            fetch.done_at = now
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

    def installed(self, name: Name, digest: Digest, now: float) -> None:
        """Nothing of that version is missing there, whether or not its last report came."""
        host = self.hosts.get(name)
        if host is not None and host.fetch is not None and host.fetch.digest == digest:
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
            self._had(name, fetch, holders) and _has_room(out[name], self.host(name).up.before)
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
        links = [(other, link) for _, other, link in self._overlapping(sender, fetch)]
        return max(
            sum(other.mbit(link) for other, link in links),
            max(_owed_mbit(link) for _, link in links),
        )

    def _held_up_by_uplink(self, sender: Name, fetch: Fetch, holders: Collection[Name]) -> bool:
        return any(
            other.is_busy(link)
            and self._had(sender, other, holders)
            and not _is_full(other.in_mbit, self.hosts[name].down.is_full_at)
            for name, other, link in self._overlapping(sender, fetch)
        )

    def _had(self, sender: Name, fetch: Fetch, holders: Collection[Name]) -> bool:
        """Did the sender have what it owed, for the most of this fetch?"""
        if sender == ORIGIN:
            return True
        own = self.host(sender).fetch
        if own is None or own.digest != fetch.digest:
            return sender in holders
        return own.done_at is not None and (
            own.done_at - fetch.began_at <= HELD_SHARE * fetch.seconds
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


def _owed_mbit(link: LinkReport) -> float:
    if link.seconds < READING_S_MIN:
        return 0.0
    return min(link.num_bytes * 8 / 1e6 / link.seconds, MBIT_MAX)


def _increase(before: int, after: int) -> int:
    return after - before if after >= before else after


def _has_room(used: float, mbit: float | None) -> bool:
    return mbit is not None and used < FULL_SHARE * mbit


def _is_full(used: float, mbit: float | None) -> bool:
    return mbit is not None and used >= FULL_SHARE * mbit
