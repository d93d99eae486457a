"""One fetch from several sources: whatever they do, in any order, nothing is lost or asked twice.

The machine plays the network and the verifier. What it knows itself (who was asked for what,
what is here) is held against every decision; in the end a live, honest origin alone finishes.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from echo2.core.relay_fetch import ORIGIN, Ask, Cancel, Dial, Limits, RelayFetch

CHUNK_BYTES = 1000
PEERS = ("w-1", "w-2", "w-3")
NAMES = (*PEERS, ORIGIN)
STRANGER = "w-9"

ways = st.lists(st.sampled_from(PEERS), unique=True, max_size=3)
names = st.sampled_from(NAMES)
anybody = st.sampled_from((*NAMES, STRANGER))
places = st.integers(0, 99)


class FetchMachine(RuleBasedStateMachine):
    @initialize(
        lots=st.lists(st.tuples(ways, st.integers(0, 12)), min_size=1, max_size=4),
        window=st.integers(1, 6),
        faults_max=st.integers(1, 3),
        planned_s=st.sampled_from([0.0, 0.5, 5.0, 100.0]),
        began=st.sampled_from([0.0, 1234.5]),
    )
    def begin(
        self,
        lots: list[tuple[list[str], int]],
        window: int,
        faults_max: int,
        planned_s: float,
        began: float,
    ) -> None:
        self.now = began
        self.limits = Limits(window, faults_max=faults_max)
        total = sum(count for _, count in lots)
        self.way_of: dict[int, list[str]] = {}
        cut = []
        for way, count in lots:
            chunks = list(range(len(self.way_of), len(self.way_of) + count))
            self.way_of.update(dict.fromkeys(chunks, way))
            cut.append((way, chunks))
        self.fetch = RelayFetch(
            cut, chunk_bytes=CHUNK_BYTES, limits=self.limits, now=began, planned_s=planned_s
        )
        self.missing = set(range(total))
        self.asked: dict[int, str] = {}
        self.under_way: list[tuple[str, int]] = []
        """Requests that a peer may still answer, whether or not they were taken back."""
        self.checking: list[tuple[str, int]] = []
        self.faults = dict.fromkeys(NAMES, 0)
        self.up: set[str] = set()
        self.lied: set[tuple[str, int]] = set()

    # ---------------------------------------------------------------------- decisions

    @rule()
    def advance(self) -> None:
        for effect in self.fetch.advance(self.now):
            match effect:
                case Ask(source, indexes):
                    self._check_ask(source, indexes)
                case Cancel(source, indexes):
                    assert indexes
                    for index in indexes:
                        if self.faults[source] < self.limits.faults_max or source == ORIGIN:
                            assert self.asked.pop(index) == source
                case Dial(source):
                    assert source not in self.up
        counts = [list(self.asked.values()).count(name) for name in NAMES]
        assert max(counts) <= self.limits.window_chunks

    def _check_ask(self, source: str, indexes: tuple[int, ...]) -> None:
        assert indexes
        assert source in self.up
        assert self.fetch.sources[source].rests_until <= self.now
        if source != ORIGIN:
            assert self.faults[source] < self.limits.faults_max
        for index in indexes:
            assert index in self.missing
            assert index not in [i for _, i in self.checking]
            assert index not in self.asked
            assert source == ORIGIN or source in self.way_of[index]
            assert source == ORIGIN or (source, index) not in self.lied
            self.asked[index] = source
            self.under_way.append((source, index))

    def _lets_off(self, name: str) -> None:
        """Nothing is asked of it any more."""
        self.asked = {index: other for index, other in self.asked.items() if other != name}

    @rule()
    def advance_when_due(self) -> None:
        due = self.fetch.next_at()
        if due is not None:
            self.now = max(self.now, due)
            self.advance()

    @rule(seconds=st.one_of(st.floats(0, 3), st.sampled_from([1.5, 10.0, 60.0, 3600.0])))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    # ---------------------------------------------------------------------- the peers

    @rule(name=anybody)
    def connect(self, name: str) -> None:
        self.fetch.connected(name, self.now)
        if name in self.fetch.sources:
            self.up.add(name)

    @rule(name=anybody, reached=st.booleans())
    def disconnect(self, name: str, reached: bool) -> None:
        self.up.discard(name)
        if reached:
            self.fetch.disconnected(name, self.now)
        else:
            self.fetch.unreachable(name, self.now)
        self._lets_off(name)

    @rule(name=anybody)
    def refuse(self, name: str) -> None:
        self.fetch.refused(name, self.now)
        self._lets_off(name)

    @rule(name=anybody, num_held=st.integers(0, 3))
    def live(self, name: str, num_held: int) -> None:
        self.fetch.alive(name, num_held, self.now)

    @precondition(lambda self: self.under_way)
    @rule(place=places, again=st.booleans())
    def answer(self, place: int, again: bool) -> None:
        """Also late, when the request was taken back, and twice."""
        place %= len(self.under_way)
        name, index = self.under_way[place] if again else self.under_way.pop(place)
        self._arrive(name, index)

    @rule(name=anybody, index=st.integers(0, 60))
    def send_unasked(self, name: str, index: int) -> None:
        self._arrive(name, index)

    def _arrive(self, name: str, index: int) -> None:
        other = self.asked.get(index)
        cancels = self.fetch.arrived(name, index, CHUNK_BYTES, self.now)
        checked = [i for _, i in self.checking]
        if index not in self.missing or index in checked or name not in self.fetch.sources:
            assert cancels is None
        if cancels is None:
            assert other != name
            return
        assert cancels == ([Cancel(other, (index,))] if other not in (None, name) else [])
        self.asked.pop(index, None)
        self.checking.append((name, index))

    # --------------------------------------------------------------------- the verifier

    @precondition(lambda self: self.checking)
    @rule(place=places, good=st.sampled_from([True, True, True, False]))
    def check(self, place: int, good: bool) -> None:
        name, index = self.checking.pop(place % len(self.checking))
        if good:
            self.fetch.verified(index)
            self.missing.remove(index)
            return
        self.faults[name] += 1
        self.lied.add((name, index))
        goes_on = self.fetch.wrong(index, self.now)
        if name != ORIGIN and self.faults[name] >= self.limits.faults_max:
            self._lets_off(name)
        assert goes_on is (name != ORIGIN or self.faults[name] < self.limits.faults_max)

    # ------------------------------------------------------------------------- always

    @invariant()
    def nothing_is_lost(self) -> None:
        if not hasattr(self, "fetch"):
            return
        fetch = self.fetch
        assert fetch.num_missing == len(self.missing)
        assert fetch.is_done is (not self.missing)
        asked = {index: s.name for s in fetch.sources.values() for index in s.asked}
        assert asked == self.asked
        assert len(asked) == fetch.num_asked
        assert set(fetch.sources) <= set(NAMES)
        for name, source in fetch.sources.items():
            assert source.up is (name in self.up)
            assert source.num_faults == self.faults[name]
            assert not source.asked or source.up
            assert (source.busy_since is None) is (not source.asked)
            assert source.name == ORIGIN or source.trusted(self.limits) or not source.asked

    def teardown(self) -> None:
        """From any state on, a live and honest origin alone finishes."""
        if not hasattr(self, "fetch"):
            return
        while self.checking:
            self.check(place=0, good=True)
        for name in PEERS:
            self.disconnect(name, reached=True)
        self.connect(ORIGIN)
        for _ in range(400):
            if self.fetch.is_done:
                assert self.fetch.next_at() is None or self.fetch.num_asked == 0
                return
            before = len(self.asked)
            self.advance()
            for index in sorted(self.fetch.sources[ORIGIN].asked):
                self._arrive(ORIGIN, index)
            while self.checking:
                self.check(place=0, good=True)
            due = self.fetch.next_at()
            if due is None:
                assert before or self.fetch.is_done or not self.fetch.num_asked
                due = self.now
            self.now = max(self.now, due)
        raise AssertionError(f"{self.fetch.num_missing} chunks never came")


TestFetch: Any = FetchMachine.TestCase
TestFetch.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
