"""Standing of one relay: when it is probed, whether it may forward, how often it may report."""

from __future__ import annotations

import pytest

from echo2.core.relay_standing import (
    FAULTS_MAX,
    PROBE_PATIENCE_S,
    PROBE_WAIT_MAX_S,
    REPORTS_BURST,
    Standing,
    host_and_port,
    is_loopback,
)
from echo2.types import PeerId

HERE = "tcp://10.0.0.1:7000"
A, B = PeerId("a"), PeerId("b")


def probed(*, ok: bool = True, now: float = 0.0) -> Standing:
    standing = Standing()
    standing.arrive(HERE, was_here=False, now=now)
    standing.ask(now)
    standing.answer(ok=ok, rtt_s=0.01, reason="" if ok else "no")
    return standing


def test_a_probe_that_is_never_answered_is_asked_again() -> None:
    standing = Standing()
    standing.arrive(HERE, was_here=False, now=5.0)
    assert standing.due_at == 5.0
    standing.ask(5.0)
    assert standing.is_asked(5.0 + PROBE_PATIENCE_S - 0.1)
    assert standing.due_at == 5.0 + PROBE_PATIENCE_S
    assert not standing.is_asked(5.0 + PROBE_PATIENCE_S)


def test_hellos_cannot_hurry_probes() -> None:
    standing = probed(now=10.0)
    standing.arrive("tcp://10.0.0.2:7000", was_here=True, now=10.2)
    assert standing.due_at == 11.0


def test_waits_double_up_to_a_most_and_start_anew_after_a_calm_time() -> None:
    standing, now = probed(ok=False), 0.0
    for wait in (2.0, 4.0, 8.0):
        assert standing.due_at == now + wait
        now += wait
        standing.ask(now)
        standing.answer(ok=False, rtt_s=None, reason="no")
    standing.tries = 40
    standing.answer(ok=False, rtt_s=None, reason="no")
    assert standing.due_at == now + PROBE_WAIT_MAX_S
    standing.ask(now + 3 * PROBE_WAIT_MAX_S)
    assert standing.tries == 1


def test_who_comes_back_is_probed_again_and_who_never_left_is_not() -> None:
    standing = probed()
    standing.arrive(HERE, was_here=True, now=50.0)
    assert (standing.accepts, standing.due_at) == (True, None)
    standing.leave()
    standing.arrive(HERE, was_here=False, now=60.0)
    assert (standing.accepts, standing.due_at) == (False, 60.0)


def test_silence_counts_only_with_a_probe_that_fails_after_it() -> None:
    standing = probed()
    standing.call_silent(30.0)
    assert (standing.due_at, standing.forward_verdict(30.0).ok) == (30.0, True)
    standing.ask(30.0)
    standing.answer(ok=False, rtt_s=None, reason="it was not reached")
    verdict = standing.forward_verdict(30.0)
    assert (verdict.ok, verdict.reason) == (False, "it fell silent, and it was not reached")
    standing.ask(40.0)
    standing.answer(ok=True, rtt_s=0.01, reason="")
    assert standing.forward_verdict(40.0)


def test_two_receivers_or_one_that_repeats_itself_cost_the_trust() -> None:
    standing = Standing()
    assert not standing.call_faulty(A, 1)
    assert standing.call_faulty(B, 1)
    assert not standing.call_faulty(B, 1)  # it is known already
    assert standing.forward_verdict(0.0).reason == "it sent wrong chunks to a, b"
    other = Standing()
    assert [other.call_faulty(A, 1) for _ in range(FAULTS_MAX)] == [False, False, True]


def test_reports_are_a_few_a_second() -> None:
    standing = Standing()
    assert sum(standing.may_report(100.0) for _ in range(50)) == REPORTS_BURST
    assert standing.reports_ignored == 50 - REPORTS_BURST
    assert sum(standing.may_report(100.0 + i / 100) for i in range(101)) == pytest.approx(4, abs=1)


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [("tcp://a.b:1", "a.b", 1), ("tcp://[::1]:22", "::1", 22), ("tcp://10.0.0.1:0", "10.0.0.1", 0)],
)
def test_an_endpoint_is_a_host_and_a_port(endpoint: str, host: str, port: int) -> None:
    assert host_and_port(endpoint) == (host, port)


@pytest.mark.parametrize(
    ("host", "found"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("[::1]", True), ("Localhost.", True),
     ("::ffff:127.0.0.1", True), ("10.0.0.1", False), ("example.org", False), ("", False)],
)  # fmt: skip
def test_loopback_in_all_its_forms(host: str, found: bool) -> None:
    assert is_loopback(host) is found
