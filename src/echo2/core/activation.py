"""The cheapest set of offered machines whose summed rate reaches a wanted rate (papers, eq. 3).

    min Σ c_k x_k   s.t.   Σ μ_k x_k ≥ μ,   0 ≤ x_k ≤ n_k whole

c_k: price of one machine of offer k, μ_k: its rate, n_k: how many there are. A bounded covering
knapsack. `cheapest_set` proves its answer the cheapest, or says by how much it may be too dear
when `states_max` ends the proof. `greedy_set` is the paper's: by ρ = c/μ until it is enough.

The proof grows a core around the break, after Pisinger's algorithm for knapsacks (minknap, 1997).
Machines of one offer are tied into packets of 1, 2, 4, …, sorted by ρ. The packets before the
break are in, all others out; in turn the next one after it may come in and the next one before
it may go out. Of the partial sets so made (states) only those are kept that no other beats in
rate and price at once, and whose bound, the rest taken at fractions, is below the best set found.
When none is left, the best is the cheapest.

Counted in whole numbers, so that no order of adding changes a verdict: prices in 1e-9 $/h, rates
in 1e-9 of the wanted rate, both rounded to the nearest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

STATES_MAX: Final = 400_000
"""Partial sets looked at, by default: about a second."""
_PRICE_UNITS: Final = 10**9
_RATE_UNITS: Final = 10**9


@dataclass(frozen=True, slots=True)
class Offer:
    """Machines of one kind: `usd_per_h` and `rate` of each while it is there, `count` of them.

    `rate` has the unit of the rate that is wanted. `availability` is the share of the time in
    which such a machine is there (spot): it works, and is paid, only then.
    """

    name: str
    usd_per_h: float
    rate: float
    count: int = 1
    availability: float = 1.0

    def __post_init__(self) -> None:
        for value, what in ((self.usd_per_h, "price"), (self.rate, "rate")):
            if not 0 <= value < math.inf:
                raise ValueError(f"offer {self.name}: {what} {value} is not 0 or more, and finite")
        if self.count < 0:
            raise ValueError(f"offer {self.name}: count {self.count} is below 0")
        if not 0 <= self.availability <= 1:
            raise ValueError(
                f"offer {self.name}: availability {self.availability} is not from 0 to 1"
            )

    @property
    def mean_usd_per_h(self) -> float:
        return self.usd_per_h * self.availability

    @property
    def mean_rate(self) -> float:
        return self.rate * self.availability


@dataclass(frozen=True, slots=True)
class OfferSet:
    """Machines to have, by offer; an offer of which none is taken is left out.

    `usd_per_h` and `rate` are means over the time in which machines are there.
    `bound_usd_per_h`: no set that reaches the wanted rate is cheaper; equal to `usd_per_h` when
    the set is proven the cheapest. `reaches` False: all machines together do not.
    """

    counts: Mapping[str, int]
    usd_per_h: float
    rate: float
    bound_usd_per_h: float
    reaches: bool
    reason: str
    num_states: int = 0

    @property
    def is_cheapest(self) -> bool:
        return self.reaches and self.bound_usd_per_h >= self.usd_per_h

    @property
    def gap(self) -> float:
        """Share of the price by which a cheaper set may exist."""
        if not self.usd_per_h:
            return 0.0
        return max(0.0, 1.0 - self.bound_usd_per_h / self.usd_per_h)


def cheapest_set(
    offers: Sequence[Offer], wanted_rate: float, *, states_max: int = STATES_MAX
) -> OfferSet:
    """The cheapest set of `offers` with at least `wanted_rate`, proven, or with the gap left.

    Names of offers are distinct. Where all of them do not reach it, the set is all of them.
    Raises ValueError for a rate that is no finite number.
    """
    pool = _Pool.of(offers, wanted_rate)
    whole = _trivial(pool)
    if whole is not None:
        return whole
    search = _Search(pool)
    search.run(states_max)
    counts, bound = search.best_counts, search.bound
    price = pool.price_of(counts)
    if bound >= price:
        reason = f"proven the cheapest ({search.num_states} partial sets looked at)"
    else:
        reason = (
            f"the best found when {states_max} partial sets had been looked at; a cheaper one "
            f"costs at least ${bound / _PRICE_UNITS:.6g} per hour"
        )
    return pool.offer_set(counts, bound, reason, search.num_states)


def greedy_set(offers: Sequence[Offer], wanted_rate: float) -> OfferSet:
    """By ρ, the lowest first, until the rate is reached (papers, section 3.4); the bound is that
    of the same with a fraction of the last machine."""
    pool = _Pool.of(offers, wanted_rate)
    whole = _trivial(pool)
    if whole is not None:
        return whole
    counts, bound = pool.greedy()
    return pool.offer_set(counts, bound, "by price per rate, the lowest first")


def _trivial(pool: _Pool) -> OfferSet | None:
    """Nothing if nothing is wanted, all of the pool if it reaches too little; else None."""
    if pool.wanted <= 0:
        return pool.offer_set([], 0, "nothing is wanted")
    counts = [kind.count for kind in pool.kinds]
    if pool.rate_of(counts) >= pool.wanted:
        return None
    rate = pool.wanted_rate * pool.rate_of(counts) / _RATE_UNITS
    reason = (
        f"all {sum(counts)} machines on offer that could help reach {rate:.4g} "
        f"of the wanted {pool.wanted_rate:.4g}"
    )
    return pool.offer_set(counts, pool.price_of(counts), reason, reaches=False)


@dataclass(frozen=True, slots=True)
class _Kind:
    """An offer in whole numbers; `place` is its index among the offers."""

    place: int
    price: int
    rate: int
    count: int

    @property
    def price_per_rate(self) -> float:
        return self.price / self.rate


@dataclass(frozen=True, slots=True)
class _Packet:
    """`count` machines of `kind`, taken together or not at all."""

    kind: int
    count: int
    price: int
    rate: int


@dataclass(frozen=True, slots=True)
class _Pool:
    """The offers that can help, by ρ, the lowest first, and what is wanted of them."""

    offers: Sequence[Offer]
    wanted_rate: float
    wanted: int
    kinds: list[_Kind]

    @classmethod
    def of(cls, offers: Sequence[Offer], wanted_rate: float) -> _Pool:
        if not math.isfinite(wanted_rate):
            raise ValueError(f"a rate of {wanted_rate} cannot be wanted")
        if len({offer.name for offer in offers}) < len(offers):
            raise ValueError("two offers have the same name")
        if wanted_rate <= 0:
            return cls(offers, wanted_rate, 0, [])
        unit = wanted_rate / _RATE_UNITS
        kinds = []
        for place, offer in enumerate(offers):
            rate = round(offer.mean_rate / unit)
            if not rate:
                continue
            enough = -(-_RATE_UNITS // rate)
            price = round(offer.mean_usd_per_h * _PRICE_UNITS)
            kinds.append(_Kind(place, price, rate, min(offer.count, enough)))
        kinds.sort(key=lambda kind: (kind.price_per_rate, -kind.rate))
        return cls(offers, wanted_rate, _RATE_UNITS, [kind for kind in kinds if kind.count])

    def price_of(self, counts: Sequence[int]) -> int:
        return sum(kind.price * count for kind, count in zip(self.kinds, counts, strict=True))

    def rate_of(self, counts: Sequence[int]) -> int:
        return sum(kind.rate * count for kind, count in zip(self.kinds, counts, strict=True))

    def greedy(self) -> tuple[list[int], int]:
        """(counts, lower bound of the price of any set that reaches what is wanted)."""
        counts = [0] * len(self.kinds)
        left, price = self.wanted, 0
        for index, kind in enumerate(self.kinds):
            whole = left // kind.rate
            if whole >= kind.count:
                counts[index] = kind.count
                left -= kind.rate * kind.count
                price += kind.price * kind.count
                if left:
                    continue
                break
            left -= whole * kind.rate
            counts[index] = whole + (left > 0)
            price += whole * kind.price + _up(left * kind.price, kind.rate)
            break
        return counts, price

    def packets(self) -> list[_Packet]:
        """Counts in powers of two and a rest, whose sums are all numbers from 0 to the count."""
        found = []
        for index, kind in enumerate(self.kinds):
            left, size = kind.count, 1
            while left:
                size = min(size, left)
                found.append(_Packet(index, size, size * kind.price, size * kind.rate))
                left, size = left - size, 2 * size
        return found

    def offer_set(
        self,
        counts: Sequence[int],
        bound: int,
        reason: str,
        num_states: int = 0,
        *,
        reaches: bool = True,
    ) -> OfferSet:
        by_place = sorted(zip(self.kinds, counts, strict=True), key=lambda pair: pair[0].place)
        taken = [(self.offers[kind.place], count) for kind, count in by_place if count]
        price = self.price_of(counts)
        usd_per_h = math.fsum(offer.mean_usd_per_h * count for offer, count in taken)
        return OfferSet(
            counts={offer.name: count for offer, count in taken},
            usd_per_h=usd_per_h,
            rate=math.fsum(offer.mean_rate * count for offer, count in taken),
            bound_usd_per_h=usd_per_h if bound >= price else bound / _PRICE_UNITS,
            reaches=reaches,
            reason=reason,
            num_states=num_states,
        )


_State = tuple[int, int, int]
"""(rate, price, index of the decision that made it)."""


@dataclass(slots=True)
class _Search:
    """The growing core; `bound` and `best_counts` are valid whenever `run` ends."""

    pool: _Pool
    bound: int = 0
    best_counts: list[int] = field(default_factory=list)
    num_states: int = 0
    _packets: list[_Packet] = field(default_factory=list)
    _break: int = 0
    _best_price: int = 0
    _best_end: int = -1
    _decisions: list[tuple[int, int]] = field(default_factory=list)

    def run(self, states_max: int) -> None:
        """Until the best is proven, or `states_max` states were made."""
        self._packets = self.pool.packets()
        self.best_counts, self.bound = self.pool.greedy()
        self._best_price = self.pool.price_of(self.best_counts)
        step = math.gcd(*(packet.price for packet in self._packets)) or 1
        states = [self._break_state()]
        for packet, sign, first_out, first_in in self._turns():
            states = self._widened(states, packet, sign)
            states = self._pruned(states, first_out, first_in, step)
            self.num_states += len(states)
            if not states or self.num_states > states_max:
                break
        self._read_best()
        if not states:
            self.bound = self._best_price
        self.bound = min(self.bound, self._best_price)

    def _break_state(self) -> _State:
        """The longest row of packets from the first on that is not enough."""
        rate = price = 0
        for index, packet in enumerate(self._packets):
            if rate + packet.rate >= self.pool.wanted:
                self._break = index
                break
            rate, price = rate + packet.rate, price + packet.price
        self._decisions.append((-1, -1))
        return rate, price, 0

    def _turns(self) -> Iterator[tuple[int, int, int, int]]:
        """(packet, +1 in or -1 out, next that may come in, next that may go out, -1: none)."""
        out, into, total = self._break - 1, self._break, len(self._packets)
        while into < total or out >= 0:
            if into < total:
                into += 1
                yield into - 1, 1, into if into < total else -1, out
            if out >= 0:
                out -= 1
                yield out + 1, -1, into if into < total else -1, out

    def _widened(self, states: list[_State], index: int, sign: int) -> list[_State]:
        """Each state as it is, and with the packet in or out: those that no other beats, by rate,
        the highest first."""
        packet, decisions = self._packets[index], self._decisions
        rate, price = sign * packet.rate, sign * packet.price
        first = len(decisions)
        more = [(s[0] + rate, s[1] + price, first + i) for i, s in enumerate(states)]
        decisions.extend((s[2], index) for s in states)
        both = states + more
        both.sort(reverse=True)
        kept: list[_State] = []
        lowest = math.inf
        for state in both:
            if state[1] < lowest:
                if kept and kept[-1][0] == state[0]:
                    kept.pop()
                kept.append(state)
                lowest = state[1]
        return kept

    def _pruned(self, states: list[_State], next_in: int, next_out: int, step: int) -> list[_State]:
        """The states from which a set cheaper than the best may still come, which is a multiple
        of `step`; sets the best and the bound."""
        wanted = self.pool.wanted
        for rate, price, made in states:
            if rate >= wanted and price < self._best_price:
                self._best_price, self._best_end = price, made
        limit = self._best_price - step
        into = self._packets[next_in] if next_in >= 0 else None
        out = self._packets[next_out] if next_out >= 0 else None
        kept, lowest = [], self._best_price
        for state in states:
            spare = state[0] - wanted
            if spare < 0:
                if into is None:
                    continue
                bound = state[1] - (spare * into.price) // into.rate
            elif out is None:
                continue
            else:
                bound = state[1] - (spare * out.price) // out.rate
            if bound <= limit:
                kept.append(state)
                lowest = min(lowest, bound)
        self.bound = max(self.bound, lowest)
        return kept

    def _read_best(self) -> None:
        """The counts of the best set, from the decisions that led to it."""
        if self._best_end < 0:
            return
        packets = self._packets
        is_in = [index < self._break for index in range(len(packets))]
        made = self._best_end
        while made > 0:
            made, index = self._decisions[made]
            is_in[index] = not is_in[index]
        counts = [0] * len(self.pool.kinds)
        for packet, taken in zip(packets, is_in, strict=True):
            counts[packet.kind] += packet.count if taken else 0
        self.best_counts = counts


def _up(a: int, b: int) -> int:
    return -(-a // b)
