"""When do a worker's logprobs differ too much to be an honest worker's? Pure and sequential.

What is judged is |logprob of the learner - of the worker| at the very version that sampled, so
that neither staleness nor the speed of the fleet plays a part.

    observation   compared groups of one worker, put together until they have `tokens_min` tokens
    floor         of the precision class that the worker declared
    centre        median of what is typical (the median of the newest observations) of each other
                  worker (of a large fleet, of each); spread: 1.4826 times the median distance from
                  it, at least a tenth of it
    odd           with FLEET_MIN others and more: above max(floor, centre + factor * spread);
                  with fewer, where no centre can be trusted: above ALONE_FACTOR * floor
    S             S + 1 after an odd observation, max(0, S - LEAK) after another (Page's sum)
    suspected     S >= needed

A suspicion is `confirmed` when somebody else shows that the learner is not at fault: FLEET_MIN
others with a centre, or one other worker that is not odd itself. So the only worker of a run is
never condemned by its logprobs, and one of two only if the other agrees with the learner.

The number of groups until a worker is suspected that is odd in a share f of its observations:
with f = 1 exactly `needed` observations, else about needed / (f - (1 - f) * LEAK) of them; below
f = LEAK / (1 + LEAK), a tenth, never for sure. Leaves what follows to others.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from echo2.core.precision import TOLERANCES
from echo2.types import GroupId, GroupMismatch, PeerId

LEAK: Final = 0.1
FLEET_MIN: Final = 3
ALONE_FACTOR: Final = 4.0
NEWEST: Final = 16
"""Observations of a worker that say what is typical of it, and odd ones kept as evidence."""
WORKERS_MAX: Final = 10_000
MAD_TO_SIGMA: Final = 1.4826
SPREAD_SHARE_MIN: Final = 0.1
FLEET_LARGE: Final = 64
"""So many are a fleet whose median no single worker moves: then it is that of all."""


class EvidenceSum:
    """Page's cumulative sum: what speaks against somebody adds up, and fades."""

    def __init__(self) -> None:
        self.value = 0.0

    def note(self, *, odd: bool) -> float:
        self.value = self.value + 1.0 if odd else max(0.0, self.value - LEAK)
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class MismatchRule:
    """`floor` None: that of the worker's class, and `run_precision` for a class that is not
    known or that the run does not use ("none": nothing is odd)."""

    needed: int = 3
    tokens_min: int = 64
    factor: float = 6.0
    floor: float | None = None
    run_precision: str = "none"

    def floor_of(self, precision: str) -> float:
        if self.run_precision == "none":
            return TOLERANCES["none"]
        if self.floor is not None:
            return self.floor
        known = precision if precision in TOLERANCES and precision != "none" else ""
        return TOLERANCES[known or self.run_precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """`threshold`: what it was held against; `centre` and `spread` of the fleet, None where too
    few others were compared."""

    groups: tuple[GroupId, ...]
    num_tokens: int
    diff_mean: float
    threshold: float
    centre: float | None
    spread: float | None

    @property
    def is_odd(self) -> bool:
        return self.diff_mean > self.threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    worker: PeerId
    precision: str
    odd: tuple[Observation, ...]
    confirmed: bool
    reason: str


@dataclass(slots=True)
class _Record:
    """What is known of one worker."""

    pool: list[GroupMismatch] = field(default_factory=list)
    newest: deque[float] = field(default_factory=lambda: deque(maxlen=NEWEST))
    typical: float = 0.0
    odd: deque[Observation] = field(default_factory=lambda: deque(maxlen=NEWEST))
    sum: EvidenceSum = field(default_factory=EvidenceSum)
    precision: str = ""

    def add(self, diff_mean: float) -> None:
        self.newest.append(diff_mean)
        self.typical = median(self.newest)


class MismatchWatch:
    """Of all workers whose groups were compared; those that were not for longest are forgotten
    beyond WORKERS_MAX."""

    def __init__(self, rule: MismatchRule) -> None:
        self.rule = rule
        self._records: OrderedDict[PeerId, _Record] = OrderedDict()

    def note(
        self,
        compared: Iterable[tuple[PeerId, GroupMismatch]],
        precision_of: Callable[[PeerId], str],
    ) -> list[Suspicion]:
        """What was compared in one learner step, each group with the worker that sampled it.
        Suspicions that hold now, new or not."""
        ready = [
            (peer, observed)
            for peer, mismatch in compared
            if (observed := self._pool(peer, mismatch)) is not None
        ]
        for peer, observed in ready:  # first all numbers, so that their order decides nothing
            record = self._records[peer]
            record.precision = precision_of(peer)
            record.add(_mean(observed))
        suspected: dict[PeerId, Suspicion] = {}
        known = {peer: record.typical for peer, record in self._records.items() if record.newest}
        fleet = _centre(known.values()) if len(known) >= FLEET_LARGE else None
        for peer, observed in ready:
            others = fleet or _centre(t for other, t in known.items() if other != peer)
            found = self._judge(peer, observed, others)
            before = suspected.get(peer)
            if found is not None and (before is None or not before.confirmed):
                suspected[peer] = found  # the first that is enough
        return list(suspected.values())

    def fleet(self) -> tuple[float, float] | None:
        """(centre, floor of the run's class), with FLEET_MIN workers or more."""
        typical = [record.typical for record in self._records.values() if record.newest]
        if len(typical) < FLEET_MIN:
            return None
        return median(typical), self.rule.floor_of(self.rule.run_precision)

    def forget(self, worker: PeerId) -> None:
        self._records.pop(worker, None)

    def _pool(self, peer: PeerId, mismatch: GroupMismatch) -> list[GroupMismatch] | None:
        """Groups that make an observation together, once they have tokens enough."""
        record = self._records.setdefault(peer, _Record())
        self._records.move_to_end(peer)
        if len(self._records) > WORKERS_MAX:
            self._records.popitem(last=False)
        record.pool.append(mismatch)
        if sum(each.num_tokens for each in record.pool) < self.rule.tokens_min:
            return None
        pool, record.pool = record.pool, []
        return pool

    def _judge(
        self, peer: PeerId, pool: Sequence[GroupMismatch], others: tuple[float, float] | None
    ) -> Suspicion | None:
        record = self._records[peer]
        floor = self.rule.floor_of(record.precision)
        threshold = ALONE_FACTOR * floor
        if others is not None:
            threshold = max(floor, others[0] + self.rule.factor * others[1])
        observation = Observation(
            groups=tuple(each.group for each in pool),
            num_tokens=sum(each.num_tokens for each in pool),
            diff_mean=_mean(pool),
            threshold=threshold,
            centre=others[0] if others is not None else None,
            spread=others[1] if others is not None else None,
        )
        if observation.is_odd:
            record.odd.append(observation)
        value = record.sum.note(odd=observation.is_odd)
        if value < self.rule.needed or not observation.is_odd:
            return None
        confirmed = others is not None or self._another_agrees(peer)
        return Suspicion(
            worker=peer,
            precision=record.precision,
            odd=tuple(record.odd),
            confirmed=confirmed,
            reason=_reason(observation, record.precision, len(record.odd), confirmed=confirmed),
        )

    def _another_agrees(self, peer: PeerId) -> bool:
        return any(
            record.typical <= ALONE_FACTOR * self.rule.floor_of(record.precision)
            for other, record in self._records.items()
            if other != peer and record.newest
        )


def _centre(typical: Iterable[float]) -> tuple[float, float] | None:
    """(centre, spread); None where too few were compared."""
    values = list(typical)
    if len(values) < FLEET_MIN:
        return None
    centre = median(values)
    spread = MAD_TO_SIGMA * median(abs(value - centre) for value in values)
    return centre, max(spread, SPREAD_SHARE_MIN * centre)


def _mean(pool: Sequence[GroupMismatch]) -> float:
    tokens = sum(each.num_tokens for each in pool)
    return sum(each.diff_mean * each.num_tokens for each in pool) / tokens


def _reason(last: Observation, precision: str, num_odd: int, *, confirmed: bool) -> str:
    against = (
        f"that of {precision} alone"
        if last.centre is None
        else f"the fleet's centre {last.centre:.3g}, spread {last.spread:.3g}"
    )
    text = (
        f"mean |logprob difference| {last.diff_mean:.3g} over {last.num_tokens} tokens of "
        f"{', '.join(last.groups[:4])}, {num_odd} observations above their bound; at most "
        f"{last.threshold:.3g} is allowed ({against})"
    )
    if confirmed:
        return text
    return f"{text}; no other worker shows that the learner is right, so it is only reported"
