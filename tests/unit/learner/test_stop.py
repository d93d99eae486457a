"""Signals: noted while the learner computes, and the end of a wait for others."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from echo2_learner.stop import StopRequested, StopSignal


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_during_work_is_only_noted() -> None:
    with StopSignal() as stop:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        assert stop.requested == "SIGTERM"


def test_the_wait_that_follows_ends_at_once() -> None:
    with StopSignal() as stop:
        send(signal.SIGINT)
        with pytest.raises(StopRequested, match="SIGINT"), stop.interruptible():
            pytest.fail("the wait began")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait_under_way(number: int) -> None:
    with StopSignal() as stop:
        threading.Timer(0.05, send, [number]).start()
        with pytest.raises(StopRequested), stop.interruptible():
            threading.Event().wait(60)
        assert stop.requested == signal.Signals(number).name


def test_a_second_interrupt_ends_the_process() -> None:
    with StopSignal():
        send(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt) as caught:
            send(signal.SIGINT)
        assert not isinstance(caught.value, StopRequested)


def test_a_patient_wait_goes_on_after_a_signal_but_not_for_ever() -> None:
    with StopSignal() as stop:
        with stop.patient(60.0):
            send(signal.SIGTERM)
        with pytest.raises(StopRequested), stop.patient(0.05):
            threading.Event().wait(60)
        with stop.patient(0.05):
            pass
        assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with StopSignal() as stop:
        threading.Timer(0.01, send, [signal.SIGINT]).start()
        with pytest.raises(StopRequested), stop.patient(0.05):
            threading.Event().wait(60)


def test_afterwards_signals_do_what_they_did() -> None:
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopSignal():
        assert signal.getsignal(signal.SIGTERM) != before[1]
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
