"""Whatever workers with relays do, in whatever order: what they are told of each other holds.

Hypothesis plays hellos, goodbyes, probes, reports and publications against `CoordinatorState`.
"""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.core.coordinator import CoordinatorState
from echo2.core.effects import Effect, Persist, ProbeRelay, Send
from echo2.core.events import Event, Persisted, Received, RelayProbed, Tick
from echo2.core.settings import CoordinatorSettings
from echo2.core.status import status
from echo2.errors import RemoteProtocolError
from echo2.messages import (
    CHUNK_MAX_BYTES,
    PROTOCOL,
    Goodbye,
    LearnerHello,
    RelayPeers,
    RelayReport,
    VersionAnnounced,
    VersionInstalled,
    VersionPublished,
    WorkerHello,
)
from echo2.types import LinkReport, PeerId, Version

NAMES = [PeerId(f"w{i}") for i in range(6)]
LEARNER = PeerId("learner")
CHUNKS = 50

names = st.sampled_from(NAMES)
links = st.lists(
    st.builds(
        LinkReport,
        st.sampled_from([*NAMES, "origin", "stranger"]),
        st.integers(0, 10**10),
        st.floats(0, 1e4),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    max_size=3,
)
steps = st.one_of(
    st.tuples(st.just("hello"), names, st.booleans()),
    st.tuples(st.just("goodbye"), names),
    st.tuples(st.just("answer"), st.booleans()),
    st.tuples(st.just("report"), names, links, st.integers(0, CHUNKS + 1)),
    st.tuples(st.just("publish")),
    st.tuples(st.just("install"), names),
    st.tuples(st.just("tick"), st.sampled_from([0.0, 0.1, 0.7, 6.0, 20.0])),
)


class Play:
    def __init__(self, *, cap_mbit: float) -> None:
        self.core = CoordinatorState(
            CoordinatorSettings(
                run_id="run", staleness_max=0, host="0.0.0.0", origin_uplink_mbit=cap_mbit
            )
        )
        self.now = 0.0
        self.probes: list[ProbeRelay] = []
        self.lists: dict[PeerId, set[str]] = {}
        self.told: dict[PeerId, list[VersionAnnounced]] = {}
        self.step = -1
        self.feed(
            Received(
                LEARNER, LearnerHello(protocol=PROTOCOL, echo2_version="0", name="l", resume_step=0)
            )
        )

    def feed(self, event: Event) -> None:
        state = self.core.state
        before = _seen(self.core) if _is_report(event) else None
        try:
            effects = self.core.handle(event, self.now)
        except RemoteProtocolError:
            assert before is None or _seen(self.core) == before
            return
        lists = [
            e.peer for e in effects if isinstance(e, Send) and isinstance(e.message, RelayPeers)
        ]
        assert len(lists) == len(set(lists))
        for effect in effects:
            self.carry_out(effect)
        assert set(state.relays.stale) <= set(state.members.workers)

    def carry_out(self, effect: Effect) -> None:
        match effect:
            case Persist(record_id):
                self.feed(Persisted(record_id))
            case ProbeRelay():
                self.probes.append(effect)
            case Send(peer, RelayPeers() as message):
                self.lists[peer] = {found.name for found in message.peers}
                assert peer in self.lists[peer]
            case Send(peer, VersionAnnounced() as message):
                self.check(peer, message)
                self.told.setdefault(peer, []).append(message)
            case _:
                pass

    def check(self, peer: PeerId, message: VersionAnnounced) -> None:
        relays, members = self.core.state.relays, self.core.state.members
        if message.stripes:
            assert sum(stripe.num_chunks for stripe in message.stripes) == CHUNKS
        sources = {name for stripe in message.stripes for name in stripe.sources}
        assert peer not in sources
        assert peer not in message.serves
        assert sources | set(message.serves) <= (
            self.lists.get(peer, set()) if sources else set(NAMES)
        )
        again = any(known.version == message.version for known in self.told.get(peer, ()))
        for name in sources if not again else ():
            source = members.get(PeerId(name))
            assert source is not None
            assert relays.has_relay(source)
            assert not relays.standing(source.peer).distrusted

    def act(self, step: tuple[Any, ...]) -> None:
        state = self.core.state
        match step:
            case "hello", name, on:
                self.lists.pop(name, None)
                self.told.pop(name, None)
                self.feed(Received(name, _hello(name, on=on)))
            case "goodbye", name:
                self.feed(Received(name, Goodbye(reason="bye")))
            case "answer", ok:
                for probe in self.probes[:1]:
                    self.probes.remove(probe)
                    rtt_s = 0.01 if ok else None
                    self.feed(
                        RelayProbed(probe.peer, probe.endpoint, ok, rtt_s, "" if ok else "no")
                    )
            case "report", name, found, missing:
                digest = _digest(max(0, self.step))
                self.feed(
                    Received(
                        name,
                        RelayReport(
                            manifest_digest=digest,
                            num_chunks=CHUNKS,
                            num_missing=missing,
                            links=tuple(found),
                        ),
                    )
                )
            case ("publish",):
                self.step += 1
                state.step = self.step
                self.feed(Received(LEARNER, _published(self.step)))
            case "install", name:
                version = Version(1, max(0, self.step))
                self.feed(
                    Received(
                        name,
                        VersionInstalled(
                            version=version,
                            manifest_digest=_digest(version.step),
                            fetch_s=0,
                            install_s=0,
                            pause_s=0,
                        ),
                    )
                )
            case "tick", seconds:
                self.now += seconds
                self.feed(Tick())


def _seen(core: CoordinatorState) -> Any:
    relays = core.state.relays
    shown = status(core.state, "")
    for worker in shown["workers"]:
        worker.pop("silent_s"), worker.pop("state")
    shown.pop("waits")
    return copy.deepcopy((shown, relays.stale, relays.listed, relays.standings, relays.rates.hosts))


def _is_report(event: Event) -> bool:
    return isinstance(event, Received) and isinstance(event.message, RelayReport)


def _digest(step: int) -> str:
    return f"{step:064x}"


def _hello(name: PeerId, *, on: bool) -> WorkerHello:
    return WorkerHello(
        protocol=PROTOCOL,
        echo2_version="0",
        name=name,
        engine="null",
        precision="none",
        on_update="continue",
        environment="null",
        slots=1,
        relay_endpoint=f"tcp://10.0.0.{name[1:]}:7000" if on else "",
        relay_key=(name * 40)[:40] if on else "",
    )


def _published(step: int) -> VersionPublished:
    return VersionPublished(
        version=Version(1, step),
        manifest_digest=_digest(step),
        assets_digest="",
        num_bytes=CHUNKS * CHUNK_MAX_BYTES,
        origin="tcp://10.0.0.99:1",
        origin_key="",
        final=True,
    )


@settings(max_examples=100)
@given(st.lists(steps, max_size=30), st.sampled_from([0.0, 20.0]))
def test_what_workers_are_told_of_each_other_holds(played: list[Any], cap_mbit: float) -> None:
    play = Play(cap_mbit=cap_mbit)
    for name in NAMES[:3]:
        play.act(("hello", name, True))
    for step in played:
        play.act(step)
        play.feed(Tick())
